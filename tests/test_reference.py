"""The reference itself: closed forms, gradients against finite differences, and budgets that can tell."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import reference
from backends import dtype_of

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "align": "bottom-right"},
    "window": {"align": 1, "window": (2, 1)},
    "softcap": {"softcap": 1.5},
    "negative scale": {"scale": -0.7},
    "grouped": {"grouped_heads": True, "causal": True, "align": "top-left"},
    "bias": {"key_bias": True, "softcap": 2.0},
    "grouped bias": {"key_bias": True, "grouped_heads": True},
}


def problem(name: str, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs and options; k is shared along the first axis and v along the others it may be."""
    rng = np.random.default_rng(seed)
    options = dict(OPTIONS[name])
    heads = 2 if options.get("grouped_heads") else 4
    shapes = {"q": (3, 4, 6, 5), "k": (heads, 7, 5), "v": (3, heads if heads == 2 else 1, 7, 3)}
    inputs = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    if options.pop("key_bias", False):
        inputs["key_bias"] = rng.standard_normal((4, 7))
        inputs["key_bias"][1, 2] = -np.inf
    return inputs, options


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    inputs, options = problem(name)
    rng = np.random.default_rng(1)
    o, lse = reference.attention(**_args(inputs), **options)
    do, dlse = rng.standard_normal(o.shape), rng.standard_normal(lse.shape)
    dlse[np.isneginf(lse)] = 0

    def loss(moved: dict[str, Any]) -> float:
        o, lse = reference.attention(**_args(moved), **options)
        return float(np.sum(do * o) + np.sum(dlse * np.where(np.isneginf(lse), 0, lse)))

    found = reference.gradients(
        do, inputs["q"], inputs["k"], inputs["v"], dlse=dlse, key_bias=inputs.get("key_bias"), **options
    )
    for which, gradient in zip(("q", "k", "v", "key_bias"), found, strict=True):
        if gradient is None:
            assert which not in inputs
            continue
        assert gradient.shape == inputs[which].shape
        for _ in range(3):  # the dot-product test, along random directions
            direction = rng.standard_normal(gradient.shape)
            step = 1e-5
            ahead, behind = (inputs | {which: inputs[which] + sign * step * direction} for sign in (1, -1))
            slope = (loss(ahead) - loss(behind)) / (2 * step)
            assert np.sum(gradient * direction) == pytest.approx(slope, rel=1e-6, abs=1e-7), which


def _args(inputs: dict[str, Any]) -> dict[str, Any]:
    return {"q": inputs["q"], "k": inputs["k"], "v": inputs["v"], "key_bias": inputs.get("key_bias")}


def test_attention_of_equal_scores_is_the_mean_of_the_keys_that_are_seen() -> None:
    q, k = np.zeros((2, 3)), np.zeros((5, 3))
    o, lse = reference.attention(q, k, np.eye(5), causal=True, align="bottom-right")
    np.testing.assert_allclose(o, [[0.25, 0.25, 0.25, 0.25, 0], [0.2] * 5])
    np.testing.assert_allclose(lse, np.log([4, 5]))
    o, lse = reference.attention(np.zeros((5, 3)), k[:2], np.eye(2), causal=True, align="bottom-right")
    np.testing.assert_array_equal(o, [[0, 0], [0, 0], [0, 0], [1, 0], [0.5, 0.5]])
    np.testing.assert_allclose(lse, [-np.inf, -np.inf, -np.inf, 0, math.log(2)])


def test_visible_counts_both_ends_of_a_window() -> None:
    assert list(reference.visible(6, 6, window=(2, 1)).sum(axis=1)) == [2, 3, 4, 4, 4, 3]
    assert list(reference.visible(6, 6, window=(0, None)).sum(axis=1)) == [6, 5, 4, 3, 2, 1]
    assert list(reference.visible(6, 6, causal=True, window=(1, 3)).sum(axis=1)) == [1, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("name", OPTIONS)
def test_results_are_not_larger_than_their_bounds(name: str) -> None:
    inputs, options = problem(name)
    q, k, v, bias = (inputs.get(x) for x in ("q", "k", "v", "key_bias"))
    o, lse = reference.attention(q, k, v, key_bias=bias, **options)
    do, dlse = np.random.default_rng(2).standard_normal(o.shape), np.ones_like(lse)
    bounds = reference.bounds(do, q, k, v, dlse=dlse, key_bias=bias, **options)
    results = (o, None, *reference.gradients(do, q, k, v, dlse=dlse, key_bias=bias, **options))
    for which, result in zip(("o", "lse", "dq", "dk", "dv", "dkey_bias"), results, strict=True):
        if result is not None:
            assert 0 < reference.largest(result) <= getattr(bounds, which), which


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_kernel_budget_admits_the_host_and_not_a_wrong_result(dtype: str) -> None:
    inputs, options = problem("grouped bias", seed=3)
    q, k, v = (inputs[name].astype(dtype) for name in ("q", "k", "v"))
    options["key_bias"] = inputs["key_bias"].astype(np.float32)
    exact_o, exact_lse = reference.attention(q, k, v, **options)
    do = np.random.default_rng(4).standard_normal(exact_o.shape).astype(dtype)
    limits = reference.kernel_budget(do, q, k, v, tile=(4, 4), **options)
    bounds = reference.bounds(do, q, k, v, **options)
    assert set(limits.present()) == {"o", "lse", "dq", "dk", "dv", "dkey_bias"}
    exact = (exact_o, exact_lse, *reference.gradients(do, q, k, v, **options))
    other = options | {"scale": 1.1 / math.sqrt(5)}
    wrong = (*reference.attention(q, k, v, **other), *reference.gradients(do, q, k, v, **other))
    for name, right, off in zip(limits.present(), exact, wrong, strict=True):
        limit, bound = getattr(limits, name), getattr(bounds, name)
        result_dtype = np.float32 if name in ("lse", "dkey_bias") else np.dtype(dtype)
        assert reference.excess(right.astype(result_dtype), right, bound, limit) <= 0, name
        assert reference.excess(off.astype(result_dtype), right, bound, limit) > 0, name


def cut(x: np.ndarray, rounded: bool = False) -> np.ndarray:
    """The 11 bits that tensor cores take."""
    bits = x.astype(np.float32).view(np.uint32) + np.uint32(0x1000 if rounded else 0)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def product_in_tf32(a: np.ndarray, b: np.ndarray, split: bool) -> np.ndarray:
    """a @ b with operands rounded to 11 bits, or as the three products of split operands."""
    high_a, high_b = (cut(x, rounded=not split) for x in (a, b))
    result = high_a.astype(np.float64) @ high_b
    if split:
        low_a, low_b = cut(a - high_a, rounded=True), cut(b - high_b, rounded=True)
        result += low_a.astype(np.float64) @ high_b + high_a.astype(np.float64) @ low_b
    return result


def test_three_products_lose_no_more_than_said() -> None:
    """The worst operand: all of hi's lost bits are set, and 13 bits of lo are to be rounded to 11."""
    x = np.concatenate([np.arange(2**23, 2**23 + 2**14), np.arange(2**24 - 2**14, 2**24)]).astype(np.float32)
    a, b = x[:, None], x[None, ::97]
    exact = a.astype(np.float64) * b
    got = np.concatenate([product_in_tf32(a[i : i + 1], b, split=True) for i in range(0, len(a), 89)])
    lost = np.abs(got / exact[::89] - 1).max()
    assert reference.SPLIT / 4 < lost <= reference.SPLIT


@pytest.mark.parametrize("values", [1.0, 2.0**-130])
@pytest.mark.parametrize(("m", "n", "d"), [(40, 70, 64), (17, 30, 32)])
def test_kernel_budgets_tell_tf32_from_float32(m: int, n: int, d: int, values: float) -> None:
    """Attention with split operands is within float32's budget, with rounded ones within TF32's and not float32's."""
    rng = np.random.default_rng(d)
    q, k, v = (rng.standard_normal((length, d)).astype(np.float32) for length in (m, n, n))
    v *= np.float32(values)
    do = rng.standard_normal((m, d)).astype(np.float32)
    bounds = reference.bounds(do, q, k, v)
    exact_o, exact_lse = reference.attention(q, k, v)
    exact_dv = reference.gradients(do, q, k, v)[2]
    assert exact_dv is not None
    within = {}
    for split in (True, False):
        s = product_in_tf32(q, k.T, split) / math.sqrt(d)
        lse = np.log(np.exp(s).sum(axis=-1))
        p = np.exp(s - lse[:, None]).astype(np.float32)
        o, dv = product_in_tf32(p, v, split), product_in_tf32(p.T, do, split)
        for precision in (None, "tf32"):
            products = reference.arithmetic(np.float32, "sm80", precision)
            limits = reference.kernel_budget(do, q, k, v, tile=(16, 16), products=products)
            for name, got, exact in (("o", o, exact_o), ("lse", lse, exact_lse), ("dv", dv, exact_dv)):
                excess = reference.excess(got.astype(np.float32), exact, getattr(bounds, name), getattr(limits, name))
                within[name, split, precision] = excess <= 0
    assert within == {
        (name, split, precision): split or precision == "tf32" or (values < 1 and name == "o")
        for name in ("o", "lse", "dv") for split in (True, False) for precision in (None, "tf32")
    }  # fmt: skip


@pytest.mark.parametrize(("family", "dtype"), [("sm80", "float64"), ("sm75", "float64"), ("sm75", "float32")])
def test_a_kernel_budget_of_fmas_admits_the_host_and_not_fewer_bits(family: str, dtype: str) -> None:
    inputs, options = problem("bias", seed=3)
    q, k, v = (inputs[name].astype(dtype) for name in ("q", "k", "v"))
    options["key_bias"] = inputs["key_bias"].astype(dtype)
    results = reference.attention(q, k, v, **options)
    do = np.random.default_rng(4).standard_normal(results[0].shape).astype(dtype)
    exact = (*results, *reference.gradients(do, q, k, v, **options))
    products = reference.arithmetic(dtype, family)
    limits = reference.kernel_budget(do, q, k, v, tile=(4, 4), products=products, **options)
    bounds = reference.bounds(do, q, k, v, **options)
    fewer = dtype_of("float32" if dtype == "float64" else "bfloat16")
    for name, right in zip(limits.present(), exact, strict=True):
        limit, bound = getattr(limits, name), getattr(bounds, name)
        assert reference.excess(right.astype(dtype), right, bound, limit) <= 0, name
        assert reference.excess(right.astype(fewer).astype(dtype), right, bound, limit) > 0, name


def test_long_double_agrees_with_float64() -> None:
    inputs, _ = problem("plain")
    q, k, v = inputs["q"][0, 0], inputs["k"][0], inputs["v"][0, 0]
    do = np.random.default_rng(5).standard_normal((6, 3))
    results = (*reference.attention(q, k, v), *reference.gradients(do, q, k, v)[:3])
    for (name, wide), narrow in zip(reference.in_long_double(q, k, v, do).items(), results, strict=True):
        assert wide.dtype == np.longdouble and narrow is not None
        np.testing.assert_allclose(wide.astype(np.float64), narrow, rtol=1e-13, atol=1e-14, err_msg=name)


def test_without_a_gradient_a_kernel_budget_has_no_limits_for_gradients() -> None:
    x = np.ones((3, 4), np.float16)
    assert set(reference.kernel_budget(None, x, x, x, tile=(16, 16)).present()) == {"o", "lse"}


def test_budgets() -> None:
    assert reference.budget(np.float64, 10) == pytest.approx(2.0**-52 * 144.5)
    assert reference.budget(np.float16, 0) == pytest.approx(2.0**-23 * 64 + 2.0**-11)
    assert reference.budget(np.float32, 0, np.float64) == pytest.approx(2.0**-24, rel=1e-6)


def test_excess_sees_what_is_wrong() -> None:
    exact = np.array([1.0, -np.inf, 0.5])
    assert reference.excess(np.float32([1.1, -np.inf, 0.5]), exact, 2.0, 0.1) < 0
    assert reference.excess(np.float32([1.3, -np.inf, 0.5]), exact, 2.0, 0.1) == pytest.approx(0.1, rel=1e-6)
    for broken in ([1, 0, 0.5], [np.nan, -np.inf, 0.5], [1, np.nan, 0.5], [1, -np.inf, np.inf]):
        assert reference.excess(np.float32(broken), exact, 2.0, 0.1) == math.inf
    with pytest.raises(AssertionError, match=r"shape \(1, 3\)"):
        reference.excess(np.float32([exact]), exact, 2.0, 0.1)
