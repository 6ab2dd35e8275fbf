"""Loading the state dicts of `AdaFisher` on raw arrays: the checks before anything is taken over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from array_api_compat import array_namespace

from .arrays import beside, place, view
from .errors import CafinTypeError, refuse
from .precision import checked_seed
from .rounding import widened
from .rule import whole
from .update import FLOATS

if TYPE_CHECKING:
    from .optimizer import AdaFisher

WHERE = "load_state_dict"
MEND = "it must come from AdaFisher's state_dict()"
KEYS = ("steps", "momenta", "H", "S")


def take_over(optimizer: AdaFisher, state: Any) -> None:
    """See `AdaFisher.load_state_dict`."""
    if not isinstance(state, Mapping):
        refuse(WHERE, "state", "be a mapping", type(state).__name__, MEND, CafinTypeError)
    for key in KEYS:
        if key not in state:
            refuse(WHERE, "state", f"have the key {key!r}", sorted(map(str, state)), MEND)
    precision, home = optimizer._precision, optimizer._p[0].device
    if "masters" in state and not precision.masters:
        refuse(WHERE, "state['masters']", "be left out", "some", "use AdaFisher(..., master_weights=True)")
    steps = whole(WHERE, "state['steps']", state["steps"], 0)
    mine, arrays = optimizer.state_dict(), optimizer._arrays
    copies = {key: _fitting(key, state[key], mine[key], home) for key in KEYS[1:]}
    masters = state.get("masters", [w if w is None else widened(p) for w, p in zip(optimizer.masters, arrays)])
    copies["masters"] = _fitting("masters", masters, optimizer.masters, home)
    seed = checked_seed(WHERE, "state['seed']", state.get("seed", optimizer._seed))
    optimizer._precision, optimizer._seed = precision.seeded(seed), seed
    for key, targets in (("momenta", optimizer.momenta), ("masters", optimizer.masters)):
        for target, given in zip(targets, copies[key]):
            if target is not None:
                target[...] = given
    for index, pair in enumerate(zip(copies["H"], copies["S"])):
        optimizer._factors.load(index, *pair)
    optimizer._factors.count_from(None)
    optimizer._factors.discard()
    optimizer._count(steps)


def _fitting(key: str, given: Any, targets: Sequence[Any], home: int | str) -> list[Any]:
    """`given` as arrays of the kind of `targets`, None where these are, or a `CafinError`."""
    if not isinstance(given, (list, tuple)):
        rule = f"be a list of {len(targets)} arrays"
        refuse(WHERE, f"state[{key!r}]", rule, type(given).__name__, kind=CafinTypeError)
    fitting: list[Any] = []
    for index, (array, target) in enumerate(zip(given, targets)):
        name = f"state[{key!r}][{index}]"
        if target is None and array is not None:
            refuse(WHERE, name, "be None, as its parameter has no master", type(array).__name__)
        fitting.append(None if target is None else _like(name, array, target, home))
        if key in ("H", "S") and not _can_be_factor(fitting[-1]):
            refuse(WHERE, name, "hold finite numbers >= 0", "others", "the run that saved it had diverged")
    if len(given) != len(targets):
        refuse(WHERE, f"state[{key!r}]", f"hold {len(targets)} arrays", len(given))
    return fitting


def _like(name: str, array: Any, target: Any, home: int | str) -> Any:
    v = view(array, WHERE, name)
    if v.shape != tuple(target.shape) or v.device != home:
        rule = f"have shape {tuple(target.shape)} on {place(home)}"
        refuse(WHERE, name, rule, f"{v.shape} on {place(v.device)}")
    if v.dtype not in FLOATS:
        refuse(WHERE, name, f"be one of {', '.join(FLOATS)}", v.dtype, kind=CafinTypeError)
    return beside(array, target, WHERE, name)


def _can_be_factor(x: Any) -> bool:
    xp = array_namespace(x)
    return bool(xp.all(xp.isfinite(x) & (x >= 0)))
