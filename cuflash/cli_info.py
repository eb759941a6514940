"""What this machine has for cuflash, and what is missing: ``python -m cuflash info``.

The driver is asked through ``ctypes``, which needs no package and makes no context: so a GPU is seen, and named, on a
machine where CuPy is not installed, the state in which work silently stays on the host.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

import cuflash
from cuflash import compile, tiles

_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


@dataclass(frozen=True)
class Device:
    """A CUDA device as the driver describes it."""

    name: str
    compute_capability: tuple[int, int]
    memory: int

    def __str__(self) -> str:
        major, minor = self.compute_capability
        return f"{self.name}, compute capability {major}.{minor}, {self.memory / 2**30:.0f} GiB"


@dataclass(frozen=True)
class Driver:
    """The CUDA driver: the newest CUDA version it runs, and the devices it sees."""

    version: tuple[int, int]
    devices: tuple[Device, ...]

    @property
    def extra(self) -> str:
        """The extra of this package whose CUDA version the driver runs."""
        return "cuda13" if self.version >= (13, 0) else "cuda12"


def find_driver() -> Driver | None:
    """The CUDA driver of this machine, or None where there is none."""
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    version = (number.value // 1000, number.value % 1000 // 10)
    # cuInit fails where the library is installed but no device is visible: CUDA_VISIBLE_DEVICES, a container.
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(number)) != 0:
        return Driver(version, ())
    return Driver(version, tuple(_describe(cuda, index) for index in range(number.value)))


def _describe(cuda: ctypes.CDLL, index: int) -> Device:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), _COMPUTE_CAPABILITY_MAJOR, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), _COMPUTE_CAPABILITY_MINOR, device)
    return Device(name.value.decode(errors="replace"), (major.value, minor.value), memory.value)


_PACKAGES = {"CuPy": "cupy", "cuda-core": "cuda.core", "cuda-bindings": "cuda.bindings.nvrtc"}


def missing(driver: Driver | None) -> str:
    """What keeps the GPU from being used, with what to do about it; empty when nothing does."""
    if driver is None:
        return "there is no CUDA driver: everything runs on the host"
    if not driver.devices:
        return "the CUDA driver sees no device (CUDA_VISIBLE_DEVICES?): everything runs on the host"
    device = driver.devices[0]
    if driver.version < (12, 0):
        return (
            f"the driver runs CUDA {driver.version[0]}.{driver.version[1]}, CuPy needs 12: everything runs on the host"
        )
    if absent := [name for name, module in _PACKAGES.items() if not _is_importable(module)]:
        return (
            f"THERE IS A GPU ({device.name}) BUT NOT {', '.join(absent)}: everything runs on the host until you\n"
            f'    pip install "cuflash[{driver.extra}]"    (in a checkout: pip install ".[{driver.extra}]")'
        )
    try:
        compile.target_of(device.compute_capability)
    except (ImportError, NotImplementedError) as error:
        return f"the {device.name} stays unused, everything runs on the host: {error}"
    return ""


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of a parent package
        return False


def families(target: str) -> tuple[str, ...]:
    """The families of the kernels that run on a target."""
    asked = os.environ.get("CUFLASH_FAMILY")
    return tiles.families(target) if asked in (None, "", "sm90") else (asked,)


# --- the command -----------------------------------------------------------------------------------------------------


def add_parser(subparsers: Any) -> None:
    """Add the command to the subparsers of ``python -m cuflash``."""
    parser = subparsers.add_parser(
        "info",
        help="what this machine has, and what is missing",
        description="Say which devices, packages and compiled kernels cuflash finds here, and what is missing.",
    )
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> int:
    """Print the report."""
    driver = find_driver()
    rows = [
        ("cuflash", cuflash.__version__),
        ("Python", f"{platform.python_version()} on {platform.platform()}"),
        ("NumPy", np.__version__),
        ("CUDA driver", "none" if driver is None else "for CUDA {}.{}".format(*driver.version)),
        *((f"GPU {index}", _describe_gpu(device)) for index, device in enumerate(driver.devices if driver else ())),
        ("CuPy", version_of("cupy-cuda13x", "cupy-cuda12x", "cupy")),
        ("cuda-core", version_of("cuda-core")),
        ("NVRTC", _describe_nvrtc()),
        ("ml_dtypes", f"{version_of('ml_dtypes')} (for bfloat16)"),
        ("cache", _describe_cache()),
    ]
    for name, value in rows:
        print(f"{name:12} {value}")
    fault = missing(driver)
    print(f"\n{fault or 'Nothing is missing: arrays on the GPU are computed there.'}")
    return 0


def _describe_gpu(device: Device) -> str:
    try:
        target = compile.target_of(device.compute_capability)
    except (ImportError, NotImplementedError):
        return str(device)
    return f"{device}; kernels: {' and '.join(families(target))} for sm_{target}"


def _describe_nvrtc() -> str:
    try:
        version = ".".join(map(str, compile.nvrtc_version()))
        return f"{version}, compiles for {', '.join('sm_' + target for target in compile.targets())}"
    except ImportError as error:
        return f"not usable: {error}"


def _describe_cache() -> str:
    folder = compile.cache_dir()
    sizes = [path.stat().st_size for path in folder.glob("*.cubin")]
    return f"{folder}: {len(sizes)} kernels, {sum(sizes) / 1e6:.1f} MB"


def version_of(*distributions: str) -> str:
    """The version of the first of the distributions that is installed, or 'not installed'."""
    for distribution in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return "not installed"
