"""Tiled attention on NumPy arrays: the executable specification of the kernels, and what NumPy users get.

Each function has the outline of its kernels, under the same names and in the same visit order: locate the work, walk
the blocks, load a tile of q, step (S = Q K^T; score terms; softmax update; rescale of O; O += P V), finish, epilogue.
What a kernel does for one tile of one head, this does for that tile of several batch elements at once (a part), so
that a batch of short sequences is one batched matmul and not a Python loop.

Arrays come in inner form: validated, batch axes broadcast plainly and aligned at the right, any strides. Operands are
cast tile by tile to the accumulation dtype: float64 for float64, float32 for the others, as NumPy has no BLAS for 16
bits. `tile`, `accumulate` and `operand` exist for tests, which derive a kernel's error budget from this module run with
that kernel's tile and roundings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .score import Band, Floats, KeyBias, Softcap, key_blocks, key_range, query_blocks

Array = NDArray[Any]
Accumulate = type[np.floating[Any]]
Tile = tuple[int, int]
Part = tuple[slice, ...]

LOG2E = math.log2(math.e)
LN2 = math.log(2)

BLOCK_M, BLOCK_N = 512, 1024
LONGEST_BLOCK = 8192
OPERAND_SIZE = 2**20
"""Elements of an operand's tile, beyond which neither a long block nor a part of many batch elements may take it."""
EXACT_REFERENCE = 2.0**24
"""From here on float32 has no fraction: a reference rounded apart from the scores would be off by powers of two."""


def forward(
    q: Array,
    k: Array,
    v: Array | None,
    key_bias: Array | None,
    o: Array | None,
    lse: Array | None,
    *,
    scale: float,
    band: Band,
    softcap: float | None,
    tile: Tile | None = None,
    accumulate: Accumulate | None = None,
    operand: np.dtype[Any] | None = None,
) -> None:
    """Fill o with attention and lse with the log-sum-exp of its scores.

    Parameters
    ----------
    q, k, v, key_bias : ndarray
        Shapes (*bq, m, d), (*bk, n, d), (*bv, n, e) and (*bb, n); v and key_bias may be None.
    o, lse : ndarray
        Results, of shapes (*batch, m, e) and (*batch, m); None where not wanted.
    scale : float
        Factor of the products of q and k.
    band : Band
        Which keys each row sees.
    softcap : float or None
        Bound of the scaled scores, above 0.
    tile : tuple of int, optional
        Numbers of rows and keys of a tile.
    accumulate : float32 or float64, optional
        Type of scores and sums.
    operand : dtype, optional
        Type that the probabilities are rounded to before they meet v, as tensor cores demand.
    """
    plan = _plan(q, k, v, key_bias, tile, accumulate)
    scores = _Scores(scale, band, softcap, key_bias, plan.dtype)
    buffer = _Buffer(plan.dtype)
    with np.errstate(all="ignore"):
        for part in plan.parts():
            for rows in blocks(plan.m, plan.block_m):
                q_tile = _load(q, part, rows, plan.dtype)
                softmax = _Softmax(scores, (*_extent(part, rows), 1))
                acc = None if v is None or o is None else np.zeros((*_extent(part, rows), v.shape[-1]), plan.dtype)
                for keys in _key_tiles(band, rows, plan.n, plan.block_n):
                    s = buffer.take(_extent(part, rows, keys))
                    scores.compute(q_tile, _load(k, part, keys, plan.dtype), part, rows, keys, s)
                    alpha = softmax.update(s)
                    if acc is not None and v is not None:
                        acc *= alpha
                        acc += _rounded(s, operand) @ _load(v, part, keys, plan.dtype)
                row_sum, row_lse = softmax.finish()
                if acc is not None and o is not None:
                    acc /= row_sum
                    _take(o, part, 2)[..., rows, :] = acc
                if lse is not None:
                    _take(lse, part, 1)[..., rows] = row_lse[..., 0]


def backward(
    q: Array,
    k: Array,
    v: Array | None,
    key_bias: Array | None,
    do: Array | None,
    o: Array | None,
    lse: Array,
    dlse: Array | None,
    dq: Array | None,
    dk: Array | None,
    dv: Array | None,
    dkey_bias: Array | None,
    *,
    scale: float,
    band: Band,
    softcap: float | None,
    tile: Tile | None = None,
    accumulate: Accumulate | None = None,
    operand: np.dtype[Any] | None = None,
) -> None:
    """Fill the gradients from those of o and lse, with probabilities computed anew from lse.

    Parameters
    ----------
    q, k, v, key_bias : ndarray
        As for `forward`.
    do, o : ndarray or None
        Shape (*batch, m, e); do is None where only lse has a gradient, and o may be None then.
    lse, dlse : ndarray
        Shape (*batch, m); dlse may be None.
    dq, dk, dv, dkey_bias : ndarray or None
        Results, each of its input's shape, summed over the axes which that input was broadcast on; None where not
        wanted, and then not computed.
    scale, band, softcap, tile, accumulate
        As for `forward`.
    operand : dtype, optional
        Type that the probabilities and the gradients of the scores are rounded to before their matmuls.
    """
    plan = _plan(q, k, v, key_bias, tile, accumulate)
    dtype, m, n = plan.dtype, plan.m, plan.n
    step = _BackwardStep(_Scores(scale, band, softcap, key_bias, dtype), operand)
    totals = [_Total(x, plan.batch, core, dtype) for x, core in ((dq, 2), (dk, 2), (dv, 2), (dkey_bias, 1))]
    dq_total, dk_total, dv_total, dkey_bias_total = totals
    with np.errstate(all="ignore"):
        for part in plan.parts():
            row_lse = _take(lse, part, 1).astype(dtype)[..., None]
            row_delta = _delta(do, o, dlse, part, row_lse, plan.block_m)
            dq_sum = dq_total.zeros((*_extent(part), m, q.shape[-1]))
            for keys in blocks(n, plan.block_n):
                k_tile = _load(k, part, keys, dtype)
                v_tile = None if v is None or do is None else _load(v, part, keys, dtype)
                dk_sum = dk_total.zeros((*_extent(part, keys), k.shape[-1]))
                dv_sum = dv_total.zeros((*_extent(part, keys), _width(v)))
                dkey_bias_sum = dkey_bias_total.zeros(_extent(part, keys))
                for rows in _query_tiles(band, keys, m, plan.block_m):
                    q_tile = _load(q, part, rows, dtype)
                    do_tile = None if do is None else _load(do, part, rows, dtype)
                    p = step.probabilities(q_tile, k_tile, row_lse[..., rows, :], part, rows, keys)
                    if dv_sum is not None and do_tile is not None:
                        dv_sum += _rounded(p, operand).swapaxes(-1, -2) @ do_tile
                    if dq_sum is None and dk_sum is None and dkey_bias_sum is None:
                        continue
                    ds = step.gradient(p, do_tile, v_tile, row_delta[..., rows, :], dkey_bias_sum)
                    # The scale comes with these products, not with every score.
                    if dq_sum is not None:
                        dq_sum[..., rows, :] += (ds @ k_tile) * step.scores.scale
                    if dk_sum is not None:
                        dk_sum += (ds.swapaxes(-1, -2) @ q_tile) * step.scores.scale
                dk_total.add(part, keys, dk_sum)
                dv_total.add(part, keys, dv_sum)
                dkey_bias_total.add(part, keys, dkey_bias_sum)
            dq_total.add(part, slice(0, m), dq_sum)
        for total in totals:
            total.finish()


def merge(os: Sequence[Array], lses: Sequence[Array], o: Array, lse: Array) -> None:
    """Fill o and lse with results over disjoint sets of keys, merged in the given order.

    A part whose lse is -inf is ignored whatever its o holds; where one part is left it comes back bit by bit.

    Parameters
    ----------
    os, lses : sequence of ndarray
        Parts, each of o's and lse's shape.
    o, lse : ndarray
        Results, of shapes (..., m, e) and (..., m); the sums have lse's dtype.
    """
    with np.errstate(all="ignore"):
        row_max = np.full(lse.shape, -np.inf, lse.dtype)
        for part_lse in lses:
            np.maximum(row_max, part_lse, out=row_max)
        row_sum = np.zeros_like(row_max)
        # -0.0 is the neutral element of addition: +0.0 would turn a lone -0.0 of o into +0.0.
        acc = np.full(o.shape, -0.0, lse.dtype)
        for part_o, part_lse in zip(os, lses, strict=True):
            # By comparison, so that a lone +inf has the weight 1 too, where the difference is NaN.
            weight = np.where(part_lse == row_max, 1, np.exp(part_lse - row_max))
            weight = np.where(np.isneginf(part_lse), 0, weight)
            row_sum += weight
            acc += np.where(weight[..., None] == 0, -0.0, part_o.astype(lse.dtype) * weight[..., None])
        empty = np.isneginf(row_max)
        acc /= np.where(empty, 1, row_sum)[..., None]
        acc[empty] = 0
        lse[...] = row_max + np.log(row_sum)
        o[...] = acc


class _Scores:
    """Scores of a tile, and the units they are in.

    Without a term beyond the scale, scores stay bare products and the scale goes into the exponent, as the factor
    ``unit`` that takes them to base 2. Otherwise (`prescaled`) they are final scores in natural units; so are those of
    a scale that is not above 0 in the accumulation dtype, as the maximum of bare products would not be theirs.
    """

    def __init__(self, scale: float, band: Band, softcap: float | None, key_bias: Array | None, dtype: Accumulate):
        with np.errstate(all="ignore"):
            self.scale, unit = dtype(scale), dtype(scale * LOG2E)
        self.prescaled = softcap is not None or key_bias is not None or not unit >= np.finfo(dtype).tiny
        self.unit = dtype(LOG2E) if self.prescaled else unit
        self.natural = dtype(1) if self.prescaled else self.scale
        self.band, self.dtype = band, dtype
        self.softcap = None if softcap is None else Softcap(softcap)
        self.key_bias = key_bias

    def compute(
        self,
        q_tile: Floats,
        k_tile: Floats,
        part: Part,
        rows: slice,
        keys: slice,
        s: Floats,
        slope: Floats | None = None,
    ) -> None:
        """Fill s with S = Q K^T after the score terms, hidden scores -inf, and slope with the softcap's derivative."""
        np.matmul(q_tile, k_tile.swapaxes(-1, -2), out=s)
        if self.prescaled:
            s *= self.scale
        if self.softcap is not None:
            self.softcap.value_and_slope(s, slope)
        if self.key_bias is not None:
            KeyBias(_take(self.key_bias, part, 1)[..., keys].astype(s.dtype)).value(s)
        if not self.band.covers(rows.start, rows.stop, keys.start, keys.stop):
            hidden = self.band.hidden(rows.start, rows.stop, keys.start, keys.stop)
            np.copyto(s, -np.inf, where=hidden)

    def probabilities(self, s: Floats, lse: Floats) -> None:
        """Turn scores into probabilities in place, given their log-sum-exp; rows of -inf get zeros."""
        lse = np.where(np.isneginf(lse), np.inf, lse)
        lse2 = lse * s.dtype.type(LOG2E)
        if _all_small(lse2[lse2 != np.inf]):
            s *= self.unit
            s -= lse2
        else:
            s *= self.natural
            s -= lse
            s *= s.dtype.type(LOG2E)
        # No probability is above 1, but rounding makes it so where lse is large. Rarely: NumPy's maximum costs a tenth
        # of its minimum.
        if np.max(s) > 0:
            np.minimum(s, np.zeros_like(lse), out=s)
        _exp2(s)


class _Softmax:
    """Running maximum and sum of the rows of a tile, in base 2."""

    def __init__(self, scores: _Scores, shape: tuple[int, ...]):
        self.unit, self.natural = scores.unit, scores.natural
        self.row_max = np.full(shape, -np.inf, scores.dtype)
        self.row_sum = np.zeros(shape, scores.dtype)

    def update(self, s: Floats) -> Floats:
        """Turn scores into probabilities in place; returns the factor that rescales earlier sums."""
        old = self.row_max
        self.row_max = np.maximum(old, np.max(s, axis=-1, keepdims=True))
        reference = self._reference()
        mc = reference * self.unit
        if _all_small(mc):
            s *= self.unit
            s -= mc
            alpha = old * self.unit - mc
        else:
            s -= reference
            s *= self.unit
            alpha = (old - reference) * self.unit
        _exp2(s)
        _exp2(alpha)
        self.row_sum *= alpha
        self.row_sum += np.sum(s, axis=-1, keepdims=True)
        return alpha

    def finish(self) -> tuple[Floats, Floats]:
        """Divisor of the output, which is 1 for rows without a key, and log-sum-exp in natural units."""
        reference = self._reference()
        mc = reference * self.unit
        lse = np.where(
            np.abs(mc) < EXACT_REFERENCE,
            (mc + np.log2(self.row_sum)) * self.row_sum.dtype.type(LN2),
            reference * self.natural + np.log(self.row_sum),
        )
        lse = np.where(self.row_max == np.inf, np.inf, lse)
        return np.where(self.row_sum == 0, 1, self.row_sum), lse

    def _reference(self) -> Floats:
        """Common reference of each row's exponents: its maximum, and 0 while it has seen no key."""
        return np.where(np.isneginf(self.row_max), 0, self.row_max)


class _BackwardStep:
    """The matrices of one tile in the backward: P, computed anew, and dS."""

    def __init__(self, scores: _Scores, operand: np.dtype[Any] | None):
        self.scores, self.operand = scores, operand
        self.p_buffer, self.ds_buffer, self.slope_buffer = (_Buffer(scores.dtype) for _ in range(3))
        self.slope: Floats | None = None

    def probabilities(
        self, q_tile: Floats, k_tile: Floats, row_lse: Floats, part: Part, rows: slice, keys: slice
    ) -> Floats:
        """P of the tile."""
        shape = _extent(part, rows, keys)
        p = self.p_buffer.take(shape)
        self.slope = None if self.scores.softcap is None else self.slope_buffer.take(shape)
        self.scores.compute(q_tile, k_tile, part, rows, keys, p, self.slope)
        self.scores.probabilities(p, row_lse)
        return p

    def gradient(
        self, p: Floats, do_tile: Floats | None, v_tile: Floats | None, row_delta: Floats, dkey_bias_sum: Floats | None
    ) -> Floats:
        """dS = P * (dP - delta) of the same tile, of the scaled scores; adds the bias's share of it to its sum."""
        ds = self.ds_buffer.take(p.shape)
        if do_tile is None or v_tile is None:
            ds.fill(0)
        else:
            np.matmul(do_tile, v_tile.swapaxes(-1, -2), out=ds)
        ds -= row_delta
        ds *= p
        if dkey_bias_sum is not None:
            dkey_bias_sum += KeyBias.on_grad(ds)
        if self.slope is not None:
            ds *= self.slope
        return _rounded(ds, self.operand)


class _Total:
    """A gradient put together from parts of the batch, in the accumulation dtype where parts overlap."""

    def __init__(self, target: Array | None, batch: tuple[int, ...], core: int, dtype: Accumulate):
        self.target, self.core, self.dtype = target, core, dtype
        if target is None:
            return
        padded = (1,) * (len(batch) + core - target.ndim) + target.shape
        self.shared = tuple(axis for axis, size in enumerate(batch) if padded[axis] != size)
        self.sums = target if not self.shared or target.dtype == dtype else np.empty(target.shape, dtype)
        if self.shared:
            self.sums.fill(0)

    def zeros(self, shape: tuple[int, ...]) -> Floats | None:
        """Room for what one part adds; None where the gradient is not asked for."""
        return None if self.target is None else np.zeros(shape, self.dtype)

    def add(self, part: Part, span: slice, value: Floats | None) -> None:
        """Add what a part has for the rows or keys in span, summed in a fixed order over the axes that share it."""
        if self.target is None or value is None:
            return
        view = _take(self.sums, part, self.core)[(..., span) + (slice(None),) * (self.core - 1)]
        if self.shared:
            view += np.sum(value, axis=self.shared, keepdims=True).reshape(view.shape)
        else:
            view[...] = value.reshape(view.shape)

    def finish(self) -> None:
        """Write the sums to the target."""
        if self.target is not None and self.sums is not self.target:
            self.target[...] = self.sums


class _Buffer:
    """Memory for the tiles of one kind, which are contiguous whatever their shape."""

    def __init__(self, dtype: Accumulate):
        self.flat: Floats = np.empty(0, dtype)

    def take(self, shape: tuple[int, ...]) -> Floats:
        """An array of the shape, its contents undefined, over the memory of the one before."""
        size = math.prod(shape)
        if size > self.flat.size:
            self.flat = np.empty(size, self.flat.dtype)
        return self.flat[:size].reshape(shape)


@dataclass(frozen=True)
class _Plan:
    """How a call is cut up."""

    dtype: Accumulate
    batch: tuple[int, ...]
    m: int
    n: int
    block_m: int
    block_n: int
    count: int
    """Most batch elements of a part."""

    def parts(self) -> Iterator[Part]:
        """Locate the work: parts of the batch, in C order."""
        count = self.count
        axes: list[list[slice]] = []
        for extent in reversed(self.batch):
            step = max(1, min(extent, count))
            count //= step
            axes.insert(0, list(blocks(extent, step)))
        return itertools.product(*axes)


def _plan(
    q: Array, k: Array, v: Array | None, key_bias: Array | None, tile: Tile | None, accumulate: Accumulate | None
) -> _Plan:
    dtype = accumulate or (np.float64 if q.dtype.name == "float64" else np.float32)
    batches = [x.shape[:-2] for x in (q, k, v) if x is not None]
    batch = np.broadcast_shapes(*batches, () if key_bias is None else key_bias.shape[:-1])
    m, n, width = q.shape[-2], k.shape[-2], max(q.shape[-1], _width(v))
    block_m, block_n = tile or _default_tile(m, n, width)
    size = block_m * block_n if tile else BLOCK_M * BLOCK_N
    rows, keys = max(1, min(m, block_m)), max(1, min(n, block_n))
    count = max(1, min(size // (rows * keys), OPERAND_SIZE // (max(rows, keys) * width)))
    return _Plan(dtype, batch, m, n, block_m, block_n, count)


def _width(v: Array | None) -> int:
    return 0 if v is None else v.shape[-1]


def _default_tile(m: int, n: int, width: int) -> Tile:
    """Tile of BLOCK_M x BLOCK_N scores, or longer on one side where the problem is short on the other."""
    longest = max(BLOCK_N, min(LONGEST_BLOCK, OPERAND_SIZE // width))
    block_n = min(longest, max(BLOCK_N, BLOCK_M * BLOCK_N // max(1, min(m, BLOCK_M))))
    block_m = min(longest, max(1, BLOCK_M * BLOCK_N // max(1, min(n, block_n))))
    return block_m, block_n


def blocks(size: int, step: int) -> Iterator[slice]:
    """Parts of a length, of ``step`` each but for the last."""
    return (slice(begin, min(begin + step, size)) for begin in range(0, size, step))


def _extent(part: Part, *spans: slice) -> tuple[int, ...]:
    """Shape of a tile of a part of the batch."""
    return tuple(span.stop - span.start for span in (*part, *spans))


def _key_tiles(band: Band, rows: slice, n: int, block_n: int) -> Iterator[slice]:
    """Blocks of keys in visit order, cut to the keys that any of the rows sees."""
    begin, _, _, end = key_range(band, rows.start, rows.stop, n)
    for index, _ in key_blocks(band, rows.start, rows.stop, n, block_n):
        yield slice(max(begin, index * block_n), min(end, (index + 1) * block_n))


def _query_tiles(band: Band, keys: slice, m: int, block_m: int) -> Iterator[slice]:
    """Blocks of rows in visit order, cut to the rows that see any of the keys."""
    begin, _, _, end = key_range(band.transposed(), keys.start, keys.stop, m)
    for index, _ in query_blocks(band, keys.start, keys.stop, m, block_m):
        yield slice(max(begin, index * block_m), min(end, (index + 1) * block_m))


def _take(x: Array, part: Part, core: int) -> Array:
    """View of an array's part of the batch; the last `core` axes are whole."""
    axes = x.ndim - core
    pairs = zip(x.shape, part[len(part) - axes :], strict=False)
    return x[tuple(slice(None) if size == 1 else span for size, span in pairs)]


def _load(x: Array, part: Part, rows: slice, dtype: Accumulate) -> Floats:
    """Tile of an array in the accumulation dtype, copied unless BLAS takes it as it lies."""
    tile = _take(x, part, 2)[..., rows, :]
    row, feature = tile.strides[-2:]
    if tile.dtype == dtype and feature == tile.itemsize and row >= tile.itemsize * tile.shape[-1]:
        return tile
    return tile.astype(dtype, order="C")


def _rounded(x: Floats, operand: np.dtype[Any] | None) -> Floats:
    return x if operand is None else x.astype(operand).astype(x.dtype)


def _delta(do: Array | None, o: Array | None, dlse: Array | None, part: Part, row_lse: Floats, block_m: int) -> Floats:
    """Row sums of do * o less dlse, of row_lse's shape: what each row's dp is measured from. 0 in rows without keys,
    where a loss of lse may have no finite gradient."""
    delta = np.zeros_like(row_lse)
    if do is not None and o is not None:
        dtype = row_lse.dtype.type
        for rows in blocks(row_lse.shape[-2], block_m):
            product = _load(do, part, rows, dtype) * _load(o, part, rows, dtype)
            np.sum(product, axis=-1, keepdims=True, out=delta[..., rows, :])
    if dlse is not None:
        delta -= _take(dlse, part, 1)[..., None]
    delta[np.isneginf(row_lse)] = 0
    return delta


def _all_small(mc: Floats) -> bool:
    """Whether the references may be rounded apart from the scores (what a warp votes on)."""
    return not np.any(np.abs(mc) >= EXACT_REFERENCE)


def _exp2(x: Floats) -> None:
    """exp2 in place; by way of exp for float32, which NumPy vectorises on every x86 and exp2 only with AVX-512."""
    if x.dtype == np.float32:
        x *= np.float32(LN2)
        np.exp(x, out=x)
    else:
        np.exp2(x, out=x)
