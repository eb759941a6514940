"""Faults that users of other attention libraries met, continued: shapes, layouts, dtypes, kinds of arrays, merging.

Each test carries the number of its row in the catalogue of such faults.
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
    both,
    both_dtypes,
    check,
    compiled_kernels,  # noqa: F401 - a fixture
    need_features,
    rounding,
    run,
    unit_roundoff,
)

import cuflash

gpu = pytest.mark.gpu
RNG = np.random.default_rng


# --- shapes ------------------------------------------------------------------------------------------------------


@both_dtypes
@pytest.mark.parametrize(
    ("batch", "m", "n"),
    [((0,), 4, 5), ((2,), 0, 5), ((2,), 4, 0), ((2,), 0, 0), ((2, 0), 4, 5), ((), 0, 3), ((), 3, 0)],
    ids=str,
)
@pytest.mark.parametrize("grouped", [False, True])
def test_b19_empty_shapes(backend: Backend, dtype: str, batch: tuple[int, ...], m: int, n: int, grouped: bool) -> None:
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
    if backend is GPU:
        need_features(d, dtype)
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
@pytest.mark.parametrize("dtype", GPU.dtypes)
@pytest.mark.parametrize(("d", "e"), [(257, 64), (64, 257), (512, 512)])
def test_b20_head_dims_above_the_limit_of_a_gpu(d: int, e: int, dtype: str) -> None:
    q, k, v = (put(GPU, np.ones((3, f), dtype_of(dtype))) for f in (d, d, e))
    with pytest.raises(NotImplementedError, match=rf"{dtype}.*at most 256 features.*host"):
        cuflash.attention(q, k, v)
    with pytest.raises(NotImplementedError, match=rf"{dtype}.*at most \d+ features.*host"):
        cuflash.attention_vjp(q, k, v)[1](put(GPU, np.ones((3, e), dtype_of(dtype))))


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
    if backend is GPU:
        need_features(max(d, e), dtype)
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
    for name in ("o", "lse", "dq"):
        a, b = (getattr(x, name).astype(np.float64) for x in (got, repeated))
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=4 * unit_roundoff(dtype) * np.abs(b).max())


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
    values = {dtype: [normal(rng, (4, 33, 64), dtype) for _ in range(3)] for dtype in backend.dtypes}
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


# --- dtypes, kinds of arrays, errors -----------------------------------------------------------------------------


@both
@pytest.mark.parametrize(("m", "d"), [(128, 32), (1024, 128)])
def test_b51_float32_means_float32(backend: Backend, m: int, d: int) -> None:
    rng = RNG(51)
    got = check(backend, *(normal(rng, (m, d), "float32") for _ in range(4)), causal=True)
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
    if backend is GPU:  # which sums other keys in one block
        allowed += rounding(backend, dtype, 1024) * np.abs(v.astype(float)).max()
    elif dtype == "float32":
        allowed = 1.5 * np.abs(whole.o.astype(np.float64) - want).max()
    for o in merged:
        assert np.abs(o - want).max() <= allowed
    np.testing.assert_allclose(merged[0], merged[1], atol=8 * unit_roundoff(dtype))


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


@both
def test_b67_float64_is_computed_in_float64(backend: Backend) -> None:
    rng = RNG(67)
    q, k, v, do = (rng.standard_normal((64, 32)) for _ in range(4))
    got = check(backend, q, k, v, do, causal=True)
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
