"""The lineage on CuPy arrays: kernels of ``kernels_cu/lineage`` and matrix products by cuBLAS."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cuflash import compile, devices, launch, lineage_tiles, memory, params, tiles
from cuflash.planning import Bits, is_plain, prepare
from cuflash.problem import Problem

SHORT_ROW = 1024
"""Elements up to which a warp takes a row, beyond which a CTA does."""
MANY_ROWS = 4096
"""From so many on a thread takes a row by itself, where that of its neighbour lies beside it."""


def softmax(operation: str, x: Any, y: Any, maximum: Any, total: Any) -> None:
    """Enqueue a softmax of the rows of x along its last axis; of y and the statistics what is None is not wanted."""
    if x.shape[-1] == 0 and maximum is not None:
        maximum.fill(-np.inf)
        total.fill(0)
    if x.size == 0:
        return
    device, dtype = x.device.id, x.dtype.name
    target, family = kernels_of(device, dtype, operation)
    x_steps, y_steps = (() if a is None else _elements(a) for a in (x, y))
    batch = {"x": x_steps[:-1], "y": y_steps[:-1] if y_steps else (0,) * (x.ndim - 1)}
    batch["statistics"] = (0,) * (x.ndim - 1) if maximum is None else _elements(maximum)
    axes = memory.coalesce(x.shape[:-1], batch)
    rows = math.prod(axes.extents)
    _check_rows(operation, rows)
    load = _load(dtype, x.shape[-1], axes, [(x, x_steps, "x")] + ([] if y is None else [(y, y_steps, "y")]))
    variant = lineage_tiles.softmax(operation, dtype, load, target, family)
    threads = variant.tile.threads
    lanes = 32 if x.shape[-1] <= SHORT_ROW else threads
    if load == "strided" and axes.strides["x"][2] == 1 and rows >= MANY_ROWS:
        lanes = 1
    pointers = [0 if a is None else a.data.ptr for a in (x, y, maximum, total)]
    steps = [*axes.strides["x"], *axes.strides["y"], *axes.strides["statistics"], x_steps[-1]]
    steps += [y_steps[-1] if y_steps else 0, x.shape[-1]]
    packed = params.pack_softmax(pointers, steps, (*axes.extents, lanes, 0, 0))
    run(variant, device, -(-rows * lanes // threads), packed)


def check_standard(problem: Problem, operation: str) -> None:
    """Raise NotImplementedError for a valid problem that standard attention does not take here, before it allocates."""
    target, family = kernels_of(problem.device, problem.dtype, operation)
    most = lineage_tiles.longest_row(operation, problem.dtype, target, family)
    if problem.n > most:
        raise NotImplementedError(
            f"standard attention keeps a row of scores on chip: at most {most} keys in {problem.dtype} here, "
            f"got {problem.n}"
        )
    _check_rows(operation, math.prod(problem.batch) * problem.m)


def _check_rows(operation: str, rows: int) -> None:
    if rows > params.MAX_INT:
        raise NotImplementedError(f"{operation} counts rows in 32 bits: {rows} are too many, {params.MAX_INT} are not")


def standard_attention(problem: Problem, q: Any, k: Any, v: Any, p: Any, o: Any) -> None:
    """Enqueue three steps: scores to p; their softmax, in place; the product with v to o. p and o are in C order."""
    batch = problem.batch
    q, k, v = (_matrices(x, batch) for x in (q, k, v))
    p, o = _stacked(p), _stacked(o)
    _gemm(q, k, p, transpose_b=True, factor=problem.scale)
    _row_softmax(lineage_tiles.ROW_SOFTMAX, p, p, (problem.band.lo, problem.band.hi))
    _gemm(p, v, o)


def standard_attention_backward(
    problem: Problem, do: Any, q: Any, k: Any, v: Any, p: Any, dq: Any, dk: Any, dv: Any
) -> None:
    """Enqueue the gradients: dv; dp, of p's size, and ds in its place; dq and dk. The gradients are in C order."""
    import cupy

    batch = problem.batch
    do, q, k, v, p = (_matrices(x, batch) for x in (do, q, k, v, p))
    dp = cupy.empty(p.shape, p.dtype)
    _gemm(p, do, _stacked(dv), transpose_a=True)
    _gemm(do, v, dp, transpose_b=True)
    _row_softmax(lineage_tiles.ROW_SOFTMAX_BACKWARD, p, dp, (0, 0))
    _gemm(dp, k, _stacked(dq), factor=problem.scale)
    _gemm(dp, q, _stacked(dk), transpose_a=True, factor=problem.scale)


def check_flash1(problem: Problem, operation: str) -> None:
    """Raise NotImplementedError for a valid problem that FlashAttention-1 does not take here, before it allocates."""
    target, family = kernels_of(problem.device, problem.dtype, operation)
    most = max(lineage_tiles.head_dims(operation, problem.dtype))
    features = max(problem.d, problem.e)
    if features > most:
        raise NotImplementedError(
            f"{operation} in {problem.dtype} takes at most {most} features ({operation}_{family} for sm_{target}), "
            f"got {features}; the host serves any number"
        )
    if problem.m + problem.n > params.MAX_INT - 1024:
        raise NotImplementedError(f"kernels count rows in 32 bits: m + n = {problem.m + problem.n} is too many")
    given = {"q": problem.q_strides, "k": problem.k_strides, "v": problem.v_strides}
    memory.layout_of(problem, given)  # batch axes that no kernel can follow


def flash1_statistics(problem: Problem) -> tuple[Any, Any]:
    """Room for m and l of each row, on the current device: tiles of rows write whole."""
    import cupy

    shape = (*problem.batch, memory.padded_rows(problem.m))
    maximum, total = (cupy.empty(shape, problem.lse.dtype)[..., : problem.m] for _ in range(2))
    return maximum, total


def flash1_attention(problem: Problem, q: Any, k: Any, v: Any, o: Any, maximum: Any, total: Any) -> None:
    """Enqueue FlashAttention-1; the statistics are those of `flash1_statistics`."""
    import cupy

    target, family = kernels_of(problem.device, problem.dtype, lineage_tiles.FLASH1_FORWARD)
    head_dim = lineage_tiles.bucket(max(problem.d, problem.e), problem.dtype)
    assert head_dim is not None  # check_flash1
    named = {"q": q, "k": k, "v": v, "o": o}
    layout = memory.layout_of(problem, {name: x.strides for name, x in named.items()})
    bits = [x.data.ptr & 15 for x in named.values()]
    Bits(bits[0] | bits[1] | bits[2], bits[3], 0).check(problem.dtype)
    load = memory.load_kind(problem.dtype, layout, ("q", "k", "v"), bits[0] | bits[1] | bits[2])
    vector = memory.load_kind(problem.dtype, layout, ("o",), bits[3]) == "16"
    plain = is_plain(problem)
    variant = lineage_tiles.flash1(lineage_tiles.FLASH1_FORWARD, problem.dtype, head_dim, load, plain, target, family)
    tile, heads = variant.tile, math.prod(layout.extents)
    blocks = -(-problem.m // tile.block_m)
    # A CTA a head, as in the paper; where these do not fill the device, its rows are divided.
    parts = tiles.splits(heads, blocks, devices.multiprocessors(problem.device))
    state = cupy.empty(heads * blocks * tile.block_m * head_dim, problem.lse.dtype)
    strides = layout.strides | {"dq_accum": _in_order(layout.extents, blocks * tile.block_m * head_dim, head_dim)}
    plan = prepare(problem, variant, layout._replace(strides=strides), parts, splits=parts, store_vector=vector)
    addresses = {name: x.data.ptr for name, x in named.items()}
    addresses |= {"row_lse": maximum.data.ptr, "delta": total.data.ptr, "dq_accum": state.data.ptr}
    launch.enqueue((plan,), [addresses.get(name, 0) for name in params.TENSORS])


def flash1_attention_backward(
    problem: Problem, do: Any, q: Any, k: Any, v: Any, o: Any, maximum: Any, total: Any, dq: Any, dk: Any, dv: Any
) -> None:
    """Enqueue the gradients of FlashAttention-1, from its o, m and l."""
    import cupy

    operation = lineage_tiles.FLASH1_BACKWARD
    target, family = kernels_of(problem.device, problem.dtype, operation)
    head_dim = lineage_tiles.bucket(max(problem.d, problem.e), problem.dtype, operation)
    assert head_dim is not None  # check_flash1
    lse = cupy.empty(problem.lse.shape, problem.lse.dtype)
    named = {"q": q, "k": k, "v": v, "dout": do, "o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    layout = memory.layout_of(problem, {name: x.strides for name, x in named.items()})
    bits = {name: x.data.ptr & 15 for name, x in named.items()}
    operands, rows = bits["q"] | bits["k"] | bits["v"] | bits["dout"], bits["o"] | bits["dout"]
    Bits(operands, rows, 0).check(problem.dtype)
    load = memory.load_kind(problem.dtype, layout, ("q", "k", "v", "dout"), operands)
    row_load = memory.load_kind(problem.dtype, layout, ("o", "dout"), rows)
    vector = memory.load_kind(problem.dtype, layout, ("dk", "dv"), bits["dk"] | bits["dv"]) == "16"
    variant = lineage_tiles.flash1(operation, problem.dtype, head_dim, load, is_plain(problem), target, family)
    heads, padded = math.prod(layout.extents), memory.padded_rows(problem.m)
    row_lse, delta = (cupy.empty(heads * padded, problem.lse.dtype) for _ in range(2))
    sums = cupy.empty(heads * padded * head_dim, problem.lse.dtype)
    strides = layout.strides | {"dq_accum": _in_order(layout.extents, padded * head_dim, head_dim)}
    layout = layout._replace(strides=strides)
    of_rows = tiles.row_variant(
        "attention_delta", problem.dtype, "16" if row_load == "16" else "strided", target, family
    )
    plan = (
        prepare(problem, of_rows, layout, padded // (of_rows.tile.threads // 8)),
        prepare(problem, variant, layout, store_vector=vector),
    )
    addresses = {name: x.data.ptr for name, x in named.items()}
    addresses |= {"row_lse": row_lse.data.ptr, "delta": delta.data.ptr, "dq_accum": sums.data.ptr}
    cupy.log(total, out=lse)  # after everything that may raise; -inf in a row without keys
    lse += maximum
    launch.enqueue(plan, [addresses.get(name, 0) for name in params.TENSORS])


def _in_order(extents: tuple[int, int, int], count: int, row: int) -> memory.Strides:
    """Strides of a workspace array of ``count`` elements a batch position, in C order."""
    return (extents[1] * extents[2] * count, extents[2] * count, count, row, 0)


def _stacked(x: Any) -> Any:
    """An array in C order as one stack of matrices."""
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def _matrices(x: Any, batch: tuple[int, ...]) -> Any:
    """An array as one stack of matrices in C order, one for each batch position: itself, or a copy."""
    import cupy

    bits = x.view(f"u{x.dtype.itemsize}") if x.flags.c_contiguous else _bits(x)
    whole = cupy.ascontiguousarray(cupy.broadcast_to(bits, (*batch, *x.shape[-2:])))
    return _stacked(whole).view(x.dtype)


def _bits(x: Any) -> Any:
    """The same memory as integers, strides and all: CuPy's own operations need not know bfloat16."""
    import cupy

    return cupy.ndarray(x.shape, f"u{x.dtype.itemsize}", memptr=x.data, strides=x.strides)


_CUDA_TYPES = {"float16": 2, "bfloat16": 14, "float32": 0, "float64": 1}
"""cudaDataType of operands."""
_COMPUTE_TYPES = {"float16": 68, "bfloat16": 68, "float32": 69, "float64": 70}
"""cublasComputeType_t: float32 sums, of float32 operands without TF32 and in no other arithmetic; float64."""


def _gemm(a: Any, b: Any, c: Any, *, transpose_a: bool = False, transpose_b: bool = False, factor: float = 1.0) -> None:
    """c = factor * a b of stacks of matrices in C order, by cuBLAS, which takes each for its transpose: c^T = b^T a^T.

    Called directly and not through ``cupy.matmul``, which has no factor, no transposed operand without a copy, and
    bfloat16 only in some versions.
    """
    from cupy.cuda import cublas, device

    if c.size == 0:
        return
    dtype = c.dtype.name
    depth = a.shape[-2] if transpose_a else a.shape[-1]
    scalars = np.array([factor, 0], np.float64 if dtype == "float64" else np.float32)
    kind, (count, rows, cols) = _CUDA_TYPES[dtype], c.shape
    cublas.gemmStridedBatchedEx(
        device.get_cublas_handle(), int(transpose_b), int(transpose_a), cols, rows, depth,
        scalars[:1].ctypes.data,
        b.data.ptr, kind, b.shape[-1], b.shape[-2] * b.shape[-1],
        a.data.ptr, kind, a.shape[-1], a.shape[-2] * a.shape[-1],
        scalars[1:].ctypes.data,
        c.data.ptr, kind, cols, rows * cols,
        count, _COMPUTE_TYPES[dtype], cublas.CUBLAS_GEMM_DEFAULT,
    )  # fmt: skip


def _row_softmax(operation: str, x: Any, y: Any, band: tuple[int, int]) -> None:
    """Enqueue a kernel that keeps rows of stacks of matrices on chip."""
    device, dtype, (count, m, n) = x.device.id, x.dtype.name, x.shape
    target, family = kernels_of(device, dtype, operation)
    axes = memory.Axes((1, count, m), {"x": (0, m * n, n), "y": (0, m * n, n)})
    load = _load(dtype, n, axes, [(x, (1,), "x"), (y, (1,), "y")])
    variant = lineage_tiles.row_softmax(operation, dtype, load, target, family)
    # Two or more vectors a thread, as long as that leaves warps enough to hide what memory takes to answer.
    vectors = n * tiles.ITEMSIZE[dtype] // 16
    threads = min(variant.tile.threads, max(32, vectors // 4 // 32 * 32))
    packed = params.pack_softmax(
        (x.data.ptr, y.data.ptr, 0, 0), (0, m * n, n, 0, m * n, n, 0, 0, 0, 1, 1, n), (*axes.extents, threads, *band)
    )
    row_bytes = min(variant.smem_bytes, variant.smem_bytes * n // variant.tile.block_n // 16 * 16 + 16)
    run(variant, device, count * m, packed, threads, row_bytes)


def kernels_of(device: int, dtype: str, operation: str) -> tuple[str, str]:
    """Target and portable family of a device; NotImplementedError where it has no kernels of the dtype."""
    target, family = devices.target(device), devices.families(device).portable
    launch.check_dtype(operation, dtype, target, family)
    return target, family


def run(
    variant: compile.Variant,
    device: int,
    ctas: int,
    packed: bytes,
    threads: int | None = None,
    smem_bytes: int | None = None,
) -> None:
    """Enqueue a kernel that takes one struct, with threads and shared memory of its variant unless they are given."""
    if ctas > params.MAX_INT:
        raise NotImplementedError(
            f"{variant.operation} would need {ctas} blocks, a launch has at most {params.MAX_INT}"
        )
    kernel = compile.kernel(variant, device)
    argument = np.frombuffer(packed, f"V{len(packed)}")[0]
    dynamic = variant.smem_bytes if smem_bytes is None else smem_bytes
    kernel((ctas,), (threads or variant.tile.threads,), (argument,), shared_mem=dynamic)


def _elements(x: Any) -> tuple[int, ...]:
    """Strides in elements; 0 along an axis of length 1, whose stride says nothing."""
    strides = zip(x.shape, x.strides, strict=True)
    return tuple(0 if length == 1 else memory.elements(stride, x.dtype.itemsize) for length, stride in strides)


def _load(dtype: str, length: int, axes: memory.Axes, given: Sequence[tuple[Any, Sequence[int], str]]) -> str:
    """16 where every row of the arrays is whole vectors, side by side."""
    itemsize = tiles.ITEMSIZE[dtype]
    bits = itemsize * length
    for x, steps, name in given:
        if steps[-1] != 1:
            return "strided"
        bits |= x.data.ptr
        for stride, extent in zip(axes.strides[name], axes.extents, strict=True):
            bits |= itemsize * stride if extent > 1 else 0
    return "strided" if bits % 16 else "16"
