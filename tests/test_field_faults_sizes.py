"""Faults that users of other attention libraries met, continued: 64-bit addresses, large grids, memory.

Each test carries the number of its row in the catalogue of such faults.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from backends import (
    GPU,
    HOST,
    Backend,
    acc_dtype,
    bits_dtype,
    normal,
    place_hole,
    put,
)
from checks import (
    Expected,
    both,
    compiled_kernels,  # noqa: F401 - a fixture
    expect,
    measured,
    rounding,
    run,
    unit_roundoff,
)

import cuflash

gpu = pytest.mark.gpu
both_half = pytest.mark.parametrize(
    ("backend", "dtype"),
    [pytest.param(HOST, "float16", id="host-float16")]
    + [pytest.param(GPU, dtype, id=f"gpu-{dtype}", marks=gpu) for dtype in GPU.dtypes],
)
RNG = np.random.default_rng
GIB = 2**30
MAP_NORESERVE = 0x4000
"""Linux's flag; the module mmap has it from Python 3.13 on."""


def need_free(nbytes: int) -> None:
    """Skip unless the GPU has this much memory to give."""
    GPU.xp.get_default_memory_pool().free_all_blocks()
    free = GPU.xp.cuda.runtime.memGetInfo()[0]
    if free < nbytes:
        pytest.skip(f"needs {nbytes / GIB:.0f} GiB of free GPU memory, {free / GIB:.0f} GiB are free")


@pytest.fixture(autouse=True)
def returned_memory() -> Iterator[None]:
    """What a test took from the GPU goes back after it."""
    yield
    if "cupy" in sys.modules:
        import cupy

        if cupy.is_available():
            cupy.get_default_memory_pool().free_all_blocks()


# --- 64-bit addresses --------------------------------------------------------------------------------------------


class Far:
    """An array with a huge stride along one axis, over a buffer of which hardly a page is used."""

    def __init__(self, backend: Backend, values: np.ndarray, axis: int, step: int) -> None:
        moved = np.moveaxis(values, axis, 0)
        item, slice_bytes = values.dtype.itemsize, moved[0].nbytes
        nbytes = (len(moved) - 1) * abs(step) * item + slice_bytes
        if backend is GPU:
            need_free(nbytes + GIB)
            self.storage = GPU.xp.empty(nbytes, np.uint8)
        else:  # reserved, not committed
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
            self.storage = np.frombuffer(mmap.mmap(-1, nbytes, flags), np.uint8)
        first = (len(moved) - 1) * -step * item if step < 0 else 0
        dense = [item * math.prod(moved.shape[i + 1 :]) for i in range(1, moved.ndim)]
        strides = dense[:]
        strides.insert(axis % values.ndim, step * item)
        self.axis, self.backend = axis, backend
        self.slices = [
            backend.view(self.storage, values.dtype, first + i * step * item, moved.shape[1:], dense)
            for i in range(len(moved))
        ]
        for view, part in zip(self.slices, moved, strict=True):
            part = np.ascontiguousarray(part)
            if backend is GPU:  # as bits, slice by slice: no kernel of CuPy's has to get the long way right
                bits = GPU.view(view, bits_dtype(part.dtype), 0, part.shape, dense)
                bits.set(part.view(bits_dtype(part.dtype)))
            else:
                view[...] = part
        self.array = backend.view(self.storage, values.dtype, first, values.shape, strides)

    def get(self) -> np.ndarray:
        return np.moveaxis(np.stack([self.backend.get(view) for view in self.slices]), 0, self.axis)


@both_half
@pytest.mark.parametrize(("axis", "step"), [(0, 2**30), (0, -(2**30)), (1, 2**29), (2, 2**29)], ids=str)
@pytest.mark.parametrize("name", ["q", "k", "v", "do", "key_bias", "o", "dq", "dk", "dv", "dkey_bias"])
def test_b31_strides_beyond_32_bits(backend: Backend, dtype: str, name: str, axis: int, step: int) -> None:
    if name.endswith("key_bias") and axis == 2:
        pytest.skip("key_bias has no feature axis")
    rng = RNG(31)
    x = {name: normal(rng, (5, 6, 8), dtype) for name in ("q", "k", "v", "do")}
    x["key_bias"] = rng.standard_normal((5, 6)).astype(acc_dtype(dtype))
    want = run(backend, x["q"], x["k"], x["v"], x["do"], key_bias=x["key_bias"])
    arrays = {name: put(backend, values) for name, values in x.items()}
    out: dict[str, Any] = dict.fromkeys(("o", "dq", "dk", "dv", "dkey_bias"))
    far = Far(backend, np.full_like(x[name.removeprefix("d")], np.nan) if name in out and name != "o" else
              np.full_like(x["v"], np.nan) if name == "o" else x[name], axis, step)  # fmt: skip
    (out if name in out else arrays)[name] = far.array
    q, k, v, do, key_bias = arrays.values()
    o, lse = cuflash.attention(q, k, v, key_bias=key_bias, return_lse=True, out=(out["o"], None))
    outs = (out["dq"], out["dk"], out["dv"], out["dkey_bias"])
    gradients = cuflash.attention_backward(do, q, k, v, o, lse, key_bias=key_bias, out=outs)
    results = dict(zip(("o", "lse", "dq", "dk", "dv", "dkey_bias"), (o, lse, *gradients), strict=True))
    for result, array in results.items():
        got = far.get() if result == name else backend.get(array)
        np.testing.assert_allclose(
            got.astype(np.float64), getattr(want, result).astype(np.float64), atol=4 * rounding(backend, dtype, 8)
        )


@gpu
def test_b31_keys_of_four_gibibytes() -> None:
    batch, n, d = 700, 24000, 128
    need_free(2 * n * batch * d * 2 + GIB)
    rng = RNG(32)
    last = [normal(rng, (n, d), "bfloat16") for _ in range(2)]
    caches = []
    for values in last:
        storage = GPU.xp.zeros((n, batch, d), np.uint16)
        storage[:, -1] = GPU.put(values.view(np.uint16))
        caches.append(GPU.view(storage, values.dtype, 0, (batch, 1, n, d), (d * 2, d * 2, batch * d * 2, 2)))
    q, do = normal(rng, (batch, 1, 1, d), "bfloat16"), normal(rng, (batch, 1, 1, d), "bfloat16")
    o = GPU.get(cuflash.attention(put(GPU, q), *caches))
    assert (o[:-1] == 0).all()
    want = expect(q[-1, 0], last[0], last[1], do[-1, 0])
    want["o"].check(o[-1, 0])


@gpu
def test_b31_more_than_two_to_the_31_elements_backward() -> None:
    batch, m, heads, d = 15000, 512, 4, 128
    need_free(100 * GIB)
    rng = RNG(33)
    block = [normal(rng, (2, m, d), "bfloat16") for _ in range(4)]
    want = expect(*block)
    big = []
    for values in block:  # (batch, m, heads, d) in memory; the heads take turns between the two blocks
        storage = GPU.xp.empty((batch, m, heads, d), np.uint16)
        storage[...] = GPU.put(values.view(np.uint16)[[0, 1] * (heads // 2)].transpose(1, 0, 2))[None]
        strides = [2 * step for step in (m * heads * d, d, heads * d, 1)]
        big.append(GPU.view(storage, values.dtype, 0, (batch, heads, m, d), strides))
    q, k, v, do = big
    o, lse = cuflash.attention(q, k, v, return_lse=True)
    gradients = cuflash.attention_backward(do, q, k, v, o, lse)
    for name, array in zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *gradients), strict=True):
        for at in (0, batch // 2, batch - 1):
            want[name].check(GPU.get(array[at]).reshape(heads // 2, 2, *array.shape[2:]))


# --- large grids -------------------------------------------------------------------------------------------------


def repeated(values: np.ndarray, batch: tuple[int, ...]) -> np.ndarray:
    """The blocks of ``values`` again and again until they fill the batch."""
    count = math.prod(batch)
    return np.resize(values, (count, *values.shape[1:])).reshape(*batch, *values.shape[1:])


def check_repeats(want: Expected, got: np.ndarray) -> None:
    """Hold each repetition to what it must be; those with the bits of the first one are not computed again."""
    words = np.ascontiguousarray(got).view(bits_dtype(got.dtype)).reshape(len(got), -1)
    differs = (words != words[0]).any(1)
    differs[0] = True
    want.check(got[differs])


GRIDS = [
    pytest.param(HOST, (10923, 6), 4, 16, id="host-10923x6"),
    *(
        pytest.param(GPU, batch, m, n, id=f"gpu-{'x'.join(map(str, batch))}-{m}-{n}", marks=gpu)
        for batch, m, n in [
            ((65536, 1), 16, 16),
            ((10923, 6), 16, 16),
            ((1, 65536), 16, 16),
            ((70000, 1), 1, 16),
            ((70000, 1), 16, 1),
            ((3, 70000), 3, 5),
        ]
    ),
]


@pytest.mark.parametrize(("backend", "batch", "m", "n"), GRIDS)
def test_b34_large_batches(backend: Backend, batch: tuple[int, ...], m: int, n: int) -> None:
    rng = RNG(34)
    blocks = 61
    q, do = normal(rng, (blocks, m, 16), "float16"), normal(rng, (blocks, m, 16), "float16")
    k, v = normal(rng, (blocks, n, 16), "float16"), normal(rng, (blocks, n, 16), "float16")
    want = expect(q, k, v, do)
    x = [put(backend, repeated(a, batch)) for a in (q, k, v, do)]
    shapes = {"o": q.shape, "dq": q.shape, "dk": k.shape, "dv": v.shape}
    room = {name: place_hole(backend, (*batch, *shape[1:]), q.dtype) for name, shape in shapes.items()}
    lse = place_hole(backend, (*batch, m), np.dtype(np.float32))
    cuflash.attention(*x[:3], return_lse=True, out=(room["o"].array, lse.array))
    outs = tuple(room[name].array for name in ("dq", "dk", "dv"))
    cuflash.attention_backward(x[3], *x[:3], room["o"].array, lse.array, out=outs)
    whole = math.prod(batch) // blocks * blocks
    for name, hole in (*room.items(), ("lse", lse)):
        got = backend.get(hole.array)
        got = got.reshape(-1, *got.shape[2:])
        check_repeats(want[name], got[:whole].reshape(-1, blocks, *got.shape[1:]))
        assert np.isfinite(got[whole:].astype(np.float32)).all()
        hole.check_guards()


@gpu
def test_b34_more_row_tiles_than_a_grid_axis() -> None:
    rng = RNG(35)
    block, repeats, n = 64, 65535, 16
    q, do = normal(rng, (block, 16), "float16"), normal(rng, (block, 16), "float16", 2.0**-6)
    k, v = normal(rng, (n, 16), "float16"), normal(rng, (n, 16), "float16")
    want = expect(q, k, v, do)
    long = [np.resize(x, (block * repeats + 1, 16)) for x in (q, do)]
    got = run(GPU, long[0], k, v, long[1])
    first = expect(q[:1], k, v, do[:1])
    for name in ("o", "dq", "lse"):
        rows = getattr(got, name)
        check_repeats(want[name], rows[:-1].reshape(repeats, block, *rows.shape[1:]))
        first[name].check(rows[-1:])
    for name in ("dk", "dv"):
        total = repeats * want[name].value + first[name].value
        # One accumulator takes every row: the tensor cores truncate it once for eight of them at the most.
        allowed = (2 * unit_roundoff("float16") + block * repeats / 8 * 2.0**-23) * repeats * want[name].bound
        assert np.abs(getattr(got, name).astype(np.float64) - total).max() <= allowed


# --- memory ------------------------------------------------------------------------------------------------------


TILES_ON_HOST = 48 * 2**20
"""A few tiles of scores and operands, whatever the lengths."""


def extra_bytes(backend: Backend, x: list[Any], **options: Any) -> int:
    """Most bytes that a forward and a backward pass take beyond inputs and results."""
    q, k, v, do = x
    with measured(backend) as memory:
        o, lse = cuflash.attention(q, k, v, return_lse=True, **options)
        gradients = cuflash.attention_backward(do, q, k, v, o, lse, **options)
    return memory.peak - sum(a.nbytes for a in (o, lse, *gradients))


@both
@pytest.mark.parametrize("kind", ["plain", "window", "key_bias"])
def test_b72_no_matrix_of_scores_and_no_repeated_heads(backend: Backend, kind: str) -> None:
    m, heads, kv_heads, d = (16384, 16, 2, 128) if backend is GPU else (2048, 4, 1, 64)
    rng = RNG(72)
    x = [put(backend, normal(rng, (1, h, m, d), "float16")) for h in (heads, kv_heads, kv_heads, heads)]
    options: dict[str, Any] = {"causal": True, "grouped_heads": True}
    if kind == "window":
        options["window"] = (16, None)
    if kind == "key_bias":
        options["key_bias"] = put(backend, rng.standard_normal((1, 1, m)).astype(np.float32))
    extra = extra_bytes(backend, x, **options)
    # float32 scratch of dq, and of dk and dv at kv_heads; on the host the tiles come on top.
    allowed = 4 * m * (d + 16) * (heads + 2 * kv_heads) + (0 if backend is GPU else TILES_ON_HOST)
    assert extra <= allowed
    assert allowed < 4 * heads * m * m  # less than float32 scores


@both
def test_b73_gradients_of_shared_heads_are_not_made_for_each_query_head(backend: Backend) -> None:
    m, n = (16, 65536) if backend is GPU else (4, 2048)
    rng = RNG(73)
    shapes = ((2, 64, m, 64), (2, 1, n, 64), (2, 1, n, 64), (2, 64, m, 64))
    x = [put(backend, normal(rng, shape, "bfloat16")) for shape in shapes]
    extra = extra_bytes(backend, x, grouped_heads=True)
    scratch = 4 * 64 * (2 * 2 * n + 2 * 64 * m)  # dk, dv at one head, dq
    allowed = scratch + (8 * 2**20 if backend is GPU else TILES_ON_HOST)
    assert extra <= allowed
    assert allowed < 4 * 2 * 64 * n * 64  # far less than a float32 dk of every query head


@gpu
def test_b72_memory_is_linear_in_the_sequence() -> None:
    rng = RNG(74)
    extras, inputs = [], []
    for m in (16384, 32768, 65536, 131072):
        x = [put(GPU, normal(rng, (m, 64), "float16")) for _ in range(4)]
        extras.append(extra_bytes(GPU, x))
        inputs.append(sum(a.nbytes for a in x[:3]))
    for m, extra in zip((16384, 32768, 65536, 131072), extras, strict=True):
        assert extra <= 4 * m * (64 + 16), extras  # float32 sums of dq at the most, and a few numbers a row
    assert extras[-1] < 2 * inputs[-1]
