"""Gradients by the kernel of the sm90 family that computes all of them, on a GPU, held to dense float64.

What it takes is drawn and listed, with lengths that no block divides, sums over heads, and rows and keys that see
nothing; deterministic it gives the same bits each time; it leaves its counters at 0; and what it does not take goes to
the portable kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from backends import Layout, normal, put
from checks import (
    check,
    check_backward,
    compiled_kernels,  # noqa: F401 - a fixture
    expect,
    planned_anew,
    run,
)
from gpu_cases import Case, cases
from hopper_gradients import (
    BANDS,
    DQ,
    SCORE_TERMS,
    TERMS_OF_LARGE_SCORES,
    WHOLE,
    aligned,
    both_dtypes,
    check_beyond_the_fraction,
    check_counters,
    check_infinite_key,
    check_replays_of_a_graph,
    check_same_bits,
    check_same_bits_with_terms,
    check_sums_of_dkey_bias,
    check_terms,
    check_terms_of_lengths,
    check_without_weight,
    in_16_bits,
    taken,
)
from hypothesis import event, given
from hypothesis import strategies as st
from on_gpu import BACKEND, examples, hopper_kernels, plain
from on_gpu import needs as gradients_needed

import cuflash
from cuflash import devices, hopper, plan_sm90

pytestmark = pytest.mark.gpu
both_modes = pytest.mark.parametrize("deterministic", [True, False], ids=["in order", "unordered"])


def takes(launched: list[str]) -> bool:
    """Whether the kernel is among the launched."""
    return WHOLE in taken(launched)


@examples(400)
@given(
    case=cases("sm80", with_layouts=False).map(plain).map(in_16_bits),
    has_dlse=st.booleans(),
    deterministic=st.booleans(),
)
def test_drawn_calls(case: Case, has_dlse: bool, deterministic: bool) -> None:
    with hopper_kernels("name") as launched:
        check_backward(BACKEND, case, "sm90", None, True, has_dlse, deterministic=deterministic)
    event(f"taken: {takes(launched)}")


@examples(500)
@given(
    case=cases("sm80", with_layouts=False).map(aligned).map(in_16_bits),
    has_dlse=st.booleans(),
    need=gradients_needed,
    deterministic=st.booleans(),
)
def test_drawn_calls_with_score_terms(
    case: Case, has_dlse: bool, need: tuple[str, ...] | None, deterministic: bool
) -> None:
    with hopper_kernels("name") as launched:
        check_backward(BACKEND, case, "sm90", need, True, has_dlse, deterministic=deterministic)
    event(f"taken: {takes(launched)}")


@both_dtypes
@pytest.mark.parametrize("d", [64, 96, 128])
@pytest.mark.parametrize("terms", SCORE_TERMS, ids=str)
def test_score_terms(dtype: str, terms: dict[str, Any], d: int) -> None:
    check_terms_of_lengths(dtype, d, d, terms)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("options", BANDS, ids=str)
@pytest.mark.parametrize(
    ("q", "k", "bias", "grouped"),
    [
        ((3, 4), (3, 4), (), False),
        ((3, 4), (3, 4), (3, 1), False),
        ((3, 4), (3, 4), (4,), False),
        ((5, 3), (), (3,), False),
        ((5, 3), (), (5, 1), False),
        ((2, 6), (2, 2), (2, 6), True),
        ((2, 6), (2, 2), (1,), True),
        ((2, 6), (2, 2), (6,), True),
        ((2, 3, 2), (2, 1, 2), (3, 1), False),
    ],
    ids=str,
)
def test_dkey_bias_is_summed_over_the_axes_that_key_bias_lacks(
    q: tuple[int, ...], k: tuple[int, ...], bias: tuple[int, ...], grouped: bool, options: dict[str, Any], d: int
) -> None:
    """Whichever dk and dv are summed over."""
    check_sums_of_dkey_bias(q, k, bias, grouped, options, d)


@both_modes
@pytest.mark.parametrize("d", [64, 128])
def test_without_keys_that_have_a_weight(d: int, deterministic: bool) -> None:
    for options in ({}, {"softcap": 5.0}, {"window": (0, 0), "align": 150}):
        check_without_weight(d, options, {WHOLE}, deterministic=deterministic)


@pytest.mark.parametrize("d", [64, 96, 128])
@pytest.mark.parametrize(
    "need", [("k", "v"), ("k",), ("v",), ("key_bias",), ("k", "key_bias"), ("q", "k", "v")], ids=str
)
@pytest.mark.parametrize("terms", [{}, *SCORE_TERMS[4:], {"softcap": 2.0}], ids=str)
def test_some_of_the_gradients(terms: dict[str, Any], need: tuple[str, ...], d: int) -> None:
    """What is not asked for is not there; dq not even computed."""
    need = tuple(name for name in need if name != "key_bias" or "key_bias" in terms)
    if not need:
        pytest.skip("there is no key_bias")
    for q, k, grouped in (((3,), (3,), False), ((6,), (2,), True)):
        options = terms | BANDS[1] | ({"grouped_heads": True} if grouped else {})
        check_terms("float16", (*q, 140, d), (*k, 200, d), (), options, need)


@pytest.mark.parametrize("d", [64, 96, 128])
@pytest.mark.parametrize("need", [None, ("k", "v", "key_bias")], ids=str)
@pytest.mark.parametrize(
    "terms", [{"softcap": 20.0}, {"key_bias": "some absent"}, {"softcap": 20.0, "key_bias": "weights"}], ids=str
)
def test_the_same_bits_every_time_with_score_terms(terms: dict[str, Any], need: Any, d: int) -> None:
    if "key_bias" not in terms and need:
        need = need[:2]
    check_same_bits_with_terms(terms, d, {WHOLE}, need)


@both_dtypes
@both_modes
@pytest.mark.parametrize(("d", "e"), [(64, 64), (128, 128), (96, 96), (40, 64), (128, 8), (72, 120)])
def test_it_takes_what_it_is_for(dtype: str, d: int, e: int, deterministic: bool) -> None:
    """Lengths around those of blocks, more queries than keys and fewer, one row, and more blocks of keys than CTAs."""
    for options in BANDS:
        for heads, m, n in ((3, 333, 517), (2, 517, 333), (1, 1, 129), (2, 257, 1), (45, 130, 300), (1, 70, 17100)):
            case = Case(dtype, (heads, m, d), (heads, n, d), (heads, n, e), None, options, {}, "normal", m)
            with hopper_kernels("name") as launched:
                check_backward(BACKEND, case, "sm90", None, True, m % 2 == 1, deterministic=deterministic)
            assert takes(launched), (options, heads, m, n)


@both_modes
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("options", BANDS, ids=str)
@pytest.mark.parametrize(
    ("q", "k", "grouped"),
    [
        ((2, 6), (2, 2), True),
        ((4,), (1,), True),
        ((3, 2), (1, 2), False),
        ((5, 3), (), False),
        ((2, 3, 2), (2, 1, 2), False),
    ],
    ids=str,
)
def test_dk_and_dv_are_summed_over_the_axes_that_k_and_v_lack(
    q: tuple[int, ...], k: tuple[int, ...], grouped: bool, options: dict[str, Any], d: int, deterministic: bool
) -> None:
    options = options | ({"grouped_heads": True} if grouped else {})
    case = Case("bfloat16", (*q, 200, d), (*k, 270, d), (*k, 270, d), None, options, {}, "normal", 11)
    with hopper_kernels("name") as launched:
        check_backward(BACKEND, case, "sm90", None, True, True, deterministic=deterministic)
    assert takes(launched)


@both_modes
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    ("m", "n", "options"),
    [
        (700, 200, {"causal": True, "align": "bottom-right"}),  # the first rows see no key
        (200, 700, {"causal": True, "align": "top-left"}),  # no row sees the last keys
        (400, 300, {"window": (10, 10), "align": -350}),
        (300, 400, {"window": (0, 0), "align": 500}),  # nobody sees anything
    ],
    ids=str,
)
def test_rows_without_keys_and_keys_without_rows(
    m: int, n: int, options: dict[str, Any], d: int, deterministic: bool
) -> None:
    case = Case("float16", (3, m, d), (3, n, d), (3, n, d), None, options, {}, "normal", 12)
    with hopper_kernels("name") as launched:
        check_backward(BACKEND, case, "sm90", None, True, True, deterministic=deterministic)
    assert takes(launched)


@both_modes
@pytest.mark.parametrize("heads", [(7,), (7, 2)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_heads_in_several_sections(
    causal: bool, heads: tuple[int, ...], deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block of keys is somebody's: one head of keys a section, two in the last one."""
    m, n, d = 531, 403, 64
    monkeypatch.setattr(hopper, "BACKWARD_SECTION_BYTES", m * (2 * 2 * d + 4 * d) * math.prod(heads[1:]))
    plan_sm90.backward.cache_clear()
    options = {"causal": causal, "align": 0} if causal else {}
    shared = (*heads[:1], *(1,) * len(heads[1:]))
    case = Case("float16", (*heads, m, d), (*shared, n, d), (*shared, n, d), None, options, {}, "normal", 17)
    with hopper_kernels("name") as launched:
        check_backward(BACKEND, case, "sm90", None, True, True, deterministic=deterministic)
    assert takes(launched)


@both_modes
@pytest.mark.parametrize("d", [64, 128])
def test_an_infinite_key_without_weight_has_no_gradient(d: int, deterministic: bool) -> None:
    check_infinite_key(d, {WHOLE}, deterministic=deterministic)


@both_modes
def test_arrays_as_callers_have_them(deterministic: bool) -> None:
    """Axes swapped, rows apart, results as well."""
    for layout in (Layout((1, 0, 2)), Layout(pad=8), Layout(steps=(1, 2, 1)), Layout((1, 0, 2), pad=16)):
        for d in (64, 96):
            names = ("q", "k", "v", "do", "dq", "dk", "dv")
            shapes = ((4, 300, d), (4, 270, d), (4, 270, d))
            case = Case("bfloat16", *shapes, None, {}, dict.fromkeys(names, layout), "normal", 13)
            with hopper_kernels("name") as launched:
                check_backward(BACKEND, case, "sm90", None, True, False, deterministic=deterministic)
            assert takes(launched)


@pytest.mark.parametrize("d", [64, 96, 128])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "options"),
    [(40, 40, {}), (40, 40, {"causal": True}), (48, 12, {"causal": True}), (40, 40, {"window": (100, 20)})],
    ids=str,
)
def test_the_same_bits_every_time(d: int, heads: int, kv_heads: int, options: dict[str, Any]) -> None:
    """Whichever CTA takes a block of keys, and whenever its parts of dq come."""
    rng = np.random.default_rng(1)
    grouped = {"grouped_heads": True} if kv_heads < heads else {}
    arrays = [normal(rng, (count, 900, d), "bfloat16") for count in (heads, kv_heads, kv_heads, heads)]
    check_same_bits(arrays, options | grouped, {WHOLE}, [{}] * 200)


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[hopper.KeyShares]]:
    """CTAs share the query heads of a group, and the last blocks of keys, however few steps they have: what of both in
    the problems of a test."""
    found: list[hopper.KeyShares] = []
    decide = hopper._key_shares

    def recorded(*described: Any) -> hopper.KeyShares:
        found.append(decide(*described))
        return found[-1]

    monkeypatch.setattr(hopper, "_key_shares", recorded)
    for name in ("WORTH_SHARES", "WORTH_PARTS"):
        monkeypatch.setattr(hopper, name, 0)
    with planned_anew(hopper.backward, plan_sm90.backward):
        yield found


@both_modes
@pytest.mark.parametrize("d", [64, 96, 128])
@pytest.mark.parametrize(
    ("q", "k", "grouped"), [((5, 3), (), False), ((2, 6), (2, 2), True), ((2, 3, 2), (2, 1, 2), False)], ids=str
)
@pytest.mark.parametrize("options", BANDS[1:], ids=str)
def test_ctas_share_sums_of_dk_and_dv(
    q: tuple[int, ...],
    k: tuple[int, ...],
    grouped: bool,
    options: dict[str, Any],
    d: int,
    deterministic: bool,
    shares: list[hopper.KeyShares],
) -> None:
    options = options | ({"grouped_heads": True} if grouped else {})
    for terms in ({}, {"key_bias": (300,)}) if d != 96 else ({},):
        case = Case(
            "float16", (*q, 333, d), (*k, 300, d), (*k, 300, d), terms.get("key_bias"), options, {}, "normal", 21
        )
        with hopper_kernels("name") as launched:
            check_backward(BACKEND, case, "sm90", None, True, True, deterministic=deterministic)
        assert taken(launched) == {WHOLE} and all(each.by_position for each in shares)
        check_counters()


@both_modes
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("options", [*BANDS, {"softcap": 5.0}], ids=str)
def test_the_last_blocks_of_keys_are_taken_in_parts(
    options: dict[str, Any], d: int, deterministic: bool, shares: list[hopper.KeyShares]
) -> None:
    """As many blocks for each CTA; with 70 rows, some parts have none."""
    heads = devices.multiprocessors(0)
    for rows in (200, 70):
        shapes = ((heads, rows, d), (heads, 200, d), (heads, 200, d))
        case = Case("bfloat16", *shapes, None, options, {}, "normal", 24)
        with hopper_kernels("name") as launched:
            check_backward(BACKEND, case, "sm90", None, True, True, deterministic=deterministic)
        assert taken(launched) == {WHOLE}
        check_counters()
    ends_late = deterministic or options in ({}, {"softcap": 5.0})
    assert {each.tiles for each in shares} == {hopper.LAST_TILES if ends_late else 0}


@pytest.mark.parametrize("d", [64, 96, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(48, 12), (40, 40)])
def test_shared_sums_have_the_same_bits_every_time(
    d: int, heads: int, kv_heads: int, shares: list[hopper.KeyShares]
) -> None:
    """With more blocks of keys than CTAs."""
    rng = np.random.default_rng(22)
    arrays = [normal(rng, (count, 900, d), "bfloat16") for count in (heads, kv_heads, kv_heads, heads)]
    check_same_bits(arrays, {"causal": True, "grouped_heads": heads != kv_heads}, {WHOLE}, [{}] * 200)
    assert all(each.sums for each in shares)


@both_modes
@pytest.mark.parametrize("size", [1.0, 3000.0])
def test_counters_are_0_again(size: float, deterministic: bool) -> None:
    """Of a stream, whatever was counted there, also that rows need care as their scores are large."""
    rng = np.random.default_rng(2)
    with hopper_kernels("name") as launched:
        for heads, m, n, d in ((3, 1000, 700, 64), (1, 5000, 300, 128), (20, 130, 2000, 128), (2, 64, 64, 96)):
            q, k, v, do = (put(BACKEND, normal(rng, (heads, rows, d), "float16")) for rows in (m, n, n, m))
            q *= np.float16(size)
            o, lse = cuflash.attention(q, k, v, return_lse=True)
            cuflash.attention_backward(do, q, k, v, o, lse, deterministic=deterministic)
            check_counters()
    assert takes(launched)


@both_modes
@pytest.mark.parametrize("own_workspace", [True, False])
@pytest.mark.parametrize("d", [64, 128])
def test_replays_of_a_graph(d: int, own_workspace: bool, deterministic: bool) -> None:
    check_replays_of_a_graph(d, {WHOLE}, own_workspace, deterministic=deterministic)


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("float32", {"dtype": "float32"}),
        ("features that are no whole 16 bytes", {"q": (3, 200, 36), "k": (3, 270, 36)}),
        ("queries that are broadcast", {"q": (200, 64)}),
        ("k and v that are broadcast otherwise", {"k": (270, 64)}),
        ("rows backwards", {"layouts": {"k": Layout(steps=(1, -1, 1))}}),
        ("q off its alignment", {"layouts": {"q": Layout(shift=1)}}),
        ("dk off its alignment", {"layouts": {"dk": Layout(shift=1)}}),
        ("columns of dv apart", {"layouts": {"dv": Layout(steps=(1, 1, 2))}}),
    ],
)
def test_others_go_to_the_portable_kernels(what: str, changes: dict[str, Any]) -> None:
    case = Case("float16", (3, 200, 64), (3, 270, 64), (3, 270, 64), None, {}, {}, "normal", 14)
    with hopper_kernels("name") as launched:
        check_backward(BACKEND, replace(case, **changes), "sm80", None, True, True)
    assert not takes(launched), what


@pytest.mark.parametrize("d", [64, 96, 128])
@pytest.mark.parametrize("need", [("q", "k"), ("q", "v")], ids=str)
def test_dq_beside_one_other_gradient_takes_a_kernel_of_its_own(need: tuple[str, ...], d: int) -> None:
    for options in BANDS:
        case = Case("float16", (3, 333, d), (3, 517, d), (3, 517, d), None, options, {}, "normal", 15)
        with hopper_kernels("name") as launched:
            check_backward(BACKEND, case, "sm90", need, True, True)
        assert takes(launched) and DQ in taken(launched)


@both_modes
@pytest.mark.parametrize("d", [64, 96, 128])
@pytest.mark.parametrize("terms", TERMS_OF_LARGE_SCORES, ids=str)
def test_scores_beyond_the_fraction_of_a_float(terms: dict[str, float], d: int, deterministic: bool) -> None:
    check_beyond_the_fraction(terms, d, {WHOLE}, deterministic=deterministic)


@both_dtypes
@both_modes
@pytest.mark.parametrize("d", [96, 128])
@pytest.mark.parametrize("options", BANDS, ids=str)
def test_lse_and_delta_of_any_size_that_products_take_off(
    dtype: str, d: int, options: dict[str, Any], deterministic: bool
) -> None:
    """Up to where a row needs care, and beyond; and a scale as small as it may be, with rows that have no keys."""
    rng = np.random.default_rng(20)
    q, k, v, do = (normal(rng, (2, rows, d), dtype) for rows in (300, 200, 200, 300))
    most = np.abs(q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2)).max() / math.sqrt(d)

    def times(x: np.ndarray, factor: float) -> np.ndarray:
        return (x.astype(np.float64) * factor).astype(x.dtype)

    calls = [(times(q, lse / most), do, {}) for lse in (2000, 2800, 2900, 40000)]
    calls += [(q, times(do, size), {}) for size in (1e-4, 3000)] + [(q, do, {"scale": 1e-29})]
    with hopper_kernels("name") as launched:
        for of_q, of_do, scaled in calls:
            check(BACKEND, of_q, k, v, of_do, family="sm90", deterministic=deterministic, **options, **scaled)
    assert taken(launched) == {WHOLE}


@both_modes
@pytest.mark.parametrize("d", [64, 96, 128])
@pytest.mark.parametrize("what", ["lse is large", "delta is infinite"])
def test_a_large_row_disturbs_no_other(what: str, d: int, deterministic: bool) -> None:
    """Neither in its call, which takes lse and delta off otherwise, nor in the next."""
    m, n, row = 300, 200, 70
    rng = np.random.default_rng(18)
    q, k, v, do = (normal(rng, (2, rows, d), "float16") for rows in (m, n, n, m))
    dlse = np.zeros((2, m), np.float32)
    mode: dict[str, Any] = {"deterministic": deterministic}
    with hopper_kernels("name") as launched:
        usual = check(BACKEND, q, k, v, do, dlse, family="sm90", **mode)
        check_counters()
        of_large = q.copy()
        if what == "lse is large":
            of_large[0, row] *= 5000
        else:
            dlse[0, row] = np.inf
        got = run(BACKEND, of_large, k, v, do, dlse, **mode)
        check_counters()
        again = check(BACKEND, q, k, v, do, np.zeros_like(dlse), family="sm90", **mode)
    assert takes(launched)
    names = ("dq", "dk", "dv")
    same = names if deterministic else names[1:]
    assert all(getattr(usual, name).tobytes() == getattr(again, name).tobytes() for name in same)
    for name, wanted in expect(q[1:], k[1:], v[1:], do[1:], family="sm90").items():
        wanted.check(getattr(got, name)[1:])
    others = np.arange(m) != row
    expect(q[:1, others], k[:1], v[:1], do[:1, others], family="sm90")["dq"].check(got.dq[:1, others])
    of_head = expect(of_large[:1], k[:1], v[:1], do[:1], family="sm90")
    if what == "lse is large":
        for name in names:
            of_head[name].check(getattr(got, name)[:1])
    else:
        of_head["dv"].check(got.dv[:1])
        assert not np.isfinite(got.dq[0, row]).any() and not np.isfinite(got.dk[0]).any()
