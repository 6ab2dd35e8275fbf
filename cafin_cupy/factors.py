"""The factors `H`, `S` of a model's layers: sums of a sampled step in, refreshed factors out.

`Factors` holds the state and the rule; `ReferenceFactors` computes with array code on any device, `CudaFactors`
(cuda_factors.py) with the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from array_api_compat import array_namespace, device

from . import reference
from .arrays import beside, known, view
from .checks import check_pair
from .layers import Layer
from .rule import Averaging


class Factors:
    """Factors of `layers`, beside their weights.

    Attributes:
        layers: the descriptors, in the caller's order.
        H, S: moving averages, `layers[i].H_size` and `layers[i].S_size` long. float32; float64 for float64 weights, and
            where the rule normalises after averaging: the ones they start from would drown small moments in float32.
        H_effective, S_effective: what enters the preconditioner: the same arrays, or their normalised form where the
            rule normalises after averaging, in float32 (float64 for float64 weights).
            All of them are refreshed in place, so views of them stay valid.
        skipped: of each layer, how often a NaN in its raw moments has kept its factors as they were: int64, (1,),
            counted in place, on the layer's device.
        kernels: True where the CUDA kernels compute.
        refreshed: True if the factors of the coming step are refreshed already, as its update failed behind them. The
            owner sets it back when the step is counted.
    """

    kernels = False
    refreshed = False

    def __init__(self, layers: Sequence[Layer], averaging: Averaging) -> None:
        self.layers = list(layers)
        self.averaging = averaging
        self.H = [self._ones(layer, layer.H_size) for layer in self.layers]
        self.S = [self._ones(layer, layer.S_size) for layer in self.layers]
        if averaging.normalize == "before":
            self.H_effective, self.S_effective = self.H, self.S
        else:
            self.H_effective = [self._effective(layer, H) for layer, H in zip(self.layers, self.H)]
            self.S_effective = [self._effective(layer, S) for layer, S in zip(self.layers, self.S)]
        self.skipped = [self._zero(layer) for layer in self.layers]

    def _ones(self, layer: Layer, size: int) -> Any:
        weight = known(layer.home, type(layer).__name__, "weight")
        xp = array_namespace(weight)
        dtype = xp.float64 if self.averaging.normalize == "after" else _precision(weight)
        return xp.ones((size,), dtype=dtype, device=device(weight))

    def _zero(self, layer: Layer) -> Any:
        weight = known(layer.home, type(layer).__name__, "weight")
        xp = array_namespace(weight)
        return xp.zeros((1,), dtype=xp.int64, device=device(weight))

    def _effective(self, layer: Layer, F: Any) -> Any:
        dtype = _precision(known(layer.home, type(layer).__name__, "weight"))
        return array_namespace(F).astype(reference.effective(F, self.averaging), dtype)

    def of_weight(self, index: int) -> tuple[Any, Any]:
        """(columns, rows) of a layer's weight, seen as a row-major matrix: the vectors whose outer product is F, views
        of the factors. `update` calls them H and S, as they are in most layers."""
        return self.layers[index].of_weight(self.H_effective[index], self.S_effective[index])

    def of_bias(self, index: int) -> tuple[Any, Any]:
        """(columns, rows) of a layer's bias: views."""
        return self.layers[index].of_bias(self.H_effective[index], self.S_effective[index])

    def load(self, index: int, H: Any, S: Any) -> None:
        """Overwrite the factors of one layer in place, with arrays of the same framework and device."""
        for mine, given in self._fitting(index, H, S):
            mine[...] = given

    def _fitting(self, index: int, H: Any, S: Any) -> list[tuple[Any, Any]]:
        """(array of ours, what it must hold) for new factors of a layer."""
        fitting = []
        for mine, entering, given in (
            (self.H[index], self.H_effective[index], H),
            (self.S[index], self.S_effective[index], S),
        ):
            fitting.append((mine, array_namespace(mine).astype(given, mine.dtype)))
            if entering is not mine:
                fitting.append((entering, self._effective(self.layers[index], fitting[-1][1])))
        return fitting

    def restart(self, index: int) -> None:
        """Let the factors of one layer begin anew, at ones. Its F is 1 until they are refreshed, also where the rule
        normalises after averaging, which would make zeros of them."""
        for arrays in (self.H, self.S, self.H_effective, self.S_effective):
            arrays[index][...] = 1.0

    def skips(self) -> list[int]:
        """`skipped` as numbers. Waits for the device."""
        return [int(count[0]) for count in self.skipped]

    def count_from(self, skipped: Sequence[Any] | None) -> None:
        """Let the counts of `skipped` go on from those of another run, in place; from 0 for None."""
        for index, mine in enumerate(self.skipped):
            mine[...] = 0 if skipped is None else skipped[index]

    @property
    def pending(self) -> bool:
        """True if sums wait for `update`."""
        raise NotImplementedError

    agreed = True  # with other processes, if there are any

    def sums(self) -> list[tuple[int, reference.RawSums]]:
        """(place of a layer, its sums), for all layers that have some. Changes nothing."""
        raise NotImplementedError

    def take(self, sums: Sequence[tuple[int, reference.RawSums]]) -> None:
        """Let `sums`, as from `sums()`, be those of this step, in the place of all that were seen here: several ranks
        have added theirs up. They lie beside their layers' factors, and stay as they are until the step is over."""
        raise NotImplementedError

    def raw(self, grad_scale: float = 1.0) -> list[tuple[int, Any, Any]]:
        """(place of a layer, H, S): the raw moments that `update` would average, of all layers that have sums. Waits
        for the device if one of them counts."""
        return [
            (k, *reference.raw_moments(self.layers[k], sums, grad_scale))
            for k, sums in self.sums()
            if not (self.layers[k].counted and reference.saw_nothing(self.layers[k], sums))
        ]

    def accumulate(self, index: int, h: Any, s: Any, layer: Layer | None = None) -> None:
        """Add a layer's input and output gradient to its sums; on the CUDA backend one launch, on the
        current stream of the framework that owns the arrays.

        Args:
            index: the layer's place in `layers`.
            h, s: see the descriptor for shapes; an empty batch adds nothing.
            layer: descriptor of this very call, where modules of one weight differ in stride, padding or dilation.
        """
        raise NotImplementedError

    def defer(self, index: int, h: Any, s: Any, layer: Layer | None = None) -> None:
        """As `accumulate`, but the arrays may be read as late as `flush`, and must stay as they are until then: small
        layers share a launch. On the CUDA backend up to 64 MiB wait. Torch's tensors tell if they were changed: their
        layer then keeps its factors on this step, a warning says so, and from then on nothing waits."""
        self.accumulate(index, h, s, layer)

    def add(self, index: int, sums: reference.RawSums) -> None:
        """Add sums that were taken elsewhere, as on a GPU for parameters on a CPU; they lie beside the layer's factors.
        Of the reference backend."""
        raise NotImplementedError

    def flush(self) -> None:
        """Read all arrays that wait since `defer`, and make the current stream wait for it."""

    def hold(self) -> None:
        """Before an `update` that a CUDA graph captures: keep what its replays will read, and never change it."""

    def update(self, grad_scale: float = 1.0) -> None:
        """Refresh the factors of every layer that has sums, and forget the sums. A layer whose raw moments hold a NaN
        keeps its factors, and is counted in `skipped`. `grad_scale`: factor on the loss."""
        refresh = self.ready(grad_scale)
        if refresh is not None:
            refresh()

    def ready(self, grad_scale: float = 1.0) -> Callable[[], None] | None:
        """The first part of `update`: all that may fail, before any factor changes.

        Returns:
            The second part; None if no layer has sums. It sets `refreshed`, and forgets the sums.
        """
        raise NotImplementedError

    def discard(self) -> None:
        """Forget the sums."""
        raise NotImplementedError


class ReferenceFactors(Factors):
    """The factors by `cafin_cupy.reference`."""

    def __init__(self, layers: Sequence[Layer], averaging: Averaging) -> None:
        super().__init__(layers, averaging)
        self._sums: list[reference.RawSums | None] = [None] * len(self.layers)

    @property
    def pending(self) -> bool:
        return any(sums is not None for sums in self._sums)

    def accumulate(self, index: int, h: Any, s: Any, layer: Layer | None = None) -> None:
        layer = layer or self.layers[index]
        h = beside(h, self.H[index], "accumulate", f"h of {layer.label}")
        s = beside(s, self.H[index], "accumulate", f"s of {layer.label}")
        check_pair("accumulate", layer, h, s)
        if 0 in h.shape or 0 in s.shape:
            return
        self.add(index, reference.raw_sums(layer, h, s))

    def add(self, index: int, sums: reference.RawSums) -> None:
        earlier = self._sums[index]
        self._sums[index] = sums if earlier is None else reference.add_sums(earlier, sums)

    def sums(self) -> list[tuple[int, reference.RawSums]]:
        return [(index, sums) for index, sums in enumerate(self._sums) if sums is not None]

    def take(self, sums: Sequence[tuple[int, reference.RawSums]]) -> None:
        self.discard()
        for index, given in sums:
            self._sums[index] = given

    def ready(self, grad_scale: float = 1.0) -> Callable[[], None] | None:
        fresh: list[tuple[Any, Any]] = []
        for index, sums in self.sums():
            H, S = reference.raw_moments(self.layers[index], sums, grad_scale)
            skips = reference.broken(H, S) & ~reference.saw_nothing(self.layers[index], sums)
            fresh.append((self.skipped[index], self.skipped[index] + skips))
            fresh += self._fitting(index, *reference.refresh(self.H[index], self.S[index], H, S, self.averaging))

        def refresh() -> None:
            for mine, given in fresh:
                mine[...] = given
            self.refreshed = True
            self.discard()

        return refresh if fresh else None

    def discard(self) -> None:
        self._sums = [None] * len(self.layers)


def _precision(weight: Any) -> Any:
    """float64 for float64 weights, else float32."""
    xp = array_namespace(weight)
    return xp.float64 if weight.dtype == xp.float64 else xp.float32


def make_factors(
    layers: Sequence[Layer], averaging: Averaging, backend: str, devices: Collection[int | str]
) -> Factors:
    """The factors of `layers` by the chosen backend; what trains lies on `devices`."""
    if backend == "reference":
        return ReferenceFactors(layers, averaging)
    from .cuda_factors import CudaFactors
    from .spread import SpreadFactors

    at = [view(layer.home, type(layer).__name__, "weight").device for layer in layers]
    # A layer that does not train may lie where nothing trains.
    first, *others = sorted({*map(int, devices), *(d for d in at if not isinstance(d, str))})
    if not others:
        return CudaFactors(layers, averaging, first)
    places = {device: [k for k, d in enumerate(at) if d == device] for device in (first, *others)}
    places[first] += [k for k, d in enumerate(at) if d not in places]  # on the CPU, which it will refuse
    shares = [(mine, CudaFactors([layers[k] for k in mine], averaging, device)) for device, mine in places.items()]
    return SpreadFactors(layers, averaging, shares)


def owners(layers: Sequence[Layer]) -> dict[int, tuple[int, str]]:
    """id(array) -> (place of its layer, "weight" or "bias"). An array of several layers belongs to the first."""
    found: dict[int, tuple[int, str]] = {}
    for index, layer in enumerate(layers):
        for role, array in (("weight", layer.weight), ("bias", layer.bias)):
            if array is not None:
                found.setdefault(id(array), (index, role))
    return found
