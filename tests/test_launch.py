"""The launcher without a GPU: what it serves on each target, and that it asks only for variants that are listed.

A pretended CuPy hands it NumPy memory; kernels are neither compiled nor run.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
import time
import types
from typing import Any, ClassVar

import fake_gpu
import gpu_cases
import numpy as np
import pytest
from backends import HOST, Layout, acc_dtype, dtype_of, place, place_hole
from gpu_cases import cases
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import (
    arrays,
    calls,
    compile,
    devices,
    hopper,
    launch,
    needs,
    overlap,
    params,
    plan_sm90,
    planning,
    problem,
    tiles,
    tma,
)

TARGETS = [("sm75", "75"), ("sm75", "90a")] + [("sm80", target) for target in compile.TARGETS[1:]]
PORTABLE = {"sm75": "sm75", "sm80": "sm80", "sm90": "sm80"}
"""Where the calls go that a family does not serve."""
every_target = pytest.mark.parametrize(("family", "target"), TARGETS)


class Device(fake_gpu.Device):
    """What the launcher asks of it, too."""

    attributes: ClassVar = {"MultiProcessorCount": 132}


class Pretended:
    """The device: which target and family it has, and the kernels that were launched."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.target = ""
        self.launched: list[compile.Variant] = []
        self.grids: list[int] = []
        self.claims: list[int] = []  # where each launch counts
        self.zeroed: list[tuple[int, int]] = []  # by memset: where, and how many bytes
        self.parameters = b""  # of the last launch
        self.stream = types.SimpleNamespace(ptr=0, is_capturing=lambda: False)
        patch.setitem(sys.modules, "cupy", self.cupy())
        patch.delitem(sys.modules, "cupyx", raising=False)  # may wait to be loaded, which hypothesis would set off
        patch.setattr(calls, "launcher", lambda: launch)
        patch.setattr(compile, "kernel", self.kernel)
        patch.setattr(tma, "encode", lambda box, address: bytes(params.TENSOR_MAP_BYTES))
        patch.setattr(overlap, "launch", lambda k, grid, block, x, smem: k((grid,), (block,), (x,), shared_mem=smem))
        patch.setattr(needs, "_stream_id", lambda pointer: 100 + pointer)
        patch.setattr(hopper, "WORTH_PLANES", 0)

    def become(self, family: str, target: str) -> None:
        """Be another device; what the launcher has cached of the last one goes, unless only the family changes."""
        if target != self.target:
            for module in (devices, hopper, launch, plan_sm90):
                for function in vars(module).values():
                    if hasattr(function, "cache_clear"):
                        function.cache_clear()
        self.target = target
        self.patch.setattr(devices, "target", lambda device: target)
        self.patch.setattr(gpu_cases, "target", lambda: target)
        self.patch.setenv("CUFLASH_FAMILY", family)

    def cupy(self) -> Any:
        """The stand-in's, and what only the launcher asks for."""
        runtime = types.SimpleNamespace(
            getDevice=fake_gpu.runtime.getDevice,
            memsetAsync=lambda pointer, value, nbytes, stream: self.zeroed.append((pointer, nbytes)),
        )
        cuda = types.SimpleNamespace(Device=Device, runtime=runtime, get_current_stream=lambda: self.stream)
        functions = {"empty": fake_gpu.empty, "zeros": fake_gpu.zeros, "copyto": fake_gpu.copyto}
        return types.SimpleNamespace(ndarray=fake_gpu.ndarray, cuda=cuda, **functions)

    def kernel(self, variant: compile.Variant, device: int) -> Any:
        def launched(grid: tuple[int], block: tuple[int], arguments: tuple[Any], shared_mem: int = 0) -> None:
            assert arguments[0].nbytes == params.size(variant.operation, variant.dtype, variant.maps)
            assert block == (32 * variant.tile.warps,) and 0 < grid[0] <= params.MAX_INT
            assert shared_mem == variant.smem_bytes <= tiles.SMEM_LIMIT[variant.target]
            self.launched.append(variant)
            self.grids.append(grid[0])
            self.parameters = arguments[0].tobytes()
            at = params.TENSOR_MAP_BYTES * variant.maps + 8 * (len(params.TENSORS) + params.SCRATCH.index("claims"))
            self.claims.append(int.from_bytes(self.parameters[at : at + 8], "little"))

        return launched


@pytest.fixture(scope="module")
def device() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield Pretended(patch)


def on_gpu(values: np.ndarray, layout: Any = None) -> fake_gpu.ndarray:
    return fake_gpu.ndarray(place(HOST, values, layout).array)


@settings(max_examples=400)
@given(data=st.data(), at=st.sampled_from([*TARGETS, ("sm90", "90a")]), deterministic=st.booleans())
def test_every_kernel_that_a_call_asks_for_is_listed(
    device: Pretended, data: Any, at: Any, deterministic: bool
) -> None:
    """And so compiled ahead of time by ``python -m cuflash compile`` and looked at by test_compile.py."""
    family, target = at
    device.become(family, target)
    case = data.draw(cases(PORTABLE[family]))
    x = {name: on_gpu(values, case.layout(name)) for name, values in case.arrays().items()}
    options = case.options | {"deterministic": deterministic}
    if case.key_bias is not None:
        options["key_bias"] = x["key_bias"]
    device.launched.clear()
    dtype = dtype_of(case.dtype)
    o = fake_gpu.ndarray(place_hole(HOST, case.o, dtype, case.layout("o")).array)
    lse = fake_gpu.ndarray(place_hole(HOST, case.lse, acc_dtype(case.dtype), case.layout("lse")).array)
    cuflash.attention(x["q"], x["k"], x["v"], return_lse=True, out=(o, lse), **options)
    cuflash.attention_backward(x["do"], x["q"], x["k"], x["v"], o, lse, **options)
    cuflash.attention_lse(x["q"], x["k"], **options)
    cuflash.attention_merge((o, o), (lse, lse))
    assert set(device.launched) <= {*tiles.variants(target, family), *tiles.variants(target, PORTABLE[family])}
    for variant in device.launched:
        assert variant.dtype == case.dtype
        if variant.tile != tiles.ROW_KERNEL and variant.operation not in tiles.SM90_FEW:  # these multiply and add
            assert variant.precision == case.options.get("precision")


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_family_never_gets_what_was_planned_for_another(device: Pretended, dtype: str, deterministic: bool) -> None:
    """CUFLASH_FAMILY may change from call to call of the same problem."""
    for family in ("sm80", "sm75", "sm80"):
        device.become(family, "90a")
        device.launched.clear()
        for call in calls_of(dtype, deterministic=deterministic):
            call()
        assert {variant.family for variant in device.launched} == {family}


def test_parameters_name_the_arrays_of_their_call(device: Pretended) -> None:
    """Those of earlier calls are kept."""
    device.become("sm80", "90a")
    first, second = ([on_gpu(np.zeros((3, 16), np.float16)) for _ in "qkv"] for _ in range(2))
    for inputs in (first, second, first, (second[0], *first[1:])):
        cuflash.attention(*inputs)
        assert struct.unpack("<3Q", device.parameters[:24]) == tuple(x.data.ptr for x in inputs)


def test_an_address_that_is_less_aligned_gets_a_plan_of_its_own(device: Pretended) -> None:
    """Metadata of the calls are the same, and earlier plans are kept."""
    device.become("sm80", "90a")
    q, k, v, o = ([on_gpu(np.zeros((3, 16), np.float16), layout) for layout in (None, Layout(shift=1))] for _ in "qkvo")
    loads = []
    for a, b, c, out in [(0, 0, 0, 0), (1, 0, 0, 0), (0, 0, 1, 0), (0, 0, 0, 0), (0, 0, 0, 1)]:
        assert cuflash.attention(q[a], k[b], v[c], out=o[out]) is o[out]
        loads.append(device.launched[-1].load)
        pointers = struct.unpack("<5Q", device.parameters[:40])
        assert pointers == (q[a].data.ptr, k[b].data.ptr, v[c].data.ptr, 0, o[out].data.ptr)
    assert loads[0] == loads[3] == loads[4] == "16" and "16" not in loads[1:3]


def test_a_result_of_another_layout_gets_a_plan_of_its_own(device: Pretended) -> None:
    device.become("sm80", "90a")
    q, k, v = (on_gpu(np.zeros((2, 3, 16), np.float16)) for _ in "qkv")
    new = np.zeros((2, 3, 16), np.float16), np.zeros((3, 2, 16), np.float16).swapaxes(0, 1)
    before = launch._plan_forward.cache_info().currsize
    for memory in (*new, *new):
        cuflash.attention(q, k, v, out=fake_gpu.ndarray(memory))
    assert launch._plan_forward.cache_info().currsize == before + 2


def test_what_is_kept_of_calls_is_bounded(device: Pretended) -> None:
    device.become("sm80", "90a")
    q, k, o = (on_gpu(np.zeros((3, 16), np.float16)) for _ in "qko")
    most = launch._addressed.cache_info().maxsize
    assert most is not None
    memory = np.zeros(16 * most + 1000, np.float16)
    for at in range(0, 8 * (most + 10), 8):
        cuflash.attention(q, k, fake_gpu.ndarray(memory[at : at + 48].reshape(3, 16)), out=o)
    assert launch._addressed.cache_info().currsize == most
    kept = [launch._check, launch._plan_forward, problem._describe, arrays.reach_of_distinct]
    assert all(cached.cache_info().maxsize for cached in kept)


def test_errors_after_a_good_call_are_those_before_it(device: Pretended) -> None:
    """Options that are equal to those of a call, and not of a type that is taken; arrays that are like them, and not in
    the right place."""
    device.become("sm80", "90a")
    q, k, v, o = (on_gpu(np.zeros((3, 16), np.float16)) for _ in "qkvo")
    for _ in range(2):
        assert cuflash.attention(q, k, v, causal=True, scale=1.0, align=1, out=o) is o
        launched = len(device.launched)
        wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
            (TypeError, "causal must be a bool", {"causal": 1}),
            (TypeError, "scale must be", {"scale": True}),
            (TypeError, "align must be", {"align": True}),
            (TypeError, "return_lse must be a bool", {"return_lse": 0}),
            (ValueError, r"out \(o\) shares memory with q", {"out": q}),
            (ValueError, r"out \(o\) shares memory with v", {"out": fake_gpu.ndarray(v.memory[::-1])}),
            (ValueError, "must be on one GPU", {"out": fake_gpu.ndarray(o.memory, 1)}),
            (TypeError, "on the host", {"out": o.memory}),
            (TypeError, "must be float16", {"out": on_gpu(np.zeros((3, 16), np.float32))}),
            (ValueError, "must have shape", {"out": on_gpu(np.zeros((3, 17), np.float16))}),
            (ValueError, "1 entries", {"out": (o, o)}),
            (
                ValueError,
                "elements of .* share memory",
                {"out": fake_gpu.ndarray(np.broadcast_to(o.memory[:1], (3, 16)))},
            ),
        ]
        for error, words, options in wrong:
            with pytest.raises(error, match=words):
                cuflash.attention(q, k, v, **{"causal": True, "scale": 1.0, "align": 1, "out": o} | options)
        o_and_lse = o, fake_gpu.ndarray(o.memory.reshape(-1)[:6].view(np.float32))
        with pytest.raises(ValueError, match=r"out \(lse\) shares memory with out \(o\)"):
            cuflash.attention(q, k, v, return_lse=True, out=o_and_lse)
        assert len(device.launched) == launched


def test_heads_of_a_group_are_found_without_views(device: Pretended, monkeypatch: Any) -> None:
    """Parameters are those of a call on views that broadcast, which take microseconds to make."""
    device.become("sm80", "90a")
    q, o = (on_gpu(np.zeros((2, 6, 3, 16), np.float16)) for _ in "qo")
    k, v = (on_gpu(np.zeros((2, 2, 5, 16), np.float16)) for _ in "kv")
    key_bias, lse = on_gpu(np.zeros((6, 5), np.float32)), on_gpu(np.zeros((2, 6, 3), np.float32))
    with monkeypatch.context() as patch:
        patch.delattr(fake_gpu.ndarray, "reshape")
        patch.delattr(fake_gpu.ndarray, "__getitem__")
        cuflash.attention(q, k, v, key_bias=key_bias, grouped_heads=True, return_lse=True, out=(o, lse))
    grouped = device.parameters
    inner_q, inner_o = (x.reshape((2, 2, 3, 3, 16)) for x in (q, o))
    inner_k, inner_v = (x[:, :, None] for x in (k, v))
    inner_lse = lse.reshape((2, 2, 3, 3))
    cuflash.attention(
        *(inner_q, inner_k, inner_v), key_bias=key_bias.reshape((2, 3, 5)), return_lse=True, out=(inner_o, inner_lse)
    )
    assert device.parameters == grouped


def test_a_call_asks_the_environment_for_one_variable(device: Pretended, monkeypatch: Any) -> None:
    """To ask takes a microsecond."""
    device.become("sm90", "90a")
    asked: list[str] = []
    known = os.environ.get
    everywhere = types.SimpleNamespace(get=lambda name: asked.append(name) or known(name))
    for call in calls_of("float16"):
        call()
        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", everywhere)
            call()
    assert asked == ["CUFLASH_FAMILY"] * len(calls_of("float16"))


# What a target serves at least: any less is a change of what users are promised.
MOST = {
    ("sm75", "75"): {"float16": (256, 256), "float32": (256, 128), "float64": (128, 64)},
    ("sm80", "86"): dict.fromkeys(("float16", "bfloat16", "float32"), (256, 256)) | {"float64": (256, 128)},
    ("sm80", "80"): dict.fromkeys(tiles.ITEMSIZE, (256, 256)),
    ("sm80", "90a"): dict.fromkeys(tiles.ITEMSIZE, (256, 256)),
}
MOST[("sm75", "90a")] = MOST[("sm75", "75")]
MOST[("sm80", "89")] = MOST[("sm80", "120")] = MOST[("sm80", "86")]
MOST |= {("sm80", target): MOST[("sm80", "80")] for target in ("87", "100", "103", "110")}


@every_target
def test_features_up_to_the_limit_of_dtype_and_target(device: Pretended, family: str, target: str) -> None:
    device.become(family, target)
    for dtype, limits in MOST[family, target].items():
        for operation, most in zip(("attention", "attention_backward"), limits, strict=True):
            for d, e in ((most, most), (most, 1), (1, most)):
                q, k, v = (on_gpu(np.zeros((3, f), dtype_of(dtype))) for f in (d, d, e))
                assert cuflash.workspace_nbytes(operation, q, k, v) >= 0
            for d, e, letter in ((most + 1, 1, "d"), (1, most + 1, "e")):
                q, k, v = (on_gpu(np.zeros((3, f), dtype_of(dtype))) for f in (d, d, e))
                with pytest.raises(NotImplementedError) as raised:
                    cuflash.workspace_nbytes(operation, q, k, v)
                words = (
                    f"{operation} in {dtype}",
                    f"at most {most} features",
                    f"sm_{target}",
                    f"{letter} = {most + 1}",
                )
                assert all(word in str(raised.value) for word in (*words, "the host"))


def calls_of(dtype: str, **options: Any) -> list[Any]:
    """Each public function that takes q and k, with features for the tensor cores."""
    x, lse = on_gpu(np.zeros((3, 16), dtype_of(dtype))), on_gpu(np.zeros(3, acc_dtype(dtype)))
    return [
        lambda: cuflash.attention(x, x, x, **options),
        lambda: cuflash.attention_vjp(x, x, x, **options),
        lambda: cuflash.attention_lse(x, x, **options),
        lambda: cuflash.attention_backward(x, x, x, x, x, lse, **options),
    ]


@every_target
def test_tf32_needs_tensor_cores_that_have_it(device: Pretended, family: str, target: str) -> None:
    device.become(family, target)
    for call in calls_of("float32", precision="tf32"):
        if family == "sm80":
            device.launched.clear()
            call()
            assert {x.precision for x in device.launched if x.tile != tiles.ROW_KERNEL} == {"tf32"}
        else:
            with pytest.raises(NotImplementedError, match=r"(?s)tf32.*8\.0.*precision=None"):
                call()
    for dtype in ("float16", "float64"):
        for call in calls_of(dtype, precision="tf32"):
            with pytest.raises(ValueError, match="float32 operands"):
                call()


def test_turing_says_which_dtypes_it_serves(device: Pretended) -> None:
    device.become("sm75", "75")
    x, lse = on_gpu(np.zeros((3, 8), dtype_of("bfloat16"))), on_gpu(np.zeros(3, np.float32))
    for call in (*calls_of("bfloat16"), lambda: cuflash.attention_merge((x, x), (lse, lse))):
        with pytest.raises(NotImplementedError, match=r"(?s)bfloat16.*8\.0.*float16, float32, float64.*host"):
            call()
    for dtype in ("float16", "float32", "float64"):
        for call in calls_of(dtype):
            call()


@pytest.mark.parametrize(
    ("heads", "q_heads", "options", "expected"),
    [
        (512, 512, {}, "ordered"),
        (512, 512, {"causal": True}, "ordered"),
        (8, 8, {}, None),  # so few that its CTAs would start one after the other
        (32, 32, {"deterministic": False}, "unordered"),
        (1, 1, {}, None),
        (1, 1, {"deterministic": False}, "unordered"),
        (512, 1, {}, None),  # dq is a sum over heads, too
        (512, 512, {"softcap": 5.0}, None),
        (512, 512, {"need": ("q", "k")}, None),
    ],
    ids=str,
)
def test_one_kernel_computes_all_gradients_where_it_pays(
    device: Pretended, heads: int, q_heads: int, options: dict[str, Any], expected: str | None
) -> None:
    device.become("sm80", "90a")
    m, d = 256, 64
    q, k = (on_gpu(np.zeros((count, m, d), np.float16)) for count in (q_heads, heads))
    o, lse = on_gpu(np.zeros((heads, m, d), np.float16)), on_gpu(np.zeros((heads, m), np.float32))
    device.launched.clear()
    cuflash.attention_backward(o, q, k, k, o, lse, **options)
    fused = [variant for variant in device.launched if variant.operation == tiles.FUSED]
    assert [("ordered" if variant.deterministic else "unordered") for variant in fused] == [expected] * bool(expected)


SPLIT = [tiles.NARROW, "attention_merge_splits"]


@pytest.mark.parametrize(
    ("dtype", "m", "n", "d", "e", "options", "expected"),
    [
        ("float32", 16384, 16384, 3, 3, {}, [tiles.NARROW]),
        ("float32", 1, 4000000, 3, 3, {}, SPLIT),
        ("float32", 32, 4000000, 3, 1, {"precision": "tf32"}, SPLIT),
        ("float64", 32, 4000000, 4, 4, {"causal": True, "align": "bottom-right"}, SPLIT),
        ("bfloat16", 1, 100, 1, 1, {}, [tiles.NARROW]),
        ("float32", 100, 100, 3, 3, {"softcap": 5.0}, ["attention_forward"]),
        ("float32", 100, 100, 3, 7, {}, [tiles.NARROW]),
        ("float32", 100, 100, 9, 3, {}, ["attention_forward"]),
        ("float16", 100, 100, 3, 5, {}, ["attention_forward"]),
        ("float64", 1, 4000000, 8, 8, {}, ["attention_forward"]),
    ],
    ids=str,
)
def test_few_features_have_a_kernel_and_few_queries_share_out_the_keys(
    device: Pretended, dtype: str, m: int, n: int, d: int, e: int, options: dict[str, Any], expected: list[str]
) -> None:
    device.become("sm80", "90a")
    q, k, v = (on_gpu(np.broadcast_to(np.zeros((), dtype_of(dtype)), shape)) for shape in ((m, d), (n, d), (n, e)))
    device.launched.clear()
    cuflash.attention(q, k, v, **options)
    assert [variant.operation for variant in device.launched] == expected
    nbytes = cuflash.workspace_nbytes("attention", q, k, v, **options)
    parts, rest = divmod(nbytes, m * (e + 2) * np.dtype(acc_dtype(dtype)).itemsize)
    assert (nbytes > 0) == (expected == SPLIT) and (not nbytes or (1 < parts and rest < 64))
    device.launched.clear()
    cuflash.attention_lse(q, k, **options)
    alone = "attention_forward" if "softcap" in options or d > (8 if dtype == "float32" else 4) else tiles.NARROW
    assert device.launched[0].operation == alone and (alone != tiles.NARROW or device.launched[0].tile.head_dim == d)


@pytest.mark.parametrize(
    ("d", "options", "layout", "expected"),
    [
        (8, {}, None, (tiles.LANES, "sm90")),
        (8, {}, Layout(shift=1), (tiles.NARROW, "sm80")),
        (12, {"causal": True}, None, (tiles.LANES, "sm90")),
        (12, {}, Layout(shift=1), ("attention_forward", "sm80")),
        (12, {"precision": "tf32"}, None, ("attention_forward", "sm80")),
        (12, {"softcap": 5.0}, None, ("attention_forward", "sm80")),
        (10, {}, None, ("attention_forward", "sm80")),
        (16, {}, None, ("attention_forward", "sm80")),
        (24, {}, None, ("attention_forward", "sm90")),
    ],
    ids=str,
)
def test_what_lanes_do_not_take_goes_to_the_next_forward(
    device: Pretended, d: int, options: dict[str, Any], layout: Layout | None, expected: tuple[str, str]
) -> None:
    device.become("sm90", "90a")
    q, k, v = (on_gpu(np.zeros((8, 2048, d), np.float32), layout) for _ in range(3))
    for call in (lambda: cuflash.attention(q, k, v, **options), lambda: cuflash.attention_lse(q, k, **options)):
        device.launched.clear()
        call()
        around = ("attention_planes", "attention_merge_splits")
        assert [(x.operation, x.family) for x in device.launched if x.operation not in around] == [expected]


@pytest.mark.parametrize(("m", "n", "grid"), [(30, 20_000, 8), (30, 100_000, 30), (1, 100_000, 1)])
def test_a_warp_merges_few_splits_of_a_row_and_a_cta_many(device: Pretended, m: int, n: int, grid: int) -> None:
    device.become("sm80", "90a")
    q, k, v = (on_gpu(np.broadcast_to(np.zeros((), np.float32), (rows, 3))) for rows in (m, n, n))
    device.launched.clear(), device.grids.clear()
    cuflash.attention(q, k, v)
    assert [variant.operation for variant in device.launched] == SPLIT and device.grids[1] == grid


def one_query(batch: int) -> list[Any]:
    shapes = (batch, 1, 3), (batch, 100_000, 3)
    return [on_gpu(np.broadcast_to(np.zeros((), np.float32), shapes[i > 0])) for i in range(3)]


def claimed_tiles() -> list[Any]:
    return [on_gpu(np.zeros((20, 1024, 64), np.float16)) for _ in range(3)]


def test_calls_of_a_stream_count_in_zeros_that_kernels_leave(device: Pretended, monkeypatch: Any) -> None:
    """One memory for all of them, until one needs more: of a device and a stream, and none of it set for each call."""
    device.become("sm90", "90a")
    monkeypatch.setattr(needs, "_zeros", {})
    found = []
    for stream, inputs in [(0, one_query(2)), (0, one_query(1)), (0, claimed_tiles()), (5, one_query(1))]:
        device.stream.ptr = stream
        device.zeroed.clear(), device.claims.clear()
        cuflash.attention(*inputs, causal=inputs[0].shape[1] > 1)
        assert len(device.claims) == 1 and not device.zeroed
        found += device.claims
    device.stream.ptr = 0
    assert (
        found[0] == found[1] == found[2] == needs._zeros[0, 100].data.ptr and found[3] == needs._zeros[0, 105].data.ptr
    )
    cuflash.attention(*one_query(132))
    assert device.claims[-1] == needs._zeros[0, 100].data.ptr != found[0]
    counters = needs._zeros[0, 100]
    assert counters.memory.nbytes >= 4 * 132 and not counters.memory.any()


def test_counters_of_streams_of_late_are_kept(device: Pretended, monkeypatch: Any) -> None:
    device.become("sm90", "90a")
    monkeypatch.setattr(needs, "_zeros", {})
    monkeypatch.setattr(needs, "_MOST_STREAMS", 3)
    for device.stream.ptr in (11, 12, 13, 14, 12):
        cuflash.attention(*one_query(1))
    device.stream.ptr = 0
    assert list(needs._zeros) == [(0, 112), (0, 113), (0, 114)]


@pytest.mark.parametrize("why", ["the stream is captured", "every thread has a stream by this pointer"])
@pytest.mark.parametrize("given", [True, False], ids=["workspace", "no workspace"])
def test_where_calls_may_overlap_each_has_zeros_of_its_own(
    device: Pretended, monkeypatch: Any, why: str, given: bool
) -> None:
    device.become("sm90", "90a")
    monkeypatch.setattr(needs, "_zeros", {})
    capturing = why == "the stream is captured"
    stream = types.SimpleNamespace(ptr=5 if capturing else 2, is_capturing=lambda: capturing)
    monkeypatch.setattr(device, "stream", stream)
    for inputs in (one_query(2), claimed_tiles()):
        device.zeroed.clear(), device.claims.clear()
        options: dict[str, Any] = {"causal": inputs[0].shape[1] > 1}
        nbytes = cuflash.workspace_nbytes("attention", *inputs, **options)
        workspace = on_gpu(np.empty(nbytes, np.uint8)) if given else None
        cuflash.attention(*inputs, workspace=workspace, **options)
        assert [at for at, _ in device.zeroed] == device.claims != [0] and device.zeroed[0][1] == 16
        if workspace is not None:
            assert 0 <= device.claims[0] - workspace.data.ptr <= nbytes - 16
    assert not needs._zeros


def half(*shape: int, layout: Layout | None = None) -> fake_gpu.ndarray:
    return on_gpu(np.zeros(shape, np.float16), layout)


@pytest.mark.parametrize(
    ("options", "ordered"),
    [
        ({}, True),
        ({"deterministic": False}, False),
        ({"deterministic": False, "softcap": 5.0}, True),  # there is no kernel without an order
        ({"need": ("k", "v")}, False),  # nothing of it has one
    ],
    ids=str,
)
def test_blocks_of_keys_come_as_the_kernel_needs_them(
    device: Pretended, monkeypatch: Any, options: dict[str, Any], ordered: bool
) -> None:
    device.become("sm90", "90a")
    asked: list[bool] = []
    sections = hopper.dqkv_sections
    monkeypatch.setattr(hopper, "dqkv_sections", lambda *x: (asked.append(x[1].in_order), sections(*x))[1])
    q, k, v, do, o = (half(3, 300, 64) for _ in range(5))
    cuflash.attention_backward(do, q, k, v, o, on_gpu(np.zeros((3, 300), np.float32)), **options)
    assert asked == [ordered]


def gradients_of_half() -> None:
    q, k, v, do, o = (half(2, 256, 64) for _ in range(5))
    cuflash.attention_backward(do, q, k, v, o, on_gpu(np.zeros((2, 256), np.float32)))


def test_no_other_call_comes_between_the_kernels_of_one(device: Pretended, monkeypatch: Any) -> None:
    device.become("sm90", "90a")
    order: list[int] = []

    def enqueue(kernel: planning.Launch, taken: tuple[Any]) -> None:
        order.append(threading.get_ident())
        time.sleep(0.01)

    monkeypatch.setattr(launch, "_enqueue_kernel", enqueue)
    threads = [threading.Thread(target=gradients_of_half) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(order) == 8 and order[::2] == order[1::2] and len(set(order)) == 4


def test_counters_are_not_used_again_where_a_launch_failed(device: Pretended, monkeypatch: Any) -> None:
    device.become("sm90", "90a")
    monkeypatch.setattr(needs, "_zeros", {})
    gradients_of_half()
    assert needs._zeros
    enqueue = launch._enqueue_kernel

    def refuse(kernel: planning.Launch, taken: tuple[Any]) -> None:
        if kernel.variant.operation == tiles.FUSED:
            raise RuntimeError("the driver refuses a launch")
        enqueue(kernel, taken)

    monkeypatch.setattr(launch, "_enqueue_kernel", refuse)
    with pytest.raises(RuntimeError, match="refuses a launch"):
        gradients_of_half()
    assert not needs._zeros


def gradients_of(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, ...]:
    """What `attention_backward` gives for arrays of zeros, of which nothing is computed."""
    o = on_gpu(
        np.zeros((*np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2]), q.shape[-2], v.shape[-1]), q.dtype)
    )
    lse = on_gpu(np.zeros(o.shape[:-1], np.float32))
    return cuflash.attention_backward(o, q, k, v, o, lse, **options)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    ("what", "q", "k", "v", "options"),
    [
        ("one head", half(200, 64), half(270, 64), half(270, 64), {"causal": True, "align": -3}),
        ("fewer values", half(3, 200, 128), half(3, 270, 128), half(3, 270, 8), {}),
        ("heads of groups", half(2, 3, 20, 72), half(2, 1, 27, 72), half(2, 1, 27, 72), {"window": (9, 2), "align": 0}),
        ("axes swapped", *(half(3, n, 96, layout=Layout((1, 0, 2))) for n in (20, 27, 27)), {"scale": 2.0}),
        ("rows apart", *(half(3, n, 64, layout=Layout(steps=(1, 2, 1))) for n in (20, 27, 27)), {}),
    ],
)
def test_gradients_of_16_bits_have_a_kernel_on_hopper(
    device: Pretended, what: str, q: Any, k: Any, v: Any, options: dict[str, Any], deterministic: bool
) -> None:
    device.become("sm90", "90a")
    device.launched.clear()
    gradients_of(q, k, v, deterministic=deterministic, **options)
    delta, main = device.launched
    assert (delta.operation, delta.family) == ("attention_delta", "sm90")
    assert (main.operation, main.family, main.deterministic) == (tiles.FUSED, "sm90", deterministic)
    assert device.grids[-1] == min(132, -(-k.shape[-2] // 128) * int(np.prod(k.shape[:-2])))
    device.become("sm80", "90a")
    device.launched.clear()
    gradients_of(q, k, v, deterministic=deterministic, **options)
    assert {variant.family for variant in device.launched} == {"sm80"}


@pytest.mark.parametrize(
    ("what", "q", "k", "v", "options"),
    [
        ("a softcap near the end of float32", half(20, 64), half(27, 64), half(27, 64), {"softcap": 1e21}),
        ("the same of many features", half(20, 136), half(27, 136), half(27, 64), {"softcap": 1e21}),
        ("many features, rows backwards", half(20, 136, layout=Layout(steps=(-1, 1))), half(27, 136), half(27, 64), {}),
        ("rows that end within 16 bytes", half(20, 36), half(27, 36), half(27, 64), {}),
        ("broadcast q", half(20, 64), half(3, 27, 64), half(3, 27, 64), {}),
        ("k and v broadcast otherwise", half(3, 20, 64), half(27, 64), half(3, 27, 64), {}),
        ("dk, of one k and many v", half(3, 20, 64), half(27, 64), half(3, 27, 64), {"need": ("k",)}),
        ("dv, of one v and many k", half(3, 20, 64), half(3, 27, 64), half(27, 64), {"need": ("v",)}),
        ("many features, k and v broadcast otherwise", half(3, 20, 192), half(27, 192), half(3, 27, 128), {}),
        ("many features, dk of many v", half(3, 20, 192), half(27, 192), half(3, 27, 128), {"need": ("k",)}),
        ("rows backwards", half(20, 64), half(27, 64, layout=Layout(steps=(-1, 1))), half(27, 64), {}),
        ("an odd address", half(20, 64, layout=Layout(shift=1)), half(27, 64), half(27, 64), {}),
        (
            "an odd address of dk",
            *map(half, (20, 27, 27), (64,) * 3),
            {"out": (None, half(27, 64, layout=Layout(shift=1)), None)},
        ),
        (
            "columns of dv apart",
            *map(half, (20, 27, 27), (64,) * 3),
            {"out": (None, None, half(27, 64, layout=Layout(steps=(1, 2))))},
        ),
    ],
)
def test_other_gradients_are_the_portable_kernels_on_hopper(
    device: Pretended, what: str, q: Any, k: Any, v: Any, options: dict[str, Any]
) -> None:
    device.become("sm90", "90a")
    device.launched.clear()
    gradients_of(q, k, v, **options)
    assert {variant.family for variant in device.launched} == {"sm80"}


BROADCAST_Q = half(20, 256), half(3, 27, 256), half(3, 27, 256)
APART = {"out": (None, half(27, 136, layout=Layout(shift=1)), half(27, 256, layout=Layout(steps=(1, 2))))}


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    ("what", "arrays", "options", "kernels"),
    [
        ("all", (half(3, 200, 256), *(half(3, 270, 256),) * 2), {"causal": True, "align": 0}, ("dkv", "dq")),
        ("values of the many", (half(20, 8), half(27, 8), half(27, 136)), {}, ("dkv", "dq")),
        (
            "no whole 16 bytes",
            (*(half(n, 140, layout=Layout(pad=4)) for n in (20, 27)), half(27, 8)),
            {},
            ("dkv", "dq"),
        ),
        ("heads of groups", (half(2, 3, 20, 192), *(half(2, 1, 27, 192),) * 2), {}, ("dkv", "dq")),
        (
            "results that the copy engine cannot write",
            (half(20, 136), half(27, 136), half(27, 256)),
            APART,
            ("dkv", "dq"),
        ),
        ("dq", (half(20, 192), *(half(27, 192),) * 2), {"need": ("q",)}, ("dq",)),
        ("dq of few features", (half(20, 64), *(half(27, 64),) * 2), {"need": ("q",)}, ("dq",)),
        ("dq and dk of few features", (half(20, 64), *(half(27, 64),) * 2), {"need": ("q", "k")}, ("dqkv", "dq")),
        ("dq and dv of few features", (half(20, 64), *(half(27, 64),) * 2), {"need": ("q", "v")}, ("dqkv", "dq")),
        ("dk", (half(20, 192), *(half(27, 192),) * 2), {"need": ("k",)}, ("dkv",)),
        ("dk and dv", (half(20, 192), *(half(27, 192),) * 2), {"need": ("k", "v")}, ("dkv",)),
        ("dv and dq", (half(20, 192), *(half(27, 192),) * 2), {"need": ("q", "v")}, ("dkv", "dq")),
        ("dv where k is broadcast", (half(3, 20, 192), half(27, 192), half(3, 27, 128)), {"need": ("v",)}, ("dkv",)),
        ("q is broadcast", BROADCAST_Q, {}, ("dkv", "dq")),
    ],
)
def test_gradients_of_many_features_or_some_alone_have_two_kernels_on_hopper(
    device: Pretended, what: str, arrays: Any, options: dict[str, Any], kernels: Any, deterministic: bool
) -> None:
    """The same ones whether deterministic or not."""
    device.become("sm90", "90a")
    device.launched.clear()
    nbytes = cuflash.workspace_nbytes("attention_backward", *arrays)
    gradients_of(*arrays, deterministic=deterministic, workspace=on_gpu(np.empty(nbytes, np.uint8)), **options)
    assert [(x.operation, x.family, x.deterministic) for x in device.launched] == [
        ("attention_delta", "sm90", True),
        *((f"attention_backward_{kernel}", "sm90", True) for kernel in kernels),
    ]
    assert not any(x.needs_dq for x in device.launched if x.operation == tiles.FUSED)


def float32(*shape: int) -> fake_gpu.ndarray:
    return on_gpu(np.zeros(shape, np.float32))


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("need", [None, ("q", "k", "v")], ids=str)
@pytest.mark.parametrize(
    ("options", "terms"),
    [
        ({"softcap": 3.0}, ("Softcap",)),
        ({"scale": -1.0}, ("KeyBias",)),
        ({"key_bias": float32(3, 27)}, ("KeyBias",)),
        ({"key_bias": float32(27)}, ("KeyBias",)),
        ({"key_bias": float32(1, 27), "softcap": 3.0}, ("Softcap", "KeyBias")),
    ],
    ids=str,
)
def test_score_terms_have_gradients_on_hopper(
    device: Pretended, options: dict[str, Any], terms: tuple[str, ...], need: Any, deterministic: bool
) -> None:
    """In order whether deterministic or not."""
    device.become("sm90", "90a")
    device.launched.clear()
    arrays = half(3, 20, 64), half(3, 27, 64), half(3, 27, 64)
    gradients_of(*arrays, need=need, deterministic=deterministic, **options)
    _, main, *sums = device.launched
    assert (main.operation, main.family, main.scores, main.needs_dq) == (tiles.FUSED, "sm90", terms, True)
    assert main.deterministic
    is_summed = need is None and "key_bias" in options and options["key_bias"].shape != (3, 27)
    assert [variant.operation for variant in sums] == ["attention_dkey_bias"] * is_summed
    if is_summed:
        assert device.grids[-1] == 1
        at = 8 * (len(params.TENSORS) + params.SCRATCH.index("partials"))
        assert int.from_bytes(device.parameters[at : at + 8], "little") % 16 == 0 != device.parameters[at : at + 8]


OF_FEW = half(3, 20, 64), half(3, 27, 64), half(3, 27, 64)
OF_MANY = half(3, 20, 192), half(3, 27, 192), half(3, 27, 128)


@pytest.mark.parametrize(
    ("arrays", "need", "kernels"),
    [
        (OF_MANY, None, ("dkv", "dq")),
        (OF_MANY, ("q",), ("dq",)),
        (OF_MANY, ("v",), ("dkv",)),
        (OF_FEW, ("q",), ("dq",)),
        (OF_FEW, ("q", "v"), ("dqkv", "dq")),
    ],
)
@pytest.mark.parametrize("options", [{"softcap": 3.0}, {"scale": -1.0}, {"softcap": 0.1, "scale": 0.0}], ids=str)
def test_one_of_each_kernel_for_some_of_the_gradients_serves_all_terms_on_hopper(
    device: Pretended, arrays: Any, need: Any, kernels: Any, options: dict[str, Any]
) -> None:
    """dq of few features in the tile for 192."""
    device.become("sm90", "90a")
    device.launched.clear()
    gradients_of(*arrays, need=need, **options)
    _, *mains = device.launched
    assert [(x.operation, x.family) for x in mains] == [(f"attention_backward_{kernel}", "sm90") for kernel in kernels]
    assert all(x.scores == ("Softcap", "KeyBias") for x in mains if x.operation != tiles.FUSED)
    assert all((x.tile.head_dim, x.tile.value_dim) == (192, 128) for x in mains if x.operation == tiles.DQ)


@pytest.mark.parametrize("bias", [(3, 27), (27,), (1, 27)], ids=str)
@pytest.mark.parametrize("need", [None, ("key_bias",), ("q", "k", "v"), ("v", "key_bias")], ids=str)
def test_the_kernel_for_dk_and_dv_sums_dkey_bias_on_hopper(device: Pretended, need: Any, bias: Any) -> None:
    """And another one sums that over axes which key_bias lacks."""
    device.become("sm90", "90a")
    device.launched.clear()
    needed: list[int] = []
    prepare = plan_sm90.prepare

    def recorded(*of: Any, **more: Any) -> Any:
        needed.append(more.get("need", 0))
        return prepare(*of, **more)

    plan_sm90.backward.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_sm90, "prepare", recorded)
        gradients_of(*OF_MANY, need=need, key_bias=float32(*bias))
    names = [x.operation for x in device.launched]
    asked = need is None or "key_bias" in need
    assert {x.family for x in device.launched} == {"sm90"}
    assert sum(need & params.NEED_KEY_BIAS > 0 for need in needed) == asked
    assert names.count("attention_dkey_bias") == (asked and bias != (3, 27))
    assert names.count(tiles.DKV) == 1


@pytest.mark.parametrize("need", [("k", "v"), ("k",), ("v",), ("key_bias",), ("v", "key_bias")], ids=str)
def test_gradients_without_dq_are_a_kernel_of_their_own_on_hopper(device: Pretended, need: tuple[str, ...]) -> None:
    """k may be broadcast otherwise than v where it has no gradient."""
    device.become("sm90", "90a")
    k = half(4, 27, 64) if "k" in need else half(27, 64)
    device.launched.clear()
    gradients_of(half(4, 20, 64), k, half(4, 27, 64), need=need, key_bias=float32(4, 27))
    delta, main = device.launched
    assert (delta.operation, delta.family) == ("attention_delta", "sm90")
    assert (main.operation, main.family, main.deterministic, main.needs_dq) == (tiles.FUSED, "sm90", True, False)


@pytest.mark.parametrize(
    ("options", "terms"),
    [
        ({}, ("KeyBias",)),
        ({"scale": -1.0}, ("KeyBias",)),
        ({"softcap": 3.0}, ("Softcap", "KeyBias")),
        ({"softcap": 3.0, "key_bias": float32(27)}, ("Softcap", "KeyBias")),
    ],
    ids=str,
)
def test_gradients_without_dq_take_a_kernel_for_key_bias_on_hopper(
    device: Pretended, options: dict[str, Any], terms: tuple[str, ...]
) -> None:
    device.become("sm90", "90a")
    device.launched.clear()
    gradients_of(half(20, 64), half(27, 64), half(27, 64), need=("k", "v"), **options)
    _, main = device.launched
    assert (main.operation, main.family, main.scores, main.needs_dq) == (tiles.FUSED, "sm90", terms, False)


@pytest.mark.parametrize("capturing", [True, False])
def test_gradients_on_hopper_count_in_zeros(device: Pretended, monkeypatch: Any, capturing: bool) -> None:
    """Of the stream, or of the call where that may overlap others: claims, and behind them a turn for each block of
    query rows."""
    device.become("sm90", "90a")
    monkeypatch.setattr(needs, "_zeros", {})
    monkeypatch.setattr(device, "stream", types.SimpleNamespace(ptr=5, is_capturing=lambda: capturing))
    q, k = half(3, 1000, 128), half(3, 27, 128)
    nbytes = cuflash.workspace_nbytes("attention_backward", q, k, k)
    workspace = on_gpu(np.empty(nbytes, np.uint8))
    device.zeroed.clear(), device.claims.clear()
    gradients_of(q, k, k, workspace=workspace)
    counts = hopper.CLAIMS_NBYTES + hopper.TURN_NBYTES * 3 * 16
    if capturing:
        assert device.zeroed == [(device.claims[-1], counts)] and not needs._zeros
        assert 0 <= device.claims[-1] - workspace.data.ptr <= nbytes - counts
    else:
        [counters] = needs._zeros.values()
        assert not device.zeroed and device.claims[-1] == counters.data.ptr and counters.nbytes >= counts


@given(units=st.integers(1, 2000), blocks=st.integers(1, 10000), slots=st.integers(1, 600))
def test_parts_of_the_keys(units: int, blocks: int, slots: int) -> None:
    """Each part has a block, all together are few waves, and fewer would fill the device less."""
    parts = tiles.splits(units, blocks, slots)
    assert 1 <= parts <= max(1, min(blocks, 1024))
    assert parts == 1 or units * (parts - 1) < 4 * slots
    used = [units * count / (slots * -(-units * count // slots)) for count in range(1, parts + 1)]
    assert all(x < used[-1] for x in used[:-1])


@pytest.mark.parametrize(
    "variant",
    [
        *(
            tiles.variant(tiles.NARROW, x, 3, "strided", False, "90a", "sm80")
            for x in ("float16", "float32", "float64")
        ),
        tiles.sm90_few(tiles.NARROW_F64, "float64", 3),
    ],
    ids=lambda variant: variant.name,
)
@given(m=st.integers(1, 400))
def test_warps_that_rows_do_not_need_take_keys(variant: compile.Variant, m: int) -> None:
    tile, dtype = variant.tile, variant.dtype
    parts, rows = tiles.key_warps(tile, variant.operation, dtype, m), tile.block_m // tile.warps
    assert tile.warps % parts == 0 and parts & (parts - 1) == 0
    if parts > 1:
        assert tile.warps // parts * (1 if m == 1 else rows) >= m
