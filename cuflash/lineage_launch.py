"""The lineage on CuPy arrays: kernels of ``kernels_cu/lineage`` and matrix products by cuBLAS."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cuflash import compile, launch, lineage_tiles, memory, params, tiles

SHORT_ROW = 1024
"""Elements up to which a warp takes a row, beyond which a CTA does."""
MANY_ROWS = 4096
"""From so many on a thread takes a row by itself, where that of its neighbour lies beside it."""


def softmax(operation: str, x: Any, y: Any, maximum: Any, total: Any) -> None:
    """Enqueue a softmax of the rows of x along its last axis; of y and the statistics what is None is not wanted."""
    if x.shape[-1] == 0 and maximum is not None:
        maximum.fill(-np.inf)
        total.fill(0)
    if x.size == 0:
        return
    device, dtype = x.device.id, x.dtype.name
    target, family = kernels_of(device, dtype, operation)
    x_steps, y_steps = (() if a is None else _elements(a) for a in (x, y))
    batch = {"x": x_steps[:-1], "y": y_steps[:-1] if y_steps else (0,) * (x.ndim - 1)}
    batch["statistics"] = (0,) * (x.ndim - 1) if maximum is None else _elements(maximum)
    axes = memory.coalesce(x.shape[:-1], batch)
    rows = math.prod(axes.extents)
    load = _load(dtype, x.shape[-1], axes, [(x, x_steps, "x")] + ([] if y is None else [(y, y_steps, "y")]))
    variant = lineage_tiles.softmax(operation, dtype, load, target, family)
    threads = variant.tile.threads
    lanes = 32 if x.shape[-1] <= SHORT_ROW else threads
    if load == "strided" and axes.strides["x"][2] == 1 and rows >= MANY_ROWS:
        lanes = 1
    pointers = [0 if a is None else a.data.ptr for a in (x, y, maximum, total)]
    steps = [*axes.strides["x"], *axes.strides["y"], *axes.strides["statistics"], x_steps[-1]]
    steps += [y_steps[-1] if y_steps else 0, x.shape[-1]]
    packed = params.pack_softmax(pointers, steps, (*axes.extents, lanes, 0, 0))
    run(variant, device, -(-rows * lanes // threads), packed)


def kernels_of(device: int, dtype: str, operation: str) -> tuple[str, str]:
    """Target and portable family of a device; NotImplementedError where it has no kernels of the dtype."""
    target, family = launch._target(device), launch._families(device).portable
    launch._check_dtype(operation, dtype, target, family)
    return target, family


def run(variant: compile.Variant, device: int, ctas: int, packed: bytes) -> None:
    """Enqueue a kernel that takes one struct."""
    if ctas > params.MAX_INT:
        raise NotImplementedError(
            f"{variant.operation} would need {ctas} blocks, a launch has at most {params.MAX_INT}"
        )
    kernel = compile.kernel(variant, device)
    argument = np.frombuffer(packed, f"V{len(packed)}")[0]
    kernel((ctas,), (variant.tile.threads,), (argument,), shared_mem=variant.smem_bytes)


def _elements(x: Any) -> tuple[int, ...]:
    """Strides in elements; 0 along an axis of length 1, whose stride says nothing."""
    strides = zip(x.shape, x.strides, strict=True)
    return tuple(0 if length == 1 else memory.elements(stride, x.dtype.itemsize) for length, stride in strides)


def _load(dtype: str, length: int, axes: memory.Axes, given: Sequence[tuple[Any, Sequence[int], str]]) -> str:
    """16 where every row of the arrays is whole vectors, side by side."""
    itemsize = tiles.ITEMSIZE[dtype]
    bits = itemsize * length
    for x, steps, name in given:
        if steps[-1] != 1:
            return "strided"
        bits |= x.data.ptr
        for stride, extent in zip(axes.strides[name], axes.extents, strict=True):
            bits |= itemsize * stride if extent > 1 else 0
    return "strided" if bits % 16 else "16"
