"""The random calls of `fuzz` find what they are there for: faults planted in the library, one of each kind, beside the
same calls without it."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RULE_MARKER

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS))

pytest.importorskip("torch")

from emulation.compiler import compiler  # noqa: E402
from fuzz import functions  # noqa: E402
from fuzz.__main__ import Process, Target  # noqa: E402
from fuzz.calls import Machine, figures  # noqa: E402
from fuzz.worker import machines, play  # noqa: E402

from cafin_cupy import (  # noqa: E402
    AdaFisher,
    CafinError,
    CafinValueError,
    Embedding,
    NonFiniteError,
    layers,
    reference,
)
from cafin_cupy.adapters import torch as adapter  # noqa: E402
from cafin_cupy.adapters import (  # noqa: E402
    torch_groups,
    torch_joining,
    torch_precision,
    torch_state,
)
from cafin_cupy.adapters.torch_attention import _Part  # noqa: E402
from cafin_cupy.adapters.torch_plan import Plan  # noqa: E402
from cafin_cupy.arrays import known  # noqa: E402
from cafin_cupy.factors import ReferenceFactors  # noqa: E402
from cafin_cupy.layers.convolution import ConvTranspose  # noqa: E402
from cafin_cupy.precision import Precision  # noqa: E402
from cafin_cupy.trees import leaves  # noqa: E402

Call = Callable[..., Any]
MACHINES = {m.__name__: m for target in ("numpy", "adapter") for m in machines(target)}
SEQUENCES = 200  # at most, until a fault is found: some seconds
SEEDS = ("planted", "planted once more", "planted a third time")  # a change of a machine changes its calls


def playing(machine: type[Machine], *names: str) -> type[Machine]:
    """The machine, which draws no other rules than these: a fault that only they can meet is found soon."""
    rules = {name for name in dir(machine) if hasattr(getattr(machine, name), RULE_MARKER)}
    assert rules >= set(names)
    return type(machine.__name__, (machine,), dict.fromkeys(rules - set(names)))


def arrays(tree: Any) -> Iterator[Any]:
    """Those in the argument of a call, which need not be all good."""
    for name, leaf in leaves(tree, "x"):
        with suppress(CafinError):
            yield known(leaf, "planted", name)


# ---- Faults of `fused_step`: the function goes in, one with the fault comes out ----


def raises_another_error(call: Call) -> Call:
    def planted(*trees: Any, **options: Any) -> None:
        if options["beta"] == 0.5:
            raise KeyError("beta")
        call(*trees, **options)

    return planted


def does_nothing(call: Call) -> Call:
    def planted(params: Any, *trees: Any, **options: Any) -> None:
        if not isinstance(params, dict):
            call(params, *trees, **options)

    return planted


def is_inexact(call: Call) -> Call:
    def planted(params: Any, *trees: Any, **options: Any) -> None:
        call(params, *trees, **options)
        for p in arrays(params):
            p *= 1 + 1e-3

    return planted


def changes_an_argument(call: Call) -> Call:
    def planted(params: Any, grads: Any, *trees: Any, **options: Any) -> None:
        call(params, grads, *trees, **options)
        for g in arrays(grads):
            if getattr(getattr(g, "flags", None), "writeable", False):
                g *= -1

    return planted


def changes_a_list(call: Call) -> Call:
    def planted(params: Any, grads: Any, *trees: Any, **options: Any) -> None:
        call(params, grads, *trees, **options)
        if isinstance(grads, list):
            grads.clear()

    return planted


def writes_beside(call: Call) -> Call:
    def planted(params: Any, *trees: Any, **options: Any) -> None:
        call(params, *trees, **options)
        for p in arrays(params):
            if isinstance(p.base, np.ndarray):
                p.base.reshape(-1)[-1] = 0.0

    return planted


def leaves_a_trace_of_a_refused_call(call: Call) -> Call:
    def planted(params: Any, grads: Any, momenta: Any, *trees: Any, **options: Any) -> None:
        try:
            call(params, grads, momenta, *trees, **options)
        except CafinError:
            for m in arrays(momenta):
                m += 1
            raise

    return planted


def refuses_a_good_call(call: Call) -> Call:
    def planted(*trees: Any, **options: Any) -> None:
        if type(options["lr"]) is np.float32:
            raise CafinValueError("no NumPy here")
        call(*trees, **options)

    return planted


def takes_a_bad_call(call: Call) -> Call:
    def planted(*trees: Any, **options: Any) -> None:
        with suppress(CafinError):
            call(*trees, **options)

    return planted


def raises_the_wrong_kind(call: Call) -> Call:
    def planted(*trees: Any, **options: Any) -> None:
        try:
            call(*trees, **options)
        except NonFiniteError as error:
            raise CafinValueError(str(error)) from error

    return planted


FUSED_STEP: list[tuple[Callable[[Call], Call], type[Exception], str]] = [
    (raises_another_error, KeyError, "beta"),
    (does_nothing, AssertionError, "must be .* within"),
    (is_inexact, AssertionError, "must be .* within"),
    (changes_an_argument, AssertionError, "has changed what it may only read"),
    (changes_a_list, AssertionError, "has changed what it may only read"),
    (writes_beside, AssertionError, "has written beside an array"),
    (leaves_a_trace_of_a_refused_call, AssertionError, "was refused and has changed"),
    (refuses_a_good_call, AssertionError, "must not be refused: .*no NumPy here"),
    (takes_a_bad_call, AssertionError, "must be refused"),
    (raises_the_wrong_kind, AssertionError, r"raises CafinValueError\("),
]


@pytest.mark.parametrize("fault", FUSED_STEP, ids=lambda fault: fault[0].__name__)
def test_faults_of_a_function(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, kind, words = fault
    monkeypatch.setattr(functions, "fused_step", plant(functions.fused_step))
    with pytest.raises(kind, match=words):
        play(MACHINES["Functions"], "planted", SEQUENCES, shrink=False)


# ---- Faults of methods: (machine, class, its method, the method with the fault, what is said, the rules it takes) ----


def _spoiling(change: Callable[[Any], None], kind: type[Exception]) -> Callable[[Call], Call]:
    """The method, which changes something after an error of a kind."""

    def plant(method: Call) -> Call:
        def planted(self: Any, *arguments: Any, **options: Any) -> Any:
            try:
                return method(self, *arguments, **options)
            except kind:
                change(self)
                raise

        return planted

    return plant


def _count_a_step(optimizer: Any) -> None:
    optimizer.steps += 1


def _empty_state(optimizer: Any) -> None:
    optimizer.state[optimizer.param_groups[0]["params"][0]]  # a defaultdict makes an entry


def _nothing(method: Call) -> Call:
    return lambda *arguments, **options: None


def _without_scale(method: Call) -> Call:
    return lambda self, grad_scale=1.0: method(self)


def _last_left_out(method: Call) -> Call:
    return lambda self: [*method(self)[:-1], None]


def _one_row_more(method: Call) -> Call:
    return lambda *arguments: (sums := method(*arguments))._replace(n=sums.n + 1)


def _sums_kept(method: Call) -> Call:
    return lambda self, set_to_none=True: super(adapter.AdaFisher, self).zero_grad(set_to_none)


def _padding_read(method: Call) -> Call:
    return lambda self, h, s: method(replace(self, padding_idx=None), h, s)


def _of_inputs(method: Call) -> Call:
    return lambda self, count: (1.0 / count, 1.0 / count)


def _master_alone(method: Call) -> Call:
    def planted(p: Any, g: Any, m: Any, H: Any, S: Any, hyper: Any, step: int, master: Any = None, *more: Any) -> Any:
        return method(
            p if master is None else reference.rounded(master, p.dtype), g, m, H, S, hyper, step, master, *more
        )

    return planted


def _usual_momentum(method: Call) -> Call:
    return lambda p, precision, *names: method(p, Precision(), *names)


def _same_seed(method: Call) -> Call:
    return lambda self, seed: self


def _first_match(method: Call) -> Call:
    return lambda *arguments: method(*arguments)[:1]


def _from_ones(method: Call) -> Call:
    def planted(*arguments: Any) -> Any:
        factors = method(*arguments)
        if factors is not None:
            factors.restart(0)
        return factors

    return planted


def _halved(method: Call) -> Call:
    def planted(optimizer: Any, given: Any) -> None:
        method(optimizer, given)
        for entry in optimizer.state.values():
            entry["exp_avg"] = entry["exp_avg"] / 2

    return planted


def _by_order(method: Call) -> Call:
    return lambda where, optimizer, given: given


TRAINED = ("backward", "step")
METHODS: dict[str, tuple[str, Any, str, Callable[[Call], Call], str, tuple[str, ...]]] = {
    "a refused state counts": (
        *("Optimizer", AdaFisher, "load_state_dict", _spoiling(_count_a_step, CafinError)),
        "was refused and has changed",
        ("save", "load"),
    ),
    "accumulate does nothing": ("Optimizer", AdaFisher, "accumulate", _nothing, "must be", ("accumulate", "step")),
    "no scale for factors": (
        "Optimizer",
        ReferenceFactors,
        "ready",
        _without_scale,
        "must be .* within",
        ("accumulate", "step"),
    ),
    "a row too many": ("Values", reference, "raw_sums", _one_row_more, "raw .* must be .* within", ("moments",)),
    "padding is counted": ("Values", Embedding, "read", _padding_read, "raw .* must be", ("moments",)),
    "taps are not divided by": ("Values", ConvTranspose, "mean", _of_inputs, "raw S.* must be .* within", ("moments",)),
    "a seed is not loaded": ("Optimizer", Precision, "seeded", _same_seed, "", ("resume", "step")),
    "what is written beside a master is lost": (
        "Optimizer",
        reference,
        "_advanced",
        _master_alone,
        "",
        ("start_again", "step"),
    ),
    "PyTorch: part of an attention is unseen": ("TorchOptimizer", _Part, "receive", _nothing, "", TRAINED),
    "PyTorch: momentum_dtype is forgotten": (
        "TorchOptimizer",
        torch_precision,
        "new_momentum",
        _usual_momentum,
        "",
        TRAINED,
    ),
    "PyTorch: a pattern finds one name": ("TorchOptimizer", torch_groups, "named", _first_match, "", TRAINED),
    "PyTorch: a layer that joins resets another": (
        "TorchOptimizer",
        torch_joining,
        "extended",
        _from_ones,
        "",
        ("join", *TRAINED),
    ),
    "PyTorch: half of Adam's momentum is taken": (
        "TorchOptimizer",
        adapter,
        "take_momentum",
        _halved,
        "",
        ("load_momentum", *TRAINED),
    ),
    "PyTorch: names in a state dict are not read": (
        "TorchOptimizer",
        torch_state,
        "in_own_order",
        _by_order,
        "",
        ("save", "load", *TRAINED),
    ),
    "PyTorch: a parameter is left out": (
        "TorchOptimizer",
        Plan,
        "gradients",
        _last_left_out,
        "must be|assert",
        TRAINED,
    ),
    "PyTorch: a refused step makes state": (
        *("TorchOptimizer", adapter.AdaFisher, "step", _spoiling(_empty_state, CafinError)),
        "has changed",
        ("spoil_a_scalar", *TRAINED),
    ),
    "PyTorch: zero_grad keeps sums": (
        "TorchOptimizer",
        adapter.AdaFisher,
        "zero_grad",
        _sums_kept,
        "",
        ("zero_grad", *TRAINED),
    ),
    "PyTorch: a scale is left behind": (
        "TorchOptimizer",
        adapter,
        "forget_scale",
        _nothing,
        "has changed",
        ("scaled_step",),
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_faults_of_a_method(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, owner, method, plant, words, rules = METHODS[name]
    monkeypatch.setattr(owner, method, plant(getattr(owner, method)))
    with pytest.raises(AssertionError, match=words or None):
        for seed in SEEDS:
            play(playing(MACHINES[machine], *rules), seed, SEQUENCES, shrink=False)


LAYERS = [
    kind
    for kind in vars(layers).values()
    if isinstance(kind, type) and issubclass(kind, layers.Layer) and kind not in (layers.Layer, layers.SummedLinear)
]


@pytest.mark.parametrize("kind", LAYERS)
def test_a_fault_of_each_layer(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = playing(MACHINES["Values"], "moments")
    mean = kind.mean
    monkeypatch.setattr(kind, "mean", lambda self, count: tuple(2.0 * x for x in mean(self, count)))
    with pytest.raises(AssertionError, match=r"raw .* must be .* within"):
        for seed in SEEDS:
            play(machine, seed, SEQUENCES, shrink=False)


def test_the_same_calls_whatever_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """hypothesis would draw numbers that it reads in the sources of loaded modules."""
    drawn: list[list[str]] = []

    def draw() -> None:
        @hypothesis.seed(0)
        @hypothesis.settings(max_examples=200, database=None)
        @hypothesis.given(st.integers(), st.floats())
        def numbers(whole: int, real: float) -> None:
            drawn[-1].append(f"{whole} {real}")

        drawn.append([])
        numbers()

    draw()
    (tmp_path / "full_of_numbers.py").write_text(f"NUMBERS = {[*range(1000, 2000)]}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "full_of_numbers", importlib.import_module("full_of_numbers"))
    draw()
    assert drawn[0] == drawn[1] and len(drawn[0]) > 100


@pytest.mark.parametrize("name", MACHINES)
def test_without_a_fault_nothing_is_found(name: str) -> None:
    """And the same seed makes the same calls."""
    made = []
    for _ in range(2):
        before = figures.sequences, sum(figures.right.values()), sum(figures.refused.values())
        play(MACHINES[name], "planted", 5, shrink=False)
        after = figures.sequences, sum(figures.right.values()), sum(figures.refused.values())
        made.append([b - a for a, b in zip(before, after)])
    assert made[0] == made[1]
    assert min(made[0]) > 0


# ---- Faults that show in a process of their own ----


def planted_process(target: str, fault: str, rounds: int, folder: Path) -> tuple[str, dict[str, Any]]:
    """What is told of a process that begins with a fault."""
    (folder / "sitecustomize.py").write_text(fault)
    paths = [str(folder), str(TESTS), os.environ.get("PYTHONPATH", os.getcwd())]
    given = Target(target, {"PYTHONPATH": os.pathsep.join(paths)})
    return Process(given, ["--seed", "1", "--rounds", str(rounds)], folder).wait(time.time() + 60.0)


SPREAD = """
from cafin_cupy import spread
made = spread.SpreadUpdate.__init__
def planted(self, *arguments):
    made(self, *arguments)
    self._shares.pop()
spread.SpreadUpdate.__init__ = planted
"""


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_a_device_that_is_left_out(tmp_path: Path) -> None:
    words, _ = planted_process("spread", SPREAD, 10, tmp_path)
    assert "weights of" in words and "must be" in words


PROCESS = """
import ctypes, time
import cafin_cupy.update, fuzz.calls
fuzz.calls.HANGS_AFTER = 3
def planted(*trees, **options):
    {fault}
cafin_cupy.update.fused_step = planted
"""


@pytest.mark.parametrize("fault", ["ctypes.string_at(0)", "time.sleep(600)", "raise SystemExit(0)"])
def test_faults_that_end_a_process(fault: str, tmp_path: Path) -> None:
    """The last calls, and where the process was, are told."""
    words, report = planted_process("numpy", PROCESS.format(fault=fault), 1, tmp_path)
    assert not report
    assert "numpy died with exit code" in words
    assert "its last calls:\nfused_step(" in words
    assert "planted" in words or "SystemExit" in fault
