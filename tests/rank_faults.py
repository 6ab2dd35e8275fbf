"""Faults of ranks, each in a launch of its own: `python -m rank_faults FAULT STORE`, of two ranks."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
from ranks import PATIENCE, forked
from torch import distributed, nn

from cafin_cupy import CafinError
from cafin_cupy.adapters.torch import AdaFisher


def main(fault: str, store: str) -> None:
    torch.set_num_threads(1)
    told, tell = os.pipe()

    def run(rank: int) -> None:
        timeout = timedelta(seconds=5 if fault == "late" else PATIENCE)
        distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout)
        torch.manual_seed(0)
        optimizer = AdaFisher(nn.Linear(5, 3), TCov=2, check_every=4 if fault == "compare" else None)
        for step in range(4):
            optimizer.zero_grad()
            optimizer.model(torch.ones(2, 5)).sum().backward()
            if rank == 1 and step == (3 if fault == "compare" else 2):
                if fault == "late":
                    os.read(told, 1)  # until the other one has given up
                return
            before = [p.detach().clone() for p in optimizer.model.parameters()]
            try:
                optimizer.step()
            except CafinError as error:
                same = all(map(torch.equal, before, optimizer.model.parameters()))
                print(f"{step}|{optimizer.steps}|{same}|{error}", flush=True)
                os.write(tell, b".")
                return

    forked(2, run)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
