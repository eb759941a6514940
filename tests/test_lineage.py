"""The lineage against dense float64 and against `cuflash.attention`: on the host, and on a GPU where there is one."""

from __future__ import annotations

import itertools
import os
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import reference
import sass
from backends import GPU, HOST, Backend, Layout, Placed, acc_dtype, dtype_of, normal, place, put, same_bits
from gpu_cases import layouts
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from reference import unit_roundoff
from scipy.special import softmax  # type: ignore[import-untyped]

import cuflash
from cuflash import compile, lineage, lineage_host, lineage_tiles, tiles

BACKENDS = [pytest.param(HOST, id="host"), pytest.param(GPU, id="gpu", marks=pytest.mark.gpu)]
DTYPES = ("float16", "bfloat16", "float32", "float64")


def supported(backend: Backend, dtype: str) -> None:
    """Skip what this GPU has no kernels for."""
    if backend is GPU and dtype == "bfloat16" and compute_capability() < (8, 0):
        pytest.skip("bfloat16 needs compute capability 8.0")


def compute_capability() -> tuple[int, int]:
    import cupy

    capability = cupy.cuda.Device().compute_capability
    return int(capability[:-1]), int(capability[-1])


# --- softmaxes -------------------------------------------------------------------------------------------------------


SUM = 56
"""Roundings, in eps, of a sum of exponentials. Those of the exponents weigh as much as the mean exponent, which is at
most the logarithm of the number of elements, here below 14; in pairs, by Kahan, by lanes and by warps an element is
added less than 20 times, and rescaled as often where that is by blocks."""


def check_softmax(y: np.ndarray, x: np.ndarray, axis: int) -> None:
    """y is the softmax of x up to its rounding to y's dtype, and up to those of a float32 or float64 computation.

    An exponent t = x - max is rounded by eps/2 of itself, which moves exp(t) by less than eps, as |t| exp(t) < 1; the
    sum is off by `SUM` eps of itself; exp and the quotient by a few.
    """
    with np.errstate(all="ignore"):
        exact = softmax(x.astype(np.float64), axis=axis) if x.size else np.zeros(x.shape)
    assert y.shape == x.shape and y.dtype == x.dtype
    got = y.astype(np.float64)
    assert (np.isnan(got) == np.isnan(exact)).all()
    largest = np.nan_to_num(exact).max(axis=axis, keepdims=True, initial=0)
    smallest = 2.0**-24 if y.dtype == np.float16 else 1e-37 if y.dtype.itemsize < 8 else 1e-300
    allowed = unit_roundoff(y.dtype) * exact + smallest + (SUM + 8) * np.finfo(acc_dtype(y.dtype.name)).eps * largest
    wrong = np.abs(got - exact) > allowed
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size}, by {np.nanmax(np.abs(got - exact) - allowed):.3g} too much"


def check_statistics(maximum: np.ndarray, total: np.ndarray, x: np.ndarray, axis: int) -> None:
    """The exact maximum; the sum up to rounding."""
    dtype = acc_dtype(x.dtype.name)
    assert maximum.dtype == total.dtype == dtype
    exact_max = x.astype(np.float64).max(axis=axis, initial=-np.inf)
    assert (maximum == exact_max.astype(dtype)).all()
    reference = np.where(np.isneginf(exact_max), 0, exact_max)
    exact = np.exp(x.astype(np.float64) - np.expand_dims(reference, axis)).sum(axis=axis)
    np.testing.assert_allclose(total, exact, rtol=SUM * np.finfo(dtype).eps)


@st.composite
def softmax_cases(draw: st.DrawFn) -> tuple[str, tuple[int, ...], int, Layout, float, int]:
    """dtype, shape, axis, layout, spread of the values, seed."""
    shape = tuple(draw(st.lists(st.sampled_from((0, 1, 2, 3, 5, 8)), max_size=3)))
    at = draw(st.integers(0, len(shape)))
    length = draw(st.one_of(st.integers(0, 80), st.sampled_from((1000, 1024, 1032, 5000))))
    shape = (*shape[:at], length, *shape[at:])
    axis = at if draw(st.booleans()) else at - len(shape)
    spread = draw(st.sampled_from((0.1, 3.0, 300.0)))
    return (
        draw(st.sampled_from(DTYPES)),
        shape,
        axis,
        draw(layouts(len(shape))),
        spread,
        draw(st.integers(0, 2**32 - 1)),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=150)
@given(case=softmax_cases())
@example(case=("float16", (5000, 5, 8), -3, Layout(order=(0, 1, 2), steps=(1, 1, 1)), 3.0, 0))  # rows across memory
def test_softmaxes(backend: Backend, case: tuple[str, tuple[int, ...], int, Layout, float, int]) -> None:
    dtype, shape, axis, layout, spread, seed = case
    supported(backend, dtype)
    rng = np.random.default_rng(seed)
    values = spread * rng.standard_normal(shape)
    values[rng.random(shape) < 0.1 * rng.integers(0, 2)] = -np.inf
    placed = place(backend, values.astype(dtype_of(dtype)), layout)
    x = backend.get(placed.array)  # broadcast axes repeat
    safe = lineage.safe_softmax(placed.array, axis=axis)
    online, maximum, total = lineage.online_softmax(placed.array, axis=axis, return_statistics=True)
    for y in (safe, online, lineage.online_softmax(placed.array, axis=axis)):
        check_softmax(backend.get(y), x, axis)
    check_statistics(backend.get(maximum), backend.get(total), x, axis)
    for one, other in zip((maximum, total), lineage.softmax_statistics(placed.array, axis=axis), strict=True):
        np.testing.assert_array_equal(backend.get(one), backend.get(other))
    placed.check_unchanged()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "axis"), [((3, 1 << 20), 1), ((70001, 9), 0), ((5000, 7), 1), ((40, 5, 3000), 0)])
def test_softmaxes_of_long_and_of_many_rows(backend: Backend, dtype: str, shape: tuple[int, ...], axis: int) -> None:
    supported(backend, dtype)
    x = normal(np.random.default_rng(1), shape, dtype)
    given_x = put(backend, x)
    for function in (lineage.safe_softmax, lineage.online_softmax):
        check_softmax(backend.get(function(given_x, axis=axis)), x, axis)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_of_parts_merge(backend: Backend, dtype: str) -> None:
    """Parts of any length, one without elements, one of -inf; and a row that has nothing above -inf at all."""
    supported(backend, dtype)
    x = normal(np.random.default_rng(2), (6, 500), dtype)
    x[:, 100:130] = -np.inf
    x[3] = -np.inf
    cuts = (0, 70, 70, 100, 130, 499, 500)
    parts = [
        lineage.softmax_statistics(put(backend, np.ascontiguousarray(x[:, a:b]))) for a, b in itertools.pairwise(cuts)
    ]
    merged = lineage.merge_statistics(*zip(*parts, strict=True))
    check_statistics(*map(backend.get, merged), x, 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_infinite_and_nan_values_go_where_the_formula_sends_them(backend: Backend) -> None:
    x = np.zeros((4, 300), np.float32)
    x[0, 7], x[1, 200], x[2] = np.inf, np.nan, -np.inf
    for function in (lineage.safe_softmax, lineage.online_softmax):
        y = backend.get(function(put(backend, x)))
        assert np.isnan(y[:3]).all()
        assert (y[3] == np.float32(1 / 300)).all()
    maximum, total = map(backend.get, lineage.softmax_statistics(put(backend, x)))
    assert (maximum == [np.inf, 0, -np.inf, 0]).all() and np.isnan(total[:2]).all() and (total[2:] == [0, 300]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_shows_in_the_total_alone(backend: Backend) -> None:
    """Of a row of nothing else, too, and where a whole block of a row is NaN."""
    x = np.zeros((2, 2**21), np.float32)
    x[0], x[1, : 2**20] = np.nan, np.nan
    maximum, total = map(backend.get, lineage.softmax_statistics(put(backend, x)))
    assert (maximum == [-np.inf, 0]).all() and np.isnan(total).all()


@pytest.mark.parametrize("function", [lineage.safe_softmax, lineage.online_softmax, lineage.softmax_statistics])
@pytest.mark.parametrize(
    ("x", "axis", "error", "words"),
    [
        ([1.0], 0, TypeError, "x must be"),
        (np.float32(1), 0, TypeError, "x must be"),
        (np.zeros(3, np.int32), 0, TypeError, "x has dtype int32"),
        (np.zeros(()), 0, ValueError, "x has no axis"),
        (np.zeros((2, 3)), 2, ValueError, "axis must be -2 to 1 for an array of 2 axes, got 2"),
        (np.zeros((2, 3)), -3, ValueError, "got -3"),
        (np.zeros((2, 3)), 1.0, TypeError, "axis must be an int, got float"),
        (np.zeros((2, 3)), None, TypeError, "axis must be an int, got NoneType"),
    ],
)
def test_bad_input_of_a_softmax(function: Any, x: Any, axis: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        function(x, axis=axis)


@pytest.mark.parametrize(
    ("maxima", "totals", "error", "words"),
    [
        ([], [], ValueError, "maxima has no parts"),
        ([np.zeros(2)], [np.zeros(2)] * 2, ValueError, "maxima has 1 parts, totals has 2"),
        ([np.zeros(2)], [np.zeros(3)], ValueError, r"totals\[0\] must have shape \(2,\)"),
        ([np.zeros(2), np.zeros(2, np.float32)], [np.zeros(2)] * 2, TypeError, r"maxima\[1\] must be float64"),
        ([np.zeros(2, np.float16)], [np.zeros(2, np.float16)], TypeError, "must be float32 or float64, got float16"),
        (3, [np.zeros(2)], TypeError, "maxima must be an iterable"),
    ],
)
def test_bad_input_of_merging(maxima: Any, totals: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        lineage.merge_statistics(maxima, totals)


# --- attention ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attention:
    """A problem of the attentions of the lineage, and how its arrays lie."""

    dtype: str
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    options: dict[str, Any]
    layouts: dict[str, Layout]
    seed: int

    def arrays(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(self.seed)
        batch = np.broadcast_shapes(self.q[:-2], self.k[:-2], self.v[:-2])
        shapes = {"q": self.q, "k": self.k, "v": self.v, "do": (*batch, self.q[-2], self.v[-1])}
        return {name: normal(rng, shape, self.dtype) for name, shape in shapes.items()}

    def placed(self, backend: Backend, values: dict[str, np.ndarray]) -> dict[str, Placed]:
        return {name: place(backend, x, self.layouts.get(name)) for name, x in values.items()}


@st.composite
def attentions(draw: st.DrawFn, most_features: int = 80, broadcast: bool = True) -> Attention:
    """Any call, some of its inputs broadcast, with arrays of any strides."""
    lengths = st.one_of(st.sampled_from((0, 1, 2, 3, 200, 300)), st.integers(1, 140))
    m, n = draw(lengths), draw(lengths)
    d, e = draw(st.integers(1, most_features)), draw(st.integers(0, most_features))
    if draw(st.booleans()):  # whole vectors
        d, e = -(-d // 8) * 8, -(-e // 8) * 8
    batch = tuple(draw(st.lists(st.sampled_from((1, 2, 3)), max_size=2)))

    def trimmed() -> tuple[int, ...]:
        axes = tuple(draw(st.sampled_from((length, 1))) for length in batch)
        return axes[draw(st.integers(0, len(batch))) :] if broadcast and draw(st.booleans()) else batch

    options: dict[str, Any] = {}
    if draw(st.booleans()):
        aligns = st.one_of(st.sampled_from(("bottom-right", "top-left")), st.integers(-m - 1, n + 1))
        options = {"causal": True, "align": draw(aligns)}
    scale = draw(st.sampled_from((None, None, 0.3, -0.2, 0.0)))
    options |= {} if scale is None else {"scale": scale}
    shapes = {"q": (*trimmed(), m, d), "k": (*trimmed(), n, d), "v": (*batch, n, e)}
    whole = np.broadcast_shapes(*(shape[:-2] for shape in shapes.values()))
    ndims = {name: len(shape) for name, shape in shapes.items()} | {"do": len(whole) + 2}
    where = {name: draw(layouts(ndim, writable=True)) for name, ndim in ndims.items() if draw(st.booleans())}
    return Attention(
        draw(st.sampled_from(DTYPES)), **shapes, options=options, layouts=where, seed=draw(st.integers(0, 2**32 - 1))
    )


class Limits:
    """What results may be off by, relative to their bounds.

    A score is rounded ``roundings`` times to the operands' dtype, and is a sum of products in the accumulation dtype; a
    probability is off by as much as its own score and the largest one are, and is rounded again; the sums that follow
    lose an accumulation's rounding with each term, which also covers what tensor cores cut off.
    """

    def __init__(self, x: dict[str, np.ndarray], options: dict[str, Any], roundings: int) -> None:
        q, k, v = x["q"], x["k"], x["v"]
        self.dense, dtype = reference.dense(q, k, v, **options), q.dtype
        u, eps = unit_roundoff(dtype), float(np.finfo(acc_dtype(dtype.name)).eps)
        # Floats are split for tensor cores, which loses 12 eps of a product.
        products = (q.shape[-1] + 16) * eps * self.dense.max_abs_products
        score = (roundings * u + 8 * eps) * self.dense.max_abs_score + products
        p = 2 * score + 2 * u + 64 * eps
        length = q.shape[-2] + k.shape[-2] + v.shape[-1]
        self.o = p + u + length * eps
        self.gradient = 2 * p + 6 * u + 3 * length * eps

    def check(self, name: str, got: np.ndarray, exact: np.ndarray, bound: float) -> None:
        limit = self.o if name in ("o", "p") else self.gradient
        assert got.shape == exact.shape, f"{name}: {got.shape}"
        excess = reference.excess(got, exact, bound, limit)
        assert excess <= 0, f"{name} is off by {excess:.3g} more than {limit:.3g} * {bound:.3g}"


def check_gradients(
    got: dict[str, np.ndarray], x: dict[str, np.ndarray], options: dict[str, Any], limits: Limits
) -> None:
    do, q, k, v = (x[name] for name in ("do", "q", "k", "v"))
    exact = reference.gradients(do, q, k, v, **options)
    measure = reference.bounds(do, q, k, v, **options)
    for name, value in zip(("dq", "dk", "dv"), exact, strict=False):
        assert value is not None and got[name].dtype == q.dtype
        limits.check(name, got[name], value, getattr(measure, name))


# --- standard attention ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=120)
@given(case=attentions())
def test_standard_attention(backend: Backend, case: Attention) -> None:
    supported(backend, case.dtype)
    x = case.arrays()
    placed = case.placed(backend, x)
    q, k, v = (placed[name].array for name in "qkv")
    o, p = lineage.standard_attention(q, k, v, return_probabilities=True, **case.options)
    limits = Limits(x, case.options, roundings=1)
    limits.check("o", backend.get(o), limits.dense.o, reference.largest(np.abs(limits.dense.v)))
    limits.check("p", backend.get(p), limits.dense.p, 1.0)
    assert o.dtype == p.dtype == x["q"].dtype
    for each in placed.values():
        each.check_unchanged()
    assert same_bits(backend.get(lineage.standard_attention(q, k, v, **case.options)), backend.get(o))


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=100)
@given(data=st.data())
def test_standard_attention_backward(backend: Backend, data: st.DataObject) -> None:
    case = data.draw(attentions(broadcast=backend is HOST))
    supported(backend, case.dtype)
    x = case.arrays()
    placed = case.placed(backend, x)
    do, q, k, v = (placed[name].array for name in ("do", "q", "k", "v"))
    _, p = lineage.standard_attention(q, k, v, return_probabilities=True, **case.options)
    scale = case.options.get("scale")
    gradients = lineage.standard_attention_backward(do, q, k, v, p, scale=scale)
    got = dict(zip(("dq", "dk", "dv"), map(backend.get, gradients), strict=True))
    check_gradients(got, x, case.options, Limits(x, case.options, roundings=1))
    for each in placed.values():
        each.check_unchanged()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_standard_attention_of_long_rows(backend: Backend, dtype: str) -> None:
    """Of many vectors a thread, and of a length that is none."""
    supported(backend, dtype)
    for n in (6000, 6001):
        shapes = {"q": (2, 40, 16), "k": (2, n, 16), "v": (2, n, 8)}
        case = Attention(dtype, **shapes, options={"causal": True, "align": n - 50}, layouts={}, seed=1)
        x = case.arrays()
        q, k, v, do = (put(backend, x[name]) for name in ("q", "k", "v", "do"))
        o, p = lineage.standard_attention(q, k, v, return_probabilities=True, **case.options)
        limits = Limits(x, case.options, roundings=1)
        limits.check("o", backend.get(o), limits.dense.o, reference.largest(np.abs(x["v"].astype(np.float64))))
        gradients = lineage.standard_attention_backward(do, q, k, v, p)
        got = dict(zip(("dq", "dk", "dv"), map(backend.get, gradients), strict=True))
        check_gradients(got, x, case.options, limits)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_memory_of_standard_attention_on_the_host(dtype: str) -> None:
    """What the docstrings say, in matrices of q's dtype, with a tenth for everything that is not one."""
    q = normal(np.random.default_rng(5), (2, 1000, 8), dtype)
    _, p = lineage.standard_attention(q, q, q, causal=True, return_probabilities=True)
    forward, backward = (3, 7) if dtype == "float16" else (2, 2)
    for matrices, function in (
        (forward, lambda: lineage.standard_attention(q, q, q, causal=True)),
        (backward, lambda: lineage.standard_attention_backward(q, q, q, q, p)),
    ):
        tracemalloc.start()
        function()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert matrices - 1 < peak / p.nbytes < 1.1 * matrices + 0.1


def test_no_room_for_the_matrix_is_said_to_be_that(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: Any) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(lineage_host, "standard_attention", no_room)
    with pytest.raises(MemoryError, match="none left") as caught:
        lineage.standard_attention(*QKV)
    [note] = caught.value.__notes__
    assert "(2, 3, 5) elements in float64" in note and "cuflash.attention" in note


@pytest.mark.gpu
def test_standard_attention_names_its_limits_on_a_gpu() -> None:
    q, k = put(GPU, np.zeros((1, 8), np.float64)), put(GPU, np.zeros((40000, 8), np.float64))
    with pytest.raises(NotImplementedError, match=r"at most \d+ keys in float64 here, got 40000"):
        lineage.standard_attention(q, k, k)
    q, k = put(GPU, np.zeros((3, 5, 8))), put(GPU, np.zeros((5, 8)))
    p = put(GPU, np.zeros((3, 5, 5)))
    with pytest.raises(NotImplementedError, match=r"k has batch axes \(\), the call \(3,\)"):
        lineage.standard_attention_backward(q, q, k, k, p)


# --- FlashAttention-1 ------------------------------------------------------------------------------------------------


FAMILIES = [pytest.param(HOST, "", id="host")]
FAMILIES += [pytest.param(GPU, name, id=name, marks=pytest.mark.gpu) for name in ("sm80", "sm75")]


@contextmanager
def family(name: str) -> Iterator[None]:
    """Make the launcher take the kernels of a portable family."""
    with pytest.MonkeyPatch.context() as patch:
        if name:
            patch.setenv("CUFLASH_FAMILY", name)
        yield


def check_flash1(backend: Backend, case: Attention) -> None:
    """o and the statistics of a case."""
    x = case.arrays()
    placed = case.placed(backend, x)
    q, k, v = (placed[name].array for name in "qkv")
    o, maximum, total = lineage.flash1_attention(q, k, v, return_statistics=True, **case.options)
    limits = Limits(x, case.options, roundings=0)
    limits.check("o", backend.get(o), limits.dense.o, reference.largest(np.abs(limits.dense.v)))
    with np.errstate(divide="ignore"):
        lse = backend.get(maximum) + np.log(backend.get(total))
    limits.check("lse", lse, limits.dense.lse, 1.0)
    assert o.dtype == x["q"].dtype and maximum.dtype == total.dtype == acc_dtype(case.dtype)
    for each in placed.values():
        each.check_unchanged()
    assert same_bits(backend.get(lineage.flash1_attention(q, k, v, **case.options)), backend.get(o))


@pytest.mark.parametrize(("backend", "name"), FAMILIES)
@settings(max_examples=150)
@given(case=attentions(most_features=128))
def test_flash1_attention(backend: Backend, name: str, case: Attention) -> None:
    assume(name != "sm75" or case.dtype != "bfloat16")
    supported(backend, case.dtype)
    with family(name):
        check_flash1(backend, case)


@pytest.mark.parametrize(("backend", "name"), FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [64, 128, 200])
@pytest.mark.parametrize("options", [{}, {"causal": True, "align": "bottom-right"}], ids=["full", "causal"])
def test_flash1_attention_of_many_tiles(
    backend: Backend, name: str, dtype: str, d: int, options: dict[str, Any]
) -> None:
    """Several passes over rows that are divided between CTAs; a band that ends in the middle of a tile."""
    if (name == "sm75" and dtype == "bfloat16") or (backend is GPU and d > 128 and dtype in ("float32", "float64")):
        pytest.skip("no kernel")
    supported(backend, dtype)
    m, n = (300, 500) if backend is HOST else (700, 1100)
    shapes = {"q": (2, m, d), "k": (1, n, d), "v": (2, n, d)}
    with family(name):
        check_flash1(backend, Attention(dtype, **shapes, options=options, layouts={}, seed=3))


@pytest.mark.parametrize(("backend", "name"), FAMILIES)
@pytest.mark.parametrize(("dtype", "scale"), [("float16", None), ("float32", 0.0), ("float64", -0.2)])
def test_flash1_attention_of_rows_that_see_nothing(
    backend: Backend, name: str, dtype: str, scale: float | None
) -> None:
    """All of them, over several tiles of keys: zeros, and statistics of nothing."""
    m, n, d = 70, 1100, 64
    rng = np.random.default_rng(0)
    q, k, v = (put(backend, normal(rng, (2, length, d), dtype)) for length in (m, n, n))
    with family(name):
        state = lineage.flash1_attention(q, k, v, causal=True, align=-m, scale=scale, return_statistics=True)
        gradients = lineage.flash1_attention_backward(q, q, k, v, *state, causal=True, align=-m, scale=scale)
    o, maximum, total = map(backend.get, state)
    assert not o.any() and (maximum == -np.inf).all() and not total.any()
    assert not any(backend.get(x).any() for x in gradients)


def check_flash1_backward(backend: Backend, case: Attention) -> None:
    """Gradients of a case against float64, and against those of cuflash itself."""
    x = case.arrays()
    placed = case.placed(backend, x)
    do, q, k, v = (placed[name].array for name in ("do", "q", "k", "v"))
    state = lineage.flash1_attention(q, k, v, return_statistics=True, **case.options)
    gradients = lineage.flash1_attention_backward(do, q, k, v, *state, **case.options)
    got = dict(zip(("dq", "dk", "dv"), map(backend.get, gradients), strict=True))
    limits = Limits(x, case.options, roundings=0)
    check_gradients(got, x, case.options, limits)
    for each in placed.values():
        each.check_unchanged()
    _, vjp = cuflash.attention_vjp(q, k, v, **case.options)
    measure = reference.bounds(x["do"], x["q"], x["k"], x["v"], **case.options)
    for name, ours in zip(got, vjp(do), strict=True):
        apart = np.abs(got[name].astype(np.float64) - backend.get(ours).astype(np.float64)).max(initial=0)
        assert apart <= 2 * limits.gradient * getattr(measure, name)


@pytest.mark.parametrize(("backend", "name"), FAMILIES)
@settings(max_examples=100)
@given(data=st.data())
def test_flash1_attention_backward(backend: Backend, name: str, data: st.DataObject) -> None:
    case = data.draw(attentions(most_features=64, broadcast=backend is HOST))
    assume(name != "sm75" or case.dtype != "bfloat16")
    supported(backend, case.dtype)
    with family(name):
        check_flash1_backward(backend, case)


@pytest.mark.parametrize(("backend", "name"), FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("options", [{}, {"causal": True, "align": "bottom-right"}], ids=["full", "causal"])
def test_flash1_attention_backward_of_many_tiles(
    backend: Backend, name: str, dtype: str, d: int, options: dict[str, Any]
) -> None:
    if (name == "sm75" and dtype == "bfloat16") or (backend is GPU and d > 64 and dtype == "float64"):
        pytest.skip("no kernel")
    supported(backend, dtype)
    shapes = {"q": (2, 300, d), "k": (2, 500, d), "v": (2, 500, d)}
    with family(name):
        check_flash1_backward(backend, Attention(dtype, **shapes, options=options, layouts={}, seed=4))


@pytest.mark.parametrize(
    ("at", "x", "error", "words"),
    [
        (0, np.zeros((2, 3, 4)), ValueError, r"do must have shape \(2, 3, 6\)"),
        (1, np.zeros((2, 3, 6), np.float32), TypeError, "o must be float64"),
        (2, None, TypeError, "maximum must be"),
        (3, np.zeros((2, 4)), ValueError, r"total must have shape \(2, 3\)"),
    ],
)
def test_bad_input_of_flash1_attention_backward(at: int, x: Any, error: type[Exception], words: str) -> None:
    do, *state = (np.zeros((2, 3, 6)), np.zeros((2, 3, 6)), np.zeros((2, 3)), np.ones((2, 3)))
    given_arrays = [do, *state]
    given_arrays[at] = x
    with pytest.raises(error, match=words):
        lineage.flash1_attention_backward(given_arrays[0], *QKV, *given_arrays[1:])


@pytest.mark.gpu
def test_flash1_attention_names_its_limits_on_a_gpu() -> None:
    for dtype, most in (("float16", 256), ("float32", 128), ("float64", 128)):
        q = put(GPU, np.zeros((5, most + 1), dtype))
        with pytest.raises(NotImplementedError, match=f"at most {most} features .* got {most + 1}"):
            lineage.flash1_attention(q, q, q)


QKV = (np.zeros((2, 3, 4)), np.zeros((2, 5, 4)), np.zeros((2, 5, 6)))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        (([[1.0]], *QKV[1:]), {}, TypeError, "q must be"),
        (QKV, {"causal": True}, ValueError, "need align"),
        (QKV, {"causal": 1}, TypeError, "causal must be a bool"),
        (QKV, {"scale": "1"}, TypeError, "scale must be"),
        ((QKV[0], QKV[1][..., :3], QKV[2]), {}, ValueError, "differ in features"),
        ((QKV[0].astype(np.float32), *QKV[1:]), {}, TypeError, "dtypes must be equal"),
    ],
)
@pytest.mark.parametrize("function", [lineage.standard_attention, lineage.flash1_attention])
def test_bad_input_of_attention(
    function: Any, arguments: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        function(*arguments, **options)
    extra = "return_probabilities" if function is lineage.standard_attention else "return_statistics"
    with pytest.raises(TypeError, match=f"{extra} must be a bool"):
        function(*QKV, **{extra: 1})


@pytest.mark.parametrize(
    ("do", "p", "error", "words"),
    [
        (None, np.zeros((2, 3, 5)), TypeError, "do must be"),
        (np.zeros((2, 3, 4)), np.zeros((2, 3, 5)), ValueError, r"do must have shape \(2, 3, 6\)"),
        (np.zeros((2, 3, 6)), np.zeros((2, 3, 4)), ValueError, r"p must have shape \(2, 3, 5\)"),
        (np.zeros((2, 3, 6)), np.zeros((2, 3, 5), np.float32), TypeError, "p must be float64"),
    ],
)
def test_bad_input_of_its_backward(do: Any, p: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        lineage.standard_attention_backward(do, *QKV, p)


# --- the kernels without a GPU ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "target"), [("sm75", "75"), ("sm80", "80"), ("sm80", "90a"), ("sm80", "120")])
def test_a_third_of_the_kernels_compiles_and_does_not_spill(
    family: str, target: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "CUFLASH_CACHE_DIR" not in os.environ:
        monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path))
    turn = ["75", "80", "90a", "120"].index(target) % 3
    variants = lineage_tiles.variants(target, family)
    assert len({variant.name for variant in variants}) == len(variants)
    sample = variants[turn::3]
    errors = compile.compile_all(sample)
    assert not errors, "\n\n".join(map(str, errors))
    for variant in sample:
        used = compile.resources(variant)
        # A kilobyte for each of 16 rows is half of the registers of a warp.
        sums = tiles.accumulator_bytes(variant.dtype) * variant.tile.head_dim
        gradients = 2 if variant.operation == lineage_tiles.FLASH1_BACKWARD else 1
        allowed = 512 if gradients * sums >= 1024 else 0
        assert max(used.spill_bytes, used.stack_bytes) <= allowed, f"{variant}: {used}"
        if variant.operation.startswith("flash1") and tiles.kind(variant.dtype) == "16 bits":
            product = "HMMA.1688.F32" if family == "sm75" else "HMMA.16816.F32"
            assert sass.opcodes(compile.cubin_path(variant)).count(product), f"{variant}: no {product}"
