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
    parser.add_argument("--causal", action="store_true", help="each row sees the keys up to its own, the last all")
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

    def extra_bytes(self, algorithm: str, gpu: Ceiling) -> int:
        """Memory beyond q, k, v and o, all heads."""
        if algorithm == "standard":
            return tiles.ITEMSIZE[self.dtype] * self.heads * self.m * self.n
        if algorithm == "flash1":  # o, l and m between passes
            return tiles.accumulator_bytes(self.dtype) * self.heads * self.m * (self.e + 2)
        if self.dtype != "float32" or not gpu.splits_float32:
            return 0
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
        f"{_counted(shape.heads, 'head')}, {_counted(shape.m, 'quer', 'y', 'ies')}, {_counted(shape.n, 'key')}, "
        f"{_counted(shape.d, 'feature')}{f', {shape.e} of v' if shape.e != shape.d else ''}, {shape.dtype}"
        f"{', causal' if shape.causal else ''}"
    )
    flops, bandwidth = gpu.flops_of(shape.dtype), gpu.bytes_per_second
    yield (
        f"{gpu.name} ({origin}; {source}): {bandwidth / 1e12:.2f} TB/s, {_many(flops / 1e12)} TFLOP/s in "
        f"{shape.dtype}, ridge point {_many(gpu.ridge(shape.dtype))} FLOP/byte, L2 {gpu.l2_bytes / MB:.0f} MB"
    )
    matrix = shape.traffic("standard")["score_matrix"]
    yield ""
    yield (
        f"The matrix of scores has {shape.m:,} x {shape.n:,} elements: {_mb(matrix)} MB a head, where q, k, v and "
        f"o have {_mb(shape.operands() / shape.heads)} MB together."
    )
    yield (
        "Standard attention writes it, reads it for the softmax, writes the probabilities and reads them again: four "
        f"passes, {_mb(4 * matrix)} MB a head."
    )
    yield ""
    yield from _table(shape, gpu)
    yield ""
    yield from _verdict(shape, gpu)


def _counted(number: int, stem: str, one: str = "", many: str = "s") -> str:
    return f"{number:,} {stem}{one if number == 1 else many}"


def _many(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _short(value: float) -> str:
    """One decimal, or two digits of what is less than 1."""
    return f"{value:,.1f}" if value >= 1 else f"{value:.2g}"


def _mb(nbytes: float) -> str:
    return _short(nbytes / MB)


def _table(shape: Shape, gpu: Ceiling) -> Iterator[str]:
    lines = [
        ("", "memory traffic", "without an L2", "intensity", "bound by", "at best", "extra memory"),
        ("", "MB", "MB", "FLOP/byte", "", "ms", "MB"),
    ]
    for algorithm, title in _known(shape):
        moved = shape.traffic(algorithm, gpu.l2_bytes)["total"]
        plain = shape.traffic(algorithm)["total"]
        bound, seconds = _at_best(shape, gpu, algorithm)
        intensity, extra = _work(shape, algorithm) / moved, shape.extra_bytes(algorithm, gpu)
        lines.append((title, _mb(moved), _mb(plain), f"{intensity:,.0f}", bound, _milliseconds(seconds), _mb(extra)))
    first, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
    for title, *cells in lines:
        yield f"{title:<{first}}" + "".join(f"{cell:>{width + 3}}" for cell, width in zip(cells, widths, strict=True))


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.3f}" if seconds >= 1e-4 else f"{1e3 * seconds:.2g}"


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
    needed = shape.operands() + shape.extra_bytes("standard", gpu)
    if needed > gpu.memory_bytes:
        yield (
            f"Standard attention needs {needed / MB:,.0f} MB, more than the {gpu.memory_bytes / MB:,.0f} MB of the "
            f"{gpu.name}: it does not run at all."
        )
    if "cuflash" not in known:
        return
    ours = shape.traffic("cuflash", gpu.l2_bytes)["total"]
    (_, before), (bound, after) = (_at_best(shape, gpu, algorithm) for algorithm in ("standard", "cuflash"))
    same = "leaves out what the mask hides, and" if shape.causal else "does the same arithmetic, and"
    yield f"cuflash {same} moves {_many(standard / ours)} times fewer bytes: " + (
        f"at best it is {_many(before / after)} times as fast as standard attention."
        if before > 1.05 * after
        else f"at best both are equally fast here, being bound by {bound}."
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
        megabytes = x["total"] / MB
        axis.text(megabytes, at, f" {_short(megabytes) if megabytes < 1e6 else f'{megabytes:.3g}'} MB", va="center")
    axis.margins(x=0.32)
    axis.set_xlabel(f"device memory traffic of a forward pass, MB (model, {gpu.name})")
    heads = f"{shape.heads} heads, " if shape.heads > 1 else ""
    causal = ", causal" if shape.causal else ""
    axis.locator_params(axis="x", nbins=6)
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:,g}")
    axis.set_title(
        f"{heads}{shape.m:,} x {shape.n:,}, {_counted(shape.d, 'feature')}, {shape.dtype}{causal}", fontsize=10
    )
    figure.legend(frameon=False, loc="outside right upper")  # bars may be equally long
    figure.savefig(path, dpi=150)
