#!/usr/bin/env python3
"""Host microseconds to enqueue a warm call on CuPy arrays, and where they go.

    python bench/host_time.py

The problem is small, so that the device never holds the host up. The bar: a forward under 20 us (median). Exit code 1
where it is missed. The parts are timed one by one in the same way and need not add up exactly.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench import device
from bench.problems import Problem

BAR_US = 20.0
BURST, BURSTS = 100, 20
"""Calls between two synchronisations: fewer than a stream queues, so that no call waits for the device."""
WARM_SECONDS = 1.0
"""Calls before those that count."""


def microseconds(call: Callable[[], Any], synchronize: Callable[[], Any]) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile of the host time of single calls."""
    until = time.monotonic() + WARM_SECONDS  # the card and the processor leave their idle states
    while time.monotonic() < until:
        for _ in range(BURST):
            call()
        synchronize()
    samples = []
    collects = gc.isenabled()
    gc.disable()
    try:
        for _ in range(BURSTS):
            for _ in range(BURST):
                begin = time.perf_counter_ns()
                call()
                samples.append(time.perf_counter_ns() - begin)
            synchronize()
    finally:
        if collects:
            gc.enable()
    low, middle, high = np.percentile(samples, [10, 50, 90]) / 1e3
    return float(middle), float(low), float(high)


def parts(cupy: Any, seqlen: int, head_dim: int, dtype: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What is timed: whole calls, then the steps of a forward in their order."""
    import cuflash
    from cuflash import arrays, calls, params

    x = device.random_inputs(Problem(dtype=dtype, head_dim=head_dim, batch=1, heads=1, seqlen=seqlen), cupy)
    q, k, v, do = x.q, x.k, x.v, x.do
    o, lse = cuflash.attention(q, k, v, return_lse=True)
    yield "attention(q, k, v)", lambda: cuflash.attention(q, k, v)
    yield "attention(q, k, v, return_lse=True)", lambda: cuflash.attention(q, k, v, return_lse=True)
    yield "attention(q, k, v, out=o)", lambda: cuflash.attention(q, k, v, out=o)
    yield "attention_lse(q, k)", lambda: cuflash.attention_lse(q, k)
    yield "attention_backward(do, q, k, v, o, lse)", lambda: cuflash.attention_backward(do, q, k, v, o, lse)

    options = (False, None, None, None, None, False, None, True)
    taken = calls.inputs(q, k, v, None, True, *options)
    launch = calls.launcher()
    families = launch.check(taken.problem, "attention")

    def context() -> None:
        with arrays.current(taken.problem.device):
            pass

    yield "  checks and problem lookup", lambda: calls.inputs(q, k, v, None, True, *options)
    yield "  is there a kernel for it", lambda: launch.check(taken.problem, "attention")
    yield "  device made current", context
    if taken.problem.o is not None:
        yield "  o allocated", partial(taken.problem.o.empty, cupy)
    yield "  launch", lambda: launch.forward(taken.problem, q, k, v, None, o, None, None, families)

    size = params.size("attention_forward", dtype)
    source = f'struct Params {{ char bytes[{size}]; }}; extern "C" __global__ void empty(Params p) {{}}'
    kernel = cupy.RawModule(code=source).get_function("empty").kernel
    struct = np.frombuffer(bytes(size), np.dtype(f"V{size}"))[0]
    yield "    of it: CuPy's launch of an empty kernel", lambda: kernel((1,), (32,), (struct,))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=128)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--json", type=Path, help="write every figure here")
    args = parser.parse_args(arguments)
    cupy = device.require_gpu()
    print(f"{device.name()}, {args.dtype}, one head, S {args.seqlen}, d {args.head_dim}: microseconds on the host")
    print(f"{'':<45}{'median':>8}{'p10':>8}{'p90':>8}")
    record = {}
    for label, call in parts(cupy, args.seqlen, args.head_dim, args.dtype):
        median, low, high = microseconds(call, cupy.cuda.runtime.deviceSynchronize)
        record[label.strip()] = {"median": median, "p10": low, "p90": high}
        print(f"{label:<45}{median:>8.1f}{low:>8.1f}{high:>8.1f}", flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"device": device.name(), "microseconds": record}, indent=1) + "\n")
    forward = record["attention(q, k, v)"]["median"]
    print(f"forward {forward:.1f} us, bar {BAR_US:.0f}: {'met' if forward < BAR_US else 'missed'}")
    return 0 if forward < BAR_US else 1


if __name__ == "__main__":
    raise SystemExit(main())
