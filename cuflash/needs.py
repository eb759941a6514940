"""What a call needs beside its arrays: scratch memory, copies of inputs in it, and counters that kernels find at 0."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cuflash import memory, params, tma

POINTERS = {name: index for index, name in enumerate((*params.TENSORS, *params.SCRATCH))}
"""Where arrays are among the pointers of a call."""


class Needs(NamedTuple):
    """Memory that a call needs beside its arrays."""

    nbytes: int
    """Of scratch memory, whose parts begin at distances from a multiple of 16."""
    parts: tuple[tuple[int, int], ...] = ()
    """Which pointers name a part of it, and where that begins."""
    copies: tuple[tuple[int, memory.Strides], ...] = ()
    """Which of the arrays are first copied to their parts, and batch shapes of these copies."""
    counts: int = 0
    """Bytes of counters, in which the kernel finds zeros and leaves zeros."""
    counts_at: int = 0
    """Where they begin in the scratch memory of a call that may overlap others of its stream."""
    counters: tuple[tuple[int, int], ...] = ((POINTERS["claims"], 0),)
    """Which pointers name counters, and where those begin among them."""


def provide(
    needs: Needs, device: int, inputs: Sequence[Any], pointers: list[int], workspace: Any
) -> tuple[Any, int, int]:
    """Bring what a call needs, and add it to its pointers: what is to be held until the launch, and where how many
    bytes are to be set to zero before it. ``inputs``: inner views of those that may be copied."""
    pointers += [0] * (len(params.TENSORS) + len(params.SCRATCH) - len(pointers))
    counters, claims = _counters(device, needs.counts) if needs.counts else (None, 0)
    own_counts = needs.counts if counters is None else 0
    if needs.parts or own_counts:
        workspace, start = reserve(workspace, needs.nbytes)
        for index, offset in needs.parts:
            pointers[index] = start + offset
        for index, batch in needs.copies:
            _copy(inputs[index], batch, workspace, pointers[index])
        if own_counts:
            claims = start + needs.counts_at
    for index, offset in needs.counters:
        pointers[index] = claims + offset if claims else 0
    return (workspace, counters), claims, own_counts


_zeros: dict[tuple[int, int], Any] = {}
"""Counters by device and stream, all 0: a kernel that counts leaves them so, and calls in a stream do not overlap.
Streams by their ids: of one that is gone, work may go on while another already has its pointer."""

_MOST_STREAMS = 1024
"""Counters to keep, those of late."""

_PER_THREAD_STREAM = 2
"""The pointer by which every thread means a default stream of its own."""


def _counters(device: int, nbytes: int) -> tuple[Any, int]:
    """Counters for a call in the current stream, to be held until the launch, and their address. None where calls of
    one stream may overlap: replays of a graph run in any stream."""
    import cupy

    stream = cupy.cuda.get_current_stream()
    if stream.ptr == _PER_THREAD_STREAM or stream.is_capturing():
        return None, 0
    key = device, _stream_id(stream.ptr)
    counters = _zeros.get(key)
    if counters is None or counters.nbytes < nbytes:
        counters = cupy.zeros(max(nbytes, 512), np.uint8)
        _zeros.pop(key, None)
        _zeros[key] = counters
        for late in list(_zeros)[:-_MOST_STREAMS]:
            _zeros.pop(late, None)
    return counters, counters.data.ptr


def forget_counters() -> None:
    """Of all streams: the next call of each takes new ones."""
    _zeros.clear()


def _stream_id(pointer: int) -> int:
    """A number that no other stream of a device has or will have."""
    if pointer == 0:  # the default stream, which stays
        return -1
    from cuda.bindings import driver

    status, number = driver.cuStreamGetId(pointer)
    if int(status) != 0:
        raise RuntimeError(f"the driver does not know the current stream, {pointer:#x}: {status.name}")
    return int(number)


def _copy(x: Any, batch: memory.Strides, workspace: Any, address: int) -> None:
    """Enqueue a copy of an array to an address in the workspace: once where batch axes are broadcast, its rows whole
    16 bytes apart."""
    import cupy

    bits = np.dtype(f"u{x.dtype.itemsize}")  # whatever the numbers are
    own = x[tuple(slice(length) for length in batch)].view(bits)
    *shape, cols = own.shape
    pitch = tma.aligned(cols * bits.itemsize)
    start = address - workspace.data.ptr
    room = workspace[start : start + math.prod(shape) * pitch].view(bits).reshape((*shape, pitch // bits.itemsize))
    cupy.copyto(room[..., :cols], own)


_captured: list[Any] = []
"""Scratch memory that calls allocated while a graph was captured: its replays use it, whenever they come."""


def reserve(workspace: Any, nbytes: int) -> tuple[Any, int]:
    """The caller's workspace, or one to be held until the launch, and the first multiple of 16 in it."""
    if workspace is None:
        import cupy

        workspace = cupy.empty(nbytes, np.uint8)
        if cupy.cuda.get_current_stream().is_capturing():
            _captured.append(workspace)
    return workspace, -(-workspace.data.ptr // 16) * 16
