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
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from cuflash import compile, devices, few, hopper, memory, overlap, params, plan_sm90, tiles
from cuflash.needs import POINTERS, Needs, forget_counters, provide, reserve
from cuflash.planning import BACKWARD_TENSORS, NEED, Bits, Launch, Plan, input_strides, is_plain, prepare
from cuflash.problem import Problem

LOG = os.environ.get("CUFLASH_LOG") == "1"
"""Whether each call says which kernels it takes. Asked once: to ask takes a microsecond."""
_ALIGNED = (0,) * 6
"""Address bits below 16 of the arrays of nearly every forward."""
_MERGE_PARAMS = np.dtype(f"V{params.MERGE_SIZE}")


def check(problem: Problem, operation: str) -> devices.Families:
    """Raise NotImplementedError for a valid problem that no kernel serves, before anything is allocated; the families
    of those that do."""
    return _check(problem, operation, os.environ.get("CUFLASH_FAMILY"))


@lru_cache(maxsize=4096)
def _check(problem: Problem, operation: str, asked: str | None) -> devices.Families:
    families = devices.families_of(asked or None, problem.device)
    family = families.portable
    target = devices.target(problem.device)
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
    memory.layout_of(problem, input_strides(problem))  # batch axes that no kernel can follow
    return families


def check_dtype(operation: str, dtype: str, target: str, family: str) -> None:
    if dtype not in tiles.dtypes(target, family):
        raise NotImplementedError(
            f"{operation}_{family} has no {dtype}, which needs compute capability 8.0; "
            f"{', '.join(tiles.dtypes(target, family))} work, and the host"
        )


def workspace_nbytes(problem: Problem, operation: str) -> int:
    """Bytes of scratch memory of a call.

    Forward: where the grid splits the keys, what each split leaves of a row, and counts; where float32 is
    multiplied in planes, those; where the copy engine cannot follow arrays, copies of them; where CTAs claim tiles,
    a count. Backward: two numbers a query row (on Hopper as many as six), and where one kernel may compute all
    gradients, a row of sums as wide as its tile and a count for each block of rows; on Hopper also one a key and batch
    position for key_bias, where CTAs share the heads of a group under a band, two rows of sums a key, and else two of
    each of some last keys.
    """
    families = devices.families(problem.device)
    if operation != "attention_backward":
        if sm90 := _sm90(problem, families):
            return hopper.scratch(problem, sm90).nbytes
        return max((few.scratch(problem, kernel).nbytes for kernel in _few(problem, families)), default=0)
    nbytes = memory.workspace_of(problem, _fused_sums(problem, families.portable)).nbytes
    if families.hopper and problem.has_value:
        nbytes = max(nbytes, plan_sm90.backward_nbytes(problem))
    return nbytes


def _few(problem: Problem, families: devices.Families) -> tuple[few.Few, ...]:
    """The kernels for few features that can take a problem, best first."""
    target, multiprocessors = devices.target(problem.device), devices.multiprocessors(problem.device)
    return few.forwards(problem, target, families.portable, families.hopper, multiprocessors)


def _sm90(problem: Problem, families: devices.Families) -> hopper.Forward | None:
    """How the forward of the sm90 family takes a problem, None where another kernel does."""
    if not families.hopper or _few(problem, families):
        return None
    return hopper.forward(problem, devices.multiprocessors(problem.device), is_plain(problem))


@lru_cache(maxsize=4096)
def _fused_tile(problem: Problem, family: str) -> tiles.Tile | None:
    """The tile of the kernel for all gradients of problems like this, None where there is none."""
    if not is_plain(problem) or not problem.has_value:
        return None
    dtype, target = problem.dtype, devices.target(problem.device)
    head_dim = tiles.bucket(tiles.FUSED, dtype, "16", target, family, max(problem.d, problem.e))
    return None if head_dim is None else tiles.tile(tiles.FUSED, dtype, head_dim, "16", True, target, family)


def _fused_sums(problem: Problem, family: str) -> memory.Sums | None:
    tile = _fused_tile(problem, family)
    return None if tile is None else memory.fused_sums(problem.m, tile)


def forward(
    problem: Problem, q: Any, k: Any, v: Any, key_bias: Any, o: Any, lse: Any, workspace: Any,
    families: devices.Families,
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
    dq: Any, dk: Any, dv: Any, dkey_bias: Any, workspace: Any, families: devices.Families,
) -> None:  # fmt: skip
    """Fill those of dq, dk, dv and dkey_bias that are not None from inner views; ``families`` as of `check`."""
    inputs, strides = _describe((q, k, v, key_bias, o, lse, do, dlse))
    results, result_strides = _describe((dq, dk, dv, dkey_bias))
    tiles_in, rows_in = inputs[0] | inputs[1] | inputs[2] | inputs[6], inputs[4] | inputs[6]
    vectors = inputs[3] | inputs[5] | inputs[7] | results[3]
    bits = (Bits(tiles_in & 15, rows_in & 15, vectors & 15), *(x & 15 for x in results[:3]))
    if families.hopper and (sm90_plan := plan_sm90.backward(problem, strides + result_strides, *bits)):
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
    families: devices.Families,
    o_strides: memory.Strides | None,
    lse_strides: memory.Strides | None,
    bits: tuple[int, ...],
) -> Plan:
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
    if sm90 and (plan := plan_sm90.forward(problem, sm90, results, alike, key_bias)):
        return plan
    layout = memory.layout_of(problem, {**input_strides(problem), **results})
    for kernel in _few(problem, families):
        if few.takes(kernel, problem, layout, (k, v, key_bias)):
            return _plan_few(problem, families.portable, layout, kernel)
    load = memory.load_kind(problem.dtype, layout, ("q", "k", "v"), alike.loads)
    variant = _variant(problem, "attention_forward", families.portable, load)
    blocks = -(-problem.m // variant.tile.block_m)
    vector = memory.load_kind(problem.dtype, layout, ("o",), alike.rows) == "16"
    return Plan((prepare(problem, variant, layout, blocks, store_vector=vector),))


def _plan_few(problem: Problem, family: str, layout: memory.Layout, kernel: few.Few) -> Plan:
    variant, key_warps, row_blocks, splits = kernel
    main = prepare(problem, variant, layout, row_blocks * splits, splits=splits, key_warps=key_warps)
    if splits == 1:
        return Plan((main,))
    begin, nbytes = few.scratch(problem, kernel)
    parts = ((POINTERS["partials"], begin),)
    if kernel.merges:
        return Plan((main,), Needs(nbytes, parts, counts=begin))  # which the counts come before
    merge = _row_variant(problem, "attention_merge_splits", family, "strided")
    rows, warps = math.prod(layout.extents) * problem.m, merge.tile.warps
    shared = warps if splits > 32 else 1  # warps that share a row: its splits are more than lanes
    ctas = -(-rows * shared // warps)
    merging = prepare(problem, merge, layout, splits=splits, key_warps=shared, ctas=ctas)
    return Plan((main, merging), Needs(nbytes, parts))


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
    layout = memory.layout_of(problem, dict(zip(BACKWARD_TENSORS, strides, strict=True)), sums)
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
                blocks, need = -(-problem.n // variant.tile.block_n), sum(NEED[name] for name in names)
                aligned = all(vector.get(name, True) for name in names)
                plan.append(prepare(problem, variant, layout, blocks, loop, need, aligned))
    return tuple(plan)


def _backward_operations(problem: Problem, family: str) -> dict[str, tuple[str, ...]]:
    return tiles.backward_operations(problem.dtype, max(problem.d, problem.e), devices.target(problem.device), family)


def _bucket(problem: Problem, operation: str, family: str, load: str) -> int:
    """Tile head dim of an operation that has one wide enough: ``_check`` has refused more features."""
    target, features = devices.target(problem.device), max(problem.d, problem.e)
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
    processors = devices.multiprocessors(problem.device)
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


def _variant(problem: Problem, operation: str, family: str, load: str) -> compile.Variant:
    dtype, target = problem.dtype, devices.target(problem.device)
    head_dim = _bucket(problem, operation, family, load)
    plain = is_plain(problem) and tiles.has_plain(operation, head_dim, load)
    ordered = operation != tiles.FUSED or _is_ordered(problem)
    return tiles.variant(operation, dtype, head_dim, load, plain, target, family, problem.precision, ordered)


def _row_variant(problem: Problem, operation: str, family: str, load: str) -> compile.Variant:
    return tiles.row_variant(operation, problem.dtype, load, devices.target(problem.device), family)


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
    family, target = devices.families(device).portable, devices.target(device)
    if target == "75":  # the kernel itself, which has no tensor-core products, serves every dtype of the target
        check_dtype("attention_merge", dtype, target, family)
    variant = tiles.row_variant("attention_merge", dtype, "strided", target, family)
    grid = -(-math.prod(axes.extents) * rows // variant.tile.warps)
    if grid > params.MAX_INT:
        raise NotImplementedError(f"attention_merge would need {grid} blocks, a launch has at most {params.MAX_INT}")
    kernel = compile.kernel(variant, device)
    kernel((grid,), (variant.tile.threads,), (np.frombuffer(packed, _MERGE_PARAMS)[0],))
