#!/usr/bin/env python3
"""Bytes that each algorithm of the lineage moves, by hardware counters, beside what cuflash.memory_traffic predicts.

    python bench/traffic.py                         S 512 to 32768, 64 and 128 features, float16
    python bench/traffic.py --max-seqlen 4096 --head-dim 64 --ncu /opt/nsight/ncu

For each shape two processes measure. One runs under ncu, each algorithm once from a cold L2, with the counters of DRAM,
of the L2 and of global loads and stores (L1); ncu repeats the whole process for as many passes as the counters need, so
that caches between kernels are as they are without it. The other times all algorithms in turns, with CUDA events, and
counts the peak memory of a call beyond its inputs. Heads are as many as make q, k, v and o more than four times the L2.

Rows are appended to bench/results/<gpu>_traffic.json; bench/traffic_report.py makes the table and the figures of them.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench import device, rows
from bench.problems import Problem
from bench.registry import Prepared
from bench.timing import Stopwatch, interleave

ATTENTIONS = ("standard", "flash1", "cuflash")
SOFTMAXES = ("safe_softmax", "online_softmax")
L2_MULTIPLE = 4
"""q, k, v and o of all heads are larger than the L2 by this factor."""

METRICS = {
    "dram__bytes_read.sum": "dram_read",
    "dram__bytes_write.sum": "dram_write",
    "lts__t_bytes.sum": "l2_bytes",
    "l1tex__t_bytes_pipe_lsu_mem_global_op_ld.sum": "l1_load",
    "l1tex__t_bytes_pipe_lsu_mem_global_op_st.sum": "l1_store",
}
"""Counters, and the columns of their sums over the kernels of a call. What the copy engine of sm_90 brings to shared
memory is in those of the L2 and DRAM, not in those of loads and stores."""


@dataclass(frozen=True)
class Shape:
    """What is measured: self-attention of so many heads, and softmaxes of as many square matrices."""

    seqlen: int
    head_dim: int
    heads: int
    dtype: str
    causal: bool


def heads_for(seqlen: int, head_dim: int, dtype: str, l2_bytes: int) -> int:
    """The least number of heads whose q, k, v and o exceed `L2_MULTIPLE` times the L2."""
    head = 4 * seqlen * head_dim * device.dtype_of(dtype).itemsize
    return L2_MULTIPLE * l2_bytes // head + 1


def calls(shape: Shape) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(algorithm, call): the attentions, then the softmaxes, whose inputs are made once those before are gone."""
    yield from _attentions(shape)
    device.free_memory()
    yield from _softmaxes(shape)


def _attentions(shape: Shape) -> Iterator[tuple[str, Callable[[], Any]]]:
    import cupy

    import cuflash
    from cuflash import lineage

    problem = Problem(
        dtype=shape.dtype, head_dim=shape.head_dim, batch=1, heads=shape.heads, seqlen=shape.seqlen, causal=shape.causal
    )
    x = device.random_inputs(problem, cupy)
    functions = (lineage.standard_attention, lineage.flash1_attention, cuflash.attention)
    for algorithm, function in zip(ATTENTIONS, functions, strict=True):
        yield algorithm, partial(function, x.q, x.k, x.v, causal=shape.causal)


def _softmaxes(shape: Shape) -> Iterator[tuple[str, Callable[[], Any]]]:
    import cupy

    from cuflash import lineage

    scores = cupy.empty((shape.heads, shape.seqlen, shape.seqlen), device.dtype_of(shape.dtype))
    for head in scores:  # a head at a time: random numbers are float32 first
        numbers = cupy.random.default_rng(0).standard_normal(head.shape, dtype=cupy.float32)
        head[...] = device.from_float32(numbers, shape.dtype)
    for algorithm, function in zip(SOFTMAXES, (lineage.safe_softmax, lineage.online_softmax), strict=True):
        yield algorithm, partial(function, scores)


# --- under ncu -------------------------------------------------------------------------------------------------------


def workload(shape: Shape) -> None:
    """Each algorithm once, from a cold L2, with only the call itself between the marks that ncu profiles."""
    from cupyx.profiler import profile

    for _, call in calls(shape):
        call()  # compiled and loaded before it counts
        device.free_memory()
        call()  # and its memory is allocated
        Stopwatch({}).flush()
        with profile():
            call()
        device.free_memory()


def algorithm_of(kernel: str) -> str:
    """Whose kernel it is; matrix products are standard attention's."""
    own = {
        "safe_softmax": "safe_softmax",
        "online_softmax": "online_softmax",
        "flash1_": "flash1",
        "attention_": "cuflash",
    }
    return next((name for prefix, name in own.items() if kernel.startswith(prefix)), "standard")


def parse(text: str) -> dict[str, dict[str, Any]]:
    """Sums of `METRICS` by algorithm, and its kernels, from what ``ncu --csv --page raw --print-units base`` writes."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    table = list(csv.DictReader(io.StringIO("\n".join(lines))))
    if not table or "Kernel Name" not in table[0]:
        raise ValueError(f"ncu wrote no table of kernels: {text.strip()[:500]}")
    found: dict[str, dict[str, Any]] = defaultdict(lambda: {**dict.fromkeys(METRICS.values(), 0), "kernels": []})
    for row in table:
        if not row["ID"]:  # the line of units
            continue
        sums = found[algorithm_of(row["Kernel Name"])]
        sums["kernels"].append(row["Kernel Name"])
        for metric, column in METRICS.items():
            sums[column] += round(float(row[metric].replace(",", "")))
    return dict(found)


def counted(shape: Shape, ncu: str) -> dict[str, dict[str, Any]]:
    """`parse` of a run of `workload` under ncu."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [
            ncu, "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log),
            "--metrics", ",".join(METRICS), "--replay-mode", "application", "--cache-control", "none",
            "--clock-control", "none", "--profile-from-start", "off",
            sys.executable, str(Path(__file__).resolve()), "--workload", json.dumps(asdict(shape)),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        written = log.read_text() if log.exists() else ""
        if done.returncode != 0:
            raise RuntimeError(f"ncu failed: {(done.stderr or done.stdout or written).strip()[-1000:]}")
        return parse(written)


# --- without it ------------------------------------------------------------------------------------------------------


def timed(shape: Shape) -> dict[str, dict[str, Any]]:
    """Milliseconds and peak bytes of each algorithm. Those of attention take turns, and so do the softmaxes."""
    found: dict[str, dict[str, Any]] = {}
    group: dict[str, Prepared] = {}
    for algorithm, call in calls(shape):
        call()
        device.free_memory()
        found[algorithm] = {"peak_bytes": device.peak_bytes(call)}
        group[algorithm] = Prepared(call, lambda _: {})
        if algorithm in (ATTENTIONS[-1], SOFTMAXES[-1]):
            taken = interleave(list(group), Stopwatch(group).batch)
            for name, timing in taken.items():
                found[name]["ms"] = timing.ms
            group = {}
            device.free_memory()
    return found


def table(
    shape: Shape,
    base: Mapping[str, Any],
    l2_bytes: int,
    counters: Mapping[str, Mapping[str, Any]],
    times: Mapping[str, Mapping[str, Any]],
) -> Iterator[dict[str, Any]]:
    """A row for each algorithm."""
    import cuflash

    for algorithm in (*ATTENTIONS, *SOFTMAXES):
        predicted = cuflash.memory_traffic(
            algorithm, shape.seqlen, shape.seqlen, shape.head_dim, heads=shape.heads, dtype=shape.dtype,
            causal=shape.causal, l2_bytes=l2_bytes,
        )  # fmt: skip
        yield {
            **base, "algorithm": algorithm, **asdict(shape), "device_l2_bytes": l2_bytes,
            "predicted_reads": predicted["reads"], "predicted_writes": predicted["writes"],
            "score_matrix": predicted["score_matrix"],
            **counters[algorithm], **times[algorithm],
        }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--min-seqlen", type=int, default=512)
    parser.add_argument("--max-seqlen", type=int, default=32768)
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--ncu", default="ncu", metavar="PATH", help="the Nsight Compute command line")
    parser.add_argument("--results", type=Path, help="default: bench/results/<gpu>_traffic.json")
    parser.add_argument("--workload", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    cupy = device.require_gpu()
    if args.workload:
        workload(Shape(**json.loads(args.workload)))
        return 0
    l2_bytes = int(cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["l2CacheSize"])
    results = args.results or rows.RESULTS / f"{rows.slug(device.name())}_traffic.json"
    base = {
        "run": datetime.now(UTC).isoformat(timespec="seconds"), "device": device.name(), "versions": device.versions()
    }  # fmt: skip
    for head_dim in args.head_dim:
        for seqlen in _doublings(args.min_seqlen, args.max_seqlen):
            heads = heads_for(seqlen, head_dim, args.dtype, l2_bytes)
            shape = Shape(seqlen, head_dim, heads, args.dtype, args.causal)
            made = list(table(shape, base, l2_bytes, counted(shape, args.ncu), timed(shape)))
            rows.append(results, made)
            for row in made:
                print(_line(row), flush=True)
    return 0


def _doublings(first: int, last: int) -> Iterable[int]:
    while first <= last:
        yield first
        first *= 2


def _line(row: Mapping[str, Any]) -> str:
    moved, predicted = row["dram_read"] + row["dram_write"], row["predicted_reads"] + row["predicted_writes"]
    return (
        f"S {row['seqlen']:>6} d {row['head_dim']:>4} heads {row['heads']:>4} {row['algorithm']:<15}"
        f"DRAM {moved / 1e6:>11,.1f} MB, predicted {predicted / 1e6:>11,.1f}, {row['ms']:>9.3f} ms, "
        f"peak {row['peak_bytes'] / 1e6:>10,.1f} MB"
    )


if __name__ == "__main__":
    raise SystemExit(main())
