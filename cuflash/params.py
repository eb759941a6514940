"""Kernel parameters: one struct by value, one layout for every attention kernel.

The layout is written down here once. ``static_asserts`` turns it into C++ that is appended to each generated source,
so a host that packs one layout and a kernel that reads another cannot both exist. Pointers come first and everything
that depends only on shapes, strides and options follows: a warm call packs the pointers and appends cached bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

TENSORS = (
    "q", "k", "v", "key_bias", "o", "lse", "dout", "dlse", "row_lse", "delta", "dq", "dk", "dv", "dkey_bias",
    "dq_accum",
)  # fmt: skip
"""Arrays of a call. ``row_lse``, ``delta`` and ``dq_accum`` live in the workspace."""

STRIDES_PER_TENSOR = 5
"""Three batch strides, row, column: in elements. A vector (lse, key_bias, ...) has its length on the row stride."""

INTS = (
    "grid_extent0", "grid_extent1", "grid_extent2", "loop_extent0", "loop_extent1", "loop_extent2",
    "seqlen_q", "seqlen_k", "head_dim", "value_dim", "band_lo", "band_hi", "need", "store_vector",
)  # fmt: skip
FLOATS = ("scale", "exponent_scale", "lse_scale", "softcap")

ROW_PADDING = 128
"""Row vectors in the workspace are padded to this many rows, so that a tile of them is loaded unconditionally."""

NEED_Q, NEED_K, NEED_V, NEED_KEY_BIAS = 1, 2, 4, 8
"""Bits of ``need``, as in params.cuh."""

_POINTERS = struct.Struct(f"<{len(TENSORS)}Q")
_TAIL = struct.Struct(f"<{len(TENSORS) * STRIDES_PER_TENSOR}q{len(INTS)}i{len(FLOATS)}f")
SIZE = (_POINTERS.size + _TAIL.size + 7) // 8 * 8
_ABSENT = (0,) * len(TENSORS)
_PADDING = bytes(SIZE - _POINTERS.size - _TAIL.size)

MERGE_PARTS = 36
"""Separate arrays that one merge reads through its parameter struct of at most 4 kB; a stacked array has no limit."""
_MERGE_PART = struct.Struct(f"<2Q{2 * STRIDES_PER_TENSOR}q")
_MERGE_TAIL = struct.Struct(f"<2Q{2 + 2 * STRIDES_PER_TENSOR}q7i")
MERGE_SIZE = (MERGE_PARTS * _MERGE_PART.size + _MERGE_TAIL.size + 7) // 8 * 8


def size(operation: str) -> int:
    """Bytes of the parameter struct that a kernel of ``operation`` takes."""
    return MERGE_SIZE if operation == "attention_merge" else SIZE


def pack_tail(strides: Mapping[str, Sequence[int]], ints: Mapping[str, int], floats: Mapping[str, float]) -> bytes:
    """The part of the struct that does not change while shapes, strides and options stay the same."""
    absent = (0,) * STRIDES_PER_TENSOR
    flat = [s for name in TENSORS for s in strides.get(name, absent)]
    return _TAIL.pack(*flat, *(ints[i] for i in INTS), *(floats[f] for f in FLOATS)) + _PADDING


def pack(pointers: Sequence[int], tail: bytes) -> bytes:
    """The struct: addresses in the order of ``TENSORS``, 0 where absent, before the cached ``tail``."""
    return _POINTERS.pack(*pointers, *_ABSENT[len(pointers) :]) + tail


def pack_merge(
    parts: Sequence[tuple[int, int, Sequence[int], Sequence[int]]],
    outputs: tuple[int, int, Sequence[int], Sequence[int]],
    part_strides: tuple[int, int],
    ints: Sequence[int],
) -> bytes:
    """The merge kernel's struct. Parts and outputs are (o pointer, lse pointer, o strides, lse strides)."""
    packed = b"".join(_MERGE_PART.pack(o, lse, *o_strides, *lse_strides) for o, lse, o_strides, lse_strides in parts)
    o, lse, o_strides, lse_strides = outputs
    tail = _MERGE_TAIL.pack(o, lse, *part_strides, *o_strides, *lse_strides, *ints)
    return (packed.ljust(MERGE_PARTS * _MERGE_PART.size, b"\0") + tail).ljust(MERGE_SIZE, b"\0")


def static_asserts() -> str:
    """C++ that fails to compile unless the struct of params.cuh has this layout."""
    offset, lines = 0, []
    for name in TENSORS:
        lines.append((name, offset))
        offset += 8
    for name in TENSORS:
        lines.append((f"{name}_stride", offset))
        offset += 8 * STRIDES_PER_TENSOR
    for name in (*INTS, *FLOATS):
        lines.append((name, offset))
        offset += 4
    asserts = "\n".join(f"static_assert(CUFLASH_OFFSETOF({n}) == {at});" for n, at in lines)
    sizes = f"static_assert(sizeof(Params) == {SIZE} && sizeof(MergeParams) == {MERGE_SIZE});"
    constants = f"static_assert(kMergeParts == {MERGE_PARTS} && kRowPadding == {ROW_PADDING});"
    # NVRTC has no offsetof; this is the operator its front end defines offsetof with.
    offsetof = "#define CUFLASH_OFFSETOF(field) __INTADDR__(&(((Params*)0)->field))"
    return f"{offsetof}\nnamespace cuflash {{\n{asserts}\n{sizes}\n{constants}\n}}\n"
