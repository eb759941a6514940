"""Metadata of a call: memory order of results, inner views of grouped heads, overlap, canonical options."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from cuflash import arrays, problem
from cuflash.arrays import first_overlap, memory_order, overlaps_itself

NO_OPTIONS: dict[str, Any] = {
    "causal": False,
    "align": None,
    "window": None,
    "softcap": None,
    "scale": None,
    "grouped_heads": False,
    "precision": None,
    "deterministic": True,
}


def describe(q: Any, k: Any, v: Any = None, key_bias: Any = None, **options: Any) -> problem.Problem:
    return problem.describe(q, k, v, key_bias, **(NO_OPTIONS | options))


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("ndim", "shape", "strides", "expected"),
    [
        (4, (2, 3, 5, 4), (60, 20, 4, 1), [0, 1, 2, 3]),
        (4, (2, 3, 5, 4), (60, 4, 12, 1), [0, 2, 1, 3]),  # (B, S, H, D) with its middle axes swapped
        (4, (2, 3, 5, 4), (4, 8, 24, 1), [2, 1, 0, 3]),
        (4, (2, 3, 5, 4), (60, -4, 12, -1), [0, 2, 1, 3]),  # the sign says nothing
        (3, (2, 5, 4), (1, 2, 10), [1, 0, 2]),  # features come last, however q has them
        (4, (2, 3, 5, 4), (60, 0, 12, 1), [0, 1, 2, 3]),  # broadcast: as in C order
        (4, (2, 3, 5, 4), (4, 0, 8, 1), [2, 0, 1, 3]),
        (4, (2, 1, 5, 4), (20, 1, 4, 1), [0, 1, 2, 3]),  # length 1: its stride says nothing
        (5, (2, 3, 5, 4), (60, 4, 12, 1), [0, 1, 3, 2, 4]),  # an axis more than q has
        (3, (2, 2, 4), (8, 8, 1), [0, 1, 2]),  # a tie
    ],
)
def test_memory_order(ndim: int, shape: tuple[int, ...], strides: tuple[int, ...], expected: list[int]) -> None:
    assert memory_order(ndim, shape, strides) == expected


@pytest.mark.parametrize("permutation", list(itertools.permutations(range(3))))
def test_results_have_numpys_k_order(permutation: tuple[int, ...]) -> None:
    axes = (*permutation, 3)
    q = zeros(2, 3, 5, 4).transpose(axes)
    like = arrays.result("x", q.dtype, q.shape, q).empty(np)
    assert like.shape == q.shape
    assert like.strides == np.empty_like(q, order="K").strides


def test_result_axes_invert_each_other() -> None:
    x = arrays.result("x", np.dtype(np.float16), (2, 3, 5, 4), zeros(5, 2, 3, 4).transpose(1, 2, 0, 3)).empty(np)
    assert x.shape == (2, 3, 5, 4)
    assert x.strides == (24, 8, 48, 2)


def test_a_problem_is_made_once() -> None:
    q, k, v = zeros(2, 3, 4), zeros(2, 5, 4), zeros(2, 5, 6)
    first = describe(q, k, v, causal=True, align=0)
    assert describe(q.copy(), k.copy(), v.copy(), causal=np.bool_(True), align=np.int64(0)) is first
    assert describe(q, k, v, window=(None, None)) is describe(q, k, v)
    assert describe(q, k, v, scale=2) is describe(q, k, v, scale=np.float32(2))
    others = [
        describe(q, k, v, causal=True, align=1),
        describe(q[::-1], k, v, causal=True, align=0),
        describe(q, k, causal=True, align=0),
        describe(*(x.astype(np.float16) for x in (q, k, v)), causal=True, align=0),
    ]
    assert len({first, *others}) == 5


def test_fields() -> None:
    q, k, v, key_bias = zeros(2, 1, 3, 4), zeros(5, 7, 4), zeros(7, 6), zeros(5, 7)
    p = describe(q, k, v, key_bias, softcap=3, scale=np.float16(0.5))
    assert (p.kind, p.device, p.dtype, p.accumulate) == ("host", -1, "float32", "float32")
    assert (p.batch, p.inner_batch) == ((2, 5), (2, 5))
    assert (p.q_batch, p.k_batch, p.v_batch, p.bias_batch) == ((2, 1), (5,), (), (5,))
    assert (p.m, p.n, p.d, p.e, p.has_value, p.has_key_bias, p.grouped) == (3, 7, 4, 6, True, True, False)
    assert (p.scale, p.softcap, p.precision, p.deterministic) == (0.5, 3.0, None, True)
    assert p.o is not None
    assert (p.o.shape, p.lse.shape) == ((2, 5, 3, 6), (2, 5, 3))
    assert [p.dq.shape, p.dk.shape] == [q.shape, k.shape]
    assert p.dv is not None
    assert p.dkey_bias is not None
    assert (p.dv.shape, p.dkey_bias.shape) == (v.shape, key_bias.shape)
    assert not p.empty


@pytest.mark.parametrize("d", [1, 33, 64, 80])
def test_default_scale_is_that_of_the_callers_head_dim(d: int) -> None:
    assert describe(zeros(3, d), zeros(3, d)).scale == 1 / np.sqrt(d)


@pytest.mark.parametrize(
    ("dtype", "operand", "accumulate"),
    [
        (">f2", "float16", "float32"),
        (ml_dtypes.bfloat16, "bfloat16", "float32"),
        (">f4", "float32", "float32"),
        (">f8", "float64", "float64"),
    ],
)
def test_dtypes(dtype: Any, operand: str, accumulate: str) -> None:
    x = zeros(3, 4, dtype=dtype)
    p = describe(x, x, x, zeros(3, dtype=np.dtype(accumulate).newbyteorder(">")))
    assert (p.dtype, p.accumulate) == (operand, accumulate)
    assert p.o is not None
    assert p.dkey_bias is not None
    assert [r.dtype.name for r in (p.o, p.dq, p.dk, p.lse, p.dkey_bias)] == [operand] * 3 + [accumulate] * 2
    assert all(r.dtype.isnative for r in (p.o, p.dq, p.dk, p.lse, p.dkey_bias))


def test_byte_orders_may_differ() -> None:
    assert describe(zeros(3, 4, dtype=">f4"), zeros(3, 4, dtype="<f4")).dtype == "float32"


def sees(i: int, j: int, a: int, causal: bool, window: tuple[int | None, int | None] | None) -> bool:
    left, right = window or (None, None)
    return (not causal or j <= i + a) and (left is None or j >= i + a - left) and (right is None or j <= i + a + right)


@pytest.mark.parametrize("window", [None, (None, None), (0, 0), (1, None), (None, 2), (2, 1), (10**30, 10**30)])
@pytest.mark.parametrize("align", ["bottom-right", "top-left", -1, 0, 3, -(10**30), 10**30])
@pytest.mark.parametrize("causal", [False, True])
def test_band_is_the_contract(causal: bool, align: Any, window: Any) -> None:
    for m, n in ((1, 1), (2, 5), (5, 2)):
        band = describe(zeros(m, 4), zeros(n, 4), causal=causal, align=align, window=window).band
        a = {"bottom-right": n - m, "top-left": 0}.get(align, align)
        for i, j in itertools.product(range(m), range(n)):
            assert (i + band.lo <= j <= i + band.hi) == sees(i, j, a, causal, window)


def test_align_may_be_left_out_where_it_says_nothing() -> None:
    assert (
        describe(zeros(3, 4), zeros(3, 4), causal=True).band
        == describe(zeros(3, 4), zeros(3, 4), causal=True, align="bottom-right").band
    )
    assert describe(zeros(2, 4), zeros(3, 4), align=None).band.is_full(2, 3)
    assert describe(zeros(2, 4), zeros(3, 4), align=-1).band.is_full(2, 3)


def random_strided(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """An array with random axis order and steps."""
    order = rng.permutation(len(shape))
    x: np.ndarray = np.zeros([2 * shape[axis] for axis in order], np.float32).transpose(np.argsort(order))
    steps = rng.choice([-2, -1, 1, 2], len(shape))
    x = x[tuple(slice(None, None, step) for step in steps)]
    return x[tuple(slice(length) for length in shape)]


@pytest.mark.parametrize("seed", range(20))
def test_inner_views_of_grouped_heads(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kv_heads, group, m, n, d, e = (int(x) for x in rng.integers(1, 4, 6))
    lead = tuple(int(x) for x in rng.integers(1, 3, rng.integers(0, 3)))
    q = random_strided((*lead, kv_heads * group, m, d), rng)
    k, v = random_strided((kv_heads, n, d), rng), random_strided((*lead, kv_heads, n, e), rng)
    key_bias = random_strided(((kv_heads * group, 1)[seed % 2], n), rng)
    p = describe(q, k, v, key_bias, grouped_heads=True)
    assert p.batch == (*lead, kv_heads * group)
    assert p.inner_batch == (*lead, kv_heads, group)
    views = (p.split_heads(q, 2), p.group_axis(k), p.group_axis(v), p.split_heads(key_bias, 1))
    cores = (2, 2, 2, 1)
    batches = (p.q_batch, p.k_batch, p.v_batch, p.bias_batch)
    strides = (p.q_strides, p.k_strides, p.v_strides, p.bias_strides)
    for x, view, core, batch, steps in zip((q, k, v, key_bias), views, cores, batches, strides, strict=True):
        assert np.shares_memory(x, view)
        assert view.size == x.size
        assert view.shape[:-core] == batch
        assert np.broadcast_shapes(view.shape[:-core], p.inner_batch) == p.inner_batch
        assert steps is not None
        assert all(s == t for s, t, length in zip(view.strides, steps, view.shape, strict=True) if length > 1)
    head = kv_heads * group - 1
    assert np.shares_memory(views[0][..., head // group, head % group, :, :], q[..., head, :, :])


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "heads"), [(0, 0, (0, 1)), (0, 2, (2, 0)), (6, 2, (2, 3)), (2, 2, (2, 1))]
)
def test_group_counts(q_heads: int, kv_heads: int, heads: tuple[int, int]) -> None:
    p = describe(zeros(q_heads, 3, 4), zeros(kv_heads, 5, 4), key_bias=zeros(5), grouped_heads=True)
    assert (p.heads, p.batch, p.bias_batch) == (heads, (q_heads,), ())


def test_without_value() -> None:
    p = describe(zeros(3, 4), zeros(5, 4), zeros(2, 5, 0))
    bare = problem.without_value(p)
    assert (bare.has_value, bare.e, bare.v_batch, bare.o, bare.dv) == (False, 0, None, None, None)
    assert (bare.batch, bare.lse) == ((2,), p.lse)


@pytest.mark.parametrize(
    ("m", "n", "batch", "empty"), [(0, 3, 2, True), (3, 0, 2, True), (3, 3, 0, True), (1, 1, 1, False)]
)
def test_empty(m: int, n: int, batch: int, empty: bool) -> None:
    assert describe(zeros(batch, m, 4), zeros(n, 4)).empty is empty


@pytest.mark.parametrize(
    ("need", "expected"),
    [
        (None, (True, True, True, True)),
        ((), (False, False, False, False)),
        (["k"], (False, True, False, False)),
        ({"q", "key_bias"}, (True, False, False, True)),
        ((name for name in ("v", "v")), (False, False, True, False)),
    ],
)
def test_needed(need: Any, expected: tuple[bool, ...]) -> None:
    assert problem.needed(need, True, True) == expected


def test_needed_of_absent_inputs() -> None:
    assert problem.needed(None, False, False) == (True, True, False, False)


@st.composite
def views(draw: st.DrawFn, buffer: np.ndarray) -> np.ndarray:
    """A random view of a byte buffer as uint16, with any strides."""
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    steps = [draw(st.integers(-12, 12)) for _ in shape]
    low = sum((length - 1) * step for length, step in zip(shape, steps, strict=True) if step < 0 and length)
    start = draw(st.integers(0, 40)) - low
    return as_strided(buffer[start : start + 2].view(np.uint16), tuple(shape), tuple(steps))


def addresses(x: np.ndarray) -> list[int]:
    """The first byte of each element."""
    offsets = [
        range(0, step * length, step) if step else [0] * length for length, step in zip(x.shape, x.strides, strict=True)
    ]
    return [x.ctypes.data + sum(where) for where in itertools.product(*offsets)]


def bytes_of(x: np.ndarray) -> list[int]:
    return [address + i for address in addresses(x) for i in range(2)]


def overlap(a: Any, b: Any) -> bool:
    return first_overlap(a, {"b": b}) is not None


@settings(max_examples=300)
@given(st.data())
def test_overlap_is_exact(data: st.DataObject) -> None:
    buffer = np.zeros(400, np.uint8)
    a, b = data.draw(views(buffer)), data.draw(views(buffer))
    assert overlap(a, b) == bool(set(bytes_of(a)) & set(bytes_of(b)))
    assert overlaps_itself(a) == (len(set(bytes_of(a))) < len(bytes_of(a)))


class Elsewhere:
    """An array where this process has no memory, as one of a device."""

    shape, strides, ndim, dtype = (2, 3), (6, 4), 2, np.dtype(np.float16)
    size, data = 6, SimpleNamespace(ptr=1 << 62)


def test_memory_is_not_read_to_see_whether_it_overlaps() -> None:
    assert not overlaps_itself(Elsewhere())
    assert overlap(Elsewhere(), Elsewhere())


def test_interleaved_arrays_do_not_overlap() -> None:
    packed = zeros(2, 5, 3, 4, 8)
    q, k, v = (packed[:, :, i] for i in range(3))
    assert not overlap(q, k)
    assert not overlap(k, v)
    assert overlap(q, packed[:, 4, 0, 3])


def test_an_overlap_that_is_too_hard_to_rule_out_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = np.zeros(10**4, np.uint8)
    a, b = as_strided(buffer, (6, 6, 6), (49, 42, 21)), as_strided(buffer[1:], (6, 6, 6), (50, 14, 56))
    assert not overlap(a, b)
    monkeypatch.setattr(arrays, "OVERLAP_WORK", 1)
    assert overlap(a, b)
