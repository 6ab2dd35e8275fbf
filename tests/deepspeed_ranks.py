"""A rank in DeepSpeed's engine: `torchrun --nproc-per-node=2 deepspeed_ranks.py FOLDER`, compared with one process that
has the whole batch."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor, distributed, nn
from torch_helpers import loss_of, mlp, near, rows

from cafin_cupy import CafinError
from cafin_cupy.adapters.torch import AdaFisher, AdaFisherW

BATCH, STEPS = 8, 5  # a rank's, which micro-batches divide
FLOAT32 = 1e-5  # sums in another order, five steps long
BFLOAT16 = 4e-2  # weights and gradients of 8 bits, which the ranks round by themselves; factors follow their squares


class Case(NamedTuple):
    """What a run of the engine is configured for."""

    stage: int
    micro: int = 1
    kind: type[AdaFisher] = AdaFisher
    options: dict[str, Any] = {}  # noqa: RUF012
    config: dict[str, Any] = {}  # noqa: RUF012
    scale: float = 1.0  # of the loss


GROUPS = [{"params": ["*.bias"], "weight_decay": 0.0, "lr": 5e-4}]
BF16 = {"bf16": {"enabled": True}}
SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
PAPER = {"averaging": "paper", "weight_decay": 0.1}
CASES = {
    "stage 0": Case(0),
    "stage 1": Case(1, options={"weight_decay": 0.1}),
    "stage 2": Case(2, kind=AdaFisherW, options=PAPER),
    "stage 1, accumulation and clipping": Case(1, micro=2, config={"gradient_clipping": 0.1}),
    "stage 2, accumulation and clipping": Case(2, micro=2, config={"gradient_clipping": 0.1}),
    "stage 2, steep": Case(2, scale=4.0, config={"gradient_clipping": 0.0}),  # it would clip to a norm of 1
    "stage 1, groups": Case(1, options={**PAPER, "param_groups": GROUPS}),
    "stage 2, aligned": Case(2, config={"zero_optimization": {"parameter_alignment": True, "overlap_comm": True}}),
    "stage 2, groups": Case(2, kind=AdaFisherW, options={"weight_decay": 0.1, "param_groups": GROUPS}),
    "stage 1, bf16": Case(1, options=PAPER, config=BF16),
    "stage 2, bf16": Case(2, micro=2, config=BF16),
    "stage 1, bf16 with sums in float32": Case(1, micro=2, options={"param_groups": GROUPS}, config={**BF16, **SUMS}),
}


class Run:
    """A model in the engine, on this rank."""

    def __init__(self, case: Case, **options: Any) -> None:
        self.optimizer = case.kind(mlp("cpu"), TCov=2, **case.options, **options)
        zero = {"stage": case.stage, **case.config.get("zero_optimization", {})}
        config = {
            "train_micro_batch_size_per_gpu": BATCH // case.micro,
            "gradient_accumulation_steps": case.micro,
            "zero_allow_untested_optimizer": True,
            **case.config,
            "zero_optimization": zero,
        }
        model, self.micro, self.scale = self.optimizer.model, case.micro, case.scale
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=self.optimizer, config=config, dist_init_required=False
        )
        self.dtype = next(model.parameters()).dtype

    def train(self, batches: list[Tensor]) -> None:
        rank, ranks = distributed.get_rank(), distributed.get_world_size()
        for x in batches:
            for part in x.tensor_split(ranks)[rank].chunk(self.micro):
                self.engine.backward(self.scale * loss_of(self.engine, part.to(self.dtype)))
                self.engine.step()

    def state(self) -> dict[str, Any]:
        """Parameters in float32, momentum and factors."""
        found: dict[str, Any] = {"steps": self.optimizer.steps}
        for name, p in self.optimizer.model.named_parameters():
            if self.engine.zero_optimization_stage():
                found[name], found[f"momentum of {name}"] = safe_get_full_fp32_param(p), self.momentum(p)
            else:
                found[name], found[f"momentum of {name}"] = p.detach(), self.optimizer.state[p]["exp_avg"]
        return {**found, **factors_of(self.optimizer)}

    def momentum(self, p: Any) -> Tensor:
        """Of all ranks. The engine itself, which knows that of a single group alone, must find the same."""
        whole, link = torch.zeros(p.numel()), p._hp_mapping
        if link is not None:
            (flat,) = self.optimizer.param_groups[link.param_group_index]["params"]
            there, here = link.lp_fragment_address, link.hp_fragment_address
            average = self.optimizer.state[flat]["exp_avg"]
            whole[there.start : there.start + there.numel] = average[here.start : here.start + here.numel]
        distributed.all_reduce(whole)
        if len(self.optimizer.param_groups) == 1:
            assert torch.equal(whole.view(p.shape), safe_get_full_optimizer_state(p, "exp_avg"))
        return whole.view(p.shape)


def factors_of(optimizer: AdaFisher) -> dict[str, Tensor]:
    return {f"{letter} of {name}": f for name, pair in optimizer.factors().items() for letter, f in zip("HS", pair)}


def alone(case: Case, batches: list[Tensor], dtype: torch.dtype) -> dict[str, Any]:
    """One process with the whole batch."""
    half = dtype is not torch.float32
    optimizer = case.kind(mlp("cpu").to(dtype), TCov=2, dist=False, master_weights=half, **copy.deepcopy(case.options))
    for x in batches:
        optimizer.zero_grad()
        (case.scale * loss_of(optimizer.model, x.to(dtype))).backward()
        clip = case.config.get("gradient_clipping", 1.0)  # the engine's default
        norm = nn.utils.clip_grad_norm_(optimizer.model.parameters(), clip or float("inf"))
        assert (norm > (clip or 1.0)) == ("gradient_clipping" in case.config)
        optimizer.step()
    found: dict[str, Any] = {"steps": optimizer.steps}
    for name, p in optimizer.model.named_parameters():
        state = optimizer.state[p]
        found[name], found[f"momentum of {name}"] = state["master"] if half else p.detach(), state["exp_avg"]
    return {**found, **factors_of(optimizer)}


def check_case(case: Case) -> None:
    batches, before = rows("cpu", STEPS, BATCH * distributed.get_world_size()), dict(mlp("cpu").named_parameters())
    run = Run(case)
    run.train(batches)
    got, want = run.state(), alone(case, batches, run.dtype)
    assert got.keys() == want.keys() and got["steps"] == want["steps"] == STEPS
    tolerance = FLOAT32 if run.dtype is torch.float32 else BFLOAT16
    for name, value in want.items():
        if name in before:  # how far it has come
            near(got[name] - before[name], value - before[name], name, tolerance)
        elif name != "steps":
            near(got[name], value, name, tolerance)


def check_resumed(case: Case, folder: Path) -> None:
    """A run that is loaded on as many ranks ends at the bits of one without interruption."""
    batches = rows("cpu", STEPS, BATCH * distributed.get_world_size())
    through, first, second = Run(case), Run(case), Run(case)
    through.train(batches)
    first.train(batches[:3])
    first.engine.save_checkpoint(str(folder))
    second.engine.load_checkpoint(str(folder))
    second.train(batches[3:])
    got, want = second.state(), through.state()
    for name, value in want.items():
        assert torch.equal(got[name], value) if isinstance(value, Tensor) else got[name] == value, name


def check_left_out() -> None:
    """A step of inf and NaN: the engine leaves it out, and does not say so."""
    batches = rows("cpu", STEPS, BATCH * distributed.get_world_size())
    case = Case(2)
    run, plain = Run(case), Run(case)
    run.train([batches[0] * float("inf")])
    assert not run.engine.was_step_applied() and run.optimizer.steps == 0
    run.optimizer.zero_grad()
    for each in (run, plain):
        each.train(batches)
    got, want = run.state(), plain.state()
    assert all(torch.equal(got[name], value) for name, value in want.items() if isinstance(value, Tensor))


def check_step_by_hand() -> None:
    """The copies have gradients within the engine's step alone. Another one is refused, and changes nothing."""
    batches = rows("cpu", STEPS, BATCH * distributed.get_world_size())
    run, plain = Run(Case(1)), Run(Case(1))
    for x in batches:
        plain.train([x])
        try:
            run.optimizer.step()
        except CafinError as error:
            assert "must have gradients of parameters that are laid flat" in str(error), error
        else:
            raise AssertionError("nothing was refused")
        run.train([x])
    got, want = run.state(), plain.state()
    assert got["steps"] == want["steps"] == STEPS
    assert all(torch.equal(got[name], value) for name, value in want.items() if isinstance(value, Tensor))


def check_refused(case: Case, *words: str, **options: Any) -> None:
    try:
        Run(case, **options).train(rows("cpu", 1, BATCH * distributed.get_world_size()))
    except CafinError as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError("nothing was refused")


def main(folder: Path) -> None:
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # it would be compiled
    deepspeed.init_distributed("gloo")
    rank = distributed.get_rank()
    for name, case in CASES.items():
        check_case(case)
        print(f"rank {rank}: {name} is one process", flush=True)
    for name in ("stage 1, groups", "stage 2", "stage 2, bf16", "stage 1, bf16 with sums in float32"):
        check_resumed(CASES[name], folder / name)
        print(f"rank {rank}: {name} is resumed", flush=True)
    check_left_out()
    check_step_by_hand()
    for case in (Case(3), Case(0, config=BF16)):
        check_refused(case, "step: `param_groups` must hold parameters of the model", "ZeRO's stage 1 or 2")
    check_refused(Case(2), "step: `dist` must hold the ranks", dist=False)
    if distributed.get_world_size() == 2:  # of four one would find its own elements in order, and wait for the others
        unordered = Case(2, config={"zero_optimization": {"round_robin_gradients": True}})
        check_refused(unordered, "must lie in the order of its flat copies", "round_robin_gradients")
    print(f"rank {rank}: done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
