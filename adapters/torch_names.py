"""State dicts by name: what is written beside the order of parameters and layers, and how it is found again.

torch's optimizers number parameters in the order of their groups, and the public AdaFisher numbers layers in the order
of modules. A state dict of ours holds names as well: torch's own `param_names` in every group, and in the first one the
factors by layer and the number of steps, which thereby also pass through `torch.distributed.checkpoint`'s
`get_optimizer_state_dict`: it keeps nothing but `state` and `param_groups`, and puts names in the place of numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cafin_cupy.errors import CafinTypeError, refuse, shown

from .torch_flat import flat_names
from .torch_groups import unwrapped_prefix
from .torch_shards import LAID, is_laid_flat, named_parameters

if TYPE_CHECKING:
    from .torch import AdaFisher

NAMES = "param_names"  # torch's key
COUNTED = ("steps", "seed")
WRITTEN = (NAMES, "factors", *COUNTED)  # what groups hold in a state dict only
BY_ORDER = f"remove {NAMES!r} from the groups to load by order"


def own_names(optimizer: AdaFisher) -> list[list[str]]:
    """The names of each group's parameters, as they are without wrappers; numbers for what the model does not hold, and
    for flat copies what they hold of it."""
    if is_laid_flat(optimizer):
        return [flat_names(optimizer, group["params"]) for group in optimizer.param_groups]
    prefix = unwrapped_prefix(optimizer.model)
    names = {id(p): plain(name, prefix) for name, p in named_parameters(optimizer.model)}
    every = (p for group in optimizer.param_groups for p in group["params"])
    foreign = {id(p): f"<{number}>" for number, p in enumerate(p for p in every if id(p) not in names)}
    names.update(foreign)
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def plain(name: str, prefix: str) -> str:
    """A name without what `torch.compile` and `DistributedDataParallel` have put into it."""
    return name.removeprefix(prefix).replace("_orig_mod.", "")


def layer_names(optimizer: AdaFisher) -> list[str]:
    """In the order of `H_D` and `S_D`."""
    prefix = unwrapped_prefix(optimizer.model)
    return [plain(name, prefix).removesuffix("_orig_mod") for name, *_ in optimizer._modules]


def with_names(optimizer: AdaFisher, state: dict[str, Any]) -> None:
    """Write names into a state dict that has `H_D`, `S_D` and `steps`."""
    for group, names in zip(state["param_groups"], own_names(optimizer)):
        group[NAMES] = names
    pairs = zip(layer_names(optimizer), state["H_D"], state["S_D"])
    first = state["param_groups"][0]
    first.update(factors={name: {"H": H, "S": S} for name, H, S in pairs})
    first.update({key: state[key] for key in COUNTED if key in state})


def without_names(groups: Any) -> Any:
    """The groups of a state dict as the optimizer keeps them."""
    return [{key: value for key, value in group.items() if key not in WRITTEN} for group in groups]


def in_own_order(where: str, optimizer: AdaFisher, given: Any) -> Any:
    """A state dict whose parameters and layers are in the optimizer's order, by their names if it has them; as it is if
    not. `given` is not changed.

    Raises:
        CafinError: its names are not those of the optimizer's parameters.
    """
    groups = given.get("param_groups") if isinstance(given, Mapping) else None
    if not isinstance(groups, (list, tuple)) or not groups or not all(isinstance(group, Mapping) for group in groups):
        return given  # it will be refused
    given = {**given}
    first = groups[0]
    for key in COUNTED:
        if key not in given and key in first:
            given[key] = first[key]
    _order_layers(where, layer_names(optimizer), given, first.get("factors"))
    mine = own_names(optimizer)
    theirs = _names_in(where, groups, mine)
    if theirs is not None and theirs != mine and is_laid_flat(optimizer):
        rule, mend = f"be those of this rank's {LAID}, {mine}", "load what this rank has saved, on as many ranks"
        refuse(where, "param_groups", rule, theirs, mend)
    if theirs is None or len(groups) != len(mine):
        return given
    keys = [key for group in groups for key in group["params"]]  # numbers, or names as well
    if theirs == mine and all(type(key) is int for key in keys):
        return given
    places = dict(zip((name for names in theirs for name in names), keys))
    if _strangers(where, {name for names in mine for name in names}, places):
        return given
    numbers = iter(range(len(keys)))
    ordered = [[(next(numbers), places[name]) for name in names] for names in mine]
    given["param_groups"] = [
        {**group, "params": [number for number, _ in pairs]}
        for group, pairs in zip(_matched(groups, theirs, mine), ordered)
    ]
    state = given.get("state")
    if isinstance(state, Mapping):
        own = dict(zip(numbers_of(ordered), (p for group in optimizer.param_groups for p in group["params"])))
        given["state"] = _renumbered(state, ordered, own)
    return given


def numbers_of(ordered: Sequence[Sequence[tuple[int, Any]]]) -> list[int]:
    return [number for pairs in ordered for number, _ in pairs]


def _matched(groups: Sequence[Any], theirs: Sequence[Sequence[str]], mine: Sequence[Sequence[str]]) -> Sequence[Any]:
    """The group that holds the same parameters, for each of ours; in their order, if they are divided otherwise."""
    places = {frozenset(names): place for place, names in enumerate(theirs)}
    try:
        return [groups[places[frozenset(names)]] for names in mine]
    except KeyError:
        return groups


def _renumbered(state: Mapping[Any, Any], ordered: Sequence[Any], own: Mapping[int, Tensor]) -> dict[Any, Any]:
    """The entries under the optimizer's numbers; what belongs to no parameter stays as it is, and will be refused."""
    keys = {key: number for pairs in ordered for number, key in pairs}
    found = {number: state[key] for key, number in keys.items() if key in state}
    for number, p in own.items():
        if not p.requires_grad:  # torch.distributed.checkpoint leaves them out
            found.setdefault(number, {})
    return {**found, **{f"{key}": entry for key, entry in state.items() if key not in keys}}


def _names_in(where: str, groups: Sequence[Mapping[str, Any]], mine: Sequence[Sequence[str]]) -> list[list[str]] | None:
    """The names of each group's parameters; None if there are none, or what they would name will be refused."""
    params = [group.get("params") for group in groups]
    if not all(isinstance(each, (list, tuple)) for each in params):
        return None
    kinds = {type(key) for each in params for key in each or ()}
    if kinds == {str}:
        return [list(each or ()) for each in params]
    names = [group.get(NAMES) for group in groups]
    if kinds != {int} or all(each is None for each in names):
        return None
    for number, (each, wanted, own) in enumerate(zip(names, params, mine)):
        path = f"param_groups[{number}]['{NAMES}']"
        if not isinstance(each, (list, tuple)) or not all(type(name) is str for name in each):
            refuse(where, path, "be a list of names", shown(each), BY_ORDER, CafinTypeError)
        if len(each) != len(wanted or ()):
            if len(wanted or ()) != len(own):
                return None
            refuse(where, path, f"hold {len(own)} names, one for each parameter", len(each), BY_ORDER)
    return [list(each) for each in names]  # type: ignore[arg-type]


def _strangers(where: str, mine: set[str], theirs: Mapping[str, Any]) -> bool:
    """True if no name is common, as in a model within another: there the order counts. Some that differ are refused."""
    if not mine & theirs.keys() and all(type(key) is int for key in theirs.values()):
        return True
    lost, strange = sorted(mine - theirs.keys()), sorted(theirs.keys() - mine)
    if lost or strange:
        got = f"none called {lost[0]!r}" if lost else f"one called {strange[0]!r}"
        refuse(where, "param_groups", "name the model's parameters", got, BY_ORDER)
    return False


def _order_layers(where: str, mine: list[str], given: dict[str, Any], factors: Any) -> None:
    """Bring `H_D` and `S_D` into the order of the layers `mine`; make them of `factors` if they are not there."""
    if not isinstance(factors, Mapping):
        return
    if "H_D" not in given and "S_D" not in given:
        for name in mine:
            if not isinstance(factors.get(name), Mapping) or not {"H", "S"} <= factors[name].keys():
                refuse(where, "param_groups[0]['factors']", f"hold H and S of layer `{name}`", sorted(factors))
        given["H_D"], given["S_D"] = ([factors[name][letter] for name in mine] for letter in "HS")
        return
    theirs = list(factors)
    if theirs == mine or sorted(theirs) != sorted(mine):
        return
    places = [theirs.index(name) for name in mine]
    for key in ("H_D", "S_D"):
        listed = given.get(key)
        if isinstance(listed, (list, tuple)) and len(listed) == len(mine):
            given[key] = [listed[place] for place in places]
