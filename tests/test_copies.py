"""Copies of the optimizer on raw arrays: they keep everything, share nothing, and are refused where they cannot."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import FRAMEWORKS, make, numpy_of, refuses, same_bits

from cafin_cupy import AdaFisher, CafinError, CafinValueError, Linear


def trained(framework: str, steps: int, **options: Any) -> AdaFisher:
    rng = np.random.default_rng(0)
    params = [make(framework, rng.normal(size=shape)) for shape in ((3, 5), (3,), (7,))]
    opt = AdaFisher(params, [Linear(params[0], params[1], name="fc")], TCov=2, **options)
    go_on(opt, framework, range(steps))
    return opt


def go_on(opt: AdaFisher, framework: str, steps: range) -> None:
    for t in steps:
        rng = np.random.default_rng(t)
        opt.accumulate(
            opt._layers[0], make(framework, rng.normal(size=(4, 5))), make(framework, rng.normal(size=(4, 3)))
        )
        opt.step([make(framework, rng.normal(size=shape)) for shape in ((3, 5), (3,), (7,))])


def arrays(opt: AdaFisher) -> list[Any]:
    return [*opt._params, *opt.momenta, *opt.factors()["fc"]]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("averaging", ["parity", "paper"])
def test_a_copy_goes_on_alone(framework: str, duplicate: Callable[[Any], Any], averaging: str) -> None:
    opt = trained(framework, 3, averaging=averaging, lr=0.1, weight_decay=0.1, decoupled=True)
    before = [numpy_of(a) for a in arrays(opt)]
    twin = duplicate(opt)
    assert (twin.steps, twin.TCov, twin.backend, twin.averaging) == (3, 2, opt.backend, opt.averaging)
    go_on(twin, framework, range(3, 6))
    for mine, then in zip(arrays(opt), before):
        same_bits(mine, then)  # the original did not move
    go_on(opt, framework, range(3, 6))
    for mine, theirs in zip(arrays(opt), arrays(twin)):
        same_bits(mine, theirs)


def test_no_copy_between_accumulate_and_step() -> None:
    opt = trained("numpy", 2)
    opt.accumulate(opt._layers[0], np.ones((2, 5), np.float32), np.ones((2, 3), np.float32))
    with refuses(CafinError, "copy must be made between steps", "discard()"):
        copy.deepcopy(opt)
    opt.discard()
    copy.deepcopy(opt)


def test_the_interval_may_change_and_is_checked() -> None:
    opt = trained("numpy", 3)
    opt.TCov = 3
    assert opt.samples
    rows = np.ones((2, 5), np.float32), np.ones((2, 3), np.float32)
    opt.accumulate(opt._layers[0], *rows)
    opt.TCov = 2  # the coming step is no sampled one any more
    copy.deepcopy(opt)  # so nothing is pending
    opt.TCov = 3
    with refuses(CafinValueError, "`TCov` must be a whole number >= 1, got 0"):
        opt.TCov = 0
    assert opt.TCov == 3
