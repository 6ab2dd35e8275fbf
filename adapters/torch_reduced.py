"""The factors of several ranks: sums of all of them, added up by one collective on a sampled step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from cafin_cupy.errors import BackendError
from cafin_cupy.factors import Factors
from cafin_cupy.layers import Layer
from cafin_cupy.reference import RawSums, add_sums

from .torch_parallel import Place, Team

COLLECTIVE = "the all-reduce of the factors' sums"


class _Flight(NamedTuple):
    """A collective under way: its handle, its memory, and the sums of this rank that are in it."""

    work: Any
    buffer: Tensor
    local: dict[int, RawSums]


class ReducedFactors(Factors):
    """Factors that follow what all ranks of a group have seen, behind the face of those of one process.

    **The law.** n ranks with a share of the batch each give the factors of one process with the whole batch. Rank r
    differentiates its own loss L_r, so a layer sees s_r = dL_r/dy there. What the averaged gradients descend is
    L = (L_1 + ... + L_n) / d, with d = n in DistributedDataParallel and FSDP, and the gradient of L with respect to the
    outputs that rank r holds is s_r / d. So the raw moments of L are those of the sums over all ranks, divided by the
    counts of all ranks, with every s divided by d: exactly what a loss that is d times too large asks for, hence
    `grad_scale * d` below. Squares of s fall by d²; norm layers sum s first, and their squares fall by d² as well.

    If L is the mean over the whole batch, these are the moments of one process: where shares are equal, L_r is the
    rank's own mean; where they are not, rank r weights its mean by n B_r / (B_1 + ... + B_n), as its gradients need
    too. Accumulation adds sums on each rank first, as in one process.

    **The collective.** One flat buffer, whose layout follows from the layers alone: a count for each layer, the sums of
    all layers, zeros for those that this rank has not seen. H sums of layer norms have the length of the sequence, of
    which the ranks know nothing: each rank tells its own in the buffer, and where one is longer than any before, as on
    the first sampled step, the collective is repeated with more room. All ranks decide from reduced numbers.

    **Teams.** Ranks that compute one loss together (see torch_parallel.py) have the same L_r, which counts once: d is
    the number of teams. Each rank lays its share of a layer's sums into a vector of zeros; what all of a team have
    counts on its first rank alone.

    Args:
        own: the factors of this process, whose arrays these share.
        group: the process group.
        divide_factor: d, what the sum of the ranks' gradients is divided by.
        team: the ranks that compute one loss together with this one.

    Attributes:
        agreed: the ranks have found each other alike since these were made or loaded; else the lengths and the order of
            what they send may differ.
        difference: what they have found to differ, until a step has told it.
    """

    def __init__(self, own: Factors, group: Any, divide_factor: float, team: Team) -> None:
        self.own, self.group, self.divide_factor, self.agreed = own, group, divide_factor, False
        self.team = team
        self._places: dict[int, Place] = {}  # of the sums in `own`
        self.difference: str | None = None
        self.layers, self.averaging, self.kernels = own.layers, own.averaging, own.kernels
        self.H, self.S, self.skipped = own.H, own.S, own.skipped
        self.H_effective, self.S_effective = own.H_effective, own.S_effective
        self._units = [layer.H_units or 0 for layer in self.layers]  # room for H sums in the buffer
        self._varying = [index for index, layer in enumerate(self.layers) if layer.H_units is None]
        self._forget()

    def _forget(self) -> None:
        self._flight: _Flight | None = None
        self._total: dict[int, RawSums] | None = None  # of all ranks
        self._taken = False  # `own` has them
        self._aside: dict[int, RawSums] = {}  # whole vectors, still to be sent

    # What one process's factors do by themselves

    @property
    def refreshed(self) -> bool:
        return self.own.refreshed

    @refreshed.setter
    def refreshed(self, value: bool) -> None:
        self.own.refreshed = value

    @property
    def pending(self) -> bool:
        return self.own.pending or self._flight is not None or bool(self._total or self._aside)

    def place(self, index: int, place: Place | None) -> None:
        """Before a call of a layer is accumulated: what its sums are of the whole; None for all of it on every rank of
        the team. Calls of different places, as of other lengths of sequences, are laid into the whole one by one."""
        place = place or Place(0, 0, self.layers[index].S_size, (self.team.counts,) * 3)
        if self._places.get(index, place) != place and self.own.pending:
            self._aside = self._seen()
            self.own.discard()
        self._places[index] = place

    def accumulate(self, index: int, h: Any, s: Any, layer: Layer | None = None) -> None:
        self.own.accumulate(index, h, s, layer)

    def defer(self, index: int, h: Any, s: Any, layer: Layer | None = None) -> None:
        self.own.defer(index, h, s, layer)

    def add(self, index: int, sums: RawSums) -> None:
        self.own.add(index, sums)

    def flush(self) -> None:
        self.own.flush()

    def load(self, index: int, H: Any, S: Any) -> None:
        super().load(index, H, S)
        self.agreed, self.difference = False, None

    def hold(self) -> None:
        raise BackendError(
            "step: it must be captured on one rank, as a graph cannot wait for the sums of other ranks; capture "
            "forward and backward of an unsampled step alone, or pass dist=False where ranks train apart"
        )

    def discard(self) -> None:
        flight, self._flight = self._flight, None
        if flight is not None:
            with telling(COLLECTIVE, self.group):
                flight.work.wait()  # its memory is read until then
        self._forget()
        self.own.discard()

    # Over all ranks

    def sums(self) -> list[tuple[int, RawSums]]:
        """Of all ranks: every rank must ask."""
        self._reduce()
        return self.own.sums()

    def raw(self, grad_scale: float = 1.0) -> list[tuple[int, Any, Any]]:
        self._reduce()
        return self.own.raw(grad_scale * self.divide_factor)

    def ready(self, grad_scale: float = 1.0) -> Callable[[], None] | None:
        self._reduce()
        refresh = self.own.ready(grad_scale * self.divide_factor)
        if refresh is None:
            self._forget()
        return refresh and self._completed(refresh)

    def _completed(self, refresh: Callable[[], None]) -> Callable[[], None]:
        def complete() -> None:
            refresh()
            self._forget()

        return complete

    def start(self) -> None:
        """From the end of a backward pass that all ranks have run, and whose gradients are averaged: begin to add up
        what they have seen since the last one. What is seen behind the last one does not count, nor do its gradients,
        which nobody averages."""
        if self._flight is not None:
            self._land()
        self._flight = self._send(self._seen())
        self._aside = {}
        self.own.discard()

    def _seen(self) -> dict[int, RawSums]:
        """What this rank contributes, by the layers' places."""
        seen = {index: self._laid(index, sums) for index, sums in self.own.sums()}
        for index, sums in self._aside.items():
            seen[index] = add_sums(sums, seen[index]) if index in seen else sums
        return seen

    def _laid(self, index: int, sums: RawSums) -> RawSums:
        """Sums of a part of a layer as those of the layer, which other ranks' are added to."""
        if not self.team.divides:
            return sums
        place, layer = self._places[index], self.layers[index]
        room = layer.H_units or place.H + sums.H.shape[0]
        H, S = sums.H.new_zeros(room), sums.S.new_zeros(layer.S_size)
        for vector, x, first, counts in ((H, sums.H, place.H, place.counts[0]), (S, sums.S, place.S, place.counts[1])):
            if counts:
                vector[first : first + x.shape[0]] = x
        return RawSums(H, S, sums.n if place.counts[2] else 0)

    def _reduce(self) -> None:
        """Wait for the sums of all ranks, once a step. All ranks start equally many collectives: that is decided by
        the passes through the whole model, not by the layers that one of them has seen."""
        if self._taken:
            return
        if self._flight is not None:
            self._land()
        if self._total is None:
            self.start()
            self._land()
        self.own.take(sorted((self._total or {}).items()))
        self._taken = True

    def _send(self, local: dict[int, RawSums]) -> _Flight:
        like = self.H_effective[0]
        wide = any(F.dtype is torch.float64 for F in self.H_effective)
        options: dict[str, Any] = {"dtype": torch.float64 if wide else torch.float32, "device": like.device}
        zeros = torch.zeros(max(map(max, self._sizes())), **options)
        pieces = [torch.tensor(self._head(local), **options)]
        for index, sizes in enumerate(self._sizes()):
            sums = local.get(index)
            for x, size in zip((sums.H, sums.S) if sums is not None else (zeros[:0], zeros[:0]), sizes):
                x = x[:size].to(**options)
                pieces += [x, zeros[: size - x.numel()]]
        buffer = torch.cat(pieces)
        with telling(COLLECTIVE, self.group):
            return _Flight(dist.all_reduce(buffer, group=self.group, async_op=True), buffer, local)

    def _sizes(self) -> list[tuple[int, int]]:
        return [(units, layer.S_size) for units, layer in zip(self._units, self.layers)]

    def _head(self, local: Mapping[int, RawSums]) -> list[int]:
        """Counts of all layers, and for each layer whose H sums vary in length a place for each rank to tell its own.
        Exact below 2^24 in float32, and rounded as the sums are above."""
        counts = [local[index].n if index in local else 0 for index in range(len(self.layers))]
        ranks, rank = self.group.size(), self.group.rank()
        lengths = [0] * (len(self._varying) * ranks)
        for place, index in enumerate(self._varying):
            lengths[place * ranks + rank] = local[index].H.shape[0] if index in local else 0
        return counts + lengths

    def _land(self) -> None:
        """Wait for the collective, and add what all ranks have seen to the total."""
        assert self._flight is not None
        layers, ranks, units = len(self.layers), self.group.size(), list(self._units)
        while True:
            work, buffer, local = self._flight
            try:
                with telling(COLLECTIVE, self.group):
                    work.wait()
                    head = [round(x) for x in buffer[: layers + len(self._varying) * ranks].tolist()]
            except BaseException:  # so that the step may be tried again
                self._flight = None
                self._aside = {index: RawSums(sums.H.clone(), sums.S.clone(), sums.n) for index, sums in local.items()}
                raise
            for place, index in enumerate(self._varying):
                units[index] = max(head[layers + place * ranks : layers + (place + 1) * ranks])
            if all(n <= room for n, room in zip(units, self._units)):
                break
            self._units = [max(pair) for pair in zip(units, self._units)]
            self._flight = self._send(local)
        self._flight = None
        sums = iter(buffer[len(head) :].split([n for sizes in self._sizes() for n in sizes]))
        total = self._total or {}
        for index, (H, S) in enumerate(zip(sums, sums)):
            F = self.H_effective[index]
            if head[index]:
                seen = RawSums(H[: units[index]].to(F), S.to(F), head[index])
                total[index] = add_sums(total[index], seen) if index in total else seen
        self._total = total


def same_on_all_ranks(numbers: Sequence[int | None], group: Any, device: torch.device) -> list[bool]:
    """Of each number, whether all ranks of the group that have one have the same; None where this rank has none. One
    collective; waits for the device."""
    least = torch.iinfo(torch.int64).min
    both = [least if x is None else sign * x for sign in (1, -1) for x in numbers]
    extremes = torch.tensor(both, dtype=torch.int64, device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    high, low = extremes.chunk(2)
    return (high == -low).tolist()


def least_of_all(collective: str, number: int, group: Any, device: torch.device) -> int:
    """The least of the ranks' numbers. One collective; waits for the device."""
    x = torch.tensor(number, device=device)
    with telling(collective, group):
        dist.all_reduce(x, op=dist.ReduceOp.MIN, group=group)
        return int(x)


@contextmanager
def telling(collective: str, group: Any, mend: str = "") -> Iterator[None]:
    """Name the collective in torch's errors, which know only of bytes and ports."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, BackendError):
            raise
        text = " ".join(str(error).split())
        raise BackendError(
            f"step: {collective} over {group.size()} ranks failed on rank {group.rank()}; another rank has died, or "
            f"did not come to this step within the time of the process group ({type(error).__name__}: {text}){mend}"
        ) from error
