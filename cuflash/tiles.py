"""Tile tables: the only place that holds tile numbers.

Each row is what one kernel uses at one bucket of head dim under one limit of shared memory; the comment beside a row
is the measured or counted reason. Head dims between buckets take the next one up; the loaders fill the rest with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cuflash.compile import Variant

MAX_HEAD_DIM = 256
SMEM_LIMIT = {
    "75": 65536, "80": 166912, "86": 101376, "87": 166912, "89": 101376, "90a": 232448, "100": 232448, "103": 232448,
    "110": 232448, "120": 101376,
}  # fmt: skip
"""Shared memory that one CTA may use, in bytes, by target."""


@dataclass(frozen=True)
class Tile:
    """Block sizes of a kernel: ``block_m`` query rows, ``block_n`` keys, of at most ``head_dim`` features.

    ``stages`` is how many blocks the backward kernels keep in flight; the forward has one of K and one of V.
    """

    head_dim: int
    value_dim: int
    block_m: int
    block_n: int
    stages: int
    warps: int

    def __post_init__(self) -> None:
        if self.head_dim % 32 or self.value_dim % 32:
            raise ValueError(f"tile head dims must be multiples of 32, got {self.head_dim=}, {self.value_dim=}")
        if self.block_m % 16 or self.block_n % 16:
            raise ValueError(f"blocks must be multiples of 16, got {self.block_m=}, {self.block_n=}")

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def smem_bytes(self, operation: str) -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)`` of the kernel, which static_asserts that it agrees."""
        q, k = 2 * self.block_m * self.head_dim, 2 * self.block_n * self.head_dim
        do, v = 2 * self.block_m * self.value_dim, 2 * self.block_n * self.value_dim
        rows = 8 * self.block_m  # row_lse and delta
        match operation:
            case "attention_forward":
                return q + k + v
            case "attention_backward_dkv" | "attention_backward_dk" | "attention_backward_dv":
                return k + v + self.stages * (q + do + rows)
            case "attention_backward_dqkv":
                return k + v + self.stages * (q + do + rows) + 2 * self.block_m * self.block_n  # ds
            case "attention_backward_dq":
                return q + do + self.stages * (k + v)
        return 0


def _rows(*rows: tuple[int, int, int, int, int]) -> dict[int, Tile]:
    return {d: Tile(d, d, block_m, block_n, stages, warps) for d, block_m, block_n, stages, warps in rows}


# operation -> kB of shared memory, at least -> head dim -> tile.  Columns: head dim, block_m, block_n, stages, warps.
# A row is chosen by speed on one H200 (bench/NOTES.md) among those that do not spill.
TABLES: dict[str, dict[int, dict[int, Tile]]] = {
    "attention_forward": {
        227: _rows(
            (64, 128, 96, 1, 4),  # 7 percent over 64 keys; 128 keys gave 4 more, and spilled
            (128, 128, 64, 1, 4),  # 4 percent over 48 keys, which is what other targets compile without a spill
        ),
        163: _rows(
            (32, 128, 64, 1, 4),
            (64, 128, 64, 1, 4),  # 32 rows a warp: each K and V fragment read from shared memory serves two products
            (96, 128, 48, 1, 4),
            (128, 128, 48, 1, 4),
            (192, 64, 64, 1, 4),
            (256, 64, 48, 1, 4),  # two CTAs an SM; 64 keys were 7 percent faster, and spilled
        ),
        99: _rows(
            (32, 128, 64, 1, 4),
            (64, 128, 64, 1, 4),
            (96, 128, 48, 1, 4),
            (128, 128, 48, 1, 4),
            (192, 64, 64, 1, 4),
            (256, 64, 48, 1, 4),
        ),
        64: _rows(
            (32, 128, 64, 1, 4),
            (64, 128, 64, 1, 4),
            (96, 64, 64, 1, 4),
            (128, 64, 64, 1, 4),
            (192, 64, 32, 1, 4),
            (256, 64, 32, 1, 4),  # 64 kB exactly
        ),
    },
    "attention_backward_dkv": {
        163: _rows(
            (32, 64, 64, 2, 4),
            (64, 64, 64, 2, 4),  # two CTAs an SM beat one of 8 warps by 5 percent
            (96, 32, 64, 2, 4),
            (128, 32, 64, 2, 4),  # 64 query rows were 8 percent faster, and spilled
        ),
        99: _rows((32, 64, 64, 2, 4), (64, 64, 64, 2, 4), (96, 32, 64, 2, 4), (128, 32, 64, 1, 4)),
        64: _rows((32, 64, 64, 1, 4), (64, 64, 64, 1, 4), (96, 32, 64, 1, 4), (128, 16, 64, 1, 4)),
    },
    "attention_backward_dqkv": {
        163: _rows((64, 64, 128, 2, 8), (128, 32, 128, 2, 8)),  # 16 percent over the ordered kernels at S 4096
        99: _rows((64, 64, 128, 2, 8), (128, 32, 128, 1, 8)),
    },
    "attention_backward_dk": {
        163: _rows((192, 32, 64, 1, 4), (256, 32, 128, 1, 8)),
        99: _rows((192, 32, 64, 1, 4), (256, 16, 64, 1, 4)),
        64: _rows((192, 16, 32, 1, 2), (256, 16, 32, 1, 2)),
    },
    "attention_backward_dv": {
        163: _rows((192, 32, 64, 1, 4), (256, 32, 64, 1, 4)),
        99: _rows((192, 32, 64, 1, 4), (256, 32, 64, 1, 4)),
        64: _rows((192, 16, 32, 1, 2), (256, 16, 32, 1, 2)),
    },
    "attention_backward_dq": {
        227: _rows((256, 64, 32, 1, 4)),  # two CTAs an SM: 24 percent over one with two stages
        163: _rows(
            (32, 128, 32, 2, 4),
            (64, 128, 32, 2, 4),  # 64 keys were 8 percent faster, and spilled
            (96, 64, 64, 1, 4),
            (128, 64, 64, 2, 4),
            (192, 64, 32, 1, 4),
            (256, 64, 16, 1, 4),
        ),
        99: _rows(
            (32, 128, 32, 2, 4),
            (64, 128, 32, 2, 4),
            (96, 64, 64, 1, 4),
            (128, 64, 64, 1, 4),
            (192, 64, 32, 1, 4),
            (256, 64, 16, 1, 4),
        ),
        64: _rows(
            (32, 64, 32, 1, 4),
            (64, 64, 32, 1, 4),
            (96, 64, 32, 1, 4),
            (128, 64, 32, 1, 4),
            (192, 32, 16, 1, 2),
            (256, 32, 16, 1, 2),
        ),
    },
}

GENERAL = {
    "attention_forward": _rows((64, 128, 64, 1, 4), (128, 64, 64, 1, 4), (256, 64, 32, 1, 4)),
    "attention_backward_dq": _rows((64, 64, 64, 2, 4), (256, 64, 16, 1, 4)),
    "attention_backward_dk": _rows((256, 16, 64, 1, 4)),
}
"""Smaller rows where the registers of the score terms made the table's spill."""

ROW_KERNEL = Tile(head_dim=32, value_dim=32, block_m=16, block_n=16, stages=1, warps=4)
"""Of the kernels that work on rows, not tiles (delta, convert, merge), only the number of warps matters."""

UNORDERED = "attention_backward_dqkv"
"""dq, dk and dv in one kernel with atomic sums, for ``deterministic=False``: plain variants with 16-byte loads only."""

LOADS = ("16", "8", "4", "strided")
SCORES = ("Softcap", "KeyBias")
"""Score terms of the general variants; each can be off at run time, so one variant serves every combination."""
PLAIN_HEAD_DIMS = (64, 128, 256)
"""Tile head dims that have, at 16-byte loads, a variant without score terms and with the scale in the exponent."""
UNALIGNED_HEAD_DIMS = (64, 128, 256)
"""Tile head dims of the load kinds below 16 bytes: fewer, since the loads bound them."""


def _row(operation: str, head_dim: int, target: str, family: str) -> Tile:
    """The row of the largest class of shared memory that the target has."""
    limit = SMEM_LIMIT["75" if family == "sm75" else target]
    classes = TABLES[operation]
    return next(
        classes[kb][head_dim] for kb in sorted(classes, reverse=True) if kb * 1024 <= limit and head_dim in classes[kb]
    )


def head_dims(operation: str, load: str) -> list[int]:
    """Tile head dims at which ``operation`` has a variant with this load kind, ascending."""
    dims = sorted(TABLES[operation][163])
    return dims if load == "16" else [d for d in dims if d in UNALIGNED_HEAD_DIMS]


def has_plain(head_dim: int, load: str) -> bool:
    """Whether there is a variant without score terms at this tile head dim and load kind."""
    return load == "16" and head_dim in PLAIN_HEAD_DIMS


def tile(operation: str, head_dim: int, load: str, plain: bool, target: str, family: str) -> Tile:
    """The tile for at most ``head_dim`` features, of q and k or of v, whichever has more."""
    bucket = next(d for d in head_dims(operation, load) if d >= head_dim)
    row = _row(operation, bucket, target, family)
    return row if plain or family == "sm75" else GENERAL.get(operation, {}).get(bucket, row)


def backward_operations(head_dim: int) -> dict[str, tuple[str, ...]]:
    """Kernels that between them give dk, dv and dkey_bias: two accumulators of more than 128 columns do not fit."""
    if head_dim <= 128:
        return {"attention_backward_dkv": ("dk", "dv", "dkey_bias")}
    return {"attention_backward_dk": ("dk", "dkey_bias"), "attention_backward_dv": ("dv",)}


@lru_cache
def variants(target: str, family: str) -> list[Variant]:
    """Every variant that the launcher can ask for on this target, in a fixed order."""
    from cuflash.compile import Variant

    found = []
    for dtype in ("float16",) if family == "sm75" else ("float16", "bfloat16"):
        for operation, load in ((o, x) for o in TABLES if o != UNORDERED for x in LOADS):
            for d in head_dims(operation, load):
                for plain in (False, True) if has_plain(d, load) else (False,):
                    t = tile(operation, d, load, plain, target, family)
                    scores = () if plain else SCORES
                    found.append(Variant(operation, family, target, dtype, dtype, t, scores, load, not plain))
        if family != "sm75":
            for d in sorted(TABLES[UNORDERED][163]):
                t = tile(UNORDERED, d, "16", True, target, family)
                found.append(Variant(UNORDERED, family, target, dtype, dtype, t, (), "16", False, False))
            found.append(Variant("attention_convert", family, target, dtype, dtype, ROW_KERNEL, (), "strided", False))
        for load in ("16", "strided"):
            found.append(Variant("attention_delta", family, target, dtype, dtype, ROW_KERNEL, (), load, False))
    for dtype in ("float16", "float32", "float64") if target == "75" else ("float16", "bfloat16", "float32", "float64"):
        found.append(Variant("attention_merge", family, target, dtype, dtype, ROW_KERNEL, (), "strided", False))
    return found
