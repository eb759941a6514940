#!/usr/bin/env python3
"""Times cuflash and its peers, each checked against float64 first, and appends rows to bench/results/<gpu>.json.

    python bench/run.py --grid full --op forward backward --dtype bfloat16
    python bench/run.py --grid quick --peers cuflash sdpa_flash --minutes 3
    python bench/run.py --list

One invocation is one run: only figures of one run may be compared, and only within a shape. Shapes are written as they
are done, so a run that is stopped, or out of its minutes, keeps what it has.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the checkout, where cuflash is not installed

import bench.peers
import bench.peers_cudnn  # noqa: F401 - both register theirs
from bench import check, device, rows
from bench.problems import DTYPES, GRIDS, OPS, Problem
from bench.registry import PEERS, Peer, Prepared, Unsupported
from bench.timing import Stopwatch, Timing, interleave

Entry = tuple[Peer, str]
"""A peer and a mode of it."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", nargs="+", choices=OPS, default=["forward", "backward"])
    parser.add_argument("--grid", choices=GRIDS, default="full", help="shapes to measure (default: %(default)s)")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16"])
    parser.add_argument("--precision", choices=["tf32"], help="of float32 problems")
    parser.add_argument("--head-dim", nargs="+", type=int, metavar="D", help="only these head dims of the grid")
    parser.add_argument("--causal", choices=["yes", "no", "both"], default="both")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS), metavar="PEER")
    parser.add_argument("--mode", nargs="+", choices=["default", "fast"], default=["default"])
    parser.add_argument("--out", type=Path, help="result file to append to (default: bench/results/<gpu>.json)")
    parser.add_argument("--minutes", type=float, help="start no shape after this many minutes")
    parser.add_argument("--no-ceilings", action="store_true", help="leave out the GEMM and copy rows")
    parser.add_argument("--list", action="store_true", help="say which peers and shapes there are, and stop")
    return parser.parse_args(arguments)


def selected(args: argparse.Namespace) -> list[Problem]:
    """The problems that the command line asks for."""
    found = []
    for dtype in args.dtype:
        for problem in GRIDS[args.grid](dtype):
            if args.head_dim and problem.head_dim not in args.head_dim:
                continue
            if args.causal != "both" and problem.causal != (args.causal == "yes"):
                continue
            if args.precision and dtype == "float32":
                problem = Problem(**{**vars(problem), "precision": args.precision})
            found.append(problem)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    problems = selected(args)
    if args.list:
        for each in PEERS.values():
            print(f"{each.name:<15} {each.missing() or 'available'}")
        print(*problems, sep="\n")
        return 0
    cupy = device.require_gpu()
    gpu = device.name()
    out = args.out or rows.RESULTS / f"{rows.slug(gpu)}.json"
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    common = {"run": now, "device": gpu, "versions": device.versions()}
    print(f"{gpu}, run {now}, {len(problems)} shapes, results to {out}", flush=True)
    begin = time.monotonic()
    if not args.no_ceilings:
        rows.append(out, [rows.row(common | each) for each in ceilings(cupy, args.dtype)])
    entries = [(PEERS[name], mode) for name in args.peers for mode in args.mode]
    for index, problem in enumerate(progress(problems)):
        if args.minutes is not None and time.monotonic() - begin > 60 * args.minutes:
            say(f"out of time: {len(problems) - index} of {len(problems)} shapes not started")
            break
        found = list(measure(problem, args.op, entries, cupy))
        rows.append(out, [rows.row(common | each) for each in found])
        elapsed = time.monotonic() - begin
        for op in args.op:
            figures = " ".join(summary(each) for each in found if each["op"] == op)
            say(f"[{index + 1}/{len(problems)} {elapsed:.0f} s] {op} {problem}: {figures}")
    return 0


def progress(problems: Sequence[Problem]) -> Iterable[Problem]:
    """A bar on a terminal, where tqdm is installed; a log has the lines that ``say`` writes."""
    try:
        from tqdm import tqdm
    except ImportError:
        return problems
    bar: Iterable[Problem] = tqdm(problems, disable=None, unit="shape")
    return bar


def say(text: str) -> None:
    """A line that does not tear a progress bar."""
    tqdm = sys.modules.get("tqdm")
    if tqdm is None:
        print(text)
    else:
        tqdm.tqdm.write(text)
    sys.stdout.flush()


def summary(row: dict[str, Any]) -> str:
    """A row as a log shows it: TFLOP/s, or '-' with the reason left to the file."""
    label = row["peer"] if row["mode"] == "default" else f"{row['peer']}({row['mode']})"
    return f"{label} {row['tflops']:.0f}" if row["ms"] is not None else f"{label} -"


def measure(problem: Problem, ops: Sequence[str], entries: Sequence[Entry], cupy: Any) -> Iterator[dict[str, Any]]:
    """One row for each op and entry: timed, or with the reason why not."""
    inputs = device.random_inputs(problem, cupy)
    heads = check.sampled_heads(problem)
    gradients = "backward" in ops
    expected = {at: check.reference(problem, inputs, at, cupy, gradients) for at in heads}
    for op in ops:
        applicable = [(peer, mode) for peer, mode in entries if mode in peer.modes_of(op)]
        # Dense peers hold score matrices of tens of gigabytes: each is prepared, timed and dropped on its own.
        together = [entry for entry in applicable if not entry[0].dense]
        for group in (together, *([entry] for entry in applicable if entry[0].dense)):
            yield from _measure_group(problem, op, group, inputs, expected)


def _measure_group(
    problem: Problem, op: str, group: Sequence[Entry], inputs: device.Inputs, expected: dict[tuple[int, int], Any]
) -> Iterator[dict[str, Any]]:
    prepared: dict[str, Prepared] = {}
    peaks: dict[str, int | None] = {}
    reasons: dict[str, str] = {}
    device.free_memory()
    for peer, mode in group:
        key = f"{peer.name} {mode}"
        reason = peer.refusal(problem, op)
        if reason is not None:
            reasons[key] = reason
            continue
        try:
            one = peer.prepare(problem, inputs, op, mode)
            reason = wrong(problem, one, expected)
            if reason is None:
                peaks[key] = device.peak_bytes(one.run) if one.wait is None else None
                prepared[key] = one
        except Unsupported as error:
            reason = str(error)
        except Exception as error:  # whatever a library throws is that library's row, not the end of the run
            reason = told(error)
        if reason is not None:
            reasons[key] = reason
            say(f"    {op} {problem}: {key}: {reason}")
    timings = _timings(prepared, reasons)
    prepared.clear()
    for peer, mode in group:
        key = f"{peer.name} {mode}"
        values = {"op": op, "peer": peer.name, "mode": mode, "reason": reasons.get(key)} | problem.columns()
        if key in timings:
            ms = timings[key].ms
            values |= {"ms": ms, "tflops": problem.flops(op) / ms / 1e9, "gbs": problem.nbytes(op) / ms / 1e6}
            values["peak_bytes"] = peaks[key]
        yield {"ms": None, "tflops": None} | values


def _timings(prepared: dict[str, Prepared], reasons: dict[str, str]) -> dict[str, Timing]:
    if not prepared:
        return {}
    try:
        return interleave(list(prepared), Stopwatch(prepared).batch)
    except Exception as error:
        for key in prepared:
            reasons[key] = f"timing failed: {told(error)}"
        return {}


def told(error: Exception) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def wrong(problem: Problem, one: Prepared, expected: dict[tuple[int, int], Any]) -> str | None:
    """Runs the operation once and says what is wrong with its results, or None."""
    results = one.outputs(one.run())
    allowed = check.limit(problem)
    for at, reference in expected.items():
        for name, error in check.errors(problem, results, at, reference).items():
            if not error <= allowed:
                return f"wrong: {name} of head {at} is off by {error:.1e} of its norm, more than {allowed:.1e}"
    return None


def ceilings(cupy: Any, dtypes: Sequence[str], size: int = 8192) -> Iterator[dict[str, Any]]:
    """What the card gives in this run: one matrix product in each dtype (cuBLAS through CuPy) and a copy."""
    base = {"peer": "cupy", "mode": "default"}
    wanted: list[tuple[str, str | None]] = [(dtype, None) for dtype in dict.fromkeys(("bfloat16", "float16", *dtypes))]
    if "float32" in dtypes:
        wanted.append(("float32", "tf32"))
    for dtype, precision in wanted:
        problem = Problem(dtype=dtype, head_dim=size, batch=1, heads=1, seqlen=size)
        inputs = device.random_inputs(problem, cupy)
        a, b = inputs.q[0, 0], inputs.k[0, 0]
        c = cupy.empty_like(a)
        with _tf32(cupy, precision == "tf32"):
            one = Prepared(partial(cupy.matmul, a, b, out=c), lambda _: {})
            ms = interleave(["gemm"], Stopwatch({"gemm": one}).batch)["gemm"].ms
        shape = {"dtype": dtype, "precision": precision, "head_dim": size, "seqlen": size, "seqlen_k": size}
        yield base | {"op": "gemm", "ms": ms, "tflops": 2.0 * size**3 / ms / 1e9} | shape
    source = cupy.empty(1 << 30, cupy.uint8)
    target = cupy.empty_like(source)
    copy = Prepared(lambda: target.data.copy_from_device_async(source.data, source.nbytes), lambda _: {})
    ms = interleave(["copy"], Stopwatch({"copy": copy}).batch)["copy"].ms
    yield base | {"op": "copy", "ms": ms, "gbs": 2 * source.nbytes / ms / 1e6}
    device.free_memory()


class _tf32:
    """CuPy's float32 matrix products in TF32, for the ceiling of that precision alone."""

    def __init__(self, cupy: Any, on: bool) -> None:
        self._set = getattr(cupy._core, "set_compute_type", None) if on else None
        self._float32 = cupy.float32

    def __enter__(self) -> None:
        if self._set is not None:
            self._set(self._float32, 7)  # COMPUTE_TYPE_TF32

    def __exit__(self, *_: object) -> None:
        if self._set is not None:
            self._set(self._float32, 1)  # COMPUTE_TYPE_DEFAULT


if __name__ == "__main__":
    raise SystemExit(main())
