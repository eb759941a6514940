"""Kernels that compile in no time, in place of kernels_cu: for tests of the machinery around the compiler."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from cuflash.compile import Variant
from cuflash.tiles import Tile

COMMON = f"""\
namespace cuflash {{
struct Half {{}}; struct BFloat16 {{}};
struct Tile {{ int {", ".join(field.name for field in dataclasses.fields(Tile))}; }};
enum class LoadKind {{ k16, k8, k4, kStrided }};
}}
"""
STORE = 'extern "C" __global__ void KERNEL(int* x) { x[threadIdx.x] = cuflash::kTile.block_m; }\n'
# volatile: newer compilers see through an array that is written once.
STACK = """\
extern "C" __global__ void KERNEL(int* x) {
  volatile int a[99];
  for (int i = 0; i < 99; ++i) a[i] = x[i];
  *x = a[*x];
}
"""
BROKEN = 'extern "C" __global__ void KERNEL(int* x) { *x = nothing; }\n'

# Run by processes of their own; ``monkeypatch`` does in this one what these lines do there.
SCRIPT = """\
import os, signal, sys, time
from pathlib import Path
from cuflash import compile, params
import tiny
compile.kernels_dir = lambda: Path({folder!r})
params.static_asserts = lambda dtype, maps: ""
"""


def write_kernels(folder: Path) -> Path:
    """A folder of sources for the operations ``store``, ``stack``, ``broken`` and, with a file a family, ``family``."""
    folder.mkdir(parents=True)
    (folder / "include").mkdir()
    (folder / "include" / "common.cuh").write_text(COMMON)
    for name, text in {"store": STORE, "stack": STACK, "broken": BROKEN, "family_sm80": STORE}.items():
        (folder / f"{name}.cu").write_text(text)
    return folder


def variant(operation: str = "store", target: str = "80", block_m: int = 64) -> Variant:
    """A variant of one of these kernels; ``block_m`` tells several apart."""
    return Variant(operation, "sm80", target, "float16", "float16", Tile(64, 64, block_m, 64, 1, 4), (), "16", False)
