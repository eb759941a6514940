"""Tensor maps: how the copy engine of a Hopper GPU knows an array.

A map names an array of five axes, columns first, and the box of it that one copy brings to shared memory. It depends on
the array's address, so it is made at the launch; to make one takes a few microseconds.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from cuflash import params

AXES = 5
ALIGNMENT = 16
"""Of addresses and strides, in bytes."""
MAX_STRIDE = 1 << 40
PANEL_COLUMNS = 64
"""Columns of a box: 128 bytes of 16-bit elements, which is as far as the swizzle reaches."""

_WORDS = struct.Struct("<16Q")


def aligned(nbytes: int) -> int:
    """Bytes from row to row where each begins as the copy engine needs it."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Box(NamedTuple):
    """An array of 16-bit elements as one operand of a kernel, but for its address."""

    dtype: str
    extents: tuple[int, ...]
    """Columns, rows, and the batch axes from the last to the first: 1 where the array is broadcast."""
    strides: tuple[int, ...]
    """In bytes, from the rows' on: those of columns are their size."""
    rows: int
    """Of the box."""


def box(
    dtype: str, lengths: tuple[int, int], extents: tuple[int, ...], strides: tuple[int, ...], rows: int
) -> Box | None:
    """How the copy engine sees an array, or None where it cannot.

    Parameters
    ----------
    dtype : str
        ``float16`` or ``bfloat16``.
    lengths : tuple of int
        Rows and columns.
    extents : tuple of int
        Of the batch axes.
    strides : tuple of int
        Of the batch axes, rows and columns, in elements.
    rows : int
        Rows of a box.
    """
    *batch, row, col = strides
    length, cols = lengths
    if col != 1 and cols > 1:
        return None
    axes = [(length, row)]
    for extent, step in zip(extents[::-1], batch[::-1], strict=True):
        axes.append((1 if step == 0 else extent, step))
    # Where there is nothing to step along, any stride that is allowed.
    steps = [2 * step if extent > 1 else ALIGNMENT for extent, step in axes]
    if not all(0 < step < MAX_STRIDE and step % ALIGNMENT == 0 for step in steps):
        return None
    return Box(dtype, (cols, *(extent for extent, _ in axes)), tuple(steps), rows)


def encode(box: Box, address: int) -> bytes:
    """The map of an array at an address, as a kernel takes it.

    Raises
    ------
    RuntimeError
        The driver refuses it.
    """
    from cuda.bindings import driver

    types = driver.CUtensorMapDataType
    elements = {"float16": types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16, "bfloat16": types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16}
    status, encoded = driver.cuTensorMapEncodeTiled(
        elements[box.dtype],
        AXES,
        address,
        [driver.cuuint64_t(extent) for extent in box.extents],
        [driver.cuuint64_t(stride) for stride in box.strides],
        [driver.cuuint32_t(length) for length in (PANEL_COLUMNS, box.rows, 1, 1, 1)],
        [driver.cuuint32_t(1)] * AXES,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(status) != 0:
        raise RuntimeError(f"the driver refuses a tensor map of {box} at address {address}: {status.name}")
    words = _WORDS.pack(*(int(word) for word in encoded.opaque))
    if len(words) != params.TENSOR_MAP_BYTES:
        raise RuntimeError(f"a tensor map has {len(words)} bytes, kernels expect {params.TENSOR_MAP_BYTES}")
    return words
