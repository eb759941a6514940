"""Where a test's arrays live: NumPy or CuPy behind one small interface, with strided placement and guard regions.

Every array a test hands over is a view into a larger buffer filled with NaN, so that whatever is read outside the view
shows up in the results, and whatever is written outside it shows up in ``Placed.check_guards``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
GUARD = 64
"""Elements of NaN before and after every view; a multiple of 16 bytes in each dtype, so it keeps the base aligned."""


def dtype_of(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a name, ``'bfloat16'`` included."""
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def acc_dtype(name: str) -> np.dtype[Any]:
    """The dtype of lse and key_bias for operands of dtype ``name``."""
    return np.dtype(np.float64 if name == "float64" else np.float32)


def bits_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """An unsigned integer of the same size: arrays travel and are compared as bits, bfloat16 like the others."""
    return np.dtype(f"u{dtype.itemsize}")


class Host:
    """NumPy arrays."""

    name = "host"
    xp = np
    dtypes = ("float16", "bfloat16", "float32", "float64")

    def put(self, bits: np.ndarray) -> Any:
        """A copy of a one-dimensional array in this backend's memory."""
        return bits.copy()

    def view(
        self, storage: Any, dtype: np.dtype[Any], offset: int, shape: Sequence[int], strides: Sequence[int]
    ) -> Any:
        """The strided view of ``storage``; offset and strides are in bytes."""
        return np.ndarray(tuple(shape), dtype, buffer=storage, offset=offset, strides=tuple(strides))

    def get(self, array: Any) -> np.ndarray:
        """A C-ordered NumPy copy."""
        return np.array(array, order="C")

    def empty_bytes(self, nbytes: int) -> Any:
        """A workspace filled with ones bits, which are NaN in every dtype."""
        return np.full(nbytes, 255, np.uint8)


class Gpu:
    """CuPy arrays. Only copies and bit patterns go through CuPy, so that a test depends on little of it."""

    name = "gpu"
    dtypes = Host.dtypes

    @property
    def xp(self) -> Any:
        import cupy

        return cupy

    def put(self, bits: np.ndarray) -> Any:
        return self.xp.asarray(bits)

    def view(
        self, storage: Any, dtype: np.dtype[Any], offset: int, shape: Sequence[int], strides: Sequence[int]
    ) -> Any:
        return self.xp.ndarray(tuple(shape), dtype, memptr=storage.data + offset, strides=tuple(strides))

    def get(self, array: Any) -> np.ndarray:
        if array.size == 0:
            return np.empty(array.shape, array.dtype)
        bits = self.xp.ndarray(array.shape, bits_dtype(array.dtype), memptr=array.data, strides=array.strides)
        return np.ascontiguousarray(bits.get()).view(array.dtype)

    def empty_bytes(self, nbytes: int) -> Any:
        return self.xp.full(nbytes, 255, self.xp.uint8)


HOST = Host()
GPU = Gpu()
Backend = Host | Gpu


@dataclass(frozen=True)
class Layout:
    """Where the elements of an array lie in its buffer.

    ``order`` is the storage order of the axes, outermost first (None: as they come); ``steps`` the step of each axis,
    in units of its dense stride: 2 every second element, -1 reversed, 0 broadcast; ``pad`` elements of gap after the
    innermost stored axis; ``shift`` elements by which the base is off its alignment.
    """

    order: tuple[int, ...] | None = None
    steps: tuple[int, ...] | None = None
    pad: int = 0
    shift: int = 0

    def plan(self, shape: Sequence[int]) -> tuple[int, tuple[int, ...], int]:
        """Offset, strides and size of the buffer, in elements."""
        order = tuple(range(len(shape))) if self.order is None else self.order
        steps = (1,) * len(shape) if self.steps is None else self.steps
        offset, stride, strides = GUARD + self.shift, 1, [0] * len(shape)
        for position, axis in enumerate(reversed(order)):
            extent, step = max(shape[axis], 1), steps[axis]
            strides[axis] = stride * step
            if step < 0:
                offset += (extent - 1) * stride * -step
            if step:
                stride *= extent * abs(step)
            if position == 0:
                stride += self.pad
        return offset, tuple(strides), offset + stride + GUARD


def swapped(ndim: int) -> Layout:
    """The storage of a ``(batch, sequence, head, feature)`` array that is passed with its two middle axes swapped."""
    axes = list(range(ndim))
    axes[-3], axes[-2] = axes[-2], axes[-3]
    return Layout(order=tuple(axes))


@dataclass
class Placed:
    """An array inside a NaN-filled buffer, and the buffer's bits as they were before the call."""

    backend: Backend
    array: Any
    storage: Any
    before: np.ndarray
    inside: np.ndarray

    def check_guards(self) -> None:
        """Fail unless every element outside the view still has its bits."""
        changed = (self.backend.get(self.storage) != self.before) & ~self.inside
        assert not changed.any(), f"{changed.sum()} elements outside the array were written, first {changed.argmax()}"

    def check_unchanged(self) -> None:
        """Fail unless the whole buffer still has its bits."""
        assert (self.backend.get(self.storage) == self.before).all(), "an input was written"


def place(backend: Backend, values: np.ndarray, layout: Layout | None = None) -> Placed:
    """Copy ``values`` into a new buffer of the backend, laid out as ``layout`` says.

    On an axis with step 0 all values must be equal: the first one is stored.
    """
    layout = Layout() if layout is None else layout
    dtype = values.dtype
    offset, strides, size = layout.plan(values.shape)
    item = dtype.itemsize
    bits = np.full(size * item, 255, np.uint8).view(bits_dtype(dtype))  # ones alone are NaN in every float dtype
    where = (offset * item, values.shape, [s * item for s in strides])
    HOST.view(bits, dtype, *where)[...] = values
    inside = np.zeros(size, bits_dtype(dtype))
    HOST.view(inside, inside.dtype, *where)[...] = 1
    storage = backend.put(bits)
    return Placed(backend, backend.view(storage, dtype, *where), storage, bits, inside.astype(bool))


def place_hole(backend: Backend, shape: Sequence[int], dtype: np.dtype[Any], layout: Layout | None = None) -> Placed:
    """Room for an output: the array and everything around it is NaN."""
    return place(backend, np.full(tuple(shape), np.nan, dtype), layout)


def put(backend: Backend, values: np.ndarray, layout: Layout | None = None) -> Any:
    """``place`` for inputs whose buffer is of no further interest."""
    return place(backend, values, layout).array


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two NumPy arrays agree in shape, dtype and every bit."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return bool((a.view(bits_dtype(a.dtype)) == b.view(bits_dtype(b.dtype))).all()) if a.size else True


def normal(rng: np.random.Generator, shape: Sequence[int], dtype: str, factor: float = 1.0) -> np.ndarray:
    """Standard normal values times ``factor``, rounded to ``dtype``."""
    return (factor * rng.standard_normal(tuple(shape))).astype(dtype_of(dtype))
