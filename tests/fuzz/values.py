"""The machine of what holds no state at all: descriptors, `Averaging`, and the pure functions of `reference`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import rule

import cafin_cupy
from cafin_cupy import Averaging, reference

from . import expected
from .arrays import READABLE, Style, dtype_of, make, styles, value
from .bad import NO_ARRAYS, NO_NUMBERS, bad_scalars
from .calls import Machine, attempt, figures
from .checks import exact
from .expected import Geometry, Scalars
from .faults import integers
from .functions import SCALARS, SHAPES, SPLITS, split
from .layers import Batch, batches, bias_shape, descriptor, entering, geometries, options, shapes, wrong_shapes
from .rounded import PRECISION, Rounded, check

NO_WEIGHTS = {name: x for name, x in NO_ARRAYS.items() if isinstance(x, type) or not hasattr(x, "ndim")}
WRONG_OPTIONS: dict[str, tuple[Any, ...]] = {
    "stride": (0, -1, 1.5, "1", None, (1, 1, 1, 1), (1, 0), (1, None), [], True, (True, 1), np.ones(2), 1j),
    "padding": (-1, 1.5, "same", None, (0, 0, 0, 0), (0, -1), [], True, np.ones(2), float("nan")),
    "dilation": (0, -1, 2.0, "1", None, (), (1, 0), {}, True, float("inf")),
    "groups": (0, -1, 1.0, "1", None, (1,), True, 10**9, np.ones(1)),
    "padding_idx": (10**9, -(10**9), 1.5, "1", True, (0,), []),
    "name": (1, [], {}, b"fc", 0.5, object()),
}
READ = tuple(
    layout for layout in READABLE if layout not in ("dlpack", "cuda interface")
)  # these are no arrays of theirs


class Values(Machine):
    @rule(
        layer=geometries,
        style=styles(READ),
        fault=st.one_of(st.none(), st.none(), st.sampled_from(["weight", "bias", "axes", "size", *WRONG_OPTIONS])),
        which=st.integers(0, 60),
        numpy_numbers=st.booleans(),
    )
    def describe(self, layer: Geometry, style: Style, fault: str | None, which: int, numpy_numbers: bool) -> None:
        weight: Any = make(self.framework, layer.weight, style).array
        bias: Any = make(self.framework, bias_shape(layer), style).array if layer.bias else None
        given: dict[str, Any] = options(layer)
        if numpy_numbers:
            dress = lambda v: np.int64(v) if isinstance(v, int) else v and [np.int32(n) for n in v]  # noqa: E731
            given = {k: dress(v) for k, v in given.items()}
        if fault == "weight":
            weight = list(NO_WEIGHTS.values())[which % len(NO_WEIGHTS)]
        elif fault == "bias":
            wrong = [x for x in NO_WEIGHTS.values() if x is not None]
            bias = wrong[which % len(wrong)]
        elif fault == "axes" and layer.kind not in ("LayerNorm", "RMSNorm"):
            weight = make(self.framework, (*layer.weight, 1), style).array
        elif fault == "axes":
            weight = make(self.framework, (), style).array
        elif fault == "size":
            bias = make(self.framework, (layer.outputs + 1,), style).array
        elif fault == "name":
            given["name"] = WRONG_OPTIONS["name"][which % len(WRONG_OPTIONS["name"])]
        elif fault in options(layer):
            given[fault] = WRONG_OPTIONS[fault][which % len(WRONG_OPTIONS[fault])]
        else:
            fault = None
        kind = getattr(cafin_cupy, layer.kind)
        outcome = attempt(
            f"{layer.kind}({fault or ''})",
            lambda: kind(weight, bias, **given),
            valid=fault is None,
            inputs=[given, weight if fault != "weight" else 0, bias if fault != "bias" else 0],
        )
        if outcome.done:
            made = outcome.result
            assert (made.H_size, made.S_size, made.width, made.norm) == (
                layer.length,
                layer.rows,
                layer.columns,
                layer.norm,
            )
            assert {name: getattr(made, name) for name in options(layer)} == options(layer)

    @rule(
        keep=st.sampled_from([0.0, 0.5, 1.0, 0.08, 1e-30]),
        add=st.sampled_from([0.0, 0.5, 1.0, 3.0, 1e10]),
        normalize=st.sampled_from(["before", "after"]),
        fault=st.one_of(st.none(), st.sampled_from(["keep", "add", "normalize"])),
        which=st.integers(0, 60),
    )
    def average(self, keep: float, add: float, normalize: str, fault: str | None, which: int) -> None:
        arguments: dict[str, Any] = {"keep": keep, "add": add, "normalize": normalize}
        numbers = list(NO_NUMBERS.values())
        wrong = {
            "keep": [-0.1, 1.1, *numbers],
            "add": [-0.1, *numbers],
            "normalize": [None, "Before", "", 1, [], ["before"], np.array(["before", "after"]), b"before"],
        }
        if fault is not None:
            arguments[fault] = wrong[fault][which % len(wrong[fault])]
        outcome = attempt(
            f"Averaging({fault or ''})", lambda: Averaging(**arguments), valid=fault is None, inputs=arguments
        )
        if outcome.done:
            made = outcome.result
            assert (made.keep, made.add, made.normalize) == (keep, add, normalize)

    @rule(rule=st.sampled_from(["parity", "paper"]), gamma=st.sampled_from([0.0, 0.8, 1.0]), which=st.integers(-60, 60))
    def average_by_gamma(self, rule: str, gamma: float, which: int) -> None:
        wrong = list(bad_scalars("gamma").values())
        given = gamma if which < 0 else wrong[which % len(wrong)]
        outcome = attempt(f"Averaging.{rule}()", lambda: getattr(Averaging, rule)(given), valid=which < 0)
        if outcome.done:
            made, want = outcome.result, (0.1 * gamma, 0.01 * gamma) if rule == "parity" else (gamma, 1 - gamma)
            assert np.allclose((made.keep, made.add), want, rtol=1e-15) and made.normalize in ("before", "after")

    @rule(
        shape=SHAPES,
        how=st.sampled_from(SPLITS),
        dtype=st.sampled_from(["float32", "float64"]),
        styled=styles(READ, finite=False),
        x=SCALARS,
        step=st.sampled_from([1, 2, 100]),
        fault=st.one_of(
            st.none(), st.none(), st.sampled_from(["scalar", "step", "g", "m", "H", "no S", "no array", "integers"])
        ),
        which=st.integers(0, 60),
    )
    def update(
        self, shape: Any, how: str, dtype: str, styled: Style, x: Scalars, step: int, fault: str | None, which: int
    ) -> None:
        lengths = split(shape, how)
        p, g, m = (make(self.framework, shape, styled.of(k, dtype)) for k in range(3))
        figures.seen(shape)
        pair = [make(self.framework, (n,), Style(values="positive", dtype=dtype)) for n in reversed(lengths or ())]
        given: list[Any] = [h.array for h in (p, g, m, *pair)]
        scalars: dict[str, Any] = {**vars(x), "step": step}
        wrong_array = make(self.framework, (*shape, 2), styled.of(4, dtype)).array
        if fault == "scalar":
            name = ("lr", "beta", "Lambda", "weight_decay")[which % 4]
            wrong = list(bad_scalars(name).values())
            scalars[name] = wrong[which % len(wrong)]
        elif fault == "step":
            wrong = list(bad_scalars("step").values())
            scalars["step"] = wrong[which % len(wrong)]
        elif fault in ("g", "m"):
            given["pgm".index(fault)] = wrong_array
        elif fault == "no array":
            wrong = [x for x in NO_ARRAYS.values() if not isinstance(x, np.generic)]
            given[which % len(given)] = wrong[which % len(wrong)]
            if which % len(given) > 2 and given[which % len(given)] is None:
                given[0] = None  # H and S may both be None
        elif fault == "integers":
            given[which % 3] = integers(given[which % 3])
        elif fault == "H" and math.prod(shape) and lengths:
            given[3] = make(self.framework, (lengths[1] + 1,), styled.of(5, dtype)).array
        elif fault == "no S" and lengths:
            given[4] = None
        else:
            fault = None
        outcome = attempt(
            f"reference.update({fault or ''})",
            lambda: reference.update(*given, **scalars),
            valid=fault is None,
            inputs=[p, g, m, pair, scalars, given],
        )
        if outcome.done:
            precision = PRECISION[dtype]
            factors = (Rounded.of(pair[0].value, precision), Rounded.of(pair[1].value, precision)) if pair else None
            want = expected.updated(p.value, g.value, m.value, factors, x, step, (dtype, dtype))
            for name, got, right in zip(("p", "m"), outcome.result, want):
                check(name, value(got), right)

    @rule(
        layer=geometries,
        calls=st.lists(batches, min_size=1, max_size=3),
        styled=styles(READ, ("float32", "float64", "float16", "bfloat16")),
        scale=st.sampled_from([1.0, 2.0**10, 3.0]),
        averaging=st.sampled_from([("parity", 0.8), ("paper", 0.8), ("paper", 0.0), ("parity", 1.0)]),
        fault=st.one_of(st.none(), st.none(), st.sampled_from(["shapes", "integers", "scale", "no rows", "h"])),
        which=st.integers(0, 60),
    )
    def moments(
        self,
        layer: Geometry,
        calls: list[Batch],
        styled: Style,
        scale: Any,
        averaging: tuple[str, float],
        fault: str | None,
        which: int,
    ) -> None:
        weight = make(self.framework, layer.weight, Style(dtype="float64")).array
        bias = make(self.framework, bias_shape(layer), Style(dtype="float64")).array if layer.bias else None
        made = descriptor(layer, weight, bias, None)
        sums, pairs = [], []
        for number, batch in enumerate(calls):
            fitting = shapes(layer, batch)
            wrong = list(wrong_shapes(layer, *fitting).values())
            given = wrong[which % len(wrong)] if fault == "shapes" else fitting
            held = [make(self.framework, shape, styled.of(2 * number + k)) for k, shape in enumerate(given)]
            floats, held[0] = held[0].array, entering(layer, held[0], self.framework)
            arrays: list[Any] = [x.array for x in held]
            if fault == "integers" and which % 2 and layer.kind == "Embedding":
                arrays[0] = floats
            elif fault == "integers":
                place = 1 if layer.kind == "Embedding" else which % 2
                arrays[place] = integers(arrays[place])
            elif fault == "h":
                arrays[which % 2] = list(NO_ARRAYS.values())[which // 2 % len(NO_ARRAYS)]
            outcome = attempt(
                f"reference.raw_sums({fault if fault in ('shapes', 'integers', 'h') else ''})",
                lambda arrays=arrays: reference.raw_sums(made, *arrays),
                valid=fault not in ("shapes", "integers", "h"),
                inputs=[held, arrays],
            )
            if not outcome.done:
                return
            if 0 not in (*given[0], *given[1]):
                sums.append(outcome.result)
                pairs.append(tuple(exact(x.array) for x in held))
        if not sums:
            return
        total = sums[0]
        for other in sums[1:]:
            total = attempt(
                "reference.add_sums()",
                lambda a=total, b=other: reference.add_sums(a, b),
                valid=True,
                inputs=[total, other],
            ).result
        if fault == "scale":
            wrong = list(bad_scalars("grad_scale").values())
            scale = wrong[which % len(wrong)]
        elif fault == "no rows":
            total = total._replace(n=0)
        outcome = attempt(
            f"reference.raw_moments({fault or ''})",
            lambda: reference.raw_moments(made, total, scale),
            valid=fault not in ("scale", "no rows"),
            inputs=total,
        )
        if not outcome.done:
            return
        if not expected.counted(layer, pairs):
            assert np.isnan(value(outcome.result[0])).all(), "raw moments of nothing but padding must be NaN"
            return
        want = expected.raw_moments(layer, pairs, scale)
        for name, got, right in zip("HS", outcome.result, want):
            check(f"raw {name}", value(got), right)
        self._refresh(outcome.result, averaging)

    def _refresh(self, raw: Any, averaging: tuple[str, float]) -> None:
        """The factors that follow from raw moments, and what enters the preconditioner."""
        rule_, gamma = averaging
        made = getattr(Averaging, rule_)(gamma)
        coefficients = made.keep, made.add, made.normalize
        ones = [make(self.framework, tuple(x.shape), Style(values="positive", dtype="float64")) for x in raw]
        result = attempt(
            "reference.refresh()",
            lambda: reference.refresh(ones[0].array, ones[1].array, *raw, made),
            valid=True,
            inputs=[ones, raw],
        ).result
        for name, F, x, old in zip("HS", result, raw, ones):
            precision = PRECISION["float64" if dtype_of(x) == "float64" else "float32"]
            want = expected.averaged(old.value, Rounded.of(value(x), precision), coefficients, PRECISION["float64"])
            check(f"refreshed {name}", value(F), want)
            enters = attempt("reference.effective()", lambda F=F: reference.effective(F, made), valid=True, inputs=F)
            check(
                f"effective {name}",
                value(enters.result),
                expected.effective(value(F), coefficients, PRECISION["float64"]),
            )
