"""Parameter groups: how scripts ask for them, by parameters or their names, and what they may be called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from cafin_cupy.errors import CafinTypeError, refuse, shown
from cafin_cupy.rule import flag

# Arguments of other optimizers that mean something else here, and what to do about each.
ELSEWHERE = {
    "betas": "pass beta=betas[0]; AdaFisher keeps no second moment, its curvature has the decay gamma",
    "momentum": "it is called beta",
    "dampening": "leave it out; the momentum is damped by 1 - beta",
    "eps": "leave it out; the damping is called Lambda",
    "amsgrad": "leave it out; there is no second moment",
    "nesterov": "leave it out; there is no such momentum",
    "decoupled_weight_decay": "use AdaFisherW",
}


class Group(dict[str, Any]):
    """A parameter group, or the defaults of all, in which "momentum" is another name of "beta".

    `OneCycleLR` and `CyclicLR` look for "momentum", read it and set it. Only "beta" is stored, so only that is listed,
    copied and saved.
    """

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__()
        self.update(*given, **more)

    def __missing__(self, key: str) -> Any:
        if key == "momentum":
            return self["beta"]
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return super().__contains__("beta" if key == "momentum" else key)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__("beta" if key == "momentum" else key, value)

    def get(self, key: str, default: Any = None) -> Any:
        return super().get("beta" if key == "momentum" else key, default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        return super().setdefault("beta" if key == "momentum" else key, default)

    def update(self, *given: Any, **more: Any) -> None:  # type: ignore[override]
        for key, value in dict(*given, **more).items():
            self[key] = value


SCALARS = ("lr", "beta", "Lambda", "weight_decay")  # of a group
SWITCHES = ("foreach", "fused", "differentiable")
# Options of the optimizer that a group cannot have on its own.
OF_ALL = (
    *("TCov", "gamma", "averaging", "dist", "backend", "capturable", "grad_scaler", "error_if_nonfinite"),
    *("momentum_dtype", "master_weights", "stochastic_rounding", "seed", "check_every", "gradient_divide_factor"),
)


def check_arguments(where: str, switches: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Refuse what other optimizers take and this one would have to ignore.

    `switches` are `foreach`, `fused` and `differentiable`.
    """
    for name, value in switches.items():
        check_switch(where, name, value)
    for name, value in others.items():
        rule, mend = "not be given, as there is no such argument", ELSEWHERE.get(name, "leave it out")
        refuse(where, name, rule, shown(value), mend, CafinTypeError)


def check_switch(where: str, name: str, value: Any) -> None:
    """Refuse a switch that is neither on nor off, and the one that cannot be on."""
    if value is not None and flag(where, name, value) and "differentiable" in name:
        refuse(where, name, "be False", value, "steps are made in place, and not differentiated")


def check_groups(where: str, groups: Any) -> None:
    """Refuse `optimizer.param_groups` that a script has made unusable."""
    if not isinstance(groups, (list, tuple)):
        rule, got = "stay a list of groups", type(groups).__name__
        refuse(where, "param_groups", rule, got, "change its groups, not the list", CafinTypeError)
    for number, group in enumerate(groups):
        path = f"param_groups[{number}]"
        if not isinstance(group, Mapping):
            refuse(where, path, "be a dict", type(group).__name__, "use add_param_group", CafinTypeError)
        for key in ("params", *SCALARS, "maximize"):
            if key not in group:
                mend = "use add_param_group, which takes what is missing from the optimizer's arguments"
                refuse(where, path, f"have the key {key!r}", sorted(map(str, group)), mend)
        params = group["params"]
        if not isinstance(params, (list, tuple)) or not all(isinstance(p, Tensor) for p in params):
            got, mend = shown(params), "names and patterns are for add_param_group"
            refuse(where, f"{path}['params']", "be a list of tensors", got, mend, CafinTypeError)


def own_group(where: str, name: str, group: Any, model: nn.Module) -> Group:
    """A script's parameter group, with parameters in the place of names; the script's own dict is not changed.

    Its "params" are a parameter, a name, or several of them. A name stands for the parameter of the model that is
    called so, or, as a pattern with `*`, `?` and `[...]`, for all whose names match.
    """
    if not isinstance(group, Mapping):
        refuse(where, name, "be a dict", type(group).__name__, kind=CafinTypeError)
    if "params" not in group:
        refuse(where, name, "have the key 'params'", sorted(map(str, group)))
    for key, value in group.items():  # what would be kept there, and have no effect
        mend = ELSEWHERE.get(key, "it is one for all groups: pass it to the optimizer" if key in OF_ALL else "")
        mend = "leave it out; the model knows the names" if key == "param_names" else mend
        if mend and key != "momentum":
            refuse(where, f"{name}[{key!r}]", "not be given", shown(value), mend, CafinTypeError)
        if key in SWITCHES:
            check_switch(where, f"{name}[{key!r}]", value)
    path, params = f"{name}['params']", group["params"]
    if isinstance(params, (set, frozenset)):
        refuse(where, path, "have an order", "a set", "pass a list", CafinTypeError)
    if not isinstance(params, (Tensor, str)) and not isinstance(params, Iterable):
        refuse(where, path, "be parameters or names of them", type(params).__name__, kind=CafinTypeError)
    found: list[Tensor] = []
    for item in [params] if isinstance(params, (Tensor, str)) else params:
        if isinstance(item, tuple) and len(item) == 2:  # (name, parameter), as named_parameters() has it
            item = item[1]
        if isinstance(item, str):
            found += named(where, path, item, model)
        elif isinstance(item, Tensor):
            found.append(item)
        else:
            rule = "hold parameters or names of them"
            refuse(where, path, rule, type(item).__name__, kind=CafinTypeError)
    once = list({id(p): p for p in found}.values())  # two patterns may match one parameter
    return Group({**group, "params": once})


def named(where: str, path: str, pattern: str, model: nn.Module) -> list[Tensor]:
    """The parameters of that name, or whose names match the pattern."""
    every = list(model.named_parameters(remove_duplicate=False))  # a tied one has several names
    found: list[Tensor] = [p for name, p in every if name == pattern]
    found = found or [p for name, p in every if fnmatchcase(name, pattern)]
    if not found:
        names = [name for name, _ in every]
        some = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
        refuse(where, path, "name parameters of the model", shown(pattern), f"they are called {some}")
    return found


def groups_of(where: str, model: nn.Module, groups: Sequence[Any] | None) -> list[Group]:
    """The groups that a script asks for; a last one holds all parameters of the model that they leave out."""
    names = {id(p): name for name, p in model.named_parameters()}
    if groups is None:
        return [Group(params=list(model.parameters()))]
    if isinstance(groups, (Mapping, str, Tensor)) or not isinstance(groups, Iterable):
        refuse(where, "param_groups", "be a list of dicts", type(groups).__name__, kind=CafinTypeError)
    made = [own_group(where, f"param_groups[{number}]", group, model) for number, group in enumerate(groups)]
    places: dict[int, int] = {}
    for number, group in enumerate(made):
        path = f"param_groups[{number}]['params']"
        if not group["params"]:
            refuse(where, path, "hold a parameter", "none", "leave the group out")
        for p in group["params"]:
            if id(p) not in names:
                mend = "add what the model does not hold by add_param_group"
                refuse(where, path, "hold parameters of the model", f"another, of shape {tuple(p.shape)}", mend)
            if places.setdefault(id(p), number) != number:
                rule, got = "hold parameters of no other group", f"`{names[id(p)]}`, as param_groups[{places[id(p)]}]"
                refuse(where, path, rule, got, "let patterns exclude each other")
    rest = [p for p in model.parameters() if id(p) not in places]
    return [*made, Group(params=rest)] if rest else made


def unwrapped_prefix(model: nn.Module) -> str:
    """What `DistributedDataParallel`, `DataParallel` and `torch.compile` put before each name."""
    prefix = ""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            prefix, model = f"{prefix}module.", model.module
        elif isinstance(inner := model._modules.get("_orig_mod"), nn.Module):
            prefix, model = f"{prefix}_orig_mod.", inner
        else:
            return prefix
