"""Faults that users of other attention libraries met, continued: 64-bit addresses, large grids, races, streams, memory.

Most of these need a GPU. Each test carries the number of its row in the catalogue of such faults.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends import (
    GPU,
    HOST,
    Backend,
    Layout,
    acc_dtype,
    bits_dtype,
    dtype_of,
    normal,
    place_hole,
    put,
    same_bits,
    swapped,
)
from checks import (
    check,
    compiled_kernels,  # noqa: F401 - a fixture
    expect,
    measured,
    run,
    unit_roundoff,
)

import cuflash

gpu = pytest.mark.gpu
both = pytest.mark.parametrize("backend", [HOST, pytest.param(GPU, marks=gpu)], ids=["host", "gpu"])
both_half = pytest.mark.parametrize(
    ("backend", "dtype"),
    [pytest.param(HOST, "float16", id="host-float16")]
    + [pytest.param(GPU, dtype, id=f"gpu-{dtype}", marks=gpu) for dtype in GPU.dtypes],
)
RNG = np.random.default_rng
ROOT = Path(__file__).resolve().parent.parent
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
            got.astype(np.float64), getattr(want, result).astype(np.float64), atol=16 * unit_roundoff(dtype)
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
        want[name].check(got[:whole].reshape(-1, blocks, *got.shape[1:]))
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
    for name in ("o", "dq", "lse"):
        rows = getattr(got, name)
        want[name].check(rows[:-1].reshape(repeats, block, *rows.shape[1:]))
        assert same_bits(rows[-1:], rows[:1])
    first = expect(q[:1], k, v, do[:1])
    for name in ("dk", "dv"):
        total = repeats * want[name].value + first[name].value
        # One accumulator takes every row: the tensor cores truncate it once for eight of them at the most.
        allowed = (2 * unit_roundoff("float16") + block * repeats / 8 * 2.0**-23) * repeats * want[name].bound
        assert np.abs(getattr(got, name).astype(np.float64) - total).max() <= allowed


# --- the same bits every time ------------------------------------------------------------------------------------


@contextmanager
def load_elsewhere() -> Iterator[None]:
    """Keep another stream of the GPU busy with work of changing size."""
    stream = GPU.xp.cuda.Stream(non_blocking=True)
    with stream:
        a = GPU.xp.ones((2048, 2048), np.float32)
        for size in (256, 2048, 1024, 512) * 20:
            a[:size, :size] @ a[:size, :size]
    yield
    stream.synchronize()


def assert_repeats(arrays: list[Any], repeats: int, **options: Any) -> None:
    """Forward and backward give the same bits, however busy the GPU is."""
    q, k, v, do = arrays
    first: list[np.ndarray] = []
    for repeat in range(repeats):
        with load_elsewhere():
            o, lse = cuflash.attention(q, k, v, return_lse=True, **options)
            results = (o, lse, *cuflash.attention_backward(do, q, k, v, o, lse, **options))
            bits = [GPU.get(x) for x in results]
        if not repeat:
            first = bits
        for name, a, b in zip(("o", "lse", "dq", "dk", "dv"), first, bits, strict=True):
            assert same_bits(a, b), f"{name} differs in repeat {repeat}"


@gpu
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": (300, 100)}, {"causal": True, "window": (77, None), "softcap": 20.0}],
    ids=["full", "causal", "window", "causal window softcap"],
)
@pytest.mark.parametrize("d", [128, 256])
def test_b48_deterministic_is_bitwise(options: dict[str, Any], d: int) -> None:
    rng = RNG(48)
    shapes = ((2, 8, 2048, d), (2, 2, 2048, d), (2, 2, 2048, d), (2, 8, 2048, d))
    arrays = [put(GPU, normal(rng, shape, "bfloat16")) for shape in shapes]
    assert_repeats(arrays, 30 if d == 128 else 10, grouped_heads=True, **options)


@gpu
def test_b48_host_is_bitwise_too() -> None:
    rng = RNG(49)
    x = [normal(rng, (2, 65, 32), "float16") for _ in range(4)]
    first = run(GPU, *x)
    for _ in range(20):
        assert all(map(same_bits, first[:5], run(GPU, *x)[:5]))


@gpu
def test_b49_shared_buffers_are_not_reused_too_early() -> None:
    rng = RNG(50)
    batch, m, n, d = 300, 2048, 128, 128
    block = [normal(rng, (1, length, d), "float16", 3) for length in (m, n, n)] + [normal(rng, (1, m, d), "float16")]
    arrays = [put(GPU, np.broadcast_to(x, (batch, *x.shape[1:])).copy()) for x in block]
    want = expect(*block)
    q, k, v, do = arrays
    o, lse = cuflash.attention(q, k, v, return_lse=True)
    for repeat in range(50):
        gradients = cuflash.attention_backward(do, q, k, v, o, lse, deterministic=repeat % 2 == 0)
        if repeat % 10 < 2:
            for name, x in zip(("dq", "dk", "dv"), gradients, strict=True):
                want[name].check(GPU.get(x))
    want["o"].check(GPU.get(o))


# --- devices, streams, graphs, threads ---------------------------------------------------------------------------


@pytest.fixture
def second_device() -> None:
    if GPU.xp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")


@gpu
@pytest.mark.usefixtures("second_device")
def test_b54_b55_arrays_on_a_device_that_is_not_current() -> None:
    rng = RNG(54)
    x = [normal(rng, (2, 65, 256), "float16") for _ in range(4)]
    on_first = run(GPU, *x)  # kernels are loaded on one device before the other one needs them
    with GPU.xp.cuda.Device(1):
        q, k, v, do = (put(GPU, a) for a in x)
    o, vjp = cuflash.attention_vjp(q, k, v)
    gradients = vjp(do)
    assert GPU.xp.cuda.Device().id == 0
    assert all(a.device.id == 1 for a in (o, *gradients))
    with GPU.xp.cuda.Device(1):
        results = [GPU.get(a) for a in (o, *gradients)]
    for a, b in zip(results, (on_first.o, on_first.dq, on_first.dk, on_first.dv), strict=True):
        np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), atol=2e-3)
    with pytest.raises(ValueError, match="GPU 1"):
        cuflash.attention(put(GPU, x[0]), k, v)
    with pytest.raises(ValueError, match="GPU 0"):
        cuflash.attention(q, k, v, out=put(GPU, x[0]))


def python(code: str, **environment: str) -> str:
    """Run lines in a process of their own; its output."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", **environment},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@gpu
def test_b55_b57_first_calls_from_worker_threads(tmp_path: Path) -> None:
    code = """
    import threading
    import numpy as np
    from backends import GPU, put, same_bits
    import cuflash

    x = [np.random.default_rng(0).standard_normal((2, 65, 256)).astype(np.float16) for _ in range(4)]
    results, gate = [], threading.Barrier(6)

    def work():
        q, k, v, do = (put(GPU, a) for a in x)
        gate.wait()
        o, vjp = cuflash.attention_vjp(q, k, v)
        results.append([GPU.get(a) for a in (o, *vjp(do))])

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert len(results) == 6 and all(np.isfinite(a.astype(np.float32)).all() for a in results[0])
    assert all(same_bits(a, b) for other in results for a, b in zip(results[0], other))
    print("done")
    """
    assert "done" in python(code, CUFLASH_CACHE_DIR=str(tmp_path))


SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {}
}
"""


def spin(microseconds: int) -> None:
    """Keep the current stream waiting, at about 2 GHz."""
    GPU.xp.RawKernel(SPIN, "spin")((1,), (1,), (np.int64(2000 * microseconds),))


def stream_problem() -> tuple[list[list[np.ndarray]], list[Any]]:
    """Two sets of inputs, and what each of them gives."""
    rng = RNG(56)
    versions = [[normal(rng, (2, 130, 64), "float16") for _ in range(4)] for _ in range(2)]
    return versions, [run(GPU, *x, causal=True) for x in versions]


@gpu
def test_b56_every_launch_is_on_the_callers_stream() -> None:
    versions, want = stream_problem()
    cupy = GPU.xp
    sources = [[put(GPU, a) for a in x] for x in versions]
    x = [cupy.empty_like(a) for a in sources[0]]
    stream, results = cupy.cuda.Stream(non_blocking=True), []
    cupy.cuda.Device().synchronize()
    for repeat in range(200):
        with stream:
            spin(30)
            for into, source in zip(x, sources[repeat % 2], strict=True):
                into.data.copy_from_device_async(source.data, source.nbytes, stream)
            q, k, v, do = x
            o, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
            results.append((o, lse, *cuflash.attention_backward(do, q, k, v, o, lse, causal=True)))
    stream.synchronize()
    for repeat, got in enumerate(results):
        expected = want[repeat % 2]
        for name, a, b in zip(("o", "lse", "dq", "dk", "dv"), got, expected[:5], strict=True):
            assert same_bits(GPU.get(a), b), f"{name} in repeat {repeat}"


@gpu
def test_b56_nothing_waits_for_the_default_stream() -> None:
    versions, want = stream_problem()
    cupy = GPU.xp
    q, k, v, do = (put(GPU, a) for a in versions[0])
    stream, busy = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event()
    for microseconds in (0, 500_000):  # the first time, modules are loaded and memory is taken: that may wait
        cupy.cuda.Device().synchronize()
        with cupy.cuda.Stream.null:
            spin(microseconds)
            busy.record()
        with stream:
            o, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
            results = (o, lse, *cuflash.attention_backward(do, q, k, v, o, lse, causal=True))
            copies = [x.copy() for x in map(bits, results)]
        stream.synchronize()
    assert not busy.done, "the call waited for the default stream, or was slower than half a second"
    cupy.cuda.Device().synchronize()
    for a, b in zip(copies, want[0][:5], strict=True):
        assert (a.get() == b.view(bits_dtype(b.dtype))).all()


def bits(array: Any) -> Any:
    """A contiguous CuPy array as unsigned integers."""
    return GPU.view(array, bits_dtype(array.dtype), 0, array.shape, array.strides)


@gpu
@pytest.mark.parametrize("own_streams", ["two streams a thread", "per-thread default stream"])
def test_b57_threads_and_streams_do_not_share_scratch(own_streams: str) -> None:
    cupy = GPU.xp
    rng = RNG(57)
    problems = [[normal(rng, (2, 130, 64), "float16") for _ in range(4)] for _ in range(2)]
    want = [run(GPU, *x, causal=True)[:5] for x in problems]
    failures: list[str] = []

    def work(index: int) -> None:
        x = [put(GPU, a) for a in problems[index]]
        cupy.cuda.Device().synchronize()
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
        if own_streams.startswith("per-thread"):
            streams = [cupy.cuda.Stream.ptds] * 2
        for block in range(25):
            kept = []
            for repeat in range(20):
                with streams[repeat % 2]:
                    q, k, v, do = x
                    o, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
                    kept.append((o, lse, *cuflash.attention_backward(do, q, k, v, o, lse, causal=True)))
                    cupy.full(q.size, 255, np.uint16)  # takes and dirties a freed block of the same size
            for stream in streams:
                stream.synchronize()
            for results in kept:
                for name, a, b in zip(("o", "lse", "dq", "dk", "dv"), results, want[index], strict=True):
                    if not same_bits(GPU.get(a), b):
                        failures.append(f"{name}, thread {index}, block {block}")

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[:5]


@gpu
def test_b58_a_cold_call_under_capture() -> None:
    code = """
    import cupy, numpy as np
    from backends import GPU, put
    import cuflash

    x = [np.random.default_rng(0).standard_normal((2, 65, 64)).astype(np.float16) for _ in range(3)]
    q, k, v = (put(GPU, a) for a in x)
    out = (put(GPU, 0 * x[0]), put(GPU, np.zeros((2, 65), np.float32)))
    workspace = GPU.empty_bytes(cuflash.workspace_nbytes("attention", q, k, v))
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        try:
            cuflash.attention(q, k, v, return_lse=True, out=out, workspace=workspace)
        except RuntimeError as error:
            assert "capturing" in str(error), error
        else:
            raise SystemExit("no error")
        assert stream.is_capturing(), "the capture is broken"
        stream.end_capture()
        cuflash.attention(q, k, v, return_lse=True, out=out, workspace=workspace)
        stream.begin_capture()
        cuflash.attention(q, k, v, return_lse=True, out=out, workspace=workspace)
        graph = stream.end_capture()
        want = GPU.get(out[0])
        out[0].data.memset_async(255, out[0].nbytes, stream)
        graph.launch(stream)
        stream.synchronize()
    assert (GPU.get(out[0]) == want).all() and np.isfinite(want.astype(np.float32)).all()
    print("done")
    """
    assert "done" in python(code)


@gpu
@pytest.mark.parametrize("deterministic", [True, False])
def test_b58_replays_of_a_graph_see_new_data(deterministic: bool) -> None:
    cupy = GPU.xp
    rng = RNG(58)
    versions = [[normal(rng, (2, h, 130, 64), "bfloat16") for h in (4, 2, 2, 4)] for _ in range(3)]
    options: dict[str, Any] = {"causal": True, "grouped_heads": True, "deterministic": deterministic}
    want = [expect(*x, **options) for x in versions]
    x = [put(GPU, a) for a in versions[0]]
    q, k, v, do = x
    o, lse = cupy.empty_like(q), cupy.empty(q.shape[:-1], np.float32)
    gradients = tuple(cupy.empty_like(a) for a in (q, k, v))
    scratch = [
        GPU.empty_bytes(cuflash.workspace_nbytes(operation, q, k, v, **options))
        for operation in ("attention", "attention_backward")
    ]

    def calls() -> None:
        cuflash.attention(q, k, v, return_lse=True, out=(o, lse), workspace=scratch[0], **options)
        cuflash.attention_backward(do, q, k, v, o, lse, out=gradients, workspace=scratch[1], **options)

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        calls()
        stream.begin_capture()
        calls()
        graph = stream.end_capture()
        for values, expected in zip(versions[1:] + versions[:1], want[1:] + want[:1], strict=True):
            for array, new in zip(x, values, strict=True):
                bits(array).set(new.view(np.uint16))
            for array in (o, lse, *gradients):
                array.data.memset_async(255, array.nbytes, stream)
            graph.launch(stream)
            stream.synchronize()
            for name, array in zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *gradients), strict=True):
                expected[name].check(GPU.get(array))


# --- memory ------------------------------------------------------------------------------------------------------


TILES_ON_HOST = 48 * 2**20
"""A few tiles of scores and operands, whatever the lengths."""


def peak_of_both_passes(backend: Backend, x: list[Any], **options: Any) -> tuple[int, int]:
    """Most extra bytes of a forward and a backward pass, and bytes of their results."""
    q, k, v, do = x
    with measured(backend) as memory:
        o, lse = cuflash.attention(q, k, v, return_lse=True, **options)
        gradients = cuflash.attention_backward(do, q, k, v, o, lse, **options)
    results = sum(a.nbytes for a in (o, lse, *gradients) if a is not None)
    return memory.peak - results, results


@both
@pytest.mark.parametrize("kind", ["plain", "window", "key_bias"])
def test_b72_no_matrix_of_scores_and_no_repeated_heads(backend: Backend, kind: str) -> None:
    m, heads, kv_heads, d = (16384, 16, 2, 128) if backend is GPU else (2048, 8, 2, 64)
    rng = RNG(72)
    x = [put(backend, normal(rng, (1, h, m, d), "float16")) for h in (heads, kv_heads, kv_heads, heads)]
    options: dict[str, Any] = {"causal": True, "grouped_heads": True}
    if kind == "window":
        options["window"] = (16, None)
    if kind == "key_bias":
        options["key_bias"] = put(backend, rng.standard_normal((1, 1, m)).astype(np.float32))
    extra, _ = peak_of_both_passes(backend, x, **options)
    # float32 scratch of dq, and of dk and dv at kv_heads; on the host the tiles come on top.
    allowed = 4 * m * (d + 16) * (heads + 2 * kv_heads) + (0 if backend is GPU else TILES_ON_HOST)
    assert extra <= allowed
    if backend is GPU:
        assert allowed < heads * m * m / 4  # far from one byte a score


@both
def test_b73_gradients_of_shared_heads_are_not_made_for_each_query_head(backend: Backend) -> None:
    n = 65536 if backend is GPU else 2048
    rng = RNG(73)
    shapes = ((2, 64, 16, 64), (2, 1, n, 64), (2, 1, n, 64), (2, 64, 16, 64))
    x = [put(backend, normal(rng, shape, "bfloat16")) for shape in shapes]
    extra, _ = peak_of_both_passes(backend, x, grouped_heads=True)
    scratch = 4 * 64 * (2 * 2 * n + 2 * 64 * 16)  # dk, dv at one head, dq
    assert extra <= scratch + (8 * 2**20 if backend is GPU else TILES_ON_HOST)
    assert scratch < 64 * n * 64  # and one byte for each element of a dk of every query head is more than that


@gpu
def test_b72_memory_is_linear_in_the_sequence() -> None:
    rng = RNG(74)
    extras, inputs = [], []
    for m in (16384, 32768, 65536, 131072):
        x = [put(GPU, normal(rng, (m, 64), "float16")) for _ in range(4)]
        extra, _ = peak_of_both_passes(GPU, x)
        extras.append(extra)
        inputs.append(sum(a.nbytes for a in x[:3]))
    assert all(later <= 2.2 * before for before, later in itertools.pairwise(extras)), extras
    assert extras[-1] < 2 * inputs[-1]


@both
def test_b31_b26_the_layouts_of_this_file_are_served_together(backend: Backend) -> None:
    rng = RNG(75)
    x = [normal(rng, (2, 3, 65, 40), "float16") for _ in range(4)]
    places = {"q": swapped(4), "k": Layout(steps=(1, 1, -1, 1)), "v": Layout(steps=(1, 1, 2, 1)), "do": Layout(pad=1)}
    check(backend, *x, layouts=places, causal=True)
    assert dtype_of("float16") == x[0].dtype
