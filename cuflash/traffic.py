"""Bytes between a GPU and its memory, by algorithm: a model that counts passes over arrays.

Attention reads q, k and v and writes o. All else that goes to and from memory is of the algorithm's own making: passes
over the matrix of scores, or passes over operands that a tile has to see again. A pass is counted whole, whatever
caches there are; what an L2 takes off is a choice of the caller's (``l2_bytes``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

from cuflash import lineage_tiles, tiles
from cuflash.problem import DTYPES, flag, integer

REFERENCE_TARGET = "90a"
"""Whose tiles stand for those that are not given: H100 and H200."""


class Traffic(TypedDict):
    """What `memory_traffic` returns, in bytes, over all heads but for ``score_matrix``."""

    reads: int
    writes: int
    score_matrix: int
    total: int


@dataclass(frozen=True)
class _Shape:
    """A problem in bytes, of one head."""

    m: int
    n: int
    block_m: int
    block_n: int
    causal: bool
    heads: int
    q: int
    k: int
    v: int
    o: int
    scores: int
    sums: int
    """o in the accumulation dtype."""
    statistics: int
    """The maximum and the sum of each row, in the accumulation dtype."""
    l2_bytes: int


class _Passes(NamedTuple):
    """Bytes read and written, of one head."""

    reads: int
    writes: int


def memory_traffic(
    algorithm: str,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    *,
    value_dim: int | None = None,
    heads: int = 1,
    dtype: str = "float16",
    block_m: int | None = None,
    block_n: int | None = None,
    causal: bool = False,
    l2_bytes: int = 0,
) -> Traffic:
    r"""Bytes that a forward pass reads from and writes to device memory.

    With m queries, n keys, d and e features, M x N tiles, and operands and sums of s and a bytes an element:

    ================ ============================================================ ===================================
    algorithm        reads                                                        writes
    ================ ============================================================ ===================================
    'standard'       q, k, v, and the matrix of scores twice                      the matrix twice, o
    'flash1'         k, v; for each of the n / N key tiles q, and for each but    o and the statistics for each key
                     the first o (a bytes an element), maximum and sum of a row   tile, the last time o in s bytes
    'cuflash'        q; for each of the m / M query tiles k and v                 o
    'safe_softmax'   the matrix three times                                       the matrix
    'online_softmax' the matrix twice                                             the matrix
    ================ ============================================================ ===================================

    The matrix is m n s bytes a head. The softmaxes are those of its rows, however they came about; 'standard' keeps a
    row on chip between its one load and its one store. With ``causal``, tiles that no row of theirs sees are left out
    of 'flash1', but for the first of a row, and of 'cuflash'; the others go over the whole matrix all the same.

    Parameters
    ----------
    algorithm : {'standard', 'flash1', 'cuflash', 'safe_softmax', 'online_softmax'}
        `lineage.standard_attention`, `lineage.flash1_attention`, `attention`, `lineage.safe_softmax` or
        `lineage.online_softmax`.
    seqlen_q, seqlen_k : int
        Lengths of q and k, m and n; at least 1.
    head_dim, value_dim : int
        Features of q and k, d, and of v, e, which are as many by default. The softmaxes have none: what is given makes
        no difference to them.
    heads : int
        How many heads, each with q, k and v of its own.
    dtype : {'float16', 'bfloat16', 'float32', 'float64'}
        Of q, k, v, o and the matrix. Sums are float32, float64 for float64.
    block_m, block_n : int, optional
        Query rows and keys of a tile; by default those of the kernels on compute capability 9.0. 'cuflash' uses M
        ('causal': N, too), 'flash1' N ('causal': M, too), the others neither.
    causal : bool
        Row i sees keys j <= i + n - m.
    l2_bytes : int
        Size of a cache between tiles and memory, 0 for none. It takes off what it can hold until it is wanted again:
        of 'cuflash' all readings of k and v but one, where those of a head fit; of 'flash1' all passes over q, o and
        statistics but one, where those of all heads fit, as all heads are worked on at a time; of 'standard' the
        readings of the matrix, where the matrices of all heads fit. The rows of a softmax are read again by whoever
        has just read them, which is caches' matter, and counted as asked for.

    Returns
    -------
    dict
        'reads', 'writes' and their sum 'total', in bytes, of all heads; 'score_matrix', the bytes of one head's m x n
        matrix, whether or not the algorithm makes one.

    Raises
    ------
    TypeError
        An argument of the wrong Python type.
    ValueError
        An unknown algorithm or dtype, a size below 1, or more features than the default tiles are for.

    Notes
    -----
    Not counted are lse; k and v for each further part where 'flash1' divides the rows of a head, and zeros that fill
    its o between passes up to 64, 128 or 256 features; and what float32 on compute capability 9.0 does before: q, k and
    v are split into 16-bit parts, of 6 bytes an element in place of 4, which are written once and read in their place.

    An L2 in two halves, each of which holds what its own side has read, has room for half of what all ask for; and some
    CTAs go on to the next head before others. So of 'cuflash' some of k and v is read again where those of two heads
    exceed half of ``l2_bytes``: on an H200 (60 MiB) 36 percent were added in float16 at 32768 tokens of 128 features.
    Of 'flash1' the L2 may keep part of what passes by.

    The count for standard attention and FlashAttention-1 is that of Dao et al., "FlashAttention: Fast and
    Memory-Efficient Exact Attention with IO-Awareness" (2022), Algorithms 0 and 1 and Theorem 2, with constants; that
    of the softmaxes is from Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), Algorithms 2
    and 3.

    Examples
    --------
    At 8192 tokens of 64 features in float16, the matrix of scores has 134 MB a head, and standard attention goes over
    it four times, 537 MB:

    >>> import cuflash
    >>> standard = cuflash.memory_traffic("standard", 8192, 8192, 64)
    >>> standard["score_matrix"], standard["total"] - 4 * 8192 * 64 * 2
    (134217728, 536870912)
    >>> ours = cuflash.memory_traffic("cuflash", 8192, 8192, 64, l2_bytes=60 * 2**20)
    >>> ours["total"]                                                    # q, k, v and o
    4194304
    """
    if not isinstance(algorithm, str):
        raise TypeError(f"algorithm must be a str, got {type(algorithm).__name__}")
    if algorithm not in _MODELS:
        raise ValueError(f"algorithm must be one of {', '.join(map(repr, _MODELS))}, got {algorithm!r}")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        kind = ValueError if isinstance(dtype, str) else TypeError
        raise kind(f"dtype must be one of {', '.join(map(repr, DTYPES))}, got {dtype!r}")
    m, n, d = (_size(*x) for x in (("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k), ("head_dim", head_dim)))
    e = d if value_dim is None else _size("value_dim", value_dim)
    heads = _size("heads", heads)
    causal, cache = flag("causal", causal), _size("l2_bytes", l2_bytes, least=0)
    rows, keys = _tile(algorithm, dtype, max(d, e), block_m, block_n)
    itemsize, accumulator = tiles.ITEMSIZE[dtype], tiles.accumulator_bytes(dtype)
    shape = _Shape(
        m, n, rows, keys, causal, heads, q=itemsize * m * d, k=itemsize * n * d, v=itemsize * n * e, o=itemsize * m * e,
        scores=itemsize * m * n, sums=accumulator * m * e, statistics=2 * accumulator * m, l2_bytes=cache,
    )  # fmt: skip
    passes = _MODELS[algorithm](shape)
    reads, writes = (heads * x for x in passes)
    return {"reads": reads, "writes": writes, "score_matrix": shape.scores, "total": reads + writes}


def _size(name: str, x: object, least: int = 1) -> int:
    value = integer(name, x, "an int")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return value


def _tile(algorithm: str, dtype: str, features: int, block_m: int | None, block_n: int | None) -> tuple[int, int]:
    """Sizes of a tile, those that are not given from the kernel's own."""
    rows = None if block_m is None else _size("block_m", block_m)
    keys = None if block_n is None else _size("block_n", block_n)
    if algorithm not in ("flash1", "cuflash"):
        return rows or 1, keys or 1
    if rows is None or keys is None:
        own = default_tile(algorithm, dtype, features)
        rows, keys = rows or own.block_m, keys or own.block_n
    return rows, keys


def default_tile(algorithm: str, dtype: str, features: int) -> tiles.Tile:
    """The tile of 'flash1' or 'cuflash' for so many features on compute capability 9.0; ValueError for too many."""
    if algorithm == "flash1":
        head_dim = lineage_tiles.bucket(features, dtype)
        if head_dim is not None:
            return lineage_tiles.flash1_forward(dtype, head_dim, REFERENCE_TARGET, "sm80")
    else:
        if row := tiles.sm90_forward(dtype, None, features):
            return row
        head_dim = tiles.bucket("attention_forward", dtype, "16", REFERENCE_TARGET, "sm80", features)
        if head_dim is not None:
            return tiles.tile("attention_forward", dtype, head_dim, "16", True, REFERENCE_TARGET, "sm80")
    raise ValueError(
        f"{algorithm!r} has no tile for {features} features (the larger of head_dim and value_dim) in {dtype}: "
        "give block_m and block_n"
    )


def _standard(x: _Shape) -> _Passes:
    again = 0 if x.heads * x.scores <= x.l2_bytes else 2
    return _Passes(x.q + x.k + x.v + again * x.scores, 2 * x.scores + x.o)


def _flash1(x: _Shape) -> _Passes:
    if x.heads * (x.q + x.sums + x.statistics) <= x.l2_bytes:
        return _Passes(x.q + x.k + x.v, x.o + x.statistics)
    # Rows that pass by key tiles, in all: those without keys by the first, too, where they get their zeros.
    passing = x.m * _key_tiles(x)
    if x.causal:
        tiles_seen, _, blind = _seen(x)
        passing = (tiles_seen - _key_tiles(x) + blind) * x.block_m + _last_rows(x) * _key_tiles(x)
    again = passing - x.m
    reads = x.k + x.v + passing * (x.q // x.m) + again * ((x.sums + x.statistics) // x.m)
    return _Passes(reads, again * (x.sums // x.m) + passing * (x.statistics // x.m) + x.o)


def _cuflash(x: _Shape) -> _Passes:
    if x.k + x.v <= x.l2_bytes:
        return _Passes(x.q + x.k + x.v, x.o)
    keys = _seen(x)[1] if x.causal else -(-x.m // x.block_m) * x.n
    return _Passes(x.q + keys * ((x.k + x.v) // x.n), x.o)


def _key_tiles(x: _Shape) -> int:
    return -(-x.n // x.block_n)


def _last_rows(x: _Shape) -> int:
    """Rows of the last query tile."""
    return (x.m - 1) % x.block_m + 1


def _seen(x: _Shape) -> tuple[int, int, int]:
    """Under a causal band aligned at the end: pairs of a query tile and a key tile of which some row sees some key, the
    keys of these key tiles, and the query tiles that see none."""
    before = -(-x.m // x.block_m) - 1  # query tiles but for the last, whose last row sees every key
    first_end = x.block_m + x.n - x.m  # keys up to the last that the first of them sees
    blind = min(before, max(0, -first_end // x.block_m + 1))
    start = first_end + blind * x.block_m + x.block_n - 1
    pairs = _floor_sum(before - blind, x.block_n, x.block_m, start)
    # How many of them see the last key tile, which may have fewer keys.
    whole = (_key_tiles(x) - 1) * x.block_n
    last = min(before, max(0, -(-(x.n - _last_rows(x) - whole) // x.block_m)))
    keys = (pairs - last) * x.block_n + last * (x.n - whole)
    return pairs + _key_tiles(x), keys + x.n, blind


def _floor_sum(count: int, divisor: int, step: int, start: int) -> int:
    """The sum of (start + i * step) // divisor over i < count, in as many steps as Euclid's algorithm takes.

    Examples
    --------
    >>> _floor_sum(5, 3, 2, 1), sum((1 + 2 * i) // 3 for i in range(5))
    (7, 7)
    """
    total = 0
    while count > 0:
        total += count * (count - 1) // 2 * (step // divisor) + count * (start // divisor)
        step, start = step % divisor, start % divisor
        count, start = divmod(step * count + start, divisor)
        divisor, step = step, divisor
    return total


def _safe_softmax(x: _Shape) -> _Passes:
    return _Passes(3 * x.scores, x.scores)


def _online_softmax(x: _Shape) -> _Passes:
    return _Passes(2 * x.scores, x.scores)


_MODELS: dict[str, Callable[[_Shape], _Passes]] = {
    "standard": _standard,
    "flash1": _flash1,
    "cuflash": _cuflash,
    "safe_softmax": _safe_softmax,
    "online_softmax": _online_softmax,
}

ALGORITHMS = tuple(_MODELS)
"""What `memory_traffic` knows."""
