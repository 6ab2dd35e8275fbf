"""Frameworks at work on a given stream, and arrays of two frameworks in one launch: each has a current stream of its
own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from .arrays import current_stream, jax_of, order, synchronize, torch_of


def on_stream(array: Any, device: int, stream: Any) -> Any:
    """Context in which the framework that owns `array` works on `stream`; None changes nothing."""
    if stream is None:
        return nullcontext()
    address = current_stream(array, device, stream)
    torch = torch_of(array)
    if torch is not None:
        if address == 0:  # of an ExternalStream(0) torch makes a new stream
            return torch.cuda.stream(torch.cuda.default_stream(device))
        return torch.cuda.stream(torch.cuda.ExternalStream(address, device=torch.device("cuda", device)))
    import cupy

    if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14
        return cupy.cuda.Stream.from_external(_Address(address))
    return cupy.cuda.ExternalStream(address, device)


class _Address:
    """A stream known by its address, in the protocol by which CuPy takes it over."""

    def __init__(self, address: int) -> None:
        self.address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


@contextmanager
def joined(owners: Sequence[Any], device: int, stream: int) -> Iterator[None]:
    """Context for a launch on `stream`, that of the framework of `owners[0]`. If another framework owns some of the
    arrays, the launch comes behind what that one's current stream has been given, and in front of what it gets next;
    within, it works on `stream`. JAX tells no stream of its own: for its arrays the host waits, before and behind."""
    jax = jax_of(owners)
    if jax is None:
        with _joined(owners, device, stream):
            yield
        return
    jax.block_until_ready([owner for owner in owners if isinstance(owner, jax.Array)])
    try:
        with _joined(owners, device, stream):
            yield
    finally:
        synchronize(stream)  # JAX may free what it lent as soon as nobody holds it


@contextmanager
def _joined(owners: Sequence[Any], device: int, stream: int) -> Iterator[None]:
    torch = torch_of(owners[0])
    other = next((owner for owner in owners if torch_of(owner) is not torch), None)
    theirs = stream if other is None else current_stream(other, device)
    if theirs == stream:
        yield
        return
    order(theirs, stream, device)
    with on_stream(other, device, stream):
        yield
    order(stream, theirs, device)
