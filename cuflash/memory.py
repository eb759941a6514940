"""Where the arrays of a call lie, as kernels see it: strides in elements, batch axes coalesced, scratch memory.

Pure functions of shapes, strides and alignment; nothing here knows a GPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from cuflash import params, tiles
from cuflash.problem import Problem

MAX_BATCH_AXES = 3
Strides = tuple[int, ...]


class Axes(NamedTuple):
    """Coalesced batch axes: their extents, and each array's strides on them, in elements."""

    extents: tuple[int, int, int]
    strides: dict[str, tuple[int, int, int]]


class Layout(NamedTuple):
    extents: tuple[int, int, int]
    strides: dict[str, Strides]
    """Three batch strides, row, column, in elements, of each array that is there."""
    lengths: dict[str, tuple[int, int]]
    """Length of the row axis and of the column axis."""


_VECTORS = ("key_bias", "lse", "dlse", "dkey_bias")
"""Arrays of accumulation dtype with a row axis and no column axis."""


PLANES = ("q_planes", "k_planes", "v_planes")
"""Arrays of the workspace: q, k and v in 16-bit planes."""


def batch_and_strides(problem: Problem, name: str) -> tuple[Strides, Strides]:
    """Batch shape of q, k, v or key_bias, and the array's strides in bytes; both empty where it is absent."""
    prefix = "bias" if name == "key_bias" else name
    return getattr(problem, f"{prefix}_batch") or (), getattr(problem, f"{prefix}_strides") or ()


def own_batch(problem: Problem, name: str) -> Strides:
    """Batch shape of q, k, v or key_bias with 1 where an axis is a view of the same rows again and again."""
    batch, strides = batch_and_strides(problem, name)
    return tuple(1 if stride == 0 else extent for extent, stride in zip(batch, strides, strict=False))


def plane_pitch(cols: int) -> int:
    """Elements from row to row of a plane: whole 16 bytes."""
    return -(-cols // 8) * 8


class Sums(NamedTuple):
    """What a kernel for all gradients keeps of dq, at a batch position of q."""

    elements: int
    row: int
    """Elements from row to row."""
    turns: int
    """Records of whose turn it is."""


def fused_sums(m: int, tile: tiles.Tile) -> Sums:
    """Of the portable families: rows in tiles of 16, counts in fours."""
    return Sums(-(-m // 16) * 16 * tile.head_dim, tile.head_dim, -(-m // (4 * tile.block_m)) * 4)


def layout_of(
    problem: Problem, given: Mapping[str, Strides | None], sums: Sums | None = None, planes: bool = False
) -> Layout:
    """Batch axes coalesced over all arrays of the call, workspace included; strides in elements."""
    m, n, d, e = problem.m, problem.n, problem.d, problem.e
    lengths = {"q": (m, d), "k": (n, d), "v": (n, e), "o": (m, e), "key_bias": (n, 1), "lse": (m, 1)}
    lengths |= {f"d{name}": pair for name, pair in lengths.items()} | {"dout": (m, e)}
    shapes = {"q": problem.q_batch, "k": problem.k_batch, "v": problem.v_batch, "key_bias": problem.bias_batch}
    shapes |= {f"d{name}": shape for name, shape in shapes.items()}
    batch_strides: dict[str, Strides] = {}
    core_strides: dict[str, Strides] = {}
    for name, strides in given.items():
        if strides is not None:
            shape = shapes.get(name, problem.inner_batch) or ()
            itemsize = tiles.accumulator_bytes(problem.dtype) if name in _VECTORS else tiles.ITEMSIZE[problem.dtype]
            batch_strides[name] = _batch_strides(problem, shape, strides[: len(shape)], itemsize)
            core_strides[name] = tuple(elements(s, itemsize) for s in (*strides[len(shape) :], 0)[:2])
    for name in ("row_lse", "delta"):
        batch_strides[name], core_strides[name] = _contiguous(problem, problem.inner_batch, padded_rows(m)), (1, 0)
    if sums and "dq" in batch_strides:
        batch_strides["dq_accum"] = _contiguous(problem, problem.q_batch, sums.elements)
        batch_strides["dq_turn"] = _contiguous(problem, problem.q_batch, sums.turns)
        core_strides["dq_accum"], core_strides["dq_turn"] = (sums.row, 0), (1, 0)
    for name in (name for name in PLANES if planes and name[0] in batch_strides):
        rows, cols = lengths[name] = lengths[name[0]]
        pitch, shape = plane_pitch(cols), own_batch(problem, name[0])
        batch_strides[name], core_strides[name] = _contiguous(problem, shape, rows * pitch), (pitch, 1)
    axes = coalesce(problem.inner_batch, batch_strides)
    return Layout(axes.extents, {name: axes.strides[name] + core_strides[name] for name in batch_strides}, lengths)


def _contiguous(problem: Problem, shape: Sequence[int], count: int) -> Strides:
    """Batch strides of a workspace array of ``shape`` in C order with ``count`` elements for each batch."""
    strides: list[int] = []
    for extent in reversed(shape):
        strides.insert(0, count)
        count *= extent
    return _batch_strides(problem, shape, strides, 1)


def elements(stride: int, itemsize: int) -> int:
    if stride % itemsize:
        raise NotImplementedError(
            f"kernels step by whole elements; a stride of {stride} bytes is not a multiple of {itemsize}: copy it"
        )
    return stride // itemsize


def _batch_strides(problem: Problem, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Strides:
    """Strides, in elements, on every axis of the inner batch; 0 where the array is broadcast."""
    missing = len(problem.inner_batch) - len(shape)
    own = (0 if length == 1 else elements(s, itemsize) for length, s in zip(shape, strides, strict=True))
    return (0,) * missing + tuple(own)


def coalesce(shape: Sequence[int], strides: Mapping[str, Strides]) -> Axes:
    """Merge each two batch axes that all arrays step through as one, in whichever order."""
    keep = [i for i, length in enumerate(shape) if length != 1]
    axes = [(shape[i], {name: s[i] for name, s in strides.items()}) for i in keep]
    merged = True
    while merged:
        merged = False
        for outer in range(len(axes)):
            for inner in range(len(axes)):
                length, steps = axes[inner]
                if outer != inner and all(axes[outer][1][name] == length * step for name, step in steps.items()):
                    axes[inner] = (length * axes[outer][0], steps)
                    del axes[outer]
                    merged = True
                    break
            if merged:
                break
    if len(axes) > MAX_BATCH_AXES:
        raise NotImplementedError(
            f"batch axes of lengths {[length for length, _ in axes]} step through memory in {len(axes)} independent "
            f"ways, kernels follow {MAX_BATCH_AXES}: make an array contiguous, or call once for each index of an axis"
        )
    nothing = (1, dict.fromkeys(strides, 0))
    axes = [nothing] * (MAX_BATCH_AXES - len(axes)) + axes
    extents = (axes[0][0], axes[1][0], axes[2][0])
    return Axes(extents, {name: (axes[0][1][name], axes[1][1][name], axes[2][1][name]) for name in strides})


def load_kind(dtype: str, layout: Layout, names: Iterable[str], bits: int) -> str:
    """The widest load that every row of every array allows; ``bits`` are the low bits of their addresses."""
    itemsize = tiles.ITEMSIZE[dtype]
    for name in names:
        if name not in layout.strides:
            continue
        *batch, row, col = layout.strides[name]
        rows, cols = layout.lengths[name]
        if col != 1 and cols > 1:
            return "strided"
        bits |= itemsize * (row if rows > 1 else 0)
        for stride, extent in zip(batch, layout.extents, strict=True):
            bits |= itemsize * stride if extent > 1 else 0
    return next((load for load in tiles.loads(dtype)[:-1] if bits % int(load) == 0), "strided")


def summed_axes(layout: Layout, name: str) -> tuple[int, ...]:
    """Batch axes on which the input of a gradient was broadcast: the gradient has nothing to step to there."""
    return tuple(i for i in range(MAX_BATCH_AXES) if layout.extents[i] > 1 and layout.strides[name][i] == 0)


def padded_rows(m: int) -> int:
    return -(-m // params.ROW_PADDING) * params.ROW_PADDING


class Workspace(NamedTuple):
    """Where the parts of the scratch memory begin, from a multiple of 16, and its size."""

    delta: int
    dq_accum: int
    dq_turn: int
    claims: int
    nbytes: int


@lru_cache(maxsize=4096)
def workspace_of(problem: Problem, sums: Sums | None) -> Workspace:
    """``sums``: of the portable kernel for all gradients, None where there is none."""
    accumulator, q_batch, rows = tiles.accumulator_bytes(problem.dtype), math.prod(problem.q_batch), row_nbytes(problem)
    elements = turns = claims = 0  # zeroed before each call, in one piece
    if sums:
        elements, turns, claims = accumulator * q_batch * sums.elements, 4 * q_batch * sums.turns, 16
    delta, accum, turn, claim, end = itertools.accumulate((rows, rows, elements, turns, claims))
    return Workspace(delta, accum, turn, claim, end + 16)  # the caller's memory may start anywhere


def row_nbytes(problem: Problem) -> int:
    """Of row_lse or delta."""
    return tiles.accumulator_bytes(problem.dtype) * math.prod(problem.inner_batch) * padded_rows(problem.m)
