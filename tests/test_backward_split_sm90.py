"""Gradients by the two kernels of the sm90 family for more features than one kernel has room for, and for some of the
gradients alone, on a GPU, held to dense float64.

Lengths that no block divides, sums over heads, rows and keys that see nothing; the same bits each time; the counter at
0 after each call; and what they do not take goes to the portable kernels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from backends import Layout, normal
from checks import (
    check_backward,
    compiled_kernels,  # noqa: F401 - a fixture
)
from gpu_cases import Case, cases
from hopper_gradients import (
    BANDS,
    DKV,
    DQ,
    SCORE_TERMS,
    TERMS_OF_LARGE_SCORES,
    WHOLE,
    aligned,
    both_dtypes,
    check_beyond_the_fraction,
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

pytestmark = pytest.mark.gpu
BOTH = frozenset({DQ, DKV})
NEEDS = (None, ("q",), ("k", "v"), ("v",), ("q", "k"))
FEATURES = ((256, 256), (192, 192), (192, 128), (136, 8), (64, 200), (248, 136))


def wanted_of(need: tuple[str, ...] | None) -> set[str]:
    need = need or ("q", "k", "v")
    return ({DQ} if "q" in need else set()) | ({DKV} if "k" in need or "v" in need else set())


def wide(case: Case) -> Case:
    """The case with 120 more features, up to 256."""
    shapes = {
        name: (*shape[:-1], min(256, shape[-1] + 120)) for name, shape in (("q", case.q), ("k", case.k), ("v", case.v))
    }
    return replace(in_16_bits(case), **shapes)


@examples(400)
@given(
    case=cases("sm80", with_layouts=False).map(plain).map(wide),
    has_dlse=st.booleans(),
    need=st.sampled_from(NEEDS),
)
def test_drawn_calls(case: Case, has_dlse: bool, need: tuple[str, ...] | None) -> None:
    with hopper_kernels("name") as launched:
        check_backward(BACKEND, case, "sm90", need, True, has_dlse)
    event(f"taken: {len(taken(launched))}")


@both_dtypes
@pytest.mark.parametrize("need", NEEDS, ids=str)
@pytest.mark.parametrize(("d", "e"), FEATURES)
def test_they_take_what_they_are_for(dtype: str, d: int, e: int, need: tuple[str, ...] | None) -> None:
    """Lengths around those of blocks, more queries than keys and fewer, one row, and more blocks of keys than CTAs."""
    for options in BANDS:
        for heads, m, n in ((3, 333, 517), (2, 517, 333), (1, 1, 129), (2, 257, 1), (30, 66, 270), (1, 70, 8500)):
            case = Case(dtype, (heads, m, d), (heads, n, d), (heads, n, e), None, options, {}, "normal", m)
            with hopper_kernels("name") as launched:
                check_backward(BACKEND, case, "sm90", need, True, m % 2 == 1)
            assert taken(launched) == wanted_of(need), (options, heads, m, n)


@pytest.mark.parametrize("d", [64, 96, 128, 40])
def test_dq_alone_has_a_kernel_at_any_number_of_features(d: int) -> None:
    for options in BANDS:
        case = Case("float16", (3, 333, d), (3, 517, d), (3, 517, d), None, options, {}, "normal", d)
        with hopper_kernels("name") as launched:
            check_backward(BACKEND, case, "sm90", ("q",), True, True)
        assert taken(launched) == {DQ}


@pytest.mark.parametrize(("d", "e"), [(256, 256), (192, 128)])
@pytest.mark.parametrize("options", BANDS, ids=str)
@pytest.mark.parametrize(
    ("q", "k", "v", "grouped"),
    [
        ((2, 6), (2, 2), (2, 2), True),
        ((4,), (1,), (1,), True),
        ((3, 2), (1, 2), (1, 2), False),
        ((5, 3), (), (), False),
        ((2, 3, 2), (2, 1, 2), (2, 1, 2), False),
        ((), (3,), (3,), False),
    ],
    ids=str,
)
def test_gradients_are_summed_over_the_axes_that_their_arrays_lack(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], grouped: bool, options: dict[str, Any], d: int, e: int
) -> None:
    options = options | ({"grouped_heads": True} if grouped else {})
    case = Case("bfloat16", (*q, 200, d), (*k, 270, d), (*v, 270, e), None, options, {}, "normal", 11)
    with hopper_kernels("name") as launched:
        check_backward(BACKEND, case, "sm90", None, True, True)
    assert taken(launched) == BOTH


@pytest.mark.parametrize("need", [None, ("k",), ("v",), ("q", "k")], ids=str)
@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize(("q", "k", "v"), [((3,), (), (3,)), ((3,), (3,), ()), ((2, 1), (1, 3), (2, 3))], ids=str)
def test_sums_over_positions_that_share_one_of_k_and_v_are_the_portable_kernels(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], d: int, need: tuple[str, ...] | None
) -> None:
    """A CTA holds a block of both while it sums. Where nothing is summed they may be broadcast as they are, and q, too,
    above 128 features."""
    options = {"causal": True, "align": 30}
    case = Case("bfloat16", (*q, 200, d), (*k, 270, d), (*v, 270, d), None, options, {}, "normal", 11)
    batch = np.broadcast_shapes(q, k, v)
    summed = [shape for name, shape in (("k", k), ("v", v)) if name in (need or "kv") and shape != batch]
    portable = bool(summed) or (d == 64 and q != batch)
    with hopper_kernels() as launched:
        check_backward(BACKEND, case, "sm80" if portable else "sm90", need, True, True)
    assert ("sm80" in launched) == portable


@pytest.mark.parametrize("d", [192, 256])
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
def test_rows_without_keys_and_keys_without_rows(m: int, n: int, options: dict[str, Any], d: int) -> None:
    for heads, need in ((3, None), (40, ("k", "v"))):
        case = Case("float16", (heads, m, d), (heads, n, d), (heads, n, d), None, options, {}, "normal", 12)
        with hopper_kernels("name") as launched:
            check_backward(BACKEND, case, "sm90", need, True, True)
        assert taken(launched) == wanted_of(need)


@pytest.mark.parametrize("d", [192, 256])
def test_an_infinite_key_without_weight_has_no_gradient(d: int) -> None:
    check_infinite_key(d, {DKV}, need=("k", "v"))


def test_arrays_as_callers_have_them() -> None:
    """Axes swapped, rows apart, results as well, which need no alignment."""
    inputs, results = ("q", "k", "v", "do"), ("dq", "dk", "dv")
    for layout in (Layout((1, 0, 2)), Layout(pad=8), Layout(steps=(1, 2, 1)), Layout((1, 0, 2), pad=16)):
        for d in (192, 200):
            shapes = ((4, 300, d), (4, 270, d), (4, 270, d))
            case = Case("bfloat16", *shapes, None, {}, dict.fromkeys(inputs + results, layout), "normal", 13)
            with hopper_kernels("name") as launched:
                check_backward(BACKEND, case, "sm90", None, True, False)
            assert taken(launched) == BOTH
    for layout in (Layout(shift=1), Layout(steps=(1, 1, 2)), Layout(steps=(1, -1, 1))):
        shapes = ((4, 300, 136), (4, 270, 136), (4, 270, 256))
        case = Case("bfloat16", *shapes, None, {}, dict.fromkeys(results, layout), "normal", 13)
        with hopper_kernels("name") as launched:
            check_backward(BACKEND, case, "sm90", None, True, False)
        assert taken(launched) == BOTH


@pytest.mark.parametrize(("d", "e"), [(192, 128), (192, 192), (256, 256)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "options"),
    [(40, 40, {}), (40, 40, {"causal": True}), (48, 12, {"causal": True}), (40, 40, {"window": (100, 20)})],
    ids=str,
)
def test_the_same_bits_every_time(d: int, e: int, heads: int, kv_heads: int, options: dict[str, Any]) -> None:
    """Whichever CTA takes a tile. Also where any order would do: they have but one."""
    rng = np.random.default_rng(1)
    grouped = {"grouped_heads": True} if kv_heads < heads else {}
    shapes = [(heads, 900, d), (kv_heads, 900, d), (kv_heads, 900, e), (heads, 900, e)]
    arrays = [normal(rng, shape, "bfloat16") for shape in shapes]
    modes = [{"deterministic": turn % 2 == 0} for turn in range(100)]
    check_same_bits(arrays, options | grouped, BOTH, modes)


@pytest.mark.parametrize("own_workspace", [True, False])
def test_replays_of_a_graph(own_workspace: bool) -> None:
    check_replays_of_a_graph(192, BOTH, own_workspace)


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("a softcap near the end of float32", {"options": {"softcap": 1e21}}),
        ("float32", {"dtype": "float32"}),
        ("rows that do not begin at whole 16 bytes", {"q": (3, 200, 132), "k": (3, 270, 132)}),
        ("rows backwards", {"layouts": {"k": Layout(steps=(1, -1, 1))}}),
        ("q off its alignment", {"layouts": {"q": Layout(shift=1)}}),
    ],
)
def test_others_go_to_the_portable_kernels(what: str, changes: dict[str, Any]) -> None:
    case = Case("float16", (3, 200, 192), (3, 270, 192), (3, 270, 192), None, {}, {}, "normal", 14)
    with hopper_kernels("name") as launched:
        check_backward(BACKEND, replace(case, **changes), "sm80", None, True, True)
    assert not taken(launched), what


@examples(400)
@given(
    case=cases("sm80", with_layouts=False).map(aligned).map(wide),
    has_dlse=st.booleans(),
    need=gradients_needed,
)
def test_drawn_calls_with_score_terms(case: Case, has_dlse: bool, need: tuple[str, ...] | None) -> None:
    with hopper_kernels("name") as launched:
        check_backward(BACKEND, case, "sm90", need, True, has_dlse)
    event(f"taken: {len(taken(launched))}")


@both_dtypes
@pytest.mark.parametrize(("d", "e"), [(256, 256), (192, 192), (192, 128)])
@pytest.mark.parametrize("terms", SCORE_TERMS, ids=str)
def test_score_terms(dtype: str, terms: dict[str, Any], d: int, e: int) -> None:
    check_terms_of_lengths(dtype, d, e, terms, BOTH)


@pytest.mark.parametrize("d", [192, 256])
@pytest.mark.parametrize("options", BANDS, ids=str)
@pytest.mark.parametrize(
    ("q", "k", "bias", "grouped"),
    [
        ((3, 4), (3, 4), (), False),
        ((3, 4), (3, 4), (3, 1), False),
        ((5, 3), (), (3,), False),
        ((2, 6), (2, 2), (2, 6), True),
        ((2, 6), (2, 2), (6,), True),
        ((2, 3, 2), (2, 1, 2), (3, 1), False),
    ],
    ids=str,
)
def test_dkey_bias_is_summed_over_the_axes_that_key_bias_lacks(
    q: tuple[int, ...], k: tuple[int, ...], bias: tuple[int, ...], grouped: bool, options: dict[str, Any], d: int
) -> None:
    """Whichever dk and dv are summed over."""
    check_sums_of_dkey_bias(q, k, bias, grouped, options, d, BOTH)


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize(
    ("q", "k", "v"), [((), (3,), (3,)), ((3,), (), ()), ((2, 1), (2, 3), (2, 3)), ((2, 3), (1, 3), (1, 3))], ids=str
)
def test_gradients_are_summed_over_the_axes_that_their_arrays_lack_with_score_terms(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], options: dict[str, Any]
) -> None:
    for bias in ((), (3,)):
        shapes = ((*q, 200, 192), (*k, 270, 192), (*v, 270, 128))
        case = Case("bfloat16", *shapes, (*bias, 270), options | BANDS[1], {}, "normal", 11)
        with hopper_kernels("name") as launched:
            check_backward(BACKEND, case, "sm90", None, True, True)
        assert taken(launched) == BOTH


@pytest.mark.parametrize("d", [192, 256])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"window": (0, 0), "align": 150}], ids=str)
def test_without_keys_that_have_a_weight(d: int, options: dict[str, Any]) -> None:
    check_without_weight(d, options, BOTH)


@pytest.mark.parametrize("d", [192, 256])
@pytest.mark.parametrize("terms", [*SCORE_TERMS[4:], {"softcap": 2.0}], ids=str)
def test_some_of_the_gradients_with_score_terms(terms: dict[str, Any], d: int) -> None:
    for need in (("q",), ("k",), ("v",), ("key_bias",), ("q", "key_bias"), ("q", "k", "v")):
        if "key_bias" in need and "key_bias" not in terms:
            continue
        kernels = ({DQ} if "q" in need else set()) | ({DKV} if {*need} - {"q"} else set())
        for q, k, grouped in (((3,), (3,), False), ((6,), (2,), True)):
            options = terms | BANDS[1] | ({"grouped_heads": True} if grouped else {})
            check_terms("float16", (*q, 140, d), (*k, 200, d), (), options, need, kernels=frozenset(kernels))


@pytest.mark.parametrize("d", [40, 64, 96, 128])
@pytest.mark.parametrize("terms", SCORE_TERMS, ids=str)
def test_dq_without_dk_or_dv_has_a_kernel_with_score_terms(terms: dict[str, Any], d: int) -> None:
    for need, kernels in ((("q",), {DQ}), (("q", "k"), {DQ, WHOLE}), (("q", "v"), {DQ, WHOLE})):
        for band in BANDS:
            check_terms("float16", (2, 140, d), (2, 200, d), (2,), terms | band, need, kernels=frozenset(kernels))


@pytest.mark.parametrize("d", [192, 256])
@pytest.mark.parametrize(
    "terms", [{"softcap": 20.0}, {"key_bias": "some absent"}, {"softcap": 20.0, "key_bias": "weights"}], ids=str
)
def test_the_same_bits_every_time_with_score_terms(terms: dict[str, Any], d: int) -> None:
    check_same_bits_with_terms(terms, d, BOTH)


@pytest.mark.parametrize("d", [192, 256])
@pytest.mark.parametrize("terms", TERMS_OF_LARGE_SCORES, ids=str)
def test_scores_beyond_the_fraction_of_a_float(terms: dict[str, float], d: int) -> None:
    check_beyond_the_fraction(terms, d, BOTH)
