"""The machine of `AdaFisher` on raw arrays."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from cafin_cupy import AdaFisher, Averaging, CafinError, NonFiniteError
from cafin_cupy.backend import DTYPES as KERNEL_DTYPES

from .arrays import READABLE, WRITABLE, Held, Outline, Style, dtype_of, fingerprint, make, styles, value
from .bad import DRESS, NO_ARRAYS, bad_scalars
from .calls import Machine, attempt, figures
from .checks import Rule, all_finite, check_update, exact
from .expected import Geometry, Scalars
from .faults import ARRAY_FAULTS, CONSTRUCTION_FAULTS, STRUCTURE_FAULTS, Arguments, integers
from .functions import DRESSES, FORMS, SCALARS, SHAPES, tree
from .layers import Batch, batches, bias_shape, descriptor, geometries, shapes, wrong_shapes
from .rounded import PRECISION
from .states import spoiled_arrays

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


def coefficients(averaging: Any, gamma: float) -> tuple[float, float, str]:
    if isinstance(averaging, Averaging):
        return averaging.keep, averaging.add, averaging.normalize
    return (0.1 * gamma, 0.01 * gamma, "before") if averaging == "parity" else (gamma, 1.0 - gamma, "after")


class Optimizer(Machine):
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
        p=styles(WRITABLE, ("float32", "float32", "float64", "float16", "bfloat16")),
        form=st.sampled_from(FORMS),
        averaging=st.sampled_from(sorted(RULES)),
        gamma=st.sampled_from([0.8, 0.0, 1.0]),
        TCov=st.sampled_from([1, 2, 3, 100]),
        x=SCALARS,
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
    ) -> None:
        self._build([chosen[0], *chosen] if tied and chosen else chosen, tied, loose, p)
        self.form, self.x, self.TCov, self.t = form, x, TCov, 0
        self.average = Rule(coefficients(RULES[averaging], gamma))
        self.pending: list[list[Any]] = [[] for _ in self.layers]
        self.skips = [0] * len(self.layers)
        self.saved: list[Any] = []
        params, layers = tree([held.array for held in self.p], form), [layer for _, layer in self.layers]
        options = {"averaging": RULES[averaging], "gamma": gamma, "TCov": TCov, **vars(x)}
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
        return [self.p, opt.momenta, opt.factors(), opt.skipped_refreshes(), opt.error_if_nonfinite, scalars]

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
        given = [x.given for x in held]
        if fault in ("h", "s"):
            given["hs".index(fault)] = list(NO_ARRAYS.values())[which % len(NO_ARRAYS)]
        elif fault == "integers":
            given[which % 2] = integers(held[which % 2].array)
        elif fault == "layer":
            others: list[Any] = [copy.copy(given_layer), None, "fc", number, type(given_layer)]
            given_layer = others[which % len(others)]
        takes = ("float32", "float16", "bfloat16") if self.kernels else tuple(PRECISION)
        valid: bool | None = fault is None and all(dtype_of(x.array) in takes for x in held)
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
        before = [(p.value, g.value, m.value) for p, g, m in zip(self.p, grads, momenta)]
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
        check_update(str(k), self.p[k].array, self.opt.momenta[k], was, pair, self.x, self.t, scale)

    @rule(watch=st.booleans())
    def watch(self, watch: bool) -> None:
        self.opt.error_if_nonfinite = watch

    @rule()
    def discard(self) -> None:
        attempt("discard()", self.opt.discard, valid=True, inputs=self.everything)
        self.pending = [[] for _ in self.layers]

    @rule(seed=st.integers(0, 99))
    def start_again(self, seed: int) -> None:
        """New parameters, in place, which a run that has diverged needs."""
        for k, held in enumerate(self.p):
            held.array[...] = make(
                self.framework, tuple(held.array.shape), Style(dtype=self.dtype, seed=seed).of(k)
            ).array
            self.opt.momenta[k][...] = 0.0

    @rule(x=SCALARS, dress=DRESSES)
    def change_scalars(self, x: Scalars, dress: tuple[str, str]) -> None:
        values = {**vars(x), dress[0]: DRESS[dress[1]](getattr(x, dress[0]))}
        for name, number in values.items():
            setattr(self.opt, name, number)
        self.x = Scalars(**{name: type(getattr(x, name))(float(number)) for name, number in values.items()})

    @rule(name=st.sampled_from(KEPT), which=st.integers(0, 40))
    def spoil_a_scalar(self, name: str, which: int) -> None:
        good, wrong = getattr(self.opt, name), list(bad_scalars(name).values())
        setattr(self.opt, name, wrong[which % len(wrong)])
        grads = [make(self.framework, tuple(p.array.shape), Style(dtype=self.dtype)) for p in self.p]
        given = tree([g.array for g in grads], self.form)
        attempt(
            f"step with {name}", lambda: self.opt.step(given), valid=False, inputs=[grads, given], state=self.everything
        )
        setattr(self.opt, name, good)

    @rule(
        TCov=st.sampled_from([1, 2, 3, 100]), fault=st.one_of(st.none(), st.sampled_from(sorted(bad_scalars("TCov"))))
    )
    def change_TCov(self, TCov: int, fault: str | None) -> None:
        given = TCov if fault is None else bad_scalars("TCov")[fault]
        outcome = attempt(
            "TCov", lambda: setattr(self.opt, "TCov", given), valid=fault is None, inputs=self.p, state=self.everything
        )
        if outcome.done:
            self.TCov = TCov
            if not self.samples:
                self.pending = [[] for _ in self.layers]

    @rule()
    def save(self) -> None:
        state = attempt("state_dict()", self.opt.state_dict, valid=True, inputs=self.everything).result
        H, S = (list(part) for part in zip(*self.named_factors())) if self.layers else ([], [])
        own = {"steps": self.t, "momenta": self.opt.momenta, "H": H, "S": S}
        assert {k: v if k == "steps" else list(map(id, v)) for k, v in state.items()} == {
            k: v if k == "steps" else list(map(id, v)) for k, v in own.items()
        }
        self.saved = [*self.saved[-2:], copy.deepcopy(state)]

    @precondition(lambda self: self.saved)
    @rule(which=st.integers(0, 2), own=st.booleans(), fault=st.one_of(st.none(), st.integers(0, 400)))
    def load(self, which: int, own: bool, fault: int | None) -> None:
        state = self.opt.state_dict() if own else self.saved[which % len(self.saved)]
        given = state if fault is None else spoiled_arrays(state, fault)
        want = {key: [value(a) for a in state[key]] for key in ("momenta", "H", "S")}
        outcome = attempt(
            "load_state_dict()" if fault is None else "load_state_dict(fault)",
            lambda: self.opt.load_state_dict(given),
            valid=fault is None,
            inputs=[*self.saved, Outline(state), self.p],
            state=self.everything,
        )
        if not outcome.done:
            return
        self.t = int(state["steps"])
        self.pending = [[] for _ in self.layers]
        self.skips = [0] * len(self.layers)
        now = self.opt.state_dict()
        for key, arrays in want.items():
            for got, right in zip(now[key], arrays):
                assert np.array_equal(value(got), right, equal_nan=True)

    @rule(how=st.sampled_from(["deepcopy", "pickle"]), adopt=st.booleans())
    def duplicate(self, how: str, adopt: bool) -> None:
        held = {
            name: [h.array for h in self.p] if name == "p" else [layer for _, layer in self.layers] for name in "pl"
        }
        source = self.opt, held
        waits = any(self.pending)
        outcome = attempt(
            f"{how}()",
            lambda: copy.deepcopy(source) if how == "deepcopy" else pickle.loads(pickle.dumps(source)),
            valid=None if waits else True,
            state=self.everything,
            inputs=[self.p],
        )
        assert not (outcome.done and waits), "a copy has lost sums"
        if not outcome.done:
            return
        twin, copied = outcome.result
        mine, theirs = (
            [[value(a) for a in arrays] for arrays in (*state.values(),) if isinstance(arrays, list)]
            for state in (self.opt.state_dict(), twin.state_dict())
        )
        assert twin.steps == self.t
        assert list(twin.skipped_refreshes().values()) == self.skips
        for one, other in zip(mine, theirs):
            assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one, other, strict=True))
        if adopt:
            self.opt = twin
            self.p = [Held(array) for array in copied["p"]]
            self.layers = [(layer, made) for (layer, _), made in zip(self.layers, copied["l"])]
