"""A rank in DeepSpeed's engine: `torchrun --nproc-per-node=2 deepspeed_ranks.py STAGE`, compared with one process."""

from __future__ import annotations

import sys

import deepspeed
import torch
from torch import distributed
from torch_helpers import everything, mlp, near, rows

from cafin_cupy.adapters.torch import AdaFisher


def main(stage: int) -> None:
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # it would be compiled
    deepspeed.init_distributed("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    model = mlp("cpu")
    optimizer = AdaFisher(model, TCov=2)
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    alone = AdaFisher(mlp("cpu"), TCov=2, dist=False)
    for x in rows("cpu", 5, 6 * ranks):
        engine.backward(engine(x.tensor_split(ranks)[rank]).square().mean())
        engine.step()
        alone.zero_grad()
        alone.model(x).square().mean().backward()
        alone.step()
    got, want = everything(optimizer), everything(alone)
    for name, value in want.items():
        if isinstance(value, torch.Tensor):
            near(got[name], value, name, 1e-5)  # float32, five steps
    print(f"rank {rank} is one process after {optimizer.steps} steps", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
