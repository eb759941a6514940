"""Tiles of the kernels of `cuflash.lineage`, by rules: what each algorithm says of its blocks, not what is fastest."""

from __future__ import annotations

import itertools

from cuflash import tiles
from cuflash.compile import Variant
from cuflash.tiles import Tile

SAFE_SOFTMAX, ONLINE_SOFTMAX = "safe_softmax", "online_softmax"
"""Rows in three and in two passes."""

ROW_SOFTMAX, ROW_SOFTMAX_BACKWARD = "row_softmax", "row_softmax_backward"
"""The softmax of standard attention, which keeps a row on chip, and its part of the backward."""

ROWS = Tile(head_dim=16, value_dim=16, block_m=16, block_n=16, stages=1, warps=8)
"""Of the softmaxes only the number of warps matters."""

FLASH1_FORWARD = "flash1_forward"
"""FlashAttention-1: a CTA keeps a tile of keys and values and has the query rows of its head pass by."""

FLASH1_BACKWARD = "flash1_backward"
"""Its gradients: a CTA keeps a tile of keys and values and their gradients, and has queries pass by."""

HEAD_DIMS = {"16 bits": (64, 128, 256), "float32": (64, 128), "float64": (64, 128)}
"""Tile head dims of `FLASH1_FORWARD` by kind of operand: a warp holds the output of 16 rows in registers."""

BACKWARD_HEAD_DIMS = {"16 bits": (64, 128), "float32": (64, 128), "float64": (64,)}
"""Those of `FLASH1_BACKWARD`: two gradients of 16 keys in the registers of a warp."""

MOST_ROWS = 128
"""Query rows of a tile, at most: 16 a warp."""

_SHARES = {227: (128, 64), 163: (128, 32), 99: (64, 32), 64: (32, 32)}
"""kB of shared memory, at least -> those for K and V, and those for Q."""


def head_dims(operation: str, dtype: str) -> tuple[int, ...]:
    """Tile head dims of `FLASH1_FORWARD` or `FLASH1_BACKWARD`, ascending."""
    dims = HEAD_DIMS if operation == FLASH1_FORWARD else BACKWARD_HEAD_DIMS
    return dims[tiles.kind(dtype)]


def bucket(features: int, dtype: str, operation: str = FLASH1_FORWARD) -> int | None:
    """The least of `head_dims` that is at least ``features``, None where all are less."""
    return next((d for d in head_dims(operation, dtype) if d >= features), None)


def flash1_forward(dtype: str, head_dim: int, target: str, family: str) -> Tile:
    """The tile of FlashAttention-1: as many keys as shared memory holds beside some queries (Algorithm 1, line 1).

    Parameters
    ----------
    dtype : str
        Of the operands.
    head_dim : int
        One of `HEAD_DIMS`.
    target, family : str
        As of a ``compile.Variant``.

    Examples
    --------
    >>> tile = flash1_forward("float16", 128, "90a", "sm80")
    >>> tile.block_m, tile.block_n, tile.stages
    (128, 256, 2)
    """
    limit = _smem_limit(target, family)
    keys_kb, queries_kb = next(_SHARES[kb] for kb in sorted(_SHARES, reverse=True) if kb * 1024 <= limit)
    row = head_dim * tiles.ITEMSIZE[dtype]
    block_n = keys_kb * 1024 // (2 * row)
    stages = 2 if 2 * 32 * row <= queries_kb * 1024 else 1
    block_m = min(MOST_ROWS, queries_kb * 1024 // (stages * row) // 16 * 16)
    return Tile(head_dim, head_dim, block_m, block_n, stages, block_m // 16)


def flash1_backward(dtype: str, head_dim: int, target: str, family: str) -> Tile:
    """The tile of the backward: keys by shared memory, at most 128; so many queries as leave registers for both
    gradients."""
    row = head_dim * tiles.ITEMSIZE[dtype]
    keys_kb = 32 if _smem_limit(target, family) < 99 * 1024 else 64
    block_n = min(MOST_ROWS, keys_kb * 1024 // (2 * row))
    return Tile(head_dim, head_dim, 8192 // row, block_n, 1, block_n // 16)


def softmax(operation: str, dtype: str, load: str, target: str, family: str) -> Variant:
    """The kernel of `SAFE_SOFTMAX` or `ONLINE_SOFTMAX`; ``load``: 16 where rows are whole vectors, else strided."""
    return Variant(operation, family, target, dtype, dtype, ROWS, (), load, False)


_WHOLE_ROWS = {ROW_SOFTMAX: 1, ROW_SOFTMAX_BACKWARD: 2}
"""Rows that a CTA keeps on chip."""


def row_softmax(operation: str, dtype: str, load: str, target: str, family: str) -> Variant:
    """The kernel of `ROW_SOFTMAX` or `ROW_SOFTMAX_BACKWARD`; its shared memory is for rows of `longest_row`."""
    length = longest_row(operation, dtype, target, family)
    tile = Tile(head_dim=16, value_dim=16, block_m=16, block_n=length, stages=1, warps=16)
    return Variant(operation, family, target, dtype, dtype, tile, (), load, False)


def longest_row(operation: str, dtype: str, target: str, family: str) -> int:
    """The most elements of a row that `row_softmax` takes."""
    limit = _smem_limit(target, family) - 1024  # beside what warps tell each other
    return limit // (_WHOLE_ROWS[operation] * tiles.ITEMSIZE[dtype]) // 16 * 16


def _smem_limit(target: str, family: str) -> int:
    return tiles.SMEM_LIMIT["75" if family == "sm75" else target]


def flash1(operation: str, dtype: str, head_dim: int, load: str, plain: bool, target: str, family: str) -> Variant:
    """The kernel with the tile of `flash1_forward` or `flash1_backward`. ``plain``: the scale can wait until the
    exponent; only with loads of 16 bytes, so that there are two of each tile and not four."""
    tile_of = flash1_forward if operation == FLASH1_FORWARD else flash1_backward
    tile = tile_of(dtype, head_dim, target, family)
    plain = plain and load == "16"
    return Variant(operation, family, target, dtype, dtype, tile, (), load if plain else "strided", not plain)


def variants(target: str, family: str) -> list[Variant]:
    """Every variant that `cuflash.lineage` can ask for on a target, in a fixed order."""
    found = []
    for dtype, load in itertools.product(tiles.dtypes(target, family), ("16", "strided")):
        for operation in (SAFE_SOFTMAX, ONLINE_SOFTMAX):
            found.append(softmax(operation, dtype, load, target, family))
        for operation in (ROW_SOFTMAX, ROW_SOFTMAX_BACKWARD):
            found.append(row_softmax(operation, dtype, load, target, family))
    for dtype, operation in itertools.product(tiles.dtypes(target, family), (FLASH1_FORWARD, FLASH1_BACKWARD)):
        for head_dim, plain in itertools.product(head_dims(operation, dtype), (True, False)):
            found.append(flash1(operation, dtype, head_dim, "16", plain, target, family))
    return found
