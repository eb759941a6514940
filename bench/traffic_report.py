#!/usr/bin/env python3
"""The table, the figures and the bars of the rows that bench/traffic.py has written.

    python bench/traffic_report.py                              the table, as Markdown, and what misses a bar
    python bench/traffic_report.py --plots bench/results        and two pictures
    python bench/traffic_report.py --readme README.md           and the table between the markers in README.md

Of each shape the latest run counts. Exit code 1 where a bar is missed that the L2 does not explain.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench import rows
from bench.report import by_length, put_into, table_of
from bench.traffic import ATTENTIONS

Row = Mapping[str, Any]

TITLES = {
    "standard": "standard attention", "flash1": "FlashAttention-1", "cuflash": "cuflash",
    "safe_softmax": "safe softmax", "online_softmax": "online softmax",
}  # fmt: skip
COLORS = {
    "standard": "tab:red", "flash1": "tab:orange", "cuflash": "black", "safe_softmax": "tab:purple",
    "online_softmax": "tab:blue",
}  # fmt: skip
PASSES = {"safe_softmax": (3, 1), "online_softmax": (2, 1)}
"""Loads and stores of each element."""

DRAM_BAR, DRAM_FROM = 0.15, 4096
"""Most that measured bytes of DRAM may be from the prediction, of standard attention and ours, from this length on."""
PASS_BAR = 0.05
"""Most that the loads and stores of a softmax may be from the passes."""
RATIO_BAR, RATIO_AT = 10, 8192
"""Least that standard attention moves over ours, at this length."""


def latest(table: Iterable[Row]) -> list[Row]:
    """The last row of each shape and algorithm, by length."""
    found = {(row["algorithm"], *_shape(row)): row for row in sorted(table, key=lambda row: row["run"])}
    return sorted(found.values(), key=_shape)


def moved(row: Row) -> int:
    """Bytes of DRAM."""
    return int(row["dram_read"] + row["dram_write"])


def predicted(row: Row) -> int:
    return int(row["predicted_reads"] + row["predicted_writes"])


def passes(row: Row) -> tuple[float, float]:
    """Loads and stores of an element of a softmax's matrix."""
    matrix = row["score_matrix"] * row["heads"]
    return row["l1_load"] / matrix, row["l1_store"] / matrix


def missed(table: Sequence[Row]) -> Iterator[str]:
    """What the rows say against the bars."""
    for row in table:
        where = f"{TITLES[row['algorithm']]}, S {row['seqlen']}, d {row['head_dim']}"
        off = moved(row) / predicted(row) - 1
        counts = row["seqlen"] >= DRAM_FROM and not exceeds_l2(row)
        if row["algorithm"] in ("standard", "cuflash") and counts and abs(off) > DRAM_BAR:
            yield f"{where}: DRAM bytes are {off:+.0%} of the prediction, bar {DRAM_BAR:.0%}"
        for name, got, wanted in zip(("loads", "stores"), passes(row), PASSES.get(row["algorithm"], ()), strict=False):
            if abs(got / wanted - 1) > PASS_BAR:
                yield f"{where}: {got:.2f} {name} of each element, not {wanted} within {PASS_BAR:.0%}"
    for row in (row for row in table if row["algorithm"] == "cuflash" and row["seqlen"] == RATIO_AT):
        others = {x["algorithm"]: x for x in table if _shape(x) == _shape(row)}
        if set(ATTENTIONS) <= set(others):
            ratio = moved(others["standard"]) / moved(row)
            if ratio < RATIO_BAR:
                yield f"S {RATIO_AT}, d {row['head_dim']}: standard moves {ratio:.1f} times our bytes, bar {RATIO_BAR}"
            times = [others[name]["ms"] for name in ATTENTIONS]
            if times != sorted(times, reverse=True):
                yield f"S {RATIO_AT}, d {row['head_dim']}: times are not in order, {times} ms"


def exceeds_l2(row: Row) -> bool:
    """Whether k and v of two heads do not fit in half of the L2, so that the prediction, which has them read once, is
    a lower bound of ours. Some CTAs are at the next head already while others are at the one before; and each half of
    the L2 keeps what the SMs on its side have read, so that what all of them read is there twice."""
    k_and_v = 2 * row["score_matrix"] // row["seqlen"] * row["head_dim"]
    return row["algorithm"] == "cuflash" and 2 * k_and_v > row["device_l2_bytes"] // 2


def explained(table: Iterable[Row]) -> Iterator[str]:
    """Rows that no bar of DRAM holds for."""
    for row in filter(exceeds_l2, table):
        off = moved(row) / predicted(row) - 1
        yield (
            f"{TITLES[row['algorithm']]}, S {row['seqlen']}, d {row['head_dim']}: {off:+.0%}, as k and v of two heads "
            f"exceed half of the L2, {row['device_l2_bytes'] / 2e6:.1f} MB"
        )


def _shape(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("dtype", "causal", "head_dim", "seqlen"))


def markdown(table: Iterable[Row]) -> str:
    """A line for each attention and shape: MB a head, so that lengths with other numbers of heads compare."""
    header = ["S", "d", "heads", "algorithm", "predicted, MB a head", "measured", "ms", "peak memory, MB a head"]
    body = [
        [str(row["seqlen"]), str(row["head_dim"]), str(row["heads"]), TITLES[row["algorithm"]], *_measured(row)]
        for row in table
        if row["algorithm"] in ATTENTIONS
    ]
    return "\n".join(table_of(header, body))


def readme(table: Sequence[Row]) -> str:
    """The attentions at one length, each as a multiple of ours, too."""
    chosen = [row for row in table if row["algorithm"] in ATTENTIONS and row["seqlen"] == RATIO_AT]
    if not chosen:
        raise ValueError(f"no rows of length {RATIO_AT}")
    ours = {row["head_dim"]: row for row in chosen if row["algorithm"] == "cuflash"}
    header = ["d", "heads", "algorithm", "predicted, MB a head", "measured", "ms", "peak memory, MB a head",
              "bytes and time over ours"]  # fmt: skip
    body = []
    for row in chosen:
        of = ours[row["head_dim"]]
        over = f"{moved(row) / moved(of):.3g}, {row['ms'] / of['ms']:.2f}"
        body.append([str(row["head_dim"]), str(row["heads"]), TITLES[row["algorithm"]], *_measured(row), over])
    row = chosen[-1]
    title = (
        f"Bytes between the GPU and its memory, predicted and measured by hardware counters: {row['device']}, "
        f"{row['run'][:10]}, S {RATIO_AT}, {_kind(row)}. Peak memory is beyond the inputs."
    )
    return "\n".join([title, "", *table_of(header, body)])


def _measured(row: Row) -> list[str]:
    """Cells of a line: predicted and measured bytes, time and memory."""
    megabytes = [value / row["heads"] / 1e6 for value in (predicted(row), moved(row), row["peak_bytes"])]
    before, after, peak = (f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in megabytes)
    return [before, after, f"{row['ms']:.3f}", peak]


# --- figures ---------------------------------------------------------------------------------------------------------


def plots(table: Sequence[Row], folder: Path, stem: str) -> list[Path]:
    """The attentions' bytes, times and memory, a row of panels for each head dim; the softmaxes' loads and stores."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw, algorithms in (("", _draw_attentions, ATTENTIONS), ("_softmax", _draw_softmaxes, tuple(PASSES))):
        chosen = [row for row in table if row["algorithm"] in algorithms]
        if chosen:
            path = folder / f"{stem}{name}.png"
            draw(chosen).savefig(path, dpi=120)
            written.append(path)
    return written


def _draw_attentions(table: Sequence[Row]) -> Any:
    from matplotlib.figure import Figure

    dims = sorted({row["head_dim"] for row in table})
    figure = Figure(figsize=(12, 3.4 * len(dims) + 0.9), layout="constrained")
    panels = figure.subplots(len(dims), 3, squeeze=False, sharex=True)
    for line, head_dim in enumerate(dims):
        for algorithm in ATTENTIONS:
            of_it = [row for row in table if (row["algorithm"], row["head_dim"]) == (algorithm, head_dim)]
            lengths = [row["seqlen"] for row in of_it]
            style = {"color": COLORS[algorithm], "label": TITLES[algorithm]}
            bytes_axis, time_axis, memory_axis = panels[line]
            bytes_axis.plot(
                lengths, [predicted(row) / row["heads"] / 1e6 for row in of_it], ls="--", color=style["color"]
            )
            bytes_axis.plot(lengths, [moved(row) / row["heads"] / 1e6 for row in of_it], "o", **style)
            time_axis.plot(lengths, [row["ms"] / row["heads"] for row in of_it], "o-", **style)
            memory_axis.plot(lengths, [row["peak_bytes"] / row["heads"] / 1e6 for row in of_it], "o-", **style)
        for axis, unit in zip(
            panels[line], ("DRAM traffic, MB a head", "time, ms a head", "peak memory, MB a head"), strict=True
        ):
            axis.set_yscale("log")
            axis.set_ylabel(unit)
            axis.set_title(f"{head_dim} features", fontsize=10)
            by_length(axis)
    for axis in panels[-1]:
        axis.set_xlabel("sequence length")
    panels[0][0].plot([], [], ls="--", color="gray", label="predicted")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(f"Bytes, time and memory of a forward pass, {_where(table)}")
    return figure


def _draw_softmaxes(table: Sequence[Row]) -> Any:
    from matplotlib.figure import Figure

    head_dim = min(row["head_dim"] for row in table)  # of which a softmax knows nothing
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axis, (algorithm, wanted) in zip(panels, PASSES.items(), strict=True):
        of_it = [row for row in table if (row["algorithm"], row["head_dim"]) == (algorithm, head_dim)]
        lengths = [row["seqlen"] for row in of_it]
        matrices = [row["score_matrix"] * row["heads"] for row in of_it]
        for index, (name, color) in enumerate((("loads", "tab:blue"), ("stores", "tab:orange"))):
            axis.plot(lengths, [passes(row)[index] for row in of_it], "o-", color=color, label=f"{name}, L1")
            axis.axhline(wanted[index], ls="--", lw=1, color="gray", label="predicted" if index else None)
        for column, name, color in (("dram_read", "read", "tab:blue"), ("dram_write", "written", "tab:orange")):
            values = [row[column] / matrix for row, matrix in zip(of_it, matrices, strict=True)]
            axis.plot(lengths, values, "x:", color=color, alpha=0.7, label=f"{name}, DRAM")
        axis.set_title(f"{TITLES[algorithm]}: {wanted[0]} + {wanted[1]} passes", fontsize=10)
        axis.set_xlabel("length of a row")
        axis.set_ylim(0, 3.5)
        by_length(axis)
    panels[0].set_ylabel("bytes moved / bytes of the array")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(f"Loads and stores of a softmax, {_where(table)}")
    return figure


def _where(table: Sequence[Row]) -> str:
    return f"{_kind(table[-1])}, {table[-1]['device']}"


def _kind(row: Row) -> str:
    return f"{row['dtype']}{', causal' if row['causal'] else ''}"


def newest() -> Path | None:
    """The file of rows that was written last."""
    return max(rows.RESULTS.glob("*_traffic.json"), key=lambda path: path.stat().st_mtime, default=None)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, help="default: the newest *_traffic.json in bench/results")
    parser.add_argument("--readme", type=Path, metavar="FILE", help="rewrite the section between its markers")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write pictures here")
    args = parser.parse_args(arguments)
    results = args.results or newest()
    if results is None or not results.exists():
        print(f"no rows at {results or rows.RESULTS}", file=sys.stderr)
        return 2
    table = latest(rows.read(results))
    print(markdown(table))
    if args.plots:
        print(*plots(table, args.plots, results.stem), sep="\n")
    if args.readme:
        args.readme.write_text(put_into(args.readme.read_text(), readme(table), "traffic"))
    for line in explained(table):
        print(line)
    wrong = list(missed(table))
    print("\n".join(wrong) if wrong else "the bars are met")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
