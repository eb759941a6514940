"""Every kernel compiles, without a GPU, into what it is meant to be; and what the compile layer says when one does not.

The default run compiles one variant of every third row of the tile tables, other rows and other variants for each
target, and of the rows of Hopper's forward with a softcap and of its backward, whose registers are the fullest, one
each. ``pytest -m slow_compile`` compiles them all.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import struct
import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sass
import tiny

from cuflash import compile, params, tiles
from cuflash.compile import CompileError, Variant

CASES = [("sm75", "75"), ("sm75", "90a")] + [("sm80", target) for target in ("80", "86", "89", "90a", "120")]
CASES.append(("sm90", "90a"))
MATMULS = ("attention_forward", "attention_backward", tiles.NARROW_F64)


@pytest.fixture
def tiny_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tiny.write_kernels(tmp_path / "kernels")
    monkeypatch.setattr(compile, "kernels_dir", lambda: folder)
    monkeypatch.setattr(params, "static_asserts", lambda dtype, maps: "")
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "store"))
    return folder


# --- the real kernels --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One store for the module: a new one, unless the environment names one to use again."""
    with pytest.MonkeyPatch.context() as patch:
        if "CUFLASH_CACHE_DIR" not in os.environ:
            patch.setenv("CUFLASH_CACHE_DIR", str(tmp_path_factory.mktemp("store")))
        yield


def sample(family: str, target: str) -> list[Variant]:
    """One variant of every third row; which row and which variant goes round from target to target."""
    rows: dict[tuple[str, tiles.Tile], list[Variant]] = {}
    for variant in tiles.variants(target, family):
        rows.setdefault((variant.operation, variant.tile), []).append(variant)
    turn = CASES.index((family, target))
    return [row[(turn + at) % len(row)] for at, row in enumerate(rows.values())][turn % 3 :: 3]


def capped(kind: str, precision: str | None) -> list[Variant]:
    """Of each row of Hopper's forward one variant with a softcap and one with key_bias, too, of its backward one with
    each choice of terms; dtypes, orders and those without dq in turn."""
    rows: dict[tuple[tiles.Tile, tuple[str, ...]], list[Variant]] = {}
    for variant in tiles.variants("90a", "sm90"):
        is_full = "Softcap" in variant.scores or variant.operation == tiles.FUSED
        if is_full and (tiles.kind(variant.dtype), variant.precision) == (kind, precision):
            rows.setdefault((variant.tile, variant.scores), []).append(variant)
    return [row[at % len(row)] for at, row in enumerate(rows.values())]


def products(variant: Variant) -> str:
    """The instruction that multiplies matrices."""
    match tiles.kind(variant.dtype), variant.family:
        case "float64", "sm90":
            return "DMMA.16x8x4"
        case _, "sm90":
            return "HGMMA"
        case "16 bits", "sm75":
            return "HMMA.1688.F32"
        case "16 bits", _:
            return "HMMA.16816.F32"
        case "float32", "sm75":
            return "FFMA"
        case "float32", _:
            return "HMMA.1688.F32.TF32"
        case _, "sm75":
            return "DFMA"
    if variant.target == "90a":
        return "DMMA.16x8x16"
    return "DMMA.884" if int(variant.target) < 90 else "DMMA.8x8x4"


def faults(variant: Variant) -> list[str]:
    """What is wrong with a compiled variant."""
    used = compile.resources(variant)
    allowed = tiles.may_spill(variant)
    found = [f"{variant}: spills or local memory: {used}"] if max(used.spill_bytes, used.stack_bytes) > allowed else []
    if variant.operation.startswith(MATMULS):
        opcodes, wide = sass.opcodes(compile.cubin_path(variant)), tiles.kind(variant.dtype) != "16 bits"
        wanted, unwanted = [products(variant)], [] if allowed else ["LDL", "STL"]
        # Asynchronous copies move 4 bytes at least: single elements of that size, too.
        if variant.family == "sm80" and (wide or variant.load != "strided"):
            wanted.append("LDGSTS")
        if variant.operation == tiles.NARROW_F64:
            wanted += ["DMMA.16x8x16", "UBLKCP"]
        elif variant.family == "sm90":
            wanted.append("UTMALDG")
            # Around each product a few; where the compiler takes fright, two for each of its instructions.
            if 2 * opcodes.count("WARPGROUP") > opcodes.count("HGMMA"):
                found.append(f"{variant}: wgmma one at a time: {opcodes.count('WARPGROUP')} WARPGROUP instructions")
            if split := re.search(r".*(?:wgmma|warpgroup).*", compile._obtain(variant)[1].log):
                found.append(f"{variant}: a product in parts, or alone: {split[0]}")
            # What spills is the producer's, whose code comes after that of the consumers. A softcap beside key_bias
            # leaves the forward no register for a value or two, some of them of code that is rarely taken.
            spills = len(variant.scores) > 1 and variant.operation != tiles.FUSED
            last, rare = opcodes.positions("HGMMA")[-1], 8 if spills else 0
            if (among := sum(at < last for at in opcodes.positions("LDL", "STL"))) > rare:
                found.append(f"{variant}: local memory among the products, {among} instructions")
        if variant.family == "sm75":
            unwanted += ["LDGSTS", "DMMA"] + (["HMMA"] if wide else [])
        found += [f"{variant}: no {opcode}" for opcode in wanted if not opcodes.count(opcode)]
        found += [f"{variant}: {count} {opcode}" for opcode in unwanted if (count := opcodes.count(opcode))]
    return found


def check(variants: list[Variant]) -> None:
    """No compile errors, no spills beyond what a row may; tensor cores and asynchronous copies where they belong."""
    errors = compile.compile_all(variants)
    assert not errors, "\n\n".join(str(error) for error in errors)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # the work is in the processes of nvdisasm
        lines = [line for found in pool.map(faults, variants) for line in found]
    assert not lines, "\n".join(lines)


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(("family", "target"), CASES)
def test_a_variant_of_every_third_row_compiles(family: str, target: str) -> None:
    check(sample(family, target))


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(("kind", "precision"), tiles.SM90_FORWARD)
def test_every_row_with_a_softcap_compiles(kind: str, precision: str | None) -> None:
    check(capped(kind, precision))


@pytest.mark.slow_compile
@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(("family", "target"), CASES)
def test_every_variant_compiles(family: str, target: str, request: pytest.FixtureRequest) -> None:
    if "slow_compile" not in request.config.getoption("-m"):
        pytest.skip("the whole table takes a quarter of an hour on two cores: pytest -m slow_compile")
    check(tiles.variants(target, family))


@pytest.mark.parametrize(
    ("family", "target"), [("sm75", "75"), ("sm90", "90a"), *(("sm80", target) for target in compile.TARGETS[1:])]
)
def test_the_tables_stay_small(family: str, target: str) -> None:
    """A first call compiles one of them; somebody who compiles a target ahead of time waits for all.

    float32 with its two precisions and float64 have fewer load kinds and head dims than 16 bits have: they may add
    five sixths to what those come to.
    """
    listed = tiles.variants(target, family)
    assert 0 < sum(tiles.kind(variant.dtype) == "16 bits" for variant in listed) <= 150
    assert len(listed) <= 275
    assert {variant.dtype for variant in listed} == set(tiles.dtypes(target, family))
    names = {variant.name for variant in listed}
    assert len(names) == len(listed) == len(set(listed))
    assert {(variant.family, variant.target) for variant in listed} == {(family, target)}


def test_a_host_that_packs_another_layout_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = tiles.variants("80", "sm80")[0]
    tail = params.INTS.index("band_lo")
    swapped = (*params.INTS[:tail], "band_hi", "band_lo", *params.INTS[tail + 2 :])
    monkeypatch.setattr(params, "INTS", swapped)
    with pytest.raises(CompileError, match="band_lo") as caught:
        compile.build(variant)
    assert "static assertion failed" in caught.value.log


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_a_host_that_packs_another_size_does_not_compile(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size = params.size
    monkeypatch.setattr(params, "size", lambda operation, dtype: size(operation, dtype) + 8)
    with pytest.raises(CompileError, match="static assertion failed"):
        compile.build(next(variant for variant in tiles.variants("80", "sm80") if variant.dtype == dtype))


def test_scalars_are_packed_as_the_accumulation_dtype() -> None:
    """float64 kernels get a scale that float32 would round."""
    scalars = dict.fromkeys(params.SCALARS, 0.1)
    tails = {dtype: params.pack_tail({}, dict.fromkeys(params.INTS, 0), scalars, dtype) for dtype in tiles.ITEMSIZE}
    for dtype, tail in tails.items():
        assert len(params.pack((), tail)) == params.size("attention_forward", dtype)
        assert (struct.pack("<d", 0.1) in tail) == (dtype == "float64")
        assert (struct.pack("<f", 0.1) in tail) == (dtype != "float64")


# --- source ------------------------------------------------------------------------------------------------------


def test_the_source_is_readable_and_complete(tiny_kernels: Path) -> None:
    tile = tiles.Tile(64, 96, 128, 32, 2, 8, 2)
    variant = Variant("attention_forward", "sm80", "90a", "bfloat16", "float32", tile, ("KeyBias",), "8", True, False)
    lines = compile.source(variant).splitlines()
    assert lines[0].endswith(f"kernels_cu sha256 {compile.kernels_digest()}")
    assert lines[1:] == [
        '#include "common.cuh"',
        "namespace cuflash {",
        "using Operand = BFloat16;",
        "using Output = float;",
        "inline constexpr Tile kTile{.head_dim = 64, .value_dim = 96, .block_m = 128, .block_n = 32, .stages = 2, "
        ".warps = 8, .column_warps = 2, .low_bits = 0, .resident = 1, .q_stages = 1};",
        f"inline constexpr int kSmemBytes = {variant.smem_bytes};",
        "inline constexpr int kTarget = 90;",
        "inline constexpr LoadKind kLoad = LoadKind::k8;",
        "inline constexpr bool kPrescaled = true;",
        "inline constexpr bool kDeterministic = false;",
        "inline constexpr bool kTf32 = false;",
        "inline constexpr bool kNeedsDq = true;",
        "inline constexpr bool kSoftcap = false, kKeyBias = true;",
        "}",
        "#define KERNEL attention_forward_sm80_bfloat16_to_float32_d64_e96_m128_n32_s2_w8_load8_c2_"
        "keybias_prescaled_unordered",
        '#include "attention_forward.cu"',
    ]


def test_a_family_may_have_its_own_file(tiny_kernels: Path) -> None:
    assert '#include "family_sm80.cu"' in compile.source(tiny.variant("family"))
    assert '#include "store.cu"' in compile.source(tiny.variant("store"))


def test_every_field_of_a_variant_shows_in_its_name_or_target() -> None:
    variant = Variant("a", "sm80", "80", "float16", "float16", tiles.Tile(64, 64, 64, 64, 1, 4), (), "16", False)
    others = {
        "operation": "b", "family": "sm75", "dtype": "bfloat16", "out_dtype": "float32", "scores": ("Softcap",),
        "tile": tiles.Tile(64, 64, 64, 64, 2, 4), "load": "4", "prescaled": True, "deterministic": False,
        "precision": "tf32", "needs_dq": False,
    }  # fmt: skip
    assert {*others, "target"} == {field.name for field in dataclasses.fields(Variant)}
    names = {dataclasses.replace(variant, **{field: value}).name for field, value in others.items()}
    assert len(names | {variant.name}) == len(others) + 1
    assert all(name.isidentifier() for name in names)


def test_the_sources_are_found_or_missed_loudly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (compile.kernels_dir() / "include").is_dir()
    monkeypatch.setattr(compile, "__file__", str(tmp_path / "site" / "cuflash" / "compile.py"))
    with pytest.raises(RuntimeError, match=r"site/cuflash/kernels_cu nor in .*site/kernels_cu"):
        compile.kernels_dir()


# --- targets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        ((7, 5), "75"), ((8, 0), "80"), ((8, 6), "86"), ((8, 7), "87"), ((8, 8), "87"), ((8, 9), "89"),
        ((9, 0), "90a"), ((10, 0), "100"), ((10, 1), "100"), ((10, 3), "103"), ((11, 0), "110"), ((12, 0), "120"),
        ((12, 1), "120"),
    ],
)  # fmt: skip
def test_target_of(capability: tuple[int, int], target: str) -> None:
    assert compile.target_of(capability, compile.TARGETS) == target


@pytest.mark.parametrize("capability", [(6, 1), (7, 0), (7, 2), (9, 1), (13, 0)])
def test_no_target(capability: tuple[int, int]) -> None:
    with pytest.raises(NotImplementedError, match=r"compute capability {}\.{}\b.*sm_120".format(*capability)):
        compile.target_of(capability, compile.TARGETS)


def test_an_older_compiler_serves_what_it_can() -> None:
    older = ("80", "86", "90a", "100")
    assert compile.target_of((10, 3), older) == "100"
    with pytest.raises(NotImplementedError, match=r"12\.0"):
        compile.target_of((12, 0), older)


def test_targets_are_those_of_the_compiler() -> None:
    assert compile.nvrtc_version() >= (12, 0)
    known = compile.targets()
    assert {"80", "86", "89", "90a"} <= set(known) <= set(compile.TARGETS)
    assert list(known) == sorted(known, key=compile.TARGETS.index)
    assert compile.target_of((8, 6)) == "86"


# --- errors ------------------------------------------------------------------------------------------------------


def test_compile_errors_say_which_why_and_where(tiny_kernels: Path) -> None:
    with pytest.raises(CompileError) as caught:
        compile.build(tiny.variant("broken"))
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.variant == tiny.variant("broken")
    assert 'identifier "nothing" is undefined' in error.log
    assert error.cache_path.parent == compile.cache_dir()
    assert all(part in str(error) for part in (error.variant.name, "sm_80", error.log, str(error.cache_path)))


def test_a_target_that_the_compiler_does_not_know(tiny_kernels: Path) -> None:
    with pytest.raises(CompileError, match=r"NVRTC \d+\.\d+ does not know sm_999"):
        compile.build(tiny.variant(target="999"))


@pytest.mark.parametrize(("module", "package"), [("cuda.core", "cuda-core"), ("cuda.bindings.nvrtc", "cuda-bindings")])
def test_a_missing_package(module: str, package: str, tiny_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    compile.nvrtc_version.cache_clear()
    with pytest.raises(ImportError, match=package) as caught:
        compile.build(tiny.variant())
    assert 'pip install "cuflash[cuda13]"' in str(caught.value)
    assert 'pip install "cuflash[cuda12]"' in str(caught.value)


def test_a_missing_compiler_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RuntimeError("libnvrtc.so not found")

    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", types.SimpleNamespace(nvrtcVersion=missing))
    compile.nvrtc_version.cache_clear()
    with pytest.raises(ImportError, match=r'NVRTC.* is missing(?s:.*)pip install "cuflash\[cuda13\]"'):
        compile.nvrtc_version()


def test_cupy_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r'CuPy .*is missing(?s:.*)pip install "cuflash\[cuda13\]"'):
        compile.kernel(tiny.variant(), 0)


# --- many, and what they use -------------------------------------------------------------------------------------


def test_compile_all_reports_progress_and_every_failure(tiny_kernels: Path) -> None:
    stored = tiny.variant()
    path = compile.cubin_path(stored)
    before = path.stat().st_mtime_ns
    others = [tiny.variant(block_m=128), tiny.variant("broken"), tiny.variant("broken", target="86")]
    progress: list[tuple[int, int]] = []
    errors = compile.compile_all([stored, *others, stored], processes=2, progress=lambda *at: progress.append(at))
    assert progress == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert {error.variant for error in errors} == set(others[1:])
    assert path.stat().st_mtime_ns == before
    assert len(list(path.parent.iterdir())) == 2


def test_resources_are_the_compilers(tiny_kernels: Path) -> None:
    assert compile.resources(tiny.variant("stack")).stack_bytes == 4 * 99 + 4  # the array, aligned to 8
    used = compile.resources(tiny.variant())
    assert used.registers > 0 and used.spill_bytes == used.stack_bytes == 0
    log = (
        "ptxas         .     8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers, 8 bytes cumulative stack size, 1024 bytes smem\n"
    )
    forward = Variant(
        "attention_forward", *dataclasses.astuple(tiny.variant())[1:5], tiny.variant().tile, (), "16", False
    )
    assert forward.smem_bytes > 0
    assert compile._resources(forward, log) == (255, 28, 8, 1024 + forward.smem_bytes)


@pytest.mark.parametrize(("value", "prints"), [("1", True), ("0", False), ("", False)])
def test_dump(
    value: str, prints: bool, tiny_kernels: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUFLASH_DUMP", value)
    compile.cubin_path(tiny.variant())
    dumped = capsys.readouterr().err
    assert (compile.source(tiny.variant()) in dumped) == prints
    assert ("registers, 0 bytes spilled, 0 bytes stack, 0 bytes shared memory" in dumped) == prints


# --- loading, with stand-ins for CuPy and the driver -------------------------------------------------------------


SIZE = params.size("store", "float16")
"""Bytes of the parameters of the variants of tiny.py."""


class Device:
    """Stand-ins for the parts of CuPy and of the driver that loading a kernel uses."""

    def __init__(self) -> None:
        self.capturing = False
        self.loaded: list[tuple[str, str]] = []
        self.sizes: list[int] = [SIZE]
        self.function: Any = None

    def raw_module(self, *, path: str) -> Any:
        def get_function(name: str) -> Any:
            self.loaded.append((path, name))
            self.function = types.SimpleNamespace(kernel=types.SimpleNamespace(ptr=1), max_dynamic_shared_size_bytes=0)
            return self.function

        return types.SimpleNamespace(get_function=get_function)

    def parameter(self, function: int, index: int) -> tuple[Any, int | None, int | None]:
        if index < len(self.sizes):
            return Status(0, "CUDA_SUCCESS"), 0, self.sizes[index]
        return Status(1, "CUDA_ERROR_INVALID_VALUE"), None, None


class Status(int):
    name: str

    def __new__(cls, value: int, name: str) -> Status:
        status = super().__new__(cls, value)
        status.name = name
        return status


@pytest.fixture
def device(tiny_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    device = Device()
    stream = types.SimpleNamespace(is_capturing=lambda: device.capturing)
    cuda = types.SimpleNamespace(Device=lambda index: threading.RLock(), get_current_stream=lambda: stream)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda, RawModule=device.raw_module))
    driver = types.SimpleNamespace(cuFuncGetParamInfo=device.parameter)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    compile.kernel.cache_clear()
    yield device
    compile.kernel.cache_clear()


def test_a_kernel_is_loaded_once(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles.Tile, "smem_bytes", lambda tile, *of: 98304)
    variant = tiny.variant()
    assert compile.kernel(variant, 0) is compile.kernel(tiny.variant(), 0) is device.function.kernel
    assert device.loaded == [(str(compile.cubin_path(variant)), variant.name)]
    assert device.function.max_dynamic_shared_size_bytes == 98304
    compile.kernel(variant, 1)
    assert len(device.loaded) == 2


def test_a_cold_kernel_under_capture(device: Device) -> None:
    device.capturing = True
    with pytest.raises(RuntimeError, match="once before the capture"):
        compile.kernel(tiny.variant(), 0)
    assert not device.loaded and not compile.cache_dir().exists()
    device.capturing = False
    warm = compile.kernel(tiny.variant(), 0)
    device.capturing = True
    assert compile.kernel(tiny.variant(), 0) is warm


@pytest.mark.parametrize("sizes", [[], [SIZE - 8], [SIZE, 8]], ids=["none", "smaller", "two"])
def test_parameters_that_the_host_does_not_pack(sizes: list[int], device: Device) -> None:
    device.sizes = sizes
    with pytest.raises(RuntimeError, match=f"one parameter of {SIZE} bytes"):
        compile.kernel(tiny.variant(), 0)


def test_a_driver_that_cannot_say(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(function: int, index: int) -> None:
        raise RuntimeError('Function "cuFuncGetParamInfo" not found')

    monkeypatch.setattr(sys.modules["cuda.bindings.driver"], "cuFuncGetParamInfo", missing)
    assert compile.kernel(tiny.variant(), 0) is device.function.kernel
