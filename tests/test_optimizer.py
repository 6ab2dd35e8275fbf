"""`AdaFisher` on raw arrays: its life over steps, its state, what a step costs on the GPU, and all that it refuses."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import EXAMPLES, FRAMEWORKS, Case, Device, close, example_id, make, numpy_of, refuses, same_bits
from helpers import updated as reference_step

from cafin_cupy import AdaFisher, Averaging, BackendError, CafinTypeError, CafinValueError, Linear, reference


def perceptron(framework: str, seed: int = 0, **options: Any) -> tuple[AdaFisher, Linear, list[Any], list[Any]]:
    """(optimizer, its layer, parameters, gradients): a Linear layer with bias, and a parameter of no layer."""
    rng = np.random.default_rng(seed)
    params = [make(framework, rng.normal(size=shape)) for shape in ((3, 5), (3,), (7,))]
    layer = Linear(params[0], params[1], name="fc")
    grads = [make(framework, rng.normal(size=p.shape)) for p in params]
    return AdaFisher(params, [layer], **options), layer, params, grads


def batch(framework: str, seed: int = 0) -> tuple[Any, Any]:
    return tuple(make(framework, x) for x in EXAMPLES[0].data(seed))  # type: ignore[return-value]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("rule", ["parity", "paper"])
@pytest.mark.parametrize("decoupled", [False, True], ids=["l2", "decoupled"])
def test_steps_by_the_reference_formulas(framework: str, rule: str, decoupled: bool) -> None:
    scalars = {"lr": 0.01, "beta": 0.8, "Lambda": 0.1, "weight_decay": 0.2, "decoupled": decoupled}
    opt, layer, params, grads = perceptron(framework, averaging=rule, TCov=2, **scalars)
    p, m = [numpy_of(a).astype(float) for a in params], [np.zeros(a.shape) for a in params]
    averaging = Averaging.named(rule, 0.8)
    H, S = np.ones(6), np.ones(3)
    for t in range(1, 6):
        assert opt.samples == (t % 2 == 1)
        h, s = batch(framework, t)
        opt.accumulate(layer, h, s)  # ignored on the even steps
        if opt.samples:
            raw = reference.raw_moments(layer, reference.raw_sums(layer, *(numpy_of(a).astype(float) for a in (h, s))))
            H, S = reference.refresh(H, S, *raw, averaging)
        opt.step(grads)
        assert opt.steps == t
        eH, eS = reference.effective(H, averaging), reference.effective(S, averaging)
        for k, pair in enumerate([(eH[:5], eS), (eH[5:], eS), (None, None)]):
            p[k], m[k] = reference.update(p[k], numpy_of(grads[k]).astype(float), m[k], *pair, step=t, **scalars)
    for mine, want in zip((*params, *opt.momenta, *opt.factors()["fc"]), (*p, *m, H, S)):
        close(mine, want, 1e-5)  # float32, five steps of which three normalise moments
    assert opt.backend == ("cuda" if framework in ("cupy", "torch-cuda") else "reference")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_scalars_may_change_between_steps(framework: str) -> None:
    opt, _, params, grads = perceptron(framework)
    x = {"p": numpy_of(params[2]), "g": numpy_of(grads[2]), "m": np.zeros(7)}
    opt.step(grads)
    p, m = reference_step(x, factors=False, lr=1e-3)
    opt.lr, opt.beta, opt.weight_decay, opt.decoupled = 0.5, 0.3, 0.1, True
    opt.step(grads)
    changed = {"lr": 0.5, "beta": 0.3, "weight_decay": 0.1, "decoupled": True}
    p, m = reference_step({**x, "p": p, "m": m}, factors=False, step=2, **changed)
    close(params[2], p, 2e-6)
    close(opt.momenta[2], m, 2e-6)


@pytest.mark.parametrize("case", [case for case in EXAMPLES if case.bias], ids=example_id)
def test_a_frozen_weight_still_gives_its_bias_factors(device: Device, case: Case) -> None:
    layer = case.layer(lambda shape: device.zeros(*shape))
    opt = AdaFisher([layer.bias], [layer], TCov=1, Lambda=0.5, lr=1.0, beta=0.0, backend=device.backend)
    opt.accumulate(layer, *(device.array(x) for x in case.data()))
    opt.step([device.zeros(*layer.bias.shape) + 1.0])
    columns, rows = layer.of_bias(*(numpy_of(F) for F in opt.factors()["0"]))
    close(layer.bias, -1.0 / (rows * columns + 0.5), max(device.tolerance, 1e-6))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_state_goes_through_a_copy(framework: str) -> None:
    """Saved after three steps and loaded into a new optimizer, the fourth and fifth give the same bits."""
    for rule in ("parity", "paper"):
        opt, layer, params, grads = perceptron(framework, averaging=rule, TCov=2)
        other, other_layer, other_params, _ = perceptron(framework, averaging=rule, TCov=2)
        for t in range(5):
            if t == 3:
                state = copy.deepcopy(opt.state_dict())
                keys, arrays = sorted(state), [*state["momenta"], *state["H"], *state["S"]]
                before = [numpy_of(a) for a in arrays]
                other.load_state_dict(state)
                for mine, theirs in zip(other_params, params):
                    mine[...] = theirs
                assert (sorted(state), other.steps) == (keys, 3)
            opt.accumulate(layer, *batch(framework, t))
            opt.step(grads)
            if t >= 3:
                other.accumulate(other_layer, *batch(framework, t))
                other.step(grads)
        for a, b in zip((*params, *opt.factors()["fc"]), (*other_params, *other.factors()["fc"])):
            same_bits(a, b)
        for a, b in zip(arrays, before):
            same_bits(a, b)  # the caller's state is left alone


def test_state_of_another_framework() -> None:
    """A checkpoint made with torch serves NumPy, and the other way round."""
    source, layer, _, grads = perceptron("torch")
    source.accumulate(layer, *batch("torch"))
    source.step(grads)
    target, *_ = perceptron("numpy")
    target.load_state_dict(source.state_dict())
    back, *_ = perceptron("torch")
    back.load_state_dict(target.state_dict())
    for opt in (target, back):
        for a, b in zip((*opt.momenta, *opt.factors()["fc"]), (*source.momenta, *source.factors()["fc"])):
            same_bits(a, b)


def test_a_loaded_state_forgets_pending_sums(device: Device) -> None:
    case = EXAMPLES[0]
    layer = case.layer(lambda shape: device.zeros(*shape))
    opt = AdaFisher([layer.weight], [layer], backend=device.backend)
    opt.accumulate(layer, *(device.array(x) for x in case.data()))
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    opt.step([device.zeros(*case.weight)])
    np.testing.assert_array_equal(numpy_of(opt.factors()["0"][0]), 1.0)


def everything(opt: AdaFisher, params: Any) -> list[Any]:
    return [*params, *opt.momenta, *(F for pair in opt.factors().values() for F in pair)]


W = np.ones((3, 5))
BAD = [
    ({"lr": -1.0}, CafinValueError, ["`lr`", ">= 0", "-1"]),
    ({"lr": math.inf}, CafinValueError, ["`lr`", "finite", "inf"]),
    ({"lr": "fast"}, CafinTypeError, ["`lr`", "number", "'fast'"]),
    ({"lr": None}, CafinTypeError, ["`lr`", "number", "None"]),
    ({"beta": 1}, CafinValueError, ["`beta`", "[0, 1)", "1.0"]),
    ({"Lambda": -1e-3}, CafinValueError, ["`Lambda`", "> 0", "-0.001"]),
    ({"gamma": 1.5}, CafinValueError, ["`gamma`", "[0, 1]", "1.5"]),
    ({"gamma": "x", "averaging": "paper"}, CafinTypeError, ["`gamma`", "number", "'x'"]),
    ({"TCov": 0}, CafinValueError, ["`TCov`", ">= 1", "0"]),
    ({"TCov": 2.5}, CafinValueError, ["`TCov`", "whole", "2.5"]),
    ({"TCov": math.inf}, CafinValueError, ["`TCov`", "finite", "inf"]),
    ({"weight_decay": -0.1}, CafinValueError, ["`weight_decay`", ">= 0", "-0.1"]),
    ({"averaging": "mean"}, CafinValueError, ["`averaging`", '"parity", "paper"', "'mean'"]),
    ({"averaging": None}, CafinValueError, ["`averaging`", '"parity", "paper"', "None"]),
    ({"backend": "CUDA"}, CafinValueError, ["`backend`", '"cuda"', "'CUDA'"]),
    ({"backend": "cuda"}, BackendError, ["`backend`", "CPU", "GPU"]),
    ({"params": []}, CafinValueError, ["`params`", "at least one", "[]"]),
    ({"params": [W, np.ones(3, np.float32)]}, CafinValueError, ["`params[1]`", "float64", "float32"]),
    ({"params": [np.ones(3, int)]}, CafinTypeError, ["`params[0]`", "floating-point", "int64"]),
    ({"params": [W, W]}, CafinValueError, ["`params[1]`", "share memory", "`params[0]`"]),
    ({"params": {"a": W, "b": W[1:]}}, CafinValueError, ["params['b']", "share memory", "params['a']"]),
    ({"layers": [W]}, CafinTypeError, ["`layers[0]`", "descriptor", "ndarray"]),
    ({"lr": np.str_("0.1")}, CafinTypeError, ["`lr`", "number", "'0.1'"]),
    ({"TCov": np.array("2")}, CafinTypeError, ["`TCov`", "number", "'2'"]),
    ({"decoupled": "False"}, CafinTypeError, ["`decoupled`", "True or False", "'False'"]),
    ({"error_if_nonfinite": "no"}, CafinTypeError, ["`error_if_nonfinite`", "True or False", "'no'"]),
    ({"layers": [Linear(np.ones((3, 5)), name="fc")]}, CafinValueError, ["`layers[0]`", "array of `params`", "fc"]),
    ({"layers": [Linear(W, name="a"), Linear(W, name="a")]}, CafinValueError, ["layers[1].name", "once", "'a'"]),
]


@pytest.mark.parametrize(("options", "kind", "words"), BAD, ids=lambda value: str(value)[:40])
def test_refused_constructions(options: dict[str, Any], kind: type, words: list[str]) -> None:
    with refuses(kind, *words, unchanged=[W]):
        AdaFisher(**{"params": [W], **options})


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_refused_step_changes_nothing(framework: str) -> None:
    opt, layer, params, grads = perceptron(framework)
    opt.accumulate(layer, *batch(framework))
    first, second, third = grads
    wide = make(framework, numpy_of(first), "float64")
    turned = make(framework, numpy_of(first).T)
    rows: list[tuple[Any, dict[str, Any], type, list[str]]] = [
        (None, {}, CafinValueError, ["`grads`", "list of 3", "NoneType"]),
        ([first, second], {}, CafinValueError, ["`grads`", "list of 3", "list of 2"]),
        ({"a": first}, {}, CafinValueError, ["`grads`", "list of 3", "mapping"]),
        ([first, None, third], {}, CafinValueError, ["`grads[1]`", "None", "zeros"]),
        ([first, 3.0, third], {}, CafinTypeError, ["`grads[1]`", "__dlpack__", "float"]),
        ([turned, second, third], {}, CafinValueError, ["`grads[0]`", "(3, 5)", "(5, 3)"]),
        ([wide, second, third], {}, CafinValueError, ["`grads[0]`", "float32", "float64"]),
        ([first, params[1], third], {}, CafinValueError, ["share memory", "grads[1]", "params[1]"]),
        ([first, second, opt.momenta[2]], {}, CafinValueError, ["share memory", "grads[2]", "momenta[2]"]),
        (grads, {"grad_scale": 0.0}, CafinValueError, ["`grad_scale`", "> 0", "got 0"]),
        (grads, {"grad_scale": math.nan}, CafinValueError, ["`grad_scale`", "finite", "nan"]),
    ]
    for given, options, kind, words in rows:
        with refuses(kind, "step", *words, unchanged=everything(opt, params)):
            opt.step(given, **options)
        assert opt.steps == 0
    opt.beta = 2.0
    with refuses(CafinValueError, "step", "`beta`", unchanged=everything(opt, params)):
        opt.step(grads)
    opt.beta = 0.9
    opt.step(grads)  # what was accumulated is still there
    assert numpy_of(opt.factors()["fc"][0])[0] != 1.0


def test_an_optimizer_that_was_made_in_inference_mode_stays_there() -> None:
    w, g = torch.ones(3, 2), torch.ones(3, 2)
    with torch.inference_mode():
        opt = AdaFisher([w])
        opt.step([g])
    with refuses(CafinTypeError, "step", "`momenta`", "inference tensor", unchanged=[w]):
        opt.step([g])
    assert opt.steps == 1


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_refused_accumulations_add_nothing(framework: str) -> None:
    opt, layer, _, grads = perceptron(framework)
    h, s = batch(framework)
    stranger = Linear(layer.weight, layer.bias)
    rows = [
        ((stranger, h, s), CafinValueError, ["`layer`", "one of the optimizer's", "Linear", "`layers=`"]),
        (("fc", h, s), CafinValueError, ["`layer`", "one of the optimizer's", "'fc'"]),
        ((layer, s, h), CafinValueError, ["h, s of fc", "(..., 5) and (..., 3)", "(4, 2, 3) and (4, 2, 5)"]),
        ((layer, h[:3], s), CafinValueError, ["h, s of fc", "(3, 2, 5) and (4, 2, 3)"]),
        ((layer, None, s), CafinTypeError, ["`h", "__dlpack__", "NoneType"]),
        ((layer, np.ndarray, s), CafinTypeError, ["`h", "__dlpack__", "type"]),
        ((layer, h, np.float32(1)), CafinValueError, ["s of fc"]),
        ((layer, h, torch.eye(3).to_sparse()), CafinTypeError, ["`s of fc` must be dense", "sparse"]),
        ((layer, h, torch.ones(4, 3, device="meta")), CafinTypeError, ["s of fc", "memory", "meta"]),
        ((layer, h, make(framework, numpy_of(s), "int32")), None, ["s of fc", "int32"]),
    ]
    if framework in ("cupy", "torch-cuda"):
        rows.append(((layer, h, make("numpy", numpy_of(s))), CafinValueError, ["s of fc", "cuda:0", "cpu"]))
        rows.append(((layer, make(framework, numpy_of(h), "float64"), s), CafinValueError, ["h of fc", "float64"]))
    for arguments, kind, words in rows:
        with refuses(kind or (CafinValueError if opt.backend == "cuda" else CafinTypeError), *words):
            opt.accumulate(*arguments)
    opt.step(grads)
    for F in opt.factors()["fc"]:
        np.testing.assert_array_equal(numpy_of(F), 1.0)


def test_refused_states_change_nothing() -> None:
    opt, layer, params, grads = perceptron("numpy")
    opt.accumulate(layer, *batch("numpy"))
    opt.step(grads)
    good = copy.deepcopy(opt.state_dict())
    rows: list[tuple[Any, list[str]]] = [
        (None, ["`state`", "None"]),
        ([1, 2], ["`state`", "mapping", "list"]),
        ({key: value for key, value in good.items() if key != "S"}, ["`state`", "key", "'S'"]),
        ({**good, "steps": -1}, ["state['steps']", ">= 0", "-1"]),
        ({**good, "steps": "2"}, ["state['steps']", "number", "'2'"]),
        ({**good, "momenta": good["momenta"][:2]}, ["state['momenta']", "3", "2"]),
        ({**good, "momenta": 5}, ["state['momenta']", "list of 3", "int"]),
        ({**good, "H": [np.ones(5)]}, ["state['H'][0]", "(6,)", "(5,)"]),
        ({**good, "S": [None]}, ["state['S'][0]", "NoneType"]),
        ({**good, "momenta": [*good["momenta"][:2], np.ones(7, complex)]}, ["state['momenta'][2]", "complex"]),
    ]
    for state, words in rows:
        before = [numpy_of(a) for a in everything(opt, params)]
        with pytest.raises((CafinValueError, CafinTypeError)) as caught:
            opt.load_state_dict(state)
        missing = [word for word in ("load_state_dict", *words) if word not in str(caught.value)]
        assert not missing, f"{missing} not in: {caught.value}"
        for now, then in zip(everything(opt, params), before):
            same_bits(now, then)
        assert opt.steps == 1


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_lists_are_the_callers_again(framework: str) -> None:
    """A script that clears its list of parameters stops no updates, and one that adds to it adds none."""
    nested = {"a": [make(framework, np.ones((3, 5)))], "b": [make(framework, np.ones(3))]}
    params = [a for part in nested.values() for a in part]
    layers = [Linear(*params)]
    opt = AdaFisher(nested, layers)
    nested["a"].clear()
    nested["c"] = [make(framework, np.ones(2))]
    layers.clear()
    grads = {"a": [make(framework, np.ones((3, 5)))], "b": [make(framework, np.ones(3))]}
    opt.step(grads)
    assert opt.steps == 1
    assert len(copy.deepcopy(opt).momenta) == 2
    for p in params:
        assert np.all(numpy_of(p) < 1.0)
