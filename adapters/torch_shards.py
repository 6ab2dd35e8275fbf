"""Parameters of which each rank holds a part: the DTensors of `fully_shard` (FSDP2) and of tensor parallelism.

The update of a part needs nothing of the others: momentum has the parameter's own layout, and a part of the weight's
rows, or columns, takes the same part of the factors, which every rank has whole.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from cafin_cupy.arrays import wraps_others
from cafin_cupy.errors import CafinTypeError, refuse

if TYPE_CHECKING:
    from .torch import AdaFisher

LAID = "parameters that are laid flat (DeepSpeed's ZeRO)"
LINK = "_hp_mapping"  # of a parameter that is: where its elements lie, None if this rank has none of them
MEND = (
    "fully_shard of one mesh is served, `(Shard(dim),)` and `(Replicate(), Shard(dim))` of HSDP, and ahead of it or "
    "without it parallelize_module of one mesh"
)


def local(x: Any) -> Any:
    """This rank's part of a tensor: the tensor itself where it is whole."""
    return x._local_tensor if wraps_others(x) else x


def local_gradient(p: Any) -> Tensor | None:
    """This rank's part of a parameter's gradient."""
    g: Any = p.grad
    if g is None or not wraps_others(p):
        return g  # type: ignore[no-any-return]
    if not wraps_others(g) or not laid_out_alike(p):
        got = f"{type(g).__name__} of {getattr(g, 'placements', 'no placements')}"
        refuse("step", "gradient", f"be sharded as its parameter, {p.placements}", got, "redistribute it")
    return g._local_tensor  # type: ignore[no-any-return]


def laid_out_alike(p: Any) -> bool:
    """True unless the gradient of a DTensor is divided in another way."""
    g = p.grad
    if g is None or not is_sharded(p):
        return True
    return is_sharded(g) and g.placements == p.placements and g.device_mesh == p.device_mesh


def local_average(state: Any) -> Any:
    """This rank's part of a momentum."""
    return local(state["exp_avg"])


def sharded(parameters: Iterable[Any]) -> Any:
    """The mesh that parameters are sharded over; None if none is."""
    return next((p.device_mesh for p in parameters if is_sharded(p)), None)


def named_parameters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, parameter) of a model, with its own sharded ones in place of the whole ones that a forward leaves."""
    for module in model.modules():
        if shards(module):
            module.reshard()  # type: ignore[operator]
    yield from model.named_parameters()


def mesh_of(optimizer: AdaFisher) -> Any:
    """The mesh of the optimizer's parameters. Within a forward the model has whole ones in their place."""
    return sharded(p for group in optimizer.param_groups for p in group["params"])


def shards(module: nn.Module) -> bool:
    """True if `fully_shard` was called on the module itself."""
    return isinstance(module, getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ()))


def is_sharded(p: Any) -> bool:
    return wraps_others(p) and hasattr(p, "placements")


def is_laid_flat(optimizer: AdaFisher) -> bool:
    """True if the groups hold flat copies in the place of the model's parameters: see torch_flat.py."""
    parameters = list(optimizer.model.parameters())
    if not any(hasattr(p, LINK) for p in parameters):
        return False
    mine = set(map(id, parameters))
    return not any(id(p) in mine for group in optimizer.param_groups for p in group["params"])


def steps_flat(optimizer: AdaFisher) -> bool:
    """`is_laid_flat` within a step: what its plan knows, if there is one that holds."""
    plan = optimizer._plan
    return is_laid_flat(optimizer) if plan is None else plan.shares.laid_flat


def check_shards(where: str, model: nn.Module) -> None:
    """Refuse parameters that are divided over ranks in ways that are not served."""
    flat = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    if any(isinstance(module, flat) for module in model.modules()):
        got, mend = "FullyShardedDataParallel, whose parameters are flat", "use fully_shard, or DistributedDataParallel"
        refuse(where, "model", "have parameters of layers", got, mend, CafinTypeError)
    if any(base.__name__ == "ReplicateModule" for module in model.modules() for base in type(module).__mro__):
        got, mend = "a model of torch.distributed's `replicate`", "use DistributedDataParallel, or fully_shard"
        refuse(where, "model", "have parameters of layers", got, mend, CafinTypeError)
    first: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    for name, p, managed in owned(model):
        if not is_sharded(p):
            continue
        argument, dims = f"model ({name})", data_dims(p, managed)
        data, team = p.placements[:dims], p.placements[dims:]
        if managed and (not data or len(data) > 2 or any(hasattr(x, "dim") for x in data[:-1])):
            refuse(where, argument, "be sharded along one dimension", p.placements, MEND, CafinTypeError)
        if any(x.is_partial() for x in team):
            refuse(where, argument, "be sharded or replicated", p.placements, MEND, CafinTypeError)
        if p.device_mesh.get_coordinate() is None:
            refuse(where, argument, "be on a mesh that this rank is in", p.device_mesh, MEND, CafinTypeError)
        apart, together = ranks_of(p, managed)
        if first is None:
            first = apart, together
        alike = [len(a) == 1 or len(b) == 1 or a == b for a, b in zip(first, (apart, together))]
        first = max(first[0], apart, key=len), max(first[1], together, key=len)
        if not all(alike) or len(set(first[0]).intersection(first[1])) > 1:
            refuse(where, argument, "have the mesh of the others", p.device_mesh, MEND, CafinTypeError)


def owned(model: nn.Module) -> Iterator[tuple[str, Any, bool]]:
    """(name, parameter, whether `fully_shard` was called on a module around it) of all parameters."""
    around = [name for name, module in model.named_modules() if shards(module)]
    for name, p in model.named_parameters():
        yield name, p, any(not prefix or name.startswith(f"{prefix}.") for prefix in around)


def data_dims(p: Any, managed: bool) -> int:
    """How many dimensions of a parameter's mesh are those of `fully_shard`, which come first and end with one that it
    shards; over the others a team of ranks works on the same data."""
    cut = (place for place, x in enumerate(p.placements) if hasattr(x, "dim"))
    return next(cut, -1) + 1 if managed else 0


def ranks_of(p: Any, managed: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(ranks that hold the same part of a layer for other data, ranks that hold its other parts for the same data), by
    a parameter's mesh; this rank among both."""
    dims, mesh, at = data_dims(p, managed), p.device_mesh.mesh, p.device_mesh.get_coordinate()
    return tuple(mesh[(..., *at[dims:])].flatten().tolist()), tuple(mesh[tuple(at[:dims])].flatten().tolist())


def check_options(optimizer: AdaFisher, where: str, parameters: Iterable[Any]) -> None:
    """Refuse what needs to know all elements of a sharded parameter."""
    if sharded(parameters) is not None and optimizer._precision.begin:
        got, mend = "True", "use master_weights=True; its random numbers follow the place in the whole parameter"
        refuse(where, "stochastic_rounding", "be False with sharded parameters", got, mend)


def part_number(p: Any) -> tuple[int, int]:
    """(number of this rank's part of a parameter, how many parts there are)."""
    number, parts = 0, 1
    if is_sharded(p):
        for x, size, at in zip(p.placements, p.device_mesh.shape, p.device_mesh.get_coordinate()):
            if hasattr(x, "dim"):
                number, parts = number * size + at, parts * size
    return number, parts


def place_of(p: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, first index) of this rank's part within the whole."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    return tuple(sizes), tuple(offsets)


def factors_of(optimizer: AdaFisher, p: Any) -> tuple[Tensor, Tensor] | None:
    """(columns, rows) of the F of a whole parameter, None if no layer owns it."""
    place = optimizer._owners.get(id(p))
    if place is None:
        return None
    index, role = place
    return optimizer._factors.of_weight(index) if role == "weight" else optimizer._factors.of_bias(index)


def part_of(pair: tuple[Tensor, Tensor], p: Any, name: str) -> tuple[Tensor, Tensor]:
    """(columns, rows) of this rank's part of a parameter, for those of the whole: views.

    Seen as a matrix, the leading axes make its rows and the others its columns. A part that is cut along the first
    axis of either takes a slice of that vector.
    """
    if not is_sharded(p):
        return pair
    sizes, offsets = place_of(p)
    columns, rows = pair
    shape = tuple(p.shape)
    split = next(k for k in range(len(shape), -1, -1) if math.prod(shape[k:]) >= columns.numel())
    slices = []
    for vector, first, last in ((columns, split, len(shape)), (rows, 0, split)):
        whole, have, start = shape[first:last], sizes[first:last], offsets[first:last]
        if tuple(have[1:]) != whole[1:]:
            refuse("step", name, "be sharded along the first axis of its rows or columns", p.placements, MEND)
        step = math.prod(whole[1:])
        slices.append(vector[start[0] * step : (start[0] + have[0]) * step] if whole else vector)
    return slices[0], slices[1]


def laid_out(where: str, name: str, p: Any, x: Any) -> Any:
    """State of a parameter, of its shape, divided over the ranks as the parameter is."""
    if not is_sharded(x) and not is_sharded(p):
        return x
    if not is_sharded(p):
        mend = "load it by torch.distributed.checkpoint, or gather it by its StateDictOptions(full_state_dict=True)"
        refuse(where, name, "be whole, as its parameter is", f"a DTensor of {x.placements}", mend)
    if is_sharded(x):
        if (x.device_mesh, x.placements) != (p.device_mesh, p.placements):
            got, mend = f"{x.placements} on {x.device_mesh}", "load it by torch.distributed.checkpoint"
            refuse(where, name, f"be sharded as its parameter, {p.placements} on {p.device_mesh}", got, mend)
        if x.device_mesh is p.device_mesh:
            return x
        mine, at = x._local_tensor, x.device_mesh.get_coordinate()
        if at != p.device_mesh.get_coordinate() or mine.shape != local(p).shape:
            mend = "load on each rank the file that it has saved, or use torch.distributed.checkpoint"
            refuse(where, name, "be this rank's part of the whole", f"that of the rank at {at} of the mesh", mend)
    else:
        mine = x[tuple(slice(start, start + size) for size, start in zip(*place_of(p)))].clone()  # keeps no whole alive
    from torch.distributed.tensor import DTensor

    options = {"run_check": False, "shape": p.shape, "stride": x.stride()}
    return DTensor.from_local(mine.detach().to(p.device), p.device_mesh, p.placements, **options)
