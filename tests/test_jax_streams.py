"""Work of ours between two programs of JAX: what JAX and the streams are told."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")
import jax
import jax.numpy as jnp
from jax_eager_helpers import given_arrays, jax_memory  # noqa: F401

from cafin_cupy import update
from cafin_cupy.adapters import jax_eager, jax_streams
from cafin_cupy.adapters.jax import borrowed, fused_step


def test_what_the_programs_do_is_nothing() -> None:
    """All of `own` stays in place, and no operation reads what is read."""
    own = [jnp.ones((5, 3)), jnp.ones(4, "bfloat16"), jnp.ones(())]
    text = jax_streams.moved.lower(own, [jnp.ones((7, 7))]).compile().as_text()
    assert text.count("may-alias") + text.count("must-alias") == len(own)
    operations = [line for line in text.splitlines() if " = " in line and "metadata" not in line.split(" = ")[0]]
    used = [line for line in operations if any(word in line for word in (" fusion(", " add(", " copy(%own"))]
    assert not used


class Told:
    """In the place of CuPy and of JAX's import: what was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        tell = lambda name: lambda *given, **options: self.calls.append((name, *given, *options.items()))  # noqa: E731
        monkeypatch.setattr(jax_streams, "order", tell("order"))
        monkeypatch.setattr(jax_streams, "synchronize", tell("synchronize"))
        monkeypatch.setattr(jax_streams, "_cell", lambda device: self)

    def __dlpack__(self, **options: Any) -> str:
        self.calls.append(("capsule", options))
        return "capsule"


def test_jax_is_told_when_a_stream_has_come_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    mark = jax_streams._Mark(17, 1)
    assert mark.__dlpack_device__() == (2, 1)
    assert mark.__dlpack__(stream=23) == "capsule"
    assert told.calls == [("order", 17, 23, 1), ("capsule", {"stream": -1})]


def test_the_host_waits_where_jax_names_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    assert jax_streams._Mark(17, 0).__dlpack__(stream=None) == "capsule"
    assert told.calls == [("synchronize", 17), ("capsule", {"stream": -1})]


@pytest.mark.parametrize(("stream", "named"), [(0, 1), (17, 17)])
def test_a_stream_waits_for_jax(stream: int, named: int) -> None:
    told: list[Any] = []

    class Array:
        def __dlpack__(self, **options: Any) -> None:
            told.append(options)

    jax_streams.let_wait(stream, Array())
    assert told == [{"stream": named}]


@pytest.mark.gpu
@pytest.mark.parametrize("fails", [False, True])
def test_the_work_is_between_two_programs(
    memory: str, given: Any, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which have all arrays as arguments, also where the work fails."""
    if memory == "cpu":
        pytest.skip("on a CPU the host waits")
    happened: list[Any] = []
    for name in ("let_wait", "behind", "run"):
        call = getattr(jax_streams, name)

        def told(*args: Any, name: str = name, call: Any = call) -> Any:
            happened.append((name, len(jax.tree.leaves(args[2])) if name == "run" else None))
            return call(*args)

        for module in (jax_streams, jax_eager):
            monkeypatch.setattr(module, name, told)

    def step(self: Any, stream: Any = None) -> None:
        happened.append(("work", None))
        if fails:
            raise MemoryError

    monkeypatch.setattr(update.Step, "__call__", step)
    read = len(jax.tree.leaves((given["grads"], given["factors"])))
    work = [("run", read), ("let_wait", None), ("work", None), ("behind", None), ("run", read + 1)]
    with pytest.raises(MemoryError) if fails else nullcontext():
        fused_step(**given, lr=0.1, donate=True)
    assert happened == work
    happened.clear()
    with pytest.raises(MemoryError) if fails else nullcontext(), borrowed(given["grads"]):
        step(None)
    read = len(jax.tree.leaves(given["grads"]))
    assert happened == [("run", read), *work[1:4], ("run", read + 1)]
