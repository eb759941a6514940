"""The forward for few features: which kernels can take a problem, and how each of them shares it out.

Pure functions of shapes, strides and alignment; nothing here knows a GPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from cuflash import memory, tiles
from cuflash.compile import Variant
from cuflash.problem import Problem

VECTOR_BYTES = 16
"""In which the kernels of the sm90 family take rows."""


LONGEST_CHAIN = 512
"""Keys, or tiles of them, that one sum may go over: longer chains of additions drift."""


class Few(NamedTuple):
    """A kernel and its share-out: into how many parts the warps of a CTA split the keys, into how many blocks the rows
    of a batch position fall then, and into how many parts the grid splits the keys."""

    variant: Variant
    key_warps: int
    row_blocks: int
    splits: int

    @property
    def merges(self) -> bool:
        """Whether the kernel merges what splits leave: another one would take longer to start than a single row to
        merge. More rows are for many CTAs."""
        return self.variant.operation == tiles.ONE_QUERY


class Scratch(NamedTuple):
    """Where what splits leave begins, from a multiple of 16, behind counts; and the size: 0 where none is needed."""

    split_rows: int
    nbytes: int


@lru_cache(maxsize=4096)
def forwards(problem: Problem, target: str, family: str, hopper: bool, multiprocessors: int) -> tuple[Few, ...]:
    """Kernels for a problem, best first: those of the sm90 family take what `takes` says, that of ``family``, the last,
    any strides. Where it is missing, the forward for any number of features serves what the others do not take."""
    dtype = problem.dtype
    if problem.softcap is not None:
        return ()
    found = []
    d = tiles.bucket(tiles.NARROW, dtype, "strided", target, family, max(problem.d, problem.e))
    # For more features tensor cores are better at tf32, of which they take one product, not three.
    worth = d is not None or problem.precision is None
    if hopper and worth and (problem.d == problem.e or not problem.has_value):
        operations = (tiles.ONE_QUERY,) if problem.m == 1 else (tiles.LANES, tiles.NARROW, tiles.NARROW_F64)
        quick = [tiles.sm90_few(operation, dtype, problem.d) for operation in operations]
        found = [_shared_out(problem, variant, multiprocessors) for variant in quick if variant is not None]
    if d is not None:
        variant = tiles.variant(tiles.NARROW, dtype, d, "strided", False, target, family)
        found.append(_shared_out(problem, variant, multiprocessors))
    return tuple([few for few in found if few is not None])


def _shared_out(problem: Problem, variant: Variant, multiprocessors: int) -> Few | None:
    """None where the kernel would leave the better part of the device idle, or of a warp's rows."""
    tile, batch = variant.tile, math.prod(problem.inner_batch)
    slots = tiles.resident(variant.smem_bytes, tile, variant.target) * multiprocessors
    if variant.operation == tiles.ONE_QUERY:
        keys = 32 * tile.warps * VECTOR_BYTES // _alignment(problem)  # that the warps of a CTA take at once
        least = -(-problem.n // (32 * tile.warps * LONGEST_CHAIN))
        return Few(variant, 1, 1, max(1, min(max(slots // batch, least), -(-problem.n // keys), 1024)))
    if variant.operation == tiles.LANES:
        if problem.m < tile.block_m // tile.warps:
            return None
        lanes = _lanes_shared_out(problem, variant, slots)
        return lanes if 2 * lanes.row_blocks * batch * lanes.splits >= multiprocessors else None
    key_warps = tiles.key_warps(tile, variant.operation, problem.dtype, problem.m)
    row_blocks = -(-problem.m // (tile.block_m // key_warps))
    splits = tiles.splits(row_blocks * batch, -(-problem.n // tile.block_n), slots)
    return Few(variant, key_warps, row_blocks, splits)


def _lanes_shared_out(problem: Problem, variant: Variant, slots: int) -> Few:
    """What seems to be done first where each of ``slots`` works on one CTA at a time, those with most keys first."""
    tile, batch = variant.tile, math.prod(problem.inner_batch)
    choices = []
    for key_warps in (1 << i for i in range(tile.warps.bit_length())):
        rows = tile.block_m // key_warps
        lengths = _visible_tiles(problem, rows, tile.block_n)
        ctas, most = batch * len(lengths), int(lengths.max())
        least = min(max(1, -(-most // LONGEST_CHAIN)), 1024)
        splits = np.arange(least, max(least, min(most, -(-4 * slots // ctas), 1024)) + 1)
        waves, longest = -(-ctas * splits // slots), -(-most // splits)
        time = waves * longest
        if lengths.min() < most:
            mean = batch * lengths.sum() / slots
            time = np.where(waves == 1, longest, np.maximum(longest, mean + longest / 2))
        # Sums go to shared memory once for each part of a tile, parts begin with references, and are merged.
        cost = rows * time * (1 + 0.005 * key_warps + 0.004 * splits + 0.03 * (splits > 1))
        best = int(np.argmin(cost))
        choices.append((float(cost[best]), Few(variant, key_warps, len(lengths), int(splits[best]))))
    return min(choices, key=lambda choice: choice[0])[1]


def _visible_tiles(problem: Problem, rows: int, keys: int) -> np.ndarray:
    """Of so many keys, how many each block of so many rows sees anything of."""
    first = np.arange(0, problem.m, rows)
    begin = np.clip(first + problem.band.lo, 0, problem.n)
    end = np.clip(np.minimum(first + rows, problem.m) + problem.band.hi, 0, problem.n)
    return np.where(end > begin, -(-end // keys) - begin // keys, 0)


def _alignment(problem: Problem) -> int:
    """What the addresses of rows that lie one after the other have in common with vectors."""
    return math.gcd(VECTOR_BYTES, tiles.ITEMSIZE[problem.dtype] * problem.d)


def takes(few: Few, problem: Problem, layout: memory.Layout, bits: Sequence[int]) -> bool:
    """Whether a kernel can follow the arrays; ``bits``: of the addresses of k, v and key_bias those below 16."""
    if few.variant.family != "sm90":
        return True
    itemsize = tiles.ITEMSIZE[problem.dtype]
    offsets = []  # of vectors, by array: of the first row, and from one batch position to the next
    for name, own in zip(("k", "v"), bits, strict=False):
        if name not in layout.strides:
            continue
        *batch, row, col = layout.strides[name]
        if (row != problem.d and problem.n > 1) or (col != 1 and problem.d > 1):
            return False
        offsets.append([own, *_steps(batch, layout, itemsize)])
    if few.variant.operation == tiles.ONE_QUERY:
        return offsets[0] == offsets[-1] and all(x % _alignment(problem) == 0 for x in offsets[0])
    if problem.has_key_bias:
        *batch, row, _ = layout.strides["key_bias"]
        if row != 1 and problem.n > 1:
            return False
        offsets.append([bits[2], *_steps(batch, layout, tiles.accumulator_bytes(problem.dtype))])
    return not any(itertools.chain.from_iterable(offsets))


def _steps(batch: Sequence[int], layout: memory.Layout, itemsize: int) -> list[int]:
    pairs = zip(batch, layout.extents, strict=True)
    return [itemsize * stride % VECTOR_BYTES for stride, extent in pairs if extent > 1]


@lru_cache(maxsize=4096)
def scratch(problem: Problem, few: Few) -> Scratch:
    """Scratch memory of a call: where the grid splits the keys, what each split leaves of a row, which is a reference,
    a sum of p and the sums of p v. Before them, where the CTA that is last merges, a count for each batch position, for
    calls that may overlap others of their stream."""
    if few.splits == 1:
        return Scratch(0, 0)
    batch = math.prod(problem.inner_batch)
    claims = -(-4 * batch // 16) * 16 if few.merges else 0
    rows = tiles.accumulator_bytes(problem.dtype) * few.splits * batch * problem.m * (2 + problem.e)
    return Scratch(claims, claims + rows + 16)  # the caller's memory may start anywhere
