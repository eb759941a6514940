"""Arrays of either backend: which is which, foreign arrays taken in without a copy, memory order, overlap.

NumPy alone is needed to import this module. CuPy is imported the first time an array on a GPU asks for it.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

CPU_KINDS = (1, 3, 11)
"""DLPack device types that NumPy reads: CPU, and the pinned host memory of CUDA and ROCm."""
CUDA_KINDS = (2, 13)
"""DLPack device types that CuPy reads: CUDA and CUDA managed memory."""

OVERLAP_WORK: Any = 1_000_000
"""Candidates tried before two arrays of interleaved strides count as overlapping: milliseconds."""

_NOTHING: AbstractContextManager[Any] = nullcontext()


def cupy() -> Any:
    """The module cupy, or ImportError with the command that installs it."""
    try:
        import cupy
    except ImportError as error:
        hint = 'pip install "cuflash[cuda13]" (or "cuflash[cuda12]"; in a checkout ".[cuda13]")'
        raise ImportError(f"an array on a GPU needs CuPy: {hint}") from error
    return cupy


def _cupy_ndarray() -> Any:
    """cupy.ndarray where something has imported CuPy already, which whoever holds such an array has; else None."""
    return getattr(sys.modules.get("cupy"), "ndarray", None)


def plain_kinds() -> tuple[Any, Any]:
    """The classes of arrays that ``as_array`` returns as they are."""
    return np.ndarray, _cupy_ndarray()


def is_array(x: Any) -> bool:
    """Whether x is a plain NumPy or CuPy array, or a memory-mapped file: what results may be written to."""
    return type(x) in (np.ndarray, np.memmap, _cupy_ndarray())


def as_array(name: str, x: Any) -> Any:
    """The argument ``name`` as a plain numpy.ndarray or cupy.ndarray on the same memory.

    Raises TypeError for anything that is not an array of a known kind. A list is refused, not converted: it would be
    copied on every call, and its dtype would be a guess.
    """
    kind = type(x)
    if kind is np.ndarray or kind is _cupy_ndarray():
        return x
    if kind is np.memmap:
        return x.view(np.ndarray)
    if isinstance(x, np.ma.MaskedArray):
        hint = "its mask would be lost; pass a plain array, and hide keys with key_bias=np.where(hidden, -np.inf, 0.0)"
        hint += " in float32, or float64 for float64 arrays"
        raise _not_an_array(name, x, hint)
    if isinstance(x, np.generic):
        raise _not_an_array(name, x, "a scalar; pass an array of the full shape, as numpy.full makes")
    if isinstance(x, np.ndarray) or (_cupy_ndarray() is not None and isinstance(x, _cupy_ndarray())):
        raise _not_an_array(name, x, "subclasses of ndarray give operators another meaning; pass a plain array")
    if hasattr(x, "__dlpack_device__"):
        return _from_dlpack(name, x)
    if hasattr(x, "__cuda_array_interface__"):
        return cupy().asarray(x)
    hint = "it must be given" if x is None else "convert it with numpy.asarray or cupy.asarray"
    raise _not_an_array(name, x, hint)


def _not_an_array(name: str, x: Any, hint: str) -> TypeError:
    kind = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
    return TypeError(
        f"{name} must be a numpy.ndarray, a cupy.ndarray, or an array with DLPack or __cuda_array_interface__, "
        f"got {kind}: {hint}"
    )


def _from_dlpack(name: str, x: Any) -> Any:
    device = int(x.__dlpack_device__()[0])
    if device in CPU_KINDS:
        xp: Any = np
    elif device in CUDA_KINDS:
        xp = cupy()
    else:
        raise _not_an_array(name, x, f"its DLPack device type {device} is neither CPU nor CUDA")
    bfloat16 = _bfloat16(name) if str(getattr(x, "dtype", "")).endswith("bfloat16") else None
    try:
        return xp.from_dlpack(x) if bfloat16 is None else xp.from_dlpack(_Bits16(x)).view(bfloat16)
    except (BufferError, NotImplementedError, RuntimeError) as error:
        raise _not_an_array(name, x, f"its memory cannot be shared through DLPack: {error}") from error


def _bfloat16(name: str) -> np.dtype[Any]:
    try:
        import ml_dtypes
    except ImportError as error:
        raise TypeError(f"{name} is bfloat16, which NumPy knows only with ml_dtypes: pip install ml_dtypes") from error
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


class _Bits16:
    """A bfloat16 array offered through DLPack as uint16: neither NumPy nor CuPy takes in DLPack's own code for it."""

    # DLTensor is {void *data; int32_t device[2]; int32_t ndim; struct {uint8_t code, bits; uint16_t lanes} dtype; ...}.
    CODE_OFFSET = 20
    UINT, BFLOAT = 1, 4

    def __init__(self, x: Any) -> None:
        self.x = x

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        # Asked without max_version, a producer answers with the first struct of the protocol, which starts with the
        # DLTensor. It belongs to this capsule alone, so its type code may be changed.
        capsule = self.x.__dlpack__() if stream is None else self.x.__dlpack__(stream=stream)
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        code = ctypes.c_uint8.from_address(pointer(capsule, b"dltensor") + self.CODE_OFFSET)
        if code.value != self.BFLOAT:
            raise BufferError(f"its dtype says bfloat16, its DLPack type code is {code.value}")
        code.value = self.UINT
        return capsule


@functools.lru_cache(maxsize=256)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """``dtype.name``, which takes microseconds to put together, looked up. Byte order is not part of it."""
    return dtype.name


def device_of(x: Any) -> int:
    """The CUDA device of a plain array, -1 for a NumPy array."""
    return -1 if type(x) is np.ndarray else x.data.device_id


def place(device: int) -> str:
    """Where ``device_of`` says an array is, in words."""
    return "on the host" if device < 0 else f"on GPU {device}"


def module(device: int) -> Any:
    """numpy for the host, cupy for a GPU."""
    return np if device < 0 else cupy()


def is_current(device: int) -> bool:
    """Whether ``device`` is CuPy's current one, or the host."""
    return device < 0 or cupy().cuda.runtime.getDevice() == device


def current(device: int) -> AbstractContextManager[Any]:
    """A context in which ``device`` is CuPy's current one; the caller's device is current again after it."""
    if is_current(device):  # as nearly always, and then cheaper than setting it twice
        return _NOTHING
    context: AbstractContextManager[Any] = cupy().cuda.Device(device)
    return context


class Result(NamedTuple):
    """An array that a call returns: name, dtype, shape, and the order of its axes in memory."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    """The shape in memory order, outermost axis first."""
    axes: tuple[int, ...] | None
    """The transposition from ``stored`` to ``shape``; None where memory order is C order."""

    def empty(self, xp: Any) -> Any:
        """The array, uninitialised; on the current device where xp is cupy."""
        x = xp.ndarray(self.stored, self.dtype)  # as xp.empty does, which in CuPy takes half a microsecond more
        return x if self.axes is None else x.transpose(self.axes)


def memory_order(ndim: int, like_shape: tuple[int, ...], like_strides: tuple[int, ...]) -> list[int]:
    """Axes of a result, outermost first, in the order of an array that it is aligned with on the right; the last last.

    This is NumPy's 'K' order, by the size of the strides. An axis that says nothing about order (missing, of length 1
    or of stride 0) stays where C order has it, next to its neighbours.
    """
    strides = [0] * (ndim - len(like_shape))
    strides += [0 if length == 1 else abs(s) for length, s in zip(like_shape[:-1], like_strides[:-1], strict=True)]
    order: list[int] = []
    for axis, stride in enumerate(strides):
        at = len(order)
        for position in reversed(range(len(order))) if stride else ():
            other = strides[order[position]]
            if other >= stride:
                break
            if other:
                at = position
        order.insert(at, axis)
    return [*order, ndim - 1]


def result(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], like: Any = None) -> Result:
    """A result in C order, or in the memory order of ``like`` (anything with a shape and strides)."""
    order = list(range(len(shape))) if like is None else memory_order(len(shape), like.shape, like.strides)
    if order == sorted(order):
        return Result(name, dtype, shape, shape, None)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return Result(name, dtype, shape, tuple(shape[axis] for axis in order), tuple(inverse))


class _Addresses:
    """NumPy's view of an array's addresses: enough to ask whether arrays overlap, never read or written."""

    def __init__(self, x: Any) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": x.shape,
            "strides": x.strides,
            "typestr": f"|V{x.dtype.itemsize}",
            "data": (_pointer(x), True),
        }


def _pointer(x: Any) -> int:
    return int(x.ctypes.data if type(x) is np.ndarray else x.data.ptr)


def require_whole_elements(name: str, x: Any) -> None:
    """Raise where an array on a GPU starts between two elements, which no kernel can read."""
    if type(x) is not np.ndarray and _pointer(x) % x.dtype.itemsize:
        raise NotImplementedError(
            f"{name} starts between two elements: its address {_pointer(x):#x} is not a multiple of its "
            f"{x.dtype.itemsize} bytes an element; copy it"
        )


@functools.lru_cache(maxsize=4096)
def reach(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """How far an array's first byte and the one past its last are from its address; 0 without elements."""
    if 0 in shape:
        return 0, 0
    steps = [(length - 1) * stride for length, stride in zip(shape, strides, strict=True)]
    return sum(step for step in steps if step < 0), sum(step for step in steps if step > 0) + itemsize


@functools.lru_cache(maxsize=4096)
def reach_of_distinct(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int] | None:
    """``reach``, None where strides do not show that no two elements share memory."""
    return reach(shape, strides, itemsize) if steps_clear(shape, strides, itemsize) else None


def extent(x: Any) -> tuple[int, int]:
    """First address of an array and the one past its last; empty for an array without elements."""
    address, (low, high) = _pointer(x), reach(x.shape, x.strides, x.dtype.itemsize)
    return address + low, address + high


def first_overlap(x: Any, others: Mapping[str, Any]) -> str | None:
    """The name of the first of other arrays that has a byte in common with an array of the same device, of whose memory
    nothing is read."""
    low, high = extent(x)
    for name, other in others.items():
        other_low, other_high = extent(other)
        apart = low >= other_high or other_low >= high or low == high or other_low == other_high
        if not apart and _share(np.asarray(_Addresses(x)), np.asarray(_Addresses(other))):
            return name
    return None


@functools.lru_cache(maxsize=4096)
def steps_clear(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether no two elements share memory because each axis steps over all that the finer ones reach."""
    if 0 in shape:
        return True
    reach = itemsize
    for stride, length in sorted((abs(s), length) for s, length in zip(strides, shape, strict=True) if length > 1):
        if stride < reach:
            return False
        reach += (length - 1) * stride
    return True


def overlaps_itself(x: Any) -> bool:
    """Whether two elements of an array share memory, as in a broadcast view."""
    if steps_clear(x.shape, x.strides, x.dtype.itemsize):
        return False
    # Two elements that coincide differ on a first axis; shifted along the axes, one of them is at 0 there, and both are
    # at 0 on the axes before it.
    addresses: np.ndarray[Any, Any] = np.asarray(_Addresses(x))
    for _ in range(x.ndim):
        if _share(addresses[:1], addresses[1:]):
            return True
        addresses = addresses[0, ...]  # a view to the last: without the dots an element would be read
    return False


def _share(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    try:
        return np.shares_memory(a, b, max_work=OVERLAP_WORK)
    except np.exceptions.TooHardError:
        return True
