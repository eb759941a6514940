"""The forward of the sm90 family: which problems it takes, how it shares them out, its tensor maps and scratch memory.

Pure functions of shapes and strides; nothing here knows a GPU.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import NamedTuple

from cuflash import memory, params, tiles, tma
from cuflash.problem import Problem

SECTION_BYTES = 32 << 20
"""Of K and V that a section of heads may have: what the L2 of an H200 keeps while others pass through."""

PLANE_ROWS = 8
"""Of a warp of the kernel that makes planes, as attention_planes.cu has it."""

WORTH_PLANES = 170
"""Scores for each row of q, k and v from which on planes save more time than it costs to make them."""


SHORT_ROWS = 512
"""Keys of a row below which, at 64 features of 16 bits, a tile waits longer for its q than it computes: the portable
kernel has three CTAs to switch between, and is faster."""


class Forward(NamedTuple):
    """How the kernel takes a problem."""

    tile: tiles.Tile
    planes: int
    tiles: int
    """Of query rows, over the whole batch."""
    section: int
    """Batch positions whose tiles are taken together, longest first."""
    claims: bool
    """Whether CTAs claim tiles as they become free: where tiles differ in length, and there are more than CTAs."""


class Scratch(NamedTuple):
    """Where the parts of the scratch memory begin, from a multiple of 16, and its size: 0 where none is needed."""

    q_planes: int
    k_planes: int
    v_planes: int
    claims: int
    nbytes: int


class Map(NamedTuple):
    """A tensor map but for the address: that of an array of ``params.TENSORS``, so many bytes on."""

    tensor: int
    offset: int
    box: tma.Box


@lru_cache(maxsize=4096)
def forward(problem: Problem, multiprocessors: int) -> Forward | None:
    """None where another kernel serves a problem, which is one without score terms, better."""
    tile = tiles.sm90_forward(problem.dtype, problem.precision, max(problem.d, problem.e))
    if tile is None or not problem.has_value:
        return None
    planes = params.planes(problem.dtype, problem.precision)
    first, last = _keys_seen(problem, 0), _keys_seen(problem, problem.m - 1)
    mean = (first + _keys_seen(problem, problem.m // 2) + last) / 3
    if planes > 1 and problem.m * mean < WORTH_PLANES * (problem.m + 2 * problem.n):
        return None
    if planes == 1 and tile.head_dim == 64 and mean < SHORT_ROWS:
        return None
    count = -(-problem.m // tile.block_m) * math.prod(problem.inner_batch)
    uneven = first != last
    bytes_of_head = 2 * planes * problem.n * (problem.d + problem.e)
    section = max(1, SECTION_BYTES // bytes_of_head) if uneven else 1
    return Forward(tile, planes, count, section, uneven and count > multiprocessors)


def _keys_seen(problem: Problem, row: int) -> int:
    return max(0, min(problem.n - 1, row + problem.band.hi) - max(0, row + problem.band.lo) + 1)


def scratch(problem: Problem, taken: Forward) -> Scratch:
    """Scratch memory of a call."""
    q = k = v = 0
    if taken.planes > 1:
        q = taken.planes * _plane_nbytes(problem.q_batch, problem.m, problem.d)
        k = taken.planes * _plane_nbytes(problem.k_batch, problem.n, problem.d)
        v = taken.planes * _plane_nbytes(problem.v_batch or (), problem.n, problem.e)
    k_planes, v_planes, claims, end = itertools.accumulate((q, k, v, 16 if taken.claims else 0))
    return Scratch(0, k_planes, v_planes, claims, end + 16 if end else 0)  # the caller's memory may start anywhere


def plane_warps(problem: Problem) -> int:
    """Warps of the kernel that makes planes: each takes some rows of one array."""
    q, k, v = (math.prod(batch or ()) for batch in (problem.q_batch, problem.k_batch, problem.v_batch))
    return q * -(-problem.m // PLANE_ROWS) + (k + v) * -(-problem.n // PLANE_ROWS)


def _plane_nbytes(batch: tuple[int, ...], rows: int, cols: int) -> int:
    """A multiple of 16."""
    return 2 * math.prod(batch) * rows * memory.plane_pitch(cols)


def maps(problem: Problem, layout: memory.Layout, taken: Forward) -> tuple[Map, ...] | None:
    """The maps of q, k and v in the kernel's order, None where the copy engine cannot follow an array."""
    found = []
    batches = {"q": problem.q_batch, "k": problem.k_batch, "v": problem.v_batch or ()}
    for name, batch in batches.items():
        tensor, dtype = (f"{name}_planes", "bfloat16") if taken.planes > 1 else (name, problem.dtype)
        rows = taken.tile.block_m if name == "q" else taken.tile.block_n
        box = tma.box(dtype, layout.lengths[tensor], layout.extents, layout.strides[tensor], rows)
        if box is None:
            return None
        nbytes = _plane_nbytes(batch, *layout.lengths[tensor])
        found += [Map(params.TENSORS.index(tensor), plane * nbytes, box) for plane in range(taken.planes)]
    return tuple(found)
