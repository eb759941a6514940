"""Faults that users of other attention libraries met, as tests of this one: numerics, masks, shapes, layouts, errors.

Each test carries the number of its row in the catalogue of such faults. The rest of the rows: overflow, streams, memory
in test_field_faults_gpu.py; compiling, caching, installing in test_field_faults_build.py.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from backends import (
    GPU,
    HOST,
    Backend,
    Layout,
    acc_dtype,
    dtype_of,
    normal,
    place,
    place_hole,
    put,
    same_bits,
    swapped,
)
from checks import (
    check,
    compiled_kernels,  # noqa: F401 - a fixture
    run,
    unit_roundoff,
)

import cuflash

gpu = pytest.mark.gpu
both = pytest.mark.parametrize("backend", [HOST, pytest.param(GPU, marks=gpu)], ids=["host", "gpu"])
both_dtypes = pytest.mark.parametrize(
    ("backend", "dtype"),
    [pytest.param(HOST, dtype, id=f"host-{dtype}") for dtype in HOST.dtypes]
    + [pytest.param(GPU, dtype, id=f"gpu-{dtype}", marks=gpu) for dtype in GPU.dtypes],
)
RNG = np.random.default_rng


def eye(n: int, dtype: str = "float16") -> np.ndarray:
    """Values that make o show the weights."""
    return np.eye(n).astype(dtype_of(dtype))


def finite(results: Any) -> bool:
    return all(np.isfinite(x.astype(np.float64)).all() for x in results if x is not None)


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
        got.o[rows].astype(np.float64), rest.o.astype(np.float64), rtol=0, atol=4 * unit_roundoff(dtype) * scale
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
        np.testing.assert_allclose(got.o.astype(np.float64), mean, rtol=0, atol=8 * unit_roundoff(dtype))
        np.testing.assert_allclose(got.lse, value, rtol=1e-6)


@both_dtypes
@pytest.mark.parametrize("n", [1, 2, 64])
def test_b04_scores_below_any_finite_sentinel(backend: Backend, dtype: str, n: int) -> None:
    d = 128
    q = np.full((3, d), 64).astype(dtype_of(dtype))
    k = np.full((n, d), -64).astype(dtype_of(dtype))
    v = np.repeat(np.arange(n)[:, None], d, 1).astype(dtype_of(dtype))
    got = run(backend, q, k, v)
    assert (got.o.astype(np.float64) == (n - 1) / 2).all()
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
    np.testing.assert_allclose(got.o.astype(np.float64), want, rtol=2 * unit_roundoff(dtype) + 1e-6)
    np.testing.assert_allclose(got.lse, 204800 / math.sqrt(d) + math.log(n), rtol=1e-6)
    np.testing.assert_allclose(got.dv.astype(np.float64), m / n, rtol=4 * unit_roundoff(dtype) + 1e-4)
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
    assert np.abs(got.dv.astype(np.float64) - want).max() <= 4 * unit_roundoff(dtype) * bound + 1e-6


@both_dtypes
def test_b09_backward_of_a_single_token(backend: Backend, dtype: str) -> None:
    rng = RNG(9)
    q, k, v = (normal(rng, (1, 1, 16), dtype, 3) for _ in range(3))
    do = np.ones((1, 1, 16), dtype_of(dtype))
    got = check(backend, q, k, v, do)
    np.testing.assert_allclose(got.dv.astype(np.float64), 1, rtol=0 if dtype.endswith("16") else 1e-6)
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
    np.testing.assert_allclose(got.o[3].astype(np.float64), v[0].astype(np.float64), rtol=1e-6)


@both_dtypes
@pytest.mark.parametrize("m", [76, 34, 146])
def test_b11_only_the_last_row_sees_the_only_key(backend: Backend, dtype: str, m: int) -> None:
    rng = RNG(12)
    q, k, v = normal(rng, (m, 32), dtype), normal(rng, (1, 32), dtype), normal(rng, (1, 32), dtype)
    got = run(backend, q, k, v, np.ones((m, 32), dtype_of(dtype)), causal=True, align="bottom-right")
    assert (got.o[:-1] == 0).all()
    np.testing.assert_allclose(got.o[-1].astype(np.float64), v[0].astype(np.float64), rtol=1e-6)
    np.testing.assert_allclose(got.dv.astype(np.float64), 1, rtol=1e-6)
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
    np.testing.assert_allclose(own, v.astype(np.float64), rtol=0 if dtype.endswith("16") else 1e-6)


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
    np.testing.assert_allclose(got.o.astype(np.float64), 1, atol=4 * unit_roundoff(dtype) + 4e-6)
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
        assert np.isnan(row).all() or np.abs(row - want).max() <= 4 * unit_roundoff(dtype) * np.abs(want).max() + 1e-6
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
        o, lse = cuflash.attention(
            q, k, v, causal=True, return_lse=True, workspace=backend.empty_bytes(forward_bytes)
        )
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


# --- shapes ------------------------------------------------------------------------------------------------------


@both_dtypes
@pytest.mark.parametrize(
    ("batch", "m", "n"),
    [((0,), 4, 5), ((2,), 0, 5), ((2,), 4, 0), ((2,), 0, 0), ((2, 0), 4, 5), ((), 0, 3), ((), 3, 0)],
    ids=str,
)
@pytest.mark.parametrize("grouped", [False, True])
def test_b19_empty_shapes(
    backend: Backend, dtype: str, batch: tuple[int, ...], m: int, n: int, grouped: bool
) -> None:
    if grouped and not batch:
        batch = (2,)
    q, k, v = (np.ones((*batch, *core), dtype_of(dtype)) for core in ((m, 8), (n, 8), (n, 4)))
    key_bias = np.zeros((*batch[-1:], n), acc_dtype(dtype))
    do, dlse = np.ones((*batch, m, 4), dtype_of(dtype)), np.ones((*batch, m), acc_dtype(dtype))
    got = run(backend, q, k, v, do, dlse, key_bias=key_bias, grouped_heads=grouped)
    shapes = [x.shape for x in got]
    assert shapes == [do.shape, dlse.shape, q.shape, k.shape, v.shape, key_bias.shape]
    assert got.o.dtype == q.dtype and got.lse.dtype == acc_dtype(dtype)
    assert (got.lse == -np.inf).all()
    for x in (got.o, got.dq, got.dk, got.dv, got.dkey_bias):
        assert (x == 0).all()
    if backend is GPU:
        backend.xp.cuda.runtime.deviceSynchronize()  # raises what a bad launch has left pending


DIMS = (1, 8, 33, 40, 72, 80, 96, 104, 160, 192, 256)


@both_dtypes
@pytest.mark.parametrize("d", DIMS)
def test_b20_head_dims_off_the_grain(backend: Backend, dtype: str, d: int) -> None:
    rng = RNG(20)
    q, k, v, do = (normal(rng, (2, 97, d), dtype) for _ in range(4))
    x = [put(backend, a) for a in (q, k, v)]
    room = [place_hole(backend, (2, 97, d), dtype_of(dtype)) for _ in range(4)]
    lse = place_hole(backend, (2, 97), acc_dtype(dtype))
    cuflash.attention(*x, return_lse=True, out=(room[0].array, lse.array))
    cuflash.attention_backward(
        put(backend, do), *x, room[0].array, lse.array, out=tuple(hole.array for hole in room[1:])
    )
    for hole in (*room, lse):
        hole.check_guards()
    got = check(backend, q, k, v, do)
    for hole, want in zip((room[0], lse, *room[1:]), (got.o, got.lse, got.dq, got.dk, got.dv), strict=True):
        assert same_bits(backend.get(hole.array), want)


@pytest.mark.parametrize("dtype", HOST.dtypes)
def test_b20_the_host_serves_any_head_dim(dtype: str) -> None:
    rng = RNG(21)
    check(HOST, *(normal(rng, (2, 33, 512), dtype) for _ in range(4)))


@gpu
@pytest.mark.parametrize(("d", "e"), [(257, 64), (64, 257), (512, 512)])
def test_b20_head_dims_above_the_limit_of_a_gpu(d: int, e: int) -> None:
    q, k, v = (put(GPU, np.ones((3, f), np.float16)) for f in (d, d, e))
    with pytest.raises(NotImplementedError, match="256"):
        cuflash.attention(q, k, v)
    with pytest.raises(NotImplementedError, match="256"):
        cuflash.attention_vjp(q, k, v)


@both_dtypes
@pytest.mark.parametrize("d", [33, 72, 80])
def test_b21_the_default_scale_is_of_the_callers_head_dim(backend: Backend, dtype: str, d: int) -> None:
    rng = RNG(22)
    q, k, v, do = (normal(rng, (9, d), dtype) for _ in range(4))
    for a, b in zip(run(backend, q, k, v, do), run(backend, q, k, v, do, scale=1 / math.sqrt(d)), strict=True):
        assert a is b or same_bits(a, b)


@both_dtypes
@pytest.mark.parametrize(("d", "e"), [(192, 128), (32, 64), (64, 1), (16, 80), (128, 192)])
def test_b22_value_dim_apart_from_head_dim(backend: Backend, dtype: str, d: int, e: int) -> None:
    rng = RNG(23)
    q, k = normal(rng, (2, 4, 37, d), dtype), normal(rng, (2, 2, 37, d), dtype)
    v, do = normal(rng, (2, 2, 37, e), dtype), normal(rng, (2, 4, 37, e), dtype)
    got = check(backend, q, k, v, do, causal=True, grouped_heads=True)
    assert [x.shape for x in (got.o, got.dq, got.dk, got.dv)] == [do.shape, q.shape, k.shape, v.shape]


@both_dtypes
@pytest.mark.parametrize(("heads", "kv_heads"), [(40, 8), (14, 2), (96, 8), (9, 3)])
@pytest.mark.parametrize(("m", "n"), [(65, 65), (1, 512)])
def test_b23_any_group_size(backend: Backend, dtype: str, heads: int, kv_heads: int, m: int, n: int) -> None:
    rng = RNG(24)
    d = 32
    q, do = normal(rng, (heads, m, d), dtype), normal(rng, (heads, m, d), dtype)
    k, v = normal(rng, (kv_heads, n, d), dtype), normal(rng, (kv_heads, n, d), dtype)
    got = check(backend, q, k, v, do, grouped_heads=True)
    group = heads // kv_heads
    repeated = run(backend, q, k.repeat(group, 0), v.repeat(group, 0), do)
    assert same_bits(got.o, repeated.o) and same_bits(got.lse, repeated.lse) and same_bits(got.dq, repeated.dq)


@both
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 2), (33, 2), (2, 4), (4, 0)])
def test_b24_heads_that_are_no_multiple(backend: Backend, heads: int, kv_heads: int) -> None:
    q, k = np.ones((heads, 4, 8), np.float16), np.ones((kv_heads, 4, 8), np.float16)
    room = place_hole(backend, q.shape, q.dtype)
    with pytest.raises(ValueError, match=rf"{heads}.*{kv_heads}"):
        cuflash.attention(*(put(backend, x) for x in (q, k, k)), grouped_heads=True, out=room.array)
    room.check_unchanged()


# --- layouts -----------------------------------------------------------------------------------------------------


@both_dtypes
@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
@pytest.mark.parametrize(
    "layout",
    [
        swapped(4),
        Layout(steps=(1, 1, 1, 2)),
        Layout(order=(3, 2, 1, 0)),
        Layout(order=(0, 2, 1, 3), steps=(1, 3, 1, 1)),
        Layout(steps=(1, 1, -1, 1)),
        Layout(steps=(1, -1, 1, 1), pad=3),
    ],
    ids=["swapped", "every second feature", "Fortran", "packed qkv", "reversed", "odd gap"],
)
def test_b26_b27_strided_arrays(backend: Backend, dtype: str, name: str, layout: Layout) -> None:
    rng = RNG(26)
    x = {name: normal(rng, (1, 4, 62, 32), dtype) for name in ("q", "k", "v", "do")}
    got = check(backend, *x.values(), layouts={name: layout}, causal=True)
    if backend is HOST:  # one code for all strides
        for a, b in zip(got, run(backend, *x.values(), causal=True), strict=True):
            assert a is b or same_bits(a, b)


@both
@pytest.mark.parametrize(
    "layout", [Layout(steps=(0, 0, 0, 0)), swapped(4), Layout(steps=(1, 1, 1, 2))], ids=["broadcast", "swapped", "step"]
)
def test_b27_the_upstream_gradient_of_grouped_heads(backend: Backend, layout: Layout) -> None:
    rng = RNG(27)
    q, k, v = (normal(rng, (2, h, 32, 128), "float16") for h in (4, 1, 1))
    do = np.ones((2, 4, 32, 128), np.float16) if 0 in (layout.steps or ()) else normal(rng, q.shape, "float16")
    check(backend, q, k, v, do, layouts={"do": layout}, grouped_heads=True)


@both_dtypes
@pytest.mark.parametrize("shift", [1, 2, 4])
@pytest.mark.parametrize("pad", [0, 1])
@pytest.mark.parametrize("d", [43, 64])
def test_b29_bases_and_rows_off_alignment(backend: Backend, dtype: str, shift: int, pad: int, d: int) -> None:
    rng = RNG(29)
    q, k, v, do = (normal(rng, (2, 43, d), dtype) for _ in range(4))
    key_bias = normal(rng, (43,), "float64").astype(acc_dtype(dtype))
    places = {name: Layout(shift=shift, pad=pad) for name in ("q", "k", "v", "do", "key_bias", "dlse")}
    dlse = rng.standard_normal((2, 43)).astype(acc_dtype(dtype))
    check(backend, q, k, v, do, dlse, key_bias=key_bias, layouts=places)
    if backend is GPU:
        backend.xp.cuda.runtime.deviceSynchronize()


@both
def test_b30_a_call_never_gets_the_kernel_of_another(backend: Backend) -> None:
    rng = RNG(30)
    values = {dtype: [normal(rng, (4, 33, 64), dtype) for _ in range(3)] for dtype in backend.dtypes[:3]}
    places: dict[str, dict[str, Layout]] = {
        "contiguous": {},
        "interleaved": {"k": Layout(order=(1, 0, 2)), "v": Layout(order=(1, 0, 2))},
        "broadcast": {"k": Layout(steps=(0, 1, 1)), "v": Layout(steps=(0, 1, 1))},
    }
    kinds = list(itertools.product(values, places))
    for order in (kinds, kinds[::-1], kinds[1::2] + kinds[::2]):
        for dtype, place_name in order:
            q, k, v = values[dtype]
            if place_name == "broadcast":
                k, v = (np.broadcast_to(x[:1], x.shape) for x in (k, v))
            check(backend, q, k, v, layouts=places[place_name])
            check(backend, q[:1], k[:1], v[:1], layouts=places[place_name])


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
        tolerance = 8 * unit_roundoff(dtype) + 1e-6
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
        np.testing.assert_allclose(got.o.astype(np.float64), means, atol=4 * unit_roundoff(dtype))
        np.testing.assert_allclose(got.lse, np.log(np.arange(1, 6)), atol=1e-6)
        largest = max(np.abs(x.astype(np.float64)).max() for x in (got.dq, got.dk))
        assert largest == 0 if scale == 0 else largest <= 1e-28
    elif abs(scale) < 10:
        check(backend, q, k, v, do, causal=True, scale=scale)
    if scale == -1:
        mirrored = run(backend, -q, k, v, do, causal=True, scale=1)
        np.testing.assert_allclose(got.lse, mirrored.lse, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(
            got.o.astype(np.float64), mirrored.o.astype(np.float64), atol=4 * unit_roundoff(dtype)
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


# --- dtypes, kinds of arrays, errors -----------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "d"), [(128, 32), (1024, 128)])
def test_b51_float32_means_float32(m: int, d: int) -> None:
    rng = RNG(51)
    got = check(HOST, *(normal(rng, (m, d), "float32") for _ in range(4)), causal=True)
    assert got.o.dtype == np.float32  # TF32 products would be off by 1e-3, far beyond what check allows


def parts(x: np.ndarray, count: int) -> list[np.ndarray]:
    return np.split(x, count, axis=-2)


@both_dtypes
def test_b52_merging_shards(backend: Backend, dtype: str) -> None:
    rng = RNG(52)
    q, k, v = normal(rng, (64, 32), dtype), normal(rng, (1024, 32), dtype), normal(rng, (1024, 32), dtype)
    shards = [
        cuflash.attention(*(put(backend, x) for x in (q, k_part, v_part)), return_lse=True)
        for k_part, v_part in zip(parts(k, 8), parts(v, 8), strict=True)
    ]
    whole = check(backend, q, k, v)
    scores = q.astype(np.float64) @ k.astype(np.float64).T / math.sqrt(32)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    want = weights @ v.astype(np.float64) / weights.sum(-1, keepdims=True)
    merged = []
    for order in (shards, shards[::-1]):
        o, lse = cuflash.attention_merge(tuple(s[0] for s in order), tuple(s[1] for s in order))
        merged.append(backend.get(o).astype(np.float64))
        np.testing.assert_allclose(backend.get(lse), whole.lse, rtol=1e-6, atol=2e-6)
    # Each part was rounded to the dtype of o once, and the sum of parts, which weighs them by 1 together, once more.
    allowed = np.abs(whole.o.astype(np.float64) - want).max() + 3 * unit_roundoff(dtype) * np.abs(v.astype(float)).max()
    if dtype == "float32":
        allowed = 1.5 * np.abs(whole.o.astype(np.float64) - want).max()
    for o in merged:
        assert np.abs(o - want).max() <= allowed
    np.testing.assert_allclose(merged[0], merged[1], atol=4 * unit_roundoff(dtype))


@both_dtypes
def test_b52_merging_with_nothing(backend: Backend, dtype: str) -> None:
    rng = RNG(53)
    o = normal(rng, (5, 8), dtype)
    o[2, :4] = -0.0
    lse = rng.standard_normal(5).astype(acc_dtype(dtype))
    nothing, never = np.full_like(o, np.nan), np.full_like(lse, -np.inf)
    for order in (slice(None), slice(None, None, -1)):
        os, lses = ([put(backend, x) for x in pair][order] for pair in ((o, nothing), (lse, never)))
        merged = [backend.get(x) for x in cuflash.attention_merge(tuple(os), tuple(lses))]
        assert same_bits(merged[0], o) and same_bits(merged[1], lse)
    both_empty = [put(backend, np.stack(pair)) for pair in ((nothing, nothing), (never, never))]
    merged = [backend.get(x) for x in cuflash.attention_merge(*both_empty)]
    assert (merged[0] == 0).all() and (merged[1] == -np.inf).all()


class Producer:
    """An array of another library: it can do nothing but DLPack."""

    def __init__(self, array: Any) -> None:
        self.array, self.dtype = array, array.dtype

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.array.__dlpack__(**keywords)


@both
def test_b65_arrays_of_other_libraries(backend: Backend) -> None:
    rng = RNG(65)
    x = [normal(rng, (2, 9, 16), "float16") for _ in range(3)]
    foreign = [Producer(put(backend, a)) for a in x]
    o = cuflash.attention(*foreign)
    assert isinstance(o, backend.xp.ndarray)
    assert same_bits(backend.get(o), run(backend, *x).o)


@both
def test_b65_bfloat16_stays_bfloat16(backend: Backend) -> None:
    rng = RNG(66)
    x = [normal(rng, (2, 9, 16), "bfloat16") for _ in range(4)]
    got = check(backend, *x)
    for array in (got.o, got.dq, got.dk, got.dv):
        assert array.dtype == dtype_of("bfloat16")
    as_half = run(backend, *(a.view(np.float16) for a in x))
    assert not np.array_equal(as_half.o.view(np.uint16), got.o.view(np.uint16))


@both
@pytest.mark.parametrize(
    "dtypes",
    [("float16", "bfloat16", "bfloat16"), ("float32", "float16", "float16"), ("float32", "float32", "float64")],
    ids=str,
)
def test_b66_mixed_dtypes(backend: Backend, dtypes: tuple[str, str, str]) -> None:
    x = [put(backend, np.ones((2, 8), dtype_of(dtype))) for dtype in dtypes]
    with pytest.raises(TypeError, match=".*".join(dtypes)):
        cuflash.attention(*x)


@gpu
def test_b66_host_and_device_together() -> None:
    x = np.ones((2, 8), np.float16)
    with pytest.raises(TypeError, match="host"):
        cuflash.attention(x, put(GPU, x), put(GPU, x))


def test_b67_float64_is_computed_in_float64() -> None:
    rng = RNG(67)
    q, k, v, do = (rng.standard_normal((64, 32)) for _ in range(4))
    got = check(HOST, q, k, v, do, causal=True)
    assert got.o.dtype == got.lse.dtype == got.dq.dtype == np.float64


@both
@pytest.mark.parametrize("dtype", ["int32", "int8", "bool", "complex64", "uint16"])
def test_b67_dtypes_that_are_no_reals(backend: Backend, dtype: str) -> None:
    x = backend.put(np.ones(16, dtype)).reshape(2, 8)
    with pytest.raises(TypeError, match=dtype):
        cuflash.attention(x, x, x)


def test_b67_objects() -> None:
    x = np.ones((2, 8), object)
    with pytest.raises(TypeError, match="object"):
        cuflash.attention(x, x, x)


@gpu
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_b67_a_gpu_says_which_dtypes_it_serves(dtype: str) -> None:
    x = put(GPU, np.ones((2, 8), dtype))
    lse = put(GPU, np.ones(2, dtype))
    calls = [
        lambda: cuflash.attention(x, x, x),
        lambda: cuflash.attention_vjp(x, x, x),
        lambda: cuflash.attention_lse(x, x),
        lambda: cuflash.attention_backward(x, x, x, x, x, lse),
    ]
    for call in calls:
        with pytest.raises(NotImplementedError, match=rf"(?s){dtype}.*float16.*host"):
            call()


@both
def test_b68_ranks_and_batches(backend: Backend) -> None:
    rng = RNG(68)

    def ones(*shape: int) -> Any:
        return put(backend, np.ones(shape, np.float16))

    for q, k, v, words in [
        (ones(), ones(3, 8), ones(3, 8), ["()"]),
        (ones(8), ones(3, 8), ones(3, 8), ["(8,)"]),
        (ones(2, 3, 8), ones(4, 3, 8), ones(4, 3, 8), ["(2, 3, 8)", "(4, 3, 8)"]),
        (ones(3, 8), ones(4, 8), ones(5, 8), ["(4, 8)", "(5, 8)"]),
        (ones(3, 8), ones(4, 9), ones(4, 8), ["(3, 8)", "(4, 9)"]),
        (ones(4, 3, 8), ones(2, 3, 8), ones(2, 3, 8), ["4", "2", "grouped_heads"]),
    ]:
        with pytest.raises(ValueError) as error:
            cuflash.attention(q, k, v)
        for word in words:
            assert word in str(error.value)
    key_bias = put(backend, np.ones((1, 1, 1, 2, 3), np.float32))
    with pytest.raises(ValueError, match=r"\(1, 1, 1, 2, 3\)"):
        cuflash.attention(ones(2, 8), ones(2, 8), ones(2, 8), key_bias=key_bias)
    for shapes in [((3, 8),) * 3, ((1, 2, 1, 3, 8),) * 3, ((4, 3, 8), (1, 3, 8), (1, 3, 8))]:
        q, k, v = (normal(rng, shape, "float16") for shape in shapes)
        do = normal(rng, shapes[0], "float16")
        check(backend, q, k, v, do)


def test_b69_read_only_inputs() -> None:
    rng = RNG(69)
    q, k, v = normal(rng, (4, 3, 8), "float32"), normal(rng, (3, 8), "float32"), normal(rng, (4, 3, 8), "float32")
    q.flags.writeable = False
    before = q.copy()
    o = cuflash.attention(q, np.broadcast_to(k, (4, 3, 8)), v)
    assert o.flags.writeable and same_bits(q, before)
    assert same_bits(o, cuflash.attention(q.copy(), np.broadcast_to(k, (4, 3, 8)).copy(), v))
    with pytest.raises(ValueError, match="read-only"):
        cuflash.attention(q, k, v, out=np.broadcast_to(np.float32(0), (4, 3, 8)))


def test_b69_a_read_only_memory_map(tmp_path: Any) -> None:
    x = normal(RNG(70), (5, 8), "float32")
    x.tofile(tmp_path / "x")
    mapped = np.memmap(tmp_path / "x", np.float32, "r", shape=(5, 8))
    o = cuflash.attention(mapped, mapped, mapped)
    assert type(o) is np.ndarray and same_bits(o, cuflash.attention(x, x, x))


def test_layout_places_what_it_says() -> None:
    """The guards of this file are only as good as the placement: views hold their values, buffers the rest."""
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for layout in (Layout(), swapped(3), Layout(steps=(1, -1, 2), pad=3, shift=1), Layout(order=(2, 0, 1))):
        placed = place(HOST, x, layout)
        assert (placed.array == x).all() and placed.inside.sum() == 24
        assert np.isnan(placed.before.view(np.float32)[~placed.inside]).all()
        placed.check_guards()
        placed.array[...] = 0
        placed.check_guards()
        placed.storage[0] = 0
        with pytest.raises(AssertionError, match="outside"):
            placed.check_guards()
