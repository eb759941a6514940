"""Few features, few queries on a GPU: lanes and warps that have rows or keys of their own, splits of the keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import reference
from backends import GPU, Layout, acc_dtype, normal, put, same_bits
from checks import (
    Call,
    check_forward,
    check_lse,
    compiled_kernels,  # noqa: F401 - a fixture
    expect,
    need_features,
    planned_anew,
)
from gpu_cases import Case
from on_gpu import (
    BACKEND,
    WIDE,
    every_dtype,
    every_family,
    family,
    hopper_kernels,
    same_as_on_host,
)

import cuflash
from cuflash import devices, tiles

pytestmark = pytest.mark.gpu

FEW_FEATURES = [(1, 1), (2, 2), (3, 3), (1, 4), (4, 2), (5, 5), (8, 3)]


def few(dtype: str, d: int, e: int, m: int, n: int, options: dict[str, Any], biased: bool, seed: int = 0) -> Case:
    return Case(dtype, (m, d), (n, d), (n, e), (n,) if biased else None, options, {}, "normal", seed)


@every_family
@every_dtype
@pytest.mark.parametrize(("d", "e"), FEW_FEATURES)
@pytest.mark.parametrize(
    ("m", "n", "options", "biased"),
    [
        (70, 2100, {}, False),
        (300, 1300, {"causal": True, "align": "bottom-right"}, False),
        (130, 2500, {"window": (300, 17), "align": 900}, True),
        (9, 1025, {"scale": -0.7}, False),
        (1, 1023, {"scale": 40.0}, True),
    ],
    ids=str,
)
def test_few_features(
    name: str, dtype: str, d: int, e: int, m: int, n: int, options: dict[str, Any], biased: bool
) -> None:
    """Tiles that are whole and cut, rows of one warp and of several, references that stay and that move."""
    need_features(e, dtype, name)
    with family(name):
        check_forward(BACKEND, few(dtype, d, e, m, n, options, biased), name)


@every_family
@pytest.mark.parametrize(("d", "e"), [(5, 5), (6, 1), (7, 8), (8, 8)])
@pytest.mark.parametrize(
    ("m", "n", "options", "biased"),
    [
        (33, 31, {}, False),
        (65, 97, {}, True),
        (5, 1, {}, False),
        (129, 64, {"causal": True, "align": "bottom-right"}, False),
        (40, 200, {"causal": True, "align": -1}, True),
        (200, 333, {"window": (3, 0), "align": "top-left"}, False),
        (31, 300, {"softcap": 3.0}, True),
        (20, 6000, {"scale": 1e-3}, False),
    ],
    ids=str,
)
def test_eight_features_in_float64(
    name: str, d: int, e: int, m: int, n: int, options: dict[str, Any], biased: bool
) -> None:
    """Warps that have keys of their own, some of them none at all; edges of tiles; rows without a key."""
    with family(name):
        case = few("float64", d, e, m, n, options, biased)
        check_forward(BACKEND, case, name)
        check_lse(BACKEND, replace(case, v=(n, 0)), name)


@every_family
@every_dtype
@pytest.mark.parametrize("m", [1, 5, 33])
@pytest.mark.parametrize(
    ("options", "biased"),
    [({}, True), ({"causal": True, "align": "bottom-right"}, False), ({"window": (9000, 0), "align": 19000}, True)],
    ids=str,
)
def test_few_queries_split_the_keys(name: str, dtype: str, m: int, options: dict[str, Any], biased: bool) -> None:
    """What the splits leave is merged: the same within the budget, the same bits each time, in the caller's memory."""
    need_features(3, dtype, name)
    case = few(dtype, 3, 3, m, 20011, options, biased)
    call = Call.of(BACKEND, case)
    q, k, v = call["q"], call["k"], call["v"]
    with family(name):
        nbytes = cuflash.workspace_nbytes("attention", q, k, v, **call.options)
        assert nbytes > 0
        check_forward(BACKEND, case, name)
        check_lse(BACKEND, replace(case, v=(20011, 0)), name)
        first = [BACKEND.get(x) for x in cuflash.attention(q, k, v, return_lse=True, **call.options)]
        for shift in range(5):  # scratch memory may begin anywhere
            scratch = BACKEND.empty_bytes(nbytes + 8)[shift : shift + nbytes]
            again = cuflash.attention(q, k, v, return_lse=True, workspace=scratch, **call.options)
            assert all(same_bits(x, BACKEND.get(y)) for x, y in zip(first, again, strict=True))


@every_family
@pytest.mark.parametrize("dtype", ["float16", *WIDE])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("biased", [False, True])
def test_many_splits_of_a_row_are_merged_by_a_cta(name: str, dtype: str, heads: int, biased: bool) -> None:
    """More than a warp has lanes."""
    need_features(3, dtype, name)
    n = 120_016  # batches begin at whole 16 bytes, so that the kernels of Hopper take them, too
    case = few(dtype, 3, 3, 5, n, {}, biased)
    case = replace(case, q=(heads, 5, 3), k=(heads, n, 3), v=(heads, n, 3))
    q, k, v = (Call.of(BACKEND, case)[x] for x in "qkv")
    with family(name), multiprocessors(132):
        per_split = heads * 5 * (2 + 3) * np.dtype(acc_dtype(dtype)).itemsize
        assert cuflash.workspace_nbytes("attention", q, k, v) > 33 * per_split
        check_forward(BACKEND, case, name)
        check_lse(BACKEND, replace(case, v=(heads, n, 0)), name)


@pytest.mark.parametrize("dtype", WIDE)
def test_batches_whose_keys_are_split(dtype: str) -> None:
    """Queries of one axis against keys of another, both broadcast, and a bias of its own axis."""
    case = Case(dtype, (2, 1, 3, 3), (1, 3, 15000, 3), (3, 15000, 2), (2, 1, 15000), {}, {}, "normal", 4)
    call = Call.of(BACKEND, case)
    assert cuflash.workspace_nbytes("attention", *(call[x] for x in "qkv"), **call.options) > 0
    check_forward(BACKEND, case, "sm80")


@every_dtype
@pytest.mark.parametrize("m", [1, 6])
@pytest.mark.parametrize("d", [1, 2, 3, 4])
def test_few_features_that_begin_anywhere(dtype: str, m: int, d: int) -> None:
    """Rows side by side whose vectors begin at another offset in each batch position, in k as in v or not."""
    case = Case(dtype, (3, m, d), (3, 5003, d), (3, 5003, d), (3, 5003), {}, {}, "normal", d)
    check_forward(BACKEND, case, "sm80")
    for shift, v_shift in ((1, 1), (3, 3), (8, 8), (5, 2)):
        layouts = {"k": Layout(shift=shift), "v": Layout(shift=v_shift), "key_bias": Layout(shift=shift)}
        alone = replace(case, q=(m, d), k=(5003, d), v=(5003, d), key_bias=(5003,), layouts=layouts)
        check_forward(BACKEND, alone, "sm80")


@pytest.mark.parametrize("dtype", WIDE)
def test_splits_in_a_graph(dtype: str) -> None:
    cupy = GPU.xp
    rng = np.random.default_rng(3)
    values = [normal(rng, shape, dtype) for shape in ((5, 3), (20000, 3), (20000, 3))]
    x = [put(BACKEND, a) for a in values]
    o, scratch = cupy.empty((5, 3), dtype), BACKEND.empty_bytes(cuflash.workspace_nbytes("attention", *x))
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        cuflash.attention(*x, out=o, workspace=scratch)
        stream.begin_capture()
        cuflash.attention(*x, out=o, workspace=scratch)
        graph = stream.end_capture()
        x[0].set(-values[0])
        o.fill(np.nan)
        graph.launch(stream)
        stream.synchronize()
    expect(-values[0], *values[1:])["o"].check(BACKEND.get(o))


@contextmanager
def multiprocessors(count: int) -> Iterator[None]:
    """Make the launcher share out the work as for a device of so many."""
    with planned_anew(cuflash.calls.launcher()._plan_forward), pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "multiprocessors", lambda device: count)
        yield


@pytest.mark.parametrize("processors", [1, 7, 132, 500])
@pytest.mark.parametrize("m", [1, 17, 200])
@pytest.mark.parametrize("dtype", WIDE)
def test_any_number_of_parts(dtype: str, m: int, processors: int) -> None:
    """Devices of other sizes: other numbers of parts, some of them without a key that a row sees."""
    with multiprocessors(processors):
        for d in (2, 8):
            for options in ({}, {"causal": True, "align": "top-left"}, {"window": (50, 50), "align": "top-left"}):
                check_forward(BACKEND, few(dtype, d, d, m, 12000, options, False), "sm80")


@pytest.mark.parametrize("processors", [1, 5, 132])
@pytest.mark.parametrize("d", sorted(tiles.SM90_LANES["float32"]))
@pytest.mark.parametrize(
    ("m", "n", "options", "biased"),
    [
        (300, 130, {}, False),
        (300, 2100, {}, True),
        (800, 800, {"causal": True}, False),
        (900, 1501, {"causal": True, "align": "bottom-right"}, True),
        (430, 2500, {"window": (300, 17), "align": 900}, False),
        (600, 1100, {"window": (0, 5), "align": -200}, True),  # rows without a key
        (300, 1025, {"scale": -0.7}, True),
        (200, 1023, {"scale": 40.0}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("heads", [1, 4])
def test_few_features_of_many_rows(
    heads: int, m: int, n: int, options: dict[str, Any], biased: bool, d: int, processors: int
) -> None:
    """Lanes own rows: rows and keys that fill warps and tiles and that do not, parts with and without visible keys."""
    shapes = {"q": (heads, m, d), "k": (heads, n, d), "v": (heads, n, d)}
    case = Case("float32", *shapes.values(), (heads, n) if biased else None, options, {}, "normal", 8)
    whole = heads == 1 or (n * d % 4 == 0 and (not biased or n % 4 == 0))  # each head begins with a vector
    with hopper_kernels("operation") as launched, multiprocessors(processors):
        check_forward(BACKEND, case, lambda: "sm90" if tiles.LANES in launched else "sm80")
        check_lse(BACKEND, case, "sm80")  # the gradients are the portable kernels'
    assert tiles.LANES in launched or not whole or processors > 5


def test_keys_that_are_absent_from_many_rows() -> None:
    """Tiles and parts of which key_bias leaves nothing, in front and behind; all keys. Twice, with the same bits."""
    rng = np.random.default_rng(5)
    q, k, v = (normal(rng, (rows, 8), "float32") for rows in (300, 3000, 3000))
    absent = np.zeros((4, 3000), np.float32)
    absent[0, :1700] = absent[1, 900:] = absent[2, ::3] = absent[3] = -np.inf
    with hopper_kernels("operation") as launched, multiprocessors(5):
        for bias in absent:
            on_gpu = [put(BACKEND, x) for x in (q, k, v, bias)]
            first, again = (cuflash.attention(*on_gpu[:3], key_bias=on_gpu[3], return_lse=True) for _ in range(2))
            for name, x, y in zip(("o", "lse"), first, again, strict=True):
                expect(q, k, v, family="sm90", key_bias=bias)[name].check(BACKEND.get(x))
                assert same_bits(BACKEND.get(x), BACKEND.get(y))
    assert set(launched) - {"attention_merge_splits"} == {tiles.LANES}


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("d", [1, 3, 7])
@pytest.mark.parametrize(
    ("m", "n"), [(1, 700), (1, 20000), (5, 3000), (17, 12000), (70, 700), (70, 12000), (200, 3000)]
)
def test_scores_of_few_features_that_no_reference_foresees(dtype: str, d: int, m: int, n: int) -> None:
    """Against the host: references that move in every step, scores without a fraction, without a factor, infinite."""
    with multiprocessors(1 if m > 100 else 132):  # so that lanes own rows
        check_unforeseen_scores(dtype, d, m, n)


def check_unforeseen_scores(dtype: str, d: int, m: int, n: int) -> None:
    """Of a few adversaries, with and without key_bias."""
    rng = np.random.default_rng(n + d)
    largest = float(np.finfo(dtype).max)
    q, k, v = (normal(rng, shape, dtype) for shape in ((m, d), (n, d), (n, d)))
    ones, one = np.ones_like(q), np.arange(m)[:, None] == m // 2
    last, first, second = (np.arange(n)[:, None] == key for key in (n - 3, 3, min(900, n - 3)))
    adversaries = {
        "rising": (ones, np.sort(np.abs(k), 0) * 300),
        "falling": (ones, -np.sort(np.abs(k), 0) * 300),
        "huge": (q * 1e4, k * 1e6),
        "spike": (q, np.where(last, 1e4, k)),
        "infinite key": (q, np.where(last, np.inf, k)),
        "NaN key": (q, np.where(last, np.nan, k)),
        "NaN query": (np.where(one, np.nan, q), k),
        "largest query": (np.sign(q) * largest, k / largest * 9),
        "far below": (np.abs(q) + 20, -np.abs(k) - 1000),
    }
    early = {
        "early spike": (q, np.where(first, 1e4, k)),
        "infinite key in front": (q, np.where(first, np.inf, k)),
        "spike after what the first step foresees": (q, np.where(second, 1e4, k)),
        "NaN key after it": (q, np.where(second, np.nan, k)),
    }
    biases = {
        "none": None,
        "far": rng.standard_normal(n) + 1e6,
        "padded": np.where(np.arange(n) < n // 2, -np.inf, 0.0),
        "holes": np.where(np.arange(n) % 3 == 0, -np.inf, 0.0),
    }
    combinations = [(None, "none"), (2.0, "none"), (None, "far"), (None, "padded")], [(None, "none"), (None, "holes")]
    for what, (a, b) in (adversaries | early).items():
        a, b = a.astype(dtype), b.astype(dtype)
        for scale, bias in combinations[what in early]:
            on_host = {"scale": scale}
            if biases[bias] is not None:
                on_host["key_bias"] = biases[bias].astype(acc_dtype(dtype))
            on_gpu = {x: put(BACKEND, y) if x == "key_bias" else y for x, y in on_host.items()}
            with np.errstate(all="ignore"):
                o, lse = cuflash.attention(a, b, v, return_lse=True, **on_host)
                s = (scale or d**-0.5) * (np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)).T)
            results = cuflash.attention(*(put(BACKEND, x) for x in (a, b, v)), return_lse=True, **on_gpu)
            got, got_lse = map(BACKEND.get, results)
            # Of either side: each rounds.
            most = float(np.max(s[np.isfinite(s)], initial=0)) + (1e6 if bias == "far" else 0)
            allowed = 2 * reference.budget(dtype, most)
            same_as_on_host((got, got_lse), (o, lse), allowed * np.abs(v).max(), allowed, (what, bias))


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("score", [0.0, 1e3, 1e5, 1e7, 1e9, 1e12])
@pytest.mark.parametrize(("m", "n"), [(1, 400), (1, 12000), (3, 20011), (70, 3000)])
def test_equal_scores_average_however_large_they_are(dtype: str, score: float, m: int, n: int) -> None:
    """Warps and splits have parts of the keys; what they weigh must not go through a rounded lse."""
    rng = np.random.default_rng(n)
    q, k = np.full((m, 1), np.sqrt(score), dtype), np.full((n, 1), np.sqrt(score), dtype)
    v = rng.uniform(1, 2, (n, 2)).astype(dtype)
    o = BACKEND.get(cuflash.attention(*(put(BACKEND, x) for x in (q, k, v)), scale=1.0))
    exact = v.astype(np.float64).mean(0)
    # Up to here a step may start from the reference, which rounds scores otherwise than the step that set it.
    rounded_alike = score * np.log2(np.e) >= (2.0**20 if dtype == "float32" else 2.0**49)
    assert np.abs(o - exact).max() <= reference.budget(dtype, 0.0 if rounded_alike else score) * exact.max()
