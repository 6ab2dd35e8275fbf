"""What both forms of the optimizer refuse, while they are traced: options, parameters, gradients, states, factors."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")
import jax
import jax.numpy as jnp
from helpers import refuses
from jax_helpers import both_forms, same_trees

from cafin_cupy import CafinTypeError, CafinValueError
from cafin_cupy.adapters.jax import ChannelNorm, Dense, Layers, adafisher, fused_adafisher

FORMS = ["fused", "optax"]
PARAMS = {"dense": jnp.ones((4, 3)), "norm": jnp.ones(4), "plain": jnp.ones(7)}
KINDS = {"dense": Dense(weight="dense"), "norm": ChannelNorm(weight="norm")}
LAYERS = Layers(PARAMS, KINDS)


GRADS = jax.tree.map(jnp.zeros_like, PARAMS)
SUMS = LAYERS.zeros()

ARGUMENTS: list[tuple[dict[str, Any], type, tuple[str, ...]]] = [
    ({"lr": -1.0}, CafinValueError, ("`lr`", ">= 0", "-1")),
    ({"lr": "fast"}, CafinTypeError, ("`lr`", "number", "'fast'")),
    ({"lr": jnp.ones(2)}, CafinTypeError, ("`lr`", "single number")),
    ({"beta": 1.0}, CafinValueError, ("`beta`", "[0, 1)", "1.0")),
    ({"beta": lambda count: 0.9}, CafinTypeError, ("`beta`", "function", "inject_hyperparams")),
    ({"Lambda": 0.0}, CafinValueError, ("`Lambda`", "> 0")),
    ({"gamma": 1.5}, CafinValueError, ("`gamma`", "[0, 1]", "1.5")),
    ({"TCov": 0}, CafinValueError, ("`TCov`", ">= 1", "0")),
    ({"TCov": 2.5}, CafinValueError, ("`TCov`", "2.5")),
    ({"weight_decay": float("nan")}, CafinValueError, ("`weight_decay`", "finite")),
    ({"layers": KINDS}, CafinTypeError, ("`layers`", "Layers", "dict", "find")),
    ({"decoupled": "yes"}, CafinTypeError, ("`decoupled`", "True or False")),
    ({"averaging": "mean"}, CafinValueError, ("`averaging`", "parity", "'mean'")),
    ({"momentum_dtype": "int32"}, CafinTypeError, ("`momentum_dtype`", "floating", "int32")),
    ({"momentum_dtype": "float31"}, CafinTypeError, ("`momentum_dtype`", "floating", "float31")),
    ({"mask": "all"}, CafinTypeError, ("`mask`", "tree of bools", "str")),
]


@pytest.mark.parametrize("make", [adafisher, fused_adafisher])
@pytest.mark.parametrize(("options", "kind", "words"), ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_options_that_cannot_be(make: Any, options: dict[str, Any], kind: type, words: tuple[str, ...]) -> None:
    where = "" if {"gamma", "averaging"} & set(options) else make.__name__
    with refuses(kind, where, *words):
        make(**{"layers": None, **options})


def test_a_backend_that_is_none() -> None:
    with refuses(CafinValueError, "fused_adafisher", "`backend`", "'rocm'"):
        fused_adafisher(layers=None, backend="rocm")


def changed(**leaves: Any) -> dict[str, Any]:
    return {**GRADS, **leaves}


STEPS: dict[str, tuple[dict[str, Any], type, tuple[str, ...]]] = {
    "no gradient": (
        {"grads": {"dense": jnp.zeros((4, 3))}},
        CafinTypeError,
        ("`grads`", "structure of the parameters"),
    ),
    "None as gradient": ({"grads": changed(plain=None)}, CafinTypeError, ("`grads`", "structure")),
    "shape": ({"grads": changed(plain=jnp.zeros(8))}, CafinValueError, ("grads['plain']", "(7,)", "(8,)")),
    "whole numbers": ({"grads": changed(plain=jnp.zeros(7, int))}, CafinTypeError, ("grads['plain']", "int32")),
    "complex": ({"grads": changed(plain=jnp.zeros(7, complex))}, CafinTypeError, ("grads['plain']", "complex64")),
    "text": ({"grads": changed(plain="none")}, CafinTypeError, ("grads['plain']", "str")),
    "factors of others": ({"factors": {"dense": 0}}, CafinTypeError, ("`factors`", "layers.zeros()")),
    "no sums": ({"factors": dict.fromkeys(LAYERS, 1.0)}, CafinTypeError, ("factors['dense']", "RawSums", "float")),
    "shapes of others": (
        {"factors": {**SUMS, "norm": SUMS["dense"]}},
        CafinValueError,
        ("factors['norm'].S", "(4,)", "(3,)"),
    ),
    "sums of None": (
        {"factors": {**SUMS, "norm": SUMS["norm"]._replace(H=None)}},
        CafinValueError,
        ("factors['norm'].H", "(4,)", "NoneType"),
    ),
    "sums of whole numbers": (
        {"factors": {**SUMS, "norm": jax.tree.map(lambda x: x.astype(int), SUMS["norm"])}},
        CafinValueError,
        ("factors['norm'].H", "floating-point", "int32"),
    ),
    "state of another kind": ({"state": ()}, CafinTypeError, ("`state`", "be State", "tuple", "init")),
    "grad_scale of text": ({"grad_scale": "big"}, CafinTypeError, ("`grad_scale`", "number", "'big'")),
    "grad_scale of 0": ({"grad_scale": 0.0}, CafinValueError, ("`grad_scale`", "> 0", "0")),
    "grad_scale of several": ({"grad_scale": jnp.ones(2)}, CafinTypeError, ("`grad_scale`", "(2,)")),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", STEPS)
def test_steps_that_cannot_be(case: str, form: str) -> None:
    given, kind, words = STEPS[case]
    init, step = both_forms(layers=LAYERS)[form]
    given = {"grads": GRADS, "state": init(PARAMS), **given}
    grads, state = given.pop("grads"), given.pop("state")
    with refuses(kind, "adafisher", *words):
        step(PARAMS, grads, state, **given)


@pytest.mark.parametrize("form", FORMS)
def test_a_state_of_other_layers(form: str) -> None:
    _, step = both_forms(layers=LAYERS)[form]
    others = both_forms(layers=None)[form][0](PARAMS)
    with refuses(CafinValueError, "state.factors", str(LAYERS.size), "(0,)"):
        step(PARAMS, GRADS, others)
    of_paper = both_forms(layers=LAYERS, averaging="paper")[form][0](PARAMS)
    with refuses(CafinValueError, "state.factors.averages", "averaging"):
        step(PARAMS, GRADS, of_paper)


STATES: dict[str, Any] = {
    "factors.used in bfloat16": lambda s: s._replace(
        factors=s.factors._replace(used=s.factors.used.astype("bfloat16"))
    ),
    "factors.skipped without axis": lambda s: s._replace(factors=s.factors._replace(skipped=jnp.int32(0))),
    "factors.used of None": lambda s: s._replace(factors=None),
    "count of None": lambda s: s._replace(count=None),
    "count as number": lambda s: s._replace(count=0),
    "count of several": lambda s: s._replace(count=jnp.zeros(2, jnp.int32)),
    "count in float32": lambda s: s._replace(count=jnp.zeros(())),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", STATES)
def test_a_state_of_other_types(case: str, form: str) -> None:
    """As where a whole state was cast: the kernel would read beside the factors."""
    init, step = both_forms(layers=LAYERS)[form]
    with refuses(CafinValueError, f"`state.{case.split()[0]}`", "32 of shape", "as `init` made it"):
        step(PARAMS, GRADS, STATES[case](init(PARAMS)))


@pytest.mark.parametrize("form", FORMS)
def test_momentum_and_parameters_of_whole_numbers(form: str) -> None:
    init, step = both_forms(layers=LAYERS)[form]
    state, whole = init(PARAMS), changed(plain=jnp.zeros(7, int))
    with refuses(CafinTypeError, "state.momentum['plain']", "floating-point", "int32"):
        step(PARAMS, GRADS, state._replace(momentum=whole))
    with refuses(CafinTypeError, "params['plain']", "floating-point", "int32"):
        step(whole, GRADS, state)


@pytest.mark.parametrize("form", FORMS)
def test_parameters_of_another_model(form: str) -> None:
    """Its layers would be updated without factors, and nobody would know."""
    init, step = both_forms(layers=LAYERS)[form]

    def renamed(tree: Any) -> Any:
        return {"other": tree["dense"], "norm": tree["norm"], "plain": tree["plain"]}

    state = init(PARAMS)
    with refuses(CafinValueError, "`params`", "'dense'", "other"):
        step(renamed(PARAMS), renamed(GRADS), state._replace(momentum=renamed(state.momentum)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rate", [jnp.ones(1), None, "fast", -1.0], ids=str)
def test_schedules_that_return_no_rate(rate: Any, form: str) -> None:
    init, step = both_forms(layers=LAYERS, lr=lambda count: rate)[form]
    with refuses(CafinValueError if rate == -1.0 else CafinTypeError, "`lr(count)`"):
        step(PARAMS, GRADS, init(PARAMS))


@pytest.mark.parametrize("form", FORMS)
def test_parameters_that_cannot_be(form: str) -> None:
    init, _ = both_forms(layers=LAYERS)[form]
    for strange in (1.0, "w", object()):
        with refuses(CafinTypeError, "`plain`", "an array of floating-point", type(strange).__name__):
            init(changed(plain=strange))
    with refuses(CafinTypeError, "`plain`", "floating-point", "int32"):
        init(changed(plain=jnp.zeros(7, int)))
    with refuses(CafinTypeError, "`plain`", "floating-point", "complex64"):
        init(changed(plain=jnp.zeros(7, complex)))
    with refuses(CafinValueError, "`params`", "'dense'", "Layers"):
        init({"plain": jnp.zeros(7)})
    with refuses(CafinValueError, "`params`", "'norm'", "(4,)", "(9,)"):
        init(changed(norm=jnp.zeros(9)))


def test_an_update_without_parameters() -> None:
    transform = adafisher(layers=None)
    with refuses(CafinTypeError, "adafisher", "`params`", "third argument"):
        transform.update(GRADS, transform.init(PARAMS))


@pytest.mark.parametrize("mask", [{"dense": True}, [True], dict.fromkeys(PARAMS, 1.5)], ids=["part", "list", "numbers"])
def test_masks_that_cannot_be(mask: Any) -> None:
    with refuses(CafinTypeError, "`mask`", "tree of bools"):
        optimizer = fused_adafisher(layers=None, weight_decay=0.1, mask=mask)
        optimizer.step(PARAMS, GRADS, optimizer.init(PARAMS))


def test_a_mask_may_be_a_prefix_of_the_tree() -> None:
    params = {"a": {"w": jnp.ones(2), "b": jnp.ones(2)}, "c": jnp.ones(2)}
    optimizer = fused_adafisher(0.5, beta=0.0, weight_decay=1.0, layers=None, mask={"a": False, "c": True})
    new, _ = optimizer.step(params, jax.tree.map(jnp.zeros_like, params), optimizer.init(params))
    same_trees(new, {"a": {"w": jnp.ones(2), "b": jnp.ones(2)}, "c": jnp.full(2, 0.5)})
