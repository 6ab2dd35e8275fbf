"""State dicts with one entry removed or replaced, at any depth: what a truncated or foreign file may hold."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

Path = tuple[Any, ...]  # keys and indices, from the outside in
REMOVED = object()


def paths(tree: Any, path: Path = ()) -> list[Path]:
    """The way to every entry, the tree itself included."""
    found = [path]
    if isinstance(tree, Mapping):
        for key in tree:
            found += paths(tree[key], (*path, key))
    elif isinstance(tree, (list, tuple)):
        for index, item in enumerate(tree):
            found += paths(item, (*path, index))
    return found


def value_at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def altered(tree: Any, path: Path, value: Any) -> Any:
    """A copy with another value in one place; what lies beside the way is shared. `REMOVED` takes the entry out."""
    if not path:
        return None if value is REMOVED else value
    key, *rest = path
    copy = dict(tree) if isinstance(tree, Mapping) else list(tree)
    if not rest and value is REMOVED:
        del copy[key]
    else:
        copy[key] = altered(tree[key], tuple(rest), value)
    return copy


def named(message: str) -> str:
    """The argument that a refusal names."""
    match = re.match(r"load_state_dict: `(.+?)` must ", message)
    assert match, message
    return match[1]


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


# What takes an entry's place: by the old value, so that it may be nearly right.
PLAIN: dict[str, Callable[[Any], Any]] = {
    "removed": lambda old: REMOVED,
    **{
        repr(value)[:20]: lambda old, value=value: value  # type: ignore[misc]
        for value in (None, True, False, -1, 0, 7, 2**70, 10**400, 0.5, -0.0, 1e308, math.nan, -math.inf, 1j)
    },
    **{repr(value): lambda old, value=value: value for value in ("", "x", b"x", [], {}, (), {0: 1}, ["x"])},  # type: ignore[misc]
    "an object": lambda old: object(),
    "a list of it": lambda old: [old],
    "a mapping to it": lambda old: {0: old},
    "as text": lambda old: str(old)[:20],
    "the next number": lambda old: old + 1 if is_number(old) else old,
    "as a float": lambda old: float(old) if is_number(old) else old,
    "reversed": lambda old: list(reversed(old)) if isinstance(old, (list, tuple)) else old,
    "twice": lambda old: [*old, *old] if isinstance(old, (list, tuple)) else old,
    "its values": lambda old: list(old.values()) if isinstance(old, Mapping) else old,
    "in another order": lambda old: dict(reversed(list(old.items()))) if isinstance(old, Mapping) else old,
}
# Functions of NumPy's API, which CuPy and, by array_api_compat, PyTorch have as well.
ARRAYS: dict[str, Callable[[Any, Any], Any]] = {
    "shorter": lambda xp, x: x[:-1],
    "empty": lambda xp, x: x[:0],
    "in one more axis": lambda xp, x: x[None],
    "flat": lambda xp, x: xp.reshape(x, (-1,)),
    "negative": lambda xp, x: -x - 1,
    "not a number": lambda xp, x: x * math.nan,
    "infinite": lambda xp, x: x + math.inf,
    "in float64": lambda xp, x: xp.astype(x, xp.float64),
    "as integers": lambda xp, x: xp.astype(x, xp.int32),
    "as truth values": lambda xp, x: xp.astype(x, xp.bool),
    "complex": lambda xp, x: xp.astype(x, xp.complex64),
    "of one number": lambda xp, x: xp.sum(x),
    "reversed in memory": lambda xp, x: xp.flip(x),
}
