"""A run of `AdaFisher` on raw arrays: the part of its machine that trains."""

from __future__ import annotations

import copy
import itertools
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from cafin_cupy import AdaFisher, Averaging, CafinError, NonFiniteError
from cafin_cupy.backend import DTYPES as KERNEL_DTYPES

from .arrays import (
    DTYPES,
    READABLE,
    SIXTEEN,
    WRITABLE,
    Held,
    Outline,
    Style,
    dtype_of,
    fingerprint,
    make,
    momenta_of,
    styles,
    value,
)
from .bad import NO_ARRAYS, bad_scalars
from .calls import Machine, attempt, figures
from .checks import Rule, all_finite, check_update, exact, what_counts
from .expected import Geometry, Scalars
from .faults import ARRAY_FAULTS, CONSTRUCTION_FAULTS, STRUCTURE_FAULTS, Arguments, integers
from .functions import FORMS, SCALARS, SHAPES, tree
from .layers import Batch, batches, bias_shape, descriptor, entering, geometries, shapes, wrong_shapes
from .rounded import PRECISION

RULES: dict[str, Any] = {
    "parity": "parity",
    "paper": "paper",
    "last moment": Averaging(0.0, 1.0, "after"),
    "half and half": Averaging(0.5, 0.5, "before"),
    "sum": Averaging(1.0, 3.0, "after"),
}
GRAD_FAULTS = [name for name in (*ARRAY_FAULTS, *STRUCTURE_FAULTS) if "grads: " in name]
SCALE_FAULTS = bad_scalars("grad_scale")
KEPT = ("lr", "beta", "Lambda", "weight_decay")  # scalars that may change between steps
PRECISIONS = st.fixed_dictionaries(
    {
        "momentum_dtype": st.sampled_from([None, None, "float32", "bfloat16", "float16", "float64"]),
        "rounding": st.sampled_from([{}, {"master_weights": True}, {"stochastic_rounding": True}]),
        "seed": st.sampled_from([0, 1, 2**64 - 1]),
    }
)


def fitting_precision(drawn: dict[str, Any], dtype: str, known: tuple[str, ...]) -> dict[str, Any]:
    """Options of the constructor, with a momentum that goes with a parameter's dtype."""
    fits = drawn["momentum_dtype"] in momenta_of(dtype) and drawn["momentum_dtype"] in known
    return {"momentum_dtype": drawn["momentum_dtype"] if fits else None, "seed": drawn["seed"], **drawn["rounding"]}


def coefficients(averaging: Any, gamma: float) -> tuple[float, float, str]:
    if isinstance(averaging, Averaging):
        return averaging.keep, averaging.add, averaging.normalize
    return (0.1 * gamma, 0.01 * gamma, "before") if averaging == "parity" else (gamma, 1.0 - gamma, "after")


class ArrayRun(Machine):
    """Attributes:
    t: completed steps.
    pending: of each layer, the (h, s) of the coming sampled step, with their precision.
    owner: of each parameter (layer, "weight" or "bias"), or None.
    skips: of each layer, how often a NaN has kept its factors as they were.
    """

    @initialize(
        chosen=st.lists(st.tuples(geometries, st.sampled_from(["all", "weight", "bias"])), max_size=3),
        tied=st.booleans(),
        loose=st.lists(SHAPES, max_size=2),
        p=styles(WRITABLE, ("float32", "float32", "float64", "float16", "float16", "bfloat16")),
        form=st.sampled_from(FORMS),
        averaging=st.sampled_from(sorted(RULES)),
        gamma=st.sampled_from([0.8, 0.0, 1.0]),
        TCov=st.sampled_from([1, 2, 3, 100]),
        x=SCALARS,
        precision=PRECISIONS,
    )
    def construct(
        self,
        chosen: list[tuple[Geometry, str]],
        tied: bool,
        loose: list[Any],
        p: Style,
        form: str,
        averaging: str,
        gamma: float,
        TCov: int,
        x: Scalars,
        precision: dict[str, Any],
    ) -> None:
        self._build([chosen[0], *chosen] if tied and chosen else chosen, tied, loose, p)
        self.form, self.x, self.TCov, self.t = form, x, TCov, 0
        self.average = Rule(coefficients(RULES[averaging], gamma))
        self.pending: list[list[Any]] = [[] for _ in self.layers]
        self.skips = [0] * len(self.layers)
        self.saved: list[Any] = []
        params, layers = tree([held.array for held in self.p], form), [layer for _, layer in self.layers]
        self.precision = fitting_precision(precision, self.dtype, DTYPES[self.framework])
        options = {"averaging": RULES[averaging], "gamma": gamma, "TCov": TCov, **vars(x), **self.precision}
        self.opt: Any = attempt(
            "AdaFisher()",
            lambda: AdaFisher(params, layers, **options),
            valid=True,
            inputs=[self.p, options, Outline(params), Outline(layers)],
        ).result
        for given in (params, layers):  # they are the caller's again
            if isinstance(given, (list, dict)):
                given.clear()

    def _build(self, chosen: list[tuple[Geometry, str]], tied: bool, loose: list[Any], p: Style) -> None:
        """Make layers and parameters: `chosen` layers, of each what trains; `loose` shapes of no layer."""
        takes = p.dtype == "float64" or p.layout in ("offset", "channels_last")
        if self.framework == "cupy" and not takes:  # the kernels would refuse it
            p = Style("contiguous", p.values, p.dtype, p.seed)
        number = itertools.count()

        def array(shape: tuple[int, ...]) -> Held:
            figures.seen(shape)
            return make(self.framework, shape, p.of(next(number)))

        self.p: list[Held] = []
        self.layers: list[tuple[Geometry, Any]] = []
        for k, (layer, trains) in enumerate(chosen):
            weight = Held(self.layers[0][1].weight) if tied and k == 1 else array(layer.weight)
            bias = array(bias_shape(layer)) if layer.bias else None
            made = descriptor(layer, weight.array, bias and bias.array, f"fc{k}" if k % 2 else None)
            self.layers.append((layer, made))
            held = [weight, bias] if bias else [weight]
            parts = {"weight": held[:1], "bias": held[-1:], "all": held}[trains]
            self.p += [part for part in parts if all(part.array is not other.array for other in self.p)]
        self.p += [array(shape) for shape in loose or ([] if self.p else [(3,)])]
        roles = [(k, role, made) for k, (_, made) in enumerate(self.layers) for role in ("weight", "bias")]
        self.owner: list[tuple[int, str] | None] = [
            next(((k, role) for k, role, made in roles if getattr(made, role) is held.array), None) for held in self.p
        ]

    # What must be known of the optimizer

    @property
    def dtype(self) -> str:
        return dtype_of(self.p[0].array)

    @property
    def kernels(self) -> bool:
        return self.framework == "cupy" and self.dtype in KERNEL_DTYPES

    @property
    def samples(self) -> bool:
        return self.t % self.TCov == 0

    def everything(self) -> list[Any]:
        opt = self.opt
        scalars = [getattr(opt, name) for name in (*KEPT, "decoupled", "TCov", "steps", "samples", "backend")]
        return [
            self.p,
            opt.momenta,
            opt.masters,
            opt.factors(),
            opt.skipped_refreshes(),
            opt.error_if_nonfinite,
            scalars,
        ]

    def named_factors(self) -> list[tuple[Any, Any]]:
        factors = self.opt.factors()
        names = [layer.name or str(number) for number, (_, layer) in enumerate(self.layers)]
        assert list(factors) == names
        return list(factors.values())

    @invariant()
    def counts(self) -> None:
        if not hasattr(self, "opt"):
            return
        opt = self.opt
        assert (opt.steps, opt.TCov, opt.samples) == (self.t, self.TCov, self.samples)
        usual = momenta_of(self.dtype)[0]
        assert {dtype_of(m) for m in opt.momenta} == {self.precision["momentum_dtype"] or usual}
        masters = self.precision.get("master_weights") and self.dtype in SIXTEEN
        assert [w is not None for w in opt.masters] == len(self.p) * [bool(masters)]
        assert opt.backend == ("cuda" if self.kernels else "reference")
        assert list(opt.skipped_refreshes().values()) == self.skips
        for (layer, _), (H, S) in zip(self.layers, self.named_factors()):
            assert (tuple(H.shape), tuple(S.shape)) == ((layer.length,), (layer.rows,))

    @rule(fault=st.sampled_from(sorted(CONSTRUCTION_FAULTS)))
    def refused_construction(self, fault: str) -> None:
        """Of a second optimizer for the same arrays."""
        arguments = {"params": [h.array for h in self.p], "layers": [layer for _, layer in self.layers], **vars(self.x)}
        if CONSTRUCTION_FAULTS[fault](arguments) is False:
            return
        attempt(f"AdaFisher({fault})", lambda: AdaFisher(**arguments), valid=False, inputs=self.everything)

    # Valid and invalid calls

    @precondition(lambda self: self.layers)
    @rule(
        place=st.integers(0, 3),
        batch=batches,
        h=styles((*READABLE, "another framework"), ("float32", "float32", "float16", "float64"), finite=False),
        s=styles((*READABLE, "another framework"), ("float32", "float32", "bfloat16", "float64"), finite=False),
        fault=st.one_of(st.none(), st.none(), st.sampled_from(["shapes", "h", "s", "layer", "integers"])),
        which=st.integers(0, 30),
    )
    def accumulate(self, place: int, batch: Batch, h: Style, s: Style, fault: str | None, which: int) -> None:
        number = place % len(self.layers)
        layer, given_layer = self.layers[number]
        fitting = shapes(layer, batch)
        if fault == "shapes":
            wrong = list(wrong_shapes(layer, *fitting).values())
            fitting = wrong[which % len(wrong)]
        held = [self._any_array(style, shape, k) for k, (style, shape) in enumerate(zip((h, s), fitting))]
        made, held[0] = held[0], entering(layer, held[0], self.framework)
        table = layer.kind == "Embedding"
        given = [x.given for x in held]
        if fault in ("h", "s"):
            given["hs".index(fault)] = list(NO_ARRAYS.values())[which % len(NO_ARRAYS)]
        elif fault == "integers" and table and which % 2:
            given[0] = made.array
        elif fault == "integers":
            given[table or which % 2] = integers(held[table or which % 2].array)
        elif fault == "layer":
            others: list[Any] = [copy.copy(given_layer), None, "fc", number, type(given_layer)]
            given_layer = others[which % len(others)]
        takes = ("float32", "float16", "bfloat16") if self.kernels else tuple(PRECISION)
        valid: bool | None = fault is None and all(dtype_of(x.array) in takes for x in held[table:])
        if fault != "layer" and not self.samples:
            valid = None if not valid else True  # documented: it does nothing then
        outcome = attempt(
            f"accumulate({fault or ''})",
            lambda: self.opt.accumulate(given_layer, *given),
            valid=valid,
            inputs=[held, given],
            state=self.everything,
        )
        if outcome.done and self.samples and 0 not in (*fitting[0], *fitting[1]):
            self.pending[number].append(tuple(exact(x.array) for x in held))
        self._overwrite(held)

    def _any_array(self, style: Style, shape: tuple[int, ...], number: int) -> Held:
        framework = self.framework
        if style.layout == "another framework":
            framework = {"numpy": "torch", "torch": "numpy"}.get(framework, framework)
        figures.seen(shape)
        return make(framework, shape, style.of(number))

    def _overwrite(self, helds: list[Held]) -> None:
        """The arrays of a call are the caller's again."""
        for held in helds:
            if held.memory is not None:
                held.memory[...] = float("nan")

    @rule(
        g=styles((*READABLE, "another framework"), finite=False),
        scale=st.sampled_from([1.0, 1.0, 2.0**11, 0.125, 3.0]),
        fault=st.one_of(st.none(), st.none(), st.sampled_from([*GRAD_FAULTS, *(f"scale: {k}" for k in SCALE_FAULTS)])),
        victim=st.integers(0, 9),
    )
    def step(self, g: Style, scale: Any, fault: str | None, victim: int) -> None:
        opt, count = self.opt, len(self.p)
        style = Style(g.layout, g.values, self.dtype, g.seed)
        if self.dtype == "bfloat16" and g.layout == "another framework":
            style = Style("contiguous", g.values, self.dtype, g.seed)
        grads = [self._any_array(style, tuple(held.array.shape), k) for k, held in enumerate(self.p)]
        momenta = [Held(m) for m in opt.momenta]
        a = Arguments(self.p, grads, momenta, [None] * count)
        lists = a.lists()
        spoiled = fault in ARRAY_FAULTS and ARRAY_FAULTS[fault](a, lists, victim % count)
        given = {"grads": tree(lists["grads"], self.form)}
        if fault in STRUCTURE_FAULTS:
            STRUCTURE_FAULTS[fault](given)
            spoiled = True
        if fault and fault.startswith("scale: "):
            scale, spoiled = SCALE_FAULTS[fault.removeprefix("scale: ")], True
        counts = map(what_counts, [p.array for p in self.p], opt.masters)
        before = [(p, g.value, m.value) for p, g, m in zip(counts, grads, momenta)]
        factors = [tuple(value(F) for F in pair) for pair in self.named_factors()]
        before_them = [fingerprint(F) for pair in self.named_factors() for F in pair]
        finite = spoiled or not opt.error_if_nonfinite or self._finite(grads, scale)
        outcome = attempt(
            f"step({fault if spoiled else ''})",
            lambda: opt.step(given["grads"], grad_scale=scale),
            valid=finite and not spoiled,
            inputs=[grads, given],
            state=self.everything,
            kind=CafinError if finite else NonFiniteError,
        )
        if not outcome.done:
            return
        if self.samples:
            self._check_factors(factors, scale)
            self.pending = [[] for _ in self.layers]
        else:
            after_them = [fingerprint(F) for pair in self.named_factors() for F in pair]
            assert after_them == before_them, "factors have changed on an unsampled step"
        self.t += 1
        for k, arrays in enumerate(before):
            self._check_parameter(k, arrays, scale)
        self._overwrite(grads)

    def _finite(self, grads: list[Held], scale: float) -> bool | None:
        """Whether all that the coming step will use is."""
        pairs = zip(self.layers, self.pending) if self.samples else ()
        moments = [self.average.finite(layer, calls, scale) for (layer, _), calls in pairs]
        return all_finite([g.array for g in grads], moments)

    def _check_factors(self, factors: list[Any], scale: float) -> None:
        """After a sampled step. `factors` are those before it."""
        skips = list(self.opt.skipped_refreshes().values())
        for number, ((layer, made), old, new) in enumerate(zip(self.layers, factors, self.named_factors())):
            calls = self.pending[number]
            kept = self.average.check_factors(f"layer {number}", layer, made.weight, calls, scale, old, new)
            self.skips[number] = skips[number] if kept is None else self.skips[number] + kept

    def _check_parameter(self, k: int, was: tuple[Any, Any, Any], scale: float) -> None:
        pair, owner = None, self.owner[k]
        if owner is not None:
            layer, made = self.layers[owner[0]]
            pair = self.average.pair(layer, owner[1], made.weight, self.named_factors()[owner[0]])
        opt = self.opt
        check_update(str(k), self.p[k].array, opt.momenta[k], was, pair, self.x, self.t, scale, opt.masters[k])
