"""Gradients by the kernel of the sm90 family that computes all of them, on a GPU, held to dense float64.

What it takes is drawn and listed, with lengths that no block divides, sums over heads, and rows and keys that see
nothing; deterministic it gives the same bits each time; it leaves its counters at 0; and what it does not take goes to
the portable kernels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from backends import GPU, Layout, bits_dtype, dtype_of, normal, put
from checks import (
    check_backward,
    compiled_kernels,  # noqa: F401 - a fixture
    expect,
    run,
)
from gpu_cases import Case, cases
from hypothesis import event, given
from hypothesis import strategies as st
from on_gpu import examples, hopper_kernels, plain
from on_gpu import needs as gradients_needed

import cuflash
from cuflash import needs, tiles

pytestmark = pytest.mark.gpu
BACKEND = GPU
OWN = f"{tiles.FUSED}_sm90"
"""How the names of its variants begin."""

both_modes = pytest.mark.parametrize("deterministic", [True, False], ids=["in order", "unordered"])
both_dtypes = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
BANDS = (
    {},
    {"causal": True, "align": "bottom-right"},
    {"window": (130, 20), "align": "top-left"},
)


def takes(launched: list[str]) -> bool:
    """Whether the kernel is among the launched."""
    return any(name.startswith(OWN) for name in launched)


def aligned(case: Case) -> Case:
    """The case with rows of whole vectors, whatever its score terms."""
    d, e = (-(-length // 8) * 8 for length in (case.q[-1], case.v[-1] or 8))
    return replace(case, q=(*case.q[:-1], d), k=(*case.k[:-1], d), v=(*case.v[:-1], e))


def in_16_bits(case: Case) -> Case:
    """The case in a dtype and with features that it takes."""
    dtype = case.dtype if case.dtype == "bfloat16" else "float16"
    shapes = {name: (*shape[:-1], min(128, shape[-1])) for name, shape in (("q", case.q), ("k", case.k), ("v", case.v))}
    values = "normal" if case.values == "small" and dtype != case.dtype else case.values
    options = {name: value for name, value in case.options.items() if name != "precision"}
    return replace(case, dtype=dtype, options=options, values=values, **shapes)


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


SCORE_TERMS: tuple[dict[str, Any], ...] = (
    {"softcap": 0.5},
    {"softcap": 30.0},
    {"scale": -0.1},
    {"scale": 0.0},
    {"key_bias": "weights"},
    {"key_bias": "some absent"},
    {"softcap": 2.0, "key_bias": "some absent"},
)
"""Each series of tanh, a scale alone, weights with and without absent keys, both terms."""


def weights(rng: np.random.Generator, shape: tuple[int, ...], what: str) -> np.ndarray:
    """A key_bias."""
    values = rng.standard_normal(shape).astype(np.float32)
    if what == "some absent":
        values[..., ::7] = -np.inf
        values[..., : shape[-1] // 3] = -np.inf  # whole warps' keys, too
    return values


def check_terms(
    dtype: str,
    q: tuple[int, ...],
    k: tuple[int, ...],
    bias: tuple[int, ...],
    options: dict[str, Any],
    need: tuple[str, ...] | None = None,
    wide: float = 1.0,
    e: int | None = None,
    kernels: frozenset[str] = frozenset({OWN}),
) -> None:
    """The gradients of a call with score terms, in order and not, of values of ``e`` features; `key_bias` among the
    options names `weights`. ``kernels``: how the names of those begin that give gradients."""
    rng = np.random.default_rng(21)
    e = e or q[-1]
    x, y, z, do = (normal(rng, shape, dtype) for shape in (q, k, (*k[:-1], e), (*q[:-1], e)))
    x = (wide * x.astype(np.float32)).astype(x.dtype)
    dlse = rng.standard_normal(q[:-1]).astype(np.float32)
    options = dict(options)
    if "key_bias" in options:
        options["key_bias"] = weights(rng, (*bias, k[-2]), options["key_bias"])
    wanted = expect(x, y, z, do, dlse, family="sm90", **options)
    names = ("q", "k", "v") + (("key_bias",) if "key_bias" in options else ())
    options |= {"key_bias": put(BACKEND, options["key_bias"])} if "key_bias" in options else {}
    x, y, z, do, dlse = (put(BACKEND, array) for array in (x, y, z, do, dlse))
    for deterministic in (True, False):
        with hopper_kernels("name") as launched:
            o, lse = cuflash.attention(x, y, z, return_lse=True, **options)
            more = {"dlse": dlse, "need": need, "deterministic": deterministic, **options}
            got = cuflash.attention_backward(do, x, y, z, o, lse, **more)
        main = [name for name in launched if "_backward_" in name]
        assert all(any(name.startswith(kernel) for name in main) for kernel in kernels), launched
        assert all(name.startswith(tuple(kernels)) for name in main), launched
        for name, gradient in zip(names, got, strict=True):
            assert (gradient is None) == (need is not None and name not in need)
            if gradient is not None:
                wanted[f"d{name}"].check(BACKEND.get(gradient))


@both_dtypes
@pytest.mark.parametrize("d", [64, 96, 128])
@pytest.mark.parametrize("terms", SCORE_TERMS, ids=str)
def test_score_terms(dtype: str, terms: dict[str, Any], d: int) -> None:
    """Lengths that no block divides, a block of keys and several, scores beyond each series' limit."""
    for band in BANDS:
        for heads, m, n, wide in ((2, 200, 300, 1.0), (2, 70, 90, 4.0), (1, 1, 300, 1.0)):
            check_terms(dtype, (heads, m, d), (heads, n, d), (heads,), terms | band, wide=wide)


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
    """Whichever dk and dv are summed over, with a softcap and without."""
    options = options | {"key_bias": "some absent"} | ({"grouped_heads": True} if grouped else {})
    for more in ({}, {"softcap": 3.0}):
        check_terms("bfloat16", (*q, 100, d), (*k, 150, d), bias, options | more)


@both_modes
@pytest.mark.parametrize("d", [64, 128])
def test_without_keys_that_have_a_weight(d: int, deterministic: bool) -> None:
    """Gradients are 0, and none is NaN: heads without any such key, and keys that no row sees."""
    rng = np.random.default_rng(22)
    q, k, v, do = (normal(rng, (3, 200, d), "float16") for _ in range(4))
    key_bias = rng.standard_normal((3, 200)).astype(np.float32)
    key_bias[1] = -np.inf
    for options in ({}, {"softcap": 5.0}, {"window": (0, 0), "align": 150}):
        arrays = [put(BACKEND, x) for x in (q, k, v)]
        more = {"key_bias": put(BACKEND, key_bias), **options}
        with hopper_kernels("name") as launched:
            o, lse = cuflash.attention(*arrays, return_lse=True, **more)
            got = cuflash.attention_backward(put(BACKEND, do), *arrays, o, lse, deterministic=deterministic, **more)
        assert takes(launched)
        wanted = expect(q, k, v, do, family="sm90", key_bias=key_bias, **options)
        for name, gradient in zip(("dq", "dk", "dv", "dkey_bias"), map(BACKEND.get, got), strict=True):
            wanted[name].check(gradient)
            assert not gradient[1].any(), name


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
    """With sums of dkey_bias over heads, too."""
    rng = np.random.default_rng(23)
    q, k, v, do = (put(BACKEND, normal(rng, (40, 900, d), "bfloat16")) for _ in range(4))
    options: dict[str, Any] = {"causal": True, **terms}
    if "key_bias" in terms:
        options["key_bias"] = put(BACKEND, weights(rng, (900,), terms["key_bias"]))
    elif need:
        need = need[:2]
    with hopper_kernels("name") as launched:
        o, lse = cuflash.attention(q, k, v, return_lse=True, **options)

        def bits() -> list[Any]:
            found = cuflash.attention_backward(do, q, k, v, o, lse, need=need, **options)
            return [x.view(bits_dtype(x.dtype)) for x in found if x is not None]

        first = bits()
        for _ in range(50):
            assert all(bool((x == y).all()) for x, y in zip(first, bits(), strict=True))
    assert takes(launched)


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
@pytest.mark.parametrize("d", [64, 128])
def test_an_infinite_key_without_weight_has_no_gradient(d: int, deterministic: bool) -> None:
    """Rows beyond the length, which are zeros in shared memory, have none for it either. The last block is cut."""
    rng = np.random.default_rng(13)
    q, k, v, do = (normal(rng, (1, 70, d), "float16") for _ in range(4))
    q[..., 5] = -1 - abs(q[..., 5])
    others = np.delete(np.arange(70), 33)
    wanted = expect(q, k[:, others], v[:, others], do, family="sm90")
    k[:, 33, 5] = np.inf
    arrays = [put(BACKEND, x) for x in (q, k, v)]
    with hopper_kernels("name") as launched:
        o, lse = cuflash.attention(*arrays, return_lse=True)
        gradients = cuflash.attention_backward(put(BACKEND, do), *arrays, o, lse, deterministic=deterministic)
    assert takes(launched)
    for name, gradient in zip(("dk", "dv"), gradients[1:], strict=True):
        got = BACKEND.get(gradient)
        assert not got[:, 33].any(), name
        wanted[name].check(got[:, others])


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
    shapes = [(count, 900, d) for count in (heads, kv_heads, kv_heads, heads)]
    q, k, v, do = (put(BACKEND, normal(rng, shape, "bfloat16")) for shape in shapes)
    bits = bits_dtype(dtype_of("bfloat16"))
    with hopper_kernels("name") as launched:
        o, lse = cuflash.attention(q, k, v, return_lse=True, **options, **grouped)
        first = [x.view(bits) for x in cuflash.attention_backward(do, q, k, v, o, lse, **options, **grouped)]
        for _ in range(200):
            again = cuflash.attention_backward(do, q, k, v, o, lse, **options, **grouped)
            assert all(bool((x == y.view(bits)).all()) for x, y in zip(first, again, strict=True))
    assert takes(launched)


@both_modes
def test_counters_are_0_again(deterministic: bool) -> None:
    """Of a stream, whatever was counted there, and of a caller's workspace."""
    rng = np.random.default_rng(2)
    with hopper_kernels("name") as launched:
        for heads, m, n, d in ((3, 1000, 700, 64), (1, 5000, 300, 128), (20, 130, 2000, 128), (2, 64, 64, 96)):
            q, k, v, do = (put(BACKEND, normal(rng, (heads, rows, d), "float16")) for rows in (m, n, n, m))
            o, lse = cuflash.attention(q, k, v, return_lse=True)
            cuflash.attention_backward(do, q, k, v, o, lse, deterministic=deterministic)
            assert all(not x.any() for x in needs._zeros.values())
    assert takes(launched)


@both_modes
@pytest.mark.parametrize("own_workspace", [True, False])
def test_replays_of_a_graph(own_workspace: bool, deterministic: bool) -> None:
    """Blocks are claimed, and turns taken, anew in each."""
    import cupy

    rng = np.random.default_rng(3)
    versions = [[normal(rng, (6, 400, 64), "float16") for _ in range(4)] for _ in range(2)]
    q, k, v, do = (put(BACKEND, x) for x in versions[0])
    o, lse = cupy.empty_like(q), cupy.empty(q.shape[:-1], np.float32)
    gradients = tuple(cupy.empty_like(q) for _ in range(3))
    options = {"causal": True, "deterministic": deterministic}
    with hopper_kernels("name") as launched:
        workspace = BACKEND.empty_bytes(cuflash.workspace_nbytes("attention_backward", q, k, v, **options))
        given = {"workspace": workspace} if own_workspace else {}
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()

        def enqueue() -> None:
            cuflash.attention(q, k, v, causal=True, return_lse=True, out=(o, lse))
            cuflash.attention_backward(do, q, k, v, o, lse, out=gradients, **options, **given)

        with stream:
            enqueue()
            stream.begin_capture()
            enqueue()
            graph = stream.end_capture()
            for values in versions[::-1]:
                for array, new in zip((q, k, v, do), values, strict=True):
                    array.set(new)
                for x in gradients:
                    x.data.memset_async(255, x.nbytes, stream)
                graph.launch(stream)
                stream.synchronize()
                wanted = expect(*values, family="sm90", causal=True)
                for name, x in zip(("dq", "dk", "dv"), gradients, strict=True):
                    wanted[name].check(BACKEND.get(x))
    assert takes(launched)


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
        assert takes(launched) and any(name.startswith(f"{tiles.DQ}_sm90") for name in launched)


@both_modes
@pytest.mark.parametrize("d", [64, 96, 128])
@pytest.mark.parametrize(
    "terms", [{}, {"key_bias": 3.0}, {"softcap": 1e9}, {"softcap": 1e9, "key_bias": 3.0}, {"softcap": 1e12}], ids=str
)
def test_scores_beyond_the_fraction_of_a_float(terms: dict[str, float], d: int, deterministic: bool) -> None:
    """Scores of up to 4e9 in some rows, beside small ones in the same tile: p is 1 in all, as there is one key."""
    rng = np.random.default_rng(16)
    q = np.where(np.arange(300)[:, None] % 3 == 1, 20001.0, rng.standard_normal((300, d))).astype(np.float16)
    k = np.full((1, d), 20001, np.float16)
    v, do = np.ones((1, d), np.float16), np.ones((300, d), np.float16)
    options: dict[str, Any] = dict(terms)
    if "key_bias" in terms:
        options["key_bias"] = np.full(1, terms["key_bias"], np.float32)
    with hopper_kernels("name") as launched:
        got = run(BACKEND, q, k, v, do, deterministic=deterministic, **options)
    assert takes(launched)
    assert (got.dv == 300).all() and np.isfinite(got.dq).all() and np.isfinite(got.dk).all()
