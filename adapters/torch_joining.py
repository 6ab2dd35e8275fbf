"""Parameters and layers that join an optimizer in the middle of its run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cafin_cupy.arrays import torch_view
from cafin_cupy.errors import refuse
from cafin_cupy.factors import Factors, make_factors, owners
from cafin_cupy.layers import Layer

from .torch_flat import refuse_flat
from .torch_groups import Group, own_group
from .torch_layers import find_joined
from .torch_parallel import Team, check_team, team_of
from .torch_ranks import over_ranks
from .torch_scalars import checked_hyper
from .torch_shards import check_options, check_shards, local, named_parameters
from .torch_warnings import warn_without_factors
from .torch_zero import refuse_sharded

if TYPE_CHECKING:
    from .torch import AdaFisher

WHERE = "add_param_group"
PATH = "param_group['params']"


def join(optimizer: AdaFisher, param_group: Any, add: Callable[[dict[str, Any]], None]) -> None:
    """See `AdaFisher.add_param_group`; `add` is torch's."""
    refuse_flat(WHERE, optimizer)
    group = later_group(optimizer, param_group)
    checked_hyper(optimizer, WHERE, {**optimizer.defaults, **group})
    names = {id(p): name for name, p in named_parameters(optimizer.model)}
    found = find_joined(optimizer.model, optimizer._layers)
    team = team_of(optimizer.model)
    check_divided(optimizer, group, team, optimizer._modules if found is None else found[1])
    factors = None if found is None else extended(optimizer, found[0], group["params"])
    add(group)
    if found is not None:
        optimizer._detach()
        optimizer._team = team
        optimizer._layers, optimizer._modules, optimizer._kinds = found
        optimizer._kept_factors, optimizer._owners = factors, owners(optimizer._layers)
        optimizer._attach(waiting=True)
    lacking = [p for p in group["params"] if p.requires_grad and id(p) not in optimizer._owners]
    warn_without_factors(WHERE, [names.get(id(p), "what the model does not hold") for p in lacking])


def check_divided(optimizer: AdaFisher, group: Group, team: Team, modules: Iterable[Any]) -> None:
    """Refuse what the constructor would of parameters that ranks divide."""
    check_shards(WHERE, optimizer.model)
    check_team(WHERE, optimizer, team, modules)
    check_options(optimizer, WHERE, group["params"])
    if optimizer._shard_state:
        refuse_sharded(WHERE, group["params"])


def later_group(optimizer: AdaFisher, param_group: Any) -> Group:
    """The group, which may hold what is not of the model, but nothing twice."""
    made = own_group(WHERE, "param_group", param_group, optimizer.model)
    taken = {id(p) for other in optimizer.param_groups for p in other["params"]}
    for p in made["params"]:
        if id(p) in taken:
            got, mend = f"one of shape {tuple(p.shape)} that another group holds", "take it out there first"
            refuse(WHERE, PATH, "hold new parameters", got, mend)
        if not (p.is_leaf or p.retains_grad):
            refuse(WHERE, PATH, "hold parameters", "the result of an operation")
        if not p.is_floating_point() or p.is_meta:
            rule = "hold real floating-point tensors in memory"
            refuse(WHERE, PATH, rule, f"{p.dtype} on {p.device}", "convert it first")
    return made


def extended(optimizer: AdaFisher, layers: list[Layer], joining: Sequence[Tensor]) -> Factors | None:
    """Factors of `layers`, the first of which have some; None as long as nobody has needed any."""
    old = optimizer._kept_factors
    if old is None:
        return None
    if old.pending:
        mend = "call step() or zero_grad() first"
        refuse(WHERE, "model", "get layers between steps", "one between backward and step", mend)
    devices = optimizer._devices() | {torch_view(local(p), WHERE, "params").device for p in joining}
    factors = over_ranks(optimizer, make_factors(layers, optimizer.averaging, optimizer.backend, devices))
    for index in range(len(old.layers)):
        factors.load(index, old.H[index], old.S[index])
        factors.skipped[index][...] = old.skipped[index]
    factors.refreshed = old.refreshed
    return factors
