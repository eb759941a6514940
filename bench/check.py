"""Results against float64, before anything is timed: whole heads, computed densely in blocks of rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bench.device import Inputs, to_float64
from bench.problems import Problem

ROWS = 1024
"""Rows of the score matrix that exist at one time, in float64."""

LIMITS = {"float16": 3e-3, "bfloat16": 2.4e-2, "float32": 2e-5, "float64": 1e-11}
"""Largest ||result - reference|| / ||reference|| of a head for which a timing counts.

Three to four times what dense attention gives that rounds every intermediate to the dtype (7e-4 in float16, 7e-3 in
bfloat16 at any length of the grid): wide enough for any sound order of the arithmetic, far below what a wrong mask,
scale, layout or dtype gives. Accuracy itself is judged by the tests and by accuracy.py, not here.
"""
TF32_LIMIT = 3e-3


def sampled_heads(problem: Problem) -> tuple[tuple[int, int], ...]:
    """(batch, head) pairs that are checked: the first and the last."""
    return tuple(dict.fromkeys(((0, 0), (problem.batch - 1, problem.heads - 1))))


def reference(problem: Problem, x: Inputs, at: tuple[int, int], xp: Any, gradients: bool) -> dict[str, Any]:
    """o, lse and, if asked, dq of head ``at`` and dk, dv, dkey_bias of its key head, in float64."""
    b, h = at
    group = problem.heads // problem.kv_heads
    kv = h // group
    k, v = to_float64(x.k[b, kv]), to_float64(x.v[b, kv])
    result = _head(problem, x, b, h, k, v, xp, gradients)
    if gradients:
        for other in range(kv * group, (kv + 1) * group):
            if other != h:
                more = _head(problem, x, b, other, k, v, xp, gradients)
                result["dk"] += more["dk"]
                result["dv"] += more["dv"]
    return result


def _head(p: Problem, x: Inputs, b: int, h: int, k: Any, v: Any, xp: Any, gradients: bool) -> dict[str, Any]:
    q, do = to_float64(x.q[b, h]), to_float64(x.do[b, h])
    bias = None if x.key_bias is None else to_float64(x.key_bias[b, h])
    o, lse = xp.empty((p.seqlen, p.value_dim)), xp.empty(p.seqlen)
    dq, dk, dv, dbias = xp.empty_like(q), xp.zeros_like(k), xp.zeros_like(v), xp.zeros(p.seqlen_k)
    for start in range(0, p.seqlen, ROWS):
        rows = slice(start, min(start + ROWS, p.seqlen))
        s = (q[rows] @ k.T) * p.scale
        slope = None
        if p.softcap is not None:
            t = xp.tanh(s / p.softcap)
            s, slope = p.softcap * t, 1.0 - t * t
        if bias is not None:
            s += bias
        hidden = _hidden(p, rows, xp)
        if hidden is not None:
            s[hidden] = -math.inf
        top = s.max(axis=-1, keepdims=True)
        s -= top
        prob = xp.exp(s, out=s)
        total = prob.sum(axis=-1, keepdims=True)
        prob /= total
        o[rows] = prob @ v
        lse[rows] = (top + xp.log(total))[:, 0]
        if not gradients:
            continue
        dp = do[rows] @ v.T
        dv += prob.T @ do[rows]
        dp -= (do[rows] * o[rows]).sum(axis=-1, keepdims=True)
        ds = xp.multiply(dp, prob, out=dp)
        dbias += ds.sum(axis=0)
        if slope is not None:
            ds *= slope
        dq[rows] = (ds @ k) * p.scale
        dk += (ds.T @ q[rows]) * p.scale
    return {"o": o, "lse": lse} | ({"dq": dq, "dk": dk, "dv": dv, "dkey_bias": dbias} if gradients else {})


def _hidden(p: Problem, rows: slice, xp: Any) -> Any:
    """True where row does not see key; None where every row sees every key."""
    if not p.causal and p.window is None:
        return None
    left, right = p.window or (None, None)
    right = 0 if p.causal else right
    offset = xp.arange(p.seqlen_k)[None, :] - (xp.arange(rows.start, rows.stop)[:, None] + p.shift)
    hidden = xp.zeros(offset.shape, dtype=bool)
    if left is not None:
        hidden |= offset < -left
    if right is not None:
        hidden |= offset > right
    return hidden


def errors(
    problem: Problem, results: Mapping[str, Any], at: tuple[int, int], expected: Mapping[str, Any]
) -> dict[str, float]:
    """Relative error, in the Frobenius norm, of each result at head ``at``; infinite where it is not finite."""
    b, h = at
    group = problem.heads // problem.kv_heads
    found = {}
    for name, array in results.items():
        got = to_float64(array[b, h // group if name in ("dk", "dv") else h])
        difference = float(((got - expected[name]) ** 2).sum()) ** 0.5
        found[name] = difference / float((expected[name] ** 2).sum()) ** 0.5 if math.isfinite(difference) else math.inf
    return found


def limit(problem: Problem) -> float:
    """What ``errors`` may be for a timing to count."""
    return TF32_LIMIT if problem.precision == "tf32" else LIMITS[problem.dtype]
