"""Property tests of the CUDA backend: drawn calls of every kind, each held to dense float64 within a derived budget.

Outputs go through ``out=`` into NaN-filled memory with guard regions; inputs are views into NaN-filled memory. Both
kernel families run on whatever GPU there is. ``gpu_cases.py`` draws, ``checks.py`` runs and compares.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import reference
from backends import GPU, Layout, acc_dtype, dtype_of, normal, place, place_hole, put, same_bits, swapped
from checks import (
    Call,
    check,
    check_backward,
    check_forward,
    check_lse,
    compiled_kernels,  # noqa: F401 - a fixture
    expect,
    run,
)
from gpu_cases import Case, cases, layouts
from hypothesis import event, given, settings
from hypothesis import strategies as st

import cuflash

pytestmark = pytest.mark.gpu
BACKEND = GPU
HALF = ("float16",)
"""Dtypes of the family sm75, whose tensor cores know no bfloat16."""


def examples(count: int) -> settings:
    return settings(settings.get_profile("gpu"), max_examples=count)


@contextmanager
def family(name: str) -> Iterator[None]:
    """Make the launcher take the kernels of a family."""
    before = os.environ.get("CUFLASH_FAMILY")
    os.environ["CUFLASH_FAMILY"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUFLASH_FAMILY"]
        else:
            os.environ["CUFLASH_FAMILY"] = before


needs = st.one_of(st.none(), st.lists(st.sampled_from(("q", "k", "v", "key_bias")), min_size=1, unique=True).map(tuple))
upstream = st.sampled_from(((True, False), (True, True), (False, True)))
"""Whether there is a do, and a dlse."""


# --- the three operations, both families -------------------------------------------------------------------------


@examples(600)
@given(case=cases())
def test_forward_sm80(case: Case) -> None:
    with family("sm80"):
        check_forward(BACKEND, case, "sm80")


@examples(200)
@given(case=cases(HALF))
def test_forward_sm75(case: Case) -> None:
    with family("sm75"):
        check_forward(BACKEND, case, "sm75")


@examples(600)
@given(case=cases(), need=needs, up=upstream)
def test_backward_sm80(case: Case, need: tuple[str, ...] | None, up: tuple[bool, bool]) -> None:
    event(f"do, dlse: {up}")
    with family("sm80"):
        check_backward(BACKEND, case, "sm80", need, *up)


@examples(200)
@given(case=cases(HALF), need=needs, up=upstream)
def test_backward_sm75(case: Case, need: tuple[str, ...] | None, up: tuple[bool, bool]) -> None:
    with family("sm75"):
        check_backward(BACKEND, case, "sm75", need, *up)


@examples(150)
@given(case=cases(grouped=True), need=needs)
def test_grouped_heads(case: Case, need: tuple[str, ...] | None) -> None:
    with family("sm80"):
        check_backward(BACKEND, case, "sm80", need, True, False)


@examples(150)
@given(case=cases(), name=st.sampled_from(("sm80", "sm75")))
def test_lse_alone(case: Case, name: str) -> None:
    if name == "sm75" and case.dtype != "float16":
        name = "sm80"
    with family(name):
        check_lse(BACKEND, case, name)


@examples(100)
@given(case=cases(), need=needs, up=upstream)
def test_unordered_gradients_are_within_the_same_budget(
    case: Case, need: tuple[str, ...] | None, up: tuple[bool, bool]
) -> None:
    check_backward(BACKEND, case, "sm80", need, *up, deterministic=False)


@examples(100)
@given(case=cases())
def test_equal_calls_give_equal_bits(case: Case) -> None:
    call = Call.of(BACKEND, case)
    q, k, v, do = (call[name] for name in ("q", "k", "v", "do"))
    first: list[np.ndarray] = []
    for _ in range(3):
        o, lse = cuflash.attention(q, k, v, return_lse=True, **call.options)
        gradients = cuflash.attention_backward(do, q, k, v, o, lse, **call.options)
        bits = [BACKEND.get(x) for x in (o, lse, *gradients)]
        first = first or bits
        assert all(map(same_bits, first, bits))


# --- the gradients against a derivative --------------------------------------------------------------------------


def direction(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """A few entries +-1: a sum over them has a small bound."""
    t = np.zeros(shape)
    if t.size:
        t.reshape(-1)[rng.integers(t.size, size=8)] = rng.choice((-1.0, 1.0), 8)
    return t


@examples(150)
@given(case=cases(with_layouts=False))
def test_gradients_are_the_transpose_of_the_derivative(case: Case) -> None:
    """<do, J t> = <gradients, t>, with J t from central differences of the float64 reference."""
    call = Call.of(BACKEND, case)
    x, options = call.values, dict(call.reference_options)
    got = run(BACKEND, x["q"], x["k"], x["v"], x["do"], x["dlse"], **options)
    key_bias = options.pop("key_bias", None)
    names = ("q", "k", "v") + (() if key_bias is None else ("key_bias",))
    rng = np.random.default_rng(case.seed)
    along = {name: direction(rng, x[name].shape) for name in names}
    step = 1e-5

    def moved(sign: float) -> tuple[np.ndarray, np.ndarray]:
        at = {name: x[name].astype(np.float64) + sign * step * along[name] for name in names}
        bias = {} if key_bias is None else {"key_bias": at["key_bias"]}
        return reference.attention(at["q"], at["k"], at["v"], **bias, **options)

    (o_up, lse_up), (o_down, lse_down) = moved(1), moved(-1)
    empty = np.isneginf(lse_up)
    lse_change = np.where(empty, 0, np.where(empty, 0, lse_up) - np.where(empty, 0, lse_down))
    derivative = (np.sum(x["do"].astype(np.float64) * (o_up - o_down)) + np.sum(x["dlse"] * lse_change)) / (2 * step)
    wanted = expect(x["q"], x["k"], x["v"], x["do"], x["dlse"], **call.reference_options)
    product, allowed = 0.0, 0.0
    for name in names:
        gradient = getattr(got, f"d{name}").astype(np.float64)
        product += float(np.sum(gradient * along[name]))
        allowed += wanted[f"d{name}"].limit * wanted[f"d{name}"].bound * float(np.abs(along[name]).sum())
    terms = float(np.abs(x["do"].astype(np.float64)).sum() * np.abs(x["v"].astype(np.float64)).max(initial=0))
    differences = 1e-16 / step * (terms + float(np.abs(x["dlse"]).sum() * 100)) + 1e-6 * (abs(product) + allowed)
    assert abs(product - derivative) <= allowed + differences + 1e-5


# --- merging -----------------------------------------------------------------------------------------------------


@st.composite
def merges(draw: st.DrawFn) -> dict[str, Any]:
    batch = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    shape = (*batch, draw(st.integers(0, 70)), draw(st.integers(0, 257)))
    return {
        "shape": shape,
        "count": draw(st.integers(1, 6)),
        "dtype": draw(st.sampled_from(("float16", "bfloat16"))),
        "stacked": draw(st.booleans()),
        "places": [draw(layouts(len(shape) - lse, writable=True)) for lse in (0, 1, 0, 1)],
        "spread": draw(st.sampled_from((0.1, 3.0, 100.0))),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


@examples(150)
@given(drawn=merges())
def test_merge(drawn: dict[str, Any]) -> None:
    shape, dtype, places = drawn["shape"], drawn["dtype"], drawn["places"]
    rng = np.random.default_rng(drawn["seed"])
    os = [normal(rng, shape, dtype) for _ in range(drawn["count"])]
    lses = [(drawn["spread"] * rng.standard_normal(shape[:-1])).astype(np.float32) for _ in os]
    for o, lse in zip(os, lses, strict=True):
        dead = rng.random(lse.shape) < 0.3
        lse[dead] = -np.inf
        o[dead] = np.nan
    room = (
        place_hole(BACKEND, shape, dtype_of(dtype), places[2]),
        place_hole(BACKEND, shape[:-1], acc_dtype(dtype), places[3]),
    )
    if drawn["stacked"]:
        parts: Any = (put(BACKEND, np.stack(os)), put(BACKEND, np.stack(lses)))
    else:
        placed = [[place(BACKEND, x, places[i]) for x in xs] for i, xs in enumerate((os, lses))]
        parts = tuple(tuple(p.array for p in xs) for xs in placed)
    returned = cuflash.attention_merge(*parts, out=tuple(hole.array for hole in room))
    for mine, hole in zip(returned, room, strict=True):
        assert mine is hole.array
        hole.check_guards()
    o, lse = (BACKEND.get(hole.array) for hole in room)

    live = np.isfinite(np.stack(lses))
    top = np.max(np.stack(lses), axis=0, initial=-np.inf)
    weights = np.where(live, np.exp(np.stack(lses).astype(np.float64) - np.where(np.isfinite(top), top, 0)), 0)
    total = weights.sum(0)
    values = np.where(live[..., None], np.stack(os).astype(np.float64), 0)
    want = (weights[..., None] * values).sum(0) / np.where(total == 0, 1, total)[..., None]
    with np.errstate(divide="ignore"):
        want_lse = np.log(total) + np.where(np.isfinite(top), top, 0)
    # Weights are exponentials of differences: x * exp(-x) < 0.4 keeps their rounding small whatever the spread.
    eps = float(np.finfo(np.float32).eps)
    limit = reference.unit_roundoff(dtype_of(dtype)) + eps * (16 + 2 * len(os))
    assert reference.excess(o, want, reference.largest(values), limit) <= 0
    assert reference.excess(lse, want_lse, 1.0, eps * (16 + reference.largest(want_lse))) <= 0
    alone = live.sum(0) == 1
    which = live.argmax(0)
    for part, (part_o, part_lse) in enumerate(zip(os, lses, strict=True)):
        chosen = alone & (which == part)
        assert same_bits(o[chosen], part_o[chosen]) and same_bits(lse[chosen], part_lse[chosen])


# --- single points -----------------------------------------------------------------------------------------------


def test_the_family_is_the_one_asked_for(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFLASH_LOG", "1")
    x = [normal(np.random.default_rng(0), (2, 33, 64), "float16") for _ in range(3)]
    results = []
    for name in ("sm80", "sm75", "sm80"):
        monkeypatch.setenv("CUFLASH_FAMILY", name)
        capfd.readouterr()
        results.append(run(BACKEND, *x).o)
        said = "".join(capfd.readouterr())
        assert name in said and {"sm80": "sm75", "sm75": "sm80"}[name] not in said
    assert same_bits(results[0], results[2])


def test_results_follow_the_order_of_the_inputs() -> None:
    rng = np.random.default_rng(1)
    x = [put(BACKEND, normal(rng, (2, 3, 40, 16), "float16"), swapped(4)) for _ in range(4)]
    (o, lse), vjp = cuflash.attention_vjp(*x[:3], return_lse=True)
    for array in (o, *vjp(x[3])):
        assert array.strides == x[0].strides and isinstance(array, BACKEND.xp.ndarray)
    assert lse.flags.c_contiguous and lse.dtype == np.float32


def test_axes_of_the_batch_that_do_not_merge() -> None:
    rng = np.random.default_rng(2)
    x = [normal(rng, (2, 3, 1, 2, 2, 17, 32), "float16") for _ in range(4)]
    got = check(BACKEND, *x)  # contiguous: one axis
    flat = run(BACKEND, *(a.reshape(-1, 17, 32) for a in x))
    assert same_bits(got.o.reshape(flat.o.shape), flat.o) and same_bits(got.dk.reshape(flat.dk.shape), flat.dk)
    q = put(BACKEND, normal(rng, (2, 1, 3, 1, 17, 32), "float16"))
    k, v = (put(BACKEND, normal(rng, (1, 2, 1, 3, 17, 32), "float16")) for _ in range(2))
    with pytest.raises(NotImplementedError, match="axes"):
        cuflash.attention(q, k, v)
    check(BACKEND, *(normal(rng, shape, "float16") for shape in ((2, 1, 3, 17, 32), (2, 1, 17, 32), (3, 17, 32))))


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (200, 50)}], ids=str)
def test_many_blocks(d: int, options: dict[str, Any]) -> None:
    """Long enough for every stage of the pipelines and several blocks on each side of the diagonal."""
    rng = np.random.default_rng(d)
    check(BACKEND, *(normal(rng, (2, 700, d), "bfloat16") for _ in range(4)), **options)


@pytest.mark.parametrize("name", ["sm80", "sm75"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_adversarial_values(name: str, d: int) -> None:
    """One huge logit, rows of constants, a running maximum that rises in every block."""
    rng = np.random.default_rng(d)
    n = 500
    base = [normal(rng, (n, d), "float16") for _ in range(4)]
    spike, constant, rising = ([x.copy() for x in base] for _ in range(3))
    spike[0][7] = spike[1][n // 2] = 12
    constant[0][:] = constant[1][:] = 1
    rising[0][:] = 1
    rising[1][:] = np.linspace(-4, 4, n)[:, None]
    with family(name):
        for x in (spike, constant, rising, [rising[0], rising[1][::-1].copy(), *rising[2:]]):
            got = run(BACKEND, *x)
            for result, expected in expect(*x, family=name).items():
                expected.check(getattr(got, result))


@pytest.mark.parametrize("gap", [0, 1, 2, 4, 8])
def test_every_load_kind(gap: int) -> None:
    """Rows whose distance is a multiple of 16, 8, 4 and 2 bytes, and features that are not next to each other."""
    rng = np.random.default_rng(gap)
    x = [normal(rng, (2, 77, 64), "float16") for _ in range(4)]
    for layout in (Layout(pad=gap), Layout(pad=gap, shift=gap), Layout(steps=(1, 1, 2), pad=gap)):
        check(BACKEND, *x, layouts=dict.fromkeys(("q", "k", "v", "do"), layout), causal=True)


@pytest.mark.parametrize("name", ["sm80", "sm75"])
def test_gradients_of_scores_beyond_the_fraction_of_float32(name: str) -> None:
    """Scores of 4.5e9: lse is rounded to hundreds, and p must come from the same rounding of the same score.

    One key, as the logarithm of a number of keys would be lost in that rounding.
    """
    q, k = np.full((2, 128), 20001, np.float16), np.full((1, 128), 20001, np.float16)
    v, do = np.ones((1, 128), np.float16), np.ones((2, 128), np.float16)
    with family(name):
        got = run(BACKEND, q, k, v, do)
    assert (got.o == 1).all() and (got.dv == 2).all() and np.isfinite(got.dq).all() and np.isfinite(got.dk).all()


@pytest.mark.parametrize("where", ["q", "k"])
def test_gradients_of_rows_with_nan_are_nan(where: str) -> None:
    x = {"q": np.ones((5, 64)), "k": np.ones((3, 64)), "v": np.ones((3, 64)), "do": np.ones((5, 64))}
    x[where][0] = np.nan
    got = run(BACKEND, *(array.astype(np.float16) for array in x.values()))
    rows = slice(0, 1) if where == "q" else slice(None)
    assert np.isnan(got.o[rows]).all() and np.isnan(got.lse[rows]).all()
    assert np.isnan(got.dv).all() and np.isnan(got.dq[rows]).all()


def test_merge_of_one_part_repeated_without_memory() -> None:
    rng = np.random.default_rng(3)
    o, lse = put(BACKEND, normal(rng, (7, 16), "float16")), put(BACKEND, rng.standard_normal(7).astype(np.float32))
    for count in (2, 50):
        os, lses = (BACKEND.xp.broadcast_to(x, (count, *x.shape)) for x in (o, lse))
        merged, merged_lse = cuflash.attention_merge(os, lses)
        assert same_bits(BACKEND.get(merged), BACKEND.get(o))
        np.testing.assert_allclose(BACKEND.get(merged_lse), BACKEND.get(lse) + np.log(count), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["q", "k", "v", "key_bias", "o", "lse", "do", "dlse", "dq"])
def test_arrays_that_start_between_two_elements_are_refused(name: str) -> None:
    xp, shape = BACKEND.xp, (6, 16)

    def array(own: str, shape: tuple[int, ...], dtype: type) -> Any:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        memory = xp.zeros(size + 16, np.uint8)
        return memory[int(own == name) :][:size].view(dtype).reshape(shape)

    q, k, v, o, do, dq = (array(own, shape, np.float16) for own in ("q", "k", "v", "o", "do", "dq"))
    key_bias, lse, dlse = (array(own, shape[:1], np.float32) for own in ("key_bias", "lse", "dlse"))
    with pytest.raises(NotImplementedError, match="between two elements"):
        if name not in ("do", "dlse", "dq"):
            cuflash.attention(q, k, v, key_bias=key_bias, return_lse=True, out=(o, lse))
        cuflash.attention_backward(do, q, k, v, o, lse, key_bias=key_bias, dlse=dlse, out=(dq, None, None, None))
    xp.cuda.Device().synchronize()  # the context is alive
