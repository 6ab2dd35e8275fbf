"""The whole rule in plain array code: the oracle of every kernel, and the optimizer where there is no GPU.

Pure functions on whatever arrays they are given (NumPy, PyTorch, CuPy, JAX: anything that `array-api-compat` knows),
without conversion and on the arrays' own device. Nothing is changed in place, except by `update_in_place` and
`updates_in_place`.

One sampled step of one layer:

    sums = add_sums(raw_sums(layer, h, s), ...)          # once per forward/backward pair
    H_raw, S_raw = raw_moments(layer, sums)
    H, S = refresh(H, S, H_raw, S_raw, rule)
    p, m = update(p, g, m, effective(H, rule)[:-1], effective(S, rule), ...)

Source of the formulas: AdaFisher (Gomes et al., arXiv 2405.16397), as its public implementation computes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from array_api_compat import array_namespace, device, is_jax_array, is_torch_array

from .arrays import where_is
from .checks import check_layer, check_pair, check_update
from .errors import CafinTypeError, refuse
from .layers import Columns, Layer, Patches
from .rounding import Noise, noise_like, rounded, widened
from .rule import Averaging, Hyper, Scalars, at_least, whole

PIECE = 2**18  # elements: with what is computed from them they fit a CPU's cache, and still feed several threads
EPSILON = 1e-6  # of the min-max normalisation; gradients are small, so it matters: never rescale a moment before it


class RawSums(NamedTuple):
    """What one sampled step has seen of a layer; additive over micro-batches, repeated calls and ranks.

    Attributes:
        H: sums of the input: squares for Linear (d_in,) and convolutions (K,), plain sums for norm layers (units,),
            counts for Embedding (V,).
        S: sums of the output gradient: squares, or plain sums for norm layers; (S_size,), of transposed convolutions
            those for the weight and then those for the bias.
        n: rows, samples, or batch times output positions: what the sums will be divided by. In JAX's programs an array
            without axes.
    """

    H: Any
    S: Any
    n: Any


def raw_sums(layer: Layer, h: Any, s: Any) -> RawSums:
    """Sums of one forward/backward pair.

    Args:
        layer: the layer's descriptor.
        h: the layer's input; see the descriptor for shapes. Half types are summed in float32.
        s: gradient of the loss with respect to the layer's output, on the same device.

    Raises:
        CafinError: `layer` is no descriptor, or an array does not fit it.
    """
    check_layer("raw_sums", layer)
    check_pair("raw_sums", layer, h, s)
    h, s = layer.read(h, s)
    H, S = layer.columns(tuple(h.shape), tuple(s.shape))
    return RawSums(_column_sums(h, H), _column_sums(s, S), layer.count(tuple(h.shape), tuple(s.shape)))


def add_sums(a: RawSums, b: RawSums) -> RawSums:
    """The sums of two calls. A LayerNorm's `H` grows to the longer sequence; the other lengths always agree."""
    H, other = (a.H, b.H) if a.H.shape[0] >= b.H.shape[0] else (b.H, a.H)
    xp = array_namespace(H)
    missing = H.shape[0] - other.shape[0]
    if missing:
        other = xp.concat([other, xp.zeros((missing,), dtype=H.dtype, device=device(H))])
    return RawSums(H + other, a.S + b.S, a.n + b.n)


def raw_moments(layer: Layer, sums: RawSums, grad_scale: float = 1.0) -> tuple[Any, Any]:
    """Raw moments (H, S) of a sampled step, lengths (layer.H_size, layer.S_size).

    `grad_scale` is the factor that the loss was multiplied by; `S` is quadratic in it and is divided by its square.

    Raises:
        CafinError: an argument is refused.
    """
    check_layer("raw_moments", layer)
    if not isinstance(sums, RawSums):
        refuse("raw_moments", "sums", "be RawSums", type(sums).__name__, "see raw_sums", CafinTypeError)
    grad_scale = at_least("raw_moments", "grad_scale", grad_scale, 0.0, strict=True)
    if sums.n < 1:
        refuse("raw_moments", "sums", "hold at least one row", sums.n)
    return moments(layer, sums, grad_scale)


def moments(layer: Layer, sums: RawSums, grad_scale: Any = 1.0) -> tuple[Any, Any]:
    """`raw_moments` of what has been checked; `n` and `grad_scale` may be arrays without axes, as under `jax.jit`."""
    xp = array_namespace(sums.H)
    H_mean, S_mean = layer.mean(sums.n)
    H, S = sums.H, sums.S
    if layer.counted:  # nothing but padding: NaN, which leaves the factors as they are
        total = xp.sum(H)
        total = xp.where(total > 0, total, xp.full_like(total, math.nan))
        H, S = H / total, S / total
    if layer.norm:
        H, S = xp.reshape(xp.sum(H * H), (1,)), S * S
    H, S = H * H_mean, S * (S_mean / grad_scale / grad_scale)
    entry = layer.bias_entry(sums.n, sums.H.shape[0])
    if entry is not None:
        H = xp.concat([H, xp.full((1,), entry, dtype=H.dtype, device=device(H))])
    return H, S


def clean(x: Any) -> Any:
    """`+inf -> 1`, `-inf -> 0`; NaN stays."""
    xp = array_namespace(x)
    x = xp.where(x == math.inf, xp.ones_like(x), x)
    return xp.where(x == -math.inf, xp.zeros_like(x), x)


def normalize(x: Any) -> Any:
    """Min-max normalisation `(x - min x) / (max x - min x + 1e-6)` of `clean(x)`."""
    xp = array_namespace(x)
    if x.shape[0] == 0:
        return x
    x = clean(x)
    low = xp.min(x)
    return (x - low) / (xp.max(x) - low + EPSILON)


def average(F: Any, raw: Any, averaging: Averaging) -> Any:
    """The factor after one sampled step: `keep * F + add * x`."""
    xp = array_namespace(F)
    x = normalize(raw) if averaging.normalize == "before" else clean(raw)
    return averaging.keep * F + averaging.add * xp.astype(x, F.dtype)


def saw_nothing(layer: Layer, sums: RawSums) -> Any:
    """True, as an array without axes, if all calls of a counted layer have counted nothing: as if there were none."""
    xp = array_namespace(sums.H)
    return xp.sum(sums.H) == 0 if layer.counted else xp.zeros((), dtype=xp.bool, device=device(sums.H))


def broken(H_raw: Any, S_raw: Any) -> Any:
    """True, as an array without axes, if either raw moment of a layer holds a NaN."""
    xp = array_namespace(H_raw)
    return xp.any(xp.isnan(H_raw)) | xp.any(xp.isnan(S_raw))


def refresh(H: Any, S: Any, H_raw: Any, S_raw: Any, averaging: Averaging) -> tuple[Any, Any]:
    """Both factors of a layer after one sampled step; as they were if its moments are `broken`, as an average would
    never forget a NaN."""
    xp, keep = array_namespace(H), broken(H_raw, S_raw)
    return xp.where(keep, H, average(H, H_raw, averaging)), xp.where(keep, S, average(S, S_raw, averaging))


def effective(F: Any, averaging: Averaging) -> Any:
    """The factor as it enters the preconditioner: `F`, or `normalize(F)` where the rule normalises afterwards."""
    return F if averaging.normalize == "before" else normalize(F)


def preconditioner(H: Any, S: Any, Lambda: float) -> Any:
    """`S[r] * H[c] + Lambda` as a matrix (len(S), len(H)). The kernels never form it."""
    return S[:, None] * H[None, :] + Lambda


def update(
    p: Any,
    g: Any,
    m: Any,
    H: Any = None,
    S: Any = None,
    *,
    lr: float,
    beta: float = 0.9,
    Lambda: float = 1e-3,
    weight_decay: float = 0.0,
    decoupled: bool = False,
    step: int = 1,
    master: Any = None,
    noise: Noise | None = None,
) -> tuple[Any, ...]:
    """One update of one parameter: new parameter and new momentum, and new master where there is one.

        AdaFisher:   g <- g + wd p;  m <- beta m + (1 - beta) g;  p <- p - lr / (1 - beta^step) m / F
        AdaFisherW:                  m <- beta m + (1 - beta) g;  p <- p - lr (m / (1 - beta^step) / F + wd p)

    inf and NaN go through element by element. A `beta`, `wd` or, in AdaFisherW, `lr wd` of 0 leaves its term out, as in
    torch.optim: 0 times inf would be NaN. An `lr` of 0 does not keep a momentum that is inf or NaN from the parameter.

    Numbers of 16 bits are computed with in float32. Momentum is rounded to the nearest, ties to even; so is the
    parameter without `noise`.

    Args:
        p, g, m: parameter, gradient and momentum of one shape. The momentum of a parameter of 16 bits may be float32,
            and that of a float32 one of 16 bits.
        H, S: factors with `len(S) * len(H) == p.size`; both None means F = 1.
        decoupled: False for AdaFisher, True for AdaFisherW.
        step: 1-based count of this parameter's updates.
        master: float32 weights that a parameter of 16 bits is a rounded copy of: they are what is updated. Where the
            parameter is another number than that copy, it has been written by somebody, and counts.
        noise: a parameter of 16 bits is rounded at random, by these numbers; with a master it is not.

    Raises:
        CafinError: an argument is refused.
    """
    hyper = Hyper.checked("update", lr, beta, Lambda, weight_decay, decoupled)
    step = whole("update", "step", step, 1)
    check_update(p, g, m, H, S, master)
    _check_shapes(p, g, m, H, S, master)
    if _fused(p, g, m):
        new_p, new_m = p.clone(), m.clone()
        _advance_fused(new_p, g, new_m, H, S, hyper, step)
        return new_p, new_m
    return _advanced(p, g, m, H, S, hyper, step, master, _noise_of(p, master, noise))


def update_in_place(
    p: Any,
    g: Any,
    m: Any,
    H: Any,
    S: Any,
    hyper: Hyper,
    step: int,
    grad_scale: float = 1.0,
    master: Any = None,
    noise: Noise | None = None,
) -> None:
    """`update` written into `p`, `m` and `master` themselves, bit for bit; `g` is divided by `grad_scale` first.

    Raises:
        CafinError: the shapes do not fit; nothing has been changed then.
    """
    for _ in updates_in_place(p, g, m, H, S, hyper, step, grad_scale, master, noise):
        pass


def updates_in_place(
    p: Any,
    g: Any,
    m: Any,
    H: Any,
    S: Any,
    hyper: Hyper,
    step: int,
    grad_scale: float = 1.0,
    master: Any = None,
    noise: Noise | None = None,
    done: int = 0,
) -> Iterator[None]:
    """`update_in_place`, piece by piece but for the first `done` pieces: stops after each.

    A large parameter on a CPU is updated in pieces: what is computed on the way stays in the cache, instead of going
    out to memory and back with every operation. All memory that a piece needs is taken before it is changed.
    """
    _check_shapes(p, g, m, H, S, master)
    grad_scale = hyper.scale(grad_scale)
    by_rows = S is None or tuple(S.shape) == tuple(p.shape[:1])
    for piece in (_pieces(p) if by_rows else [...])[done:]:
        slope = g[piece] if grad_scale == 1.0 else widened(g[piece]) / grad_scale
        part, momentum = p[piece], m[piece]
        factors = H, None if S is None else S[piece]
        if _fused(part, slope, momentum):
            _advance_fused(part, slope, momentum, *factors, hyper, step)
        else:
            weights = None if master is None else master[piece]
            first = 0 if piece is ... else piece.start * (math.prod(p.shape) // p.shape[0])
            bits = _noise_of(part, master, noise, first)
            new = _advanced(part, slope, momentum, *factors, hyper, step, weights, bits)
            for mine, given in zip((part, momentum, weights), new):
                mine[...] = given
        yield


def _check_shapes(p: Any, g: Any, m: Any, H: Any, S: Any, master: Any) -> None:
    shape = tuple(p.shape)
    if tuple(g.shape) != shape or tuple(m.shape) != shape:
        refuse("update", "g, m", f"have the parameter's shape {shape}", f"{tuple(g.shape)} and {tuple(m.shape)}")
    if (H is None) != (S is None) or (H is not None and H.shape[0] * S.shape[0] != math.prod(shape)):
        got = "one of them alone" if H is None or S is None else f"{S.shape[0]} * {H.shape[0]}"
        refuse("update", "H, S", f"both be None, or have len(S) * len(H) == {math.prod(shape)}", got)
    if master is not None and tuple(master.shape) != shape:
        refuse("update", "master", f"have the parameter's shape {shape}", tuple(master.shape))


def _noise_of(p: Any, master: Any, noise: Noise | None, first: int = 0) -> Any:
    """The random bits of a parameter's piece that begins with element `first`; None where none are needed."""
    return None if noise is None or master is not None or p.dtype.itemsize != 2 else noise_like(p, noise, first)


def _advanced(
    p: Any, g: Any, m: Any, H: Any, S: Any, hyper: Hyper, step: int, master: Any = None, noise: Any = None
) -> tuple[Any, ...]:
    """`update` of what has been checked."""
    x, momentum = widened(p), widened(m)
    xp = array_namespace(x)
    if master is not None:
        x = xp.where(x == widened(rounded(master, p.dtype)), master, x)
    scalars = Scalars.of(hyper, step)
    step_taken, momentum = direction(x, widened(g), momentum, H, S, scalars)
    x = x - step_taken
    new = rounded(x, p.dtype, noise), rounded(momentum, m.dtype), *(() if master is None else (x,))
    return tuple(map(xp.asarray, new))  # not NumPy's scalars


def direction(x: Any, g: Any, m: Any, H: Any, S: Any, scalars: Scalars) -> tuple[Any, Any]:
    """(what a step takes from the parameter `x`, new momentum): the formulas of `update`, in the arrays' own precision.
    The scalars may be arrays without axes, as under `jax.jit`."""
    xp = array_namespace(x)
    g = xp.astype(_plus(g, scalars.l2, x), m.dtype, copy=False)
    momentum = _plus(scalars.rest * g, scalars.beta, m)
    step = scalars.step_size * momentum
    if H is not None:
        step = step / xp.reshape(preconditioner(H, S, scalars.Lambda), tuple(x.shape))
    return _plus(step, scalars.decay, x), momentum


def _plus(total: Any, coefficient: Any, x: Any) -> Any:
    """`total + coefficient * x`; without the term where the coefficient is 0, as 0 times inf would be NaN."""
    if isinstance(coefficient, float):
        return total + coefficient * x if coefficient else total
    return array_namespace(x).where(coefficient == 0, total, total + coefficient * x)


def _fused(p: Any, g: Any, m: Any) -> bool:
    """True where PyTorch has fused operations: five passes over the cache instead of eight."""
    return is_torch_array(p) and p.dtype == g.dtype == m.dtype and p.element_size() >= 4 and p.device.type == "cpu"


def _advance_fused(p: Any, g: Any, m: Any, H: Any, S: Any, hyper: Hyper, step: int) -> None:
    """`_advanced`, written into `p` and `m`."""
    if hyper.l2:
        g = g.add(p, alpha=hyper.l2)
    F = None if H is None else S.outer(H).add_(hyper.Lambda).view(p.shape)
    # From here on nothing takes memory.
    (m.mul_(hyper.beta) if hyper.beta else m.zero_()).add_(g, alpha=1.0 - hyper.beta)
    if hyper.decay:
        p.sub_(p, alpha=hyper.decay)
    step_size = Scalars.of(hyper, step).step_size
    if F is None:
        p.sub_(m, alpha=step_size)
    else:
        p.addcdiv_(m, F, value=-step_size)


def _pieces(x: Any) -> list[Any]:
    """Slices of axis 0, about `PIECE` elements each, for arrays on a CPU; elsewhere, and for JAX, one of everything."""
    size = math.prod(x.shape)
    if size <= PIECE or is_jax_array(x) or where_is(x) != "cpu":
        return [...]
    rows = max(1, PIECE * x.shape[0] // size)
    return [slice(first, first + rows) for first in range(0, x.shape[0], rows)]


def _column_sums(x: Any, columns: Columns) -> Any:
    xp = array_namespace(x)
    total = sum(_sums_of(x[piece], columns) for piece in (_pieces(x) if columns.lead else [...]))
    if not columns.patches:
        return total * columns.scale
    folded = [_fold(xp, total, patches) for patches in columns.patches]
    return folded[0] if len(folded) == 1 else xp.concat(folded)


def _sums_of(x: Any, columns: Columns) -> Any:
    """Sums over some rows of an array, per segment or, for patches, per pixel (channel, z, y, x)."""
    xp = array_namespace(x)
    if x.dtype.itemsize < 4:  # finfo knows no bfloat16 of ml_dtypes
        x = xp.astype(x, xp.float32)
    if columns.power == 2:
        x = x * x
    if columns.patches:
        return xp.reshape(xp.sum(x, axis=0), (x.shape[1], *columns.patches[0].image))
    rows = math.prod(x.shape[: columns.lead])
    return xp.sum(xp.reshape(x, (rows, columns.segments, columns.run)), axis=(0, 2))


def _fold(xp: Any, pixels: Any, geometry: Patches) -> Any:
    """Fold pixel sums (channel, z, y, x) into kernel taps, order (c, k, i, j): which pixels meet a tap depends on their
    position alone, so no patch is ever made."""
    taps = []
    for tap in product(*map(range, geometry.kernel)):
        z, y, x = (_seen(geometry, axis, place) for axis, place in enumerate(tap))
        taps.append(xp.sum(pixels[:, z, y, x], axis=(1, 2, 3)))
    per_channel = xp.stack(taps, axis=1)  # (groups * channels, taps)
    per_group = xp.reshape(per_channel, (geometry.groups, geometry.channels, len(taps)))
    return geometry.scale * xp.reshape(xp.sum(per_group, axis=0), (-1,))


def _seen(geometry: Patches, axis: int, tap: int) -> slice:
    """The pixels along an axis of the image (0 depth, 1 height, 2 width) that meet place number `tap` of the kernel."""
    stride, size = geometry.stride[axis], geometry.image[axis]
    start = tap * geometry.dilation[axis] - geometry.padding[axis]  # seen by output 0, perhaps outside the image
    first = max(0, -(start // stride))  # first output inside: start + first * stride >= 0
    last = min(geometry.output[axis] - 1, (size - 1 - start) // stride)
    if last < first:
        return slice(0, 0)
    return slice(start + first * stride, start + last * stride + 1, stride)
