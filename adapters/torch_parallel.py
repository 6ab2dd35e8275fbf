"""Layers that several ranks compute together: tensor and sequence parallelism.

Such a layer has DTensors, whose placements tell which part of its input and output gradient this rank holds. The raw
sums of the layer follow from them alone, whatever the layouts of its weights:

- **Sharded along features** (the input of a row-wise layer, the output of a column-wise one): a rank's sums are a part
  of the vector.
- **Sharded along batch or sequence**: they are one term of every entry. A layer norm has an entry of H for each place
  of the sequence, so there a part of the sequence makes a part of H.
- **Replicated**: every rank has the same sums, and the first one's count.

So every rank lays its own share into a vector of zeros, and the sum over all ranks is that of one process, by the
collective that adds up those of other batches. Nothing is gathered. What no rank has alone (`Partial`), or what is cut
in an unusual way, is redistributed first, in backward, on sampled steps only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch import distributed as dist

from cafin_cupy.errors import CafinTypeError, refuse
from cafin_cupy.layers import Embedding, Layer, LayerNorm, Linear, TransposedLinear

from .torch_shards import LAID, data_dims, is_sharded, laid_out_alike, local_gradient, owned, ranks_of, steps_flat

if TYPE_CHECKING:
    from .torch import AdaFisher

FEATURED = (Linear, Embedding)  # layers whose S has an entry for each feature of the output, which may be divided


class Team(NamedTuple):
    """The ranks that compute one loss together, each its part of the layers.

    Attributes:
        ranks: their numbers among all, in the order of their mesh; none of a model that one rank computes.
        others: the ranks that hold the same parts of layers, for other data, by `fully_shard`; this one among them.
        summed: ids of the parameters whose gradients come as autograd leaves them. `fully_shard` lays out the others.
    """

    ranks: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    summed: frozenset[int] = frozenset()

    @property
    def divides(self) -> bool:
        return len(self.ranks) > 1

    @property
    def counts(self) -> bool:
        """True of the rank whose sums count where all have the same."""
        return not self.divides or self.ranks[0] == dist.get_rank()


def team_of(model: nn.Module) -> Team:
    """The team of this rank. `check_shards` has seen that there is one."""
    found = [(*ranks_of(p, managed), managed, id(p)) for _, p, managed in owned(model) if is_sharded(p)]
    ranks = max((together for _, together, *_ in found), key=len, default=())
    others = max((apart for apart, _, managed, _ in found if managed), key=len, default=())
    return Team(ranks, others, frozenset(key for *_, managed, key in found if not managed))


def check_team(where: str, optimizer: AdaFisher, team: Team, modules: Iterable[Any]) -> None:
    """Refuse layers of other types whose weights a team divides, as a part of them is no layer of the same type, and a
    group that a part of the team is not in."""
    chosen = getattr(optimizer._dist, "group", None)
    if not team.divides:
        return
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in optimizer.model.modules()):
        mend = "use fully_shard on the other dimension of the mesh"
        refuse(where, "model", "not have DTensors in DistributedDataParallel", "some", mend, CafinTypeError)
    if chosen is not None and not set(team.ranks) <= set(dist.get_process_group_ranks(chosen)):
        rule, got = f"hold the ranks {list(team.ranks)}, which compute layers together", "others"
        refuse(where, "dist", rule, got, "pass a group of all ranks that train the model")
    managed = {id(p): by for _, p, by in owned(optimizer.model)}
    for name, module, _, layer in modules:
        if id(layer.weight) not in managed or not _divided(layer.weight, managed[id(layer.weight)]):
            continue
        if isinstance(module, nn.MultiheadAttention) or not isinstance(layer, FEATURED):
            kind = type(module).__name__
            mend = "leave it out of the plan, or build it of Linear layers"
            refuse(where, f"model ({name})", "be Linear or Embedding to be divided", kind, mend, CafinTypeError)


def refuse_scaler(optimizer: AdaFisher) -> None:
    """Refuse a step under a `GradScaler` that may tell its verdict to one rank alone, so that ranks drift apart: that
    of a team depends on how the first gradient is laid out, that of flat copies on what a rank has of them."""
    if getattr(optimizer, "found_inf", None) is None:
        return
    what = "tensor parallelism" if optimizer._team.divides else LAID if steps_flat(optimizer) else None
    if what is not None:
        mend = "train in bfloat16, which needs none"
        refuse("step", "GradScaler", f"be left out with {what}", "a step of one", mend)


def _divided(p: Any, managed: bool) -> bool:
    """True if the ranks of a team hold different parts of a parameter."""
    return is_sharded(p) and any(hasattr(x, "dim") for x in p.placements[data_dims(p, managed) :])


def computed_together(optimizer: AdaFisher, layer: Layer) -> bool:
    """True if a layer has the DTensors of a team."""
    return optimizer._team.divides and is_sharded(layer.weight)


# Gradients


def own_gradient(team: Team, p: Any) -> Tensor | None:
    """This rank's part of a parameter's gradient."""
    return _laid_gradient(p, p.grad) if unsummed(team, p) else local_gradient(p)


def unsummed(team: Team, p: Any) -> bool:
    """True if a gradient must be redistributed first, which all ranks of the team must do together."""
    return id(p) in team.summed and not laid_out_alike(p)


def _laid_gradient(p: Any, g: Any) -> Tensor:
    """Autograd leaves gradients of a norm that sees a part of the sequence to be added up, which is one collective for
    each of them, here as in `torch.optim`."""
    if not is_sharded(g) or g.device_mesh != p.device_mesh:
        got = f"{type(g).__name__} of {getattr(g, 'device_mesh', 'no mesh')}"
        refuse("step", "gradient", f"be a DTensor of its parameter's mesh, {p.device_mesh}", got, "redistribute it")
    with torch.no_grad():
        return settled(g.redistribute(placements=p.placements))


def settled(x: Any) -> Any:
    """What lies in memory of a tensor: this rank's part of a DTensor, and the result of a collective under way."""
    x = x._local_tensor if is_sharded(x) else x
    return x.trigger_wait() if hasattr(x, "trigger_wait") else x


# Sums


class Place(NamedTuple):
    """What this rank's sums of a call are of the layer's.

    Attributes:
        H, S: the entry of the layer's sums that the first of these is.
        S_size: the length of the S sums.
        counts: of H, of S, and of the number of rows: False where another rank has the same, and counts it.
    """

    H: int
    S: int
    S_size: int
    counts: tuple[bool, bool, bool]


class Share(NamedTuple):
    """This rank's share of a call: local input and output gradient, the descriptor that fits them, and their place."""

    h: Tensor
    s: Tensor
    layer: Layer
    place: Place


@torch.no_grad()
def share_of(team: Team, layer: Layer, h: Any, s: Any) -> Share:
    """From backward: the share of a call whose input and output gradient are DTensors.

    Raises:
        CafinError: they are divided in a way that the layer's sums do not follow from.
    """
    what = f"h, s of {layer.label}"
    if not is_sharded(h) or not is_sharded(s) or h.device_mesh != s.device_mesh:
        rule, got = "both be DTensors of one mesh, or neither", f"{type(h).__name__} and {type(s).__name__}"
        refuse("backward", what, rule, got)
    if h.device_mesh.size() != max(1, len(team.ranks)):
        rule, got = f"lie on the mesh of the model's DTensors, ranks {list(team.ranks)}", str(h.device_mesh)
        refuse("backward", what, rule, got, "make the optimizer behind parallelize_module")
    h, s = _matched(layer, h, s)
    along = _axis_of_H(layer, h)
    counts = [True, True, True]
    for x, y, at in zip(h.placements, s.placements, h.device_mesh.get_coordinate()):
        differs = [hasattr(x, "dim"), hasattr(y, "dim"), hasattr(x, "dim") and hasattr(y, "dim") and x.dim != along]
        counts = [c and (d or at == 0) for c, d in zip(counts, differs)]
    first_H = 0 if along is None else _first(h, along)
    first_S = _first(s, s.dim() - 1) if isinstance(layer, FEATURED) else 0
    mine, slope = settled(h), settled(s)
    if isinstance(layer, FEATURED):
        d_in = layer.width if isinstance(layer, Embedding) else mine.shape[-1]
        layer = _part(layer, d_in, slope.shape[-1])
    return Share(mine, slope, layer, Place(first_H, first_S, layer.S_size, (counts[0], counts[1], counts[2])))


def _axis_of_H(layer: Layer, h: Any) -> int | None:
    """The axis of the input whose places are the entries of the H sums, where a rank may have a part of them."""
    if isinstance(layer, Linear):
        return int(h.dim()) - 1
    if isinstance(layer, LayerNorm) and h.dim() - len(layer.shape) > 1:
        return 1
    return None


def _matched(layer: Layer, h: Any, s: Any) -> tuple[Any, Any]:
    """Both, redistributed where their squares would not be those of the whole: on every axis of the mesh either rows
    are divided alike, or at most one of them is divided, along its features."""
    from torch.distributed.tensor import Replicate, Shard

    features_h, features_s = (h.dim() - 1 if isinstance(layer, Linear) else None), s.dim() - 1
    laid_h, laid_s = [], []
    for x, y in zip(h.placements, s.placements):
        cut_h, cut_s = getattr(x, "dim", None), getattr(y, "dim", None)
        if cut_h is not None and cut_h != features_h:  # rows
            x = y = Shard(cut_h)
        elif cut_s is not None and not (cut_s == features_s and isinstance(layer, FEATURED)):
            x, y = (Shard(cut_s), Shard(cut_s)) if cut_h is None else (Shard(cut_h), Replicate())
        elif cut_h is not None:
            x, y = Shard(cut_h), Replicate()
        else:
            x, y = Replicate(), Replicate() if cut_s is None else Shard(cut_s)
        laid_h.append(x)
        laid_s.append(y)
    _refuse_cuts(layer, h, laid_h)
    return h.redistribute(placements=laid_h), s.redistribute(placements=laid_s)


def _refuse_cuts(layer: Layer, h: Any, placements: list[Any]) -> None:
    """Refuse inputs cut along an axis that the sums go over in another way than by adding up."""
    if isinstance(layer, FEATURED):
        return
    allowed = {0, _axis_of_H(layer, h)}
    if any(getattr(x, "dim", 0) not in allowed for x in placements):
        rule = "be divided along batch, or for a layer norm sequence"
        refuse("backward", f"h, s of {layer.label}", rule, tuple(placements), "redistribute them ahead of the layer")


def _first(x: Any, axis: int) -> int:
    """The first index along an axis of this rank's part."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return int(compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)[1][axis])


_parts: WeakKeyDictionary[Layer, Layer] = WeakKeyDictionary()  # as the kernels know a descriptor by its identity


def _part(layer: Layer, d_in: int, d_out: int) -> Layer:
    """A layer of as many features, which the sums are taken as."""
    shape = (d_in, d_out) if isinstance(layer, (TransposedLinear, Embedding)) else (d_out, d_in)
    if layer not in _parts or _parts[layer].shape != shape:
        _parts[layer] = dataclasses.replace(layer, weight=torch.empty(shape, device="meta"), bias=None)
    return _parts[layer]
