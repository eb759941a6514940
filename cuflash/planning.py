"""What a plan of a call consists of: kernels with their grids and the constant part of their parameters, and the memory
that they need."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cuflash import compile, hopper, memory, params, tiles
from cuflash.needs import Needs
from cuflash.problem import Problem

LOG2E = math.log2(math.e)
BACKWARD_TENSORS = (
    "q", "k", "v", "key_bias", "o", "lse", "dout", "dlse", "dq", "dk", "dv", "dkey_bias",
)  # fmt: skip
NEED = {"dq": params.NEED_Q, "dk": params.NEED_K, "dv": params.NEED_V, "dkey_bias": params.NEED_KEY_BIAS}


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel of a call, ready but for the pointers; equal to itself alone, which is quick to find out."""

    kernel: Any
    variant: compile.Variant
    grid: tuple[int]
    block: tuple[int]
    smem_bytes: int
    tail: bytes
    maps: tuple[hopper.Map, ...]
    packed: np.dtype[Any]
    """Of the parameters, as one scalar."""
    overlaps: bool = False
    """Whether it may start before the kernel ahead of it has ended."""


class Plan(NamedTuple):
    """What a call does, but for the pointers."""

    launches: tuple[Launch, ...]
    needs: Needs | None = None


class Bits(NamedTuple):
    """Address bits below 16 of arrays that are accessed alike: what their alignment is not."""

    loads: int
    """q, k, v and do, which come in tiles."""
    rows: int
    """o, and do where both are read row by row."""
    vectors: int
    """Arrays of accumulation dtype."""

    def check(self, dtype: str) -> None:
        """Raise where an array does not start at a whole element: a GPU cannot read that."""
        itemsize = tiles.ITEMSIZE[dtype]
        if (self.loads | self.rows) % itemsize or self.vectors % tiles.accumulator_bytes(dtype):
            raise NotImplementedError(
                "an array starts between two elements (its address is not a multiple of its item size), which kernels "
                "cannot read; copy it"
            )


def input_strides(problem: Problem) -> dict[str, memory.Strides | None]:
    return {"q": problem.q_strides, "k": problem.k_strides, "v": problem.v_strides, "key_bias": problem.bias_strides}


def is_plain(problem: Problem) -> bool:
    """Whether the scale can wait until the exponent: nothing comes between, and it is positive and far from the ends of
    float32."""
    return problem.softcap is None and not problem.has_key_bias and 1e-30 < problem.scale * LOG2E < 1e30


def prepare(
    problem: Problem,
    variant: compile.Variant,
    layout: memory.Layout,
    blocks: int = 1,
    loop: tuple[int, ...] = (),
    need: int = 0,
    store_vector: bool = False,
    splits: int = 1,
    key_warps: int = 1,
    split_tiles: int = 0,
    sections: hopper.Sections = hopper.SINGLY,
    maps: tuple[hopper.Map, ...] = (),
    output: hopper.Map | None = None,
    ctas: int | None = None,
) -> Launch:
    """``ctas``: of the grid, where they are not so many ``blocks`` for each batch position."""
    grid_extents = [1 if i in loop else layout.extents[i] for i in range(memory.MAX_BATCH_AXES)]
    loop_extents = [layout.extents[i] if i in loop else 1 for i in range(memory.MAX_BATCH_AXES)]
    grid = blocks * math.prod(grid_extents) if ctas is None else ctas
    if grid > params.MAX_INT or math.prod(loop_extents) > params.MAX_INT:
        raise NotImplementedError(
            f"{variant.operation} would need {grid} blocks, a launch has at most {params.MAX_INT}"
        )
    ints = {f"grid_extent{i}": grid_extents[i] for i in range(memory.MAX_BATCH_AXES)}
    ints |= {f"loop_extent{i}": loop_extents[i] for i in range(memory.MAX_BATCH_AXES)}
    ints |= {"seqlen_q": problem.m, "seqlen_k": problem.n, "head_dim": problem.d, "value_dim": problem.e}
    ints |= {"band_lo": problem.band.lo, "band_hi": problem.band.hi}
    ints |= {"need": need, "store_vector": int(store_vector), "splits": splits, "key_warps": key_warps}
    ints |= {"split_tiles": split_tiles}
    ints |= {"section": sections.each, "last_section": sections.last, "store_map": int(output is not None)}
    # What the kernel's scores are to be multiplied by.
    rest = 1.0 if variant.prescaled else problem.scale
    if variant.family == "sm90" and variant.scores == ("Softcap",) and problem.softcap is not None:
        rest = problem.softcap
    scalars = {
        "scale": problem.scale,
        "exponent_scale": rest * LOG2E,
        "lse_scale": rest,
        "softcap": problem.softcap or 0.0,
    }
    kernel = compile.kernel(variant, problem.device)
    tail = params.pack_tail(layout.strides, ints, scalars, problem.dtype, variant.maps)
    packed = np.dtype(f"V{params.size(variant.operation, problem.dtype, variant.maps)}")
    block = (variant.tile.threads,)
    if variant.operation == "attention_forward" and maps:
        maps += (output or hopper.NO_MAP,)
    return Launch(kernel, variant, (grid,), block, variant.smem_bytes, tail, maps, packed)
