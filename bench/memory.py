#!/usr/bin/env python3
"""Peak memory of a forward and a backward call against the sequence length: one head, 64 features, float16.

    python bench/memory.py                          on a GPU, S up to 131072
    python bench/memory.py --backend host --max-seqlen 8192

What counts is the peak beyond inputs and results, in units of the inputs. The bar: below 2 at the largest S, and linear
(doubling S does not more than double it, after the smallest sizes). Exit code 1 where it is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench import device
from bench.accuracy import backend
from bench.problems import Problem

BAR = 2.0
LINEAR_FROM, LINEAR = 8192, 2.05
"""Growth allowed when S doubles, from the S where the arrays outgrow what is allocated once."""
BLOCK = 512
"""CuPy's pool hands out multiples of this."""


def host_peak(call: Callable[[], Any]) -> int:
    """Peak memory of one call on the host beyond what was held before it, as NumPy reports it."""
    tracemalloc.start()
    try:
        result = call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        del result
        tracemalloc.stop()


def calls(
    q: Any, k: Any, v: Any, do: Any, causal: bool
) -> Iterator[tuple[str, Callable[[], Any], list[Any], list[Any]]]:
    """(name, call, its inputs, arrays like its results)."""
    import cuflash

    o, lse = cuflash.attention(q, k, v, causal=causal, return_lse=True)
    yield (
        "forward",
        lambda: cuflash.attention(q, k, v, causal=causal, return_lse=True),
        [q, k, v],
        [o, lse],
    )
    yield (
        "backward",
        lambda: cuflash.attention_backward(do, q, k, v, o, lse, causal=causal),
        [do, q, k, v, o, lse],
        [q, k, v],
    )


def measure(seqlen: int, head_dim: int, dtype: str, causal: bool, xp: Any, host: bool) -> Iterator[dict[str, Any]]:
    """A table row for each pass at one length."""
    problem = Problem(dtype=dtype, head_dim=head_dim, batch=1, heads=1, seqlen=seqlen, causal=causal)
    x = device.random_inputs(problem, xp)
    for op, call, inputs, results in calls(x.q, x.k, x.v, x.do, causal):
        if host:
            peak = host_peak(call)
        else:
            call()  # compiled and loaded before it counts
            device.free_memory()
            peak = device.peak_bytes(call)
        given = sum(each.nbytes for each in inputs)
        made = sum(each.nbytes if host else -(-each.nbytes // BLOCK) * BLOCK for each in results)
        extra = peak - made
        yield {
            "op": op, "seqlen": seqlen, "inputs": given, "results": made, "extra": extra, "ratio": extra / given,
            "score_matrix": seqlen * seqlen * int(x.q.dtype.itemsize),
        }  # fmt: skip


def missed(table: Sequence[dict[str, Any]]) -> list[str]:
    """What the table says against the bar."""
    found = []
    for op in ("forward", "backward"):
        of_op = sorted((row for row in table if row["op"] == op), key=lambda row: row["seqlen"])
        if of_op and not of_op[-1]["ratio"] < BAR:
            found.append(f"{op}: {of_op[-1]['ratio']:.2f} times the inputs at S {of_op[-1]['seqlen']}, bar {BAR}")
        for small, large in itertools.pairwise(of_op):
            if small["seqlen"] >= LINEAR_FROM and large["extra"] > LINEAR * max(small["extra"], BLOCK):
                found.append(f"{op}: grows from {small['extra']} to {large['extra']} bytes at S {large['seqlen']}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["auto", "host", "cuda"], default="auto")
    parser.add_argument("--max-seqlen", type=int, default=131072)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--json", type=Path, help="write the table here")
    args = parser.parse_args(arguments)
    xp, where = backend(args.backend)
    print(f"{where}, {args.dtype}, d {args.head_dim}, one head{', causal' if args.causal else ''}")
    print(f"{'op':<9}{'S':>8}{'inputs':>12}{'results':>12}{'extra':>12}{'extra/inputs':>14}{'S x S matrix':>16}")
    table = []
    seqlen = 1024
    while seqlen <= args.max_seqlen:
        for row in measure(seqlen, args.head_dim, args.dtype, args.causal, xp, where == "host"):
            table.append(row)
            print(f"{row['op']:<9}{row['seqlen']:>8}{row['inputs']:>12}{row['results']:>12}{row['extra']:>12}"
                  f"{row['ratio']:>14.3f}{row['score_matrix']:>16}", flush=True)  # fmt: skip
        seqlen *= 2
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"where": where, "table": table}, indent=1) + "\n")
    wrong = missed(table)
    print("\n".join(wrong) if wrong else "the bar is met")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
