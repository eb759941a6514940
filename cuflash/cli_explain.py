"""Why flash attention is faster, for a shape of one's own: ``python -m cuflash explain``. Arithmetic alone, no GPU."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cuflash import ceilings, cli_info, params, problem, tiles, traffic
from cuflash.ceilings import Ceiling
from cuflash.traffic import Traffic

MB = 1e6
_WIDTHS = (16, 16, 12, 10, 11, 15)
ALGORITHMS = {"standard": "standard attention", "flash1": "FlashAttention-1", "cuflash": "cuflash"}


def add_parser(subparsers: Any) -> None:
    """Add the command to the subparsers of ``python -m cuflash``."""
    parser = subparsers.add_parser(
        "explain",
        help="why flash attention is faster, in bytes, for a shape of yours",
        description="Bytes that standard attention, FlashAttention-1 and cuflash move for one shape, what a GPU would "
        "take for them at best, and the memory that they need. A model: nothing runs, no GPU is needed. MB are 10^6 "
        "bytes.",
    )
    parser.add_argument("--seqlen", type=int, required=True, metavar="S", help="queries, and keys unless --seqlen-k")
    parser.add_argument("--seqlen-k", type=int, metavar="N", help="keys")
    parser.add_argument("--head-dim", type=int, required=True, metavar="D", help="features of q and k")
    parser.add_argument("--value-dim", type=int, metavar="E", help="features of v (default: as many)")
    parser.add_argument("--heads", type=int, default=1, metavar="H", help="heads in all, of all batch entries (1)")
    parser.add_argument("--dtype", choices=problem.DTYPES, default="float16")
    parser.add_argument("--causal", action="store_true", help="each row sees the keys up to its own")
    names = [row.name for row in ceilings.CEILINGS]
    parser.add_argument("--gpu", choices=names, help="whose ceilings (default: this machine's, where known, else H200)")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the bytes of each algorithm, as .png, .svg, ..."
    )
    parser.set_defaults(run=run)


class Shape(NamedTuple):
    """What is asked about."""

    m: int
    n: int
    d: int
    e: int
    heads: int
    dtype: str
    causal: bool

    def operands(self) -> int:
        """Bytes of q, k, v and o, all heads."""
        return tiles.ITEMSIZE[self.dtype] * self.heads * (self.m + self.n) * (self.d + self.e)

    def flops(self) -> float:
        """Multiplications and additions of the two products; only those that count where causal."""
        seen = self.m * self.n
        if self.causal:
            least = max(0, self.n - self.m)  # keys before the first row's own
            rows = min(self.m, self.n)
            seen = rows * least + rows * (rows + 1) // 2
        return 2.0 * self.heads * seen * (self.d + self.e)

    def traffic(self, algorithm: str, l2_bytes: int = 0) -> Traffic:
        return traffic.memory_traffic(
            algorithm, self.m, self.n, self.d, value_dim=self.e, heads=self.heads, dtype=self.dtype,
            causal=self.causal, l2_bytes=l2_bytes,
        )  # fmt: skip

    def extra_bytes(self, algorithm: str) -> int:
        """Memory beyond q, k, v and o, all heads."""
        if algorithm == "standard":
            return tiles.ITEMSIZE[self.dtype] * self.heads * self.m * self.n
        if algorithm == "flash1":  # o, l and m between passes
            return tiles.accumulator_bytes(self.dtype) * self.heads * self.m * (self.e + 2)
        if self.dtype != "float32":
            return 0
        # What compute capability 9.0 splits q, k and v into.
        return 2 * params.planes(self.dtype) * self.heads * (self.m * self.d + self.n * (self.d + self.e))


def run(arguments: argparse.Namespace) -> int:
    """Print the argument, and draw it where a file is named."""
    shape = Shape(
        arguments.seqlen,
        arguments.seqlen if arguments.seqlen_k is None else arguments.seqlen_k,
        arguments.head_dim,
        arguments.head_dim if arguments.value_dim is None else arguments.value_dim,
        arguments.heads,
        arguments.dtype,
        arguments.causal,
    )
    gpu, origin = _ceiling(arguments.gpu)
    _check(shape, gpu)
    print("\n".join(_text(shape, gpu, origin)))
    if arguments.plot:
        _plot(shape, gpu, arguments.plot)
        print(f"\n{arguments.plot}: bytes of each algorithm")
    return 0


def _ceiling(asked: str | None) -> tuple[Ceiling, str]:
    """The GPU to speak of, and how it was chosen."""
    driver = None if asked else cli_info.find_driver()
    present = driver.devices[0].name if driver and driver.devices else ""
    if row := ceilings.named(asked or present):
        return row, "asked for" if asked else "of this machine"
    row = ceilings.named(ceilings.DEFAULT)
    assert row is not None
    return row, f"{present} is not in the table" if present else "no GPU here"


def _check(shape: Shape, gpu: Ceiling) -> None:
    """Raise for a shape that no call could have, naming the limit."""
    sizes = {"--seqlen": shape.m, "--seqlen-k": shape.n, "--head-dim": shape.d, "--value-dim": shape.e}
    for name, value in (sizes | {"--heads": shape.heads}).items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    most = params.MAX_INT - 1024
    if shape.m + shape.n > most:
        raise ValueError(f"queries and keys are {shape.m + shape.n} together; kernels count rows up to {most}")
    features = max(shape.d, shape.e)
    if features > tiles.MAX_HEAD_DIM:
        raise ValueError(f"{features} features; the kernels take at most {tiles.MAX_HEAD_DIM} (the host any number)")
    if not gpu.flops_of(shape.dtype):
        raise ValueError(f"the {gpu.name} has no matrix products in {shape.dtype}")
    if shape.operands() > gpu.memory_bytes:
        raise ValueError(
            f"q, k, v and o alone take {shape.operands() / MB:,.0f} MB, the {gpu.name} has "
            f"{gpu.memory_bytes / MB:,.0f} MB of memory"
        )


def _known(shape: Shape) -> Iterator[tuple[str, str]]:
    """Algorithms that have tiles for the shape."""
    features = max(shape.d, shape.e)
    for algorithm, title in ALGORITHMS.items():
        try:
            if algorithm != "standard":
                traffic.default_tile(algorithm, shape.dtype, features)
        except ValueError:
            continue
        yield algorithm, title


def _text(shape: Shape, gpu: Ceiling, origin: str) -> Iterator[str]:
    source = "measured" if gpu.measured else "data sheet"
    yield (
        f"{shape.heads} head{'s' if shape.heads > 1 else ''}, {shape.m:,} queries, {shape.n:,} keys, {shape.d} features"
        f"{f', {shape.e} of v' if shape.e != shape.d else ''}, {shape.dtype}{', causal' if shape.causal else ''}"
    )
    flops, bandwidth = gpu.flops_of(shape.dtype), gpu.bytes_per_second
    yield (
        f"{gpu.name} ({origin}; {source}): {bandwidth / 1e12:.2f} TB/s, {flops / 1e12:.0f} TFLOP/s in {shape.dtype}, "
        f"ridge point {gpu.ridge(shape.dtype):.0f} FLOP/byte, L2 {gpu.l2_bytes / MB:.0f} MB"
    )
    matrix = shape.traffic("standard")["score_matrix"]
    yield ""
    yield (
        f"The matrix of scores has {shape.m:,} x {shape.n:,} elements: {matrix / MB:,.1f} MB a head, where q, k, v and "
        f"o have {shape.operands() / shape.heads / MB:,.1f} MB together."
    )
    yield (
        "Standard attention writes it, reads it for the softmax, writes the probabilities and reads them again: four "
        f"passes, {4 * matrix / MB:,.1f} MB a head."
    )
    yield ""
    yield from _table(shape, gpu)
    yield ""
    yield from _verdict(shape, gpu)


def _table(shape: Shape, gpu: Ceiling) -> Iterator[str]:
    header = ("memory traffic", "without an L2", "intensity", "bound by", "at best", "extra memory")
    for words in (header, ("MB", "MB", "FLOP/byte", "", "ms", "MB")):
        yield f"{'':<20}" + "".join(f"{word:>{width}}" for word, width in zip(words, _WIDTHS, strict=True))
    for algorithm, title in _known(shape):
        moved = shape.traffic(algorithm, gpu.l2_bytes)["total"]
        plain = shape.traffic(algorithm)["total"]
        bound, seconds = _at_best(shape, gpu, algorithm)
        intensity = _work(shape, algorithm) / moved
        cells = (
            f"{moved / MB:,.1f}", f"{plain / MB:,.1f}", f"{intensity:,.0f}", bound, f"{1e3 * seconds:,.3f}",
            f"{shape.extra_bytes(algorithm) / MB:,.1f}",
        )  # fmt: skip
        yield f"{title:<20}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))


def _work(shape: Shape, algorithm: str) -> float:
    """Operations: standard attention multiplies what causality hides, too."""
    return shape._replace(causal=False).flops() if algorithm == "standard" else shape.flops()


def _at_best(shape: Shape, gpu: Ceiling, algorithm: str) -> tuple[str, float]:
    """What an algorithm is bound by, and the least time it can take: with everything else hidden behind that."""
    computing = _work(shape, algorithm) / gpu.flops_of(shape.dtype)
    moving = shape.traffic(algorithm, gpu.l2_bytes)["total"] / gpu.bytes_per_second
    return ("compute", computing) if computing >= moving else ("memory", moving)


def _verdict(shape: Shape, gpu: Ceiling) -> Iterator[str]:
    known = [algorithm for algorithm, _ in _known(shape)]
    standard = shape.traffic("standard", gpu.l2_bytes)["total"]
    needed = shape.operands() + shape.extra_bytes("standard")
    if needed > gpu.memory_bytes:
        yield (
            f"Standard attention needs {needed / MB:,.0f} MB, more than the {gpu.memory_bytes / MB:,.0f} MB of the "
            f"{gpu.name}: it does not run at all."
        )
    if "cuflash" not in known:
        return
    ours = shape.traffic("cuflash", gpu.l2_bytes)["total"]
    times = [_at_best(shape, gpu, algorithm)[1] for algorithm in ("standard", "cuflash")]
    same = "leaves out what the mask hides and" if shape.causal else "does the same arithmetic,"
    yield (
        f"cuflash {same} moves {standard / ours:,.1f} times fewer bytes, and could be {times[0] / times[1]:,.1f} times "
        "as fast as standard attention."
    )
    if tiles.ITEMSIZE[shape.dtype] * shape.n * (shape.d + shape.e) > gpu.l2_bytes:
        yield (
            "k and v of a head do not fit the L2: every query tile is taken to read them from memory, though tiles "
            "that run side by side share readings."
        )
    yield "At best: by the slower of memory and tensor cores; exponentials and the start of kernels come on top."


def _plot(shape: Shape, gpu: Ceiling, path: Path) -> None:
    """A bar of bytes for each algorithm, reads and writes."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('--plot needs Matplotlib: pip install "cuflash[plot]"') from error
    figure = Figure(figsize=(7, 2.8), layout="constrained")
    axis = figure.subplots()
    known: Sequence[tuple[str, str]] = list(_known(shape))[::-1]
    moved = [shape.traffic(algorithm, gpu.l2_bytes) for algorithm, _ in known]
    titles = [title for _, title in known]
    reads, writes = ([x[part] / MB for x in moved] for part in ("reads", "writes"))
    axis.barh(titles, reads, color="tab:blue", label="read")
    axis.barh(titles, writes, left=reads, color="tab:orange", label="written")
    for at, x in enumerate(moved):
        axis.text(x["total"] / MB, at, f" {x['total'] / MB:,.0f} MB", va="center")
    axis.margins(x=0.2)
    axis.set_xlabel(f"device memory traffic of a forward pass, MB (model, {gpu.name})")
    heads = f"{shape.heads} heads, " if shape.heads > 1 else ""
    causal = ", causal" if shape.causal else ""
    axis.set_title(f"{heads}{shape.m:,} x {shape.n:,}, {shape.d} features, {shape.dtype}{causal}", fontsize=10)
    axis.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)
