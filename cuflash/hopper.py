"""Forward and backward of the sm90 family: which problems they take, how they share them out, their tensor maps and
scratch memory.

Pure functions of shapes and strides; nothing here knows a GPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

from cuflash import memory, params, tiles, tma
from cuflash.problem import Problem

SECTION_BYTES = 16 << 20
"""Of K and V of a section of heads: what the L2 of an H200 keeps while others pass through."""

BACKWARD_SECTION_BYTES = 24 << 20
"""Of q, do and sums of dq of a section of heads in the backward, likewise."""

LAST_SECTION_TILES = 3
"""Of the last section, for each multiprocessor, where tiles differ in length: a smaller one would end with long tiles.
With 32 heads of 3 MB, a last section of two heads was 10 percent behind; with 8 of 64 heads for keys, the backward 35
percent. But at most twice as many positions as the L2 holds: 99 heads of 512 kB for 32 cost the forward 6 percent."""

WORTH_SHARES = 16
"""Steps of a block of keys, in the mean, from which on CTAs share sums of dk and dv: a part of these costs about as
much as dq of one or two steps."""

LAST_TILES, LAST_TILE_PARTS = 16, 4
"""So many of the last tiles of the kernel for all gradients are taken in so many parts, where they are long. Whole ones
would leave most CTAs idle: with 2112 tiles for 132 CTAs one of 131 CTAs that are done takes the last tile of one that
is late. With twice as many tiles, or half the parts, nothing was faster, nor with parts where some half of all CTAs
have one tile more than others."""

WORTH_PARTS = 32
"""Likewise, to take the last tiles in parts."""

KEY_BLOCKS_APART = 16
"""Blocks of keys from which on CTAs that are at one head together are seldom at the same rows of dq. Then a head is
taken after the other, which is 2 percent faster at 128 features, 10 with four query heads for each of keys; with 4
blocks of 64 features it is 10 percent slower."""

PLANE_ROWS = 8
"""Of a warp of the kernel that makes planes, as attention_planes.cu has it."""

WORTH_PLANES = 170
"""Scores for each row of q, k and v from which on planes, or copies, save more time than it costs to make them."""

CLAIMS_NBYTES = 16
"""Of the count of claimed tiles, and what keeps others away from it; of gradients also `CAREFUL_AT`."""

WARPGROUP_ROWS = 64
"""Of the products of a warpgroup."""

NARROW_PLANES = 16
"""Features up to which planes do not pay: their tiles have 64 columns, the portable family has one of 16. A head of
16384 with 16 features took 0.55 clocks a score and SM, there 0.38."""


CAPS = 1e20
"""Caps up to which, and from the inverse of which on, a scale over the cap and their other combinations are far from
the ends of float32."""


class Sections(NamedTuple):
    """Batch positions whose tiles CTAs take together, longest first: of each section, and of the last at least."""

    each: int
    last: int


SINGLY = Sections(1, 1)


class Forward(NamedTuple):
    """How the kernel takes a problem."""

    tile: tiles.Tile
    plain: bool
    planes: int
    tiles: int
    """Of query rows, over the whole batch."""
    sections: Sections
    copies: bool
    """Whether q, k and v are copied first: the copy engine cannot follow the strides of one of them. Where it is an
    address, the portable family serves."""
    claims: bool
    """Whether CTAs claim tiles as they become free: where tiles differ in length, and there are more than CTAs."""


class Scratch(NamedTuple):
    """Where the parts of the scratch memory begin, from a multiple of 16, and its size: 0 where none is needed."""

    q: int
    """Planes, or a copy."""
    k: int
    v: int
    key_bias: int
    """Room for a copy."""
    claims: int
    nbytes: int


class KeyShares(NamedTuple):
    """Sums of dk and dv that CTAs share."""

    by_position: bool
    """Whether each CTA has one of the batch positions that read the same keys."""
    tiles: int
    """The last of all, of which CTAs have parts of the query rows."""
    sums: int


NO_SHARES = KeyShares(False, 0, 0)


class Backward(NamedTuple):
    """How the kernel for all gradients, or that for all but dq, takes a problem."""

    tile: tiles.Tile
    sums: memory.Sums | None
    """Of dq, where it is asked for."""
    takes_terms: bool
    """Whether products take off lse and delta (row_terms_sm90.cuh)."""
    in_order: bool
    """Whether sums of dq have an order: there is no kernel for score terms without one."""
    shares: KeyShares


class SplitBackward(NamedTuple):
    """How the kernels for dq alone, and for dk and dv, take a problem: their tiles, None where one has none."""

    dq: tiles.Tile | None
    dkv: tiles.Tile | None


class BackwardScratch(NamedTuple):
    """Where the parts of the scratch memory of a backward begin, from a multiple of 16, and its size."""

    row_lse: int
    delta: int
    row_terms: int
    """Of the kernel for all gradients, where its products take off lse and delta."""
    partials: int
    """Of dkey_bias, at each batch position."""
    dq_accum: int
    counts: int
    nbytes: int
    counts_nbytes: int
    """Of claims, with `CAREFUL_AT` beside them, and from `CLAIMS_NBYTES` on of turns."""


class Map(NamedTuple):
    """A tensor map but for the address: that of an array of ``params.TENSORS``, so many bytes on."""

    tensor: int
    offset: int
    box: tma.Box | None
    encode: Callable[[int], bytes]
    """From an address to the map, those of late kept."""


NO_MAP = Map(0, 0, None, lambda address: bytes(params.TENSOR_MAP_BYTES))
"""Of an array that is not there, or not for the copy engine."""


@lru_cache(maxsize=4096)
def forward(problem: Problem, multiprocessors: int, plain: bool) -> Forward | None:
    """None where another kernel serves a problem better. ``plain``: it takes a variant without score terms."""
    if not _has_usual_cap(problem):
        return None
    scores = _scores(problem)
    features, keys = max(problem.d, problem.e), scores / problem.m
    capped = problem.softcap is not None
    tile = tiles.sm90_forward(problem.dtype, problem.precision, features, keys, problem.has_value, capped)
    if tile is None:
        return None
    planes = params.planes(problem.dtype, problem.precision)
    if planes > 1 and features <= NARROW_PLANES:
        return None
    copies = planes == 1 and not all(follows(problem, name) for name in operands(problem))
    if (planes > 1 or copies) and scores < WORTH_PLANES * (problem.m + 2 * problem.n):
        return None
    batch = math.prod(problem.inner_batch)
    count = -(-problem.m // tile.block_m) * batch
    if count > params.MAX_INT - multiprocessors:  # CTAs claim as many numbers after the last tile's
        return None
    uneven = _is_uneven(problem)
    nbytes = 2 * planes * problem.n * (problem.d + problem.e)
    held = SECTION_BYTES // nbytes if uneven else 1
    sections = _sections(batch, held, -(-problem.m // tile.block_m), multiprocessors, uneven)
    return Forward(tile, plain, planes, count, sections, copies, uneven and count > multiprocessors)


def _sections(positions: int, held: int, tiles_of_each: int, multiprocessors: int, uneven: bool) -> Sections:
    """Of so many batch positions, of which the L2 holds some at once. ``uneven``: their tiles differ in length."""
    each = max(1, min(held, positions))
    least = min(-(-LAST_SECTION_TILES * multiprocessors // tiles_of_each), 2 * each) if uneven else 0
    return Sections(each, min(positions, max(each, least)))


def _has_usual_cap(problem: Problem) -> bool:
    cap = problem.softcap
    return cap is None or (1 / CAPS < cap < CAPS and abs(problem.scale) < CAPS * cap)


def operands(problem: Problem) -> str:
    """The arrays that come in tiles."""
    return "qkv" if problem.has_value else "qk"


def _rows(problem: Problem, name: str) -> tuple[tuple[int, ...], int, int]:
    """Of q, k, v or key_bias: lengths of the axes after the batch axes, bytes of an element, and bytes from row to row
    of a copy."""
    if name == "key_bias":
        lengths: tuple[int, ...] = (problem.n,)
        itemsize = tiles.accumulator_bytes(problem.dtype)
    else:
        lengths = (problem.m if name == "q" else problem.n, problem.e if name == "v" else problem.d)
        itemsize = tiles.ITEMSIZE[problem.dtype]
    return lengths, itemsize, tma.aligned(lengths[-1] * itemsize)


@lru_cache(maxsize=4096)
def follows(problem: Problem, name: str) -> bool:
    """Whether the copy engine can follow the strides of q, k, v or key_bias."""
    batch, strides = memory.batch_and_strides(problem, name)
    lengths, itemsize, pitch = _rows(problem, name)
    if name == "key_bias" and pitch != lengths[-1] * itemsize:  # it brings whole 16 bytes
        return False
    if lengths[-1] > 1 and strides[-1] != itemsize:
        return False
    steps = [step for length, step in zip(batch, strides, strict=False) if length > 1 and step != 0]
    steps += [step for length, step in zip(lengths[:-1], strides[len(batch) : -1], strict=True) if length > 1]
    return all(0 < step < tma.MAX_STRIDE and step % tma.ALIGNMENT == 0 for step in steps)


@lru_cache(maxsize=4096)
def with_copies(problem: Problem, names: tuple[str, ...]) -> Problem:
    """The problem of copies of some of the arrays, which the copy engine can follow: their rows begin at whole 16
    bytes, and they are there once where batch axes are broadcast."""
    changed: dict[str, Any] = {}
    for name in names:
        lengths, itemsize, step = _rows(problem, name)
        strides = [itemsize]
        for length in lengths[-2::-1]:
            strides.insert(0, step)
            step *= length
        batch, _ = memory.batch_and_strides(problem, name)
        for length, own in zip(batch[::-1], memory.own_batch(problem, name)[::-1], strict=True):
            strides.insert(0, step if own == length else 0)
            step *= own
        changed["bias_strides" if name == "key_bias" else f"{name}_strides"] = tuple(strides)
    return replace(problem, **changed)


def _scores(problem: Problem) -> int:
    """Pairs of a row and a key that it sees."""

    def keys_before(shift: int) -> int:
        """How many keys come before key i + shift, summed over the rows i."""
        some, all_of = (min(problem.m, max(0, edge - shift)) for edge in (0, problem.n))
        return (all_of - some) * (some + all_of - 1 + 2 * shift) // 2 + (problem.m - all_of) * problem.n

    return max(0, keys_before(problem.band.hi + 1) - keys_before(problem.band.lo))


@lru_cache(maxsize=4096)
def scratch(problem: Problem, taken: Forward) -> Scratch:
    """Scratch memory of a call. Claims are counted there by calls that may overlap others of their stream."""
    q = k = v = bias = 0
    if taken.planes > 1 or taken.copies:
        q, k, v = (taken.planes * _plane_nbytes(problem, name) for name in "qkv")
    if problem.has_key_bias:
        bias = math.prod(memory.own_batch(problem, "key_bias")) * _rows(problem, "key_bias")[2]
    parts = (q, k, v, bias, CLAIMS_NBYTES if taken.claims else 0)
    k, v, bias, claims, end = itertools.accumulate(parts)
    return Scratch(0, k, v, bias, claims, end + 16 if end else 0)  # the caller's memory may start anywhere


def plane_warps(problem: Problem) -> int:
    """Warps of the kernel that makes planes: each takes some rows of one array."""
    q, k, v = (_own_count(problem, name) for name in "qkv")
    return q * -(-problem.m // PLANE_ROWS) + (k + v) * -(-problem.n // PLANE_ROWS)


def _plane_nbytes(problem: Problem, name: str) -> int:
    """Of one plane of q, k or v, which may be absent: a multiple of 16."""
    rows, cols = problem.m if name == "q" else problem.n, problem.e if name == "v" else problem.d
    return 2 * _own_count(problem, name) * rows * memory.plane_pitch(cols)


def _own_count(problem: Problem, name: str) -> int:
    """Batch positions at which q, k or v has memory of its own, none of a v that is absent."""
    return math.prod(memory.own_batch(problem, name)) if name != "v" or problem.has_value else 0


def maps(problem: Problem, layout: memory.Layout, taken: Forward) -> tuple[Map, ...] | None:
    """The maps of q, k and v in the kernel's order, None where the copy engine cannot follow an array."""
    found = []
    for name in operands(problem):
        tensor, dtype = (f"{name}_planes", "bfloat16") if taken.planes > 1 else (name, problem.dtype)
        rows = taken.tile.q_rows if name == "q" else taken.tile.block_n
        box = tma.box(dtype, layout.lengths[tensor], layout.extents, layout.strides[tensor], rows)
        if box is None:
            return None
        nbytes = _plane_nbytes(problem, name)
        found += [_map(tensor, plane * nbytes, box) for plane in range(taken.planes)]
    return tuple(found + [NO_MAP] * (3 * taken.planes - len(found)))


def output_map(problem: Problem, layout: memory.Layout) -> Map | None:
    """The map of o, by the rows of a warpgroup, None where the copy engine cannot follow it: where a row ends within
    16 bytes it writes all of them, what is beyond the row included."""
    if problem.e * tiles.ITEMSIZE[problem.dtype] % tma.ALIGNMENT:
        return None
    box = tma.box(problem.dtype, layout.lengths["o"], layout.extents, layout.strides["o"], WARPGROUP_ROWS)
    return None if box is None else _map("o", 0, box)


def _map(tensor: str, offset: int, box: tma.Box) -> Map:
    return Map(params.TENSORS.index(tensor), offset, box, lru_cache(maxsize=256)(partial(tma.encode, box)))


DELTA_ROWS = 64
"""Of a CTA of attention_delta_sm90.cu."""

CAREFUL_AT = 4
"""Where in the counters the kernel for all gradients finds whether some row needs care (row_terms_sm90.cuh)."""

ROW_TERMS_NBYTES = 16
"""Of a row, as row_terms_sm90.cuh has it."""

TURN_NBYTES = 8
"""Of the record of a block of query rows, as dq_turns_sm90.cuh has it."""


@lru_cache(maxsize=4096)
def backward(problem: Problem, multiprocessors: int, plain: bool = True, needs_dq: bool = True) -> Backward | None:
    """None where another kernel serves. The problem has values. ``plain``: as in `forward`."""
    tile = tiles.sm90_backward(problem.dtype, max(problem.d, problem.e), needs_dq)
    if tile is None or not _has_usual_cap(problem) or not all(follows(problem, name) for name in operands(problem)):
        return None
    batch, key_blocks = math.prod(problem.inner_batch), -(-problem.n // tile.block_n)
    blocks = -(-problem.m // tile.block_m)
    if batch * max(key_blocks, blocks) > params.MAX_INT // 4 or math.prod(problem.q_batch) != batch:
        return None
    if not needs_dq:
        return Backward(tile, None, False, False, NO_SHARES)
    sums = memory.Sums(blocks * tile.block_m * tile.head_dim, tile.head_dim, blocks)
    in_order = problem.deterministic or not plain
    shares = _key_shares(problem, tile, in_order, multiprocessors)
    return Backward(tile, sums, plain and tile.block_m == 64, in_order, shares)


@lru_cache(maxsize=4096)
def split_backward(problem: Problem, plain: bool = True) -> SplitBackward | None:
    """None where other kernels serve. The problem has values. ``plain``: as in `forward`."""
    dtype, d, e = problem.dtype, problem.d, problem.e
    dq, dkv = tiles.sm90_backward_dq(dtype, d, e, plain), tiles.sm90_backward_dkv(dtype, d, e)
    if not (dq or dkv) or not _has_usual_cap(problem):
        return None
    if not all(follows(problem, name) for name in operands(problem)):
        return None
    if math.prod(problem.inner_batch) * -(-max(problem.m, problem.n) // WARPGROUP_ROWS) > params.MAX_INT // 2:
        return None
    return SplitBackward(dq, dkv)


@lru_cache(maxsize=4096)
def backward_scratch(problem: Problem, whole: Backward | None = None) -> BackwardScratch:
    """``whole``: how the kernel for all gradients takes it, where it does. Counts are there for calls that may overlap
    others of their stream."""
    rows, q_batch = memory.row_nbytes(problem), math.prod(problem.q_batch)
    bias = 4 * math.prod(problem.inner_batch) * problem.n if problem.has_key_bias else 0
    sums = 0
    if whole and whole.sums:
        sums = q_batch * whole.sums.turns + whole.shares.sums
    sums_nbytes = 4 * sums * whole.tile.block_m * whole.tile.head_dim if whole else 0
    counts = CLAIMS_NBYTES + TURN_NBYTES * sums
    row_terms = ROW_TERMS_NBYTES // 4 * rows if whole and whole.takes_terms else 0
    parts = (rows, rows, row_terms, -(-bias // 16) * 16, sums_nbytes, counts)
    delta, terms_at, partials, accum, counts_at, end = itertools.accumulate(parts)
    return BackwardScratch(0, delta, terms_at, partials, accum, counts_at, end + 16, counts)


def _key_shares(problem: Problem, tile: tiles.Tile, in_order: bool, multiprocessors: int) -> KeyShares:
    """Under a band, a CTA with all query heads that read the same keys would be left with the longest of few blocks in
    the end, and CTAs would be at more heads at once than the L2 holds. In an order, tiles that differ in length come
    shortest first (`dqkv_sections`): the last ones are the longest."""
    owned, positions = math.prod(problem.k_batch), math.prod(problem.inner_batch)
    count = owned * -(-problem.n // tile.block_n)
    uneven, scores_of_step = _is_uneven(problem), problem.n * tile.block_m
    sums = 2 * (tile.block_n // tile.block_m)  # of a block of keys: as large as those of a block of query rows
    if owned != positions:
        worth = uneven and _scores(problem) >= WORTH_SHARES * scores_of_step
        return KeyShares(True, 0, count * sums) if worth else NO_SHARES
    ends_late = in_order or (not uneven and 4 * (count % multiprocessors) < multiprocessors)
    worth = count > multiprocessors and ends_late and _scores(problem) >= WORTH_PARTS * scores_of_step
    if problem.has_key_bias:  # CTAs sum its gradient over query rows each by itself
        return NO_SHARES
    split = min(LAST_TILES, count)
    return KeyShares(False, split, split * sums) if worth else NO_SHARES


def backward_maps(problem: Problem, layout: memory.Layout, taken: Backward) -> tuple[Map, ...] | None:
    """The maps of q, k, v, do, dk and dv in the kernel's order, of a gradient none where it is not asked for; None
    where the copy engine cannot follow an array."""
    itemsize = tiles.ITEMSIZE[problem.dtype]
    if problem.d * itemsize % tma.ALIGNMENT or problem.e * itemsize % tma.ALIGNMENT:
        return None  # as in `output_map`
    m, n = taken.tile.block_m, taken.tile.block_n
    return _maps_by_rows(problem, layout, {"q": m, "k": n, "v": n, "dout": m, "dk": n, "dv": n})


def split_maps(problem: Problem, layout: memory.Layout, tile: tiles.Tile) -> tuple[Map, ...] | None:
    """The maps of q, k, v and do in the order of the kernels for some of the gradients, likewise."""
    rows = {"q": WARPGROUP_ROWS, "k": tile.block_n, "v": tile.block_n, "dout": WARPGROUP_ROWS}
    return _maps_by_rows(problem, layout, rows)


def _maps_by_rows(problem: Problem, layout: memory.Layout, rows: Mapping[str, int]) -> tuple[Map, ...] | None:
    found = []
    for name, of_box in rows.items():
        if name not in layout.strides:
            found.append(NO_MAP)
            continue
        box = tma.box(problem.dtype, layout.lengths[name], layout.extents, layout.strides[name], of_box)
        if box is None:
            return None
        found.append(_map(name, 0, box))
    return tuple(found)


def dqkv_sections(problem: Problem, taken: Backward, owned: int, blocks: int, multiprocessors: int) -> Sections:
    """Of so many batch positions with so many blocks of keys each: what the kernel for all gradients takes together.
    Where its sums of dq have an order, blocks come by descending keys, which are the shortest first under a causal
    band, and all query heads of a group count: their sums of dq wait for one another."""
    nbytes = problem.m * (2 * (problem.d + problem.e) + 4 * taken.tile.head_dim)
    batch, uneven = math.prod(problem.inner_batch), _is_uneven(problem)
    if taken.in_order:
        held = BACKWARD_SECTION_BYTES // (nbytes * max(1, batch // owned))
    else:
        held = BACKWARD_SECTION_BYTES // nbytes if uneven or blocks < KEY_BLOCKS_APART else 1
    if taken.shares.by_position:
        held = _whole_groups(held, batch // math.prod(problem.k_batch))
    return _sections(owned, held, blocks, multiprocessors, uneven and not taken.in_order)


def _whole_groups(held: int, group: int) -> int:
    """Of so many positions that the L2 holds as many as make whole groups, or a whole part of one."""
    if held >= group:
        return held - held % group
    return max(count for count in range(1, max(1, held) + 1) if group % count == 0)


def dq_sections(problem: Problem, owned: int, blocks: int, multiprocessors: int) -> Sections:
    """Likewise for the kernel for dq alone, with so many tiles of rows each, as in the forward."""
    uneven = _is_uneven(problem)
    nbytes = tiles.ITEMSIZE[problem.dtype] * problem.n * (problem.d + problem.e)
    return _sections(owned, SECTION_BYTES // nbytes if uneven else 1, blocks, multiprocessors, uneven)


def dkv_sections(problem: Problem, owned: int, blocks: int, multiprocessors: int) -> Sections:
    """Likewise for the kernel for dk and dv, by q and do."""
    nbytes = tiles.ITEMSIZE[problem.dtype] * problem.m * (problem.d + problem.e)
    return _sections(owned, BACKWARD_SECTION_BYTES // nbytes, blocks, multiprocessors, _is_uneven(problem))


def _is_uneven(problem: Problem) -> bool:
    return _scores(problem) < problem.m * problem.n
