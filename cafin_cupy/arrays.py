"""Foreign arrays: what the core must know of them, and the few places that depend on whose they are.

An array is anything with `__cuda_array_interface__` or `__dlpack__`. Frameworks are never imported here: one that made
an array is in `sys.modules` already.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple, NoReturn

import numpy

from . import forks
from .errors import CafinTypeError, refuse, shown
from .kernel_cache import import_cupy

_DLPACK_CPU = (1, 3)  # kDLCPU, kDLCUDAHost
_DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged


class View(NamedTuple):
    """What a kernel sees of an array.

    Attributes:
        ptr: address of the first element.
        shape: lengths of the axes.
        strides: in elements.
        dtype: name such as "float32".
        device: "cpu" or the number of a CUDA device.
        writable: False if the owner exports it read-only.
        owner: keeps the memory alive.
    """

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int | str
    writable: bool
    owner: Any

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def extent(self) -> tuple[int, int]:
        """First and one past the last byte that belong to the array."""
        if self.size == 0:
            return self.ptr, self.ptr
        item = item_size(self.dtype)
        steps = [(n - 1) * s for n, s in zip(self.shape, self.strides)]
        low, high = sum(s for s in steps if s < 0), sum(s for s in steps if s > 0)
        return self.ptr + item * low, self.ptr + item * (high + 1)

    @property
    def overlaps_itself(self) -> bool:
        """True if two entries may share memory: an axis is shorter than what lies below it."""
        reach = 0
        for s, n in sorted((abs(s), n) for n, s in zip(self.shape, self.strides) if n > 1):
            if s <= reach:
                return self.size > 0
            reach += (n - 1) * s
        return False

    @property
    def contiguous(self) -> bool:
        return same_strides(self.shape, self.strides, contiguous_strides(self.shape))


def item_size(dtype: str) -> int:
    """Bytes of one element; 1 for kinds that no kernel takes."""
    return {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}.get(dtype, 1)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(1, n)
    return tuple(reversed(strides))


def channels_last_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of three axes or more: the second runs fastest."""
    _, c, *kernel = shape
    return c * math.prod(kernel), 1, *(c * step for step in contiguous_strides(tuple(kernel)))


def same_strides(shape: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """True if arrays of these strides have the same order in memory; axes of one entry, and empty arrays, have any."""
    return 0 in shape or all(n == 1 or x == y for n, x, y in zip(shape, a, b))


def torch_of(array: Any) -> Any:
    """The torch module if `array` is a torch tensor, else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(array, torch.Tensor) else None


def jax_of(arrays: Iterable[Any]) -> Any:
    """The jax module if one of `arrays` is a JAX array, else None."""
    jax = sys.modules.get("jax")
    return jax if jax is not None and any(isinstance(array, jax.Array) for array in arrays) else None


def wraps_others(tensor: Any) -> bool:
    """True of a torch tensor whose values lie in other tensors: a DTensor (FSDP2, tensor parallel), a quantized one."""
    return hasattr(tensor, "__tensor_flatten__")


def known(array: Any, where: str, name: str) -> Any:
    """`array` itself if the reference can compute on it and write to it, else a NumPy or CuPy array on its memory."""
    from array_api_compat import is_array_api_obj

    if torch_of(array) is not None:
        refuse_without_memory(array, where, name)
        return array.detach()
    if isinstance(array, numpy.generic):  # a sum, say: to be read, not written
        array = numpy.asarray(array)
        array.flags.writeable = False
        return array
    instance = not isinstance(array, type)  # a class has the attributes too
    if instance and is_array_api_obj(array) and not str(array.dtype).startswith("key"):  # JAX's keys have no memory
        return array
    if not instance or not (hasattr(array, "__cuda_array_interface__") or hasattr(array, "__dlpack_device__")):
        rule = "be an array with __dlpack__ or __cuda_array_interface__"
        refuse(where, name, rule, type(array).__name__, kind=CafinTypeError)
    if hasattr(array, "__cuda_array_interface__"):
        return import_cupy().asarray(array)
    kind = array.__dlpack_device__()[0]
    if kind in _DLPACK_CPU:
        return _lent(numpy, array, where, name)
    if kind in _DLPACK_CUDA:
        if str(getattr(array, "dtype", "")) == "bfloat16":  # CuPy 13 would end with a segmentation fault
            refuse(where, name, "have a dtype of CuPy's", "bfloat16", "convert it", CafinTypeError)
        return _lent(import_cupy(), array, where, name)
    refuse(where, name, "lie in CPU or CUDA memory", f"DLPack device type {kind}")


def _lent(module: Any, array: Any, where: str, name: str) -> Any:
    """An array of NumPy or CuPy on the memory of `array`, by DLPack."""
    try:
        return module.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:  # bfloat16, say
        got = f"{type(array).__name__} ({error})"
        refuse(where, name, f"be shareable with {module.__name__} by DLPack", got, "convert it", CafinTypeError)


def view(array: Any, where: str = "view", name: str = "array") -> View:
    """The `View` of an array. Copies nothing and does not synchronise.

    Raises:
        CafinTypeError: not an array, or one whose memory cannot be reached.
        CafinValueError: an address in it is no multiple of an element's size.
    """
    if torch_of(array) is not None:
        return torch_view(array, where, name)
    if forks.child and type(array).__module__.startswith("cupy"):  # which asks CUDA for an address
        forks.refuse_child(where)
    array = known(array, where, name)
    device: int | str
    if hasattr(array, "__cuda_array_interface__"):
        interface, device = array.__cuda_array_interface__, _cuda_device(array)
    elif hasattr(array, "__array_interface__"):
        interface, device = array.__array_interface__, "cpu"
    else:
        array = _lent(numpy, array, where, name)  # JAX: to be read, not written
        interface, device = array.__array_interface__, "cpu"
    shape = tuple(int(n) for n in interface["shape"])
    bfloat16 = str(getattr(array, "dtype", "")) == "bfloat16"  # of ml_dtypes: two bytes without a name there
    dtype = "bfloat16" if bfloat16 else _dtype_name(interface["typestr"], where, name)
    item = item_size(dtype)
    in_bytes = interface.get("strides") or tuple(item * step for step in contiguous_strides(shape))
    if 0 not in shape and any(n > 1 and step % item for n, step in zip(shape, in_bytes)):
        _refuse_unaligned(where, name, f"strides of {in_bytes} bytes for {dtype}")
    in_elements = tuple(int(step) // item for step in in_bytes)
    ptr, read_only = interface["data"]
    return _aligned(View(int(ptr), shape, in_elements, dtype, device, not read_only, array), where, name)


def torch_view(tensor: Any, where: str, name: str) -> View:
    """`view` of a torch tensor, which may require gradients."""
    refuse_without_memory(tensor, where, name)
    if tensor.is_neg():  # memory holds the opposite sign
        refuse(where, name, "hold its values in memory", "a tensor with the negative bit", "call .resolve_neg()")
    dtype = str(tensor.dtype).removeprefix("torch.")
    device = "cpu" if tensor.device.type == "cpu" else tensor.device.index
    return _aligned(
        View(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), dtype, device, True, tensor), where, name
    )


def refuse_without_memory(tensor: Any, where: str, name: str) -> None:
    """Refuse a torch tensor that is not a dense array in the memory of a CPU or GPU."""
    torch = torch_of(tensor)
    if torch.nn.parameter.is_lazy(tensor):
        refuse(where, name, "be initialised", "a lazy parameter", "run one forward pass first", CafinTypeError)
    if tensor.layout is not torch.strided or tensor.is_nested:
        got = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        refuse(where, name, "be dense", got, "call .to_dense(), or .to_padded_tensor()", CafinTypeError)
    if wraps_others(tensor):
        mend = "pass this rank's part of a DTensor, `.to_local()`; quantized tensors are not served"
        refuse(where, name, "be a plain tensor, with memory of its own", type(tensor).__name__, mend, CafinTypeError)
    if tensor.device.type not in ("cpu", "cuda"):
        refuse(where, name, "lie in CPU or CUDA memory", f"device {tensor.device}", kind=CafinTypeError)
    if tensor.data_ptr() == 0 and tensor.numel():  # wrapper subclasses, and storages that have been given back
        got, mend = f"a {type(tensor).__name__} without memory", "allocate it, or pass the tensor that it stands for"
        refuse(where, name, "have memory of its own", got, mend, CafinTypeError)


def _aligned(v: View, where: str, name: str) -> View:
    """`v` itself, if its elements lie at multiples of their size, as every access of a GPU must."""
    if v.ptr % item_size(v.dtype) and v.size:
        _refuse_unaligned(where, name, f"address {v.ptr:#x} for {v.dtype}")
    return v


def _refuse_unaligned(where: str, name: str, got: str) -> NoReturn:
    refuse(where, name, "lie at multiples of its elements' size", got, "pass a copy")


def _dtype_name(typestr: str, where: str, name: str) -> str:
    kinds = {"f": "float", "i": "int", "u": "uint", "c": "complex", "b": "bool"}
    if typestr[0] == ">" or typestr[1] not in kinds:
        refuse(where, name, "hold native-endian numbers", typestr, kind=CafinTypeError)
    return kinds[typestr[1]] + ("" if typestr[1] == "b" else str(int(typestr[2:]) * 8))


def _cuda_device(array: Any) -> int:
    if hasattr(array, "__dlpack_device__"):
        return int(array.__dlpack_device__()[1])
    device = getattr(getattr(array, "device", None), "id", None)
    if device is None:
        import cupy

        device = cupy.cuda.runtime.pointerGetAttributes(array.__cuda_array_interface__["data"][0]).device
    return int(device)


def stream_address(stream: Any, where: str = "fused_step") -> int:
    """Address of a stream of torch's or CuPy's, or of one that is given by its address."""
    for attribute in ("cuda_stream", "ptr"):
        if hasattr(stream, attribute):
            return int(getattr(stream, attribute))
    if not isinstance(stream, int):
        refuse(where, "stream", "be a stream or its address", shown(stream), kind=CafinTypeError)
    return stream


def current_stream(array: Any, device: int, stream: Any = None) -> int:
    """Address of the stream to work on: `stream` if given, else the current one of the framework that owns `array`.
    Whatever launches asks for one, so a forked process is told here."""
    if forks.child:
        forks.refuse_child("current_stream")
    if stream is not None:
        return stream_address(stream)
    torch = torch_of(array)
    if torch is not None and array.is_cuda:
        return torch_stream(device)
    import cupy

    return int(cupy.cuda.get_current_stream(device).ptr)


def torch_stream(device: int) -> int:
    """Address of PyTorch's current stream on a device."""
    torch = sys.modules["torch"]
    try:
        return int(torch._C._cuda_getCurrentRawStream(device))
    except AttributeError:  # internal to torch, so it may go; the documented way makes an object
        return int(torch.cuda.current_stream(device).cuda_stream)


def order(first: int, second: int, device: int) -> None:
    """Let what stream `second` does from now on wait for what `first` has been given; both are addresses."""
    if first == second:
        return
    import cupy

    with on_device(device):
        event = cupy.cuda.Event(disable_timing=True)
        cupy.cuda.runtime.eventRecord(event.ptr, first)
        cupy.cuda.runtime.streamWaitEvent(second, event.ptr)


def synchronize(stream: int) -> None:
    """Let the host wait for a stream, given by its address."""
    from cupy.cuda import runtime

    runtime.streamSynchronize(stream)


def on_device(device: int) -> Any:
    """Context in which `device` is current for the CUDA runtime; costs almost nothing where it is already."""
    import cupy

    return nullcontext() if cupy.cuda.runtime.getDevice() == device else cupy.cuda.Device(device)


def at(array: Any) -> Any:
    """Context for array code beside `array`, which the reference can compute on; torch finds its device by itself."""
    place = "cpu" if torch_of(array) is not None else where_is(array)
    return nullcontext() if isinstance(place, str) else on_device(place)


def allocate(like: Any, size: int) -> tuple[Any, int]:
    """(owner, address) of `size` bytes of device memory, from the allocator of the framework that owns `like`: it
    frees in the order of its streams."""
    torch = torch_of(like)
    if torch is not None:
        memory = torch.empty(size, dtype=torch.uint8, device=like.device)
        return memory, memory.data_ptr()
    import cupy

    with cupy.cuda.Device(_cuda_device(like)):
        memory = cupy.empty(size, dtype=cupy.uint8)
    return memory, memory.data.ptr


def copy_like(array: Any, like: Any = None) -> Any:
    """A copy of `array` in the memory layout of `like` (contiguous without it), on the framework's current stream."""
    torch = torch_of(array)
    if torch is not None:
        array = array.detach()
    if torch is not None and (like is None or torch_of(like) is not None):
        return array.contiguous() if like is None else torch.empty_like(like).copy_(array)
    import cupy

    array = cupy.asarray(array)
    with array.device:
        if like is None:
            return cupy.ascontiguousarray(array)
        copy = cupy.empty_like(cupy.asarray(known(like, "copy_like", "like")))
        copy[...] = array
        return copy


def where_is(array: Any) -> int | str:
    """ "cpu", or the number of the CUDA device; of any array that the reference can compute on."""
    kind, number = array.__dlpack_device__()
    return "cpu" if kind in _DLPACK_CPU else int(number)


def beside(array: Any, target: Any, where: str, name: str, written: bool = False) -> Any:
    """`array` as the framework of `target` sees it: itself, or an array of that framework, on the same memory if it is
    to be written.

    Raises:
        CafinError: it lies on another device, is no array, or cannot be shared.
    """
    from array_api_compat import array_namespace, device

    array = known(array, where, name)
    if where_is(array) != where_is(target):
        refuse(where, name, f"be on {place(where_is(target))}", place(where_is(array)), "move it there")
    xp = array_namespace(target)
    if array_namespace(array) is xp:
        return array
    try:
        return xp.asarray(array if written else _plain(array), device=device(target))
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        rule = f"be of the framework of its parameter, {type(target).__module__}, or shareable with it"
        refuse(where, name, rule, f"{type(array).__name__} ({error})", "convert it", CafinTypeError)


def _plain(array: Any) -> Any:
    """An array that is only read, in a form that every framework takes: copied where its own is special."""
    torch = torch_of(array)
    if torch is not None:
        array = array.resolve_neg()
        return array.float() if array.dtype in (torch.bfloat16, torch.float16) else array
    if where_is(array) != "cpu":
        return array

    if not hasattr(array, "__array_interface__"):  # JAX: torch would take its buffer for a flat one
        array = numpy.asarray(array)
    if array.dtype.name == "bfloat16":
        array = array.astype(numpy.float32)
    return array if array.flags.writeable and array.flags.c_contiguous else array.copy()


def place(device: int | str) -> str:
    """A device's usual name."""
    return f"cuda:{device}" if isinstance(device, int) else device
