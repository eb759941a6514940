"""The GPU as the benchmarks see it: random inputs, bfloat16 as bits, arrays crossing to other libraries, peak memory.

CuPy, torch and JAX are imported inside the functions: every module here can be imported where none is installed.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.problems import Problem

PACKAGES = (
    "cuflash", "cupy-cuda13x", "cupy-cuda12x", "numpy", "torch", "triton", "jax", "flash-attn-4", "flash-attn3-jax",
    "tokenspeed-fa3", "flash-attn-3", "nvidia-cudnn-frontend", "nvidia-cudnn-cu13", "nvidia-cuda-nvrtc",
)  # fmt: skip


def require_gpu() -> Any:
    """CuPy with a usable device, or exit code 2 and the reason."""
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
        return cupy
    except Exception as error:  # no CuPy, no driver, no device: all the same to the user of a benchmark
        print(f"this benchmark needs CuPy and a CUDA device: {type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def name() -> str:
    """The current device's name, as in 'NVIDIA H200'."""
    import cupy

    return str(cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode())


def versions() -> dict[str, str]:
    """What took part: installed packages, driver, and the digest of the kernels' sources."""
    import cupy

    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    driver, runtime = cupy.cuda.runtime.driverGetVersion(), cupy.cuda.runtime.runtimeGetVersion()
    found |= {"cuda_driver": f"{driver // 1000}.{driver % 1000 // 10}"}
    found |= {"cuda_runtime": f"{runtime // 1000}.{runtime % 1000 // 10}"}
    try:
        from cuflash.compile import kernels_digest

        found["kernels_cu"] = kernels_digest()[:16]
    except ImportError:
        pass
    return found


# bfloat16: CuPy and NumPy hold it as a dtype of ml_dtypes. Conversions and crossings go through its bits, which every
# version of every library here can move.


def dtype_of(name: str) -> np.dtype[Any]:
    """The dtype of a name, ``'bfloat16'`` included."""
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def from_float32(x: Any, dtype: str) -> Any:
    """``x`` rounded to nearest even into ``dtype``; finite values only."""
    if dtype != "bfloat16":
        return x.astype(dtype)
    bits = x.view(np.uint32)
    return ((bits + ((bits >> 16) & 1) + 0x7FFF) >> 16).astype(np.uint16).view(dtype_of("bfloat16"))


def to_float64(x: Any) -> Any:
    """``x`` in float64, exactly."""
    if x.dtype.name == "bfloat16":
        x = (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float64)


def to_torch(x: Any) -> Any:
    """A torch tensor on the memory of a CuPy array."""
    import torch

    if x.dtype.name == "bfloat16":
        return torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(x)


def from_torch(x: Any) -> Any:
    """A CuPy array on the memory of a torch tensor."""
    import cupy
    import torch

    x = x.detach()
    if x.dtype == torch.bfloat16:
        return cupy.from_dlpack(x.view(torch.int16)).view(dtype_of("bfloat16"))
    return cupy.from_dlpack(x)


def to_jax(x: Any) -> Any:
    """A JAX array with the values of a CuPy array."""
    import cupy
    import jax.dlpack
    import jax.numpy

    cupy.cuda.runtime.deviceSynchronize()  # JAX works on streams of its own
    if x.dtype.name == "bfloat16":
        return jax.lax.bitcast_convert_type(jax.dlpack.from_dlpack(x.view(np.uint16)), jax.numpy.bfloat16)
    return jax.dlpack.from_dlpack(x)


def from_jax(x: Any) -> Any:
    """A CuPy array with the values of a JAX array."""
    import cupy
    import jax.numpy

    if x.dtype == jax.numpy.bfloat16:
        bits = jax.block_until_ready(jax.lax.bitcast_convert_type(x, jax.numpy.uint16))
        return cupy.from_dlpack(bits).view(dtype_of("bfloat16"))
    return cupy.from_dlpack(jax.block_until_ready(x))


@dataclass(frozen=True)
class Inputs:
    """Arrays of one problem, C-ordered (batch, heads, sequence, features); key_bias (batch, heads, keys) or None."""

    q: Any
    k: Any
    v: Any
    do: Any
    key_bias: Any


def random_inputs(problem: Problem, xp: Any, seed: int = 0) -> Inputs:
    """Standard normal inputs of ``problem`` in the memory of ``xp`` (NumPy or CuPy), the same for the same seed."""
    generator = xp.random.default_rng(seed)

    def draw(*shape: int) -> Any:
        if problem.dtype == "float64":
            return generator.standard_normal(shape, dtype=xp.float64)
        return from_float32(generator.standard_normal(shape, dtype=xp.float32), problem.dtype)

    p = problem
    q = draw(p.batch, p.heads, p.seqlen, p.head_dim)
    k = draw(p.batch, p.kv_heads, p.seqlen_k, p.head_dim)
    v = draw(p.batch, p.kv_heads, p.seqlen_k, p.value_dim)
    do = draw(p.batch, p.heads, p.seqlen, p.value_dim)
    bias_dtype = xp.float64 if p.dtype == "float64" else xp.float32
    # Of values that peers with a bias of q's dtype hold, too.
    bias = to_float64(draw(p.batch, p.heads, p.seqlen_k)).astype(bias_dtype) if p.key_bias else None
    return Inputs(q, k, v, do, bias)


def free_memory() -> None:
    """Gives cached blocks back to the device, so that no library starves another."""
    import cupy

    cupy.cuda.runtime.deviceSynchronize()
    cupy.get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


def peak_bytes(call: Callable[[], Any]) -> int:
    """Peak device memory of one call beyond what was held before it, its results included.

    Counted at CuPy's memory hooks and in torch's allocator; a library with memory of its own goes unseen.
    """
    from cupy.cuda.memory_hook import MemoryHook

    class Peak(MemoryHook):  # type: ignore[misc]
        name = "cuflash-bench-peak"
        held = peak = 0

        def malloc_postprocess(self, **kwargs: Any) -> None:
            self.held += kwargs["mem_size"]
            self.peak = max(self.peak, self.held)

        def free_postprocess(self, **kwargs: Any) -> None:
            self.held -= kwargs["mem_size"]

    torch = sys.modules.get("torch")
    before = 0
    if torch is not None:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with Peak() as hook:
        result = call()
        peak = hook.peak
    del result
    return int(peak if torch is None else peak + torch.cuda.max_memory_allocated() - before)
