"""Dense attention in float64, and what its results may be held to.

Written apart from the package: the whole matrix of scores, `scipy.special.logsumexp`, heads repeated, gradients by the
textbook. Only `kernel_budget` runs the host specification, as the measure of what a kernel's roundings cost.

Arrays may be NumPy's or CuPy's, of any dtype that casts to float64; options are those of the public functions. Results
are always float64 ndarrays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp  # type: ignore[import-untyped]

Array = NDArray[Any]
Float64 = NDArray[np.float64]

TRUNCATION = 2.0**-23
"""What one step of a tensor core's float32 accumulation loses of its accumulator at most."""
SPLIT = 3 * 2.0**-21
"""What three TF32 products lose of a float32 product at most.

x = hi + lo with hi the leading 11 bits: |lo| < 2^-10 |x| is a whole number, below 2^13, of units in the last place of
x. Rounded to 11 bits it is off by two such units, 2^-22 |x|, in either factor; lo lo, left out, is 2^-20 |a b|.
"""
TF32_ROUNDOFF = 2.0**-11


@dataclass(frozen=True)
class Arithmetic:
    """What a kernel's products of float32 or float64 matrices lose, beside what the host specification loses.

    ``product`` is lost of each product; each step of a sum, of ``depth`` terms, loses ``unit`` of the sum. Where there
    are ``chains``, sums over features and sums over rows or keys, whose every ``depth`` terms take ``passes`` steps,
    start anew after so many times ``depth`` terms, and ordinary additions join the parts. Of a number below ``tiny`` as
    much is lost as of ``tiny`` itself. Where the reference is no more exact than the kernel, everything counts
    ``sides`` times.
    """

    product: float
    unit: float
    depth: int
    tiny: float
    passes: int = 1
    chains: tuple[int, int] | None = None
    sides: int = 1

    def score(self, d: int) -> float:
        """Error of a sum over features. Small products have a sum of their own, 2^-10 of the other: one step more."""
        return self._sum(d, 1, self.chains and self.chains[0]) + (self.unit if self.passes > 1 else 0.0)

    def total(self, length: int) -> float:
        """Error of a sum over rows or keys."""
        return self._sum(length, self.passes, self.chains and self.chains[1])

    def _sum(self, length: int, passes: int, chain: int | None) -> float:
        steps = math.ceil(length / self.depth)
        if chain is None:
            return self.sides * (self.product + steps * self.unit)
        joined = (math.ceil(steps / chain) + 1) * unit_roundoff(np.float32)
        return self.product + passes * min(steps, chain) * self.unit + joined


def arithmetic(dtype: Any, family: str, precision: str | None = None, chains: tuple[int, int] = (8, 4)) -> Arithmetic:
    """How kernels of a family multiply float32 or float64; ``chains`` are those of gemm_tf32.cuh.

    With one product a sum is a single chain.
    """
    if np.dtype(dtype) == np.float64:  # DMMA rounds every step as an FMA does; the reference sums in float64 too
        return Arithmetic(0.0, unit_roundoff(np.float64), 1, float(np.finfo(np.float64).tiny), sides=2)
    if family == "sm75":
        return Arithmetic(0.0, unit_roundoff(np.float32), 1, float(np.finfo(np.float32).tiny))
    if family == "sm90":  # planes: numbers below 2^-110 have parts that are subnormal, multiples of 2^-133
        if precision is None:
            # Left out are products of the middle and the last of three planes: 2^-20 of a product. Chains are the
            # features and a block of keys; small products come first in them, and weigh little.
            return Arithmetic(SPLIT, TRUNCATION, 16, 2.0**-114, passes=2, chains=(8, 6))
        # Two planes: products of the second ones, 2^-14, and the rounding of these, 2^-16 in either factor. Three
        # products for each 16 keys stay in one sum.
        return Arithmetic(2.0**-14 + 2.0**-15, TRUNCATION, 5, 2.0**-117)
    # Subnormals of TF32 are multiples of 2^-136: operands are off by 2^-137, which is 2^-11 of 2^-126, and a third of
    # SPLIT * 2^-116.
    if precision == "tf32":
        product = 2 * TF32_ROUNDOFF + TF32_ROUNDOFF**2
        return Arithmetic(product, TRUNCATION, 8, 2.0**-126)
    return Arithmetic(SPLIT, TRUNCATION, 8, 2.0**-116, passes=3, chains=chains)


@dataclass(frozen=True)
class Dense:
    """Everything about one attention, whole matrices of (*batch, m, n) included."""

    q: Float64
    k: Float64
    v: Float64
    key_bias: Float64
    scale: float
    s: Float64
    slope: Float64
    p: Float64
    lse: Float64
    o: Float64

    @property
    def max_abs_score(self) -> float:
        """Largest magnitude of a finite score, before or after its terms."""
        products = self.scale * (self.q @ self.k.swapaxes(-1, -2))
        scores = np.concatenate([self.s.ravel(), np.where(np.isneginf(self.s), 0, products).ravel()])
        return float(np.max(np.abs(scores[np.isfinite(scores)]), initial=0))

    @property
    def max_abs_products(self) -> float:
        """Largest sum of the magnitudes of the products that make a score, of scores that are not hidden."""
        products = abs(self.scale) * (np.abs(self.q) @ np.abs(self.k).swapaxes(-1, -2))
        return largest(np.where(np.isneginf(self.s), 0, products))


@dataclass(frozen=True)
class Results:
    """One number or array for each result of a call; None where the call has no such result."""

    o: Any = None
    lse: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None
    dkey_bias: Any = None

    def present(self) -> dict[str, Any]:
        """The results there are, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}


def as_float64(x: Any) -> Float64:
    """Host copy in float64 of a NumPy or CuPy array."""
    return np.asarray(x.get() if hasattr(x, "get") else x).astype(np.float64)


def visible(m: int, n: int, *, causal: bool = False, align: Any = None, window: Any = None) -> NDArray[np.bool_]:
    """Matrix (m, n) of which row sees which key."""
    shift = {None: n - m, "bottom-right": n - m, "top-left": 0}.get(align, align)
    position = np.arange(m)[:, None] + shift
    key = np.arange(n)[None, :]
    seen = np.ones((m, n), bool)
    if causal:
        seen &= key <= position
    left, right = window or (None, None)
    if left is not None:
        seen &= key >= position - left
    if right is not None:
        seen &= key <= position + right
    return seen


def dense(
    q: Any,
    k: Any,
    v: Any = None,
    *,
    causal: bool = False,
    align: Any = None,
    window: Any = None,
    softcap: float | None = None,
    key_bias: Any = None,
    scale: float | None = None,
    grouped_heads: bool = False,
    **_: Any,
) -> Dense:
    """Attention with all its intermediate matrices; options that change no mathematics are ignored."""
    q, k = as_float64(q), as_float64(k)
    v = np.zeros((*k.shape[:-1], 0)) if v is None else as_float64(v)
    bias = np.zeros(k.shape[-2]) if key_bias is None else as_float64(key_bias)
    if grouped_heads:
        k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    with np.errstate(all="ignore"):
        s = scale * (q @ k.swapaxes(-1, -2))
        slope = np.ones_like(s)
        if softcap is not None:
            slope = 1 / np.cosh(s / softcap) ** 2
            s = softcap * np.tanh(s / softcap)
        batch = np.broadcast_shapes(s.shape[:-2], v.shape[:-2], bias.shape[:-1])
        s = s + bias[..., None, :]
        seen = visible(q.shape[-2], k.shape[-2], causal=causal, align=align, window=window)
        s = np.where(seen & ~np.isneginf(bias)[..., None, :], s, -np.inf)
        s = np.broadcast_to(s, (*batch, *s.shape[-2:]))
        lse = logsumexp(s, axis=-1) if s.shape[-1] else np.full(s.shape[:-1], -np.inf)
        p = np.where(np.isneginf(s), 0, np.exp(s - lse[..., None]))
        return Dense(q, k, v, bias, scale, s, np.broadcast_to(slope, s.shape), p, lse, p @ v)


def in_long_double(q: Any, k: Any, v: Any, do: Any) -> dict[str, NDArray[np.longdouble]]:
    """Results of both passes without options, for operands whose own roundings in float64 would count. Slow."""
    q, k, v, do = (np.asarray(x).astype(np.longdouble) for x in (q, k, v, do))
    scale = 1 / np.sqrt(np.longdouble(q.shape[-1]))
    s = scale * (q @ k.swapaxes(-1, -2))
    top = s.max(axis=-1, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(axis=-1, keepdims=True)
    p /= total
    dp = do @ v.swapaxes(-1, -2)
    ds = p * (dp - np.sum(p * dp, axis=-1, keepdims=True))
    return {
        "o": p @ v,
        "lse": (top + np.log(total))[..., 0],
        "dq": scale * (ds @ k),
        "dk": scale * (ds.swapaxes(-1, -2) @ q),
        "dv": p.swapaxes(-1, -2) @ do,
    }


def attention(q: Any, k: Any, v: Any = None, **options: Any) -> tuple[Float64, Float64]:
    """o of shape (*batch, m, e) and lse of shape (*batch, m)."""
    result = dense(q, k, v, **options)
    return result.o, result.lse


def gradients(
    do: Any, q: Any, k: Any, v: Any = None, *, dlse: Any = None, **options: Any
) -> tuple[Float64, Float64, Float64 | None, Float64 | None]:
    """dq, dk, dv and dkey_bias, each of its input's shape; None for an input that is not there."""
    r = dense(q, k, v, **options)
    do = np.zeros_like(r.o) if do is None else as_float64(do)
    dlse = np.zeros_like(r.lse) if dlse is None else as_float64(dlse)
    dp = do @ r.v.swapaxes(-1, -2)
    ds = r.p * (dp - np.sum(r.p * dp, axis=-1, keepdims=True) + dlse[..., None])
    return _combine(r, ds, r.p.swapaxes(-1, -2) @ do, q, k, v, options)


def bounds(
    do: Any,
    q: Any,
    k: Any,
    v: Any = None,
    *,
    dlse: Any = None,
    tiny: float = 0.0,
    by_terms: bool = False,
    **options: Any,
) -> Results:
    """What errors are measured against, each the maximum over the elements of a result.

    The sums that make an element, with every term taken by magnitude: errors of rounding are small against these, not
    against a result that the terms may cancel to. lse is measured against 1. ``by_terms`` takes the terms of o by
    magnitude, too; with ``tiny`` every operand of a product counts for that much more.
    """
    r = dense(q, k, v, **options)
    do = np.zeros_like(r.o) if do is None else np.abs(as_float64(do)) + tiny
    dlse = np.zeros_like(r.lse) if dlse is None else np.abs(as_float64(dlse))
    values = np.abs(r.v) + tiny
    o = r.p @ values if by_terms else np.abs(r.o)
    spread = do @ values.swapaxes(-1, -2) + (np.sum(do * o, axis=-1) + dlse)[..., None]
    # The softcap's slope is at most 1 and left out: its own rounding errors are not small against itself.
    magnitudes = replace(r, q=np.abs(r.q) + tiny, k=np.abs(r.k) + tiny, scale=abs(r.scale), slope=np.ones_like(r.s))
    seen = tiny * ~np.isneginf(r.s)
    sums = _combine(magnitudes, r.p * spread + seen, (r.p + seen).swapaxes(-1, -2) @ do, q, k, v, options)
    dq, dk, dv, dkey_bias = (None if x is None else largest(x) for x in sums)
    return Results(None if v is None else largest(values), 1.0, dq, dk, dv, dkey_bias)


def budget(dtype: Any, max_abs_score: float, accumulate: Any = None) -> float:
    """Normwise error that a call on the host may have, of a result that is rounded to dtype."""
    if accumulate is None:
        accumulate = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    return float(np.finfo(accumulate).eps) * (64 + 8 * max_abs_score) + unit_roundoff(dtype)


def kernel_budget(
    do: Any,
    q: Any,
    k: Any,
    v: Any = None,
    *,
    tile: tuple[int, int],
    dlse: Any = None,
    mma_depth: int = 16,
    more_steps: int = 0,
    products: Arithmetic | None = None,
    **options: Any,
) -> Results:
    """Normwise error that a kernel of this tile may have in each result; do None where it runs no backward.

    Derived: twice the error of the host specification in the same tiles when it rounds P and dS where the kernel does
    (and starts the backward from a rounded o), which leaves room for dS of a P of 11 bits, rounded no more than dS is;
    one more rounding of P, dS or o that falls to the other side, which in a small problem the host may have been lucky
    with; `budget` for the arithmetic around the matmuls and the rounding of the result; and what the matmuls lose. That
    is, of 16-bit operands, what tensor cores truncate in chains of steps `mma_depth` deep, of gradients with
    ``more_steps`` in the products of scores and dp; float32 and float64 have ``products`` (`arithmetic`).
    """
    dtype = np.dtype(q.dtype)
    r = dense(q, k, v, **options)
    measure = bounds(do, q, k, v, dlse=dlse, **options)
    exact = Results(r.o, r.lse, *gradients(do, q, k, v, dlse=dlse, **options))
    host = _host_results(do, q, k, v, dlse, tile, options, exact)
    if products is None:
        lost = _lost_by_16_bits(r, k, v, mma_depth, more_steps)
    else:
        lost = _lost_by_products(do, q, k, v, dlse, options, r, measure, products)
    wide = dtype == np.float64
    # In float64 the reference rounds as much as a kernel does.
    around = 2 * budget(dtype, r.max_abs_score) if wide else budget(np.float32, r.max_abs_score)
    limits = {}
    for name, result in host.present().items():
        unrounded = name in ("lse", "dkey_bias")
        bound = getattr(measure, name)
        with np.errstate(invalid="ignore"):  # lse of rows without a key: -inf less -inf
            own = largest(result - getattr(exact, name)) / bound if bound else 0.0
        flip = 0.0
        if dtype.itemsize == 2 and not unrounded:
            flip = 2 * unit_roundoff(dtype) * largest(r.p)
        elif dtype.itemsize == 2 and name == "dkey_bias" and do is not None and bound:
            # Nothing is rounded but what it starts from: an element of o, and with it delta of the row.
            of_rows = np.abs(as_float64(do) * r.o).max(axis=-1, initial=0) * r.p.max(axis=-1, initial=0)
            flip = 2 * unit_roundoff(dtype) * largest(of_rows) / bound
        rounding = 0.0 if unrounded else unit_roundoff(dtype)
        limits[name] = 2 * own + flip + lost[name] + around + rounding
    return Results(**limits)


def _lost_by_16_bits(r: Dense, k: Any, v: Any, mma_depth: int, more_steps: int) -> dict[str, float]:
    """What tensor cores truncate, in units of `bounds`; ``more_steps`` take lse off scores, or delta off dp."""
    m, n, d, e = r.q.shape[-2], r.k.shape[-2], r.q.shape[-1], r.v.shape[-1]
    chains = {"o": n, "lse": 0, "dq": n + e, "dkey_bias": e}
    chains["dk"], chains["dv"] = (m * _sharing(x.shape, r) + e for x in (k, k if v is None else v))

    def lost(name: str, chain: int) -> float:
        more = 0 if name in ("o", "lse") else more_steps
        of_scores = 2 * (math.ceil(d / mma_depth) + more) * r.max_abs_score
        return TRUNCATION * (of_scores + math.ceil(chain / mma_depth) + more)

    return {name: lost(name, chain) for name, chain in chains.items()}


def _lost_by_products(
    do: Any, q: Any, k: Any, v: Any, dlse: Any, options: dict[str, Any], r: Dense, measure: Results, by: Arithmetic
) -> dict[str, float]:
    """What products of float32 or float64 lose, in units of `bounds`.

    An error x of the scores is one of x in lse and of e^2x - 1 in every p. o is a sum of p v; delta, a sum of do o that
    eight lanes share, takes over o's error, relative to the terms of o; dS = p (dp - delta) has the errors of p, of dp
    and of delta, and is then summed.
    """
    m, n, d, e = r.q.shape[-2], r.k.shape[-2], r.q.shape[-1], r.v.shape[-1]
    score = by.score(d) * r.max_abs_products
    p = math.expm1(min(2 * score, 40.0))
    o = _both(p, by.total(n))
    delta = unit_roundoff(np.float64) * (e + e / 8 + 3) if by.sides == 2 else unit_roundoff(np.float32) * (e / 8 + 3)
    ds = _both(p, by.score(e) + delta + o)
    dk, dv = (by.total(m * _sharing(x.shape, r)) for x in (k, k if v is None else v))
    relative = {"o": o, "dq": _both(ds, by.total(n)), "dk": _both(ds, dk), "dv": _both(p, dv), "dkey_bias": ds}
    terms = bounds(do, q, k, v, dlse=dlse, by_terms=True, **options)
    small = bounds(do, q, k, v, dlse=dlse, by_terms=True, tiny=by.tiny, **options)
    # Below the normal numbers of its dtype every step and the multiplication by the scale round by the same amount.
    step = float(np.finfo(np.float64 if by.sides == 2 else np.float32).smallest_subnormal)
    steps = step * max(1.0, abs(r.scale)) * (n + m * _sharing(k.shape, r))
    lost = {"lse": score}
    for name, error in relative.items():
        bound, summed, raised = (getattr(x, name) or 0.0 for x in (measure, terms, small))
        floor = by.sides * max(by.product, by.unit) * (raised - summed) + steps
        lost[name] = (error * summed + floor) / bound if bound else 0.0
    return lost


def _both(a: float, b: float) -> float:
    """The relative error of what has two of them."""
    return (1 + a) * (1 + b) - 1


def unit_roundoff(dtype: Any) -> float:
    """Largest relative error of rounding to dtype."""
    dtype = np.dtype(dtype)
    return 2.0**-8 if dtype.name == "bfloat16" else float(np.finfo(dtype).eps) / 2


def excess(actual: Any, exact: Any, bound: float, limit: float) -> float:
    """How far an error goes beyond limit * bound; not above 0 is a pass, nan and inf where exact is finite are not.

    Below the normal numbers of its dtype a result is rounded by steps of the same size, which are allowed too.
    """
    dtype = actual.dtype
    step = 2.0**-133 if dtype.name == "bfloat16" else float(np.finfo(dtype).smallest_subnormal)
    values = as_float64(actual)
    if values.shape != np.shape(exact):
        raise AssertionError(f"shape {values.shape} instead of {np.shape(exact)}")
    if np.any(np.isinf(exact) & (values != exact)) or np.any(np.isfinite(exact) & ~np.isfinite(values)):
        return math.inf
    error = np.abs(np.where(np.isinf(exact), 0, values) - np.where(np.isinf(exact), 0, exact))
    return float(np.max(error, initial=0)) - limit * bound - step


def largest(x: Float64) -> float:
    """Largest magnitude of the finite elements."""
    return float(np.max(np.abs(x), where=np.isfinite(x), initial=0))


def _sum_to(x: Float64, shape: tuple[int, ...]) -> Float64:
    """Sum over the axes that an array of the shape was broadcast on."""
    extra = x.ndim - len(shape)
    axes = tuple(i for i in range(x.ndim) if i < extra or (shape[i - extra] == 1 and x.shape[i] != 1))
    summed: Float64 = x.sum(axis=axes, keepdims=True)
    return summed.reshape(shape)


def _sum_heads(x: Float64, shape: tuple[int, ...], grouped: bool) -> Float64:
    """The same for k and v, whose heads may each serve a group."""
    if grouped:
        heads = shape[-3]
        x = x.reshape(*x.shape[:-3], heads, x.shape[-3] // heads, *x.shape[-2:]).sum(axis=-3)
    return _sum_to(x, shape)


def _combine(
    r: Dense, ds: Float64, dv: Float64, q: Any, k: Any, v: Any, options: dict[str, Any]
) -> tuple[Float64, Float64, Float64 | None, Float64 | None]:
    """Gradients of the inputs from those of the scores after their terms, and from dv of every batch element."""
    grouped = bool(options.get("grouped_heads"))
    key_bias = options.get("key_bias")
    dq = _sum_to(r.scale * ((r.slope * ds) @ r.k), q.shape)
    dk = _sum_heads(r.scale * ((r.slope * ds).swapaxes(-1, -2) @ r.q), k.shape, grouped)
    return (
        dq,
        dk,
        None if v is None else _sum_heads(dv, v.shape, grouped),
        None if key_bias is None else _sum_to(ds.sum(axis=-2), key_bias.shape),
    )


def _sharing(shape: tuple[int, ...], r: Dense) -> int:
    """Number of batch elements that share one element of an input's batch."""
    return math.prod(r.lse.shape[:-1]) // max(1, math.prod(shape[:-2]))


def _split_heads(x: Any, heads: int) -> Any:
    """Inner form of the head axis -3: (heads of k and v, heads of q for each)."""
    return x.reshape(*x.shape[:-3], heads, x.shape[-3] // heads, *x.shape[-2:])


def _host_results(
    do: Any, q: Any, k: Any, v: Any, dlse: Any, tile: tuple[int, int], options: dict[str, Any], exact: Results
) -> Results:
    """The host specification's unrounded results when it rounds P, dS and o to the dtype of the operands."""
    from cuflash import host, score

    inputs: list[Any] = [q, k, v, do, dlse, options.get("key_bias")]
    q, k, v, do, dlse, bias = (x.get() if hasattr(x, "get") else x for x in inputs)
    dtype, heads = q.dtype, k.shape[-3] if options.get("grouped_heads") else 0
    if heads:
        q, k, v, do = (None if x is None else _split_heads(x, heads) for x in (q, k, v, do))
        dlse = None if dlse is None else _split_heads(dlse[..., None], heads)[..., 0]
        if bias is not None and bias.ndim > 1:
            bias = _split_heads(bias[..., None], heads if bias.shape[-2] > 1 else 1)[..., 0]
    band = score.band(
        q.shape[-2], k.shape[-2], options.get("causal", False), options.get("align"), options.get("window")
    )
    scale = options.get("scale")
    settings: dict[str, Any] = {
        "scale": 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        "band": band,
        "softcap": options.get("softcap"),
        "tile": tile,
        "operand": dtype,
    }
    batch = np.broadcast_shapes(
        *(x.shape[:-2] for x in (q, k, v) if x is not None), () if bias is None else bias.shape[:-1]
    )
    wide = np.float64 if dtype == np.float64 else np.float32
    o = None if v is None else np.empty((*batch, q.shape[-2], v.shape[-1]), wide)
    lse = np.empty((*batch, q.shape[-2]), wide)
    host.forward(q, k, v, bias, o, lse, **settings)
    grads = [None if x is None else np.empty(x.shape, wide) for x in (q, k, v, bias)]
    if do is not None or dlse is not None:
        host.backward(q, k, v, bias, do, None if o is None else o.astype(dtype), lse, dlse, *grads, **settings)
    else:
        grads = [None] * 4
    results = dict(zip(("o", "lse", "dq", "dk", "dv", "dkey_bias"), (o, lse, *grads), strict=True))
    return Results(**{name: x.reshape(getattr(exact, name).shape) for name, x in results.items() if x is not None})
