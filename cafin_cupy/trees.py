"""Nested lists, tuples and mappings of arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .errors import refuse

DEEPEST = 100  # levels; a list that holds itself has more


def structure(tree: Any) -> Any:
    """`tree` in lists and dicts of our own, with the same leaves: the caller may go on to change theirs."""
    if isinstance(tree, Mapping):
        return {key: structure(item) for key, item in tree.items()}
    return [structure(item) for item in tree] if isinstance(tree, (list, tuple)) else tree


def leaves(tree: Any, path: str, where: str = "leaves", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """(path, leaf) of nested lists, tuples and mappings, in order; anything else is a leaf.

    Raises:
        CafinValueError: they are nested too deeply.
    """
    if depth > DEEPEST:
        name = path.partition("[")[0]
        refuse(where, name, f"be nested at most {DEEPEST} deep", "more", "a list or dict must not hold itself")
    if isinstance(tree, Mapping):
        for key in tree:
            yield from leaves(tree[key], f"{path}[{key!r}]", where, depth + 1)
    elif isinstance(tree, (list, tuple)):
        for index, item in enumerate(tree):
            yield from leaves(item, f"{path}[{index}]", where, depth + 1)
    else:
        yield path, tree


def leaves_like(template: Any, tree: Any, where: str, path: str) -> Iterator[tuple[str, Any]]:
    """(path, part) for the parts of `tree` that stand where `template` has its leaves.

    Raises:
        CafinValueError: the structures differ.
    """
    if isinstance(template, Mapping):
        if not isinstance(tree, Mapping) or set(tree) != set(template):
            refuse(where, path, f"have the keys {sorted(map(str, template))}", _structure(tree))
        for key in template:
            yield from leaves_like(template[key], tree[key], where, f"{path}[{key!r}]")
    elif isinstance(template, (list, tuple)):
        if not isinstance(tree, (list, tuple)) or len(tree) != len(template):
            refuse(where, path, f"be a list of {len(template)}, one for each parameter", _structure(tree))
        for index, (part, item) in enumerate(zip(template, tree)):
            yield from leaves_like(part, item, where, f"{path}[{index}]")
    else:
        yield path, tree


def _structure(tree: Any) -> str:
    if isinstance(tree, Mapping):
        return f"a mapping with the keys {sorted(map(str, tree))}"
    if isinstance(tree, (list, tuple)):
        return f"a {type(tree).__name__} of {len(tree)}"
    return type(tree).__name__
