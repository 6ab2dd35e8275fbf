"""`schedule`, the kernel that counts steps on the device and sets each parameter's scalars there."""

from __future__ import annotations

import numpy as np
import pytest

from cafin_cupy import table
from cafin_cupy.cuda_update import CudaSchedule, rate, scalars
from cafin_cupy.rule import Hyper
from cafin_cupy.verdict import Verdict

pytestmark = pytest.mark.gpu
HYPERS = [Hyper(0.1, 0.9, 1e-3, 0.2, False), Hyper(0.3, 0.5, 1e-2, 0.4, True)]


@pytest.mark.parametrize("count", [1, 63, 65, 64 * table.FLAGS + 3])
def test_counts_what_is_present_and_sets_its_scalars(count: int) -> None:
    import cupy

    rng = np.random.default_rng(count)
    before = rng.integers(0, 50, count)
    steps, groups = cupy.asarray(before), rng.integers(0, 2, count)
    groups[0] = 1
    schedule = CudaSchedule(groups.tolist(), steps.data.ptr, steps, 0)
    schedule.refresh([rate(hyper) for hyper in HYPERS], 0)
    present = [rng.random(count) < 0.7, rng.random(count) < 0.7, np.ones(count, bool)]
    for flags in present:
        schedule(flags.tolist(), 0)
        schedule.updated()
    after = before + sum(flags.astype(int) for flags in present)
    np.testing.assert_array_equal(steps.get(), after)
    made = schedule._memory.get()[: count * table.Hyper.itemsize].view(table.Hyper)
    wanted = np.array([scalars(HYPERS[g], int(t)) for g, t in zip(groups, after)], table.Hyper)
    for name in table.Hyper.names or ():
        np.testing.assert_allclose(made[name], wanted[name], rtol=2e-7)  # a last place: pow is another one


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_a_verdict_prevents_steps_and_a_scale_is_divided_out(found: float) -> None:
    import cupy

    steps, skipped = cupy.asarray(np.array([4, 7])), cupy.zeros(1, np.int64)
    found_inf, scale = cupy.full(1, found, np.float32), cupy.full(1, 8.0, np.float32)
    schedule = CudaSchedule([0, 0], steps.data.ptr, steps, 0)
    schedule.refresh([rate(HYPERS[0])], 0)
    schedule([True, True], 0)  # sets all scalars
    schedule.updated()
    schedule([True, True], 0, Verdict(found_inf.data.ptr, scale.data.ptr, skipped.data.ptr))
    schedule.updated()
    assert steps.get().tolist() == ([5, 8] if found else [6, 9])
    assert skipped.get().tolist() == [found]
    made = schedule._memory.get().view(table.Hyper)
    assert made["grad_scale"].tolist() == ([0.0, 0.0] if found else [0.125, 0.125])
