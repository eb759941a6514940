"""Faults that users of other attention libraries met, continued: races, devices, streams, graphs, threads.

Each test carries the number of its row in the catalogue of such faults. All of them need a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends import (
    GPU,
    bits_dtype,
    normal,
    put,
    same_bits,
)
from checks import (
    compiled_kernels,  # noqa: F401 - a fixture
    expect,
    fused,
    run,
)

import cuflash

pytestmark = pytest.mark.gpu
RNG = np.random.default_rng
ROOT = Path(__file__).resolve().parent.parent


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


def test_b48_small_problems_are_bitwise_too() -> None:
    rng = RNG(49)
    x = [normal(rng, (2, 65, 32), "float16") for _ in range(4)]
    first = run(GPU, *x)
    for _ in range(20):
        assert all(map(same_bits, first[:5], run(GPU, *x)[:5]))


def test_b49_shared_buffers_are_not_reused_too_early() -> None:
    rng = RNG(50)
    batch, m, n, d = 300, 2048, 128, 128
    block = [normal(rng, (length, d), "float16", 3) for length in (m, n, n)] + [normal(rng, (m, d), "float16")]
    arrays = [put(GPU, np.broadcast_to(x, (batch, *x.shape)).copy()) for x in block]
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


@pytest.mark.parametrize("kernels", ["separate", "in turns", "unordered"])
def test_b58_replays_of_a_graph_see_new_data(kernels: str) -> None:
    cupy = GPU.xp
    rng = RNG(58)
    versions = [[normal(rng, (2, h, 130, 64), "bfloat16") for h in (4, 2, 2, 4)] for _ in range(3)]
    options: dict[str, Any] = {"causal": True, "grouped_heads": True, "deterministic": kernels != "unordered"}
    want = [expect(*x, **options) for x in versions]
    x = [put(GPU, a) for a in versions[0]]
    q, k, v, do = x
    o, lse = cupy.empty_like(q), cupy.empty(q.shape[:-1], np.float32)
    gradients = tuple(cupy.empty_like(a) for a in (q, k, v))

    def calls(scratch: list[Any]) -> None:
        cuflash.attention(q, k, v, return_lse=True, out=(o, lse), workspace=scratch[0], **options)
        cuflash.attention_backward(do, q, k, v, o, lse, out=gradients, workspace=scratch[1], **options)

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        with fused() if kernels == "in turns" else nullcontext():
            scratch = [
                GPU.empty_bytes(cuflash.workspace_nbytes(operation, q, k, v, **options))
                for operation in ("attention", "attention_backward")
            ]
            calls(scratch)
            stream.begin_capture()
            calls(scratch)
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


# --- counters that kernels leave at 0 ------------------------------------------------------------------------------


def counting_calls() -> list[Any]:
    """Calls whose kernels count: CTAs done with a row, of few and of many heads, and tiles that are claimed."""
    rng = RNG(59)
    arrays = [
        [put(GPU, normal(rng, (heads, length, d), dtype)) for length in (m, n, n)]
        for heads, m, n, d, dtype in (
            (1, 1, 300_000, 3, "float32"),
            (132, 1, 20_000, 3, "float16"),
            (40, 1024, 1024, 64, "float16"),
        )
    ]
    return [partial(cuflash.attention, *x, causal=x[0].shape[1] > 1) for x in arrays]


def test_calls_that_count_in_the_same_zeros_give_the_same_bits() -> None:
    """One after the other and, with counters by stream, side by side; a batch of many heads comes after one of few."""
    cupy = GPU.xp
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    calls = counting_calls()
    want = [GPU.get(call()) for call in calls]
    cupy.cuda.Device().synchronize()
    for repeat in range(20):
        results = []
        for i, call in enumerate(calls * 2):
            with streams[(i + repeat) % 3]:
                results.append(call())
        for stream in streams:
            stream.synchronize()
        for i, got in enumerate(results):
            assert same_bits(GPU.get(got), want[i % len(calls)]), f"call {i} in repeat {repeat}"


def test_replays_of_a_graph_beside_calls_that_count() -> None:
    """Though they were captured in the stream of those calls."""
    cupy = GPU.xp
    stream, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    calls = counting_calls()
    captured = [call() for call in calls]
    want = [GPU.get(o) for o in captured]
    nbytes = [cuflash.workspace_nbytes("attention", *call.args, **call.keywords) for call in calls]
    workspaces = [GPU.empty_bytes(count) for count in nbytes]
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        for call, o, scratch in zip(calls, captured, workspaces, strict=True):
            call(out=o, workspace=scratch)
        graph = stream.end_capture()
    for _ in range(20):
        for o in captured:
            o.data.memset_async(255, o.nbytes, other)
        graph.launch(other)
        with stream:
            results = [call() for call in calls]
        for each in (stream, other):
            each.synchronize()
        for got, expected in zip([*results, *captured], want * 2, strict=True):
            assert same_bits(GPU.get(got), expected)
