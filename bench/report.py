#!/usr/bin/env python3
"""Ratios, README's table and plots from the rows of bench/results/<gpu>.json.

    python bench/report.py                          ratios on the terminal
    python bench/report.py --readme README.md       and the table between the markers in README.md
    python bench/report.py --plots bench/results    and one picture for each operation and dtype

A ratio is taken within one shape of one run, never across runs; where a shape was measured more than once with a peer,
the latest run counts. Rows of kernels that are not those of the latest run stay in the file and out of the report.
Geometric means are over the shapes that have the ratio, and say how many.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench import rows
from bench.problems import full, points

Row = Mapping[str, Any]
OURS = "cuflash"
SHAPE = (
    "dtype", "precision", "head_dim", "value_dim", "causal", "window", "softcap", "key_bias", "batch", "heads",
    "kv_heads", "seqlen", "seqlen_k",
)  # fmt: skip
TITLES = {
    "cuflash_sm80": "cuflash, sm80 kernels", "sdpa_flash": "torch FlashAttention-2", "sdpa_cudnn": "torch cuDNN",
    "sdpa_efficient": "torch efficient", "sdpa_math": "torch math", "fa3": "FlashAttention-3",
    "fa3_jax": "FlashAttention-3 (JAX)", "fa4": "FlashAttention-4",
    "fa4_deterministic": "FlashAttention-4, deterministic", "cudnn_fe": "cuDNN frontend", "cupy": "plain CuPy",
}  # fmt: skip


class Ratio(NamedTuple):
    """Ours over a peer's speed, on one shape of one run; ``dtype`` as `arithmetic` names it."""

    op: str
    dtype: str
    head_dim: int
    causal: bool
    seqlen: int
    mode: str
    peer: str
    value: float


def shape_of(row: Row) -> tuple[Any, ...]:
    return tuple(tuple(value) if isinstance(value, list) else value for value in (row[name] for name in SHAPE))


def arithmetic(row: Row) -> str:
    """The dtype, or the precision that was asked for instead of the dtype's own: ``tf32`` has lines of its own."""
    return str(row["precision"] or row["dtype"])


def current(table: Sequence[Row]) -> list[Row]:
    """Rows of the kernels that were measured last."""
    if not table:
        return []
    sources = max(table, key=lambda row: row["run"])["versions"].get("kernels_cu")
    return [row for row in table if row["versions"].get("kernels_cu") == sources]


def grid_rows(table: Iterable[Row]) -> Iterator[Row]:
    """Timed rows on the grid's shapes."""
    shapes = {
        shape_of(problem.columns() | {"precision": precision})
        for dtype in ("float16", "bfloat16", "float32", "float64")
        for problem in full(dtype)
        for precision in ((None, "tf32") if dtype == "float32" else (None,))
    }
    return (
        row for row in table if row["ms"] is not None and row["op"] not in ("gemm", "copy") and shape_of(row) in shapes
    )


def ratios(table: Iterable[Row]) -> list[Ratio]:
    """Every ratio on the grid, the latest of each shape and peer."""
    by_run: dict[tuple[Any, ...], dict[tuple[str, str], Row]] = defaultdict(dict)
    for row in grid_rows(table):
        by_run[(row["run"], row["op"], shape_of(row))][row["peer"], row["mode"]] = row
    latest: dict[tuple[Any, ...], Ratio] = {}
    for (_, op, shape), peers in sorted(by_run.items(), key=lambda item: item[0][0]):
        for mode in ("default", "fast"):
            mine = peers.get((OURS, mode))
            for (peer, peer_mode), other in peers.items():
                if mine is None or peer == OURS or peer_mode != "default":
                    continue
                latest[op, shape, mode, peer] = Ratio(
                    op, arithmetic(mine), mine["head_dim"], mine["causal"], mine["seqlen"], mode, peer,
                    mine["tflops"] / other["tflops"],
                )  # fmt: skip
    return list(latest.values())


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def means(found: Iterable[Ratio]) -> dict[tuple[str, str, str, int], dict[str, tuple[float, float, int]]]:
    """(op, dtype, mode, head dim) -> peer -> geometric mean, least ratio, number of shapes."""
    grouped: dict[tuple[str, str, str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for ratio in found:
        grouped[ratio.op, ratio.dtype, ratio.mode, ratio.head_dim][ratio.peer].append(ratio.value)
    return {
        key: {peer: (geometric_mean(values), min(values), len(values)) for peer, values in peers.items()}
        for key, peers in sorted(grouped.items())
    }


def speeds(table: Iterable[Row], peer: str = OURS, mode: str = "default") -> dict[tuple[Any, ...], float]:
    """(op, dtype, head dim, causal, seqlen) -> TFLOP/s of the latest measurement."""
    found = {}
    for row in sorted(grid_rows(table), key=lambda row: row["run"]):
        if (row["peer"], row["mode"]) == (peer, mode):
            found[row["op"], arithmetic(row), row["head_dim"], row["causal"], row["seqlen"]] = float(row["tflops"])
    return found


def terminal(table: Sequence[Row]) -> str:
    """Geometric means, the least ratio, and how many shapes, as text."""
    lines = []
    for (op, dtype, mode, head_dim), peers in means(ratios(table)).items():
        lines.append(f"{op} {dtype} d {head_dim}{'' if mode == 'default' else f' ({mode})'}: cuflash over")
        for peer, (mean, least, count) in sorted(peers.items()):
            lines.append(f"  {peer:<15} {mean:6.3f}  (least {least:.3f}, {count} shapes)")
    return "\n".join(lines) or "no ratios: no run has cuflash and a peer on a shape of the grid"


def markdown(table: Sequence[Row]) -> str:
    """README's section: where and when, ceilings, ratios, and our speed on every shape."""
    found = means(ratios(table))
    timed = [row for row in table if row["ms"] is not None]
    if not timed:
        return "No results yet."
    last = max(timed, key=lambda row: row["run"])
    packages = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    text = [f"{last['device']}, {last['run'][:10]} ({packages}).", "", *ceilings(timed), ""]
    peers = [name for name in TITLES if any(name in by_peer for by_peer in found.values())]
    if peers:
        text += [
            "Speed of cuflash over each peer's, geometric mean over the grid (number of shapes where not all 12):",
            "",
        ]
        text += table_of(
            ["", "dtype", "d", *(TITLES[peer] for peer in peers)],
            (
                [
                    f"{op}{'' if mode == 'default' else ', ' + mode}",
                    dtype,
                    str(head_dim),
                    *(cell(by_peer, peer) for peer in peers),
                ]
                for (op, dtype, mode, head_dim), by_peer in found.items()
            ),
        )
    speed = speeds(table)
    lengths = sorted({key[-1] for key in speed})
    text += ["", "TFLOP/s of cuflash by sequence length (16,384 tokens in all, hidden size 2,048):", ""]
    text += table_of(
        ["", "dtype", "d", "causal", *map(str, lengths)],
        (
            [op, dtype, str(d), "yes" if causal else "no"]
            + [f"{speed[op, dtype, d, causal, s]:.0f}" if (op, dtype, d, causal, s) in speed else "" for s in lengths]
            for op, dtype, d, causal in sorted({key[:-1] for key in speed})
        ),
    )
    few = few_features(timed)
    if few:
        text += ["", "Few features and few queries, one head, results in milliseconds (speed over plain CuPy):", ""]
        text += few
    return "\n".join(text)


def few_features(timed: Sequence[Row]) -> list[str]:
    """A table of the latest run on each shape of the grid of points: a column for each dtype."""
    order = {shape_of(p.columns())[1:]: p for p in points("float32")}  # shapes but for the dtype
    latest: dict[tuple[Any, ...], dict[str, Row]] = defaultdict(dict)
    for row in sorted(timed, key=lambda row: row["run"]):
        if row["op"] == "forward" and row["mode"] == "default" and shape_of(row)[1:] in order:
            latest[shape_of(row)][row["peer"]] = row
    dtypes = sorted({shape[0] for shape, peers in latest.items() if OURS in peers})

    def cell(shape: tuple[Any, ...]) -> str:
        mine, cupy = (latest[shape].get(peer) for peer in (OURS, "cupy"))
        if mine is None:
            return ""
        over = f" ({cupy['ms'] / mine['ms']:.1f})" if cupy and cupy["run"] == mine["run"] else ""
        return f"{mine['ms']:.3f}{over}"

    body = [
        [str(p.head_dim), f"{p.seqlen:,}", f"{p.seqlen_k:,}", *(cell((dtype, *shape)) for dtype in dtypes)]
        for shape, p in order.items()
        if any((dtype, *shape) in latest for dtype in dtypes)
    ]
    return table_of(["d", "m", "n", *dtypes], body) if body else []


def ceilings(timed: Sequence[Row]) -> list[str]:
    """What the card gave in these runs, the least and the most, in one line."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in timed:
        if row["op"] in ("gemm", "copy"):
            is_product = row["op"] == "gemm"
            name = (row["precision"] or row["dtype"]) if is_product else ""
            found[row["op"], name].append(row["tflops"] if is_product else row["gbs"] / 1e3)

    def span(values: Sequence[float], digits: int) -> str:
        least, most = (f"{value:.{digits}f}" for value in (min(values), max(values)))
        return least if least == most else f"{least} to {most}"

    parts = [
        f"{name} matrix product {span(values, 0)} TFLOP/s" for (what, name), values in found.items() if what == "gemm"
    ]
    parts += [f"copy {span(values, 1)} TB/s" for (what, _), values in found.items() if what == "copy"]
    return [f"In the same runs, by cuBLAS through CuPy: {', '.join(parts)}."] if parts else []


def cell(by_peer: Mapping[str, tuple[float, float, int]], peer: str) -> str:
    if peer not in by_peer:
        return ""
    mean, _, count = by_peer[peer]
    return f"{mean:.2f}" if count == 12 else f"{mean:.2f} ({count})"


def table_of(header: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return lines + ["| " + " | ".join(each) + " |" for each in body]


def put_into(text: str, section: str, name: str = "results") -> str:
    """``text`` with ``section`` between the markers of its name; ValueError where they are not there once each, in
    order."""
    begin, end = (f"<!-- {name}:{which} -->" for which in ("begin", "end"))
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the file must have {begin} and {end} once each, in this order")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{section.strip()}\n{end}{rest.split(end)[1]}"


def plots(table: Sequence[Row], folder: Path, stem: str) -> list[Path]:
    """One picture for each operation and dtype: TFLOP/s against S, a panel for each head dim and causal or not."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    timed = list(grid_rows(table))
    names = [OURS, *TITLES]
    for op, dtype in sorted({(row["op"], arithmetic(row)) for row in timed}):
        by_peer = {name: speeds(timed, name) for name in names}
        dims = sorted({row["head_dim"] for row in timed if (row["op"], arithmetic(row)) == (op, dtype)})
        figure, axes = pyplot.subplots(2, len(dims), figsize=(4 * len(dims), 6), squeeze=False, sharex=True)
        for column, head_dim in enumerate(dims):
            for line, causal in enumerate((False, True)):
                axis = axes[line][column]
                for index, name in enumerate(names):
                    points = sorted(
                        (k[-1], v) for k, v in by_peer[name].items() if k[:-1] == (op, dtype, head_dim, causal)
                    )
                    if points:
                        style = {"c": "black", "lw": 2.5} if name == OURS else {"c": f"C{index - 1}", "lw": 1.2}
                        axis.plot(*zip(*points, strict=True), marker="o", ms=3, label=TITLES.get(name, name), **style)
                axis.set_ylim(bottom=0)
                axis.set_title(f"d {head_dim}{', causal' if causal else ''}", fontsize=10)
                by_length(axis)
        axes[0][0].set_ylabel("TFLOP/s")
        axes[1][0].set_ylabel("TFLOP/s")
        # Of all panels, as a peer may be in some of them alone.
        shown = {
            label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        labels = [TITLES.get(name, name) for name in names if TITLES.get(name, name) in shown]
        lines = [shown[label] for label in labels]
        figure.legend(lines, labels, loc="lower center", ncols=min(5, max(1, len(labels))), fontsize=8, frameon=False)
        figure.suptitle(f"{op}, {dtype}: by sequence length")
        figure.tight_layout(rect=(0, 0.07, 1, 1))
        path = folder / f"{stem}_{op}_{dtype}.png"
        figure.savefig(path, dpi=110)
        pyplot.close(figure)
        written.append(path)
    return written


def by_length(axis: Any) -> None:
    """The look of a panel over sequence lengths."""
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:.0f}" if x < 1024 else f"{x / 1024:.0f}k")
    axis.grid(alpha=0.3)


def newest(folder: Path) -> Path | None:
    """The result file written last; sweeps have files of their own, with an underscore in the name."""
    found = [path for path in folder.glob("*.json") if "_" not in path.stem]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, help="default: the newest in bench/results")
    parser.add_argument("--readme", type=Path, metavar="FILE", help="rewrite the section between its markers")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write pictures here")
    args = parser.parse_args(arguments)
    results = args.results or newest(rows.RESULTS)
    if results is None or not results.exists():
        print(f"no results at {results or rows.RESULTS}", file=sys.stderr)
        return 2
    table = current(rows.read(results))
    print(terminal(table))
    if args.readme:
        args.readme.write_text(put_into(args.readme.read_text(), markdown(table)))
    if args.plots:
        print(*plots(table, args.plots, results.stem), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
