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
    "dq_accum", "dq_turn", "q_planes", "k_planes", "v_planes",
)  # fmt: skip
"""Arrays of a call. ``row_lse`` and those after ``dkey_bias`` live in the workspace, as ``delta`` does."""

SCRATCH = ("claims", "partials", "row_terms", "careful")
"""Arrays of the workspace that no kernel needs strides for."""

STRIDES_PER_TENSOR = 5
"""Three batch strides, row, column: in elements. A vector (lse, key_bias, ...) has its length on the row stride."""

INTS = (
    "grid_extent0", "grid_extent1", "grid_extent2", "loop_extent0", "loop_extent1", "loop_extent2",
    "seqlen_q", "seqlen_k", "head_dim", "value_dim", "band_lo", "band_hi", "need", "store_vector",
    "splits", "key_warps", "split_tiles", "section", "last_section", "store_map",
)  # fmt: skip

MAX_INT = 2**31 - 1
"""What one of ``INTS`` holds, and what kernels number blocks and tiles in."""

SCALARS = ("scale", "exponent_scale", "lse_scale", "softcap")
"""Of the accumulation dtype."""

TENSOR_MAP_BYTES = 128
"""Of one tensor map: those of a kernel that takes any come before the rest of its parameters."""

ROW_PADDING = 128
"""Row vectors in the workspace are padded to this many rows, so that a tile of them is loaded unconditionally."""

NEED_Q, NEED_K, NEED_V, NEED_KEY_BIAS = 1, 2, 4, 8
"""Bits of ``need``, as in params.cuh."""

_POINTERS = struct.Struct(f"<{len(TENSORS) + len(SCRATCH)}Q")
_TAILS = {
    scalar: struct.Struct(f"<{len(TENSORS) * STRIDES_PER_TENSOR}q{len(SCALARS)}{scalar}{len(INTS)}i") for scalar in "fd"
}
_ABSENT = (0,) * (len(TENSORS) + len(SCRATCH))

MERGE_PARTS = 36
"""Separate arrays that one merge reads through its parameter struct of at most 4 kB; a stacked array has no limit."""
_MERGE_PART = struct.Struct(f"<2Q{2 * STRIDES_PER_TENSOR}q")
_MERGE_TAIL = struct.Struct(f"<2Q{2 + 2 * STRIDES_PER_TENSOR}q7i")
MERGE_SIZE = (MERGE_PARTS * _MERGE_PART.size + _MERGE_TAIL.size + 7) // 8 * 8

SOFTMAX_OPERATIONS = ("safe_softmax", "online_softmax", "row_softmax", "row_softmax_backward")
"""Kernels on rows of an array that is no operand of attention: ``SoftmaxParams`` of lineage/rows.cuh."""
_SOFTMAX = struct.Struct("<4Q12q6i")


def planes(dtype: str, precision: str | None = None) -> int:
    """How many 16-bit planes kernels of sm_90 take an operand in, as planes.cuh has it: 24 bits of a float in three."""
    return 1 if dtype in ("float16", "bfloat16") else 3 if precision is None else 2


def _scalar(dtype: str) -> str:
    """Struct code of the accumulation dtype of operands of ``dtype``."""
    return "d" if dtype == "float64" else "f"


def size(operation: str, dtype: str, maps: int = 0) -> int:
    """Bytes of the parameter struct that a kernel of ``operation`` on operands of ``dtype`` takes, after so many tensor
    maps."""
    if operation == "attention_merge":
        return MERGE_SIZE
    if operation in SOFTMAX_OPERATIONS:
        return _SOFTMAX.size
    own = (_POINTERS.size + _TAILS[_scalar(dtype)].size + 7) // 8 * 8
    return (maps * TENSOR_MAP_BYTES + own + 63) // 64 * 64 if maps else own


def pack_tail(
    strides: Mapping[str, Sequence[int]],
    ints: Mapping[str, int],
    scalars: Mapping[str, float],
    dtype: str,
    maps: int = 0,
) -> bytes:
    """The part of the struct that does not change while shapes, strides and options stay the same, of a kernel that
    takes so many tensor maps before it."""
    absent = (0,) * STRIDES_PER_TENSOR
    flat = [s for name in TENSORS for s in strides.get(name, absent)]
    tail = _TAILS[_scalar(dtype)].pack(*flat, *(scalars[f] for f in SCALARS), *(ints[i] for i in INTS))
    return tail.ljust(size("attention_forward", dtype, maps) - maps * TENSOR_MAP_BYTES - _POINTERS.size, b"\0")


def pack(pointers: Sequence[int], tail: bytes) -> bytes:
    """The struct: addresses in the order of ``TENSORS`` and ``SCRATCH``, 0 where absent, before the cached ``tail``."""
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


def pack_softmax(pointers: Sequence[int], steps: Sequence[int], ints: Sequence[int]) -> bytes:
    """The softmax kernels' struct: addresses of x, y, row_max and row_sum, 0 where absent; the three batch strides of
    x, y and the statistics, the steps along a row of x and y, its length; extents, lanes, band."""
    return _SOFTMAX.pack(*pointers, *steps, *ints)


def static_asserts(dtype: str, maps: int = 0) -> str:
    """C++ that fails to compile unless the struct of params.cuh, and the one with tensor maps, have this layout."""
    offset, lines = 0, []
    fields = [(name, 8) for name in (*TENSORS, *SCRATCH)] + [
        (f"{name}_stride", 8 * STRIDES_PER_TENSOR) for name in TENSORS
    ]
    fields += [(name, struct.calcsize(_scalar(dtype))) for name in SCALARS] + [(name, 4) for name in INTS]
    for name, nbytes in fields:
        lines.append(f"static_assert(CUFLASH_OFFSETOF({name}) == {offset});")
        offset += nbytes
    asserts = "\n".join(lines)
    sizes = (
        f"static_assert(sizeof(Params) == {size('attention_forward', dtype)} && sizeof(MergeParams) == {MERGE_SIZE});"
    )
    if maps:
        before, whole = maps * TENSOR_MAP_BYTES, size("attention_forward", dtype, maps)
        sizes += (
            f"\nstatic_assert(__INTADDR__(&(((TmaParams*)0)->params)) == {before} && sizeof(TmaParams) == {whole});"
        )
    constants = f"static_assert(kMergeParts == {MERGE_PARTS} && kRowPadding == {ROW_PADDING});"
    # NVRTC has no offsetof; this is the operator its front end defines offsetof with.
    offsetof = "#define CUFLASH_OFFSETOF(field) __INTADDR__(&(((Params*)0)->field))"
    return f"{offsetof}\nnamespace cuflash {{\n{asserts}\n{sizes}\n{constants}\n}}\n"
