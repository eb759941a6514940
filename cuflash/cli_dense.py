"""Dense attention in float64, and how far from it a correct result may be: what the demo holds results against.

Deliberately the textbook formulas, apart from every other file: the score matrix is made and kept.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
RESULTS = ("o", "lse", "dq", "dk", "dv")

TRUNCATION = 2.0**-23
"""What one step of a tensor core loses of its float32 accumulator at most."""
MMA_DEPTH = 16
"""Products that one step adds up."""


class Dense(NamedTuple):
    """Results of one head in float64 and, under the same names, the magnitudes that errors are measured against."""

    values: dict[str, Array]
    bounds: dict[str, float]
    max_score: float
    """Largest magnitude of a score."""
    max_p: float
    """Largest probability."""


def attention(q: Array, k: Array, v: Array, do: Array) -> Dense:
    """Forward and gradients of one head: q (m, d), k (n, d), v (n, e), do (m, e), with the usual scale 1/sqrt(d).

    A bound is what the same sum reaches when nothing cancels, so that error / bound does not depend on the data: the
    largest |v| for o, 1 for lse; for dq the largest of scale sum_j p (|do| |v| + |do| |o|) |k|; dk and dv alike.
    """
    q, k, v, do = (x.astype(np.float64) for x in (q, k, v, do))
    scale = 1 / math.sqrt(q.shape[-1])
    s = scale * (q @ k.T)
    row_max = s.max(axis=-1, keepdims=True)
    lse = row_max + np.log(np.exp(s - row_max).sum(axis=-1, keepdims=True))
    p = np.exp(s - lse)
    o = p @ v
    ds = p * (do @ v.T - (do * o).sum(axis=-1, keepdims=True))
    values = {"o": o, "lse": lse[:, 0], "dq": scale * (ds @ k), "dk": scale * (ds.T @ q), "dv": p.T @ do}
    weight = p * (np.abs(do) @ np.abs(v).T + np.abs(do * o).sum(axis=-1, keepdims=True))
    terms = {
        "o": np.abs(v),
        "lse": np.ones(1),
        "dq": scale * (weight @ np.abs(k)),
        "dk": scale * (weight.T @ np.abs(q)),
        "dv": p.T @ np.abs(do),
    }
    bounds = {name: float(term.max()) for name, term in terms.items()}
    return Dense(values, bounds, float(np.abs(s).max()), float(p.max()))


def error(name: str, result: Array, dense: Dense) -> float:
    """Largest error of a result of the head, in units of its bound; NaN where the result is NaN."""
    return float(np.abs(result.astype(np.float64) - dense.values[name]).max()) / dense.bounds[name]


def host_budget(name: str, dtype: np.dtype[Any], max_score: float) -> float:
    """Most that ``error`` may be on the host, which accumulates in float32, for operands of this dtype.

    64 roundings for the sums, 8 max|s| for those of the scores (an error of the exponent is a relative error of the
    probability), and the one of the result.
    """
    return _float32_budget(max_score) + _rounding(name, dtype)


def kernel_budget(name: str, dtype: np.dtype[Any], own: float, steps: float, features: int, dense: Dense) -> float:
    """Most that ``error`` may be on a GPU, for operands of this dtype.

    Twice ``own``, the error of the host backend when it rounds the operands of the second matmul where the kernels do;
    one more such rounding, which the host may have been lucky with; what the host may have in float32; the result's
    rounding; and what tensor cores, which truncate, lose in a chain of this many steps and in the scores.
    """
    rounding = _rounding(name, dtype)
    lucky = 0 if name == "lse" else 2 * rounding * dense.max_p
    truncation = TRUNCATION * (steps + 2 * math.ceil(features / MMA_DEPTH) * dense.max_score)
    return 2 * own + lucky + _float32_budget(dense.max_score) + rounding + truncation


def _float32_budget(max_score: float) -> float:
    return float(np.finfo(np.float32).eps) * (64 + 8 * max_score)


def _rounding(name: str, dtype: np.dtype[Any]) -> float:
    """Largest relative error of rounding a result; lse stays in float32."""
    return float(np.finfo(np.float32 if name == "lse" else dtype).eps) / 2
