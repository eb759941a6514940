"""Bands against their definition, and the score terms against finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash.score import EMPTY, FULL, PARTIAL, Band, KeyBias, Softcap, band, key_blocks, key_range, query_blocks

lengths = st.integers(0, 24)
sides = st.one_of(st.none(), st.integers(0, 30))
aligns = st.one_of(st.sampled_from(("bottom-right", "top-left")), st.integers(-30, 30))


def seen_by(causal: bool, align: Any, window: Any, m: int, n: int) -> np.ndarray:
    """Matrix of which row sees which key, by the words of the contract."""
    shift = {"bottom-right": n - m, "top-left": 0}.get(align, align)
    left, right = window or (None, None)
    return np.array(
        [
            [
                (not causal or j <= i + shift)
                and (left is None or j >= i + shift - left)
                and (right is None or j <= i + shift + right)
                for j in range(n)
            ]
            for i in range(m)
        ],
        bool,
    ).reshape(m, n)


def kind(seen: np.ndarray, rows: slice, keys: slice, whole: bool) -> int:
    part = seen[rows, keys]
    return EMPTY if not part.any() else FULL if part.all() and whole else PARTIAL


@given(m=lengths, n=lengths, causal=st.booleans(), align=aligns, window=st.one_of(st.none(), st.tuples(sides, sides)),
       block=st.integers(1, 9), data=st.data())  # fmt: skip
def test_band_ranges_and_blocks_agree_with_the_definition(
    m: int, n: int, causal: bool, align: Any, window: Any, block: int, data: st.DataObject
) -> None:
    seen = seen_by(causal, align, window, m, n)
    term = band(m, n, causal, align, window)
    assert -m <= term.lo <= term.hi <= n
    np.testing.assert_array_equal(term.hidden(0, m, 0, n), ~seen)
    if m and n:
        assert term.is_full(m, n) == bool(seen.all())
        assert [term.sees(m - 1, j) for j in range(n)] == list(seen[m - 1])

    row_begin = data.draw(st.integers(0, m))
    row_end = data.draw(st.integers(row_begin, m))
    rows = seen[row_begin:row_end]
    begin, full_begin, full_end, end = key_range(term, row_begin, row_end, n)
    assert 0 <= begin <= full_begin <= full_end <= end <= n
    assert list(range(begin, end)) == list(np.flatnonzero(rows.any(axis=0)))
    assert list(range(full_begin, full_end)) == list(np.flatnonzero(rows.all(axis=0))) if len(rows) else begin == end

    blocks = range(-(-n // block))
    kinds = [
        kind(seen, slice(row_begin, row_end), slice(b * block, (b + 1) * block), (b + 1) * block <= n) for b in blocks
    ]
    expected = [(b, kinds[b]) for b in reversed(blocks) if kinds[b] != EMPTY]
    assert list(key_blocks(term, row_begin, row_end, n, block)) == expected

    key_begin = data.draw(st.integers(0, n))
    key_end = data.draw(st.integers(key_begin, n))
    blocks = range(-(-m // block))
    kinds = [
        kind(seen, slice(b * block, (b + 1) * block), slice(key_begin, key_end), (b + 1) * block <= m) for b in blocks
    ]
    expected = [(b, kinds[b]) for b in blocks if kinds[b] != EMPTY]
    assert list(query_blocks(term, key_begin, key_end, m, block)) == expected


def test_kernels_visit_masked_right_then_full_then_masked_left() -> None:
    kinds = [kind for _, kind in key_blocks(Band(-20, 3), 32, 40, 100, 4)]
    assert kinds == [PARTIAL] * 2 + [FULL] * 4 + [PARTIAL] * 2


def test_huge_options_are_clipped_to_the_lengths() -> None:
    assert band(3, 5, False, 2**62, (2**62, 2**62)) == Band(0, 5)
    assert band(3, 5, False, -(2**62), (0, 0)) == Band(-3, -3)
    assert band(3, 5, False, None, None) == Band(-3, 5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_softcap_and_its_slope(dtype: Any) -> None:
    s = np.linspace(-40, 40, 101).astype(dtype)
    value, slope = s.copy(), np.empty_like(s)
    Softcap(15.0).value_and_slope(value, slope)
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(value, 15 * np.tanh(s.astype(float) / 15), atol=100 * eps)
    step = 1e-5
    exact = (15 * np.tanh((s.astype(float) + step) / 15) - 15 * np.tanh((s.astype(float) - step) / 15)) / (2 * step)
    np.testing.assert_allclose(slope, exact, atol=max(1e-8, 10 * eps))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_softcaps_beyond_the_range_of_the_dtype(dtype: Any) -> None:
    s = np.array([-3.0, 0.0, 0.25], dtype)
    for cap, expected in ((1e300, s), (5e-324, np.zeros(3))):
        value = s.copy()
        with np.errstate(under="ignore"):
            Softcap(cap).value_and_slope(value)
        np.testing.assert_allclose(value, expected, atol=1e-6 if dtype == np.float32 else 1e-15)


def test_a_key_of_bias_minus_infinity_is_absent_whatever_its_score() -> None:
    s = np.array([[1.0, np.nan, np.inf], [2.0, 3.0, np.nan]])
    with np.errstate(invalid="ignore"):
        KeyBias(np.array([0.5, -np.inf, -np.inf])).value(s)
    np.testing.assert_array_equal(s, [[1.5, -np.inf, -np.inf], [2.5, -np.inf, -np.inf]])


def test_the_gradient_of_a_bias_is_the_sum_over_rows() -> None:
    np.testing.assert_array_equal(KeyBias.on_grad(np.arange(12.0).reshape(2, 3, 2)), [[6, 9], [24, 27]])
