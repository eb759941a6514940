"""Faults that users of other attention libraries met, as tests of this one: numerics, masks, score terms.

Each test carries the number of its row in the catalogue of such faults. The rest: shapes, layouts, dtypes in
test_field_faults_arrays.py; long strides, large grids, memory in test_field_faults_sizes.py; races, streams, graphs in
test_field_faults_streams.py; compiling, caching, installing in test_field_faults_build.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from backends import (
    GPU,
    HOST,
    Backend,
    acc_dtype,
    dtype_of,
    normal,
    put,
    same_bits,
)
from checks import (
    both,
    both_dtypes,
    check,
    compiled_kernels,  # noqa: F401 - a fixture
    finite,
    rounding,
    run,
    unit_roundoff,
)

import cuflash

gpu = pytest.mark.gpu
RNG = np.random.default_rng


def eye(n: int, dtype: str = "float16") -> np.ndarray:
    """Values that make o show the weights."""
    return np.eye(n).astype(dtype_of(dtype))


# --- rows without a key, sentinels, overflow of scores -----------------------------------------------------------


@both_dtypes
def test_b01_gradient_of_a_row_without_keys_reaches_nothing(backend: Backend, dtype: str) -> None:
    rng = RNG(1)
    q, k, v, do = (normal(rng, (1, 1, 4, 16), dtype) for _ in range(4))
    kicked = do.copy()
    kicked[..., 0, :] = 1e4
    do[..., 0, :] = 0
    options = {"causal": True, "align": -1}  # row 0 sees nothing
    with_kick, without = (run(backend, q, k, v, x, **options) for x in (kicked, do))
    assert (with_kick.o[..., 0, :] == 0).all() and (with_kick.lse[..., 0] == -np.inf).all()
    assert (with_kick.dq[..., 0, :] == 0).all()
    for name in ("o", "lse", "dq", "dk", "dv"):
        assert same_bits(getattr(with_kick, name), getattr(without, name)), name
    assert finite((with_kick.o, with_kick.dq, with_kick.dk, with_kick.dv))


@both_dtypes
def test_b01_a_batch_element_without_keys(backend: Backend, dtype: str) -> None:
    rng = RNG(2)
    q, k, v, do = (normal(rng, (3, 4, 16), dtype) for _ in range(4))
    key_bias = np.zeros((3, 4), acc_dtype(dtype))
    key_bias[1] = -np.inf
    do[1] = 1e4
    got = check(backend, q, k, v, do, key_bias=key_bias)
    assert (got.o[1] == 0).all() and (got.lse[1] == -np.inf).all()
    for gradient in (got.dq, got.dk, got.dv, got.dkey_bias):
        assert (gradient[1] == 0).all()


@both_dtypes
@pytest.mark.parametrize("d", [16, 128])
def test_b01_a_loss_of_lse_where_rows_have_no_keys(backend: Backend, dtype: str, d: int) -> None:
    """Its gradient is -inf there, as lse is, where other rows of the tile have keys."""
    rng = RNG(33)
    q, k, v, do = (normal(rng, (2, 40, d), dtype) for _ in range(4))
    key_bias = np.zeros(40, acc_dtype(dtype))
    key_bias[:5] = -np.inf
    options = {"key_bias": key_bias, "causal": True}
    lse = run(backend, q, k, v, **options).lse
    assert (lse[:, :5] == -np.inf).all() and np.isfinite(lse[:, 5:]).all()
    got = run(backend, q, k, v, do, 2 * lse, **options)
    assert finite((got.dq, got.dk, got.dv, got.dkey_bias)) and (got.dq[:, :5] == 0).all()
    usual = run(backend, q, k, v, do, np.where(np.isneginf(lse), 0, 2 * lse).astype(lse.dtype), **options)
    for name in ("dq", "dk", "dv", "dkey_bias"):
        assert same_bits(getattr(got, name), getattr(usual, name)), name


@both_dtypes
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("at", ["first", "last"])
def test_b02_rows_without_keys_at_the_edge_of_a_tile(backend: Backend, dtype: str, d: int, at: str) -> None:
    rng = RNG(3)
    m, n, empty = 64, 256, 14
    q, k, v = (normal(rng, (length, d), dtype) for length in (m, n, n))
    if at == "first":
        options: dict[str, Any] = {"causal": True, "align": -empty}
        rows, gone, alone = slice(empty, m), slice(0, empty), {"causal": True, "align": 0}
    else:  # row i sees keys from i + 206 on
        options = {"window": (0, None), "align": n - (m - empty)}
        rows, gone, alone = slice(0, m - empty), slice(m - empty, m), options
    got = check(backend, q, k, v, **options)
    assert (got.o[gone] == 0).all() and (got.lse[gone] == -np.inf).all()
    rest = run(backend, q[rows], k, v, **alone)
    scale = np.abs(v.astype(np.float64)).max()
    np.testing.assert_allclose(
        got.o[rows].astype(np.float64), rest.o.astype(np.float64), rtol=0, atol=rounding(backend, dtype, n) * scale
    )


@both_dtypes
@pytest.mark.parametrize("bias", ["lowest", -1e30, -65504.0])
def test_b03_a_finite_bias_is_not_a_mask(backend: Backend, dtype: str, bias: float | str) -> None:
    rng = RNG(4)
    n, d = 441, 64
    q, k, v, do = (normal(rng, (n, d), dtype) for _ in range(4))
    value = float(np.finfo(acc_dtype(dtype)).min) if bias == "lowest" else float(bias)
    key_bias = np.full(n, value, acc_dtype(dtype))
    got = run(backend, q, k, v, do, key_bias=key_bias)
    plain = run(backend, q, k, v, do)
    assert finite((got.o, got.lse, got.dq, got.dk, got.dv, got.dkey_bias))
    if bias == -65504.0:
        np.testing.assert_allclose(got.o.astype(np.float64), plain.o.astype(np.float64), rtol=0, atol=0.02)
        np.testing.assert_allclose(got.lse, plain.lse + value, rtol=0, atol=0.02)
    else:
        mean = np.broadcast_to(v.astype(np.float64).mean(0), v.shape)
        np.testing.assert_allclose(got.o.astype(np.float64), mean, rtol=0, atol=2 * rounding(backend, dtype, n))
        np.testing.assert_allclose(got.lse, value, rtol=1e-6)


@both_dtypes
@pytest.mark.parametrize("n", [1, 2, 64])
def test_b04_scores_below_any_finite_sentinel(backend: Backend, dtype: str, n: int) -> None:
    d = 128
    q = np.full((3, d), 64).astype(dtype_of(dtype))
    k = np.full((n, d), -64).astype(dtype_of(dtype))
    v = np.repeat(np.arange(n)[:, None], d, 1).astype(dtype_of(dtype))
    got = run(backend, q, k, v)
    # On a GPU p is 2 to what an FMA leaves of the exponent, not 1: o is exact once it is rounded to 16 bits.
    exact = backend is HOST or dtype.endswith("16")
    np.testing.assert_allclose(got.o.astype(np.float64), (n - 1) / 2, rtol=0 if exact else rounding(backend, dtype, n))
    np.testing.assert_allclose(got.lse, -524288 / math.sqrt(d) + math.log(n), rtol=3e-7)


@both_dtypes
@pytest.mark.parametrize("n", [1, 5])
def test_b05_rounding_of_the_maximum_is_not_an_exponent(backend: Backend, dtype: str, n: int) -> None:
    x = 65504.0 if dtype == "float16" else 133120.0
    q, k, v = (np.full((n, 64), x).astype(dtype_of(dtype)) for _ in range(3))
    got = run(backend, q, k, v)
    # The exponents are exact zeros. What is left is the rounding of the weighted sum, and 5 / 5.
    np.testing.assert_allclose(got.o.astype(np.float64), x, rtol=0 if dtype.endswith("16") else 1e-6)
    np.testing.assert_allclose(got.lse, x * x * 8 + math.log(n), rtol=1e-6)


@both_dtypes
def test_b06_scores_and_sums_beyond_float16(backend: Backend, dtype: str) -> None:
    d, m, n = 128, 8, 4096
    q, k = (np.full((length, d), 40).astype(dtype_of(dtype)) for length in (m, n))
    v = np.full((n, d), 60000).astype(dtype_of(dtype))
    do = np.ones((m, d), dtype_of(dtype))
    got = run(backend, q, k, v, do)
    want = float(v[0, 0])
    np.testing.assert_allclose(got.o.astype(np.float64), want, rtol=rounding(backend, dtype, n) + 1e-6)
    np.testing.assert_allclose(got.lse, 204800 / math.sqrt(d) + math.log(n), rtol=1e-6)
    # p is exp of a difference of numbers around 18102, each with its rounding.
    exponent = 2 * 18102 * unit_roundoff(acc_dtype(dtype))
    np.testing.assert_allclose(got.dv.astype(np.float64), m / n, rtol=4 * unit_roundoff(dtype) + exponent)
    assert finite((got.dq, got.dk))


@both_dtypes
@pytest.mark.parametrize(("m", "n"), [(1, 64), (1, 97), (64, 128), (64, 97), (64, 704), (704, 192), (704, 704)])
def test_b08_padding_keys_are_not_scored_in_the_backward(backend: Backend, dtype: str, m: int, n: int) -> None:
    rng = RNG(8)
    q = np.full((m, 64), 4).astype(dtype_of(dtype))
    k = np.full((n, 64), -4).astype(dtype_of(dtype))  # every score is -128: exp(0 - lse) overflows float32
    v, do = normal(rng, (n, 64), dtype), normal(rng, (m, 64), dtype)
    got = check(backend, q, k, v, do)
    assert finite(got)
    want = do.astype(np.float64).sum(0) / n
    bound = np.abs(do.astype(np.float64)).sum(0).max() / n
    assert np.abs(got.dv.astype(np.float64) - want).max() <= rounding(backend, dtype, m) * bound + 1e-6


@both_dtypes
def test_b09_backward_of_a_single_token(backend: Backend, dtype: str) -> None:
    rng = RNG(9)
    q, k, v = (normal(rng, (1, 1, 16), dtype, 3) for _ in range(3))
    do = np.ones((1, 1, 16), dtype_of(dtype))
    got = check(backend, q, k, v, do)
    # p is 1 but for the rounding of lse, a score of up to 40.
    np.testing.assert_allclose(got.dv.astype(np.float64), 1, rtol=0 if dtype.endswith("16") else 40 * 2.0**-22)
    assert np.abs(got.dq.astype(np.float64)).max() <= 1e-3
    assert np.abs(got.dk.astype(np.float64)).max() <= 1e-3


# --- masks -------------------------------------------------------------------------------------------------------


@both
def test_b10_alignment_of_causal(backend: Backend) -> None:
    q, k = np.zeros((2, 8), np.float16), np.zeros((5, 8), np.float16)
    weights = run(backend, q, k, eye(5), causal=True, align="bottom-right").o
    np.testing.assert_allclose(weights, [[1 / 4] * 4 + [0], [1 / 5] * 5], atol=1e-3)
    weights = run(backend, q, k, eye(5), causal=True, align="top-left").o
    np.testing.assert_allclose(weights, [[1, 0, 0, 0, 0], [1 / 2, 1 / 2, 0, 0, 0]], atol=1e-3)
    with pytest.raises(ValueError, match=r"(?s)bottom-right.*top-left"):
        run(backend, q, k, eye(5), causal=True)


@both
def test_b10_one_cached_query_sees_every_key(backend: Backend) -> None:
    n = 1025
    v = np.arange(n)[:, None].astype(np.float16)
    got = run(backend, np.zeros((1, 8), np.float16), np.zeros((n, 8), np.float16), v, causal=True, align="bottom-right")
    assert abs(float(got.lse[0]) - math.log(n)) < 1e-5
    assert float(got.o[0, 0]) == 512


@both_dtypes
def test_b11_causal_with_more_queries_than_keys(backend: Backend, dtype: str) -> None:
    rng = RNG(11)
    q, do = normal(rng, (5, 32), dtype), normal(rng, (5, 32), dtype)
    k, v = normal(rng, (2, 32), dtype), normal(rng, (2, 32), dtype)
    got = check(backend, q, k, v, do, causal=True, align="bottom-right")
    assert (got.o[:3] == 0).all() and (got.lse[:3] == -np.inf).all() and (got.dq[:3] == 0).all()
    assert np.isfinite(got.lse[3:]).all()
    np.testing.assert_allclose(got.o[3].astype(np.float64), v[0].astype(np.float64), rtol=rounding(backend, dtype, 1))


@both_dtypes
@pytest.mark.parametrize("m", [76, 34, 146])
def test_b11_only_the_last_row_sees_the_only_key(backend: Backend, dtype: str, m: int) -> None:
    rng = RNG(12)
    q, k, v = normal(rng, (m, 32), dtype), normal(rng, (1, 32), dtype), normal(rng, (1, 32), dtype)
    got = run(backend, q, k, v, np.ones((m, 32), dtype_of(dtype)), causal=True, align="bottom-right")
    assert (got.o[:-1] == 0).all()
    np.testing.assert_allclose(got.o[-1].astype(np.float64), v[0].astype(np.float64), rtol=rounding(backend, dtype, 1))
    np.testing.assert_allclose(got.dv.astype(np.float64), 1, rtol=1e-6 if backend is HOST else 1e-5)
    assert np.abs(got.dq.astype(np.float64)).max() <= 1e-3 and np.abs(got.dk.astype(np.float64)).max() <= 1e-3


WINDOWS = {
    (0, 0): [1] * 6,
    (1, 0): [1, 2, 2, 2, 2, 2],
    (None, 0): [1, 2, 3, 4, 5, 6],
    (5, 0): [1, 2, 3, 4, 5, 6],
    (None, 2): [3, 4, 5, 6, 6, 6],
    (0, None): [6, 5, 4, 3, 2, 1],
    (2, 1): [2, 3, 4, 4, 4, 3],
}


@both
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_b12_bounds_of_the_window_are_inclusive(backend: Backend, window: tuple[int | None, int | None]) -> None:
    zeros = np.zeros((6, 8), np.float16)
    got = run(backend, zeros, zeros, eye(6), window=window)
    counts = np.array(WINDOWS[window])
    assert ((got.o > 0).sum(-1) == counts).all()
    np.testing.assert_allclose(got.lse, np.log(counts), atol=1e-6)
    left, right = window
    rows, keys = np.indices((6, 6))
    seen = (keys >= rows - (6 if left is None else left)) & (keys <= rows + (6 if right is None else right))
    np.testing.assert_allclose(got.o, seen / counts[:, None], atol=1e-3)


@both_dtypes
def test_b12_equal_windows(backend: Backend, dtype: str) -> None:
    rng = RNG(13)
    q, k, v = (normal(rng, (6, 16), dtype) for _ in range(3))
    causal = run(backend, q, k, v, causal=True)
    for window in ((None, 0), (5, 0)):
        assert same_bits(run(backend, q, k, v, window=window).o, causal.o)
    own = run(backend, q, k, v, window=(0, 0)).o.astype(np.float64)
    np.testing.assert_allclose(own, v.astype(np.float64), rtol=0 if dtype.endswith("16") else rounding(backend, dtype))


@both
@pytest.mark.parametrize("window", [(-1, 0), (0, -3)])
def test_b12_a_negative_window_is_an_error(backend: Backend, window: tuple[int, int]) -> None:
    zeros = np.zeros((6, 8), np.float16)
    with pytest.raises(ValueError, match="None"):
        run(backend, zeros, zeros, zeros, window=window)


@both_dtypes
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("n", [1, 63, 65, 127, 129, 1023])
def test_b14_padding_keys_weigh_nothing(backend: Backend, dtype: str, d: int, n: int) -> None:
    a = math.sqrt(20 / math.sqrt(d))
    q, k = (np.full((n, d), x).astype(dtype_of(dtype)) for x in (a, -a))
    v, do = np.ones((n, d), dtype_of(dtype)), normal(RNG(14), (n, d), dtype)
    got = check(backend, q, k, v, do)
    np.testing.assert_allclose(got.o.astype(np.float64), 1, atol=rounding(backend, dtype, n) + 4e-6)
    score = -math.sqrt(d) * float(q[0, 0]) ** 2
    np.testing.assert_allclose(got.lse, score + math.log(n), rtol=1e-5)


@both_dtypes
@pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38], ids=str)
def test_b15_what_lies_behind_the_keys_does_not_matter(backend: Backend, dtype: str, poison: float) -> None:
    rng = RNG(15)
    q, do = normal(rng, (2, 5, 40), dtype), normal(rng, (2, 5, 40), dtype)
    caches = [normal(rng, (2, 64, 40), dtype) for _ in range(2)]
    results = []
    for slot in (0.0, poison):
        views = []
        for cache in caches:
            with np.errstate(over="ignore"):  # 3e38 is inf in float16
                cache[:, 13:] = slot
            views.append(put(backend, cache)[:, :13])
        results.append(run(backend, q, *views, do))
    for clean, poisoned in zip(*results, strict=True):
        assert clean is None or same_bits(clean, poisoned)
    assert finite(results[1])


@both_dtypes
@pytest.mark.parametrize("mask", ["causal", "window", "key_bias"])
@pytest.mark.parametrize(("name", "poison"), [("k", np.nan), ("v", np.nan), ("v", np.inf)])
def test_b16_non_finite_values_at_masked_positions(
    backend: Backend, dtype: str, mask: str, name: str, poison: float
) -> None:
    rng = RNG(16)
    n, d = 65, 32
    x = {name: normal(rng, (n, d), dtype) for name in "qkv"}
    options: dict[str, Any] = {"causal": True}
    rows = slice(0, n - 1)
    if mask == "window":
        options = {"window": (None, 0)}
    if mask == "key_bias":
        options = {"key_bias": np.where(np.arange(n) == n - 1, -np.inf, 0).astype(acc_dtype(dtype))}
        rows = slice(0, n)
    clean = run(backend, x["q"], x["k"], x["v"], **options)
    x[name][-1] = poison
    got = run(backend, x["q"], x["k"], x["v"], **options)
    # Up to rounding: a tile whose own row is NaN may take its exponents the other way.
    np.testing.assert_allclose(got.lse[rows], clean.lse[rows], rtol=1e-6, atol=1e-6)
    for row, want in zip(got.o[rows].astype(np.float64), clean.o[rows].astype(np.float64), strict=True):
        # The weight of the key is 0: the row is clean where its block is skipped, else what 0 * NaN is.
        off = np.abs(row - want).max()
        assert np.isnan(row).all() or off <= rounding(backend, dtype) * np.abs(want).max() + 1e-6
    assert "NaN" in (cuflash.attention.__doc__ or "")


@both_dtypes
def test_b17_dirty_scratch_memory_does_not_matter(backend: Backend, dtype: str) -> None:
    rng = RNG(17)
    arrays = [put(backend, normal(rng, (2, 50, 40), dtype)) for _ in range(4)]
    q, k, v, do = arrays
    forward_bytes = cuflash.workspace_nbytes("attention", q, k, v, causal=True)
    backward_bytes = cuflash.workspace_nbytes("attention_backward", q, k, v, causal=True)
    results = []
    for dirt in range(3):
        if dirt:  # freed blocks of every size that the call may ask for come back full of NaN
            junk = [backend.empty_bytes(size) for size in (backward_bytes + 1, 2 * q.nbytes, 4 * q.nbytes, 512)]
            del junk
        o, lse = cuflash.attention(q, k, v, causal=True, return_lse=True, workspace=backend.empty_bytes(forward_bytes))
        gradients = cuflash.attention_backward(
            do, q, k, v, o, lse, causal=True, workspace=backend.empty_bytes(backward_bytes) if dirt == 2 else None
        )
        results.append([backend.get(x) for x in (o, lse, *gradients)])
    for other in results[1:]:
        assert all(map(same_bits, results[0], other))
    assert finite(results[0])


@both
def test_b44_masks_intersect(backend: Backend) -> None:
    zeros = np.zeros((6, 8), np.float16)
    hides_key_0 = np.array([-np.inf, 0, 0, 0, 0, 0], np.float32)
    got = run(backend, zeros, zeros, eye(6), key_bias=hides_key_0, causal=True)
    assert (got.o[0] == 0).all() and got.lse[0] == -np.inf
    want = np.tril(np.ones((6, 6)))
    want[:, 0] = 0
    want[1:] /= np.arange(1, 6)[:, None]
    np.testing.assert_allclose(got.o, want, atol=1e-3)
    got = run(backend, zeros, zeros, eye(6), key_bias=hides_key_0, causal=True, window=(1, 4))
    seen = np.tril(np.ones((6, 6))) * np.triu(np.ones((6, 6)), -1)
    seen[:, 0] = 0
    assert ((got.o > 0) == (seen > 0)).all()
    for integers in (np.ones(6, np.int32), np.ones(6, bool)):
        with pytest.raises(TypeError, match="key_bias"):
            run(backend, zeros, zeros, zeros, key_bias=integers)


# --- score terms -------------------------------------------------------------------------------------------------


@both_dtypes
@pytest.mark.parametrize("cap", [None, 15, 1e6])
def test_b41_softcap(backend: Backend, dtype: str, cap: float | None) -> None:
    rng = RNG(41)
    q, k, v, do = (normal(rng, (64, 64), dtype) for _ in range(4))
    scores = q.astype(np.float64) @ k.astype(np.float64).T / 8
    q = (q.astype(np.float64) * (30 / np.abs(scores).max())).astype(dtype_of(dtype))
    got = check(backend, q, k, v, do, softcap=cap, causal=True)
    assert (got.o[0].astype(np.float64) == v[0].astype(np.float64)).all() or not dtype.endswith("16")
    if cap == 1e6:
        plain = run(backend, q, k, v, do, causal=True)
        # The softcap's division, tanh and product each round a score of up to 30, which the cap makes 1e-8 smaller.
        tolerance = 8 * unit_roundoff(dtype) + 360 * unit_roundoff(acc_dtype(dtype)) + 4e-8
        np.testing.assert_allclose(got.o.astype(np.float64), plain.o.astype(np.float64), atol=tolerance)


@both
@pytest.mark.parametrize("cap", [0, -1.0, 0.0, math.nan, math.inf])
def test_b41_a_softcap_that_is_none(backend: Backend, cap: float) -> None:
    x = np.ones((2, 8), np.float16)
    with pytest.raises(ValueError, match="softcap"):
        run(backend, x, x, x, softcap=cap)


@both_dtypes
@pytest.mark.parametrize("shape", [(7,), (1, 7), (2, 7), (3, 1, 7), (3, 2, 7), (1, 1, 7)], ids=str)
def test_b43_gradient_of_a_broadcast_bias(backend: Backend, dtype: str, shape: tuple[int, ...]) -> None:
    rng = RNG(43)
    q, do = normal(rng, (3, 2, 5, 16), dtype), normal(rng, (3, 2, 5, 16), dtype)
    k, v = normal(rng, (3, 2, 7, 16), dtype), normal(rng, (3, 2, 7, 16), dtype)
    key_bias = rng.standard_normal(shape).astype(acc_dtype(dtype))
    got = check(backend, q, k, v, do, key_bias=key_bias)
    assert got.dkey_bias.shape == shape and got.dkey_bias.dtype == key_bias.dtype
    whole = run(backend, q, k, v, do, key_bias=np.broadcast_to(key_bias, (3, 2, 7)).copy()).dkey_bias
    axes = tuple(i for i, length in enumerate((1,) * (3 - len(shape)) + shape) if length == 1)
    summed = whole.astype(np.float64).sum(axes, keepdims=True).reshape(shape)
    np.testing.assert_allclose(got.dkey_bias, summed, atol=1e-5 * np.abs(whole).sum())


@both_dtypes
@pytest.mark.parametrize("scale", [0, -1, 1e-30, np.float64(0.5), np.float32(0.5), 1, 5e-324, 9e15])
def test_b47_b50_any_finite_scale(backend: Backend, dtype: str, scale: Any) -> None:
    rng = RNG(50)
    q, k, v, do = (normal(rng, (5, 16), dtype) for _ in range(4))
    got = run(backend, q, k, v, do, causal=True, scale=scale)
    as_float = run(backend, q, k, v, do, causal=True, scale=float(scale))
    for a, b in zip(got, as_float, strict=True):
        assert a is b or same_bits(a, b)
    assert finite((got.o, got.lse, got.dv))
    # Rounding errors of dS times 9e15 may be beyond float16, but nothing is undefined.
    assert not any(np.isnan(x.astype(np.float64)).any() for x in (got.dq, got.dk))
    if abs(scale) <= 1e-30:
        means = np.cumsum(v.astype(np.float64), 0) / np.arange(1, 6)[:, None]
        np.testing.assert_allclose(got.o.astype(np.float64), means, atol=rounding(backend, dtype, 5))
        np.testing.assert_allclose(got.lse, np.log(np.arange(1, 6)), atol=1e-6)
        largest = max(np.abs(x.astype(np.float64)).max() for x in (got.dq, got.dk))
        assert largest == 0 if scale == 0 else largest <= 1e-28
    elif abs(scale) < 10:
        check(backend, q, k, v, do, causal=True, scale=scale)
    if scale == -1:
        mirrored = run(backend, -q, k, v, do, causal=True, scale=1)
        np.testing.assert_allclose(got.lse, mirrored.lse, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(
            got.o.astype(np.float64), mirrored.o.astype(np.float64), atol=rounding(backend, dtype, 5)
        )


@both
@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_b50_a_scale_that_is_none(backend: Backend, scale: float) -> None:
    x = np.ones((2, 8), np.float16)
    with pytest.raises(ValueError, match="scale"):
        run(backend, x, x, x, scale=scale)


@both
@pytest.mark.parametrize("option", ["scale", "softcap"])
@pytest.mark.parametrize("kind", [int, float, np.float16, np.float32, np.float64, np.int64, np.array])
def test_b64_host_scalars_of_any_kind_mean_the_same(backend: Backend, option: str, kind: Any) -> None:
    rng = RNG(64)
    q, k, v = (normal(rng, (5, 16), "float16") for _ in range(3))
    got, want = (run(backend, q, k, v, **{option: value}) for value in (kind(2), 2.0))
    assert same_bits(got.o, want.o) and same_bits(got.lse, want.lse)


@both
@pytest.mark.parametrize("option", ["scale", "softcap"])
@pytest.mark.parametrize("value", [True, "1", 1j, [1.0]], ids=repr)
def test_b64_no_scalar(backend: Backend, option: str, value: Any) -> None:
    x = np.ones((2, 8), np.float16)
    with pytest.raises(TypeError, match=option):
        run(backend, x, x, x, **{option: value})


@gpu
@pytest.mark.parametrize("option", ["scale", "softcap"])
def test_b64_a_scalar_on_the_gpu_is_not_read(option: str) -> None:
    x = np.ones((2, 8), np.float16)
    with pytest.raises(TypeError, match=option):
        run(GPU, x, x, x, **{option: GPU.xp.array(1.0)})
