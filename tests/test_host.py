"""The host backend against dense float64: random problems in random tiles, and the cases that numerics break on."""

from __future__ import annotations

import math
import tracemalloc
import warnings
from typing import Any

import numpy as np
import pytest
import reference
from backends import dtype_of, same_bits
from hypothesis import example, given
from strategies import DTYPES, RESULTS, HostCase, host_cases

from cuflash import host, score

both_floats = pytest.mark.parametrize("dtype", ["float32", "float64"])


def everything(m: int, n: int) -> score.Band:
    return score.band(m, n, False, None, None)


def attend(q: Any, k: Any, v: Any, key_bias: Any = None, **settings: Any) -> tuple[Any, Any]:
    """o and lse, with defaults for what a test does not care about."""
    bias_batch = () if key_bias is None else key_bias.shape[:-1]
    batch = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2], bias_batch)
    o = np.full((*batch, q.shape[-2], v.shape[-1]), np.nan, q.dtype)
    lse = np.full(o.shape[:-1], np.nan, np.float64 if q.dtype == np.float64 else np.float32)
    defaults = {"scale": q.shape[-1] ** -0.5, "band": everything(q.shape[-2], k.shape[-2]), "softcap": None}
    host.forward(q, k, v, key_bias, o, lse, **(defaults | settings))
    return o, lse


def gradients(q: Any, k: Any, v: Any, do: Any, key_bias: Any = None, **settings: Any) -> tuple[Any, ...]:
    """dq, dk, dv and dkey_bias."""
    o, lse = attend(q, k, v, key_bias, **settings)
    out = tuple(None if x is None else np.full(x.shape, np.nan, x.dtype) for x in (q, k, v, key_bias))
    defaults = {"scale": q.shape[-1] ** -0.5, "band": everything(q.shape[-2], k.shape[-2]), "softcap": None}
    host.backward(q, k, v, key_bias, do, o, lse, None, *out, **(defaults | settings))
    return out


def normal(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype_of(dtype))


# --- random problems -----------------------------------------------------------------------------------------------


def k_and_v_on_different_axes(dtype: str) -> HostCase:
    """k is shared along the first axis and v along the second; neither the other's."""
    return HostCase(
        dtype, (2, 3, 9, 4), (3, 11, 4), (2, 1, 11, 5), (2, 1, 11), {"scale": 0.5, "causal": True, "align": 2},
        True, True, (4, 4), {}, 1,
    )  # fmt: skip


@given(case=host_cases())
@example(case=k_and_v_on_different_axes("float16"))
@example(case=k_and_v_on_different_axes("float64"))
def test_results_are_within_the_budget_of_dense_float64(case: HostCase) -> None:
    arrays = case.arrays()
    options = case.options | {"key_bias": arrays["key_bias"]}
    q, k, v, do, dlse = (arrays[name] for name in ("q", "k", "v", "do", "dlse"))
    found = case.run(arrays)
    exact = reference.attention(q, k, v, **options) + reference.gradients(do, q, k, v, dlse=dlse, **options)
    bounds = reference.bounds(do, q, k, v, dlse=dlse, **options)
    max_abs_score = reference.dense(q, k, v, **options).max_abs_score
    # o enters the backward as it was rounded, and its bound has |o| in it.
    for name, expected in zip(RESULTS, exact, strict=True):
        if expected is not None:
            rounded_o = reference.unit_roundoff(q.dtype) if name.startswith("d") else 0
            limit = reference.budget(found[name].dtype, max_abs_score, found["lse"].dtype) + rounded_o
            excess = reference.excess(found[name], expected, getattr(bounds, name), limit)
            assert excess <= 0, f"{name} is {excess:.3g} beyond {limit:.3g} * {getattr(bounds, name):.3g}"


@given(case=host_cases())
def test_inputs_are_left_alone_and_a_second_call_gives_the_same_bits(case: HostCase) -> None:
    arrays = case.arrays()
    before = {name: None if x is None else np.array(x) for name, x in arrays.items()}
    first = {name: np.array(x) for name, x in case.run(arrays).items()}
    again = case.run(arrays)
    assert all(same_bits(first[name], np.array(again[name])) for name in first)
    assert all(x is None or same_bits(x, np.array(arrays[name])) for name, x in before.items())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n"), [(700, 1500), (3, 9000), (9000, 3)])
def test_default_tiles_of_long_problems(dtype: str, m: int, n: int) -> None:
    q, k, v, do = (normal((2, length, 8), dtype, seed) for seed, length in enumerate((m, n, n, m)))
    options = {"causal": True, "align": "bottom-right", "window": (900, None)}
    band = score.band(m, n, **options)
    o, lse = attend(q, k, v, band=band)
    exact_o, exact_lse = reference.attention(q, k, v, **options)
    bounds = reference.bounds(do, q, k, v, **options)
    limit = reference.budget(dtype, reference.dense(q, k, v, **options).max_abs_score)
    assert reference.excess(o, exact_o, bounds.o, limit) <= 0
    assert reference.excess(lse, exact_lse, bounds.lse, limit) <= 0
    limit += reference.unit_roundoff(dtype)
    for name, found, exact in zip(("dq", "dk", "dv"), gradients(q, k, v, do, band=band),
                                  reference.gradients(do, q, k, v, **options), strict=False):  # fmt: skip
        assert reference.excess(found, exact, getattr(bounds, name), limit) <= 0, name


# --- what is asked for ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", range(15))
def test_gradients_not_asked_for_change_nothing_in_the_others(asked: int) -> None:
    q, k, v, bias = normal((3, 7, 4)), normal((9, 4)), normal((3, 9, 5)), normal((3, 9))
    do = normal((3, 7, 5), seed=1)
    settings: dict[str, Any] = {"scale": 0.5, "band": everything(7, 9), "softcap": 2.0, "tile": (4, 4)}
    o, lse = attend(q, k, v, bias, **settings)
    every = gradients(q, k, v, do, bias, **settings)
    some = [np.empty_like(x) if asked >> i & 1 else None for i, x in enumerate((q, k, v, bias))]
    host.backward(q, k, v, bias, do, o, lse, None, *some, **settings)
    assert all(x is None or same_bits(x, y) for x, y in zip(some, every, strict=True))


def test_lse_without_values_and_its_gradients() -> None:
    q, k, dlse = normal((2, 7, 4)), normal((9, 4)), normal((2, 7), seed=1)
    settings: dict[str, Any] = {"scale": 0.5, "band": everything(7, 9), "softcap": None}
    lse, dq, dk = np.empty((2, 7), np.float32), np.empty_like(q), np.empty_like(k)
    host.forward(q, k, None, None, None, lse, **settings)
    host.backward(q, k, None, None, None, None, lse, dlse, dq, dk, None, None, **settings)
    np.testing.assert_allclose(lse, reference.attention(q, k, scale=0.5)[1], rtol=1e-5)
    exact_dq, exact_dk, dv, dkey_bias = reference.gradients(None, q, k, dlse=dlse, scale=0.5)
    np.testing.assert_allclose(dq, exact_dq, atol=1e-5)
    np.testing.assert_allclose(dk, exact_dk, atol=1e-5)
    assert dv is None and dkey_bias is None


def test_sums_over_broadcast_axes_are_in_float32() -> None:
    batch = 3000  # ones added up in float16 stop growing at 2048
    q = np.zeros((batch, 1, 2), np.float16)
    k, v, do = np.zeros((1, 2), np.float16), np.zeros((1, 1), np.float16), np.ones((batch, 1, 1), np.float16)
    assert gradients(q, k, v, do, tile=(1, 1))[2] == batch


def test_operand_rounds_the_probabilities_and_accumulate_widens_the_sums() -> None:
    q, k, v = (normal((200, 16), seed=seed) for seed in range(3))
    exact = reference.attention(q, k, v)[0]

    def error(**settings: Any) -> float:
        o = np.empty((200, 16))
        defaults = {"scale": 0.25, "band": everything(200, 200), "softcap": None}
        host.forward(q, k, v, None, o, None, **defaults, **settings)
        return float(np.abs(o - exact).max())

    assert 1e-5 < error(operand=np.dtype(np.float16)) < 2.0**-11 * np.abs(v).max()
    assert 1e-9 < error() < 1e-6
    assert error(accumulate=np.float64) < 1e-14


def test_memory_beyond_inputs_and_results_does_not_grow_with_the_square() -> None:
    q, k, v, do = (normal((4096, 32), seed=seed) for seed in range(4))
    attend(q[:8], k[:8], v[:8])
    tracemalloc.start()
    gradients(q, k, v, do)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6, "the matrix of scores alone is 67 MB"


# --- numerics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 5, 64])
def test_b05_scores_so_large_that_a_rounded_reference_would_be_off(dtype: str, n: int) -> None:
    size = {"float16": 65504, "bfloat16": 133120, "float32": 1e18, "float64": 1e150}[dtype]
    x = np.full((n, 64), size, dtype_of(dtype))
    o, lse = attend(x, x, x)
    np.testing.assert_allclose(o.astype(float), float(x[0, 0]), rtol=1e-6)
    np.testing.assert_allclose(lse, float(x[0, 0]) ** 2 * 8, rtol=1e-6)
    assert np.all(np.isfinite(gradients(x, x, x, normal(x.shape, dtype))[2].astype(float)))


@both_floats
@pytest.mark.parametrize("low", ["lowest", -1e30, -65504.0])
def test_b03_a_finite_bias_is_not_a_mask(dtype: str, low: Any) -> None:
    q, k, v, do = (normal((4, 441, 16), dtype, seed) for seed in range(4))
    bias = np.zeros((4, 441), dtype)
    bias[2] = np.finfo(dtype).min if low == "lowest" else low
    o, lse = attend(q, k, v, bias)
    np.testing.assert_array_equal(lse[2] < 0.9 * bias[2, 0], True)
    assert np.all(np.isfinite(lse))
    if abs(bias[2, 0]) * np.finfo(dtype).eps > 100:  # the scores are lost beside the bias
        np.testing.assert_allclose(o[2], np.broadcast_to(v[2].mean(0), o[2].shape), atol=1e-5)
    else:
        np.testing.assert_allclose(o[2], attend(q, k, v)[0][2], atol=0.05)
    assert all(np.all(np.isfinite(g)) for g in gradients(q, k, v, do, bias))


@both_floats
@pytest.mark.parametrize("start", [0, 20, 50])
def test_b01_b02_rows_without_a_key_anywhere_in_a_tile(dtype: str, start: int) -> None:
    q, k, v, do = (normal((64, 16), dtype, seed) for seed in range(4))
    shift = 64 - start  # under a strictly causal band with this alignment the rows before start see nothing
    band = score.band(64, 64, True, -start, None)
    o, lse = attend(q, k, v, band=band, tile=(16, 16))
    assert np.all(o[:start] == 0) and np.all(np.isneginf(lse[:start])) and np.all(np.isfinite(lse[start:]))
    whole = attend(q[start:], k[:shift], v[:shift], band=score.band(shift, shift, True, None, None))
    np.testing.assert_allclose(o[start:], whole[0], atol=1e-5)
    kicked = do.copy()
    kicked[:start] = 1e4
    plain, kicked = (gradients(q, k, v, x, band=band, tile=(16, 16)) for x in (do, kicked))
    assert np.all(plain[0][:start] == 0)
    assert all(same_bits(x, y) for x, y in zip(plain[:3], kicked[:3], strict=True))


def test_b08_b14_nothing_but_the_keys_themselves_has_weight() -> None:
    for n in (1, 63, 64, 65, 127, 129):
        q, k = np.full((5, 64), 4, np.float32), np.full((n, 64), -4, np.float32)
        v, do = normal((n, 3)), normal((5, 3), seed=1)
        o, lse = attend(q, k, v, tile=(4, 64))
        np.testing.assert_allclose(o, np.broadcast_to(v.mean(0), o.shape), atol=1e-6)
        np.testing.assert_allclose(lse, -128 + math.log(n), rtol=1e-6)
        dv = gradients(q, k, v, do, tile=(4, 64))[2]
        np.testing.assert_allclose(dv, np.broadcast_to(do.sum(0) / n, dv.shape), atol=1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_b15_b16_non_finite_keys_that_no_row_sees_leave_lse_alone(bad: float) -> None:
    q, k, v = normal((65, 4)), normal((65, 4), seed=1), normal((65, 4), seed=2)
    band = score.band(65, 65, True, None, None)
    clean = attend(q, k, v, band=band)
    k[64] = bad
    spoilt = attend(q, k, v, band=band)
    np.testing.assert_allclose(spoilt[0][:64], clean[0][:64], atol=1e-6)
    np.testing.assert_allclose(spoilt[1][:64], clean[1][:64], atol=1e-6)
    bias = np.zeros(65, np.float32)
    bias[64] = -np.inf
    k[64] = 0
    clean = attend(q, k, v, bias)
    k[64] = bad
    assert same_bits(attend(q, k, v, bias)[0], clean[0]), "a key of bias -inf is absent, whatever it holds"


@both_floats
def test_non_finite_values_go_where_mathematics_sends_them(dtype: str) -> None:
    q, k, v = np.ones((3, 2), dtype), normal((5, 2), dtype), normal((5, 4), dtype)
    q[1] = np.nan
    k[2] = -np.inf
    v[4, 3] = np.inf
    o, lse = attend(q, k, v)
    assert np.all(np.isnan(o[1])) and np.isnan(lse[1])
    assert np.all(np.isinf(o[[0, 2], 3])) and np.all(np.isfinite(o[[0, 2], :3])) and np.all(np.isfinite(lse[[0, 2]]))
    k[2] = np.inf
    assert np.all(attend(q, k, v)[1][[0, 2]] == np.inf)


def test_nothing_warns_or_raises_whatever_the_floating_point_state() -> None:
    q, k, v, do = (normal((2, 40, 4), seed=seed) for seed in range(4))
    q[0, 0], k[0, 3], v[0, 5], do[0, 7] = 1e38, 1e38, np.inf, np.nan
    bias = np.full((2, 40), -np.inf, np.float32)
    bias[0, ::2] = np.finfo(np.float32).min
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        for scale in (1e30, -1e30, 0.0, 1e-45, 1e300):
            for softcap in (None, 1e-300, 1e300):
                gradients(q, k, v, do, bias, scale=scale, softcap=softcap, tile=(16, 16))
        dead = np.full((2, 40), -np.inf, np.float32)
        host.merge([v, v], [dead, dead], np.empty_like(v), np.empty_like(dead))
        huge = np.full((9, 4), 6e4, np.float16)
        gradients(huge, huge, huge, huge)


def test_b41_softcap_comes_before_the_mask() -> None:
    x = 8 * normal((64, 16))
    band = score.band(64, 64, True, None, None)
    plain, capped = attend(x, x, x, band=band), attend(x, x, x, band=band, softcap=1e6)
    np.testing.assert_allclose(capped[0], plain[0], atol=1e-4)
    assert same_bits(attend(x, x, x, band=band, softcap=1e-3)[0][0], x[0]), "row 0 sees key 0 alone"


def test_b50_scales_of_zero_and_below() -> None:
    q, k, v, do = (normal((5, 4), seed=seed) for seed in range(4))
    settings: dict[str, Any] = {"band": score.band(5, 5, True, None, None), "tile": (2, 2)}
    o, lse = attend(q, k, v, scale=0.0, **settings)
    count = np.arange(1, 6)
    np.testing.assert_allclose(o, np.cumsum(v, axis=0) / count[:, None], atol=1e-6)
    np.testing.assert_allclose(lse, np.log(count), atol=1e-6)
    dq, dk, _, _ = gradients(q, k, v, do, scale=0.0, **settings)
    assert not dq.any() and not dk.any()
    np.testing.assert_allclose(
        attend(q, k, v, scale=-1.0, **settings)[0], attend(-q, k, v, scale=1.0, **settings)[0], atol=1e-6
    )


def test_other_byte_orders() -> None:
    q, k, v = (normal((2, 9, 4), "float64", seed) for seed in range(3))
    swapped = [x.astype(x.dtype.newbyteorder()) for x in (q, k, v)]
    o, lse = np.empty_like(v), np.empty((2, 9))
    host.forward(*swapped, None, o, lse, scale=0.5, band=everything(9, 9), softcap=None)
    expected = attend(q, k, v)
    assert same_bits(o, expected[0]) and same_bits(lse, expected[1])


# --- merge ---------------------------------------------------------------------------------------------------------


def merged(os: list[Any], lses: list[Any]) -> tuple[Any, Any]:
    o, lse = np.full_like(os[0], np.nan), np.full_like(lses[0], np.nan)
    host.merge(os, lses, o, lse)
    return o, lse


@pytest.mark.parametrize("dtype", DTYPES)
def test_b52_merged_parts_are_the_whole(dtype: str) -> None:
    q, k, v = (normal((2, 64, 8), dtype, seed) for seed in range(3))
    parts = [attend(q, k[:, i : i + 8], v[:, i : i + 8]) for i in range(0, 64, 8)]
    os, lses = (list(x) for x in zip(*parts, strict=True))
    exact_o, exact_lse = reference.attention(q, k, v)
    limit = reference.budget(dtype, 10) + reference.unit_roundoff(dtype)
    for order in (slice(None), slice(None, None, -1)):
        o, lse = merged(os[order], lses[order])
        assert reference.excess(o, exact_o, float(np.abs(v.astype(float)).max()), limit) <= 0
        np.testing.assert_allclose(lse, exact_lse, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_without_keys_is_ignored_and_a_lone_part_comes_back_bit_by_bit(dtype: str) -> None:
    o, lse = normal((6, 3), dtype), normal((6,), "float64" if dtype == "float64" else "float32", 1)
    o[0, 0] = -0.0
    o[1], lse[1] = np.inf, np.inf
    nothing, dead = np.full_like(o, np.nan), np.full_like(lse, -np.inf)
    for os, lses in (([o], [lse]), ([nothing, o], [dead, lse]), ([o, nothing], [lse, dead])):
        found = merged(os, lses)
        assert same_bits(found[0], o) and same_bits(found[1], lse)
    found = merged([nothing, nothing], [dead, dead])
    assert np.all(found[0] == 0) and np.all(np.isneginf(found[1]))
