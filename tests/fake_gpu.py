"""A stand-in for CuPy and the launcher: NumPy memory that says it is on a GPU, so that the CUDA branch runs anywhere.

It has what the package asks of CuPy and nothing else; an array does no arithmetic, so code that would read device data
on the host fails here.
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np

from cuflash import host
from cuflash.problem import Problem

CUDA = 2
"""DLPack's device type."""
MOST_FEATURES = 256
"""More are a valid problem that the launcher does not serve."""


class ndarray:  # the name is CuPy's
    """Metadata and views of an array on a pretended device; of a shape and a dtype an allocation, as in CuPy."""

    def __init__(self, memory: np.ndarray | tuple[int, ...], device: int | np.dtype = 0) -> None:
        if isinstance(memory, tuple):
            memory, device = _allocated(memory, device), Device.current
        self.memory, self.device_id = memory, device

    shape = property(lambda self: self.memory.shape)
    strides = property(lambda self: self.memory.strides)
    dtype = property(lambda self: self.memory.dtype)
    ndim = property(lambda self: self.memory.ndim)
    size = property(lambda self: self.memory.size)
    nbytes = property(lambda self: self.memory.nbytes)
    flags = property(lambda self: types.SimpleNamespace(c_contiguous=self.memory.flags.c_contiguous))
    device = property(lambda self: types.SimpleNamespace(id=self.device_id))
    data = property(lambda self: types.SimpleNamespace(ptr=self.memory.ctypes.data, device_id=self.device_id))

    def reshape(self, shape: tuple[int, ...]) -> ndarray:
        return ndarray(self.memory.reshape(shape, copy=False), self.device_id)

    def transpose(self, axes: tuple[int, ...]) -> ndarray:
        return ndarray(self.memory.transpose(axes), self.device_id)

    def view(self, dtype: Any) -> ndarray:
        return ndarray(self.memory.view(dtype), self.device_id)

    def __getitem__(self, key: Any) -> ndarray:
        return ndarray(self.memory[key], self.device_id)

    def fill(self, value: float) -> None:
        assert Device.current == self.device_id, "work enqueued on another device"
        self.memory.fill(value)


class Device:
    """cupy.cuda.Device as a context."""

    current = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def __enter__(self) -> None:
        self.outer, Device.current = Device.current, self.number

    def __exit__(self, *_: Any) -> None:
        Device.current = self.outer


class runtime:  # the name is CuPy's
    @staticmethod
    def getDevice() -> int:
        return Device.current


class cuda:  # the name is CuPy's
    Device = Device
    runtime = runtime


def _allocated(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Memory filled with ones bits: NaN, unless something is written."""
    memory = np.empty(shape, dtype)
    memory.view(np.uint8 if memory.ndim else f"u{memory.itemsize}").fill(255)
    return memory


def empty(shape: tuple[int, ...] | int, dtype: Any) -> ndarray:
    return ndarray(_allocated(shape, dtype), Device.current)


def zeros(shape: tuple[int, ...] | int, dtype: Any) -> ndarray:
    return ndarray(np.zeros(shape, dtype), Device.current)


def copyto(to: ndarray, x: ndarray) -> None:
    to.memory[...] = x.memory


def from_dlpack(x: Any) -> ndarray:
    """Take in an ``Exporter``."""
    return ndarray(np.from_dlpack(HostProducer(x.__dlpack__(stream=1))), x.__dlpack_device__()[1])


def asarray(x: Any) -> ndarray:
    """Take in an object with ``__cuda_array_interface__``."""
    interface = x.__cuda_array_interface__
    return ndarray(np.asarray(types.SimpleNamespace(__array_interface__=interface)), 0)


class HostProducer:
    """A DLPack capsule on the host."""

    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule


class Exporter:
    """An array of another library, on any DLPack device."""

    def __init__(self, memory: np.ndarray, device: tuple[int, int] = (1, 0)) -> None:
        self.memory, self.device, self.dtype = memory, device, memory.dtype

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.memory.__dlpack__()


class Launcher:
    """cuflash.launch, computing with the host backend. It records the operations it was asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.workspaces: list[Any] = []

    def check(self, problem: Problem, operation: str) -> None:
        if problem.d > MOST_FEATURES:
            raise NotImplementedError(f"{operation} takes at most {MOST_FEATURES} features, d = {problem.d}")

    def workspace_nbytes(self, problem: Problem, operation: str) -> int:
        return {"attention": 16, "attention_lse": 32, "attention_backward": 64}[operation]

    def forward(self, problem: Problem, *args: Any) -> None:
        *given, workspace, _ = args
        self._enter("forward", problem, given, workspace)
        q, k, v, key_bias, o, lse = given
        inner = dict(zip(("q", "k", "v", "key_bias"), problem.inner_inputs(q, k, v, key_bias), strict=True))
        self._check_inner(problem, inner)
        assert (v is None) == (o is None) == (not problem.has_value)
        assert o is not None or lse is not None
        inner["v"] = _batched(problem, inner["v"])
        results = problem.split_heads(o, 2), problem.split_heads(lse, 1)
        for like, given_result, result in zip((problem.o, problem.lse), (o, lse), results, strict=True):
            assert result is None or _same_steps(result, problem.inner_strides(like, given_result.strides))
        arrays = map(memory, (*inner.values(), *results))
        host.forward(*arrays, scale=problem.scale, band=problem.band, softcap=problem.softcap)

    def backward(self, problem: Problem, *args: Any) -> None:
        *inner, workspace, _ = args
        self._enter("backward", problem, inner, workspace)
        q, k, v, key_bias, do, o, _, dlse, *_ = inner
        self._check_inner(problem, {"q": q, "k": k, "v": v, "key_bias": key_bias})
        assert (v is None) == (do is None) == (o is None) == (not problem.has_value)
        assert do is not None or dlse is not None
        inner[2] = _batched(problem, v)
        host.backward(*map(memory, inner), scale=problem.scale, band=problem.band, softcap=problem.softcap)

    def merge(self, os: Any, lses: Any, o: ndarray, lse: ndarray) -> None:
        self.calls.append("merge")
        assert (type(os) is ndarray) == (type(lses) is ndarray)
        parts = (xs.memory if type(xs) is ndarray else [x.memory for x in xs] for xs in (os, lses))
        host.merge(*parts, o.memory, lse.memory)

    def _enter(self, operation: str, problem: Problem, inner: list[Any], workspace: Any) -> None:
        self.calls.append(operation)
        self.workspaces.append(workspace)
        assert Device.current == problem.device, "launched on another device"
        assert all(x is None or x.device_id == problem.device for x in inner)

    def _check_inner(self, problem: Problem, inner: dict[str, Any]) -> None:
        """The metadata of the problem are those of the inner arrays."""
        batches = (problem.q_batch, problem.k_batch, problem.v_batch, problem.bias_batch)
        strides = (problem.q_strides, problem.k_strides, problem.v_strides, problem.bias_strides)
        for (name, x), batch, steps in zip(inner.items(), batches, strides, strict=True):
            assert (x is None) == (batch is None) == (steps is None), name
            if x is not None:
                assert x.shape[: len(batch)] == batch
                assert np.broadcast_shapes(batch, problem.inner_batch) == problem.inner_batch
                assert _same_steps(x, steps), name


def _same_steps(x: ndarray, strides: tuple[int, ...]) -> bool:
    """Whether an array has these strides, where there is something to step along."""
    return all(s == t for s, t, length in zip(x.strides, strides, x.shape, strict=True) if length > 1)


def _batched(problem: Problem, v: ndarray | None) -> ndarray:
    """v, or where there is none an array without features: the host takes the batch from the shapes of its inputs."""
    return ndarray(np.empty((*problem.inner_batch, problem.n, 0), np.float32), problem.device) if v is None else v


def memory(x: Any) -> Any:
    return None if x is None else x.memory
