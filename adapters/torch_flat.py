"""Parameters that a wrapper has laid flat: DeepSpeed's ZeRO, stages 1 and 2.

In the place of a group's parameters its optimizer then finds one vector, a copy of this rank's share of them all, one
behind the other. The wrapper brings its gradient, averaged over the ranks, and writes it back into the model. Of each
parameter it tells which elements lie where. Such a range of a matrix is at most three rectangles: the end of a row,
whole rows, and the beginning of another. Each takes a slice of both factors, so each is an item of the one launch.

A step may come in several calls, one for each group: they share a refresh of the factors, and the last one counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from cafin_cupy.errors import refuse

from .torch_checks import check_owned, check_size
from .torch_ranks import group_of
from .torch_shards import LAID, LINK, factors_of, is_laid_flat, named_parameters, steps_flat
from .torch_zero import Shares, Whole, homes, shared_by

if TYPE_CHECKING:
    from .torch import AdaFisher

_link = attrgetter(LINK)


def refuse_flat(where: str, optimizer: AdaFisher) -> None:
    """For what looks at parameters one by one."""
    if is_laid_flat(optimizer):
        rule, mend = "hold the model's parameters", "call it ahead of deepspeed.initialize"
        refuse(where, "param_groups", rule, LAID, mend)


def refuse_by_hand(optimizer: AdaFisher) -> None:
    """Refuse a step of flat copies without gradients, which they have within their wrapper's step alone: it would
    count, and use up the factors' sums. Ahead of all that ranks send."""
    if steps_flat(optimizer) and all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
        rule, mend = f"have gradients of {LAID}", "call engine.step(), which brings them"
        refuse("step", "param_groups", rule, "none", mend)


def what_is_updated(optimizer: AdaFisher, owned: list[Tensor], joining: Iterable[Tensor]) -> Whole:
    """What this process updates of parameters, of which `owned` take part in the coming step, `joining` may later."""
    if is_laid_flat(optimizer):
        return Flat(optimizer, owned)
    check_owned(owned, {id(p) for p in optimizer.model.parameters()})
    group = shared_by(optimizer)
    if group is None:
        return Whole(optimizer, owned)
    return Shares(optimizer, group, owned, joining, homes(optimizer))


class Item(NamedTuple):
    """A rectangle of a parameter: the elements from `first` to `last - 1` of its flat copy, and its factors."""

    name: str
    flat: Tensor
    first: int
    last: int
    pair: tuple[Tensor, Tensor] | None


class Flat(Whole):
    """This rank's items of a model whose parameters are laid flat.

    Raises:
        CafinError: it is laid flat in a way, or the optimizer has options, that are not served.
    """

    laid_flat = True

    def __init__(self, optimizer: AdaFisher, owned: list[Tensor]) -> None:
        _refuse_options(optimizer)
        self._linked = [p for p in optimizer.model.parameters() if hasattr(p, LINK)]
        self._links = list(map(_link, self._linked))
        _refuse_other_ranks(optimizer, self._linked)
        every = [p for group in optimizer._every_group for p in group["params"]]
        numbers = {id(p): number for number, p in enumerate(owned)}
        items = [item for item in _items(optimizer, every) if id(item.flat) in numbers]
        self._of = [numbers[id(item.flat)] for item in items]  # each item is
        self._slices = [slice(item.first, item.last) for item in items]
        self._offsets = [item.first * item.flat.element_size() for item in items]
        self.labels, self.homes = flat_names(optimizer, owned), owned
        self.names, self.pairs = [item.name for item in items], [item.pair for item in items]
        self.parts = self.of([p.detach() for p in owned])
        self.ends = any(group is optimizer._every_group[-1] for group in optimizer.param_groups)
        self.alone = len(optimizer.param_groups) == len(optimizer._every_group)

    def hold(self, optimizer: AdaFisher) -> bool:
        return all(map(is_, map(_link, self._linked), self._links))

    def each(self, values: list[Any]) -> list[Any]:
        return [values[k] for k in self._of]

    def of(self, grads: list[Any]) -> list[Any]:
        return [g if g is None else g[piece] for g, piece in zip(self.each(grads), self._slices)]

    def momenta(self, averages: list[Any]) -> list[Any]:
        return self.of(averages)

    def addresses(self, grads: list[int]) -> list[int]:
        return [at and at + offset for at, offset in zip(self.each(grads), self._offsets)]


def rectangles(first: int, last: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """(rows, columns) of the elements from `first` to `last - 1` of a matrix, in their order."""
    while first < last:
        row, column = divmod(first, columns)
        rows = 1 if column else max(1, (last - first) // columns)
        width = min(columns - column, last - first)
        yield slice(row, row + rows), slice(column, column + width)
        first += rows * width


def flat_names(optimizer: AdaFisher, flats: Sequence[Tensor]) -> list[str]:
    """What tells flat copies of this rank from others: their first and last element in the model."""
    ends = {}
    for name, _, link in _links(optimizer):
        first, count = link.lp_fragment_address.start, link.lp_fragment_address.numel
        ends[link.hp_fragment.data_ptr()] = f"{name}[{first}]", f"{name}[{first + count - 1}]"
    found = []
    for x in flats:
        mine = [ends[at] for at in sorted(ends) if 0 <= at - x.data_ptr() < x.nbytes]
        found.append(f"{mine[0][0]} to {mine[-1][1]}" if mine else "padding")
    return found


def _links(optimizer: AdaFisher) -> Iterator[tuple[str, Any, Any]]:
    """(name, parameter, where its elements lie) of those of which this rank has some."""
    for name, p in named_parameters(optimizer.model):
        link = getattr(p, LINK, None)
        if link is None:
            continue
        if link.hp_fragment is None:
            rule, mend = "have its flat copy in memory", "call reload_states() of the engine first"
            refuse("step", f"model ({name})", rule, "none", mend)
        yield name, p, link


def _items(optimizer: AdaFisher, flats: Sequence[Tensor]) -> Iterator[Item]:
    """What this rank has of each parameter of the model; `flats`: of all groups."""
    begins: dict[int, int] = {}
    for name, p, link in _links(optimizer):
        flat, start = _place(name, p, link, flats)
        first, count = link.lp_fragment_address.start, link.lp_fragment_address.numel
        _refuse_order(name, p, first - start, flat, begins)
        pair = factors_of(optimizer, p)
        if pair is None:
            yield Item(name, flat, start, start + count, None)
            continue
        check_size(name, p.shape, pair)
        columns, rows = pair
        for across, along in rectangles(first, first + count, columns.numel()):
            mine = columns[along], rows[across]
            size = mine[0].numel() * mine[1].numel()
            yield Item(name, flat, start, start + size, mine)
            start += size


def _place(name: str, p: Tensor, link: Any, flats: Sequence[Tensor]) -> tuple[Tensor, int]:
    """The flat copy that has elements of a parameter, and where they begin."""
    start, at = link.hp_fragment_address.start, link.hp_fragment.data_ptr()
    places = [at - start * x.element_size() == x.data_ptr() for x in flats]
    if not any(places):
        rule, mend = "have its flat copy in the groups", "let the wrapper that has made it call step()"
        refuse("step", f"model ({name})", rule, "one elsewhere", mend)
    flat = flats[places.index(True)]
    if flat.device != p.device:
        rule, got = f"have its flat copy on {p.device}", f"one on {flat.device}"
        refuse("step", f"model ({name})", rule, got, "leave offload_optimizer out")
    precise = torch.promote_types(p.dtype, torch.float32)
    if flat.dtype != precise:
        mend = "leave master weights and gradients of 16 bits out"
        refuse("step", f"model ({name})", f"have its flat copy in {precise}", flat.dtype, mend)
    if p.dtype is torch.float16:
        rule, mend = f"be float32 or bfloat16 with {LAID}", "its loss scale is unknown here: train in bfloat16"
        refuse("step", f"model ({name})", rule, p.dtype, mend)
    return flat, start


def _refuse_order(name: str, p: Any, ahead: int, flat: Tensor, begins: dict[int, int]) -> None:
    """Refuse a link that does not tell the truth, as DeepSpeed's with `round_robin_gradients`: parameters lie in one
    memory, of which each rank has copied a part of one size.

    Args:
        name, p: a parameter.
        ahead: its first element that this rank has, less the place of that in the flat copy.
        flat: the copy.
        begins: of copies, by identity, the place in that memory where they begin, as far as it is known.
    """
    group = getattr(p, "_dp_group", None)
    begin = p.storage_offset() + ahead
    if begin != begins.setdefault(id(flat), begin if group is None else dist.get_rank(group) * flat.numel()):
        mend = "leave round_robin_gradients out"
        refuse("step", f"model ({name})", "lie in the order of its flat copies", "another order", mend)


def _refuse_options(optimizer: AdaFisher) -> None:
    for name, given, mend in (
        ("shard_state", optimizer._shard_state, "leave it out; the state is divided as the copies are"),
        ("master_weights", optimizer._precision.masters, "leave it out; the copies are the float32 weights"),
        ("stochastic_rounding", bool(optimizer._precision.begin), "leave it out; the copies are float32"),
        ("capturable", optimizer.capturable, "leave it out"),
    ):
        if given:
            refuse("step", name, f"be False with {LAID}", True, mend)


def _refuse_other_ranks(optimizer: AdaFisher, linked: Sequence[Any]) -> None:
    """Refuse factors that follow other ranks than the gradients."""
    group = next((p._dp_group for p in linked if hasattr(p, "_dp_group")), None)
    if group is None:
        return
    mine, theirs = group_of(optimizer), dist.get_process_group_ranks(group)
    ranks = [dist.get_rank()] if mine is None else dist.get_process_group_ranks(mine)
    if ranks != theirs:
        rule, mend = f"hold the ranks {theirs}, which share the batch", "pass the group of these ranks"
        refuse("step", "dist", rule, ranks, mend)
