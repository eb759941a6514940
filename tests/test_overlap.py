"""Launches that may overlap the kernel ahead of them: what the driver is asked for."""

from __future__ import annotations

import ctypes
import sys
import types
from typing import Any

import numpy as np
import pytest

from cuflash import overlap


def test_a_kernel_may_start_before_the_one_ahead_of_it_has_ended(monkeypatch: Any) -> None:
    from cuda.bindings import driver

    stream = types.SimpleNamespace(ptr=7)
    cuda = types.SimpleNamespace(get_current_stream=lambda: stream)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    launched: list[tuple[Any, int, bytes]] = []
    status = driver.CUresult.CUDA_SUCCESS

    def enqueue(config: Any, kernel: int, pointers: int, extra: int) -> tuple[Any]:
        [at] = (ctypes.c_uint64 * 1).from_address(pointers)
        launched.append((config, kernel, ctypes.string_at(at, 16)))
        return (status,)

    monkeypatch.setattr(driver, "cuLaunchKernelEx", enqueue)
    argument = np.frombuffer(bytes(range(16)), "V16")[0]
    overlap.launch(types.SimpleNamespace(ptr=99), 3, 384, argument, 1000)
    [(config, kernel, parameters)] = launched
    assert (config.gridDimX, config.blockDimX, config.sharedMemBytes, int(config.hStream)) == (3, 384, 1000, 7)
    assert [int(attribute.value.programmaticStreamSerializationAllowed) for attribute in config.attrs] == [1]
    assert kernel == 99 and parameters == bytes(range(16))
    stream.ptr = 0  # CuPy's default stream, whatever the bindings take for theirs
    overlap.launch(types.SimpleNamespace(ptr=99), 3, 384, argument, 1000)
    assert int(launched[-1][0].hStream) == int(driver.CU_STREAM_LEGACY)
    status = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(RuntimeError, match=r"launch of 3 CTAs.*INVALID_VALUE"):
        overlap.launch(types.SimpleNamespace(ptr=99), 3, 384, argument, 1000)
