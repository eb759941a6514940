"""Property tests of the CUDA backend: drawn calls of every kind, each held to dense float64 within a derived budget.

Outputs go through ``out=`` into NaN-filled memory with guard regions; inputs are views into NaN-filled memory. Both
kernel families run on whatever GPU there is. ``gpu_cases.py`` draws, ``checks.py`` runs and compares.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import reference
from backends import Layout, acc_dtype, bits_dtype, dtype_of, normal, place, place_hole, put, same_bits, swapped
from checks import (
    Call,
    check,
    check_backward,
    check_forward,
    check_lse,
    compiled_kernels,  # noqa: F401 - a fixture
    expect,
    fused,
    need_features,
    run,
)
from gpu_cases import SMALL, Case, cases, layouts, most_features, target
from hypothesis import event, example, given
from hypothesis import strategies as st
from on_gpu import (
    BACKEND,
    FAMILIES,
    WIDE,
    every_dtype,
    every_family,
    examples,
    family,
    held,
    hopper_kernels,
    needs,
    plain,
    same_as_on_host,
    upstream,
)

import cuflash
from cuflash import hopper, tiles

pytestmark = pytest.mark.gpu


# --- the three operations, both families -------------------------------------------------------------------------


@examples(600)
@given(case=cases("sm80", "attention"))
def test_forward_sm80(case: Case) -> None:
    with family("sm80"):
        check_forward(BACKEND, case, "sm80")


@examples(250)
@given(case=cases("sm75", "attention"))
def test_forward_sm75(case: Case) -> None:
    with family("sm75"):
        check_forward(BACKEND, case, "sm75")


@examples(600)
@given(case=cases("sm80", "attention"))
def test_forward_sm90(case: Case) -> None:
    with hopper_kernels() as launched:
        check_forward(BACKEND, case, lambda: "sm90" if "sm90" in launched else "sm80")
    event(f"sm90: {'sm90' in launched}")
    features = max(case.q[-1], case.v[-1])
    if case.dtype == "float32" and hopper.NARROW_PLANES < features <= 128 and len(case.batch) < 3:
        assert "sm90" in launched or 0 in (*case.o, *case.k)


@pytest.mark.parametrize("precision", [None, "tf32"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("d", "e"), [(64, 64), (128, 128), (40, 128), (80, 80), (96, 8), (192, 128), (256, 256)])
def test_the_sm90_family_takes_what_it_is_for(dtype: str, precision: str | None, d: int, e: int) -> None:
    """Lengths that no block divides, rows long and short, a band, broadcast keys, rows and tiles without keys."""
    if precision and dtype != "float32":
        pytest.skip("precision is float32's")
    if dtype == "float32" and max(d, e) > 128:
        pytest.skip("planes of more than 128 features do not fit shared memory")
    more = {"precision": precision} if precision else {}
    band = {"causal": True, "align": "bottom-right", **more}
    for heads, m, n, options, key_bias in (
        (3, 333, 517, more, None),
        (1, 200, 1100, more, None),  # long rows
        (1, 200, 1100, more, (1100,)),
        (2, 417, 233, band, (233,)),
        (140, 70, 90, band | {"window": (50, 7)}, None),  # of up to 192 rows a tile: one for each head, more than CTAs
        (2, 130, 200, more | {"softcap": 3.0, "scale": -0.1}, (2, 200)),
    ):
        case = Case(dtype, (heads, m, d), (1, n, d), (1, n, e), key_bias, options, {}, "normal", 7)
        with hopper_kernels() as launched:
            check_forward(BACKEND, case, "sm90")
        assert set(launched) == {"sm90"}
        with hopper_kernels() as launched:
            check_lse(BACKEND, case, "sm80")  # the gradients are the portable kernels'
        assert "sm90" in launched


@pytest.mark.parametrize(("dtype", "precision"), [("float16", None), ("float32", None), ("float32", "tf32")])
def test_gradients_after_a_forward_of_the_sm90_family(dtype: str, precision: str | None) -> None:
    """The backward forms its scores in another way than the forward did."""
    options = {"causal": True, "precision": precision}
    for values in ("normal", "wide"):
        case = Case(dtype, (2, 300, 64), (2, 300, 64), (2, 300, 64), None, options, {}, values, 3)
        with hopper_kernels() as launched:
            check_backward(BACKEND, case, "sm80", None, True, True)
        assert "sm90" in launched


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("own_workspace", [True, False])
def test_replays_of_a_graph_with_kernels_of_the_sm90_family(dtype: str, own_workspace: bool) -> None:
    """Tiles are claimed, and planes made, anew in each; scratch of the captured call is nobody else's afterwards."""
    import cupy

    rng = np.random.default_rng(2)
    versions = [[normal(rng, (150, 200, 64), dtype) for _ in range(3)] for _ in range(2)]
    q, k, v = (put(BACKEND, x) for x in versions[0])
    o = cupy.empty_like(q)
    with hopper_kernels() as launched:
        workspace = BACKEND.empty_bytes(cuflash.workspace_nbytes("attention", q, k, v, causal=True))
        assert workspace.nbytes > 0
        given = {"workspace": workspace} if own_workspace else {}
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with stream:
            cuflash.attention(q, k, v, causal=True, out=o, **given)
            stream.begin_capture()
            cuflash.attention(q, k, v, causal=True, out=o, **given)
            graph = stream.end_capture()
            others = [cupy.full(workspace.nbytes, 255, np.uint8) for _ in range(4)]
            for values in versions[::-1]:
                for array, new in zip((q, k, v), values, strict=True):
                    array.set(new)
                o.data.memset_async(255, o.nbytes, stream)
                graph.launch(stream)
                stream.synchronize()
                expect(*values, family="sm90", causal=True)["o"].check(BACKEND.get(o))
            assert all((other == 255).all() for other in others)
    assert set(launched) == {"sm90"}


@pytest.mark.parametrize(("dtype", "d"), [("bfloat16", 64), ("float16", 128), ("bfloat16", 256), ("float32", 128)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 20), "softcap": 30.0}], ids=str)
def test_the_sm90_family_gives_the_same_bits_every_time(dtype: str, d: int, options: dict[str, Any]) -> None:
    """Whichever CTA takes a tile, and whichever warpgroup is first."""
    rng = np.random.default_rng(1)
    q, k, v = (put(BACKEND, normal(rng, (40, 900, d), dtype)) for _ in range(3))
    bits = bits_dtype(dtype_of(dtype))
    with hopper_kernels() as launched:
        first = cuflash.attention(q, k, v, **options).view(bits)
        assert all((cuflash.attention(q, k, v, **options).view(bits) == first).all() for _ in range(200))
    assert set(launched) == {"sm90"}


def test_sections_of_heads_that_do_not_come_out_even(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tile is somebody's: of seven heads in three sections, of more heads than CTAs, of one section."""
    monkeypatch.setattr(hopper, "SECTION_BYTES", 2 * 2 * 2 * 261 * 64)  # K and V of two heads
    monkeypatch.setattr(hopper, "LAST_SECTION_TILES", 0)
    rng = np.random.default_rng(5)
    for heads, m in ((7, 2100), (301, 205), (3, 9000)):
        q, k, v = (normal(rng, (heads, rows, 64), "float16") for rows in (m, 261, 261))
        a, b, c = (put(BACKEND, x) for x in (q, k, v))
        o = put(BACKEND, np.full(q.shape, np.nan, np.float16))
        with hopper_kernels() as launched:
            cuflash.attention(a, b, c, causal=True, align="bottom-right", out=o)
        assert set(launched) == {"sm90"}
        expect(q, k, v, family="sm90", causal=True, align="bottom-right")["o"].check(BACKEND.get(o))


@examples(600)
@given(case=cases("sm80"), need=needs, up=upstream)
@example(  # an element of o is rounded the other way than on the host, which is all that dkey_bias starts from
    case=Case("bfloat16", (3, 1, 1, 65, 3), (3, 1, 1, 16, 3), (1, 1, 16, 3), (16,), {}, {}, "normal", 0),
    need=None,
    up=(True, False),
)
def test_backward_sm80(case: Case, need: tuple[str, ...] | None, up: tuple[bool, bool]) -> None:
    event(f"do, dlse: {up}")
    with family("sm80"):
        check_backward(BACKEND, case, "sm80", need, *up)


@examples(250)
@given(case=cases("sm75"), need=needs, up=upstream)
def test_backward_sm75(case: Case, need: tuple[str, ...] | None, up: tuple[bool, bool]) -> None:
    with family("sm75"):
        check_backward(BACKEND, case, "sm75", need, *up)


@examples(150)
@given(data=st.data(), name=st.sampled_from(FAMILIES), need=needs)
def test_grouped_heads(data: st.DataObject, name: str, need: tuple[str, ...] | None) -> None:
    case = data.draw(cases(name, grouped=True))
    with family(name):
        check_backward(BACKEND, case, name, need, True, False)


@examples(150)
@given(data=st.data(), name=st.sampled_from(FAMILIES))
def test_lse_alone(data: st.DataObject, name: str) -> None:
    case = data.draw(cases(name))
    with family(name):
        check_lse(BACKEND, case, name)


@examples(100)
@given(case=cases("sm80"), need=needs, up=upstream)
def test_unordered_gradients_are_within_the_same_budget(
    case: Case, need: tuple[str, ...] | None, up: tuple[bool, bool]
) -> None:
    with family("sm80"):
        check_backward(BACKEND, case, "sm80", need, *up, deterministic=False)


@examples(300)
@given(case=cases("sm80", with_layouts=False).map(plain), up=st.sampled_from(((True, False), (True, True))))
def test_the_fused_backward(case: Case, up: tuple[bool, bool]) -> None:
    with family("sm80"), fused() as launched:
        check_backward(BACKEND, case, "sm80", None, *up)
    event(f"fused: {tiles.FUSED in launched}")


@pytest.mark.parametrize(
    ("heads", "m", "n", "options"),
    [
        (6, 640, 640, {}),
        (2, 3000, 500, {}),
        (2, 300, 3000, {}),
        (5, 900, 900, {"causal": True}),
        (4, 700, 500, {"causal": True, "align": "bottom-right"}),
        (4, 800, 800, {"window": (100, 30)}),
        (8, 500, 500, {"grouped_heads": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dtype", BACKEND.dtypes)
def test_the_fused_backward_is_the_separate_one_in_the_same_bits_each_time(
    dtype: str, d: int, heads: int, m: int, n: int, options: dict[str, Any]
) -> None:
    if d > max(tiles.head_dims(tiles.FUSED, dtype, "16", target(), "sm80"), default=0):
        pytest.skip(f"no kernel for all gradients of {d} features in {dtype}")
    rng = np.random.default_rng(heads)
    kv_heads = 2 if "grouped_heads" in options else heads
    shapes = ((heads, m, d), (kv_heads, n, d), (kv_heads, n, d), (heads, m, d))
    q, k, v, do = (put(BACKEND, normal(rng, shape, dtype)) for shape in shapes)
    o, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    separate = [
        BACKEND.get(cuflash.attention_backward(do, q, k, v, o, lse, need=(name,), **options)[at]).astype(np.float64)
        for at, name in enumerate("qkv")
    ]
    # In 16 bits the sm90 family has separate kernels, too.
    has_separate = target() == "90a" and tiles.kind(dtype) == "16 bits" and d > max(tiles.SM90_BACKWARD)
    with family("sm80") if has_separate else nullcontext(), fused() as launched:
        first = [BACKEND.get(x) for x in cuflash.attention_backward(do, q, k, v, o, lse, **options)]
        assert tiles.FUSED in launched
        for got, want in zip(first, separate, strict=True):
            # Sums of the same terms in another order, of p and ds that are rounded alike.
            allowed = 64 * np.finfo(acc_dtype(dtype)).eps + 4 * reference.unit_roundoff(dtype_of(dtype))
            assert np.abs(got.astype(np.float64) - want).max() <= allowed * np.abs(want).max()
        for _ in range(20):
            again = cuflash.attention_backward(do, q, k, v, o, lse, **options)
            assert all(same_bits(x, BACKEND.get(y)) for x, y in zip(first, again, strict=True))


@examples(150)
@given(data=st.data(), name=st.sampled_from(FAMILIES))
def test_equal_calls_give_equal_bits(data: st.DataObject, name: str) -> None:
    call = Call.of(BACKEND, data.draw(cases(name)))
    q, k, v, do = (call[x] for x in ("q", "k", "v", "do"))
    first: list[np.ndarray] = []
    with family(name):
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


@examples(200)
@given(data=st.data(), name=st.sampled_from(FAMILIES))
def test_gradients_are_the_transpose_of_the_derivative(data: st.DataObject, name: str) -> None:
    """<do, J t> = <gradients, t>, with J t from central differences of the float64 reference."""
    case = data.draw(cases(name, with_layouts=False))
    call = Call.of(BACKEND, case)
    x, options = call.values, dict(call.reference_options)
    with family(name):
        got = run(BACKEND, x["q"], x["k"], x["v"], x["do"], x["dlse"], **options)
    key_bias = options.pop("key_bias", None)
    names = ("q", "k", "v") + (() if key_bias is None else ("key_bias",))
    rng = np.random.default_rng(case.seed)
    along = {each: direction(rng, x[each].shape) for each in names}
    step = 1e-5

    def moved(sign: float) -> tuple[np.ndarray, np.ndarray]:
        at = {each: x[each].astype(np.float64) + sign * step * along[each] for each in names}
        bias = {} if key_bias is None else {"key_bias": at["key_bias"]}
        return reference.attention(at["q"], at["k"], at["v"], **bias, **options)

    (o_up, lse_up), (o_down, lse_down) = moved(1), moved(-1)
    empty = np.isneginf(lse_up)
    lse_change = np.where(empty, 0, np.where(empty, 0, lse_up) - np.where(empty, 0, lse_down))
    derivative = (np.sum(x["do"].astype(np.float64) * (o_up - o_down)) + np.sum(x["dlse"] * lse_change)) / (2 * step)
    wanted = expect(x["q"], x["k"], x["v"], x["do"], x["dlse"], family=name, **call.reference_options)
    product, allowed = 0.0, 0.0
    for each in names:
        gradient = getattr(got, f"d{each}").astype(np.float64)
        product += float(np.sum(gradient * along[each]))
        allowed += wanted[f"d{each}"].limit * wanted[f"d{each}"].bound * float(np.abs(along[each]).sum())
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
        "dtype": draw(st.sampled_from(BACKEND.dtypes)),
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
    lses = [(drawn["spread"] * rng.standard_normal(shape[:-1])).astype(acc_dtype(dtype)) for _ in os]
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
    eps = float(np.finfo(acc_dtype(dtype)).eps)
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
    monkeypatch.setattr(cuflash.calls.launcher(), "LOG", True)
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


@every_dtype
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (200, 50)}], ids=str)
def test_many_blocks(d: int, dtype: str, options: dict[str, Any]) -> None:
    """Long enough for every stage of the pipelines and several blocks on each side of the diagonal."""
    need_features(d, dtype)
    rng = np.random.default_rng(d)
    held("sm80", *(normal(rng, (2, 700, d), dtype) for _ in range(4)), **options)


@every_family
@every_dtype
@pytest.mark.parametrize("d", [64, 128, 256])
def test_adversarial_values(name: str, dtype: str, d: int) -> None:
    """One huge logit, rows of constants, a running maximum that rises in every block."""
    need_features(d, dtype, name)
    rng = np.random.default_rng(d)
    n = 500
    base = [normal(rng, (n, d), dtype) for _ in range(4)]
    spike, constant, rising = ([x.copy() for x in base] for _ in range(3))
    spike[0][7] = spike[1][n // 2] = 12
    constant[0][:] = constant[1][:] = 1
    rising[0][:] = 1
    rising[1][:] = np.linspace(-4, 4, n)[:, None]
    for x in (spike, constant, rising, [rising[0], rising[1][::-1].copy(), *rising[2:]]):
        held(name, *x)


@every_family
@every_dtype
def test_a_logit_that_leaves_nothing_to_other_keys(name: str, dtype: str) -> None:
    """A score of a million: its key has all the weight, and no gradient is left for scores."""
    need_features(64, dtype, name)
    rng = np.random.default_rng(6)
    q, k, v, do = (normal(rng, (200, 64), dtype) for _ in range(4))
    q[7], k[150] = 352, 352  # a number of 4 bits, whose products are exact in every arithmetic
    with family(name):
        got = run(BACKEND, q, k, v, do)
    one, upstream = v[150].astype(np.float64), do[7].astype(np.float64)
    # p is 2^x of what the rounding of the reference leaves of the score, and o the quotient of p v and p.
    split = reference.SPLIT if dtype == "float32" and name != "sm75" else 0.0
    quotient = 4 * reference.unit_roundoff(dtype_of(dtype)) if dtype in WIDE else 0.0
    np.testing.assert_allclose(got.o[7].astype(np.float64), one, rtol=split + quotient)
    np.testing.assert_allclose(got.lse[7], 352**2 * 8, rtol=4 * reference.unit_roundoff(acc_dtype(dtype)))
    # dS is the difference of two sums of 64 terms that are the same but for rounding, and k is 352.
    rounding = 128 * reference.unit_roundoff(acc_dtype(dtype)) * np.abs(upstream * one).sum()
    assert np.abs(got.dq[7].astype(np.float64)).max() <= 352 / 8 * rounding
    assert all(np.isfinite(x.astype(np.float64)).all() for x in got[:5])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize(
    "options",
    [{}, {"key_bias": True}, {"softcap": 30.0}, {"softcap": 4.0}, {"softcap": 30.0, "key_bias": True}],
    ids=str,
)
def test_scores_that_no_reference_of_a_block_foresees(dtype: str, d: int, options: dict[str, Any]) -> None:
    """Of Hopper's forward, against the host: blocks come from the last to the first, and bet that none moves."""
    m, n = 200, 1300
    rng = np.random.default_rng(d)
    q, k, v = (normal(rng, (rows, d), dtype).astype(np.float32) for rows in (m, n, n))
    ones, slope = np.ones_like(q), np.linspace(-8, 8, n)[:, None] * np.ones(d)
    at = {key: np.arange(n)[:, None] == key for key in (700, 703)}
    adversaries = {
        "falling": (ones, slope),
        "rising": (ones, -slope),
        "spike": (q, np.where(at[700], 60 * np.sign(q[0]), k)),
        "steps": (ones, np.floor(slope)),
        "infinite key": (q, np.where(at[700], np.inf, k)),
        "NaN key": (q, np.where(at[700], np.nan, k)),
        "NaN key that key_bias takes away": (q, np.where(at[703], np.nan, k)),
        "far below": (np.abs(q) + 2, -np.abs(k) - 20),
    }
    bias = np.where(np.arange(n) % 7 == 3, -np.inf, rng.standard_normal(n) * 5).astype(np.float32)
    on_host, on_gpu = dict(options), dict(options)
    if "key_bias" in options:
        on_host["key_bias"], on_gpu["key_bias"] = bias, put(BACKEND, bias)
    for what, (a, b) in adversaries.items():
        inputs = [x.astype(dtype_of(dtype)) for x in (a, b, v)]
        with np.errstate(all="ignore"):
            o, lse = cuflash.attention(*inputs, return_lse=True, **on_host)
            s = d**-0.5 * (np.abs(inputs[0].astype(np.float64)) @ np.abs(inputs[1].astype(np.float64)).T)
        with hopper_kernels() as launched:
            results = cuflash.attention(*(put(BACKEND, x) for x in inputs), return_lse=True, **on_gpu)
        assert set(launched) == {"sm90"}
        got, wanted = ([x.astype(np.float64) for x in pair] for pair in (map(BACKEND.get, results), (o, lse)))
        most = float(np.max(s[np.isfinite(s)]))
        # Of either side, and of p, which the kernel rounds.
        allowed_lse = 2 * reference.budget("float32", most)
        allowed = allowed_lse + 3 * reference.unit_roundoff(dtype_of(dtype))
        same_as_on_host(got, wanted, allowed * np.abs(v).max(), allowed_lse, what)


@every_dtype
@pytest.mark.parametrize("gap", [0, 1, 2, 4, 8])
def test_every_load_kind(dtype: str, gap: int) -> None:
    """Rows whose distance is a multiple of 16, 8, 4 and 2 bytes, and features that are not next to each other."""
    rng = np.random.default_rng(gap)
    x = [normal(rng, (2, 77, 64), dtype) for _ in range(4)]
    for layout in (Layout(pad=gap), Layout(pad=gap, shift=gap), Layout(steps=(1, 1, 2), pad=gap)):
        check(BACKEND, *x, layouts=dict.fromkeys(("q", "k", "v", "do"), layout), causal=True)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("dtype", "x"), [("float16", 20001), ("float32", 20001), ("float64", 2000000001)])
def test_gradients_of_scores_beyond_the_fraction_of_their_type(name: str, dtype: str, x: int) -> None:
    """Scores of 4.5e9 (float64: 4.5e19): lse is rounded to hundreds, and p must come from the same rounding of the same
    score.

    One key, as the logarithm of a number of keys would be lost in that rounding.
    """
    d = min(128, most_features(dtype, name))
    q, k = np.full((2, d), x, dtype), np.full((1, d), x, dtype)
    v, do = np.ones((1, d), dtype), np.ones((2, d), dtype)
    with family(name):
        got = run(BACKEND, q, k, v, do)
    assert (got.o == 1).all() and (got.dv == 2).all() and np.isfinite(got.dq).all() and np.isfinite(got.dk).all()


# --- float32, TF32, float64 --------------------------------------------------------------------------------------


def rms(got: np.ndarray, exact: np.ndarray) -> float:
    return float(np.sqrt(np.mean((got.astype(np.float64) - exact) ** 2)))


@pytest.mark.parametrize("d", [64, 128, 256])
def test_tf32_is_what_it_says_and_float32_is_not_tf32(d: int) -> None:
    """Each is within its own budget, and their errors differ by most of the 2^10 between the roundings of operands."""
    need_features(d, "float32")
    rng = np.random.default_rng(d)
    x = [normal(rng, (300, d), "float32") for _ in range(4)]
    exact, tf32 = held("sm80", *x), held("sm80", *x, precision="tf32")
    for name, expected in expect(*x).items():
        assert rms(getattr(exact, name), expected.value) <= rms(getattr(tf32, name), expected.value) / 64, name


@pytest.mark.skipif(np.finfo(np.longdouble).eps >= 2.0**-60, reason="long double is no wider than double here")
@every_family
@pytest.mark.parametrize(("m", "n", "d"), [(97, 130, 64), (33, 200, 128), (40, 70, 256)])
def test_float64_against_long_double(name: str, m: int, n: int, d: int) -> None:
    """Roundings of n numbers of either sign add up to about n^1/2 of them: less than 18, of values and of scores."""
    need_features(d, "float64", name)
    rng = np.random.default_rng(d)
    q, k, v, do = (normal(rng, (length, d), "float64") for length in (m, n, n, m))
    with family(name):
        got = run(BACKEND, q, k, v, do)
    allowed = 4e-15 * (1 + reference.dense(q, k, v).max_abs_score)
    bounds = reference.bounds(do, q, k, v)
    for result, exact in reference.in_long_double(q, k, v, do).items():
        error = np.abs(getattr(got, result) - exact).max()
        assert error <= allowed * getattr(bounds, result), f"{result}: {error}"


@every_family
@pytest.mark.parametrize("dtype", WIDE)
def test_subnormal_values_are_kept(name: str, dtype: str) -> None:
    """o of subnormal v, dv of subnormal do.

    TF32 has multiples of 2^-136, bfloat16 of 2^-133, to the nearest of which an operand is rounded; float32 and float64
    round every step to a multiple of their smallest number.
    """
    planes = dtype == "float32" and name == "sm90"
    small = SMALL[dtype] * (16 if planes else 1)
    rng = np.random.default_rng(8)
    n, d = 100, 64
    q, k, v, do = (normal(rng, (n, d), dtype) for _ in range(4))
    want = expect(q, k, v, do, family=name)
    v, do = (x * x.dtype.type(small) for x in (v, do))
    with family(name):
        got = run(BACKEND, q, k, v, do)
    exact = reference.dense(q, k, v)
    step = float(np.finfo(dtype).smallest_subnormal)
    operand = 2.0**-134 if planes else 2.0**-137 if dtype == "float32" and name == "sm80" else 0.0
    for result, value, weight in (
        ("o", exact.o, 1.0),
        ("dv", exact.p.T @ do.astype(np.float64), float(exact.p.sum(axis=0).max())),
    ):
        relative = want[result].limit * want[result].bound * small
        allowed = operand * weight + (n + 2) * step + relative
        assert allowed < reference.largest(value) / 16  # flushed to zero, they would be off by more
        assert np.abs(getattr(got, result).astype(np.float64) - value).max() <= allowed, result


def splits(dtype: str, name: str) -> bool:
    """Whether products are made of parts of their operands, so that infinities leave NaN."""
    return dtype == "float32" and name != "sm75"


@every_family
@every_dtype
@pytest.mark.parametrize("infinity", [np.inf, -np.inf])
def test_an_infinite_value_is_in_its_column_alone(name: str, dtype: str, infinity: float) -> None:
    need_features(64, dtype, name)
    rng = np.random.default_rng(9)
    q, k, v = (normal(rng, (70, 64), dtype) for _ in range(3))
    clean = expect(q, k, v, family=name)
    v[33, 5] = infinity
    with family(name):
        got = run(BACKEND, q, k, v)
        alone = run(BACKEND, q[:1], k[33:34], v[33:34])  # p is 1, of which nothing is left when it is split in two
    assert np.isfinite(np.delete(alone.o, 5, 1).astype(np.float64)).all()
    column = np.concatenate([alone.o[:, 5], got.o[:, 5]])
    if splits(dtype, name):
        assert not np.isfinite(column).any()  # documented: 0 * inf among the parts of an operand
    else:
        assert (column == infinity).all()
    got.o[:, 5] = clean["o"].value[:, 5]
    clean["o"].check(got.o)
    clean["lse"].check(got.lse)


@every_family
@every_dtype
def test_an_infinite_key_has_the_weight_zero_or_one(name: str, dtype: str) -> None:
    """Zero where its product is -inf, and nothing is left of it; where that is inf, lse is, and o is exp(inf - inf)."""
    need_features(64, dtype, name)
    rng = np.random.default_rng(10)
    q, k, v = (normal(rng, (70, 64), dtype) for _ in range(3))
    negative = q[:, 5] < 0
    q[::7, 5] = 0.5 - 1.0 * negative[::7]  # a number without a lo
    without = expect(q[negative], np.delete(k, 33, 0), np.delete(v, 33, 0), family=name)
    k[33, 5] = np.inf
    with family(name):
        got = run(BACKEND, q, k, v)
    if splits(dtype, name):  # documented: 0 * inf among the parts of an operand
        assert np.isnan(got.o[::7]).all() and np.isnan(got.o[~negative]).all()
        return
    without["o"].check(got.o[negative])
    without["lse"].check(got.lse[negative])
    assert (got.lse[~negative] == np.inf).all() and np.isnan(got.o[~negative]).all()


@pytest.mark.parametrize(("name", "dtype"), [("sm80", "float32"), ("sm80", "float64"), ("sm90", "float32")])
def test_the_largest_number_is_kept(name: str, dtype: str) -> None:
    """The mean of one value: the parts of an operand that is split are finite. Their sum is rounded."""
    largest = np.finfo(dtype).max * np.asarray(1 - reference.SPLIT if dtype == "float32" else 1, dtype)
    x = np.ones((1, 64), dtype)
    with family(name):
        got = run(BACKEND, x, x, np.full((1, 64), largest, dtype))
    np.testing.assert_allclose(got.o, largest, rtol=reference.SPLIT if dtype == "float32" else 0)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000])
@pytest.mark.parametrize("precision", [None, "tf32"])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_a_nan_of_any_bits_stays_one(where: str, precision: str | None, bits: int) -> None:
    """Arithmetic on the device makes the first: its bits are the largest, and must not overflow to zero."""
    x = {name: np.ones((70, 64), np.float32) for name in "qkv"}
    x[where][33, 5] = np.array(bits, np.uint32).view(np.float32)
    o = run(BACKEND, x["q"], x["k"], x["v"], precision=precision).o
    assert np.isnan(o[33] if where == "q" else o[:, 5]).all()


@every_dtype
@pytest.mark.parametrize("where", ["q", "k"])
def test_gradients_of_rows_with_nan_are_nan(where: str, dtype: str) -> None:
    x = {"q": np.ones((5, 64)), "k": np.ones((3, 64)), "v": np.ones((3, 64)), "do": np.ones((5, 64))}
    x[where][0] = np.nan
    got = run(BACKEND, *(array.astype(dtype_of(dtype)) for array in x.values()))
    rows = slice(0, 1) if where == "q" else slice(None)
    assert np.isnan(got.o[rows].astype(np.float64)).all() and np.isnan(got.lse[rows]).all()
    assert np.isnan(got.dv.astype(np.float64)).all() and np.isnan(got.dq[rows].astype(np.float64)).all()


def test_merge_of_one_part_repeated_without_memory() -> None:
    rng = np.random.default_rng(3)
    o, lse = put(BACKEND, normal(rng, (7, 16), "float16")), put(BACKEND, rng.standard_normal(7).astype(np.float32))
    for count in (2, 50):
        os, lses = (BACKEND.xp.broadcast_to(x, (count, *x.shape)) for x in (o, lse))
        merged, merged_lse = cuflash.attention_merge(os, lses)
        assert same_bits(BACKEND.get(merged), BACKEND.get(o))
        np.testing.assert_allclose(BACKEND.get(merged_lse), BACKEND.get(lse) + np.log(count), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", ["q", "k", "v", "key_bias", "o", "lse", "do", "dlse", "dq"])
def test_arrays_that_start_between_two_elements_are_refused(name: str, dtype: str) -> None:
    xp, shape = BACKEND.xp, (6, 16)

    def array(own: str, shape: tuple[int, ...], dtype: Any) -> Any:
        item = np.dtype(dtype).itemsize
        memory = xp.zeros(int(np.prod(shape)) * item + 16, np.uint8)
        first = item // 2 if own == name else 0
        return memory[first:][: int(np.prod(shape)) * item].view(dtype).reshape(shape)

    q, k, v, o, do, dq = (array(own, shape, dtype) for own in ("q", "k", "v", "o", "do", "dq"))
    key_bias, lse, dlse = (array(own, shape[:1], acc_dtype(dtype)) for own in ("key_bias", "lse", "dlse"))
    with pytest.raises(NotImplementedError, match="between two elements"):
        if name not in ("do", "dlse", "dq"):
            cuflash.attention(q, k, v, key_bias=key_bias, return_lse=True, out=(o, lse))
        cuflash.attention_backward(do, q, k, v, o, lse, key_bias=key_bias, dlse=dlse, out=(dq, None, None, None))
    xp.cuda.Device().synchronize()  # the context is alive
