"""The lineage on NumPy arrays: each algorithm as its paper has it, a block of keys or of a row at a time.

Rows lie along the last axis. What is rounded on the way, and where, is as on a GPU: sums, maxima and exponentials are
float32 (float64 for float64), matrices that standard attention keeps in memory are of the operands' dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash import host
from cuflash.problem import Problem, operand_dtypes

Array = NDArray[Any]

BLOCK_SIZE = 2**20
"""Elements, about, that a pass over rows takes at a time."""
KEY_BLOCK, ROW_BLOCK = 256, 128
"""Of FlashAttention-1; standard attention masks as many rows at a time."""


def safe_softmax(x: Array, y: Array, maximum: None = None, total: None = None) -> None:
    """Fill y with the softmax of the rows of x, in three passes; the last arguments are `online_softmax`'s."""
    dtype = _accumulate(x)
    with np.errstate(all="ignore"):
        row_max = np.full(x.shape[:-1], -np.inf, dtype)
        for part in _parts(x):
            np.fmax(row_max, np.fmax.reduce(x[..., part].astype(dtype), axis=-1), out=row_max)
        row_sum = np.zeros_like(row_max)
        for part in _parts(x):
            row_sum += _exponentials(_block(x, part), row_max).sum(axis=-1)
        _store(x, y, row_max, row_sum)


def online_softmax(x: Array, y: Array | None, maximum: Array | None, total: Array | None) -> None:
    """Fill y with the softmax of the rows of x, in two passes, and the statistics; what is None is not wanted."""
    dtype = _accumulate(x)
    with np.errstate(all="ignore"):
        row_max, row_sum = np.full(x.shape[:-1], -np.inf, dtype), np.zeros(x.shape[:-1], dtype)
        for part in _parts(x):
            block = _block(x, part)
            larger = np.fmax(row_max, np.fmax.reduce(block, axis=-1))
            row_sum = row_sum * _rescale(np, row_max, larger) + _exponentials(block, larger).sum(axis=-1)
            row_max = larger
        if y is not None:
            _store(x, y, row_max, row_sum)
        if maximum is not None and total is not None:
            maximum[...], total[...] = row_max, row_sum


def merge_statistics(xp: Any, maxima: Sequence[Any], totals: Sequence[Any], maximum: Any, total: Any) -> None:
    """Fill maximum and total with those of the parts together; ``xp`` is the module of the arrays."""
    with np.errstate(all="ignore"):
        row_max, row_sum = maxima[0], totals[0]
        for part_max, part_sum in zip(maxima[1:], totals[1:], strict=True):
            larger = xp.maximum(row_max, part_max)
            row_sum = row_sum * _rescale(xp, row_max, larger) + part_sum * _rescale(xp, part_max, larger)
            row_max = larger
        maximum[...], total[...] = row_max, row_sum


def standard_attention(problem: Problem, q: Array, k: Array, v: Array, p: Array, o: Array) -> None:
    """Fill p with the probabilities, of all of which there is memory, and o with their averages of v."""
    dtype = _accumulate(q)
    with np.errstate(all="ignore"):
        s = np.empty(p.shape, dtype)
        np.matmul(q.astype(dtype), k.swapaxes(-1, -2).astype(dtype), out=s)
        s *= dtype(problem.scale)
        p[...] = s  # what standard attention writes, and reads again
        s[...] = p
        for rows in host.blocks(problem.m, ROW_BLOCK):
            np.copyto(s[..., rows, :], -np.inf, where=problem.band.hidden(rows.start, rows.stop, 0, problem.n))
        row_max = np.fmax.reduce(s, axis=-1, initial=-np.inf)
        _exponentials(s, row_max)
        row_sum = s.sum(axis=-1, keepdims=True)
        s /= np.where(row_sum == 0, 1, row_sum)
        p[...] = s
        s[...] = p
        o[...] = np.matmul(s, v.astype(dtype))


def standard_attention_backward(
    problem: Problem, do: Array, q: Array, k: Array, v: Array, p: Array, dq: Array, dk: Array, dv: Array
) -> None:
    """Fill the gradients from the probabilities of the forward; what an input was broadcast on is summed over."""
    dtype = _accumulate(q)
    with np.errstate(all="ignore"):
        _fill(dv, _matmul(p.swapaxes(-1, -2), do, dtype))
        dp = _matmul(do, v.swapaxes(-1, -2), dtype).astype(p.dtype, copy=False)  # as p, in memory
        weights, ds = p.astype(dtype, copy=False), dp.astype(dtype, copy=False)
        ds -= (weights * ds).sum(axis=-1, keepdims=True)
        ds *= weights
        dp[...] = ds
        _fill(dq, _matmul(dp, k, dtype) * dtype(problem.scale))
        _fill(dk, _matmul(dp.swapaxes(-1, -2), q, dtype) * dtype(problem.scale))


def flash1_statistics(problem: Problem) -> tuple[Array, Array]:
    """Room for m and l of each row."""
    shape = (*problem.batch, problem.m)
    return np.empty(shape, problem.lse.dtype), np.empty(shape, problem.lse.dtype)


def flash1_attention(problem: Problem, q: Array, k: Array, v: Array, o: Array, maximum: Array, total: Array) -> None:
    """Fill o and the statistics of its rows: key blocks outside, query blocks inside, o as the average so far."""
    dtype, batch = _accumulate(q), problem.batch
    average = np.zeros(o.shape, dtype)
    maximum.fill(-np.inf)
    total.fill(0)
    with np.errstate(all="ignore"):
        for keys in host.blocks(problem.n, KEY_BLOCK):
            k_block, v_block = (x[..., keys, :].astype(dtype) for x in (k, v))
            for rows in _seeing(problem, keys):
                s = _scores(problem, q, k_block, rows, keys)
                m, l = maximum[..., rows], total[..., rows]  # noqa: E741 - as the paper names them
                larger = np.maximum(m, np.fmax.reduce(s, axis=-1, initial=-np.inf))
                p = _exponentials(s, larger)
                kept = l * _rescale(np, m, larger)
                new = kept + p.sum(axis=-1)
                block = average[..., rows, :]
                block *= kept[..., None]
                block += p @ v_block
                block /= np.where(new == 0, 1, new)[..., None]
                maximum[..., rows], total[..., rows] = np.broadcast_to(larger, (*batch, *m.shape[-1:])), new
    o[...] = average


def flash1_attention_backward(
    problem: Problem,
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    maximum: Array,
    total: Array,
    dq: Array,
    dk: Array,
    dv: Array,
) -> None:
    """Fill the gradients from o, m and l: key blocks outside with dk and dv, query blocks inside, which add to dq."""
    dtype, batch = _accumulate(q), problem.batch
    sums = {name: np.zeros((*batch, *x.shape[-2:]), dtype) for name, x in (("dq", dq), ("dk", dk), ("dv", dv))}
    with np.errstate(all="ignore"):
        for keys in host.blocks(problem.n, KEY_BLOCK):
            k_block, v_block = (x[..., keys, :].astype(dtype) for x in (k, v))
            for rows in _seeing(problem, keys):
                do_block = do[..., rows, :].astype(dtype)
                p = _exponentials(_scores(problem, q, k_block, rows, keys), maximum[..., rows])
                p /= np.where(total[..., rows] == 0, 1, total[..., rows])[..., None]
                delta = (do_block * o[..., rows, :].astype(dtype)).sum(axis=-1, keepdims=True)
                ds = p * (do_block @ v_block.swapaxes(-1, -2) - delta)
                sums["dv"][..., keys, :] += p.swapaxes(-1, -2) @ do_block
                sums["dk"][..., keys, :] += _matmul(ds.swapaxes(-1, -2), q[..., rows, :], dtype)
                sums["dq"][..., rows, :] += ds @ k_block
        sums["dq"] *= dtype(problem.scale)
        sums["dk"] *= dtype(problem.scale)
        for gradient, name in ((dq, "dq"), (dk, "dk"), (dv, "dv")):
            _fill(gradient, sums[name])


def _scores(problem: Problem, q: Array, k_block: Array, rows: slice, keys: slice) -> Array:
    """Scores of a tile in the accumulation dtype, over the whole batch, hidden ones -inf."""
    s = _matmul(q[..., rows, :], k_block.swapaxes(-1, -2), k_block.dtype.type) * k_block.dtype.type(problem.scale)
    s = np.array(np.broadcast_to(s, (*problem.batch, *s.shape[-2:])))
    np.copyto(s, -np.inf, where=problem.band.hidden(rows.start, rows.stop, keys.start, keys.stop))
    return s


def _seeing(problem: Problem, keys: slice) -> Iterator[slice]:
    """Blocks of rows of which some sees some of the keys."""
    return (x for x in host.blocks(problem.m, ROW_BLOCK) if x.stop - 1 + problem.band.hi >= keys.start)


def _matmul(a: Array, b: Array, dtype: type[np.floating[Any]]) -> Array:
    """A product of matrices with sums of the accumulation dtype."""
    product: Array = np.matmul(a.astype(dtype, copy=False), b.astype(dtype, copy=False))
    return product


def _fill(gradient: Array, value: Array) -> None:
    """Write a gradient, summed over the axes that its input was broadcast on."""
    missing = value.ndim - gradient.ndim
    padded = (1,) * missing + gradient.shape
    shared = tuple(axis for axis, size in enumerate(padded) if size != value.shape[axis])
    gradient[...] = value.sum(axis=shared, keepdims=True).reshape(gradient.shape)


def _accumulate(x: Array) -> type[np.floating[Any]]:
    return operand_dtypes({"x": x.dtype})[1].type


def _parts(x: Array) -> Iterator[slice]:
    """Parts of the rows, all rows at once."""
    length = x.shape[-1]
    step = max(1, BLOCK_SIZE // max(1, math.prod(x.shape[:-1])))
    return host.blocks(length, step)


def _block(x: Array, part: slice) -> Array:
    """Part of the rows as they are summed. Whatever the strides of x are, a row of it lies together: NumPy then adds in
    pairs, and else one element after the other, which rounds as often as there are elements."""
    return x[..., part].astype(_accumulate(x), order="C")


def _exponentials(block: Array, row_max: Array) -> Array:
    """Of elements less their row's maximum, or less 0 while that is -inf."""
    block -= np.where(np.isneginf(row_max), 0, row_max)[..., None]
    return np.exp(block, out=block)


def _rescale(xp: Any, old: Any, now: Any) -> Any:
    """The weight of a sum whose reference was ``old`` against a new one. Equal infinities have the weight 1."""
    return xp.where(old == now, 1, xp.exp(old - now))


def _store(x: Array, y: Array, row_max: Array, row_sum: Array) -> None:
    """The last pass."""
    for part in _parts(x):
        block = _exponentials(x[..., part].astype(row_max.dtype), row_max)
        block /= row_sum[..., None]
        y[..., part] = block
