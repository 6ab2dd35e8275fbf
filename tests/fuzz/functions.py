"""The machine of `fused_step`. It holds no state, but the library remembers the tables of recent calls."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from cafin_cupy import CafinError, NonFiniteError, fused_step
from cafin_cupy.backend import DTYPES as KERNEL_DTYPES

from .arrays import DTYPES, READABLE, SIXTEEN, WRITABLE, Held, Outline, Style, make, momenta_of, styles
from .bad import DRESS
from .calls import Machine, attempt, figures
from .checks import all_finite, check_update, what_counts
from .expected import Scalars
from .faults import ARRAY_FAULTS, FAULTS, OPTION_FAULTS, STRUCTURE_FAULTS, Arguments
from .rounded import PRECISION, Rounded

SHAPES = st.one_of(
    st.just((3, 2)),
    st.lists(st.sampled_from([1, 2, 3, 0, 5, 7]), max_size=4).map(tuple),
    st.sampled_from([(), (0,), (1031,), (65, 64), (4097,), (2, 3, 4, 4), (9000,)]),
)
SCALARS = st.builds(
    Scalars,
    lr=st.sampled_from([1e-3, 0.1, 1e-2, 0.0, 1.0, 1e-30, 1e6]),
    beta=st.sampled_from([0.9, 0.0, 0.5, 0.999999]),
    Lambda=st.sampled_from([1e-3, 1.0, 0.1, 1e-8, 2.0**-126, 1e6]),
    weight_decay=st.sampled_from([0.0, 0.01, 0.5]),
    decoupled=st.booleans(),
)
DRESSES = st.tuples(st.sampled_from(["lr", "beta", "Lambda", "weight_decay"]), st.sampled_from(sorted(DRESS)))
FORMS = ("list", "tuple", "dict", "nested", "single")
SPLITS = ("rows", "none", "one column", "one row")  # of a parameter into the rows of S and the columns of H


def tree(items: list[Any], form: str) -> Any:
    """The items in a structure."""
    if form == "single" and len(items) == 1:
        return items[0]
    if form == "tuple":
        return tuple(items)
    if form == "dict":
        return {f"k{number}": item for number, item in enumerate(items)}
    if form == "nested":
        return {"first": items[:1], "rest": [{"deep": tuple(items[1:])}]}
    return list(items)


def split(shape: tuple[int, ...], how: str) -> tuple[int, int] | None:
    """(rows, columns)."""
    size = math.prod(shape)
    if how == "none":
        return None
    if how == "rows" and shape:
        return shape[0], math.prod(shape[1:])
    return (1, size) if how == "one row" else (size, 1)


def kernel_takes(p: Any, m: Any, columns: int | None) -> bool | None:
    """Whether the kernel can walk over a parameter and its momentum: contiguous or channels_last, both alike."""
    if p.size == 0:
        return None  # there is nothing to walk over
    if p.flags.c_contiguous:
        return bool(m.flags.c_contiguous)
    last = p.ndim == 4 and all(a.transpose(0, 2, 3, 1).flags.c_contiguous for a in (p, m))
    return last and columns in (None, math.prod(p.shape[1:]))


class Functions(Machine):
    def __init__(self) -> None:
        super().__init__()
        self.arguments: Arguments | None = None

    @rule(
        sizes=st.lists(SHAPES, max_size=4),
        how=st.sampled_from(SPLITS),
        dtype=st.sampled_from(["float32", "float64", "float16", "bfloat16"]),
        p=styles(WRITABLE),
        g=styles((*READABLE, "another framework"), finite=False),
        m=styles(WRITABLE),
        f=styles(("contiguous", "offset", "dlpack", "cuda interface")),
        momenta=st.integers(0, 2),
        masters=st.sampled_from(["none", "copied", "others"]),
    )
    def make_arrays(
        self,
        sizes: list[Any],
        how: str,
        dtype: str,
        p: Style,
        g: Style,
        m: Style,
        f: Style,
        momenta: int,
        masters: str,
    ) -> None:
        dtype = dtype if dtype in DTYPES[self.framework] else "float32"
        kinds = [kind for kind in momenta_of(dtype) if kind in DTYPES[self.framework]]
        of = {"p": dtype, "g": dtype, "m": kinds[momenta % len(kinds)]}

        def held(style: Style, shape: tuple[int, ...], number: int, kind: str) -> Held:
            framework = self.framework
            if style.layout == "another framework" and kind != "bfloat16":
                framework = {"numpy": "torch", "torch": "numpy"}.get(framework, framework)
            figures.seen(shape)
            return make(framework, shape, style.of(number, kind))

        ps, gs, ms = (
            [held(style, shape, 5 * k + i, of[name]) for k, shape in enumerate(sizes)]
            for i, (name, style) in enumerate(zip("pgm", (p, g, m)))
        )
        ws = None
        if masters != "none" and dtype in SIXTEEN:  # of the same numbers, of which the parameters are rounded copies
            ws = [held(p, shape, 5 * k, "float32") for k, shape in enumerate(sizes)]
            for w in ws if masters == "others" else ():
                w.array[...] += 1
        wide = "float64" if ps and "float64" in str(ps[0].array.dtype) else "float32"
        positive = Style(f.layout, "positive", wide, f.seed)
        pairs: list[tuple[Held, Held] | None] = []
        for k, shape in enumerate(sizes):
            lengths = split(shape, how)
            pairs.append(
                lengths and (held(positive, lengths[1:], 5 * k + 3, wide), held(positive, lengths[:1], 5 * k + 4, wide))
            )
        self.arguments = Arguments(ps, gs, ms, pairs, ws)

    @precondition(lambda self: self.arguments is not None)
    @rule(
        x=SCALARS,
        steps=st.lists(st.sampled_from([1, 2, 7, 1000, 10**6]), min_size=1, max_size=3),
        form=st.sampled_from(FORMS),
        dress=DRESSES,
        fault=st.one_of(st.none(), st.none(), st.sampled_from(FAULTS)),
        victim=st.integers(0, 3),
        watch=st.booleans(),
        at_random=st.booleans(),
    )
    def fused_step(
        self,
        x: Scalars,
        steps: list[int],
        form: str,
        dress: tuple[str, str],
        fault: str | None,
        victim: int,
        watch: bool,
        at_random: bool,
    ) -> None:
        a = self.arguments
        assert a is not None
        count = len(a.p)
        each = [steps[k % len(steps)] for k in range(count)]
        options: dict[str, Any] = {**vars(x), "step": each if len(steps) > 1 else steps[0], "error_if_nonfinite": watch}
        options |= {"stochastic_rounding": at_random, "seed": victim}
        options[dress[0]] = DRESS[dress[1]](options[dress[0]])
        x = Scalars(**{name: type(value)(float(options[name])) for name, value in vars(x).items()})
        lists = a.lists()
        spoiled = False
        if fault in ARRAY_FAULTS and count:
            spoiled = ARRAY_FAULTS[fault](a, lists, victim % count)
        given = {name: tree(items, form) for name, items in lists.items()}
        if fault in STRUCTURE_FAULTS:
            STRUCTURE_FAULTS[fault](given)
            spoiled = True
        if fault in OPTION_FAULTS:
            options.update(OPTION_FAULTS[fault])
            spoiled = True
        valid: bool | None = not spoiled
        if valid and self.framework == "cupy" and count and a.dtype in KERNEL_DTYPES:
            columns = [pair and pair[0].array.size for pair in a.pairs]
            takes = [kernel_takes(p.array, m.array, n) for x in (a.m, a.w or a.m) for p, m, n in zip(a.p, x, columns)]
            valid = False if False in takes else None if None in takes else True
        kind: type[CafinError] = CafinError
        if valid and watch and not all_finite([g.array for g in a.g]):
            valid, kind = False, NonFiniteError
        masters = [None] * count if a.w is None else [w.array for w in a.w]
        before = [[what_counts(p.array, w) for p, w in zip(a.p, masters)], *([h.value for h in x] for x in (a.g, a.m))]
        outcome = attempt(
            f"fused_step({'' if not spoiled else fault})",
            lambda: fused_step(**given, **options),
            valid=valid,
            inputs=[a.g, a.pairs, options, given["grads"], given["factors"], Outline(given)],
            state=[a.p, a.m, a.w],
            kind=kind,
        )
        if not outcome.done:
            return
        for k, (p, g, m) in enumerate(zip(*before)):
            pair = a.pairs[k] and tuple(Rounded.of(F.value, PRECISION[str(F.array.dtype)[-7:]]) for F in a.pairs[k])
            check_update(f"params[{k}]", a.p[k].array, a.m[k].array, (p, g, m), pair, x, each[k], 1.0, masters[k])
