"""Which ranks train together, when their sums are added up, and whether they still agree."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from cafin_cupy.errors import BackendError, CafinError, CafinTypeError, refuse
from cafin_cupy.factors import Factors
from cafin_cupy.rule import at_least, whole

from .torch_parallel import Team
from .torch_reduced import ReducedFactors, same_on_all_ranks, telling
from .torch_scalars import SCALARS
from .torch_shards import is_laid_flat, local, mesh_of, named_parameters, part_number, sharded, shards

if TYPE_CHECKING:
    from .torch import AdaFisher

CHECK = "the comparison of the ranks' state"
AGREEMENT = "the comparison of the ranks' models and options"
_backward_number = getattr(torch._C, "_current_graph_task_id", lambda: -1)
CHUNK = 1 << 22  # elements whose bits are added up at a time


def check_dist(where: str, given: Any, model: nn.Module) -> Any:
    """The argument `dist`, or a `CafinError`."""
    if given is None or isinstance(given, bool):
        mesh, wrapped = sharded(model.parameters()), _group_of_wrappers(where, model)
        size = mesh.size() if mesh is not None else _size(wrapped) if wrapped is not None else 1
        if given is False and size > 1:
            got, mend = "False", "leave it out; the ranks would follow different factors and drift apart"
            rule = "not be False in DistributedDataParallel or fully_shard, or with tensor parallelism"
            refuse(where, "dist", rule, got, mend)
        return given
    if not dist.is_available() or not isinstance(given, dist.ProcessGroup):
        rule = "be None, True, False or a process group that this rank is in"
        refuse(where, "dist", rule, type(given).__name__, kind=CafinTypeError)
    return _Chosen(given)


class _Chosen:
    """A process group that was given. Copies of an optimizer share it."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> _Chosen:
        return self

    def __reduce__(self) -> Any:
        raise CafinError(
            "pickle: an optimizer must not hold a process group, got dist=ProcessGroup, which is of this process; save "
            "state_dict(), or leave dist out where the default group will do"
        )


def check_divide_factor(where: str, given: Any) -> float | None:
    """The argument `gradient_divide_factor`, or a `CafinError`."""
    return None if given is None else at_least(where, "gradient_divide_factor", given, 0.0, strict=True)


def replicated(model: nn.Module) -> Any:
    """The `DistributedDataParallel` that wraps the model, perhaps in `torch.compile`; None if none does."""
    while not isinstance(model, DistributedDataParallel):
        inner = model._modules.get("_orig_mod")
        if not isinstance(inner, nn.Module):
            return None
        model = inner
    return model


def wrappers(model: nn.Module) -> Iterator[DistributedDataParallel]:
    """Those around the model or within it."""
    return (module for module in model.modules() if isinstance(module, DistributedDataParallel))


def _group_of_wrappers(where: str, model: nn.Module) -> Any:
    """The group of a model in `DistributedDataParallel`, or of parts of it that are; None if none is."""
    groups = [wrapper.process_group for wrapper in wrappers(model)]
    ranks = [dist.get_process_group_ranks(group) for group in groups]
    if any(each != ranks[0] for each in ranks):
        mend = "pass dist=group, or make an optimizer for each part"
        refuse(where, "model", "be shared by the same ranks in all its DistributedDataParallel", ranks, mend)
    return groups[0] if groups else None


def _size(group: Any) -> int:
    return int(dist.get_world_size(group))


def group_of(optimizer: AdaFisher) -> Any:
    """The process group whose sums are added up; None where one process trains alone."""
    given = optimizer._dist
    if given is False or not dist.is_available():
        return None
    if isinstance(given, _Chosen):
        given = given.group
    else:
        if not dist.is_initialized():
            return None
        given = _group_of_wrappers("step", optimizer.model) or _group_of_mesh(optimizer)
    return given if _size(given) > 1 else None


def _group_of_mesh(optimizer: AdaFisher) -> Any:
    """The ranks that `fully_shard` has divided parameters over, all of which share the batch, with their teams; all
    ranks where it has not."""
    mesh, team = mesh_of(optimizer), optimizer._team
    if mesh is None or len(team.others) < 2:
        return dist.group.WORLD
    ranks = max(1, len(team.ranks)) * len(team.others)
    if ranks == dist.get_world_size():
        return dist.group.WORLD
    if mesh.ndim == 1 and not team.divides:
        return mesh.get_group()
    raise BackendError(
        f"step: a mesh of several dimensions must hold all {dist.get_world_size()} ranks, got {ranks}; pass "
        "dist=torch.distributed.new_group(ranks of the mesh)"
    )


def over_ranks(optimizer: Any, factors: Factors) -> Factors:
    """`factors` of this process, or those of the group as it is now."""
    group = group_of(optimizer)
    reduced = factors if isinstance(factors, ReducedFactors) else None
    if group is (reduced and reduced.group):
        return factors
    own = factors if reduced is None else reduced.own
    if group is None:
        return own
    _refuse_backend(group, own.H_effective[0].device)
    team: Team = optimizer._team
    losses = _size(group) / max(1, len(team.ranks))
    return ReducedFactors(own, group, optimizer._divide_factor or losses, team)


def _refuse_backend(group: Any, device: torch.device) -> None:
    """NCCL sends nothing that lies on the CPU, where `CPUOffloadPolicy` keeps factors and parameters."""
    served = sorted({each.type for each in group._device_types})
    if device.type not in served:
        raise BackendError(
            f"step: the process group must have a backend for tensors on {device.type}, where parameters and factors "
            f"are, got backends for {', '.join(served)}; start it by "
            'torch.distributed.init_process_group("cpu:gloo,cuda:nccl")'
        )


def meet(optimizer: AdaFisher, sampled: bool) -> None:
    """Ahead of a sampled step, and of the first one: let the sums be those of all ranks that train together by now."""
    factors = optimizer._kept_factors = over_ranks(optimizer, optimizer._factors)
    if isinstance(factors, ReducedFactors):
        refuse_join(wrappers(optimizer.model))
        _agree(optimizer, factors)
        if sampled:
            optimizer._seen.update(index for index, _ in factors.sums())  # also what another rank alone has seen


def _agree(optimizer: AdaFisher, factors: ReducedFactors) -> None:
    """Refuse ranks that differ in what their collectives or their updates follow from."""
    what = _difference(optimizer, factors)
    if what is not None:
        factors.difference = None  # the next attempt compares again
        raise BackendError(
            f"step: all {factors.group.size()} ranks must have the same {what}, got others than this rank's on some; "
            "make and load model and optimizer alike on all ranks, or pass dist=False where each trains a model of its "
            "own"
        )


def _difference(optimizer: AdaFisher, factors: ReducedFactors) -> str | None:
    """What the ranks do not have in common, None if they are alike: compared once."""
    if not factors.agreed and factors.difference is None:
        must = _alike(optimizer, factors)
        numbers = [zlib.crc32(repr(value).encode()) for value in must.values()]
        with telling(AGREEMENT, factors.group):
            same = same_on_all_ranks(numbers, factors.group, factors.H_effective[0].device)
        factors.agreed = all(same)
        if not factors.agreed:
            factors.difference = list(must)[same.index(False)]
    return factors.difference


def _alike(optimizer: AdaFisher, factors: ReducedFactors) -> dict[str, Any]:
    """What ranks must have in common, by the words for it."""
    scalars = (*SCALARS, "maximize")
    groups = [
        [float(group[name]) for name in scalars]
        + [(optimizer._owners.get(id(p)), p.shape, p.dtype, p.requires_grad) for p in group["params"]]
        for group in optimizer.param_groups
    ]
    return {
        "layers": [(type(x).__name__, x.label, x.shape, x.H_units, x.S_size) for x in factors.layers],
        "steps taken": optimizer.steps,
        "TCov and averaging": (optimizer.TCov, factors.averaging, factors.divide_factor),
        "parameter groups": groups,
        "precision, seed and other options": (
            optimizer._decoupled,
            optimizer._precision,
            optimizer._check_every,
            optimizer._shard_state,
            optimizer.error_if_nonfinite,
        ),
    }


def refuse_join(wrappers: Iterable[DistributedDataParallel]) -> None:
    """Refuse a step within `model.join()`: ranks without data answer its collectives, but not ours."""
    if any(wrapper._join_config.enable for wrapper in wrappers):
        raise BackendError(
            "step: it must run outside of DistributedDataParallel's join(), as ranks that have run out of data would "
            "not take part in ours; give all ranks equally many batches (the last ones may be smaller)"
        )


# When


def attach_to_root(optimizer: Any) -> Iterator[Any]:
    """A hook on the wrapper whose backward all ranks run: at its end the collective is started."""
    wraps = isinstance(optimizer.model, DistributedDataParallel) or shards(optimizer.model)
    if wraps and group_of(optimizer) is not None:
        yield optimizer.model.register_forward_hook(_Root(optimizer))


class _Root:
    """Forward hook of a model in `DistributedDataParallel`, or of one that `fully_shard` was called on."""

    def __init__(self, optimizer: AdaFisher | None = None) -> None:
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else lambda: None
        self._number = -1

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        optimizer = self._optimizer()
        if optimizer is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        refuse_join(wrappers(optimizer.model))
        if not getattr(module, "require_backward_grad_sync", True):  # within no_sync()
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._arrived)

    def _arrived(self, s: Tensor) -> None:
        """A backward pass begins, on all ranks alike, whichever layers they use: so they have the same order of
        collectives."""
        number = _backward_number()
        if number in (-1, self._number):
            return
        self._number = number
        torch.autograd.Variable._execution_engine.queue_callback(self._over)

    def _over(self) -> None:
        optimizer = self._optimizer()
        factors = optimizer._factors if optimizer is not None else None
        if optimizer is None or not isinstance(factors, ReducedFactors):
            return
        if replicated(optimizer.model) is None and not _has_gradients(optimizer):
            return
        # `step` tells a difference: an error here would break the wrapper.
        if _difference(optimizer, factors) is None and optimizer.samples:
            factors.start()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Root:
        return _Root()

    def __reduce__(self) -> tuple[type[_Root], tuple[()]]:
        return _Root, ()


def _has_gradients(optimizer: AdaFisher) -> bool:
    """False of sharded parameters whose gradients wait to be averaged, with `set_requires_gradient_sync(False)`."""
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


# Whether they agree


def check_every_of(where: str, every: Any) -> int | None:
    """The argument `check_every`, or a `CafinError`."""
    return None if every is None else whole(where, "check_every", every, 1)


def compare_from_now_on(optimizer: AdaFisher) -> None:
    """Serve `check_every`, if it is given."""
    if optimizer._check_every is not None:
        optimizer.register_step_post_hook(_compare)


def _compare(optimizer: Any, args: Any, kwargs: Any) -> None:
    if not optimizer._steps % optimizer._check_every and (group := group_of(optimizer)) is not None:
        compare_ranks(optimizer, group)


@torch.no_grad()
def compare_ranks(optimizer: AdaFisher, group: Any) -> None:
    """Compare a hash of parameters, momenta and factors over the ranks; of sharded ones, over those that hold the same
    part. Where ranks divide the state of whole parameters, of gradients too: behind the all-gather their parameters are
    the same, whatever they have followed.

    Raises:
        CafinError: on every rank, with the first name that differs.
    """
    state = list(_state(optimizer, group))
    if not state:
        return
    device = state[0][1].device
    hashes = torch.stack([fingerprint(x).to(device) for _, x, _, _ in state]).tolist()
    named = [name for name, _, _, parts in state for _ in range(parts)]
    numbers = [mine if k == part else None for mine, (_, _, part, parts) in zip(hashes, state) for k in range(parts)]
    with telling(CHECK, group):
        if not all(same_on_all_ranks([zlib.crc32(repr(named).encode())], group, device)):
            raise CafinError(
                f"step: all {_size(group)} ranks must have the state of the same parameters and layers, got others "
                f"than this rank's on some after step {optimizer._steps}; load the last checkpoint on all ranks"
            )
        same = same_on_all_ranks(numbers, group, device)
    if not all(same):
        first = named[same.index(False)]
        raise CafinError(
            f"step: {first} must be the same on all {_size(group)} ranks, got different bits after step "
            f"{optimizer._steps}; load the last checkpoint, and look for what ranks do apart: gradients that are not "
            "reduced, parameters written on one rank"
        )


def _state(optimizer: AdaFisher, ranks: Any) -> Iterator[tuple[str, Tensor, int, int]]:
    """(name, what this rank holds, which part that is, of how many) of what several ranks hold."""
    names = {id(p): name for name, p in named_parameters(optimizer.model)}
    for group in optimizer.param_groups if not is_laid_flat(optimizer) else ():
        for p in group["params"]:
            part, parts = part_number(p)
            if parts >= _size(ranks):  # nobody else holds it
                continue
            name = names.get(id(p), "params")
            if optimizer._shard_state and p.grad is not None:
                yield f"gradient of {name}", p.grad, 0, 1
            yield f"parameter {name}", local(p), part, parts
            for key, value in optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor) and (here := part_number(value))[1] < _size(ranks):
                    yield f"{key} of {name}", local(value), *here
    for name, (H, S) in optimizer.factors().items():
        yield f"H of {name}", H, 0, 1
        yield f"S of {name}", S, 0, 1


def fingerprint(x: Tensor) -> Tensor:
    """A number that changes with any bit of a tensor, and with the order of its elements; int64, without axes."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = x.detach().contiguous().view(-1).view(kinds[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for first in range(0, bits.numel(), CHUNK):
        part = bits[first : first + CHUNK].long()
        total += (part * (2 * torch.arange(first, first + part.numel(), device=x.device) + 1)).sum()
    return total
