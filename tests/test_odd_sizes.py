"""How many elements, parameters and layers: none, one number, ten thousand arrays, more than 32 bits count."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import EXAMPLES, FRAMEWORKS, RAW, Case, Device, close, example_id, make, numpy_of, problem, same_bits

from cafin_cupy import AdaFisher, Linear, fused_step


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_scalars_and_empty_arrays_in_the_optimizer(framework: str) -> None:
    shapes = [(), (0,), (3, 0, 2), (1,), (2, 3)]
    xs = [problem(shape, k) for k, shape in enumerate(shapes)]
    params, grads = ([make(framework, x[name]) for x in xs] for name in "pg")
    opt = AdaFisher(params, lr=0.1, beta=0.7)
    for _ in range(2):
        opt.step(grads)
    for p, m, x in zip(params, opt.momenta, xs):
        assert tuple(p.shape) == tuple(m.shape) == x["p"].shape
        m1 = 0.3 * x["g"].astype(float)
        want = x["p"] - 0.1 * m1 / 0.3 - 0.1 * (0.7 * m1 + 0.3 * x["g"]) / (1 - 0.7**2)
        close(p, want, 2e-6, np.append(want, x["p"]))
    only = AdaFisher([make(framework, np.ones((0, 3))), make(framework, np.ones(0))])
    only.step([make(framework, np.ones((0, 3))), make(framework, np.ones(0))])
    assert only.steps == 1


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_empty_arrays_of_any_strides(framework: str) -> None:
    """Nothing lies in them in any order."""
    p = make(framework, np.ones((3, 0, 8)))[:, :, ::4]
    g = make(framework, np.ones((8, 0, 3)))[::4].swapaxes(0, 2)
    m = make(framework, np.ones((0, 3, 8)))[:, :, ::4].swapaxes(0, 1)
    fused_step([p], [g], [m], lr=0.1)


@pytest.mark.parametrize("rule", ["parity", "paper"])
@pytest.mark.parametrize(("d_in", "d_out"), [(0, 3), (5, 0), (0, 0)])
def test_layers_without_inputs_or_outputs(device: Device, d_in: int, d_out: int, rule: str) -> None:
    """They have nothing to average, so their factors stay; their neighbours' do not, nor does a bias rest."""
    empty = Linear(device.zeros(d_out, d_in), device.zeros(d_out))
    full = Linear(device.zeros(2, 4), name="full")
    params = [empty.weight, empty.bias, full.weight]
    opt = AdaFisher(params, [empty, full], averaging=rule, backend=device.backend)
    assert [len(F) for F in opt.factors()["0"]] == [d_in + 1, d_out]
    opt.accumulate(empty, device.zeros(6, d_in) + 1, device.zeros(6, d_out) + 1)
    opt.accumulate(full, *(device.array(np.arange(1.0, 6 * n + 1).reshape(6, n)) for n in (4, 2)))
    opt.step([device.zeros(*p.shape) + 1 for p in params])
    for F in opt.factors()["0"]:
        np.testing.assert_array_equal(numpy_of(F), 1.0)
    assert not np.any(numpy_of(opt.factors()["full"][0]) == 1.0)
    assert np.all(numpy_of(empty.bias) < 0)


@pytest.mark.parametrize("case", EXAMPLES, ids=example_id)
def test_an_empty_batch_alone_changes_no_factor(device: Device, case: Case) -> None:
    layer = case.layer(lambda shape: device.zeros(*shape))
    opt = AdaFisher([layer.weight], [layer], averaging=RAW, TCov=1, backend=device.backend)
    before = [numpy_of(F) for F in opt.factors()["0"]]
    opt.accumulate(layer, device.array(case.of(np.zeros((0, *case.h[1:])))), device.zeros(0, *case.s[1:]))
    opt.step([device.zeros(*case.weight)])
    for now, then in zip(opt.factors()["0"], before):
        same_bits(now, then)


# ---- Many and large ones ----


def test_ten_thousand_parameters(device: Device) -> None:
    """Slices of one buffer of up to 4 elements, most of them empty: the bits of the whole as one parameter."""
    count = 10_000
    sizes = np.random.default_rng(0).integers(-16, 5, count).clip(0)
    edges = [0, *np.cumsum(sizes).tolist()]
    x = problem((edges[-1],))
    flat, grads, whole, g = (device.array(x[name]) for name in "pgpg")
    opt = AdaFisher([flat[i:j] for i, j in zip(edges, edges[1:])], lr=0.1, weight_decay=0.1, backend=device.backend)
    one = AdaFisher([whole], lr=0.1, weight_decay=0.1, backend=device.backend)
    for _ in range(2):
        opt.step([grads[i:j] for i, j in zip(edges, edges[1:])])
        one.step([g])
    same_bits(flat, whole)
    same_bits(np.concatenate([numpy_of(m) for m in opt.momenta]), one.momenta[0])


def test_a_thousand_layers(device: Device) -> None:
    """All of one shape and data: equal factors."""
    count = 1_000
    weights = device.zeros(count, 2, 1)
    layers = [Linear(weights[k]) for k in range(count)]
    opt = AdaFisher([layer.weight for layer in layers], layers, averaging=RAW, backend=device.backend)
    seen = range(0, count, count // 50)  # a launch each
    for k in seen:
        opt.accumulate(layers[k], device.array([[2.0]]), device.array([[1.0, 3.0]]))
    opt.step([device.zeros(2, 1)] * count)
    factors = opt.factors()
    for k in range(0, count, 20):
        H, S = factors[str(k)]
        np.testing.assert_array_equal(numpy_of(H), [4.0] if k in seen else [1.0])
        np.testing.assert_array_equal(numpy_of(S), [1.0, 9.0] if k in seen else [1.0, 1.0])


@pytest.mark.gpu
def test_more_elements_than_32_bits_count() -> None:
    """A matrix of 2^31 + 4633 elements, compared with float64 at both ends and around element 2^31; all others hold
    one number each, and so does their result."""
    free = torch.cuda.mem_get_info()[0]
    if free < 48 << 30:
        pytest.skip(f"needs 48 GiB of GPU memory, and {free >> 30} are free")
    side = 46_341
    size, H, S = side * side, torch.rand(side, device="cuda"), torch.rand(side, device="cuda")
    p, g, m = (torch.full((size,), value, device="cuda") for value in (1.0, 0.5, -0.25))
    windows = [slice(0, 9000), slice(2**31 - 9000, 2**31 + 4000), slice(size - 600, size)]
    before = []
    for window in windows:
        for array in (p, g, m):
            array[window].normal_()
        before.append([array[window].double() for array in (p, g, m)])
    fused_step([p.view(side, side)], [g.view(side, side)], [m.view(side, side)], [(H, S)], lr=0.1, Lambda=0.5)
    for window, (p0, g0, m0) in zip(windows, before):
        place = torch.arange(window.start, window.stop, device="cuda")
        F = S.double()[place // side] * H.double()[place % side] + 0.5
        m1 = 0.9 * m0 + (1 - 0.9) * g0
        close(m[window], m1, 2e-6)
        close(p[window], p0 - m1 / F, 2e-6)  # lr / (1 - beta) is 1
    inside = sum(window.stop - window.start for window in windows)
    usual = m[9000]
    close(usual, torch.tensor(-0.175), 2e-6)
    assert int((m == usual).sum()) >= size - inside
