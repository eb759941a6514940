"""What is measured: the grid that speed claims are made on, and other shapes, as data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TOKENS, HIDDEN = 16384, 2048
"""Every grid shape has this many tokens in all and this hidden size: batch = TOKENS/seqlen, heads = HIDDEN/head_dim."""
HEAD_DIMS = (64, 128, 256)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
OPS = ("forward", "backward", "lse")
DTYPES = ("float16", "bfloat16", "float32", "float64")
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
BACKWARD_FLOPS = 2.5
"""Backward over forward, by convention: five matrix products against two."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One shape with its options: q (batch, heads, seqlen, head_dim), k and v (batch, kv_heads, seqlen_k, ...)."""

    dtype: str
    head_dim: int
    batch: int
    heads: int
    seqlen: int
    value_dim: int = 0
    kv_heads: int = 0
    seqlen_k: int = 0
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    key_bias: bool = False
    precision: str | None = None

    def __post_init__(self) -> None:
        for name, same in (("value_dim", self.head_dim), ("kv_heads", self.heads), ("seqlen_k", self.seqlen)):
            object.__setattr__(self, name, getattr(self, name) or same)
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def shift(self) -> int:
        """Row i sits at key i + shift (bottom-right alignment)."""
        return self.seqlen_k - self.seqlen

    def visible_pairs(self) -> float:
        """(row, key) pairs of one head that are counted: half of them when causal, by convention; a window exactly."""
        m, n = self.seqlen, self.seqlen_k
        if self.window is None:
            return m * n * (0.5 if self.causal else 1.0)
        left, right = self.window
        right = 0 if self.causal else right
        pairs = 0
        for i in range(m):
            first = 0 if left is None else max(0, i + self.shift - left)
            last = n - 1 if right is None else min(n - 1, i + self.shift + right)
            pairs += max(0, last - first + 1)
        return float(pairs)

    def flops(self, op: str) -> float:
        """Floating-point operations of the matrix products that ``op`` cannot do without."""
        features = self.head_dim + (0 if op == "lse" else self.value_dim)
        forward = 2.0 * self.batch * self.heads * self.visible_pairs() * features
        return forward * BACKWARD_FLOPS if op == "backward" else forward

    def nbytes(self, op: str) -> int:
        """Bytes of the inputs and results of ``op``, each counted once."""
        size = ITEMSIZE[self.dtype]
        q, o = (self.batch * self.heads * self.seqlen * width for width in (self.head_dim, self.value_dim))
        k, v = (self.batch * self.kv_heads * self.seqlen_k * width for width in (self.head_dim, self.value_dim))
        lse = self.batch * self.heads * self.seqlen * (8 if self.dtype == "float64" else 4)
        match op:
            case "forward":
                return (q + k + v + o) * size
            case "backward":
                return (2 * (q + k + v) + 2 * o) * size + lse
            case "lse":
                return (q + k) * size + lse
        raise ValueError(f"op must be one of {OPS}, got {op!r}")

    def columns(self) -> dict[str, Any]:
        """The columns of a result row that say what was measured."""
        return {
            "dtype": self.dtype,
            "precision": self.precision,
            "head_dim": self.head_dim,
            "value_dim": self.value_dim,
            "causal": self.causal,
            "window": None if self.window is None else list(self.window),
            "softcap": self.softcap,
            "key_bias": self.key_bias,
            "batch": self.batch,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "seqlen": self.seqlen,
            "seqlen_k": self.seqlen_k,
        }

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.kv_heads == self.heads else f"{self.heads}/{self.kv_heads}"
        length = f"{self.seqlen}" if self.seqlen_k == self.seqlen else f"{self.seqlen}x{self.seqlen_k}"
        width = f"{self.head_dim}" if self.value_dim == self.head_dim else f"{self.head_dim}/{self.value_dim}"
        options = [name for name in ("causal", "key_bias") if getattr(self, name)]
        options += [
            f"{name}={getattr(self, name)}" for name in ("window", "softcap", "precision") if getattr(self, name)
        ]
        return " ".join((self.dtype, f"d{width}", f"S{length}", f"B{self.batch}", f"H{heads}", *options))


def full(dtype: str) -> tuple[Problem, ...]:
    """The grid: 3 head dims, causal or not, 6 lengths."""
    return tuple(
        Problem(dtype=dtype, head_dim=d, causal=causal, seqlen=s, batch=TOKENS // s, heads=HIDDEN // d)
        for d in HEAD_DIMS
        for causal in (False, True)
        for s in SEQLENS
    )


def quick(dtype: str) -> tuple[Problem, ...]:
    """A third of the grid: enough to see whether a change helped."""
    return tuple(p for p in full(dtype) if p.seqlen in (512, 4096) or (p.seqlen == 16384 and p.head_dim == 128))


def decode(dtype: str) -> tuple[Problem, ...]:
    """One query row against a cache: bound by reading k and v."""
    sizes = ((1, 4096), (1, 32768), (1, 131072), (8, 8192), (64, 8192))
    return tuple(
        Problem(dtype=dtype, head_dim=128, seqlen=1, seqlen_k=n, batch=b, heads=32, kv_heads=kv)
        for kv in (8, 32)
        for b, n in sizes
    )


def options(dtype: str) -> tuple[Problem, ...]:
    """Each option and each awkward length once, around one shape of the grid."""

    def around(**changes: Any) -> Problem:
        shape: dict[str, Any] = {"head_dim": 128, "seqlen": 4096, "batch": 4, "heads": 16}
        return Problem(dtype=dtype, **(shape | changes))

    return (
        around(),
        around(window=(256, 0), causal=True),
        around(window=(1024, 1024)),
        around(softcap=30.0),
        around(key_bias=True),
        around(kv_heads=4),
        around(kv_heads=8, heads=64, causal=True, seqlen=2048, batch=2),
        around(kv_heads=8, heads=64, causal=True, seqlen=8192, batch=1),
        around(seqlen=4095),
        around(seqlen=4099),
        around(seqlen=1000, batch=16),
        around(seqlen=1024, seqlen_k=16384, causal=True),
        around(head_dim=32, heads=64),
        around(head_dim=96),
        around(head_dim=192),
        around(head_dim=192, causal=True),
        around(head_dim=192, value_dim=128),
        around(head_dim=80, value_dim=80),
        around(head_dim=67, value_dim=67),
    )


def points(dtype: str) -> tuple[Problem, ...]:
    """Points of few features all against all, and a few against very many: kernel regression, densities."""
    return (
        *(Problem(dtype=dtype, head_dim=d, seqlen=16384, batch=1, heads=1) for d in (1, 2, 3, 8, 16)),
        *(Problem(dtype=dtype, head_dim=3, seqlen=m, seqlen_k=4_000_000, batch=1, heads=1) for m in (1, 32)),
    )


GRIDS: dict[str, Callable[[str], tuple[Problem, ...]]] = {
    "full": full,
    "quick": quick,
    "decode": decode,
    "options": options,
    "points": points,
}
