"""ZeRO: whole parameters on every rank, and of their state a part on each.

Momentum and master weights are DTensors over the ranks that train together, sharded along the first axis as those of
`fully_shard` are: so checkpoints pass from n ranks to m, and whole tensors are gathered, by the same means. A rank
updates the rows whose state it has, from gradients that are the same on all ranks, and then all send each other theirs.
The update is elementwise, so that no bit depends on who has made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from cafin_cupy.arrays import torch_view
from cafin_cupy.errors import BackendError, refuse
from cafin_cupy.precision import Precision
from cafin_cupy.rule import flag

from .torch_ranks import group_of, wrappers
from .torch_reduced import telling
from .torch_shards import factors_of, is_sharded, local, named_parameters, part_of, place_of, sharded

if TYPE_CHECKING:
    from .torch import AdaFisher

COLLECTIVE = "the all-gather of the updated parameters"
MEND = "; what other ranks have updated has not all come: load the last checkpoint on all ranks"
BUCKET = 32 << 20  # bytes of all ranks in a collective
LEAST = 1 << 20  # bytes of each rank in it, however many they are: below, links are idle most of the time


def check_shard_state(
    where: str, given: Any, model: nn.Module, chosen: Any, capturable: bool, precision: Precision
) -> bool:
    """The argument `shard_state`, or a `CafinError`; `chosen`: the argument `dist`."""
    if not flag(where, "shard_state", given):
        return False
    refuse_sharded(where, model.parameters())
    if chosen is False:
        refuse(where, "shard_state", "be False with dist=False", True, "there is nobody to share the state with")
    if capturable:
        refuse(where, "shard_state", "be False with capturable=True", True, "a graph cannot send what it has updated")
    if precision.begin:
        mend = "use master_weights=True; random numbers follow the place in the whole parameter"
        refuse(where, "shard_state", "be False with stochastic_rounding=True", True, mend)
    return True


def refuse_sharded(where: str, parameters: Iterable[Any]) -> None:
    """Refuse to divide the state of what is divided."""
    if sharded(parameters) is not None:
        mend = "leave it out; the state is sharded as its parameters are"
        refuse(where, "shard_state", "be False in a model that is sharded itself", True, mend)


def refuse_shared(where: str, optimizer: AdaFisher) -> None:
    """For what looks at whole momenta."""
    if shared_by(optimizer) is not None:
        raise BackendError(
            f"{where}: momenta must be whole on each rank, got shard_state=True; factors() are whole, and "
            "torch.distributed.checkpoint.state_dict gathers the rest (full_state_dict=True)"
        )


def shared_by(optimizer: AdaFisher) -> Any:
    """The process group that divides the state; None where each process has all of it."""
    return group_of(optimizer) if optimizer._shard_state else None


def world() -> Any:
    """What is another one as soon as process groups are made anew; None without them."""
    return dist.group.WORLD if dist.is_available() else None


def homes(optimizer: AdaFisher) -> Callable[[Any], Any]:
    """What gives for each parameter a tensor that is divided over the ranks as its state is: a DTensor on its memory
    with `shard_state=True`, else the parameter itself."""
    group = shared_by(optimizer)
    if group is None:
        return lambda p: p
    from torch.distributed.device_mesh import DeviceMesh

    kinds = {p.device.type for each in optimizer.param_groups for p in each["params"]}
    return partial(_divided, {kind: DeviceMesh.from_group(group, kind) for kind in kinds})


def _divided(meshes: dict[str, Any], p: Tensor) -> Any:
    """A parameter as a DTensor; itself if no rows of it lie together in memory, so that its state is whole."""
    if not p.numel() or not p.dim() or not _in_rows(p):
        return p
    from torch.distributed.tensor import DTensor, Shard

    mesh, shard = meshes[p.device.type], (Shard(0),)
    rows = -(-p.shape[0] // mesh.size())
    first = min(mesh.get_local_rank() * rows, p.shape[0])
    mine = p.detach()[first : first + rows]
    return DTensor.from_local(mine, mesh, shard, run_check=False, shape=p.shape, stride=p.stride())


def _in_rows(p: Tensor) -> bool:
    """Whether the elements fill their memory, one row (of the first axis) behind the other, in whatever order each."""
    start, end = torch_view(p.detach(), "step", "params").extent
    return end - start == p.nbytes and (p.shape[0] == 1 or p.stride(0) * p.shape[0] == p.numel())


class _Bucket(NamedTuple):
    """What one collective sends. All are views, made once.

    Attributes:
        own, slots: this rank's elements in its parameters, and their places in `sent`.
        sent: of this rank, a part of `gathered`.
        gathered: of all ranks.
        places, arrived: of all elements in the parameters, and in `gathered`.
    """

    own: list[Tensor]
    slots: list[Tensor]
    sent: Tensor
    gathered: Tensor
    places: list[Tensor]
    arrived: list[Tensor]


class Exchange:
    """All ranks send each other the rows that they have updated, in a few collectives through flat buffers: while one
    is under way, the next is filled and the last emptied.

    Args:
        group: the ranks.
        pairs: (parameter, its home, see `homes`) of all that take part, the same on all ranks.
        wrappers: `DistributedDataParallel` around them, none of which may be within `join()`.

    Raises:
        CafinError: the parameters lie on several devices.
    """

    def __init__(self, group: Any, pairs: Iterable[tuple[Tensor, Any]], wrappers: Sequence[Any] = ()) -> None:
        self.group, self.wrappers = group, wrappers
        flat: dict[torch.dtype, list[tuple[Tensor, int]]] = {}
        devices = set()
        for p, home in pairs:
            devices.add(p.device)
            if is_sharded(home):
                rows = -(-p.shape[0] // group.size())
                whole = p.detach().as_strided((p.numel(),), (1,), p.storage_offset())
                flat.setdefault(p.dtype, []).append((whole, rows * (p.numel() // p.shape[0])))
        if len(devices) > 1:
            got, mend = f"on {', '.join(sorted(map(str, devices)))}", "leave shard_state out"
            refuse("step", "model", "lie on one device with shard_state=True", got, mend)
        self._buckets = [bucket for dtype in flat for bucket in self._filled(flat[dtype])]

    def _filled(self, flat: list[tuple[Tensor, int]]) -> list[_Bucket]:
        """Buckets of parameters of one type: (their memory, elements of it on each rank but perhaps on the last)."""
        like, ranks, rank = flat[0][0], self.group.size(), self.group.rank()
        room = max(BUCKET // ranks, LEAST) // like.element_size()
        room = min(room, sum(part for _, part in flat))
        lists: list[list[tuple[Tensor, int, int, int]]] = [[]]  # memory, part, and from where to where in each part
        left = room
        for whole, part in flat:
            first = 0
            while first < part:
                if not left:
                    lists.append([])
                    left = room
                last = min(part, first + left)
                lists[-1].append((whole, part, first, last))
                left, first = left - (last - first), last
        buffers = [like.new_empty(ranks * room) for _ in range(min(2, len(lists)))]
        buckets = []
        for number, pieces in enumerate(lists):
            length = sum(last - first for *_, first, last in pieces)
            gathered = buffers[number % 2][: ranks * length]
            table = gathered.view(ranks, length)
            bucket = _Bucket([], [], table[rank], gathered, [], [])
            column = 0
            for whole, part, first, last in pieces:
                full, rest = divmod(whole.numel(), part)  # ranks with as much, and what the one behind them has
                columns = table[:, column : column + last - first]
                column += last - first
                mine = whole[rank * part : (rank + 1) * part][first:last]
                bucket.own.append(mine)
                bucket.slots.append(columns[rank, : mine.numel()])
                bucket.places.append(whole[: full * part].view(full, part)[:, first:last])
                bucket.arrived.append(columns[:full])
                if rest > first:
                    theirs = whole[full * part :][first:last]
                    bucket.places.append(theirs)
                    bucket.arrived.append(columns[full, : theirs.numel()])
            buckets.append(bucket)
        return buckets

    @torch.no_grad()
    def __call__(self) -> None:
        """Make the parameters whole again, in place, on the current stream.

        Raises:
            BackendError: another rank did not come; some parameters are those of before the step then.
        """
        before: tuple[Any, _Bucket] | None = None
        with telling(COLLECTIVE, self.group, MEND):
            for bucket in self._buckets:
                torch._foreach_copy_(bucket.slots, bucket.own)
                work = _all_gather(bucket.gathered, bucket.sent, group=self.group, async_op=True)
                if before is not None:
                    _land(*before)
                before = work, bucket
            if before is not None:
                _land(*before)


def _all_gather(*tensors: Tensor, **options: Any) -> Any:
    call: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the older name
    return call(*tensors, **options)


def _land(work: Any, bucket: _Bucket) -> None:
    work.wait()
    torch._foreach_copy_(bucket.places, bucket.arrived)


class Whole:
    """What a process updates: all that it holds of each parameter.

    Attributes:
        labels: what errors call the parameters.
        homes: tensors that are divided over the ranks as the state of the parameters is.
        parts: what is updated, each by an item of the launch.
        names, pairs: of each part what errors call it, and its (columns, rows) of F, None where F is 1.
        exchange: brings what other ranks have updated; None if nobody else has any.
        alone: the update is the whole step; False where it comes in a call for each group.
        ends: the step is over behind it.
        laid_flat: see `is_laid_flat`.
    """

    exchange: Exchange | None = None
    laid_flat = False
    alone = ends = True

    def __init__(self, optimizer: AdaFisher, owned: list[Tensor], homes: list[Any] | None = None) -> None:
        names = {id(p): name for name, p in named_parameters(optimizer.model)}
        self.names = self.labels = [names.get(id(p), "params") for p in owned]
        self.homes = owned if homes is None else homes
        self.parts: list[Tensor] = list(map(local, self.homes))
        pairs = [factors_of(optimizer, p) for p in owned]
        self.pairs = [pair and part_of(pair, x, name) for pair, x, name in zip(pairs, self.homes, self.names)]
        self._world = world()

    def hold(self, optimizer: AdaFisher) -> bool:
        """False if the ranks that divide the state have formed another process group, or parts lie elsewhere."""
        return not optimizer._shard_state or self._world is world()

    def each(self, values: list[Any]) -> list[Any]:
        """For each part, what is given for each parameter."""
        return values

    def of(self, grads: list[Any]) -> list[Any]:
        """The parts of gradients."""
        return grads

    def momenta(self, averages: list[Any]) -> list[Any]:
        """The parts of momenta, of which a process has no more than it updates."""
        return averages

    def addresses(self, grads: list[int]) -> list[int]:
        """Of the parts, for those of gradients, 0 of none."""
        return grads


class Shares(Whole):
    """The rows of each parameter that are a rank's, on its memory, and how all become whole again."""

    def __init__(
        self,
        optimizer: AdaFisher,
        group: Any,
        owned: list[Tensor],
        every: Iterable[Tensor],
        home: Callable[[Any], Any],
    ) -> None:
        """`owned`: the parameters that are updated; `every`: these and what may be later, in the order of all ranks."""
        super().__init__(optimizer, owned, [home(p) for p in owned])
        self.parts = [part.detach() for part in self.parts]
        self._rows = [_rows_of(x) for x in self.homes]
        starts = [(part.storage_offset(), p.storage_offset()) for part, p in zip(self.parts, owned)]
        self._offsets = [int(a - b) * p.element_size() for (a, b), p in zip(starts, owned)]
        self.exchange = Exchange(group, [(p, home(p)) for p in every], list(wrappers(optimizer.model)))

    def of(self, grads: list[Any]) -> list[Any]:
        return [g if g is None else g[rows] for g, rows in zip(grads, self._rows)]

    def addresses(self, grads: list[int]) -> list[int]:
        return [at and at + offset for at, offset in zip(grads, self._offsets)]


def _rows_of(home: Any) -> Any:
    """The index of this rank's part."""
    if not is_sharded(home):
        return ...
    (rows, *_), (first, *_) = place_of(home)
    return slice(first, first + rows)
