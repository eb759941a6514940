"""Tile tables: the only place that holds tile numbers.

Each row is what one kernel uses at one bucket of head dim under one limit of shared memory; the comment beside a row
is the measured or counted reason. Head dims between buckets take the next one up; the loaders fill the rest with zeros.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from cuflash import params

if TYPE_CHECKING:
    from cuflash.compile import Variant

MAX_HEAD_DIM = 256
SMEM_LIMIT = {
    "75": 65536, "80": 166912, "86": 101376, "87": 166912, "89": 101376, "90a": 232448, "100": 232448, "103": 232448,
    "110": 232448, "120": 101376,
}  # fmt: skip
"""Shared memory that one CTA may use, in bytes, by target."""


FUSED = "attention_backward_dqkv"
"""dq, dk and dv in one kernel: plain variants with 16-byte loads only."""

DQ = "attention_backward_dq"
"""dq alone."""
DKV = "attention_backward_dkv"
"""dk and dv."""

NARROW = "attention_narrow"
"""The forward for few features, by multiply-adds: one variant a row, with key_bias, without softcap. It takes any
strides; that of the sm90 family rows that lie one after the other."""
NARROW_F64 = "attention_narrow_f64"
"""The same in float64 in the sm90 family, on tensor cores."""
ONE_QUERY = "attention_one_query"
"""The forward of a single query over few features, in the sm90 family."""
LANES = "attention_narrow_lanes"
"""The forward for few features and many rows, which lanes own, in the sm90 family."""

NARROW_F64_KEYS = 32
"""That a warp of its kernel takes at once."""

ROOTS_BYTES = 8 * 16 * 256
"""Of the roots of 2 that float64 kernels for few features keep in shared memory."""

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


def accumulator_bytes(dtype: str) -> int:
    """Bytes of one element of sums, row statistics and key_bias."""
    return max(4, ITEMSIZE[dtype])


SM90_BIAS_STAGES = 4
"""Buffers of key_bias in the sm_90 forward."""
SM90_WORKS = 3
"""Records of tiles in the sm_90 forward."""


@dataclass(frozen=True)
class Tile:
    """Block sizes of a kernel: ``block_m`` query rows, ``block_n`` keys, of at most ``head_dim`` features.

    ``stages`` is how many blocks the backward, the narrow kernels and the forward of sm_90 keep in flight, in the fused
    backward three with one barrier a step; the portable forward has one of K and one of V. Of the ``warps``,
    ``column_warps`` share a row of scores; with less than 8 features for each, a forward's keep keys of their own to
    the end. ``low_bits``: which float32 tiles are kept with what tensor cores ignore of their elements: 1 those read
    row by row, 2 the forward's V, too. ``resident``: of the portable forward and the narrow kernels, how many CTAs the
    registers of an SM are to hold. ``q_stages``: buffers of Q in the sm_90 forward; three are a ring of those of one
    warpgroup's rows.
    """

    head_dim: int
    value_dim: int
    block_m: int
    block_n: int
    stages: int
    warps: int
    column_warps: int = 1
    low_bits: int = 0
    resident: int = 1
    q_stages: int = 1

    def __post_init__(self) -> None:
        if any(dim % 16 and dim > 12 for dim in (self.head_dim, self.value_dim)):
            raise ValueError(f"tile head dims above 12 must be multiples of 16, not {self.head_dim}, {self.value_dim}")
        if self.block_m % 16 or self.block_n % 16:
            raise ValueError(f"blocks must be multiples of 16, got {self.block_m=}, {self.block_n=}")

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def q_rows(self) -> int:
        """Rows of a buffer of Q in the sm_90 forward."""
        return 64 if self.q_stages == 3 else self.block_m

    @property
    def value_parts(self) -> int:
        """Parts, by columns, in which the sm_90 backward of queries has V brought where it has a single buffer."""
        if self.stages > 1:
            return 1
        return self.value_dim // (64 if self.value_dim % 128 else 128)

    def smem_bytes(self, operation: str, dtype: str, precision: str | None = None, family: str = "sm80") -> int:
        """Dynamic shared memory: ``sizeof(SharedStorage)`` of the kernel, which static_asserts that it agrees."""
        if family == "sm90":
            return self._sm90_bytes(operation, dtype, precision)
        twice = 2 if self.low_bits and precision is None else 1
        itemsize, accumulator = ITEMSIZE[dtype], accumulator_bytes(dtype)
        q, k = itemsize * self.block_m * self.head_dim, itemsize * self.block_n * self.head_dim
        do, v = itemsize * self.block_m * self.value_dim, itemsize * self.block_n * self.value_dim
        scores = itemsize * self.block_m * self.block_n
        queries = twice * (q + do) + 2 * accumulator * self.block_m  # row_lse and delta
        shared, row = (scores, self.column_warps * accumulator) if self.column_warps > 1 else (0, 0)
        split_keys = self.value_dim // self.column_warps < 8
        own = (self.column_warps - 1) * do if split_keys else shared  # of the forward: o, or p
        if dtype == "float64" and self.head_dim <= 8:
            own += ROOTS_BYTES
        gradients = k + v + self.stages * queries
        keys = gradients + row * self.block_n
        nbytes = {
            "attention_forward": q + twice * k + (twice if self.low_bits == 2 else 1) * v + own + row * self.block_m,
            "attention_backward_dq": q + do + self.stages * twice * (k + v) + shared,
            "attention_backward_dk": keys + shared,
            "attention_backward_dv": keys + shared,
            "attention_backward_dkv": keys + 2 * shared,
            # p and ds, twice where a step has one barrier; whose turn it is, where arrays begin, the barrier
            FUSED: gradients + (2 if self.stages == 3 else 1) * (shared + scores) + 72,
            # with key_bias; the warps' totals; addresses; each warp's work
            NARROW: self.stages * accumulator * self.block_n * (self.head_dim + self.value_dim + 1)
            + accumulator * self.block_m * (3 + self.value_dim)
            + 32
            + 20 * self.warps,
            # of the lineage
            "row_softmax": itemsize * self.block_n,
            "row_softmax_backward": 2 * itemsize * self.block_n,
            "flash1_forward": k + v + self.stages * q,
            "flash1_backward": k + v + scores + q + do + 2 * accumulator * self.block_m,
        }
        return -(-nbytes.get(operation, 0) // 128) * 128  # tiles begin at multiples of 128 bytes

    def _sm90_bytes(self, operation: str, dtype: str, precision: str | None) -> int:
        if operation == NARROW:
            return self._sm90_narrow_bytes(ITEMSIZE[dtype])
        if operation == LANES:
            return self._sm90_lanes_bytes(ITEMSIZE[dtype])
        if operation == NARROW_F64:
            return self._sm90_narrow_f64_bytes()
        if operation not in ("attention_forward", DQ, DKV, FUSED):
            return 0
        planes = params.planes(dtype, precision)

        def panels(rows: int, cols: int) -> int:  # of 64 columns
            return 2 * planes * rows * -(-cols // 64) * 64

        if operation == DKV:
            keys = panels(self.block_n, self.head_dim) + panels(self.block_n, self.value_dim)
            # of Q with lse, or dO with delta, and barriers
            slot = (
                max(panels(self.block_m, self.head_dim), panels(self.block_m, self.value_dim)) + 4 * self.block_m + 16
            )
            # p, twice, with barriers of four warps; barriers of K and V, and the work; dkey_bias
            nbytes = keys + 2 * self.stages * slot + 2 * (4 * self.block_m * self.block_n + 4 * 16) + 2 * 16 + 3 * 32
            nbytes += 4 * self.block_n
            return -(-nbytes // 1024) * 1024
        if operation == FUSED:
            keys = panels(self.block_n, self.head_dim) + panels(self.block_n, self.value_dim)
            queries = panels(self.block_m, self.head_dim) + panels(self.block_m, self.value_dim)
            # lse and delta, or both as columns of products (`hopper.Backward.takes_terms`); barriers
            queries += (16 if self.block_m == 64 else 2 * 4) * self.block_m + 2 * 16
            ds, dq = panels(self.block_n, self.block_m), 4 * self.block_m * self.head_dim
            sent = max(dq, panels(self.block_n, self.head_dim), panels(self.block_n, self.value_dim))
            # of ds and of what is sent two each; barriers of K, V and what is sent, what that is, and the work that is
            # shared out, also in parts, and whether rows need care; dkey_bias; records of steps
            nbytes = keys + self.stages * queries + 2 * (ds + sent) + 2 * 16 + 2 * 3 * 8 + 2 * 24 + 3 * (32 + 12) + 4
            nbytes += 4 * self.block_n + 12 * self.stages
            return -(-nbytes // 1024) * 1024
        if operation == DQ:
            queries = panels(self.block_m, self.head_dim) + panels(self.block_m, self.value_dim) + 2 * 4 * self.block_m
            k, v = panels(self.block_n, self.head_dim), panels(self.block_n, self.value_dim)
            parts = self.value_parts
            barriers = 16 * (2 * (1 + parts) + self.stages + 1 + self.stages * parts) + 8 * SM90_WORKS
            work = SM90_WORKS * 36 + 24  # and what the producer is at
            nbytes = queries + (self.stages + 1) * k + self.stages * v + barriers + work
            return -(-nbytes // 1024) * 1024
        k, v = panels(self.block_n, self.head_dim), panels(self.block_n, self.value_dim)
        barriers = 16 * (self.q_stages + 2 * self.stages + SM90_BIAS_STAGES)
        barriers += 8 * SM90_WORKS + 8  # and where a row of key_bias is
        q = self.q_stages * panels(self.q_rows, self.head_dim)
        bias = 4 * SM90_BIAS_STAGES * self.block_n
        bias += 0 if self.value_dim else 16  # and tiles of nothing
        work = SM90_WORKS * 16 * (2 + self.block_m // 64 + 1)
        work += 32 * (self.block_m // 64)  # and of softcap the series that warps need
        nbytes = q + self.stages * (k + v) + bias + barriers + work
        return -(-nbytes // 1024) * 1024  # panels begin at multiples of 1024 bytes

    def _sm90_narrow_bytes(self, itemsize: int) -> int:
        tile = 2 * itemsize * self.block_n * self.head_dim + 4 * self.block_n  # with key_bias
        totals = 4 * self.block_m * (3 + self.value_dim)
        sums = 4 * (self.block_m // self.warps) * (1 + self.value_dim)
        saved = self.threads * -(-sums // 16) * 16
        # and addresses, each warp's work, and by stage two barriers and a count
        nbytes = -(-(self.stages * tile + totals + 32 + 20 * self.warps) // 16) * 16 + saved
        return -(-(nbytes + 20 * self.stages) // 128) * 128

    def _sm90_narrow_f64_bytes(self) -> int:
        tile = 8 * self.block_n * (2 * self.head_dim + 1)
        totals = 8 * self.block_m * (2 + self.value_dim)
        nbytes = self.stages * tile + totals + 32 + -(-20 * self.warps // 8) * 8
        constants = ROOTS_BYTES + 2 * 8 * NARROW_F64_KEYS * self.head_dim
        return -(-(nbytes + constants + 20 * self.stages) // 128) * 128

    def _sm90_lanes_bytes(self, itemsize: int) -> int:
        tile = itemsize * self.block_n * (self.head_dim + self.value_dim + 1)  # with key_bias
        totals = self.threads * -(-itemsize * (self.block_m // self.threads) * (2 + self.value_dim) // 16) * 16
        # and addresses, each warp's work, and by stage two barriers and a count
        nbytes = -(-(self.stages * tile + totals + 32 + 20 * self.warps) // 8) * 8 + 20 * self.stages
        return -(-nbytes // 128) * 128


def _rows(*rows: tuple[int, ...]) -> dict[int, Tile]:
    return {row[0]: Tile(row[0], *row) for row in rows}


# Up to four features are not padded: a lane pays for each. 8 rows a warp: more do not fit its registers, fewer read
# each key more often. Two CTAs an SM: 128 registers a thread.
_NARROW_FLOAT = {
    99: _rows(*((d, 48 if d == 4 else 64, 1024, 2, 8, 1, 0, 2) for d in (1, 2, 3, 4))),
    64: _rows(*((d, 48 if d == 4 else 64, 512, 2, 8, 1, 0, 2) for d in (1, 2, 3, 4))),
}
# Of float32, whose tensor cores take three products of each, up to eight.
_MORE_FEATURES = {
    99: _rows(*((d, 32, 512, 2, 8, 1, 0, 2) for d in (6, 8))),
    64: _rows(*((d, 32, 256, 2, 8, 1, 0, 2) for d in (6, 8))),
}

# kind of operand -> operation -> kB of shared memory, at least -> head dim -> tile. A target takes a head dim's row
# from the largest class that it reaches and that has one.
# Columns: head dim, block_m, block_n, stages, warps, column warps (1 where left out), low bits (0), resident CTAs (1).
# A row is chosen by speed on one H200 (bench/NOTES.md) among those that do not spill.
TABLES: dict[str, dict[str, dict[int, dict[int, Tile]]]] = {
    "16 bits": {
        NARROW: _NARROW_FLOAT,
        "attention_forward": {
            # 10 percent over two CTAs an SM with 96 keys; it spills on the targets with less
            227: _rows((64, 128, 64, 1, 4, 1, 0, 3)),
            163: _rows((256, 64, 64, 1, 4, 2)),  # two CTAs an SM; 1 percent over warps of 16 whole rows
            99: _rows(
                (32, 128, 64, 1, 4),
                (64, 128, 96, 1, 4),
                (96, 128, 48, 1, 4),
                # 32 rows a warp: a fragment of K or V serves two products
                (128, 128, 64, 1, 4),
                (192, 64, 64, 1, 4),
                (256, 64, 64, 1, 4),
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
            163: _rows((64, 64, 64, 2, 4), (128, 32, 128, 2, 8, 2), (256, 64, 64, 1, 8, 4)),
            99: _rows((32, 64, 64, 2, 4), (64, 64, 64, 2, 4, 2), (96, 32, 64, 2, 4), (128, 32, 64, 1, 4)),
            64: _rows((32, 64, 64, 1, 4), (64, 64, 64, 1, 4), (96, 32, 64, 1, 4), (128, 16, 64, 1, 4)),
        },
        FUSED: {
            227: _rows(
                (64, 128, 128, 3, 8),  # one barrier a step: in order 10 percent over two stages of column warps
                (128, 64, 128, 3, 8, 2),  # likewise 14 percent over two stages
                (256, 64, 64, 2, 8, 4),  # no room for three stages; registers allow one CTA an SM in any case
            ),
            163: _rows(
                (64, 128, 128, 2, 8, 2),  # in order 21 percent over 64 query rows
                (128, 64, 128, 2, 8, 2),  # in order 32 percent over two CTAs an SM of 64 x 64
                (256, 64, 64, 1, 8, 4),
            ),
            99: _rows((64, 64, 64, 2, 4), (128, 32, 128, 1, 8)),
        },
        "attention_backward_dk": {
            99: _rows((192, 32, 64, 1, 4), (256, 16, 64, 1, 4)),
            64: _rows((192, 16, 32, 1, 2), (256, 16, 32, 1, 2)),
        },
        "attention_backward_dv": {
            99: _rows((192, 32, 64, 1, 4), (256, 32, 64, 1, 4)),
            64: _rows((192, 16, 32, 1, 2), (256, 16, 32, 1, 2)),
        },
        "attention_backward_dq": {
            227: _rows((256, 64, 32, 1, 4)),  # two CTAs an SM: 24 percent over one with two stages
            163: _rows((128, 64, 64, 2, 4)),
            99: _rows(
                (32, 128, 32, 2, 4),
                (64, 128, 32, 2, 4),  # 64 keys were 8 percent faster, and spilled
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
    },
    "float32": {
        NARROW: {kb: _NARROW_FLOAT[kb] | _MORE_FEATURES[kb] for kb in (99, 64)},
        "attention_forward": {
            227: _rows((64, 128, 48, 1, 4, 1, 2), (128, 128, 64, 1, 8, 1, 2), (256, 64, 32, 1, 8, 2, 1)),
            163: _rows((128, 128, 32, 1, 8, 1, 1), (256, 64, 32, 1, 8, 2)),
            99: _rows(
                (16, 64, 128, 1, 4),
                (32, 128, 64, 1, 8),
                (64, 128, 32, 1, 4, 1, 1),
                (128, 64, 32, 1, 4, 1, 1),
                (256, 16, 32, 1, 2, 2),
            ),
            64: _rows(
                (16, 64, 32, 1, 4),
                (32, 64, 32, 1, 4),
                (64, 64, 32, 1, 4),
                (128, 32, 32, 1, 4, 2),
                (256, 16, 16, 1, 2, 2),
            ),
        },
        "attention_backward_dkv": {
            227: _rows((256, 32, 32, 1, 4, 2, 1)),
            163: _rows((128, 32, 64, 1, 8, 2, 1), (256, 32, 32, 1, 4, 2)),
            99: _rows((32, 64, 64, 1, 4), (64, 32, 64, 1, 4, 1, 1), (128, 32, 32, 1, 4, 2)),
            64: _rows((32, 32, 64, 1, 4), (64, 32, 32, 1, 2), (128, 16, 32, 1, 4, 2)),
        },
        FUSED: {
            # two CTAs an SM with two stages as with one: 8 percent
            227: _rows((64, 32, 64, 2, 4, 1, 1), (128, 32, 128, 1, 8, 1, 1)),
            163: _rows((64, 32, 64, 1, 4, 1, 1), (128, 32, 64, 1, 8, 2, 1)),
        },
        "attention_backward_dk": {99: _rows((256, 32, 16, 1, 2, 2))},
        "attention_backward_dv": {99: _rows((256, 32, 16, 1, 2, 2))},
        "attention_backward_dq": {
            227: _rows((128, 128, 32, 1, 8, 1, 1), (256, 32, 32, 1, 4, 2, 1)),
            163: _rows((64, 64, 64, 1, 4, 1, 1), (128, 64, 32, 1, 4, 1, 1), (256, 32, 32, 1, 4, 2)),
            99: _rows((32, 64, 64, 1, 4), (64, 64, 32, 1, 4, 1, 1), (128, 32, 32, 1, 4, 2), (256, 16, 32, 1, 2, 2)),
            64: _rows((32, 64, 32, 1, 4), (64, 32, 32, 1, 4, 2), (128, 16, 16, 1, 2, 2)),
        },
    },
    "float64": {
        NARROW: {  # 4 rows a warp, of twice the registers: 168 a thread
            99: _rows(*((d, 16, 512, 2, 4, 1, 0, 3) for d in (1, 2, 3, 4))),
            64: _rows(*((d, 16, 256, 2, 4, 1, 0, 3) for d in (1, 2, 3, 4))),
        },
        "attention_forward": {
            227: _rows(
                # 16 warps an SM, where one head of 16384 rows has 8: two share out the keys of their rows
                (8, 32, 64, 1, 4, 2, 0, 4),
                (64, 64, 64, 1, 4),
                (128, 128, 32, 1, 8),
                (256, 64, 16, 1, 8, 2),
            ),
            163: _rows((128, 64, 32, 1, 8, 2), (256, 32, 16, 1, 4, 2)),
            99: _rows(
                (8, 32, 64, 1, 4, 2, 0, 3),
                (16, 32, 64, 1, 2),
                (32, 64, 64, 1, 4),
                (64, 64, 32, 1, 4),
                (128, 32, 16, 1, 4, 2),
                (256, 16, 16, 1, 2, 2),
            ),
            64: _rows((16, 32, 32, 1, 2), (32, 32, 32, 1, 2), (64, 32, 32, 1, 4, 2), (128, 16, 16, 1, 2, 2)),
        },
        "attention_backward_dkv": {
            227: _rows((128, 16, 64, 1, 8, 2)),
            163: _rows((32, 32, 64, 1, 4), (64, 32, 64, 1, 8, 2), (128, 16, 32, 1, 4, 2)),
            99: _rows((32, 32, 32, 1, 2), (64, 16, 32, 1, 4, 2), (128, 16, 16, 1, 2, 2)),
            64: _rows((32, 16, 32, 1, 2), (64, 16, 16, 1, 2, 2)),
        },
        FUSED: {227: _rows((64, 64, 64, 1, 8, 2), (128, 32, 64, 1, 8, 2))},
        "attention_backward_dk": {227: _rows((256, 16, 32, 1, 4, 2)), 163: _rows((256, 16, 16, 1, 2, 2))},
        "attention_backward_dv": {227: _rows((256, 16, 32, 1, 4, 2)), 163: _rows((256, 16, 16, 1, 2, 2))},
        "attention_backward_dq": {
            227: _rows((128, 64, 32, 1, 8, 2), (256, 32, 16, 1, 4, 2)),
            163: _rows((32, 64, 32, 1, 4), (64, 64, 32, 1, 4), (128, 32, 32, 1, 4, 2), (256, 16, 16, 1, 2, 2)),
            99: _rows((32, 32, 32, 1, 2), (64, 32, 32, 1, 4, 2), (128, 16, 16, 1, 2, 2)),
            64: _rows((32, 32, 16, 1, 2), (64, 16, 16, 1, 2, 2)),
        },
    },
}


def _sm90_rows(*rows: tuple[int, int, int, int, int]) -> dict[int, Tile]:
    """From head dim, block_m, block_n, stages, q_stages."""
    return {d: Tile(d, d, m, n, stages, 4 * (m // 64 + 1), q_stages=q_stages) for d, m, n, stages, q_stages in rows}


SM90_FORWARD: dict[tuple[str, str | None], dict[int, Tile]] = {
    ("16 bits", None): _sm90_rows(
        (64, 192, 96, 3, 2),  # 5 to 10 percent over 128 keys, whose registers leave no room for bets
        # A ring of Q is 4 percent over two whole ones from S 4096 on, and equal before.
        (96, 128, 128, 2, 3),  # S 4096 4 percent over 192 rows of 96 keys, causal 8
        (128, 128, 128, 2, 3),  # 64 keys 10 to 15 percent behind; 160, and three stages with one Q, too
        # No room for two: the ring is 5 to 13 percent over one Q, most at S 512.
        (192, 128, 96, 2, 3),  # three stages of 64 keys, or 80 keys and two Q, within a percent
        (256, 128, 64, 2, 3),  # causal 10 percent over 80 keys at S 512, 1 from 2048 on; full equal
    ),
    ("float32", None): _sm90_rows(
        (64, 128, 96, 2, 1),  # as three warpgroups, or 64 keys
        (128, 128, 80, 1, 1),  # 5 percent over 64 keys
    ),
    ("float32", "tf32"): _sm90_rows(
        (64, 192, 80, 2, 1),  # with 96 ptxas waits for each product
        (128, 128, 80, 2, 1),
    ),
}
"""Rows of the forward of the sm90 family by kind of operand and precision. Of the warps four are the producer's; a
consumer's warpgroup has 64 query rows."""

SM90_SHORT: dict[tuple[str, str | None], dict[int, Tile]] = {
    # at S 512 and 1024 7 to 12 percent over 192 rows, at 2048 3 to 6 behind
    ("16 bits", None): _sm90_rows((64, 128, 128, 4, 2)),
}
"""Rows in their place for few keys a query row."""

SHORT_ROWS = 1024
"""The most keys a query row, in the mean over the rows, that are few."""

SM90_CAPPED: dict[tuple[str, str | None], dict[int, Tile]] = {
    ("16 bits", None): _sm90_rows((64, 128, 128, 4, 2)),
    ("float32", "tf32"): _sm90_rows((64, 192, 64, 2, 1)),
}
"""Rows in the place of both where a softcap made them spill."""


def _lse_rows(*rows: tuple[int, int, int, int]) -> dict[int, Tile]:
    """From head dim, block_m, block_n, stages."""
    return {d: Tile(d, 0, m, n, stages, 4 * (m // 64 + 1)) for d, m, n, stages in rows}


SM90_LSE: dict[tuple[str, str | None], dict[int, Tile]] = {
    ("16 bits", None): _lse_rows((64, 192, 96, 2), (128, 128, 128, 2), (256, 128, 80, 2)),
    ("float32", None): _lse_rows((64, 128, 96, 2), (128, 128, 64, 2)),
    ("float32", "tf32"): _lse_rows((64, 192, 80, 2), (128, 128, 80, 2)),
}
"""Rows without values, for lse alone."""

SM90_BACKWARD: dict[int, Tile] = {
    d: Tile(d, d, m, 128, stages, 12) for d, m, stages in ((64, 128, 2), (96, 64, 2), (128, 64, 2))
}
"""Rows of `FUSED` in the sm90 family, for 16 bits."""

SM90_BACKWARD_KEYS: dict[int, Tile] = {d: SM90_BACKWARD[d] for d in (64, 128)}
"""Those of them that have variants without dq, which is rarely asked for."""

SM90_BACKWARD_DQ: tuple[Tile, ...] = tuple(
    Tile(d, e, 128, n, stages, 12)
    for d, e, n, stages in (
        (64, 64, 128, 4),
        # 80 keys and three V up to 3 percent behind from S 2048 on
        (128, 128, 96, 2),
        # 80 keys and a single V 8 to 20 percent behind
        (192, 128, 64, 2),
        (192, 192, 64, 2),
        # 48 keys are bound by shared memory, which gives 128 bytes a clock: A and B of a product of 64 rows take 146.
        (256, 256, 64, 1),
    )
)
"""Rows of `DQ` in the sm90 family, for 16 bits, the narrowest first: ``stages`` is of V, K has a buffer more."""

SM90_BACKWARD_DKV: tuple[Tile, ...] = tuple(
    Tile(d, e, 64, 64, stages, 12) for d, e, stages in ((192, 128, 3), (192, 192, 3), (256, 256, 2))
)
"""Rows of `DKV` in the sm90 family, for 16 bits and more features than `SM90_BACKWARD` has, the narrowest first:
``stages`` is of q and of do each, which take turns in all of them."""

SM90_NARROW: dict[str, dict[int, Tile]] = {
    # two CTAs of 128 registers; 4 rows a warp in thrice as many CTAs were half again as slow
    "16 bits": _rows(*((d, 48 if d == 4 else 64, 1024, 2, 8, 1, 0, 2) for d in (1, 2, 3, 4))),
    "float32": _rows(*((d, 48 if d == 4 else 64, 1024, 2, 8, 1, 0, 2) for d in (1, 2, 3, 4))),
}
"""Rows of `NARROW` in the sm90 family, by kind of operand."""

SM90_NARROW_F64: dict[str, dict[int, Tile]] = {
    # one CTA of 16 warps; two of 8 came second, and read each key twice as often
    "float64": _rows(*((d, 256, 512, 2, 16) for d in (1, 2, 3, 4))),
}
"""Rows of `NARROW_F64`."""

SM90_ONE_QUERY: dict[str, dict[int, Tile]] = {
    # Bytes on their way hide what memory takes to answer: rows of 3 features fill 3 vectors of each lane, others one or
    # two. Two or three CTAs an SM, or one of 16 warps, were alike.
    "16 bits": _rows(*((d, 16, 16, 1 if d == 3 else 4, 8, 1, 0, 2) for d in (1, 2, 3, 4))),
    "float32": _rows(*((d, 16, 16, 1 if d == 3 else 4, 8, 1, 0, 2) for d in (1, 2, 3, 4))),
    "float64": _rows(*((d, 16, 16, 4 if d < 3 else 2, 8, 1, 0, 2) for d in (1, 2, 3, 4))),
}
"""Rows of `ONE_QUERY`, by kind of operand: ``stages`` is how many blocks of keys a warp loads at once; the sizes of a
block follow from the dtype, those here are without meaning."""

SM90_LANES: dict[str, dict[int, Tile]] = {
    "float32": _rows(
        # 4 rows a lane, two CTAs of 128 registers: 0.17, 0.20 and 0.26 clocks a score and SM at d 5, 6 and 8 (`NARROW`:
        # 0.29, 0.30, 0.41). At d 8 8 rows in one CTA were 4 percent faster for a head of 16384, equal for many of 1024
        # and 4096, 7 percent slower for one of 4096; for that one 2 rows were 8 percent faster, elsewhere slower.
        *((d, 1024, 512, 2, 8, 1, 0, 2) for d in (5, 6, 7, 8)),
        (12, 1024, 512, 2, 8),  # 0.35, as 16 columns on tensor cores 0.38; two CTAs of 3 rows a lane 4 percent slower
    )
}
"""Rows of `LANES`, by kind of operand: a CTA has ``block_m`` query rows, a lane those of its warp that are 32 apart."""

SM90_FEW = {NARROW: SM90_NARROW, NARROW_F64: SM90_NARROW_F64, ONE_QUERY: SM90_ONE_QUERY, LANES: SM90_LANES}
"""The operations of the sm90 family that take exactly as many features as their rows have."""

GENERAL = {
    ("16 bits", "attention_forward"): _rows((64, 128, 64, 1, 4), (128, 64, 64, 1, 4)),
    ("16 bits", "attention_backward_dq"): _rows((64, 64, 64, 2, 4), (256, 64, 16, 1, 4)),
    ("16 bits", "attention_backward_dk"): _rows((256, 16, 64, 1, 4)),
    ("16 bits", "attention_backward_dkv"): _rows((256, 64, 64, 1, 8, 2)),
    ("float32", "attention_forward"): _rows((64, 128, 32, 1, 4, 1, 1), (128, 128, 32, 1, 8, 1, 1)),
    ("float64", "attention_forward"): _rows((128, 64, 32, 1, 8, 2)),
}
"""Smaller rows where the registers of the score terms made the table's spill; for targets with room for them."""

PRECISE: dict[tuple[str | None, str], dict[int, dict[int, Tile]]] = {
    ("tf32", "attention_forward"): {
        227: _rows((128, 128, 48, 1, 4)),  # two CTAs an SM: 5 percent over 32 keys
        # 32 rows a warp: a fragment of K or V is rounded once for two products
        99: _rows((64, 128, 64, 1, 4), (128, 128, 32, 1, 4)),
    },
}
"""Rows of a precision in place of its dtype's, for variants without score terms, by class of shared memory."""

SPILLS = {
    # In the producer, which has 40 registers: coordinates, read again once a block, and what it has at hand while it
    # works out the next tile. In 16 bits with key_bias alone.
    **{("16 bits", "attention_forward_sm90", d): 40 for d in (64, 96, 128, 192, 256)},
    ("float32", "attention_forward_sm90", 128): 128,
    ("16 bits", FUSED, 64): 64,  # in order 1.14 of FlashAttention-2; 1.04 with the next best row
    ("16 bits", FUSED, 128): 64,  # 1.23 against 1.08
    ("16 bits", FUSED, 256): 64,  # 0.97; 0.84 with one stage, which spilled as much
    # In the producer's warpgroup, which has 24 registers: what it has at hand while it works out the next block of
    # keys.
    **{("16 bits", f"{FUSED}_sm90", d): 448 for d in (64, 96, 128)},
    ("16 bits", f"{DQ}_sm90", 256): 192,  # there likewise
    ("16 bits", f"{DKV}_sm90", 256): 64,  # there likewise, with score terms
    ("float64", "attention_forward", 8): 96,  # addresses, once a block, on sm_100 and sm_120
    # By NVRTC 13.5 alone, and some targets.
    ("16 bits", "attention_forward", 256): 16,
    ("float32", "attention_forward", 128): 16,  # tf32
    ("float32", NARROW, 3): 48,
    ("float32", NARROW, 4): 16,
    ("float64", NARROW, 4): 16,
    ("float32", FUSED, 128): 128,  # 1.48 of the memory-efficient kernel; 54 TFLOP/s against 44 with the next best row
    ("float32", NARROW, 8): 96,  # 36 by 13.0
    ("float32", "attention_backward_dkv", 256): 96,
    ("float32", "attention_backward_dq", 128): 16,
    ("float64", "attention_backward_dkv", 128): 128,
    ("float64", "attention_backward_dk", 256): 128,
    ("float64", "attention_backward_dv", 256): 128,
    ("float64", "attention_backward_dq", 256): 128,
}
"""Bytes that rows may spill, by kind, operation and head dim: those that are faster so than any that does not."""


def may_spill(variant: Variant) -> int:
    """Bytes that a variant may spill."""
    operation = variant.operation + ("_sm90" if variant.family == "sm90" else "")
    return SPILLS.get((kind(variant.dtype), operation, variant.tile.head_dim), 0)


_HALVES = ("attention_backward_dk", "attention_backward_dv")
KEY_GRADIENTS = ("attention_backward_dkv", *_HALVES)
"""Operations that `backward_operations` chooses from."""

ROW_KERNEL = Tile(head_dim=32, value_dim=32, block_m=16, block_n=16, stages=1, warps=4)
"""Of the kernels that work on rows, not tiles (delta, convert, merge), only the number of warps matters."""

PLAIN_HEAD_DIMS = (8, 16, 64, 128, 256)
"""Tile head dims that have, at 16-byte loads, a variant without score terms and with the scale in the exponent. The
forward has one at 32, too, where it is four times as fast as the other."""
UNALIGNED_HEAD_DIMS = (8, 16, 64, 128, 256)
"""Tile head dims of the load kinds below 16 bytes: fewer, since the loads bound them."""


def kind(dtype: str) -> str:
    """Which table serves operands of a dtype."""
    return "16 bits" if ITEMSIZE[dtype] == 2 else dtype


def loads(dtype: str) -> tuple[str, ...]:
    """Load kinds: single elements of 4 and 8 bytes are copied like vectors of them, at any stride."""
    return ("16", "8", "4", "strided") if ITEMSIZE[dtype] == 2 else ("16", "strided")


def _smem_limit(target: str, family: str) -> int:
    return SMEM_LIMIT["75" if family == "sm75" else target]


def _largest(classes: dict[int, dict[int, Tile]], head_dim: int, limit: int) -> Tile | None:
    """The row of the largest class of shared memory within the limit, None where none fits."""
    fitting = (classes[kb] for kb in sorted(classes, reverse=True) if kb * 1024 <= limit)
    return next((rows[head_dim] for rows in fitting if head_dim in rows), None)


def _row(operation: str, dtype: str, head_dim: int, target: str, family: str) -> Tile | None:
    return _largest(TABLES[kind(dtype)].get(operation, {}), head_dim, _smem_limit(target, family))


def head_dims(operation: str, dtype: str, load: str, target: str, family: str) -> list[int]:
    """Tile head dims at which ``operation`` has a variant with this load kind, ascending; none where it has not."""
    classes = TABLES[kind(dtype)].get(operation, {}) if operation != FUSED or family != "sm75" else {}
    dims = sorted({d for rows in classes.values() for d in rows})
    if operation == NARROW:
        dims = dims if load == "strided" else []
    elif load != "16":
        dims = [d for d in dims if d in UNALIGNED_HEAD_DIMS]
    dims = [d for d in dims if _row(operation, dtype, d, target, family)]
    if operation in _HALVES:  # for what one kernel cannot do
        whole = max(head_dims("attention_backward_dkv", dtype, load, target, family))
        dims = [d for d in dims if d > whole]
    return dims


def bucket(operation: str, dtype: str, load: str, target: str, family: str, features: int) -> int | None:
    """The least of `head_dims` that is at least ``features``, None where all are less."""
    return next((d for d in head_dims(operation, dtype, load, target, family) if d >= features), None)


def has_plain(operation: str, head_dim: int, load: str) -> bool:
    """Whether there is a variant without score terms at this tile head dim and load kind."""
    if operation == "attention_forward" and head_dim == 8:
        return True  # rows of an odd number of doubles are no vectors, and terms are a third of the time
    return load == "16" and (head_dim in PLAIN_HEAD_DIMS or (operation == "attention_forward" and head_dim == 32))


def tile(
    operation: str,
    dtype: str,
    head_dim: int,
    load: str,
    plain: bool,
    target: str,
    family: str,
    precision: str | None = None,
) -> Tile:
    """The tile for a head dim of `head_dims`."""
    row = _row(operation, dtype, head_dim, target, family)
    if row is None:
        raise KeyError(f"no row of {operation} in {dtype} for {head_dim} features on sm_{target}")
    limit = _smem_limit(target, family)
    if plain:
        other = _largest(PRECISE.get((precision, operation), {}), head_dim, limit)
    else:
        other = GENERAL.get((kind(dtype), operation), {}).get(head_dim)
    if other is None or family == "sm75" or other.smem_bytes(operation, dtype) > limit:
        return row
    return other


def backward_operations(dtype: str, head_dim: int, target: str, family: str) -> dict[str, tuple[str, ...]]:
    """Kernels that between them give dk, dv and dkey_bias: one where the registers and shared memory hold both sums, of
    at least ``head_dim`` columns."""
    if head_dim <= max(head_dims("attention_backward_dkv", dtype, "strided", target, family)):
        return {"attention_backward_dkv": ("dk", "dv", "dkey_bias")}
    return {"attention_backward_dk": ("dk", "dkey_bias"), "attention_backward_dv": ("dv",)}


def key_warps(tile: Tile, operation: str, dtype: str, m: int) -> int:
    """Into how many parts the warps of a CTA of `NARROW` or `NARROW_F64` split the keys, where m rows need few of
    them."""
    step = NARROW_F64_KEYS if operation == NARROW_F64 else 32 * (16 // accumulator_bytes(dtype))  # 16 bytes a lane
    steps = tile.block_n // step
    parts, rows = 1, 1 if m == 1 else tile.block_m // tile.warps
    while 2 * parts <= min(steps, tile.warps) and tile.warps // (2 * parts) * rows >= m:
        parts *= 2
    return parts


def resident(smem_bytes: int, tile: Tile, target: str) -> int:
    """CTAs of a kernel for few features that registers and shared memory of an SM hold."""
    own = 1024  # shared memory that the system takes for each CTA
    return max(1, min(tile.resident, (SMEM_LIMIT[target] + own) // (smem_bytes + own)))


def splits(units: int, blocks: int, slots: int) -> int:
    """Into how many parts the grid splits ``blocks`` blocks of keys, where ``units`` CTAs would not fill the ``slots``
    of the device: as few as fill it best."""
    if units >= 4 * slots or blocks < 8:
        return 1
    most = min(blocks, -(-4 * slots // units), 1024)

    def used(parts: int) -> float:
        return units * parts / (slots * -(-units * parts // slots))

    return max(range(1, most + 1), key=lambda parts: (used(parts), -parts))


def max_head_dim(operation: str, dtype: str, target: str, family: str) -> int:
    """The most features that ``attention``, ``attention_backward`` or ``attention_lse`` takes, at any strides."""

    def served(d: int) -> bool:
        kernels: tuple[str, ...] = ("attention_forward",)
        if operation == "attention_backward":
            kernels = ("attention_backward_dq", *backward_operations(dtype, d, target, family))
        return all(d in head_dims(kernel, dtype, "strided", target, family) for kernel in kernels)

    return max(filter(served, UNALIGNED_HEAD_DIMS))


def has_unordered(dtype: str) -> bool:
    """Whether the fused backward has a form in which sums come in any order: turns cost wider dtypes little."""
    return kind(dtype) == "16 bits"


def best_family(target: str) -> str:
    """The best kernel family built for a target that has every operation."""
    return "sm75" if target == "75" else "sm80"


def families(target: str) -> tuple[str, ...]:
    """The families that a target's GPUs use unless told otherwise. That of sm_90 does not serve every call."""
    return ("sm90", "sm80") if target == "90a" else (best_family(target),)


def sm90_forward(
    dtype: str,
    precision: str | None,
    features: int,
    keys: float = math.inf,
    has_value: bool = True,
    capped: bool = False,
) -> Tile | None:
    """The tile of the sm90 family's forward for so many features at most, and so many keys a query row; None where it
    has none. ``capped``: whether it has a softcap."""
    if not has_value:
        alone = SM90_LSE.get((kind(dtype), precision), {})
        return next((alone[d] for d in sorted(alone) if d >= features), None)
    rows = SM90_FORWARD.get((kind(dtype), precision), {})
    d = next((d for d in sorted(rows) if d >= features), None)
    if d is None:
        return None
    short = SM90_SHORT.get((kind(dtype), precision), {}) if keys <= SHORT_ROWS else {}
    special = SM90_CAPPED.get((kind(dtype), precision), {}) if capped else {}
    return special.get(d) or short.get(d) or rows[d]


def dtypes(target: str, family: str) -> tuple[str, ...]:
    """What the kernels of a family take on a target. Turing has no bfloat16."""
    return ("float16", "float32", "float64") if family == "sm75" else ("float16", "bfloat16", "float32", "float64")


def precisions(dtype: str, family: str) -> tuple[str | None, ...]:
    """Values of ``precision`` that have kernels of their own."""
    return (None, "tf32") if dtype == "float32" and family != "sm75" else (None,)


def variant(
    operation: str,
    dtype: str,
    head_dim: int,
    load: str,
    plain: bool,
    target: str,
    family: str,
    precision: str | None = None,
    ordered: bool = True,
) -> Variant:
    """The kernel with the `tile` of the same arguments."""
    from cuflash.compile import SCORE_TERMS, Variant

    t = tile(operation, dtype, head_dim, load, plain, target, family, precision)
    terms = ("KeyBias",) if operation == NARROW else SCORE_TERMS
    scores = () if plain else terms
    return Variant(operation, family, target, dtype, dtype, t, scores, load, not plain, ordered, precision)


def row_variant(
    operation: str, dtype: str, load: str, target: str, family: str, precision: str | None = None
) -> Variant:
    """A kernel that works on rows, not tiles."""
    from cuflash.compile import Variant

    return Variant(operation, family, target, dtype, dtype, ROW_KERNEL, (), load, False, precision=precision)


SM90_TERMS: tuple[tuple[str, ...], ...] = ((), ("KeyBias",), ("Softcap",), ("Softcap", "KeyBias"))
"""Score terms that calls of the sm90 family have. Where a scale alone keeps a call from being plain, it takes key_bias,
of zeros."""


def sm90_variant(dtype: str, tile: Tile, precision: str | None, terms: tuple[str, ...]) -> Variant:
    """The kernel of what `sm90_forward` gives that serves terms of `SM90_TERMS`. For 16 bits without values, a softcap
    alone takes key_bias, too, of zeros."""
    from cuflash.compile import SCORE_TERMS, Variant

    if terms == ("Softcap",) and tile.value_dim == 0 and kind(dtype) == "16 bits":
        terms = SCORE_TERMS
    return Variant(
        "attention_forward", "sm90", "90a", dtype, dtype, tile, terms, "16", bool(terms), precision=precision
    )


def sm90_backward(dtype: str, features: int, needs_dq: bool = True) -> Tile | None:
    """The tile of the sm90 family's backward for so many features at most, None where it has none."""
    if kind(dtype) != "16 bits":
        return None
    rows = SM90_BACKWARD if needs_dq else SM90_BACKWARD_KEYS
    return next((rows[d] for d in sorted(rows) if d >= features), None)


def sm90_backward_variant(
    dtype: str, tile: Tile, ordered: bool, terms: tuple[str, ...] = (), needs_dq: bool = True
) -> Variant:
    """The kernel of what `sm90_backward` gives that serves terms of `SM90_TERMS`.

    An order costs too little for kernels without one where there are terms. Without dq, which is rarely asked for,
    nothing has an order, and a kernel for key_bias serves calls that have none, with weights of 0.
    """
    from cuflash.compile import Variant

    ordered = ordered or bool(terms) or not needs_dq
    if not needs_dq and "KeyBias" not in terms:
        terms += ("KeyBias",)
    return Variant(FUSED, "sm90", "90a", dtype, dtype, tile, terms, "16", bool(terms), ordered, needs_dq=needs_dq)


def sm90_backward_dq_rows(plain: bool) -> tuple[Tile, ...]:
    """Those of `SM90_BACKWARD_DQ` that have a variant: with score terms not those for few features, where dq alone is
    rarely asked for."""
    return tuple(tile for tile in SM90_BACKWARD_DQ if plain or tile.head_dim > max(SM90_BACKWARD))


def sm90_backward_dq(dtype: str, d: int, e: int, plain: bool = True) -> Tile | None:
    """The tile of the sm90 family's backward of queries alone, None where it has none."""
    if kind(dtype) != "16 bits":
        return None
    return next((t for t in sm90_backward_dq_rows(plain) if t.head_dim >= d and t.value_dim >= e), None)


def sm90_backward_dq_variant(dtype: str, tile: Tile, plain: bool = True) -> Variant:
    """The kernel of what `sm90_backward_dq` gives. One serves any score terms, as softcap is asked for at run time."""
    return _sm90_split_variant(DQ, dtype, tile, plain)


def sm90_backward_dkv(dtype: str, d: int, e: int) -> Tile | None:
    """The tile of the sm90 family's backward of keys and values alone, None where it has none."""
    if kind(dtype) != "16 bits" or max(d, e) <= max(SM90_BACKWARD):
        return None
    return next((tile for tile in SM90_BACKWARD_DKV if tile.head_dim >= d and tile.value_dim >= e), None)


def sm90_backward_dkv_variant(dtype: str, tile: Tile, plain: bool = True) -> Variant:
    """The kernel of what `sm90_backward_dkv` gives, likewise."""
    return _sm90_split_variant(DKV, dtype, tile, plain)


def _sm90_split_variant(operation: str, dtype: str, tile: Tile, plain: bool) -> Variant:
    from cuflash.compile import SCORE_TERMS, Variant

    return Variant(operation, "sm90", "90a", dtype, dtype, tile, () if plain else SCORE_TERMS, "16", not plain)


def sm90_few(operation: str, dtype: str, d: int) -> Variant | None:
    """The kernel of an operation of `SM90_FEW` for exactly so many features, None where it has none."""
    from cuflash.compile import Variant

    row = SM90_FEW[operation].get(kind(dtype), {}).get(d)
    return None if row is None else Variant(operation, "sm90", "90a", dtype, dtype, row, ("KeyBias",), "16", True)


def _sm90_variants() -> list[Variant]:
    few = (sm90_few(o, dtype, d) for dtype in ITEMSIZE for o in SM90_FEW for d in SM90_FEW[o].get(kind(dtype), {}))
    found = [variant for variant in few if variant is not None]
    for (kind_of, precision), rows in SM90_FORWARD.items():
        for dtype in (dtype for dtype in ITEMSIZE if kind(dtype) == kind_of):
            for terms in SM90_TERMS:
                sizes = itertools.product(rows, (math.inf, 1))
                wanted = [sm90_forward(dtype, precision, *size, capped="Softcap" in terms) for size in sizes]
                wanted += SM90_LSE[kind_of, precision].values()
                found += [sm90_variant(dtype, t, precision, terms) for t in wanted if t is not None]
            if params.planes(dtype, precision) > 1:
                found.append(row_variant("attention_planes", dtype, "strided", "90a", "sm90", precision))
    for dtype in (dtype for dtype in ITEMSIZE if kind(dtype) == "16 bits"):
        for needs_dq, rows in ((True, SM90_BACKWARD), (False, SM90_BACKWARD_KEYS)):
            calls = itertools.product(rows.values(), (True, False), SM90_TERMS, (needs_dq,))
            found += [sm90_backward_variant(dtype, *call) for call in calls]
        for plain in (True, False):
            found += [sm90_backward_dq_variant(dtype, tile, plain) for tile in sm90_backward_dq_rows(plain)]
            found += [sm90_backward_dkv_variant(dtype, tile, plain) for tile in SM90_BACKWARD_DKV]
        found.append(row_variant("attention_dkey_bias", dtype, "strided", "90a", "sm90"))
        found += [row_variant("attention_delta", dtype, load, "90a", "sm90") for load in ("16", "strided")]
    return list(dict.fromkeys(found))  # one may serve several


@lru_cache
def variants(target: str, family: str) -> list[Variant]:
    """Every variant of a family that the launcher can ask for on this target, in a fixed order."""
    if family == "sm90":
        return _sm90_variants()
    found = []
    for dtype in dtypes(target, family):
        for operation, load in ((o, x) for o in TABLES[kind(dtype)] if o not in (FUSED, NARROW) for x in loads(dtype)):
            for d in head_dims(operation, dtype, load, target, family):
                for plain in (False, True) if has_plain(operation, d, load) else (False,):
                    for precision in precisions(dtype, family):
                        found.append(variant(operation, dtype, d, load, plain, target, family, precision))
        fused = head_dims(FUSED, dtype, "16", target, family)
        for d in fused:
            for precision in precisions(dtype, family):
                for ordered in (True, False) if has_unordered(dtype) else (True,):
                    found.append(variant(FUSED, dtype, d, "16", True, target, family, precision, ordered))
        if fused:
            found.append(row_variant("attention_convert", dtype, "strided", target, family))
        for d in head_dims(NARROW, dtype, "strided", target, family):
            found.append(variant(NARROW, dtype, d, "strided", False, target, family))
        found.append(row_variant("attention_merge_splits", dtype, "strided", target, family))
        for load in ("16", "strided"):
            found.append(row_variant("attention_delta", dtype, load, target, family))
    for dtype in dtypes(target, best_family(target)):  # merging has no products
        found.append(row_variant("attention_merge", dtype, "strided", target, family))
    return found
