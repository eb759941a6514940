"""Launches of kernels that may start before the one ahead of them in the stream has ended, and wait for it themselves
(sm_90): what lies between two kernels is saved."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np


def launch(kernel: Any, grid: int, block: int, argument: np.void, smem_bytes: int) -> None:
    """Enqueue a ``cupy.cuda.Function`` of one parameter in the current stream.

    Raises
    ------
    RuntimeError
        The driver refuses the launch.
    """
    import cupy
    from cuda.bindings import driver

    values = np.frombuffer(argument, np.uint8)
    pointers = np.array([values.ctypes.data], np.uint64)
    config = _config(grid, block, smem_bytes, cupy.cuda.get_current_stream().ptr)
    [status] = driver.cuLaunchKernelEx(config, kernel.ptr, pointers.ctypes.data, 0)
    if int(status) != 0:
        raise RuntimeError(f"the driver refuses a launch of {grid} CTAs: {status.name}")


@lru_cache(maxsize=1024)
def _config(grid: int, block: int, smem_bytes: int, stream: int) -> Any:
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    # Named, as what 0 means to the bindings is up to the environment: CuPy's default stream is the legacy one.
    config.sharedMemBytes, config.hStream = smem_bytes, stream or driver.CU_STREAM_LEGACY
    config.attrs, config.numAttrs = [attribute], 1
    return config
