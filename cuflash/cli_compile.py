"""Compile kernels ahead of their first use: ``python -m cuflash compile``. Needs NVRTC, but no GPU."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from cuflash import cli_info, compile, lineage_tiles, problem, tiles
from cuflash.compile import Variant

BAR_WIDTH = 40


def add_parser(subparsers: Any) -> None:
    """Add the command to the subparsers of ``python -m cuflash``."""
    parser = subparsers.add_parser(
        "compile",
        help="compile kernels ahead of their first use, GPU or not",
        description="Fill the cache of compiled kernels. By default with those for the GPU of this machine; elsewhere "
        "name a GPU architecture. Exit status 1 where a kernel did not compile.",
    )
    parser.add_argument("--all", action="store_true", help="every kernel of every architecture")
    parser.add_argument(
        "--arch", nargs="+", metavar="SM", help=f"architectures, as 80 or sm_80, out of {', '.join(compile.TARGETS)}"
    )
    parser.add_argument("--dtype", nargs="+", choices=problem.DTYPES, help="only kernels for these dtypes")
    parser.add_argument("--head-dim", nargs="+", type=int, metavar="D", help="only for these, the larger of d and e")
    parser.add_argument("--lineage", action="store_true", help="the kernels of cuflash.lineage, in place of the others")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (default: as many as there are cores)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compile what was asked for."""
    if arguments.all and (arguments.arch or arguments.dtype or arguments.head_dim):
        raise ValueError("--all stands alone: it has every architecture, dtype and head dim")
    if arguments.lineage and arguments.head_dim:
        raise ValueError("--lineage has few head dims: leave --head-dim out")
    if arguments.jobs is not None and arguments.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {arguments.jobs}")
    targets = _targets(arguments)
    if arguments.lineage:
        variants = [variant for target in targets for variant in _lineage_variants(target, arguments.dtype)]
    else:
        variants = [variant for target in targets for variant in _variants(target, arguments.dtype, arguments.head_dim)]
        for note in _without_attention(variants, targets, arguments.dtype or ()):
            print(f"note: {note}", file=sys.stderr)
    if not variants:
        raise NotImplementedError("no kernel is built for this choice of --arch, --dtype and --head-dim")
    print(f"{len(variants)} kernels for {', '.join('sm_' + target for target in targets)} -> {compile.cache_dir()}")
    errors = compile.compile_all(variants, processes=arguments.jobs, progress=_Progress())
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    return 1 if errors else 0


def _targets(arguments: argparse.Namespace) -> tuple[str, ...]:
    if arguments.all:
        return compile.targets()
    if not arguments.arch:
        driver = cli_info.find_driver()
        if driver is None or not driver.devices:
            raise ValueError("there is no GPU here to compile for: name an architecture with --arch, or say --all")
        return tuple(dict.fromkeys(compile.target_of(device.compute_capability) for device in driver.devices))
    return tuple(dict.fromkeys(_target(name) for name in arguments.arch))


def _target(name: str) -> str:
    target = name.lower().removeprefix("sm_")
    target = {"90": "90a"}.get(target, target)
    if target not in compile.targets():
        raise ValueError(f"--arch {name}: the installed NVRTC and cuflash build for {', '.join(compile.targets())}")
    return target


def _variants(target: str, dtypes: list[str] | None, head_dims: list[int] | None) -> list[Variant]:
    """The kernels that a GPU of the target may ask for, less those that the choices exclude."""
    variants = [variant for family in cli_info.families(target) for variant in tiles.variants(target, family)]
    if dtypes:
        variants = [variant for variant in variants if variant.dtype in dtypes]
    for head_dim in head_dims or ():
        if not 1 <= head_dim <= tiles.MAX_HEAD_DIM:
            raise ValueError(f"--head-dim must be 1 to {tiles.MAX_HEAD_DIM}, got {head_dim}")
    if head_dims:
        variants = [variant for variant in variants if any(_serves(variant, head_dim) for head_dim in head_dims)]
    return variants


def _lineage_variants(target: str, dtypes: list[str] | None) -> list[Variant]:
    """The kernels of `cuflash.lineage` that a GPU of the target may ask for, in the dtypes."""
    family = next(family for family in cli_info.families(target) if family != "sm90")
    return [v for v in lineage_tiles.variants(target, family) if not dtypes or v.dtype in dtypes]


def _serves(variant: Variant, head_dim: int) -> bool:
    """Whether the launcher may ask for the variant where the larger of d and e is ``head_dim``."""
    if variant.tile == tiles.ROW_KERNEL:
        return True
    if variant.family == "sm90" and variant.operation in tiles.SM90_FEW:
        return variant.tile.head_dim == head_dim  # these take exactly so many
    if variant.family == "sm90":
        return variant.tile in _sm90_tiles(variant, head_dim)
    backward = tiles.backward_operations(variant.dtype, head_dim, variant.target, variant.family)
    if variant.operation in tiles.KEY_GRADIENTS and variant.operation not in backward:
        return False
    found = tiles.bucket(variant.operation, variant.dtype, variant.load, variant.target, variant.family, head_dim)
    return found == variant.tile.head_dim


def _sm90_tiles(variant: Variant, head_dim: int) -> set[tiles.Tile | None]:
    """Tiles of the variant's operation in the sm90 family that serve d and e of which the larger is ``head_dim``."""
    dtype = variant.dtype
    if variant.operation == tiles.FUSED:
        return {tiles.sm90_backward(dtype, head_dim, variant.needs_dq)}
    if variant.operation in (tiles.DQ, tiles.DKV):
        rows = tiles.SM90_BACKWARD_DQ + tiles.SM90_BACKWARD_DKV
        smaller = {size for tile in rows for size in (tile.head_dim, tile.value_dim) if size <= head_dim} | {head_dim}
        sizes = [pair for size in smaller for pair in ((head_dim, size), (size, head_dim))]
        if variant.operation == tiles.DKV:
            return {tiles.sm90_backward_dkv(dtype, d, e) for d, e in sizes}
        return {tiles.sm90_backward_dq(dtype, d, e, plain=not variant.scores) for d, e in sizes}
    like, capped = (dtype, variant.precision, head_dim), "Softcap" in variant.scores
    with_values = {tiles.sm90_forward(*like, keys, capped=capped) for keys in (1, math.inf)}
    return with_values | {tiles.sm90_forward(*like, has_value=False)}


def _without_attention(variants: list[Variant], targets: Sequence[str], dtypes: Sequence[str]) -> Iterator[str]:
    """Words for each target and dtype asked for that has no kernel of attention, at most those that serve any."""
    for target in targets:
        found = (x for family in cli_info.families(target) for x in tiles.variants(target, family))
        built = {x.dtype for x in found if x.operation == "attention_forward"}
        for dtype in dtypes:
            if dtype in built:
                continue
            others = ", ".join(sorted({x.operation for x in variants if (x.target, x.dtype) == (target, dtype)}))
            text = f"there are no {dtype} attention kernels for sm_{target}, only {' and '.join(sorted(built))}"
            yield text + (f"; what {dtype} has is {others}" if others else "")


class _Progress:
    """A bar that is redrawn on a terminal, one line at each tenth elsewhere."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._tenth = -1

    def __call__(self, done: int, total: int) -> None:
        text = f"{done}/{total} kernels, {time.perf_counter() - self._begin:.0f} s"
        if sys.stdout.isatty():
            filled = BAR_WIDTH * done // total
            end = "\n" if done == total else ""
            print(f"\r[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {text}", end=end, flush=True)
        elif (tenth := 10 * done // total) != self._tenth:
            self._tenth = tenth
            print(text, flush=True)
