"""From a problem and its arrays to kernels in a stream.

Everything that depends only on shapes, strides, options and the alignment of pointers is planned once and cached:
which variant, which grid, the constant part of its parameters. A warm call looks the plan up, packs the pointers and
launches.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from cuflash import compile, params, tiles
from cuflash.problem import Problem

LOG2E = math.log2(math.e)
MAX_BATCH_AXES = 3
MAX_INT = 2**31 - 1
_PARAMS = {dtype: np.dtype(f"V{params.size('attention_forward', dtype)}") for dtype in tiles.ITEMSIZE}
_MERGE_PARAMS = np.dtype(f"V{params.MERGE_SIZE}")

Strides = tuple[int, ...]


class _Launch(NamedTuple):
    """One kernel of a call, ready but for the pointers."""

    kernel: Any
    variant: compile.Variant
    grid: tuple[int]
    block: tuple[int]
    smem_bytes: int
    tail: bytes


class _Bits(NamedTuple):
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
        if (self.loads | self.rows) % itemsize or self.vectors % max(itemsize, 4):
            raise NotImplementedError(
                "an array starts between two elements (its address is not a multiple of its item size), which kernels "
                "cannot read; copy it"
            )


class _Axes(NamedTuple):
    """Coalesced batch axes: their extents, and each array's strides on them, in elements."""

    extents: tuple[int, int, int]
    strides: dict[str, tuple[int, int, int]]


def check(problem: Problem, operation: str) -> None:
    """Raise NotImplementedError for a valid problem that no kernel serves, before anything is allocated."""
    _check(problem, operation, _family(problem.device))


@lru_cache(maxsize=4096)
def _check(problem: Problem, operation: str, family: str) -> None:
    target = _target(problem.device)
    _check_dtype(operation, problem.dtype, target, family)
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
    if problem.m + problem.n > MAX_INT - 1024:
        raise NotImplementedError(f"kernels count rows in 32 bits: m + n = {problem.m + problem.n} is too many")
    _layout(problem, _input_strides(problem))  # batch axes that no kernel can follow


def _check_dtype(operation: str, dtype: str, target: str, family: str) -> None:
    if dtype not in tiles.dtypes(target, family):
        raise NotImplementedError(
            f"{operation}_{family} has no {dtype}, which needs compute capability 8.0; "
            f"{', '.join(tiles.dtypes(target, family))} work, and the host"
        )


def _input_strides(problem: Problem) -> dict[str, Strides | None]:
    return {"q": problem.q_strides, "k": problem.k_strides, "v": problem.v_strides, "key_bias": problem.bias_strides}


def workspace_nbytes(problem: Problem, operation: str) -> int:
    """Bytes of scratch memory of a call: none forward; backward two numbers a query row, and where one kernel may
    compute all gradients, a row of sums as wide as its tile and a count for each block of rows."""
    if operation != "attention_backward":
        return 0
    return _workspace(problem, _fused_tile(problem, _family(problem.device))).nbytes


class _Workspace(NamedTuple):
    """Where the parts of the scratch memory begin, from a multiple of 16, and its size."""

    delta: int
    dq_accum: int
    dq_turn: int
    claims: int
    nbytes: int


@lru_cache(maxsize=4096)
def _workspace(problem: Problem, fused: tiles.Tile | None) -> _Workspace:
    """``fused``: the tile of the kernel for all gradients, None where there is none."""
    accumulator, q_batch = _accumulator_bytes(problem.dtype), math.prod(problem.q_batch)
    rows = accumulator * math.prod(problem.inner_batch) * _padded_rows(problem.m)
    sums = turns = claims = 0  # zeroed before each call, in one piece
    if fused:
        sums = accumulator * q_batch * _accumulated_rows(problem.m) * fused.head_dim
        turns, claims = 4 * q_batch * _turn_count(problem.m, fused), 16
    delta, accum, turn, claim, end = itertools.accumulate((rows, rows, sums, turns, claims))
    return _Workspace(delta, accum, turn, claim, end + 16)  # the caller's memory may start anywhere


def _accumulator_bytes(dtype: str) -> int:
    return max(4, tiles.ITEMSIZE[dtype])


def _padded_rows(m: int) -> int:
    return -(-m // params.ROW_PADDING) * params.ROW_PADDING


def _accumulated_rows(m: int) -> int:
    return -(-m // 16) * 16


def _turn_count(m: int, fused: tiles.Tile) -> int:
    """Counts of turns of one batch element of q, a multiple of 4."""
    return -(-m // (4 * fused.block_m)) * 4


@lru_cache(maxsize=4096)
def _fused_tile(problem: Problem, family: str) -> tiles.Tile | None:
    """The tile of the kernel for all gradients of problems like this, None where there is none."""
    if not _is_plain(problem) or not problem.has_value:
        return None
    dtype, target = problem.dtype, _target(problem.device)
    head_dim = tiles.bucket(tiles.FUSED, dtype, "16", target, family, max(problem.d, problem.e))
    return None if head_dim is None else tiles.tile(tiles.FUSED, dtype, head_dim, "16", True, target, family)


def forward(problem: Problem, q: Any, k: Any, v: Any, key_bias: Any, o: Any, lse: Any, workspace: Any) -> None:
    """Fill o and lse (either may be None) from inner views."""
    pointers = [0 if x is None else x.data.ptr for x in (q, k, v, key_bias, o, lse)]
    inputs, vectors = (pointers[0] | pointers[1] | pointers[2]) & 15, (pointers[3] | pointers[5]) & 15
    # The problem knows the strides of the inputs.
    o_strides, lse_strides = None if o is None else o.strides, None if lse is None else lse.strides
    bits = _Bits(inputs, pointers[4] & 15, vectors)
    _run((_plan_forward(problem, _family(problem.device), o_strides, lse_strides, bits),), pointers)


def backward(
    problem: Problem, q: Any, k: Any, v: Any, key_bias: Any, do: Any, o: Any, lse: Any, dlse: Any,
    dq: Any, dk: Any, dv: Any, dkey_bias: Any, workspace: Any,
) -> None:  # fmt: skip
    """Fill those of dq, dk, dv and dkey_bias that are not None from inner views."""
    import cupy

    inputs, strides = _describe((q, k, v, key_bias, o, lse, do, dlse))
    results, result_strides = _describe((dq, dk, dv, dkey_bias))
    tiles_in, rows_in = inputs[0] | inputs[1] | inputs[2] | inputs[6], inputs[4] | inputs[6]
    vectors = inputs[3] | inputs[5] | inputs[7] | results[3]
    bits = (_Bits(tiles_in & 15, rows_in & 15, vectors & 15), *(x & 15 for x in results[:3]))
    plan = _plan_backward(problem, _family(problem.device), strides + result_strides, *bits)
    fused = next((launch.variant.tile for launch in plan if launch.variant.operation == tiles.FUSED), None)
    parts = _workspace(problem, fused)
    if workspace is None:
        workspace = cupy.empty(parts.nbytes, np.uint8)
    row_lse = -(-workspace.data.ptr // 16) * 16
    delta, dq_accum, dq_turn, claims, _ = (row_lse + offset for offset in parts)
    if fused:
        stream = cupy.cuda.get_current_stream().ptr
        cupy.cuda.runtime.memsetAsync(dq_accum, 0, claims + 16 - dq_accum, stream)
    _run(plan, [*inputs, row_lse, delta, *results, dq_accum, dq_turn, claims])


def _describe(arrays: Sequence[Any]) -> tuple[list[int], tuple[Strides | None, ...]]:
    """Addresses (0 where absent) and strides, in the order of ``params.TENSORS``."""
    pointers = [0 if x is None else x.data.ptr for x in arrays]
    return pointers, tuple([None if x is None else x.strides for x in arrays])


def _run(plan: Sequence[_Launch], pointers: Sequence[int]) -> None:
    log = os.environ.get("CUFLASH_LOG") == "1"
    for launch in plan:
        if log:
            print(f"cuflash: {launch.variant}, grid {launch.grid[0]}", file=sys.stderr)
        packed = np.frombuffer(params.pack(pointers, launch.tail), _PARAMS[launch.variant.dtype])[0]
        launch.kernel(launch.grid, launch.block, (packed,), shared_mem=launch.smem_bytes)


# Plans


@lru_cache(maxsize=4096)
def _plan_forward(
    problem: Problem, family: str, o_strides: Strides | None, lse_strides: Strides | None, bits: _Bits
) -> _Launch:
    bits.check(problem.dtype)
    layout = _layout(problem, {**_input_strides(problem), "o": o_strides, "lse": lse_strides})
    load = _load_kind(problem.dtype, layout, ("q", "k", "v"), bits.loads)
    variant = _variant(problem, "attention_forward", family, load)
    blocks = -(-problem.m // variant.tile.block_m)
    vector = _load_kind(problem.dtype, layout, ("o",), bits.rows) == "16"
    return _launch(problem, variant, layout, blocks, store_vector=vector)


_BACKWARD_TENSORS = (
    "q", "k", "v", "key_bias", "o", "lse", "dout", "dlse", "dq", "dk", "dv", "dkey_bias",
)  # fmt: skip
_NEED = {"dk": params.NEED_K, "dv": params.NEED_V, "dkey_bias": params.NEED_KEY_BIAS}


@lru_cache(maxsize=4096)
def _plan_backward(
    problem: Problem,
    family: str,
    strides: tuple[Strides | None, ...],
    bits: _Bits,
    *gradient_bits: int,
) -> tuple[_Launch, ...]:
    """``gradient_bits``: address bits of dq, dk and dv."""
    bits.check(problem.dtype)
    for gradient in gradient_bits:
        _Bits(gradient, 0, 0).check(problem.dtype)
    fused = _fused_tile(problem, family)
    layout = _layout(problem, dict(zip(_BACKWARD_TENSORS, strides, strict=True)), fused)
    load = _load_kind(problem.dtype, layout, ("q", "k", "v", "dout"), bits.loads)
    gradients = [pair for pair in zip(("dq", "dk", "dv"), gradient_bits, strict=True) if pair[0] in layout.strides]
    vector = {name: _load_kind(problem.dtype, layout, (name,), own) == "16" for name, own in gradients}
    delta_load = _load_kind(problem.dtype, layout, ("o", "dout"), bits.rows)
    variant = _row_variant(problem, "attention_delta", family, "16" if delta_load == "16" else "strided")
    plan = [_launch(problem, variant, layout, _padded_rows(problem.m) // (variant.tile.threads // 8))]
    if fused and _is_fused(problem, layout, family, load, fused):
        return (*plan, *_fused(problem, layout, family, vector))
    if "dq" in layout.strides:
        variant = _variant(problem, "attention_backward_dq", family, load)
        blocks, loop = -(-problem.m // variant.tile.block_m), _summed_axes(layout, "dq")
        plan.append(_launch(problem, variant, layout, blocks, loop, params.NEED_Q, vector["dq"]))
    # One launch for the outputs that are summed over the same axes.
    groups: dict[tuple[int, ...], list[str]] = {}
    for name in _NEED:
        if name in layout.strides:
            groups.setdefault(_summed_axes(layout, name), []).append(name)
    for loop, outputs in groups.items():
        for operation, served in _backward_operations(problem, family).items():
            names = [name for name in outputs if name in served]
            if names:
                variant = _variant(problem, operation, family, load)
                blocks, need = -(-problem.n // variant.tile.block_n), sum(_NEED[name] for name in names)
                aligned = all(vector.get(name, True) for name in names)
                plan.append(_launch(problem, variant, layout, blocks, loop, need, aligned))
    return tuple(plan)


def _backward_operations(problem: Problem, family: str) -> dict[str, tuple[str, ...]]:
    return tiles.backward_operations(problem.dtype, max(problem.d, problem.e), _target(problem.device), family)


def _bucket(problem: Problem, operation: str, family: str, load: str) -> int:
    """Tile head dim of an operation that has one wide enough: ``_check`` has refused more features."""
    target, features = _target(problem.device), max(problem.d, problem.e)
    found = tiles.bucket(operation, problem.dtype, load, target, family, features)
    if found is None:
        raise KeyError(f"no row of {operation} in {problem.dtype} for {features} features on sm_{target}")
    return found


def _is_ordered(problem: Problem) -> bool:
    return problem.deterministic or not tiles.has_unordered(problem.dtype)


def _is_fused(problem: Problem, layout: _Layout, family: str, load: str, tile: tiles.Tile) -> bool:
    """Whether this call can, and should, take the kernel for all gradients."""
    if load != "16" or not all(name in layout.strides for name in ("dq", "dk", "dv")):
        return False
    summed = _summed_axes(layout, "dk")
    if summed != _summed_axes(layout, "dv"):
        return False
    if not _is_ordered(problem):
        return True
    if _summed_axes(layout, "dq"):  # it orders sums over keys alone
        return False
    dkv, dq = (_bucket(problem, f"attention_backward_{x}", family, load) for x in ("dkv", "dq"))
    if 5 * tile.head_dim > 4 * dkv + 3 * dq:  # separate kernels have narrower tiles
        return False
    # CTAs with keys of one head start one after the other, a query block apart. That they idle meanwhile must cost less
    # than the two products of five that separate kernels do twice.
    heads = math.prod(layout.extents[i] for i in range(MAX_BATCH_AXES) if i not in summed)
    key_blocks, query_blocks = -(-problem.n // tile.block_n), -(-problem.m // tile.block_m)
    processors = _multiprocessors(problem.device)
    idle = min(key_blocks, -(-processors // heads))
    busy = math.prod(layout.extents) * key_blocks * query_blocks / processors
    return 3 * idle <= busy


def _fused(problem: Problem, layout: _Layout, family: str, vector: Mapping[str, bool]) -> tuple[_Launch, _Launch]:
    """The main kernel, which adds to dq_accum, and the one that rounds that to dq."""
    main = _variant(problem, tiles.FUSED, family, "16")
    loop, need = _summed_axes(layout, "dk"), params.NEED_K | params.NEED_V
    blocks = -(-problem.n // main.tile.block_n)
    convert = _row_variant(problem, "attention_convert", family, "strided")
    rows = -(-problem.m // (16 * convert.tile.warps))
    return (
        _launch(problem, main, layout, blocks, loop, need, vector["dk"] and vector["dv"]),
        _launch(problem, convert, layout, rows, _summed_axes(layout, "dq")),
    )


class _Layout(NamedTuple):
    extents: tuple[int, int, int]
    strides: dict[str, Strides]
    """Three batch strides, row, column, in elements, of each array that is there."""
    lengths: dict[str, tuple[int, int]]
    """Length of the row axis and of the column axis."""


_VECTORS = ("key_bias", "lse", "dlse", "dkey_bias")
"""Arrays of accumulation dtype with a row axis and no column axis."""


def _layout(problem: Problem, given: Mapping[str, Strides | None], fused: tiles.Tile | None = None) -> _Layout:
    """Batch axes coalesced over all arrays of the call, workspace included; strides in elements."""
    m, n, d, e = problem.m, problem.n, problem.d, problem.e
    lengths = {"q": (m, d), "k": (n, d), "v": (n, e), "o": (m, e), "key_bias": (n, 1), "lse": (m, 1)}
    lengths |= {f"d{name}": pair for name, pair in lengths.items()} | {"dout": (m, e)}
    shapes = {"q": problem.q_batch, "k": problem.k_batch, "v": problem.v_batch, "key_bias": problem.bias_batch}
    shapes |= {f"d{name}": shape for name, shape in shapes.items()}
    batch_strides: dict[str, Strides] = {}
    core_strides: dict[str, Strides] = {}
    for name, strides in given.items():
        if strides is not None:
            shape = shapes.get(name, problem.inner_batch) or ()
            itemsize = _accumulator_bytes(problem.dtype) if name in _VECTORS else tiles.ITEMSIZE[problem.dtype]
            batch_strides[name] = _batch_strides(problem, shape, strides[: len(shape)], itemsize)
            core_strides[name] = tuple(_elements(s, itemsize) for s in (*strides[len(shape) :], 0)[:2])
    for name in ("row_lse", "delta"):
        batch_strides[name], core_strides[name] = _contiguous(problem, problem.inner_batch, _padded_rows(m)), (1, 0)
    if fused and "dq" in batch_strides:
        sums = _accumulated_rows(m) * fused.head_dim
        batch_strides["dq_accum"], core_strides["dq_accum"] = (
            _contiguous(problem, problem.q_batch, sums),
            (fused.head_dim, 0),
        )
        batch_strides["dq_turn"], core_strides["dq_turn"] = (
            _contiguous(problem, problem.q_batch, _turn_count(m, fused)),
            (1, 0),
        )
    axes = _coalesce(problem.inner_batch, batch_strides)
    return _Layout(axes.extents, {name: axes.strides[name] + core_strides[name] for name in batch_strides}, lengths)


def _contiguous(problem: Problem, shape: Sequence[int], count: int) -> Strides:
    """Batch strides of a workspace array of ``shape`` in C order with ``count`` elements for each batch."""
    strides: list[int] = []
    for extent in reversed(shape):
        strides.insert(0, count)
        count *= extent
    return _batch_strides(problem, shape, strides, 1)


def _elements(stride: int, itemsize: int) -> int:
    if stride % itemsize:
        raise NotImplementedError(
            f"kernels step by whole elements; a stride of {stride} bytes is not a multiple of {itemsize}: copy it"
        )
    return stride // itemsize


def _batch_strides(problem: Problem, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Strides:
    """Strides, in elements, on every axis of the inner batch; 0 where the array is broadcast."""
    missing = len(problem.inner_batch) - len(shape)
    own = (0 if length == 1 else _elements(s, itemsize) for length, s in zip(shape, strides, strict=True))
    return (0,) * missing + tuple(own)


def _coalesce(shape: Sequence[int], strides: Mapping[str, Strides]) -> _Axes:
    """Merge each two batch axes that all arrays step through as one, in whichever order."""
    keep = [i for i, length in enumerate(shape) if length != 1]
    axes = [(shape[i], {name: s[i] for name, s in strides.items()}) for i in keep]
    merged = True
    while merged:
        merged = False
        for outer in range(len(axes)):
            for inner in range(len(axes)):
                length, steps = axes[inner]
                if outer != inner and all(axes[outer][1][name] == length * step for name, step in steps.items()):
                    axes[inner] = (length * axes[outer][0], steps)
                    del axes[outer]
                    merged = True
                    break
            if merged:
                break
    if len(axes) > MAX_BATCH_AXES:
        raise NotImplementedError(
            f"batch axes of lengths {[length for length, _ in axes]} step through memory in {len(axes)} independent "
            f"ways, kernels follow {MAX_BATCH_AXES}: make an array contiguous, or call once for each index of an axis"
        )
    nothing = (1, dict.fromkeys(strides, 0))
    axes = [nothing] * (MAX_BATCH_AXES - len(axes)) + axes
    extents = (axes[0][0], axes[1][0], axes[2][0])
    return _Axes(extents, {name: (axes[0][1][name], axes[1][1][name], axes[2][1][name]) for name in strides})


def _load_kind(dtype: str, layout: _Layout, names: Iterable[str], bits: int) -> str:
    """The widest load that every row of every array allows; ``bits`` are the low bits of their addresses."""
    itemsize = tiles.ITEMSIZE[dtype]
    for name in names:
        if name not in layout.strides:
            continue
        *batch, row, col = layout.strides[name]
        rows, cols = layout.lengths[name]
        if col != 1 and cols > 1:
            return "strided"
        bits |= itemsize * (row if rows > 1 else 0)
        for stride, extent in zip(batch, layout.extents, strict=True):
            bits |= itemsize * stride if extent > 1 else 0
    return next((load for load in tiles.loads(dtype)[:-1] if bits % int(load) == 0), "strided")


def _summed_axes(layout: _Layout, name: str) -> tuple[int, ...]:
    """Batch axes on which the input of a gradient was broadcast: the gradient has nothing to step to there."""
    return tuple(i for i in range(MAX_BATCH_AXES) if layout.extents[i] > 1 and layout.strides[name][i] == 0)


def _exponent_scale(problem: Problem) -> float:
    return problem.scale * LOG2E


def _is_plain(problem: Problem) -> bool:
    """Whether the scale can wait until the exponent: nothing comes between, and it is positive and far from the ends of
    float32."""
    return problem.softcap is None and not problem.has_key_bias and 1e-30 < _exponent_scale(problem) < 1e30


def _variant(problem: Problem, operation: str, family: str, load: str) -> compile.Variant:
    dtype, target = problem.dtype, _target(problem.device)
    head_dim = _bucket(problem, operation, family, load)
    plain = _is_plain(problem) and tiles.has_plain(head_dim, load)
    tile = tiles.tile(operation, dtype, head_dim, load, plain, target, family)
    scores = () if plain else tiles.SCORES
    ordered = operation != tiles.FUSED or _is_ordered(problem)
    return compile.Variant(
        operation, family, target, dtype, dtype, tile, scores, load, not plain, ordered, problem.precision
    )


def _row_variant(problem: Problem, operation: str, family: str, load: str) -> compile.Variant:
    target = _target(problem.device)
    return compile.Variant(operation, family, target, problem.dtype, problem.dtype, tiles.ROW_KERNEL, (), load, False)


def _launch(
    problem: Problem,
    variant: compile.Variant,
    layout: _Layout,
    blocks: int,
    loop: tuple[int, ...] = (),
    need: int = 0,
    store_vector: bool = False,
) -> _Launch:
    grid_extents = [1 if i in loop else layout.extents[i] for i in range(MAX_BATCH_AXES)]
    loop_extents = [layout.extents[i] if i in loop else 1 for i in range(MAX_BATCH_AXES)]
    grid = blocks * math.prod(grid_extents)
    if grid > MAX_INT or math.prod(loop_extents) > MAX_INT:
        raise NotImplementedError(f"{variant.operation} would need {grid} blocks, a launch has at most {MAX_INT}")
    ints = {f"grid_extent{i}": grid_extents[i] for i in range(MAX_BATCH_AXES)}
    ints |= {f"loop_extent{i}": loop_extents[i] for i in range(MAX_BATCH_AXES)}
    ints |= {"seqlen_q": problem.m, "seqlen_k": problem.n, "head_dim": problem.d, "value_dim": problem.e}
    ints |= {"band_lo": problem.band.lo, "band_hi": problem.band.hi}
    ints |= {"need": need, "store_vector": int(store_vector)}
    scalars = {
        "scale": problem.scale,
        "exponent_scale": LOG2E if variant.prescaled else _exponent_scale(problem),
        "lse_scale": 1.0 if variant.prescaled else problem.scale,
        "softcap": problem.softcap or 0.0,
    }
    kernel = compile.kernel(variant, problem.device)
    tail = params.pack_tail(layout.strides, ints, scalars, problem.dtype)
    return _Launch(kernel, variant, (grid,), (variant.tile.threads,), variant.smem_bytes, tail)


@cache
def _target(device: int) -> str:
    import cupy

    capability = cupy.cuda.Device(device).compute_capability
    return compile.target_of((int(capability[:-1]), int(capability[-1])))


@cache
def _multiprocessors(device: int) -> int:
    import cupy

    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


def _family(device: int) -> str:
    """The kernel family that runs on a device: ``CUFLASH_FAMILY``, else the best one built for it."""
    asked = os.environ.get("CUFLASH_FAMILY")
    if asked is None:
        return "sm75" if _target(device) == "75" else "sm80"
    if asked not in ("sm75", "sm80"):
        raise ValueError(f"CUFLASH_FAMILY must be sm75 or sm80, got {asked!r}")
    if asked == "sm80" and _target(device) == "75":
        raise NotImplementedError("CUFLASH_FAMILY=sm80 needs compute capability 8.0, the device has 7.5")
    return asked


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
    strides: dict[str, Strides] = {}
    for i, (a, b) in enumerate([*parts, (o, lse)]):
        strides[f"o{i}"] = tuple(_elements(s, itemsize) for s in a.strides)
        strides[f"lse{i}"] = tuple(_elements(s, lse_itemsize) for s in b.strides)
    axes = _coalesce(shape, {name: s[: len(shape)] for name, s in strides.items()})
    full = {name: axes.strides[name] + (*strides[name][len(shape) :], 0)[:2] for name in strides}
    described = [
        (a.data.ptr, b.data.ptr, full[f"o{i}"], full[f"lse{i}"]) for i, (a, b) in enumerate([*parts, (o, lse)])
    ]
    part_strides = (
        (_elements(os_.strides[0], itemsize), _elements(lses.strides[0], lse_itemsize)) if stacked else (0, 0)
    )
    rows, value_dim = o.shape[-2:]
    for o_at, lse_at, *_ in described:
        _Bits(o_at, 0, lse_at).check(o.dtype.name)
    packed = params.pack_merge(
        described[:-1], described[-1], part_strides, (*axes.extents, rows, value_dim, count, int(stacked))
    )
    device, dtype = o.device.id, o.dtype.name
    family, target = _family(device), _target(device)
    if target == "75":  # the kernel itself, which has no tensor-core products, serves every dtype of the target
        _check_dtype("attention_merge", dtype, target, family)
    variant = compile.Variant("attention_merge", family, target, dtype, dtype, tiles.ROW_KERNEL, (), "strided", False)
    grid = -(-math.prod(axes.extents) * rows // variant.tile.warps)
    if grid > MAX_INT:
        raise NotImplementedError(f"attention_merge would need {grid} blocks, a launch has at most {MAX_INT}")
    kernel = compile.kernel(variant, device)
    kernel((grid,), (variant.tile.threads,), (np.frombuffer(packed, _MERGE_PARAMS)[0],))
