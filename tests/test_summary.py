"""`AdaFisher.summary`: rows against what the optimizer truly holds, and the printed table."""

from __future__ import annotations

import re

import pytest
from helpers import EXAMPLES, FRAMEWORKS, Case, Device, example_id, make

from cafin_cupy import AdaFisher, Linear, summary
from cafin_cupy.summary import Row, Summary

RULES = ["parity", "paper"]


def row(name: str, layer: str = "Linear", parameters: int = 6, **changed: object) -> Row:
    fields = {"shape": (2, 3), "H": 3, "S": 2, "momentum": 24, "factors": 20, "note": "", **changed}
    return Row(name=name, layer=layer, parameters=parameters, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", EXAMPLES, ids=example_id)
def test_bytes_are_those_of_the_arrays(device: Device, case: Case, rule: str) -> None:
    layer = case.layer(lambda shape: device.zeros(*shape))
    params = [array for array in (layer.weight, layer.bias) if array is not None]
    opt = AdaFisher(params, [layer], averaging=rule, backend=device.backend)
    factors = opt._factors
    held = {id(a): a.nbytes for a in (*factors.H, *factors.S, *factors.H_effective, *factors.S_effective)}
    seen = opt.summary()
    assert seen.factors == sum(held.values())
    assert seen.momentum == sum(m.nbytes for m in opt.momenta)
    assert seen.state == seen.factors + seen.momentum
    assert seen.parameters == sum(p.size for p in params)
    first, *rest = seen.rows
    assert (first.H, first.S, first.layer) == (layer.H_size, layer.S_size, type(layer).__name__)
    assert all((other.H, other.S, other.factors) == (first.H, first.S, 0) for other in rest)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rows_of_raw_arrays(framework: str) -> None:
    w, b, free = (make(framework, [[1.0] * n]) for n in (3, 1, 7))
    opt = AdaFisher({"w": w, "rest": [b.reshape(1), free]}, [Linear(w, name="fc")])
    seen = opt.summary()
    assert seen.rows == (
        Row("params['w']", (1, 3), "Linear fc", 3, 1, 3, 12, 16, ""),
        Row("params['rest'][0]", (1,), "", 0, 0, 1, 4, 0, "F = 1: no layer of `layers` holds it"),
        Row("params['rest'][1]", (1, 7), "", 0, 0, 7, 28, 0, "F = 1: no layer of `layers` holds it"),
    )
    assert seen.without_factors == seen.rows[1:]
    assert seen.title == f"AdaFisher on the {opt.backend} backend"


def test_a_layer_of_another_name_is_named() -> None:
    w = make("numpy", [[1.0, 2.0]])
    for name, kind in [("params", "Linear params"), ("w", "Linear w"), (None, "Linear")]:
        assert [r.layer for r in AdaFisher({"w": w}, [Linear(w, name=name)]).summary().rows] == [kind]


def test_the_table() -> None:
    rows = [row("0.weight"), row("0.bias", shape=(2,), parameters=2, momentum=8, factors=0)]
    rows.append(row("scale", "", shape=(), H=0, S=0, parameters=1, momentum=4, factors=0, note="F = 1: no layer"))
    assert str(Summary("Title", tuple(rows))).splitlines() == [
        "Title",
        "parameter      shape   layer   H  S  parameters   share  momentum  factors  note",
        "0.weight       2 x 3   Linear  3  2           6   66.7%      24 B     20 B",
        "0.bias         2       Linear  3  2           2   22.2%       8 B",
        "scale          scalar                         1   11.1%       4 B           F = 1: no layer",
        "total      x3                                 9  100.0%      36 B     20 B",
        "without factors: 1 of 3, 11.1% of the parameters",
    ]


def names(table: str) -> list[list[str]]:
    """Name and number of every line but title, head and total."""
    return [re.match(r"\S+(?: +x\d+)?(?= )", line)[0].split() for line in table.splitlines()[2:-1]]  # type: ignore[index]


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        ([row(f"blocks.{k}.fc.weight") for k in range(200)], [["blocks.0-199.fc.weight", "x200"]]),
        ([row("a.0.1.w"), row("a.0.2.w")], [["a.0.1-2.w", "x2"]]),  # a number that all share is kept
        ([row("conv1.w"), row("conv2.w")], [["conv1.w"], ["conv2.w"]]),  # a digit within a name is no number
        ([row("params[0]"), row("params[1]", note="frozen"), row("params[2]")], [["params[0,2]", "x2"], ["params[1]"]]),
        ([row("0.w"), row("1.w", shape=(3, 2)), row("2.w", H=9)], [["0.w"], ["1.w"], ["2.w"]]),
        ([row("0.w"), row("1.w", S=9)], [["0.w"], ["1.w"]]),
        ([row("params[0]", "Linear fc1"), row("params[1]", "Linear fc2")], [["params[0]"], ["params[1]"]]),
        ([row("w.0", "Linear a.0"), row("w.1", "Linear a.1")], [["w.0-1", "x2"]]),
        ([], []),
    ],
    ids=["blocks", "common", "digits", "notes", "sizes", "more sizes", "owners", "numbered owners", "none"],
)  # fmt: skip
def test_equal_parameters_share_a_line(rows: list[Row], lines: list[list[str]]) -> None:
    table = Summary("Title", tuple(rows))
    assert names(table.table()) == lines
    assert names(table.table(merge=False)) == [[r.name] for r in rows]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([7], "7"),
        ([1, 2], "1-2"),
        ([1, 3, 4, 5, 9], "1,3-5,9"),
        ([0, 2, 4, 6], "0,2,4,6"),
        ([0, 2, 4, 6, 7], "0,2,4,6-7"),
    ],
)
def test_numbers_are_listed_by_runs(numbers: list[int], text: str) -> None:
    assert summary._listed(numbers) == text
    assert summary._listed(range(0, 100, 3)) == "0,3,..,99"


def test_a_shared_line_adds_up() -> None:
    (line,) = Summary("Title", tuple(row(f"blocks.{k}.w") for k in range(3))).table().splitlines()[2:-1]
    assert line.split() == ["blocks.0-2.w", "x3", *"2x3", "Linear", "3", "2", "18", "100.0%", "72", "B", "60", "B"]
