"""Laws of the whole rule, through the public optimizer, on the reference and on the kernels."""

from __future__ import annotations

import random
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    CPU,
    CUDA,
    EXAMPLES,
    RAW,
    Case,
    Device,
    arrays,
    bounds,
    cases,
    close,
    example_id,
    numpy_of,
    run_raw,
    same_bits,
    seeds,
)
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from cafin_cupy import AdaFisher, Averaging, Linear
from cafin_cupy.reference import add_sums

IN_ORDER = list(range(len(EXAMPLES)))
RULES = [Averaging.parity(), Averaging.paper(), Averaging(0.5, 0.25, "before"), Averaging(0.9, 0.3, "after")]


@given(cases, seeds, st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_micro_batches_add_up_to_the_batch(device: Device, case: Case, seed: int, parts: list[int]) -> None:
    """The loss of the whole batch is a mean: the gradients of each part already have the scale of the whole."""
    batch = sum(parts)
    vector = len(case.h) < 2  # a single row gets an axis for the batch
    case = case._replace(h=(batch, *case.h[not vector :]), s=(batch, *case.s[not vector :]))
    h, s = case.data(seed)
    edges = np.cumsum(parts)[:-1]
    pieces = [(device.array(a), device.array(b)) for a, b in zip(np.split(h, edges), np.split(s, edges))]
    whole = run_raw(device, case, [(device.array(h), device.array(s))])
    for got, want, bound in zip(run_raw(device, case, pieces), whole, bounds(case, h, s)):
        close(got, want, device.tolerance, bound)


def test_sums_of_two_ranks_make_the_factors_of_the_whole_batch(device: Device) -> None:
    """Each rank has half of the batch; one that has seen nothing takes what both have seen, the other adds its own
    geometry's workspace to nothing. Lengths of sums are those that the descriptors tell."""
    for case in EXAMPLES:
        whole, first, second, third = (run_raw_optimizer(device, case) for _ in range(4))
        h, s = case.data(3)
        half = len(h) // 2
        whole.accumulate(whole._layers[0], device.array(h), device.array(s))
        first.accumulate(first._layers[0], device.array(h[:half]), device.array(s[:half]))
        second.accumulate(second._layers[0], device.array(h[half:]), device.array(s[half:]))
        ((index, a),), ((_, b),) = first._factors.sums(), second._factors.sums()
        layer = first._layers[0]
        assert a.S.shape[0] == layer.S_size and layer.H_units in (None, a.H.shape[0])
        total = add_sums(a, b)
        whole._factors.update(2.0)
        for rank in (first, third):
            rank._factors.take([(index, total)])
            assert rank._factors.pending
            rank._factors.update(2.0)
            assert not rank._factors.pending
            for mine, want in zip((rank._factors.H[0], rank._factors.S[0]), (whole._factors.H[0], whole._factors.S[0])):
                close(mine, want, device.tolerance)
        second._factors.take([])  # no rank has seen anything
        second._factors.update(2.0)
        assert numpy_of(second._factors.H[0]).min() == 1.0


def run_raw_optimizer(device: Device, case: Case) -> AdaFisher:
    layer = case.layer(lambda shape: device.array(np.ones(shape)))
    return AdaFisher(arrays(layer), [layer], TCov=1, averaging=RAW, backend=device.backend)


def network(device: Device, order: list[int], rule: Averaging = RULES[0], **options: Any) -> tuple[Any, ...]:
    """An optimizer of all example layers, in the given order, after three steps on fixed data; TCov 2."""
    rng = np.random.default_rng(5)
    layers, params, grads = {}, {}, {}
    for index, case in enumerate(EXAMPLES):
        layer = case.layer(lambda shape: device.array(rng.normal(size=shape)))
        object.__setattr__(layer, "name", case.kind.__name__)
        layers[index] = layer
        params[index] = arrays(layer)
        grads[index] = [np.float32(rng.normal(size=p.shape)) for p in params[index]]
    opt = AdaFisher(
        [params[i] for i in order],
        [layers[i] for i in order],
        TCov=2,
        averaging=rule,
        backend=device.backend,
        **options,
    )
    for step in range(3):
        for i in order:
            h, s = EXAMPLES[i].data(step)
            opt.accumulate(layers[i], device.array(h), device.array(s))
        opt.step([[device.array(g) for g in grads[i]] for i in order])
    return opt, [params[i] for i in range(len(EXAMPLES))], opt.factors()


def state_of(opt: Any, params: Any, factors: Any) -> list[Any]:
    return [*opt.momenta, *(p for pair in params for p in pair), *(f for pair in factors.values() for f in pair)]


def test_order_of_layers_is_irrelevant(device: Device) -> None:
    _, params, factors = network(device, IN_ORDER)
    _, others, other_factors = network(device, random.Random(0).sample(IN_ORDER, len(IN_ORDER)))
    for mine, theirs in zip(params, others):
        for a, b in zip(mine, theirs):
            same_bits(a, b)
    for name, pair in factors.items():
        for a, b in zip(pair, other_factors[name]):
            same_bits(a, b)


@pytest.mark.parametrize("rule", RULES, ids=["parity", "paper", "before", "after"])
def test_two_runs_agree_bit_for_bit(device: Device, rule: Averaging) -> None:
    first, second = (network(device, IN_ORDER, rule) for _ in range(2))
    for a, b in zip(state_of(*first), state_of(*second)):
        same_bits(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES, ids=["parity", "paper", "before", "after"])
@pytest.mark.parametrize("decoupled", [False, True], ids=["l2", "decoupled"])
def test_kernels_follow_the_reference_over_steps(rule: Averaging, decoupled: bool) -> None:
    options = {"weight_decay": 0.1, "decoupled": decoupled, "Lambda": 0.01}
    _, params, factors = network(CUDA, IN_ORDER, rule, **options)
    _, exact, exact_factors = network(CPU, IN_ORDER, rule, **options)
    # Normalisation divides by max - min: 1e-7 of float32 grows by max / (max - min), below 100 for this data; in
    # "after" the smallest entry of F~ is Lambda, and an error of F~ there counts with 1 / Lambda = 100 in the step.
    tolerance = 1e-5 if rule.normalize == "before" else 1e-4
    for name, pair in factors.items():
        for got, want in zip(pair, exact_factors[name]):
            close(got, want, tolerance)
    for mine, theirs in zip(params, exact):
        for got, want in zip(mine, theirs):
            close(got, want, tolerance)


@pytest.mark.parametrize("weight_decay", [0.0, 0.25])
def test_without_layers_it_is_momentum_sgd(device: Device, weight_decay: float) -> None:
    """F = 1: AdaFisher is `torch.optim.SGD(momentum=beta, dampening=beta)` started from a zero buffer, with its
    learning rate divided by 1 - beta^t. SGD starts its buffer at the first gradient; a first step with gradient 0 and
    learning rate 0 starts it at zero."""
    rng, beta, lr = np.random.default_rng(1), 0.9, 0.1
    start, grads = rng.normal(size=37), rng.normal(size=(6, 37))
    p = device.array(start)
    opt = AdaFisher([p], lr=lr, beta=beta, weight_decay=weight_decay, backend=device.backend)
    theirs = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    sgd = torch.optim.SGD([theirs], lr=0.0, momentum=beta, dampening=beta, weight_decay=weight_decay)
    theirs.grad = -weight_decay * theirs.detach()
    sgd.step()
    momentum, own = np.zeros(37), start.copy()
    for t, g in enumerate(grads, 1):
        opt.step([device.array(g)])
        sgd.param_groups[0]["lr"] = lr / (1 - beta**t)
        theirs.grad = torch.tensor(g)
        sgd.step()
        momentum = beta * momentum + (1 - beta) * (g + weight_decay * own)
        own = own - lr * momentum / (1 - beta**t)
    close(p, own, device.tolerance)
    close(p, theirs, device.tolerance)


@pytest.mark.parametrize("case", EXAMPLES, ids=example_id)
def test_a_loss_scale_divides_out_exactly(device: Device, case: Case) -> None:
    """Powers of two change no digit, in gradients and in factors."""
    h, s = case.data()
    results = []
    for scale in (1.0, 2.0**11):
        layer = case.layer(lambda shape: device.zeros(*shape) + 1.0)
        opt = AdaFisher(arrays(layer), layers=[layer], backend=device.backend)
        opt.accumulate(layer, device.array(h), device.array(s * scale))
        opt.step([(device.zeros(*p.shape) + 3.0) * scale for p in arrays(layer)], grad_scale=scale)
        results.append([*arrays(layer), *opt.momenta, *opt.factors()["0"]])
    for a, b in zip(*results):
        same_bits(a, b)
    assert np.all(numpy_of(results[0][0]) < 1.0)


@pytest.mark.parametrize(("rule", "lr"), [("parity", 5e-4), ("paper", 3e-2)])
def test_a_loop_of_plain_arrays_learns_digits(device: Device, rule: str, lr: float) -> None:
    """A two-layer network with its gradients written out, on NumPy or CuPy."""
    xp: Any = import_module(device.framework)
    digits = load_digits()
    x, y = digits.data / 16.0, np.eye(10)[digits.target]
    rng = np.random.default_rng(0)
    order = rng.permutation(len(x))
    train, test = order[:1400], order[1400:]
    w1, w2 = device.array(rng.normal(size=(32, 64)) / 8), device.array(rng.normal(size=(10, 32)) / 6)
    b1, b2 = device.zeros(32), device.zeros(10)
    fc1, fc2 = Linear(w1, b1), Linear(w2, b2)
    # Under the first rule F~ is near Lambda = 1e-3: the step is that of SGD with 1000 times the learning rate.
    opt = AdaFisher([w1, b1, w2, b2], [fc1, fc2], averaging=rule, TCov=10, lr=lr, backend=device.backend)
    for _ in range(15):
        for rows in np.array_split(rng.permutation(train), 22):
            h1, target = device.array(x[rows]), device.array(y[rows])
            a1 = h1 @ w1.T + b1
            h2 = xp.maximum(a1, 0)
            z = h2 @ w2.T + b2
            e = xp.exp(z - z.max(axis=1, keepdims=True))
            s2 = (e / e.sum(axis=1, keepdims=True) - target) / len(rows)
            s1 = (s2 @ w2) * (a1 > 0)
            if opt.samples:
                opt.accumulate(fc1, h1, s1)
                opt.accumulate(fc2, h2, s2)
            opt.step([s1.T @ h1, s1.sum(axis=0), s2.T @ h2, s2.sum(axis=0)])
    scores = xp.maximum(device.array(x[test]) @ w1.T + b1, 0) @ w2.T + b2
    assert np.mean(numpy_of(scores).argmax(axis=1) == digits.target[test]) > 0.93
