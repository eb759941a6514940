"""From a problem and its arrays to kernels in a stream.

Everything that depends only on shapes, strides, options and the alignment of pointers is planned once and cached:
which variant, which grid, the constant part of its parameters, what memory it needs. A warm call looks the plan up,
packs the pointers, which is cached as well, and launches.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from cuflash import compile, few, hopper, memory, overlap, params, tiles, tma
from cuflash.needs import POINTERS, Needs, forget_counters, provide, reserve
from cuflash.problem import Problem

LOG = os.environ.get("CUFLASH_LOG") == "1"
"""Whether each call says which kernels it takes. Asked once: to ask takes a microsecond."""
LOG2E = math.log2(math.e)
_ALIGNED = (0,) * 6
"""Address bits below 16 of the arrays of nearly every forward."""
_MERGE_PARAMS = np.dtype(f"V{params.MERGE_SIZE}")


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


class _Plan(NamedTuple):
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


def check(problem: Problem, operation: str) -> Families:
    """Raise NotImplementedError for a valid problem that no kernel serves, before anything is allocated; the families
    of those that do."""
    return _check(problem, operation, os.environ.get("CUFLASH_FAMILY"))


@lru_cache(maxsize=4096)
def _check(problem: Problem, operation: str, asked: str | None) -> Families:
    families = _families_of(asked or None, problem.device)
    family = families.portable
    target = device_target(problem.device)
    check_dtype(operation, problem.dtype, target, family)
    if problem.precision not in tiles.precisions(problem.dtype, family):
        raise NotImplementedError(
            f"{operation}_{family} has no {problem.precision}, which needs compute capability 8.0; precision=None works"
        )
    most = tiles.max_head_dim(operation, problem.dtype, target, family)
    for name, length, letter in (("q and k", problem.d, "d"), ("v", problem.e, "e")):
        if length > most:
            raise NotImplementedError(
                f"{operation} in {problem.dtype} takes at most {most} features on this GPU ({operation}_{family} for "
                f"sm_{target}), {name} have {letter} = {length}; the host serves any number"
            )
    if problem.m + problem.n > params.MAX_INT - 1024:
        raise NotImplementedError(f"kernels count rows in 32 bits: m + n = {problem.m + problem.n} is too many")
    memory.layout_of(problem, _input_strides(problem))  # batch axes that no kernel can follow
    return families


def check_dtype(operation: str, dtype: str, target: str, family: str) -> None:
    if dtype not in tiles.dtypes(target, family):
        raise NotImplementedError(
            f"{operation}_{family} has no {dtype}, which needs compute capability 8.0; "
            f"{', '.join(tiles.dtypes(target, family))} work, and the host"
        )


def _input_strides(problem: Problem) -> dict[str, memory.Strides | None]:
    return {"q": problem.q_strides, "k": problem.k_strides, "v": problem.v_strides, "key_bias": problem.bias_strides}


def workspace_nbytes(problem: Problem, operation: str) -> int:
    """Bytes of scratch memory of a call.

    Forward: where the grid splits the keys, what each split leaves of a row, and counts; where float32 is
    multiplied in planes, those; where the copy engine cannot follow arrays, copies of them; where CTAs claim tiles,
    a count. Backward: two numbers a query row (on Hopper as many as six), and where one kernel may compute all
    gradients, a row of sums as wide as its tile and a count for each block of rows; on Hopper also one a key and batch
    position for key_bias, where CTAs share the heads of a group under a band, two rows of sums a key, and else two of
    each of some last keys.
    """
    families = device_families(problem.device)
    if operation != "attention_backward":
        if sm90 := _sm90(problem, families):
            return hopper.scratch(problem, sm90).nbytes
        return max((few.scratch(problem, kernel).nbytes for kernel in _few(problem, families)), default=0)
    nbytes = memory.workspace_of(problem, _fused_sums(problem, families.portable)).nbytes
    if families.hopper and problem.has_value:
        if whole := _whole_sm90(problem):
            nbytes = max(nbytes, hopper.backward_scratch(problem, whole).nbytes)
        if hopper.split_backward(problem, is_plain(problem)):
            nbytes = max(nbytes, hopper.backward_scratch(problem).nbytes)
    return nbytes


def _few(problem: Problem, families: Families) -> tuple[few.Few, ...]:
    """The kernels for few features that can take a problem, best first."""
    device = problem.device
    return few.forwards(problem, device_target(device), families.portable, families.hopper, multiprocessors(device))


def _sm90(problem: Problem, families: Families) -> hopper.Forward | None:
    """How the forward of the sm90 family takes a problem, None where another kernel does."""
    if not families.hopper or _few(problem, families):
        return None
    return hopper.forward(problem, multiprocessors(problem.device), is_plain(problem))


@lru_cache(maxsize=4096)
def _fused_tile(problem: Problem, family: str) -> tiles.Tile | None:
    """The tile of the kernel for all gradients of problems like this, None where there is none."""
    if not is_plain(problem) or not problem.has_value:
        return None
    dtype, target = problem.dtype, device_target(problem.device)
    head_dim = tiles.bucket(tiles.FUSED, dtype, "16", target, family, max(problem.d, problem.e))
    return None if head_dim is None else tiles.tile(tiles.FUSED, dtype, head_dim, "16", True, target, family)


def _fused_sums(problem: Problem, family: str) -> memory.Sums | None:
    tile = _fused_tile(problem, family)
    return None if tile is None else memory.fused_sums(problem.m, tile)


def forward(
    problem: Problem, q: Any, k: Any, v: Any, key_bias: Any, o: Any, lse: Any, workspace: Any, families: Families,
) -> None:  # fmt: skip
    """Fill o and lse (either may be None) from arrays as the caller shaped them: the problem knows the strides of inner
    views, which take microseconds to make. ``families`` as of `check`."""
    pointers = (
        q.data.ptr,
        k.data.ptr,
        0 if v is None else v.data.ptr,
        0 if key_bias is None else key_bias.data.ptr,
        0 if o is None else o.data.ptr,
        0 if lse is None else lse.data.ptr,
    )
    together = pointers[0] | pointers[1] | pointers[2] | pointers[3] | pointers[4] | pointers[5]
    bits = tuple([pointer & 15 for pointer in pointers]) if together & 15 else _ALIGNED
    o_strides, lse_strides = None if o is None else o.strides, None if lse is None else lse.strides
    launches, needs = _plan_forward(problem, families, o_strides, lse_strides, bits)
    if needs is None:
        enqueue(launches, pointers)
        return
    inputs = problem.inner_inputs(q, k, v, key_bias) if needs.copies else ()
    every_pointer = [*pointers]
    _held, zeros, nbytes = provide(needs, problem.device, inputs, every_pointer, workspace)
    enqueue(launches, every_pointer, zeros, nbytes)


def backward(
    problem: Problem, q: Any, k: Any, v: Any, key_bias: Any, do: Any, o: Any, lse: Any, dlse: Any,
    dq: Any, dk: Any, dv: Any, dkey_bias: Any, workspace: Any, families: Families,
) -> None:  # fmt: skip
    """Fill those of dq, dk, dv and dkey_bias that are not None from inner views; ``families`` as of `check`."""
    inputs, strides = _describe((q, k, v, key_bias, o, lse, do, dlse))
    results, result_strides = _describe((dq, dk, dv, dkey_bias))
    tiles_in, rows_in = inputs[0] | inputs[1] | inputs[2] | inputs[6], inputs[4] | inputs[6]
    vectors = inputs[3] | inputs[5] | inputs[7] | results[3]
    bits = (Bits(tiles_in & 15, rows_in & 15, vectors & 15), *(x & 15 for x in results[:3]))
    if families.hopper and (sm90_plan := _plan_backward_sm90(problem, strides + result_strides, *bits)):
        launches, needs = sm90_plan
        assert needs is not None
        pointers = [*inputs, 0, 0, *results]
        _held, zeros, nbytes = provide(needs, problem.device, (), pointers, workspace)
        enqueue(launches, pointers, zeros, nbytes)
        return
    plan = _plan_backward(problem, families.portable, strides + result_strides, *bits)
    fused = next((launch.variant.tile for launch in plan if launch.variant.operation == tiles.FUSED), None)
    parts = memory.workspace_of(problem, fused and memory.fused_sums(problem.m, fused))
    workspace, row_lse = reserve(workspace, parts.nbytes)
    delta, dq_accum, dq_turn, claims, _ = (row_lse + offset for offset in parts)
    absent = [0] * len(memory.PLANES)
    all_pointers = [*inputs, row_lse, delta, *results, dq_accum, dq_turn, *absent, claims]
    enqueue(plan, all_pointers, dq_accum, claims + 16 - dq_accum if fused else 0)


def _describe(arrays: Sequence[Any]) -> tuple[list[int], tuple[memory.Strides | None, ...]]:
    """Addresses (0 where absent) and strides, in the order of ``params.TENSORS``."""
    pointers = [0 if x is None else x.data.ptr for x in arrays]
    return pointers, tuple([None if x is None else x.strides for x in arrays])


@lru_cache(maxsize=1024)
def _addressed(plan: tuple[Launch, ...], pointers: tuple[int, ...]) -> tuple[tuple[Launch, tuple[Any]], ...]:
    """The launches of a plan and what their kernels take, those of late kept: calls tend to find memory where others
    before them had it."""
    return tuple([(launch, _arguments(launch, pointers)) for launch in plan])


def _arguments(launch: Launch, pointers: tuple[int, ...]) -> tuple[Any]:
    maps = b"".join([encode(pointers[tensor] + offset) for tensor, offset, _, encode in launch.maps])
    return (np.frombuffer(maps + params.pack(pointers, launch.tail), launch.packed)[0],)


_enqueuing = threading.Lock()
"""Kernels of a call tell each other things by way of the counters of their stream: no other call comes between them."""


def enqueue(plan: tuple[Launch, ...], pointers: Sequence[int], zeros: int = 0, nbytes: int = 0) -> None:
    """Enqueue the kernels, and before them zeros for so many bytes from an address on."""
    launches = _addressed(plan, tuple(pointers))  # first: the driver may refuse a tensor map
    if len(launches) == 1 and not nbytes:  # nothing that another call could come between
        return _enqueue_kernel(*launches[0])
    with _enqueuing:
        if nbytes:
            import cupy

            cupy.cuda.runtime.memsetAsync(zeros, 0, nbytes, cupy.cuda.get_current_stream().ptr)
        try:
            for launch, taken in launches:
                _enqueue_kernel(launch, taken)
        except BaseException:
            forget_counters()  # the kernel that was to leave them at 0 may be missing
            raise


def _enqueue_kernel(launch: Launch, taken: tuple[Any]) -> None:
    if LOG:
        print(f"cuflash: {launch.variant}, grid {launch.grid[0]}", file=sys.stderr)
    if launch.overlaps:
        overlap.launch(launch.kernel, launch.grid[0], launch.block[0], taken[0], launch.smem_bytes)
    else:
        launch.kernel(launch.grid, launch.block, taken, launch.smem_bytes)


# Plans


@lru_cache(maxsize=4096)
def _plan_forward(
    problem: Problem,
    families: Families,
    o_strides: memory.Strides | None,
    lse_strides: memory.Strides | None,
    bits: tuple[int, ...],
) -> _Plan:
    """``o_strides`` and ``lse_strides``: of the arrays as the caller shaped them; ``bits``: of the addresses of q, k,
    v, key_bias, o and lse those below 16."""
    q, k, v, key_bias, o, lse = bits
    alike = Bits(q | k | v, o, key_bias | lse)
    alike.check(problem.dtype)
    results = {
        like.name: problem.inner_strides(like, strides)
        for like, strides in ((problem.o, o_strides), (problem.lse, lse_strides))
        if like is not None and strides is not None
    }
    sm90 = _sm90(problem, families)
    if sm90 and (plan := _plan_sm90(problem, sm90, results, alike, key_bias)):
        return plan
    layout = memory.layout_of(problem, {**_input_strides(problem), **results})
    for kernel in _few(problem, families):
        if few.takes(kernel, problem, layout, (k, v, key_bias)):
            return _plan_few(problem, families.portable, layout, kernel)
    load = memory.load_kind(problem.dtype, layout, ("q", "k", "v"), alike.loads)
    variant = _variant(problem, "attention_forward", families.portable, load)
    blocks = -(-problem.m // variant.tile.block_m)
    vector = memory.load_kind(problem.dtype, layout, ("o",), alike.rows) == "16"
    return _Plan((prepare(problem, variant, layout, blocks, store_vector=vector),))


def _plan_sm90(
    problem: Problem,
    sm90: hopper.Forward,
    results: Mapping[str, memory.Strides],
    bits: Bits,
    key_bias_bits: int,
) -> _Plan | None:
    """None where the copy engine cannot follow the arrays."""
    if bits.loads % tma.ALIGNMENT and sm90.planes == 1 and not sm90.copies:
        return None
    copied = _copied(problem, sm90, key_bias_bits)
    taken = hopper.with_copies(problem, copied) if copied else problem
    try:
        layout = memory.layout_of(taken, {**_input_strides(taken), **results}, planes=sm90.planes > 1)
    except NotImplementedError:  # planes have batch axes of their own
        return None
    maps = hopper.maps(taken, layout, sm90)
    if maps is None:
        return None
    vector = memory.load_kind(problem.dtype, layout, ("o",), bits.rows) == "16"
    main = tiles.sm90_variant(problem.dtype, sm90.tile, problem.precision, _sm90_terms(problem, sm90.plain))
    output = None
    if problem.has_value and sm90.tile.q_stages > 1 and bits.rows % tma.ALIGNMENT == 0:
        output = hopper.output_map(problem, layout)
    ctas = min(sm90.tiles, multiprocessors(problem.device))
    launches = [
        prepare(taken, main, layout, store_vector=vector, sections=sm90.sections, maps=maps, output=output, ctas=ctas)
    ]
    if sm90.planes > 1:
        split = tiles.row_variant("attention_planes", problem.dtype, "strided", "90a", "sm90", problem.precision)
        launches.insert(0, prepare(taken, split, layout, ctas=-(-hopper.plane_warps(taken) // split.tile.warps)))
    return _Plan(tuple(launches), _sm90_needs(problem, sm90, copied))


def _copied(problem: Problem, sm90: hopper.Forward, key_bias_bits: int) -> tuple[str, ...]:
    """Arrays that are copied for the copy engine, given the address of key_bias."""
    names = tuple(hopper.operands(problem)) if sm90.copies else ()
    if problem.has_key_bias and (key_bias_bits % tma.ALIGNMENT or not hopper.follows(problem, "key_bias")):
        names += ("key_bias",)
    return names


def _sm90_needs(problem: Problem, sm90: hopper.Forward, copied: tuple[str, ...]) -> Needs | None:
    if sm90.planes == 1 and not copied and not sm90.claims:
        return None
    scratch = hopper.scratch(problem, sm90)
    begins = scratch._asdict()
    parts = {f"{name}_planes": begins[name] for name in "qkv"} if sm90.planes > 1 else {}
    parts |= {name: begins[name] for name in copied}
    return Needs(
        scratch.nbytes,
        tuple((POINTERS[name], begin) for name, begin in parts.items()),
        tuple((POINTERS[name], memory.own_batch(problem, name)) for name in copied),
        hopper.CLAIMS_NBYTES if sm90.claims else 0,
        scratch.claims,
    )


def _sm90_terms(problem: Problem, plain: bool) -> tuple[str, ...]:
    """Score terms of the variant that takes a problem, one of ``tiles.SM90_TERMS``."""
    if plain:
        return ()
    has = {"Softcap": problem.softcap is not None, "KeyBias": problem.has_key_bias or problem.softcap is None}
    return tuple(term for term in compile.SCORE_TERMS if has[term])


def _plan_few(problem: Problem, family: str, layout: memory.Layout, kernel: few.Few) -> _Plan:
    variant, key_warps, row_blocks, splits = kernel
    main = prepare(problem, variant, layout, row_blocks * splits, splits=splits, key_warps=key_warps)
    if splits == 1:
        return _Plan((main,))
    begin, nbytes = few.scratch(problem, kernel)
    parts = ((POINTERS["partials"], begin),)
    if kernel.merges:
        return _Plan((main,), Needs(nbytes, parts, counts=begin))  # which the counts come before
    merge = _row_variant(problem, "attention_merge_splits", family, "strided")
    rows, warps = math.prod(layout.extents) * problem.m, merge.tile.warps
    shared = warps if splits > 32 else 1  # warps that share a row: its splits are more than lanes
    ctas = -(-rows * shared // warps)
    merging = prepare(problem, merge, layout, splits=splits, key_warps=shared, ctas=ctas)
    return _Plan((main, merging), Needs(nbytes, parts))


_BACKWARD_TENSORS = (
    "q", "k", "v", "key_bias", "o", "lse", "dout", "dlse", "dq", "dk", "dv", "dkey_bias",
)  # fmt: skip
_NEED = {"dq": params.NEED_Q, "dk": params.NEED_K, "dv": params.NEED_V, "dkey_bias": params.NEED_KEY_BIAS}


@lru_cache(maxsize=4096)
def _plan_backward(
    problem: Problem,
    family: str,
    strides: tuple[memory.Strides | None, ...],
    bits: Bits,
    *gradient_bits: int,
) -> tuple[Launch, ...]:
    """``gradient_bits``: address bits of dq, dk and dv."""
    bits.check(problem.dtype)
    for gradient in gradient_bits:
        Bits(gradient, 0, 0).check(problem.dtype)
    fused = _fused_tile(problem, family)
    sums = None if fused is None else memory.fused_sums(problem.m, fused)
    layout = memory.layout_of(problem, dict(zip(_BACKWARD_TENSORS, strides, strict=True)), sums)
    load = memory.load_kind(problem.dtype, layout, ("q", "k", "v", "dout"), bits.loads)
    gradients = [pair for pair in zip(("dq", "dk", "dv"), gradient_bits, strict=True) if pair[0] in layout.strides]
    vector = {name: memory.load_kind(problem.dtype, layout, (name,), own) == "16" for name, own in gradients}
    delta_load = memory.load_kind(problem.dtype, layout, ("o", "dout"), bits.rows)
    variant = _row_variant(problem, "attention_delta", family, "16" if delta_load == "16" else "strided")
    plan = [prepare(problem, variant, layout, memory.padded_rows(problem.m) // (variant.tile.threads // 8))]
    if fused and _is_fused(problem, layout, family, load, fused):
        return (*plan, *_fused(problem, layout, family, vector))
    if "dq" in layout.strides:
        variant = _variant(problem, "attention_backward_dq", family, load)
        blocks, loop = -(-problem.m // variant.tile.block_m), memory.summed_axes(layout, "dq")
        plan.append(prepare(problem, variant, layout, blocks, loop, params.NEED_Q, vector["dq"]))
    # One launch for the outputs that are summed over the same axes.
    groups: dict[tuple[int, ...], list[str]] = {}
    for name in ("dk", "dv", "dkey_bias"):
        if name in layout.strides:
            groups.setdefault(memory.summed_axes(layout, name), []).append(name)
    for loop, outputs in groups.items():
        for operation, served in _backward_operations(problem, family).items():
            names = [name for name in outputs if name in served]
            if names:
                variant = _variant(problem, operation, family, load)
                blocks, need = -(-problem.n // variant.tile.block_n), sum(_NEED[name] for name in names)
                aligned = all(vector.get(name, True) for name in names)
                plan.append(prepare(problem, variant, layout, blocks, loop, need, aligned))
    return tuple(plan)


@lru_cache(maxsize=4096)
def _plan_backward_sm90(
    problem: Problem, strides: tuple[memory.Strides | None, ...], bits: Bits, *gradient_bits: int
) -> _Plan | None:
    """None where the portable kernels serve."""
    bits.check(problem.dtype)
    for gradient in gradient_bits:
        Bits(gradient, 0, 0).check(problem.dtype)
    given = dict(zip(_BACKWARD_TENSORS, strides, strict=True))
    if not problem.has_value or given["dout"] is None or bits.loads % tma.ALIGNMENT:
        return None
    kernels = _sm90_backward_kernels(problem, tuple(name for name in _NEED if given[name] is not None))
    if not kernels:
        return None
    own_bits = dict(zip(("dq", "dk", "dv"), gradient_bits, strict=True))
    whole = next((taken for taken, _ in kernels if isinstance(taken, hopper.Backward)), None)
    layout = memory.layout_of(problem, given, whole.sums if whole else None)
    launches: tuple[Launch, ...] = ()
    for taken, names in kernels:
        if isinstance(taken, hopper.Backward):
            found = _whole_backward_sm90(problem, taken, layout, names, own_bits)
        else:
            found = _split_backward_sm90(problem, taken, layout, names, own_bits)
        if not found:
            return None
        launches += found
    needs = _backward_sm90_needs(problem, layout, whole)
    return _Plan((_delta_sm90(problem, layout, bits), *launches), needs)


def _sm90_backward_kernels(
    problem: Problem, asked: tuple[str, ...]
) -> tuple[tuple[hopper.Backward | tiles.Tile, tuple[str, ...]], ...]:
    """Which kernels of the sm90 family compute which of the gradients that are asked for, none where others do."""
    of_keys = tuple(name for name in asked if name != "dq")
    together = "dq" in asked and {"dk", "dv"} <= set(of_keys)
    whole = _whole_sm90(problem, together)
    if whole and (together or (asked and asked == of_keys)):
        return ((whole, asked),)
    split = hopper.split_backward(problem, is_plain(problem))
    if split is None:
        return ()
    kernels: list[tuple[hopper.Backward | tiles.Tile | None, tuple[str, ...]]] = []
    if of_keys:  # without dq the kernel for all gradients does what that for dk and dv does above 128 features
        kernels.append((whole or split.dkv, of_keys))
    if "dq" in asked:
        kernels.append((split.dq, ("dq",)))
    found = tuple((taken, names) for taken, names in kernels if taken)
    return found if len(found) == len(kernels) else ()


def _whole_sm90(problem: Problem, needs_dq: bool = True) -> hopper.Backward | None:
    """How the kernel for all gradients, or that for all but dq, takes a problem."""
    return hopper.backward(problem, multiprocessors(problem.device), is_plain(problem), needs_dq)


def _whole_backward_sm90(
    problem: Problem, taken: hopper.Backward, layout: memory.Layout, names: tuple[str, ...], own_bits: Mapping[str, int]
) -> tuple[Launch, ...]:
    """The kernel for all gradients, or for some of all but dq, and what sums dkey_bias. None of them where the copy
    engine cannot follow the arrays, or dk and dv are summed over different axes or dq over any."""
    if any(own_bits[name] % tma.ALIGNMENT for name in ("dk", "dv")):
        return ()
    if "dq" in names and memory.summed_axes(layout, "dq"):
        return ()
    summed = _axes_summed_by_blocks_of_keys(layout, names)
    maps = hopper.backward_maps(problem, layout, taken)
    if summed is None or maps is None:
        return ()
    vector = "dq" in names and _is_vector(problem, layout, "dq", own_bits)
    terms = _sm90_terms(problem, is_plain(problem))
    variant = tiles.sm90_backward_variant(problem.dtype, taken.tile, taken.in_order, terms, "dq" in names)
    sections = partial(hopper.dqkv_sections, problem, taken)
    # As the kernel finds it by the strides of dk: positions with a sum in common are on axes that are not looped over.
    looped = () if taken.shares.by_position else summed
    main = _over_tiles(problem, variant, layout, looped, names, vector, sections, maps, taken.shares.tiles)
    return main, *_sum_of_key_bias(problem, layout)


def _sum_of_key_bias(problem: Problem, layout: memory.Layout) -> tuple[Launch, ...]:
    """What sums dkey_bias over batch axes, where there are any."""
    axes = _bias_axes(layout)
    if not axes:
        return ()
    variant = tiles.row_variant("attention_dkey_bias", problem.dtype, "strided", "90a", "sm90")
    return (prepare(problem, variant, layout, -(-problem.n // 32), axes),)


def _axes_summed_by_blocks_of_keys(layout: memory.Layout, names: tuple[str, ...]) -> tuple[int, ...] | None:
    """Batch axes over which a CTA sums dk and dv while it holds a block of k and of v, None where there is no such sum:
    dk and dv are summed over different axes, or k or v is another one from position to position."""
    found = {memory.summed_axes(layout, name) for name in names if name in ("dk", "dv")} or {()}
    summed = next(iter(found))
    held = all(set(summed) <= set(memory.summed_axes(layout, name)) for name in ("k", "v"))
    return summed if held and len(found) == 1 else None


def _bias_axes(layout: memory.Layout) -> tuple[int, ...]:
    """Batch axes over which dkey_bias is summed, where it is asked for."""
    return memory.summed_axes(layout, "dkey_bias") if "dkey_bias" in layout.strides else ()


def _split_backward_sm90(
    problem: Problem,
    tile: tiles.Tile | None,
    layout: memory.Layout,
    names: tuple[str, ...],
    own_bits: Mapping[str, int],
) -> tuple[Launch, ...]:
    """The kernel for dq alone, or that for dk, dv and dkey_bias, and what sums dkey_bias. None of them where there is
    no such kernel, or the copy engine cannot follow the arrays, or dk and dv are not summed alike."""
    maps = hopper.split_maps(problem, layout, tile) if tile else None
    if tile is None or maps is None:
        return ()
    plain = is_plain(problem)
    summed: tuple[int, ...] | None
    if names == ("dq",):
        summed = memory.summed_axes(layout, "dq")
        variant, sections = tiles.sm90_backward_dq_variant(problem.dtype, tile, plain), hopper.dq_sections
    else:
        summed = _axes_summed_by_blocks_of_keys(layout, names)
        variant, sections = tiles.sm90_backward_dkv_variant(problem.dtype, tile, plain), hopper.dkv_sections
    if summed is None:
        return ()
    vector = all(_is_vector(problem, layout, name, own_bits) for name in names if name in own_bits)
    main = _over_tiles(problem, variant, layout, summed, names, vector, partial(sections, problem), maps)
    return main, *(_sum_of_key_bias(problem, layout) if "dkey_bias" in names else ())


def _is_vector(problem: Problem, layout: memory.Layout, name: str, own_bits: Mapping[str, int]) -> bool:
    """Whether rows of dq, dk or dv are stored in vectors."""
    return memory.load_kind(problem.dtype, layout, (name,), own_bits[name]) == "16"


def _delta_sm90(problem: Problem, layout: memory.Layout, bits: Bits) -> Launch:
    load = "16" if memory.load_kind(problem.dtype, layout, ("o", "dout"), bits.rows) == "16" else "strided"
    variant = tiles.row_variant("attention_delta", problem.dtype, load, "90a", "sm90")
    return prepare(problem, variant, layout, memory.padded_rows(problem.m) // hopper.DELTA_ROWS)


def _over_tiles(
    problem: Problem,
    variant: compile.Variant,
    layout: memory.Layout,
    summed: tuple[int, ...],
    names: tuple[str, ...],
    store_vector: bool,
    sections: Callable[[int, int, int], hopper.Sections],
    maps: tuple[hopper.Map, ...],
    split_tiles: int = 0,
) -> Launch:
    """A kernel for some gradients whose CTAs claim tiles of rows of dq or else of keys, and which waits itself for the
    one ahead of it. ``sections``: of so many batch positions, tiles of each and multiprocessors; ``split_tiles``: the
    last ones, which are taken in parts."""
    tile = variant.tile
    blocks = -(-problem.m // tile.block_m) if variant.operation == tiles.DQ else -(-problem.n // tile.block_n)
    owned = math.prod(layout.extents[i] for i in range(memory.MAX_BATCH_AXES) if i not in summed)
    sms = multiprocessors(problem.device)
    launch = prepare(
        problem, variant, layout, loop=summed, need=sum(_NEED[name] for name in names), store_vector=store_vector,
        sections=sections(owned, blocks, sms), maps=maps, ctas=min(blocks * owned, sms),
        splits=hopper.LAST_TILE_PARTS if split_tiles else 1, split_tiles=split_tiles,
    )  # fmt: skip
    return replace(launch, overlaps=True)


def _backward_sm90_needs(problem: Problem, layout: memory.Layout, whole: hopper.Backward | None) -> Needs:
    """``whole``: how the kernel for all gradients, or for all but dq, takes the problem, where it does."""
    scratch = hopper.backward_scratch(problem, whole)
    begins, has_sums = scratch._asdict(), whole is not None and whole.sums is not None
    asked = {
        "row_terms": whole is not None and whole.takes_terms,
        "dq_accum": has_sums,
        "partials": _bias_axes(layout) != (),
    }
    names = ("row_lse", "delta", *(name for name, is_asked in asked.items() if is_asked))
    parts = tuple((POINTERS[name], begins[name]) for name in names)
    # Kernels of a call count one after the other.
    counters = {"claims": 0} | ({"careful": hopper.CAREFUL_AT} if whole else {})
    counters |= {"dq_turn": hopper.CLAIMS_NBYTES} if has_sums else {}
    numbered = tuple((POINTERS[name], begin) for name, begin in counters.items())
    return Needs(scratch.nbytes, parts, (), scratch.counts_nbytes, scratch.counts, numbered)


def _backward_operations(problem: Problem, family: str) -> dict[str, tuple[str, ...]]:
    return tiles.backward_operations(problem.dtype, max(problem.d, problem.e), device_target(problem.device), family)


def _bucket(problem: Problem, operation: str, family: str, load: str) -> int:
    """Tile head dim of an operation that has one wide enough: ``_check`` has refused more features."""
    target, features = device_target(problem.device), max(problem.d, problem.e)
    found = tiles.bucket(operation, problem.dtype, load, target, family, features)
    if found is None:
        raise KeyError(f"no row of {operation} in {problem.dtype} for {features} features on sm_{target}")
    return found


def _is_ordered(problem: Problem) -> bool:
    return problem.deterministic or not tiles.has_unordered(problem.dtype)


def _is_fused(problem: Problem, layout: memory.Layout, family: str, load: str, tile: tiles.Tile) -> bool:
    """Whether this call can, and should, take the kernel for all gradients."""
    if load != "16" or not all(name in layout.strides for name in ("dq", "dk", "dv")):
        return False
    summed = memory.summed_axes(layout, "dk")
    if summed != memory.summed_axes(layout, "dv"):
        return False
    if not _is_ordered(problem):
        return True
    if memory.summed_axes(layout, "dq"):  # it orders sums over keys alone
        return False
    dkv, dq = (_bucket(problem, f"attention_backward_{x}", family, load) for x in ("dkv", "dq"))
    if 5 * tile.head_dim > 4 * dkv + 3 * dq:  # separate kernels have narrower tiles
        return False
    # CTAs with keys of one head start one after the other, a query block apart. That they idle meanwhile must cost less
    # than the two products of five that separate kernels do twice.
    heads = math.prod(layout.extents[i] for i in range(memory.MAX_BATCH_AXES) if i not in summed)
    key_blocks, query_blocks = -(-problem.n // tile.block_n), -(-problem.m // tile.block_m)
    processors = multiprocessors(problem.device)
    idle = min(key_blocks, -(-processors // heads))
    busy = math.prod(layout.extents) * key_blocks * query_blocks / processors
    return 3 * idle <= busy


def _fused(problem: Problem, layout: memory.Layout, family: str, vector: Mapping[str, bool]) -> tuple[Launch, Launch]:
    """The main kernel, which adds to dq_accum, and the one that rounds that to dq."""
    main = _variant(problem, tiles.FUSED, family, "16")
    loop, need = memory.summed_axes(layout, "dk"), params.NEED_K | params.NEED_V
    blocks = -(-problem.n // main.tile.block_n)
    convert = _row_variant(problem, "attention_convert", family, "strided")
    rows = -(-problem.m // (16 * convert.tile.warps))
    return (
        prepare(problem, main, layout, blocks, loop, need, vector["dk"] and vector["dv"]),
        prepare(problem, convert, layout, rows, memory.summed_axes(layout, "dq"), params.NEED_Q, vector["dq"]),
    )


def _exponent_scale(problem: Problem) -> float:
    return problem.scale * LOG2E


def is_plain(problem: Problem) -> bool:
    """Whether the scale can wait until the exponent: nothing comes between, and it is positive and far from the ends of
    float32."""
    return problem.softcap is None and not problem.has_key_bias and 1e-30 < _exponent_scale(problem) < 1e30


def _variant(problem: Problem, operation: str, family: str, load: str) -> compile.Variant:
    dtype, target = problem.dtype, device_target(problem.device)
    head_dim = _bucket(problem, operation, family, load)
    plain = is_plain(problem) and tiles.has_plain(operation, head_dim, load)
    ordered = operation != tiles.FUSED or _is_ordered(problem)
    return tiles.variant(operation, dtype, head_dim, load, plain, target, family, problem.precision, ordered)


def _row_variant(problem: Problem, operation: str, family: str, load: str) -> compile.Variant:
    return tiles.row_variant(operation, problem.dtype, load, device_target(problem.device), family)


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


@cache
def device_target(device: int) -> str:
    import cupy

    capability = cupy.cuda.Device(device).compute_capability
    return compile.target_of((int(capability[:-1]), int(capability[-1])))


@cache
def multiprocessors(device: int) -> int:
    import cupy

    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


class Families(NamedTuple):
    """The kernel families that a device uses."""

    portable: str
    """That which serves every operation."""
    hopper: bool
    """Whether it has the sm90 family, and nobody asked for another."""


def device_families(device: int) -> Families:
    """By ``CUFLASH_FAMILY``, which may change from call to call, else the best."""
    return _families_of(os.environ.get("CUFLASH_FAMILY") or None, device)


@lru_cache
def _families_of(asked: str | None, device: int) -> Families:
    target = device_target(device)
    if asked is None:
        return Families(tiles.best_family(target), target == "90a")
    if asked not in ("sm75", "sm80", "sm90"):
        raise ValueError(f"CUFLASH_FAMILY must be sm75, sm80 or sm90, got {asked!r}")
    if asked == "sm80" and target == "75":
        raise NotImplementedError("CUFLASH_FAMILY=sm80 needs compute capability 8.0, the device has 7.5")
    if asked == "sm90" and target != "90a":
        raise NotImplementedError(f"CUFLASH_FAMILY=sm90 needs compute capability 9.0, this is sm_{target}")
    return Families("sm80", True) if asked == "sm90" else Families(asked, False)


# Merge


def merge(os_: Any, lses: Any, o: Any, lse: Any) -> None:
    """Fill o and lse from parts: tuples of arrays, or one array each with the parts along its first axis."""
    stacked = not isinstance(os_, tuple)
    count = os_.shape[0] if stacked else len(os_)
    if not stacked and count > params.MERGE_PARTS:
        raise NotImplementedError(
            f"attention_merge takes at most {params.MERGE_PARTS} separate arrays, got {count}; stacked in one array "
            "(axis 0) they may be any number"
        )
    itemsize, lse_itemsize = o.dtype.itemsize, lse.dtype.itemsize
    parts = [(os_[0], lses[0])] if stacked else list(zip(os_, lses, strict=True))
    shape = o.shape[:-2]
    strides: dict[str, memory.Strides] = {}
    for i, (a, b) in enumerate([*parts, (o, lse)]):
        strides[f"o{i}"] = tuple(memory.elements(s, itemsize) for s in a.strides)
        strides[f"lse{i}"] = tuple(memory.elements(s, lse_itemsize) for s in b.strides)
    axes = memory.coalesce(shape, {name: s[: len(shape)] for name, s in strides.items()})
    full = {name: axes.strides[name] + (*strides[name][len(shape) :], 0)[:2] for name in strides}
    described = [
        (a.data.ptr, b.data.ptr, full[f"o{i}"], full[f"lse{i}"]) for i, (a, b) in enumerate([*parts, (o, lse)])
    ]
    part_strides = (0, 0)
    if stacked:
        part_strides = memory.elements(os_.strides[0], itemsize), memory.elements(lses.strides[0], lse_itemsize)
    rows, value_dim = o.shape[-2:]
    for o_at, lse_at, *_ in described:
        Bits(o_at, 0, lse_at).check(o.dtype.name)
    packed = params.pack_merge(
        described[:-1], described[-1], part_strides, (*axes.extents, rows, value_dim, count, int(stacked))
    )
    device, dtype = o.device.id, o.dtype.name
    family, target = device_families(device).portable, device_target(device)
    if target == "75":  # the kernel itself, which has no tensor-core products, serves every dtype of the target
        check_dtype("attention_merge", dtype, target, family)
    variant = tiles.row_variant("attention_merge", dtype, "strided", target, family)
    grid = -(-math.prod(axes.extents) * rows // variant.tile.warps)
    if grid > params.MAX_INT:
        raise NotImplementedError(f"attention_merge would need {grid} blocks, a launch has at most {params.MAX_INT}")
    kernel = compile.kernel(variant, device)
    kernel((grid,), (variant.tile.threads,), (np.frombuffer(packed, _MERGE_PARAMS)[0],))
