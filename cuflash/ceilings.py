"""What GPUs can do at most: bytes and operations a second, memory and L2, as a small table.

The row of the H200 is measured, by the benchmarks of this repository: a copy, and one matrix product of each dtype by
cuBLAS. The others are from NVIDIA's data sheets (dense products, float32 sums) and are seldom reached.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

DEFAULT = "H200"


@dataclass(frozen=True)
class Ceiling:
    """Of one GPU. A ridge point is the arithmetic intensity at which memory and tensor cores are busy alike."""

    name: str
    """A part of the name that the driver gives."""
    bytes_per_second: float
    flops: dict[str, float]
    """Operations a second of matrix products with float32 sums: 'float16', 'bfloat16', 'tf32', 'float32', 'float64'."""
    memory_bytes: float
    l2_bytes: int
    measured: bool = False
    splits_float32: bool = False
    """Whether float32 is multiplied in 16-bit parts, for which there must be room: on compute capability 9.0."""

    def flops_of(self, dtype: str) -> float:
        """Operations a second on operands of a dtype; float32 by three products in TF32 where that is faster. 0 where
        the GPU has no products of the dtype."""
        if dtype == "float32":
            return max(self.flops["float32"], self.flops.get("tf32", 0) / 3)
        return self.flops.get(dtype, 0.0)

    def ridge(self, dtype: str) -> float:
        """Operations for each byte."""
        return self.flops_of(dtype) / self.bytes_per_second


def _flops(half: float, bfloat16: float, tf32: float, float32: float, float64: float) -> dict[str, float]:
    """From TFLOP/s, 0 where there are none."""
    named = {"float16": half, "bfloat16": bfloat16, "tf32": tf32, "float32": float32, "float64": float64}
    return {name: 1e12 * value for name, value in named.items() if value}


CEILINGS = (
    Ceiling("H200", 4.2e12, _flops(740, 770, 392, 51, 57), 141e9, 60 * 2**20, measured=True, splits_float32=True),
    Ceiling("H100", 3.35e12, _flops(989, 989, 495, 67, 67), 80e9, 50 * 2**20, splits_float32=True),
    Ceiling("B200", 8.0e12, _flops(2250, 2250, 1125, 75, 37), 180e9, 126 * 2**20),
    Ceiling("A100", 2.04e12, _flops(312, 312, 156, 19.5, 19.5), 80e9, 40 * 2**20),
    Ceiling("RTX 4090", 1.01e12, _flops(165, 165, 83, 83, 1.3), 24e9, 72 * 2**20),
    Ceiling("T4", 0.32e12, _flops(65, 0, 0, 8.1, 0.25), 16e9, 4 * 2**20),
)


def named(name: str) -> Ceiling | None:
    """The row whose name stands in ``name``, case aside; None where there is none.

    Examples
    --------
    >>> from cuflash.ceilings import named
    >>> named("NVIDIA H200").measured, named("a GPU of the future")
    (True, None)
    """
    return next((row for row in CEILINGS if re.search(rf"\b{row.name}\b", name, re.IGNORECASE)), None)
