"""What the lineage hands to its kernels and to cuBLAS, on host memory: each kernel is played by some lines of NumPy
that know nothing but the numbers that were passed."""

from __future__ import annotations

import struct
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from scipy.special import softmax  # type: ignore[import-untyped]

from cuflash import compile, devices, launch, lineage, lineage_launch, lineage_tiles, params


class Fake(np.ndarray):
    """NumPy memory that says it is on GPU 0."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return types.SimpleNamespace(ptr=self.ctypes.data, device_id=0)

    @property
    def device(self) -> Any:
        return types.SimpleNamespace(id=0)


def fake(x: Any) -> Fake:
    return np.asarray(x).view(Fake)


def at(pointer: int, dtype: str, shape: tuple[int, ...], steps: tuple[int, ...]) -> np.ndarray:
    """Memory at an address, seen with strides in elements."""
    size = np.dtype(dtype).itemsize
    low = sum(min(0, (n - 1) * s) for n, s in zip(shape, steps, strict=True)) * size
    high = sum(max(0, (n - 1) * s) for n, s in zip(shape, steps, strict=True)) * size + size
    raw = (np.ctypeslib.ctypes.c_char * (high - low)).from_address(pointer + low)
    flat = np.frombuffer(raw, dtype)
    return as_strided(flat[-low // size :], shape, tuple(size * s for s in steps))


def gemm(
    _: int, op_a: int, op_b: int, m: int, n: int, k: int, alpha: int, a: int, kind: int, lda: int, step_a: int, b: int,
    kind_b: int, ldb: int, step_b: int, beta: int, c: int, kind_c: int, ldc: int, step_c: int, count: int, compute: int,
    __: int,
) -> None:  # fmt: skip
    """cublasGemmStridedBatchedEx: column-major matrices, C = alpha op(A) op(B) + beta C."""
    dtype = {1: "float64", 0: "float32"}[kind]
    assert kind == kind_b == kind_c and compute == {1: 70, 0: 69}[kind]
    factor, rest = (float(at(x, dtype, (1,), (1,))[0]) for x in (alpha, beta))
    assert rest == 0
    left = at(a, dtype, (count, *((k, m) if op_a else (m, k))), (step_a, 1, lda))
    right = at(b, dtype, (count, *((n, k) if op_b else (k, n))), (step_b, 1, ldb))
    result = at(c, dtype, (count, m, n), (step_c, 1, ldc))
    result[...] = factor * (left.swapaxes(1, 2) if op_a else left) @ (right.swapaxes(1, 2) if op_b else right)


def play(
    variant: compile.Variant, _: int, ctas: int, packed: bytes, threads: Any = None, smem_bytes: Any = None
) -> None:
    """A softmax kernel: SoftmaxParams, row by row."""
    x, y, maximum, total, *steps, e0, e1, e2, lanes, lo, hi = struct.unpack("<4Q12q6i", packed)
    x_batch, y_batch, s_batch, (x_step, y_step, n) = steps[:3], steps[3:6], steps[6:9], steps[9:]
    threads = threads or variant.tile.threads
    assert lanes in (1, 32, threads) and ctas == -(-e0 * e1 * e2 * lanes // threads)
    row_bytes = n * np.dtype(variant.dtype).itemsize
    assert smem_bytes is None or row_bytes <= smem_bytes <= variant.smem_bytes
    if variant.load == "16":
        assert x % 16 == 0 and (y == 0 or y % 16 == 0) and x_step == 1 and row_bytes % 16 == 0
    source = at(x, variant.dtype, (e0, e1, e2, n), (*x_batch, x_step))
    row, key = np.arange(e2)[:, None], np.arange(n)
    if variant.operation == lineage_tiles.ROW_SOFTMAX:
        scores = np.where((key >= row + lo) & (key <= row + hi), source, -np.inf)
        largest = scores.max(-1, keepdims=True)
        p = np.exp(scores - np.where(np.isneginf(largest), 0, largest))
        result = p / np.where(p.sum(-1, keepdims=True) == 0, 1, p.sum(-1, keepdims=True))
    elif variant.operation == lineage_tiles.ROW_SOFTMAX_BACKWARD:
        dp = at(y, variant.dtype, (e0, e1, e2, n), (*y_batch, y_step))
        result = source * (dp - (source * dp).sum(-1, keepdims=True))
    else:
        result = softmax(source, axis=-1)
    if y:
        at(y, variant.dtype, (e0, e1, e2, n), (*y_batch, y_step))[...] = result
    if maximum:
        at(maximum, variant.dtype, (e0, e1, e2), tuple(s_batch))[...] = source.max(-1)
        at(total, variant.dtype, (e0, e1, e2), tuple(s_batch))[...] = np.exp(
            source - source.max(-1, keepdims=True)
        ).sum(-1)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    cupy = types.ModuleType("cupy")
    cuda = types.SimpleNamespace(
        cublas=types.SimpleNamespace(gemmStridedBatchedEx=gemm, CUBLAS_GEMM_DEFAULT=-1),
        device=types.SimpleNamespace(get_cublas_handle=lambda: 0),
        runtime=types.SimpleNamespace(getDevice=lambda: 0),
    )
    cupy.__dict__.update(
        cuda=cuda,
        ndarray=Fake,
        empty=lambda shape, dtype: fake(np.full(shape, np.nan, dtype)),
        moveaxis=np.moveaxis,
        log=np.errstate(divide="ignore")(np.log),
        broadcast_to=lambda x, shape: np.broadcast_to(x, shape, subok=True),
        ascontiguousarray=lambda x: fake(np.ascontiguousarray(x)),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setattr(lineage_launch, "_bits", lambda x: x)  # by a constructor that NumPy has not
    monkeypatch.setattr(lineage_launch, "run", play)
    monkeypatch.setattr(devices, "target", lambda device: "90a")
    monkeypatch.setattr(devices, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(devices, "families", lambda device: devices.Families("sm80", True))
    monkeypatch.setattr(compile, "kernel", lambda variant, device: None)
    yield


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("shape", "axis", "order", "reverse"),
    [
        ((7,), 0, (0,), False),
        ((3, 8), 1, (0, 1), False),
        ((3, 8), 1, (1, 0), False),
        ((3, 8), 0, (0, 1), True),
        ((2, 3, 16), -1, (0, 1, 2), False),
        ((2, 3, 16), 1, (2, 0, 1), False),
        ((2, 1, 16), 0, (0, 1, 2), True),
        ((5000, 4), 1, (1, 0), False),  # a thread a row
        ((2, 1100), 1, (0, 1), False),  # a CTA a row
    ],
)
def test_softmaxes_are_told_where_rows_lie(
    dtype: str, shape: tuple[int, ...], axis: int, order: tuple[int, ...], reverse: bool
) -> None:
    rng = np.random.default_rng(0)
    stored = rng.standard_normal([shape[i] for i in order]).astype(dtype)
    x = fake(stored.transpose(np.argsort(order)))
    x = x[::-1] if reverse else x
    wanted = softmax(np.asarray(x).astype(np.float64), axis=axis)
    y, maximum, total = lineage.online_softmax(x, axis=axis, return_statistics=True)
    for got in (y, lineage.safe_softmax(x, axis=axis)):
        np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(maximum), np.asarray(x).max(axis))
    lse = np.asarray(maximum) + np.log(np.asarray(total))
    np.testing.assert_allclose(lse, np.log(np.exp(np.asarray(x).astype(np.float64)).sum(axis)), rtol=1e-5)


def problem_arrays(dtype: str, m: int, n: int, d: int, e: int) -> dict[str, Fake]:
    rng = np.random.default_rng(1)
    shapes = {"q": (2, 3, m, d), "k": (2, 3, n, d), "v": (2, 3, n, e), "do": (2, 3, m, e)}
    drawn = {name: fake(rng.standard_normal(shape).astype(dtype)) for name, shape in shapes.items()}
    swapped = fake(np.ascontiguousarray(drawn["k"].swapaxes(1, 2))).swapaxes(1, 2)
    return drawn | {"k": swapped}


CAUSAL = {"causal": True, "align": "bottom-right"}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("options", [{}, CAUSAL, {"scale": -0.3}], ids=str)
def test_standard_attention_and_its_gradients(dtype: str, options: dict[str, Any]) -> None:
    x = problem_arrays(dtype, 5, 9, 4, 6)
    q, k, v, do = (x[name] for name in ("q", "k", "v", "do"))
    host = [np.ascontiguousarray(np.asarray(a)) for a in (q, k, v, do)]
    o, p = lineage.standard_attention(q, k, v, return_probabilities=True, **options)
    wanted = lineage.standard_attention(*host[:3], return_probabilities=True, **options)
    scale = options.get("scale")
    gradients = lineage.standard_attention_backward(do, q, k, v, p, scale=scale)
    wanted += lineage.standard_attention_backward(host[3], *host[:3], wanted[1], scale=scale)
    for got, want in zip((o, p, *gradients), wanted, strict=True):
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "longest"), [("float32", 57856), ("float64", 28928)])
def test_the_longest_row_fits_shared_memory(dtype: str, longest: int) -> None:
    x = {
        name: fake(np.zeros((1, length, 4), dtype))
        for name, length in (("q", 2), ("k", longest), ("long", longest + 1))
    }
    assert lineage.standard_attention(x["q"], x["k"], x["k"]).shape == (1, 2, 4)
    with pytest.raises(NotImplementedError, match=f"at most {longest} keys"):
        lineage.standard_attention(x["q"], x["long"], x["long"])


def unpacked(tail: bytes, dtype: str) -> tuple[dict[str, tuple[int, ...]], dict[str, float], dict[str, int]]:
    """Strides, scalars and ints of Params."""
    scalar = "d" if dtype == "float64" else "f"
    layout = struct.Struct(f"<{5 * len(params.TENSORS)}q4{scalar}{len(params.INTS)}i")
    values = layout.unpack(tail[: layout.size])
    strides = {name: values[5 * i : 5 * i + 5] for i, name in enumerate(params.TENSORS)}
    rest = values[5 * len(params.TENSORS) :]
    return strides, dict(zip(params.SCALARS, rest, strict=False)), dict(zip(params.INTS, rest[4:], strict=True))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("options", [{}, CAUSAL, {"scale": -0.3}], ids=str)
@pytest.mark.parametrize("broadcast", [False, True])
def test_flash1_is_told_where_everything_lies(
    dtype: str, options: dict[str, Any], broadcast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention of each batch position, by what the plan says of it; and the parts that share out its rows."""
    x = problem_arrays(dtype, 300, 70, 24, 40)
    q, k, v = x["q"], x["k"][:, :1] if broadcast else x["k"], x["v"]
    launched: list[compile.Variant] = []

    def run(plan: tuple[Any, ...], pointers: list[int]) -> None:
        [one] = plan
        launched.append(one.variant)
        strides, scalars, ints = unpacked(one.tail, dtype)
        where = dict(zip(params.TENSORS, pointers, strict=True))
        heads = tuple(ints[f"grid_extent{i}"] for i in range(3))
        tile = one.variant.tile
        assert one.grid == (ints["splits"] * int(np.prod(heads)),)
        assert (ints["seqlen_q"], ints["seqlen_k"]) == (300, 70)
        scale = scalars["scale"] if one.variant.prescaled else scalars["lse_scale"]
        views = {
            name: at(where[name], dtype, (*heads, rows, cols), strides[name])
            for name, rows, cols in (("q", 300, 24), ("k", 70, 24), ("v", 70, 40), ("o", 300, 40))
        }
        blocks = -(-300 // tile.block_m) * tile.block_m
        for name, rows, cols in (("row_lse", 384, 1), ("delta", 384, 1), ("dq_accum", blocks, tile.head_dim)):
            at(where[name], dtype, (*heads, rows, cols), (*strides[name][:4], 1))[...] = np.nan  # all of it is there
        s = scale * views["q"] @ views["k"].swapaxes(-1, -2)
        s[..., np.arange(70) > np.arange(300)[:, None] + ints["band_hi"]] = -np.inf
        largest = s.max(-1, keepdims=True)
        p = np.exp(s - np.where(np.isneginf(largest), 0, largest))
        total = p.sum(-1, keepdims=True)
        views["o"][...] = p @ views["v"] / np.where(total == 0, 1, total)
        for name, value in (("row_lse", largest), ("delta", total)):
            at(where[name], dtype, (*heads, 300, 1), (*strides[name][:4], 1))[...] = value

    monkeypatch.setattr(launch, "enqueue", run)
    got = lineage.flash1_attention(q, k, v, return_statistics=True, **options)
    host = [np.ascontiguousarray(np.asarray(a)) for a in (q, k, v)]
    for mine, want in zip(got, lineage.flash1_attention(*host, return_statistics=True, **options), strict=True):
        np.testing.assert_allclose(np.asarray(mine), want, rtol=2e-4, atol=2e-5)
    [variant] = launched
    assert variant in lineage_tiles.variants("90a", "sm80")
    assert variant.prescaled == (variant.load == "strided") == ("scale" in options)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("options", [{}, CAUSAL, {"scale": -0.3}], ids=str)
def test_its_gradients_are_told_where_everything_lies(
    dtype: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = problem_arrays(dtype, 130, 70, 24, 40)
    do, q, k, v = (x[name] for name in ("do", "q", "k", "v"))
    host = [np.ascontiguousarray(np.asarray(a)) for a in (do, q, k, v)]
    state = lineage.flash1_attention(*host[1:], return_statistics=True, **options)

    def run(plan: tuple[Any, ...], pointers: list[int]) -> None:
        of_rows, one = plan
        assert of_rows.variant.operation == "attention_delta" and of_rows.grid == (6 * 256 // 16,)
        assert one.grid == (6,) and one.variant in lineage_tiles.variants("90a", "sm80")
        strides, scalars, ints = unpacked(one.tail, dtype)
        where = dict(zip(params.TENSORS, pointers, strict=True))
        heads = tuple(ints[f"grid_extent{i}"] for i in range(3))
        lengths = {"q": (130, 24), "k": (70, 24), "v": (70, 40), "o": (130, 40), "dout": (130, 40), "lse": (130, 1)}
        lengths |= {f"d{name}": lengths[name] for name in "qkv"}
        y = {name: at(where[name], dtype, (*heads, *size), (*strides[name][:4], 1)) for name, size in lengths.items()}
        for name, cols in (("row_lse", 1), ("delta", 1), ("dq_accum", one.variant.tile.head_dim)):
            at(where[name], dtype, (*heads, 256, cols), (*strides[name][:4], 1))[...] = np.nan  # all of it is there
        s = scalars["scale"] * y["q"] @ y["k"].swapaxes(-1, -2)
        s[..., np.arange(70) > np.arange(130)[:, None] + ints["band_hi"]] = -np.inf
        p = np.exp(s - np.where(np.isneginf(y["lse"]), np.inf, y["lse"]))
        ds = p * (y["dout"] @ y["v"].swapaxes(-1, -2) - (y["dout"] * y["o"]).sum(-1, keepdims=True))
        y["dq"][...], y["dv"][...] = scalars["scale"] * ds @ y["k"], p.swapaxes(-1, -2) @ y["dout"]
        y["dk"][...] = scalars["scale"] * ds.swapaxes(-1, -2) @ y["q"]

    monkeypatch.setattr(launch, "enqueue", run)
    got = lineage.flash1_attention_backward(do, q, k, v, *map(fake, state), **options)
    wanted = lineage.flash1_attention_backward(*host, *state, **options)
    for mine, want in zip(got, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(mine), want, rtol=2e-4, atol=2e-4)


def test_what_a_gpu_does_not_take() -> None:
    q, k = (fake(np.zeros(shape)) for shape in ((3, 5, 8), (5, 8)))
    p, do = fake(np.zeros((3, 5, 5))), fake(np.zeros((3, 5, 8)))
    with pytest.raises(NotImplementedError, match=r"k has batch axes \(\), the call \(3,\)"):
        lineage.standard_attention_backward(do, q, k, k, p)
    wide = fake(np.zeros((5, 129)))
    with pytest.raises(NotImplementedError, match="at most 128 features"):
        lineage.flash1_attention(wide, wide, wide)


def test_more_rows_than_32_bits_count_are_refused_before_anything_is_allocated() -> None:
    """Arrays of one element, broadcast."""
    q, k = (fake(np.broadcast_to(np.zeros((1, 1, 1)), (2**16, length, 1))) for length in (2**15, 1))
    with pytest.raises(NotImplementedError, match="2147483648 are too many"):
        lineage.standard_attention(q, k, k)
    with pytest.raises(NotImplementedError, match="2147483648 are too many"):
        lineage_launch.softmax("online_softmax", q, None, None, None)


def test_standard_attention_refuses_arrays_between_two_elements() -> None:
    """cuBLAS would read them from a wrong address."""
    q = fake(np.zeros((2, 4)))
    off = fake(np.frombuffer(bytearray(72), np.uint8)[4:68].view(np.float64).reshape(2, 4))
    assert off.data.ptr % 8 == 4
    for name, arguments in (("q", (off, q, q)), ("v", (q, q, off))):
        with pytest.raises(NotImplementedError, match=f"{name} starts between two elements"):
            lineage.standard_attention(*arguments)
    with pytest.raises(NotImplementedError, match="do starts between two elements"):
        lineage.standard_attention_backward(off, q, q, q, fake(np.zeros((2, 2))))


def test_gradients_of_flash1_raise_before_anything_is_enqueued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where o has batch axes that no kernel follows, and where the statistics start between two elements."""
    enqueued: list[Any] = []
    for name in ("log", "add"):
        monkeypatch.setattr(sys.modules["cupy"], name, lambda *args, **_: enqueued.append(args), raising=False)
    monkeypatch.setattr(launch, "enqueue", lambda *args: enqueued.append(args))
    shape = (2, 3, 2, 3, 5, 4)
    q, statistics = fake(np.zeros(shape)), fake(np.zeros(shape[:-1]))
    scattered = fake(np.zeros((3, 2, 3, 2, 5, 4)).transpose(3, 2, 1, 0, 4, 5))
    with pytest.raises(NotImplementedError, match="independent ways"):
        lineage.flash1_attention_backward(q, q, q, q, scattered, statistics, statistics)
    off = fake(np.frombuffer(bytearray(8 * statistics.size + 8), np.uint8)[4:-4].view(np.float64)).reshape(shape[:-1])
    with pytest.raises(NotImplementedError, match="total starts between two elements"):
        lineage.flash1_attention_backward(q, q, q, q, q, statistics, off)
    assert not enqueued
