"""A model that is spread over several CUDA devices: each device's share, behind the face of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from .arrays import current_stream
from .cuda_update import CudaUpdate, Layout
from .factors import Factors
from .interrupts import uninterrupted
from .layers import Layer
from .reference import RawSums
from .rule import Averaging


class SpreadFactors(Factors):
    """Factors of layers whose weights lie on different devices.

    Args:
        layers, averaging: see `Factors`.
        shares: for each device the places of its layers in `layers`, and their factors.
    """

    def __init__(
        self, layers: Sequence[Layer], averaging: Averaging, shares: Sequence[tuple[Sequence[int], Factors]]
    ) -> None:
        self.layers, self.averaging = list(layers), averaging
        self._shares, self._places = [factors for _, factors in shares], [places for places, _ in shares]
        self._home = {index: (factors, k) for places, factors in shares for k, index in enumerate(places)}
        self.H, self.S, self.H_effective, self.S_effective, self.skipped = (
            [getattr(factors, name)[k] for factors, k in map(self._home.__getitem__, range(len(layers)))]
            for name in ("H", "S", "H_effective", "S_effective", "skipped")
        )
        self.kernels = all(factors.kernels for factors in self._shares)

    @property
    def refreshed(self) -> bool:
        return bool(self._shares) and all(factors.refreshed for factors in self._shares)

    @refreshed.setter
    def refreshed(self, value: bool) -> None:
        for factors in self._shares:
            factors.refreshed = value

    @property
    def pending(self) -> bool:
        return any(factors.pending for factors in self._shares)

    def sums(self) -> list[tuple[int, RawSums]]:
        found = [(places[k], sums) for places, each in zip(self._places, self._shares) for k, sums in each.sums()]
        return sorted(found, key=itemgetter(0))

    def take(self, sums: Sequence[tuple[int, RawSums]]) -> None:
        for places, each in zip(self._places, self._shares):
            each.take([(places.index(index), given) for index, given in sums if index in places])

    def accumulate(self, index: int, h: Any, s: Any, layer: Layer | None = None) -> None:
        factors, k = self._home[index]
        factors.accumulate(k, h, s, layer)

    def defer(self, index: int, h: Any, s: Any, layer: Layer | None = None) -> None:
        factors, k = self._home[index]
        factors.defer(k, h, s, layer)

    def flush(self) -> None:
        for factors in self._shares:
            factors.flush()

    def ready(self, grad_scale: float = 1.0) -> Callable[[], None] | None:
        parts, all_refreshed = [], self.refreshed
        for factors in self._shares:
            if factors.refreshed and not all_refreshed:  # by an attempt at this step that failed on another device
                factors.discard()
            elif (part := factors.ready(grad_scale)) is not None:
                parts.append(part)

        def refresh() -> None:
            for part in parts:
                part()
            self.refreshed = True

        return refresh if parts else None

    def discard(self) -> None:
        for factors in self._shares:
            factors.discard()


class SpreadUpdate:
    """One launch on each device, with the calls of `CudaUpdate`."""

    def __init__(
        self,
        layouts: Sequence[Layout],
        factors: Sequence[tuple[int, int]],
        likes: Sequence[Any],
        devices: Sequence[int],
        masters: Sequence[int] = (),
        keys: Sequence[int] = (),
    ) -> None:
        """Of each parameter: layout, addresses of (H, S), an array of its framework on its device, and that device;
        masters and keys as for `CudaUpdate`."""
        keys = keys or range(len(layouts))
        self._shares = []
        for device in sorted(set(devices)):
            places = [k for k, d in enumerate(devices) if d == device]
            like = likes[places[0]]
            masters_here = [masters[k] for k in places] if masters else []
            update = CudaUpdate(
                [layouts[k] for k in places],
                [factors[k] for k in places],
                like,
                device,
                masters_here,
                [keys[k] for k in places],
            )
            self._shares.append((places, update, like, device))
        self._launched: set[int] = set()  # devices that are ahead of the others, as a launch on one has failed

    def __call__(
        self,
        p: list[int],
        g: list[int],
        m: list[int],
        scalars: Sequence[tuple[float, ...]],
        which: list[int],
        stream: int = 0,
        ahead: Callable[[], None] | None = None,
        then: Callable[[], object] | None = None,
    ) -> None:
        """See `CudaUpdate`; each launch goes to the current stream of its device, and `stream` is not used.

        All devices are prepared before the first launch. Where a launch fails behind that of another device, the next
        attempt at the step goes on from there: every parameter is updated once.
        """
        for places, update, like, device in self._shares:
            mine = [which[k] for k in places]
            used = sorted(set(mine))
            at = {number: place for place, number in enumerate(used)}
            ours, grads, momenta = ([every[k] for k in places] for every in (p, g, m))
            sets, numbers = [scalars[k] for k in used], [at[k] for k in mine]
            if device not in self._launched:
                call = partial(update, ours, grads, momenta, sets, numbers, current_stream(like, device))
                ahead = partial(call, ahead, partial(self._launched.add, device))
        with uninterrupted():
            if ahead is not None:
                ahead()
            self._launched.clear()
            if then is not None:
                then()
