"""Calls of the public functions on either backend, held to dense float64."""

from __future__ import annotations

import functools
import re
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import gpu_cases
import numpy as np
import pytest
import recording
import reference
from backends import GPU, HOST, Backend, Layout, Placed, acc_dtype, dtype_of, place, place_hole, put, same_bits
from gpu_cases import Case

import cuflash
from cuflash import compile, devices, plan_sm90, tiles

unit_roundoff = reference.unit_roundoff
both = pytest.mark.parametrize("backend", [HOST, pytest.param(GPU, marks=pytest.mark.gpu)], ids=["host", "gpu"])
both_dtypes = pytest.mark.parametrize(
    ("backend", "dtype"),
    [pytest.param(HOST, dtype, id=f"host-{dtype}") for dtype in HOST.dtypes]
    + [pytest.param(GPU, dtype, id=f"gpu-{dtype}", marks=pytest.mark.gpu) for dtype in GPU.dtypes],
)
"""Parameters of a test that runs on both backends, and with every dtype of each."""


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> None:
    """Every kernel that the tests can reach on this GPU, compiled in processes before the first one is used."""
    if not recording.gpu_missing():
        _compile_kernels()


@functools.cache
def _compile_kernels() -> None:
    target = gpu_cases.target()
    families = dict.fromkeys((*tiles.families(target), "sm75"))
    errors = compile.compile_all(variant for family in families for variant in tiles.variants(target, family))
    assert not errors, str(errors[0])


TILE = (64, 64)
"""Tile of the host specification when it stands for a kernel: a middling one of the tables."""
MMA_DEPTH = {"sm90": 16, "sm80": 16, "sm75": 8}


def tf32_chains() -> tuple[int, int]:
    """Steps of the chains in which tensor cores sum floats, as gemm_tf32.cuh has them."""
    text = (compile.kernels_dir() / "include" / "gemm_tf32.cuh").read_text()
    found = re.search(r"constexpr int kChain = (\d+), kShortChain = (\d+);", text)
    assert found, "gemm_tf32.cuh names its chains otherwise: look at the budgets"
    return int(found[1]), int(found[2])


def arithmetic(dtype: str, family: str, precision: str | None = None) -> reference.Arithmetic | None:
    """How kernels multiply float32 or float64; None for 16 bits."""
    if tiles.kind(dtype) == "16 bits":
        return None
    return reference.arithmetic(dtype, family, precision, tf32_chains())


def rounding(backend: Backend, dtype: str, n: int = 64) -> float:
    """What may be between two averages of n values that are rounded in other orders, relative to the largest value.

    Results of 16 bits hide how the sum was made. Kernels of the others sum as `reference.arithmetic` says, and lanes
    add up a quarter of the row's p one after the other.
    """
    u = unit_roundoff(dtype_of(dtype))
    if backend is HOST or tiles.kind(dtype) == "16 bits":
        return 4 * u
    family = tiles.best_family(gpu_cases.target())
    products = arithmetic(dtype, family)
    assert products is not None
    return 4 * u + 2 * (products.total(n) + n / 4 * u)


def need_features(d: int, dtype: str, family: str | None = None) -> None:
    """Skip what the kernels of a family do not serve on this GPU; test_launch.py holds what they must."""
    family = family or tiles.best_family(gpu_cases.target())
    if d > gpu_cases.most_features(dtype, family):
        pytest.skip(f"{family} has no gradients of {d} features in {dtype} here")


@contextmanager
def planned_anew(*cached: Any) -> Iterator[None]:
    """With decisions of the launcher patched: nothing is taken from before, nor kept for after."""
    for function in cached:
        function.cache_clear()
    try:
        yield
    finally:
        for function in cached:
            function.cache_clear()


@contextmanager
def fused() -> Iterator[list[str]]:
    """Make the launcher take the kernel for all gradients also for problems too small to gain from it.

    Yields the operations of the kernels that are launched meanwhile.
    """
    launch = cuflash.calls.launcher()
    launched: list[str] = []
    plans = planned_anew(launch._plan_backward, plan_sm90.backward)
    with plans, pytest.MonkeyPatch.context() as patch:
        run = launch.enqueue

        def recorded(plan: Any, *more: Any) -> None:
            launched.extend(kernel.variant.operation for kernel in plan)
            run(plan, *more)

        patch.setattr(launch, "enqueue", recorded)
        patch.setattr(devices, "multiprocessors", lambda device: 1)
        yield launched


def finite(results: Iterable[np.ndarray | None]) -> bool:
    """Whether no array has an inf or a nan."""
    return all(np.isfinite(x.astype(np.float64)).all() for x in results if x is not None)


class Results(NamedTuple):
    """Results of both passes as NumPy arrays; None where a call has no such result."""

    o: Any = None
    lse: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None
    dkey_bias: Any = None


@dataclass(frozen=True)
class Expected:
    """What a result must be, and how far from it it may be: within ``limit * bound``."""

    name: str
    value: np.ndarray
    bound: float
    limit: float

    def check(self, got: np.ndarray) -> None:
        """Fail unless ``got``, which may repeat the value along leading axes, is within the budget."""
        assert got.shape[got.ndim - self.value.ndim :] == self.value.shape, f"{self.name}: {got.shape}"
        excess = reference.excess(got, np.broadcast_to(self.value, got.shape), self.bound, self.limit)
        assert excess <= 0, f"{self.name} is off by {excess:.3g} more than {self.limit:.3g} * {self.bound:.3g}"


def expect(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray | None = None,
    do: np.ndarray | None = None,
    dlse: np.ndarray | None = None,
    *,
    on_host: bool = False,
    family: str = "sm80",
    **options: Any,
) -> dict[str, Expected]:
    """Results of a call by dense float64 with the budget of a kernel (of the host specification: ``on_host``)."""
    dense = reference.dense(q, k, v, **options)
    exact: dict[str, Any] = {"o": dense.o, "lse": dense.lse}
    if do is not None or dlse is not None:
        names = ("dq", "dk", "dv", "dkey_bias")
        exact |= zip(names, reference.gradients(do, q, k, v, dlse=dlse, **options), strict=True)
    measure = reference.bounds(do, q, k, v, dlse=dlse, **options)
    if on_host:
        unrounded = reference.budget(acc_dtype(q.dtype.name), dense.max_abs_score)
        # A gradient starts from the rounded o and is rounded itself; lse and dkey_bias are not rounded.
        rounded = reference.budget(q.dtype, dense.max_abs_score) + unit_roundoff(q.dtype)
        limits = {name: unrounded if name == "lse" else rounded for name in exact}
    else:
        with np.errstate(invalid="ignore"):  # lse of rows without a key: -inf less -inf
            products = arithmetic(q.dtype.name, family, options.get("precision"))
            found = reference.kernel_budget(
                do, q, k, v, dlse=dlse, tile=TILE, mma_depth=MMA_DEPTH[family], more_steps=int(family == "sm90"),
                products=products, **options,
            ).present()  # fmt: skip
        # Where e is 0 or v is absent there is no o to speak of, and no error of it.
        limits = {name: found.get(name, 0.0) for name in exact}
    return {
        name: Expected(name, value, getattr(measure, name) or 0.0, limits[name])
        for name, value in exact.items()
        if value is not None and not (name in ("o", "dv") and v is None)
    }


def run(
    backend: Backend,
    q: Any,
    k: Any,
    v: Any,
    do: np.ndarray | None = None,
    dlse: np.ndarray | None = None,
    *,
    layouts: Mapping[str, Layout] | None = None,
    **options: Any,
) -> Results:
    """Forward, and backward where there is do or dlse. NumPy inputs are placed as ``layouts`` says."""
    where = layouts or {}

    def there(name: str, x: Any) -> Any:
        if not isinstance(x, np.ndarray) or (backend is HOST and name not in where):
            return x
        return put(backend, x, where.get(name))

    q, k, v, do, dlse = (there(*pair) for pair in (("q", q), ("k", k), ("v", v), ("do", do), ("dlse", dlse)))
    if options.get("key_bias") is not None:
        options["key_bias"] = there("key_bias", options["key_bias"])
    if do is None and dlse is None:
        results = cuflash.attention(q, k, v, return_lse=True, **options)
        return Results(*map(backend.get, results))
    (o, lse), vjp = cuflash.attention_vjp(q, k, v, return_lse=True, **options)
    return Results(*map(backend.get, (o, lse, *vjp(do, dlse=dlse))))


def check(
    backend: Backend,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    do: np.ndarray | None = None,
    dlse: np.ndarray | None = None,
    *,
    layouts: Mapping[str, Layout] | None = None,
    family: str = "sm80",
    deterministic: bool = True,
    **options: Any,
) -> Results:
    """``run``, with every result held to dense float64."""
    got = run(backend, q, k, v, do, dlse, layouts=layouts, deterministic=deterministic, **options)
    for name, expected in expect(q, k, v, do, dlse, on_host=backend is HOST, family=family, **options).items():
        expected.check(getattr(got, name))
    return got


# --- drawn cases -------------------------------------------------------------------------------------------------


@dataclass
class Call:
    """A drawn case, placed in a backend's memory."""

    backend: Backend
    case: Case
    values: dict[str, np.ndarray]
    inputs: dict[str, Placed]

    @classmethod
    def of(cls, backend: Backend, case: Case) -> Call:
        values = case.arrays()
        return cls(backend, case, values, {n: place(backend, x, case.layout(n)) for n, x in values.items()})

    def __getitem__(self, name: str) -> Any:
        return self.inputs[name].array

    @property
    def options(self) -> dict[str, Any]:
        """Options as the functions take them, key_bias included."""
        return self.case.options | ({"key_bias": self["key_bias"]} if "key_bias" in self.inputs else {})

    @property
    def reference_options(self) -> dict[str, Any]:
        return self.case.options | ({"key_bias": self.values["key_bias"]} if "key_bias" in self.values else {})

    def hole(self, name: str) -> Placed:
        """Room for a result, where the case places it."""
        case = self.case
        shapes = {"o": case.o, "lse": case.lse, "dq": case.q, "dk": case.k, "dv": case.v, "dkey_bias": case.key_bias}
        shape = shapes[name]
        assert shape is not None
        dtype = acc_dtype(case.dtype) if name in ("lse", "dkey_bias") else self.values["q"].dtype
        return place_hole(self.backend, shape, dtype, case.layout(name))

    def finish(self, results: dict[str, Placed], returned: tuple[Any, ...]) -> dict[str, np.ndarray]:
        """Results as NumPy arrays, once nothing but them has been written."""
        for placed, array in zip(results.values(), (x for x in returned if x is not None), strict=True):
            assert array is placed.array, "out= is not what was returned"
            placed.check_guards()
        for placed in self.inputs.values():
            placed.check_unchanged()
        return {name: self.backend.get(placed.array) for name, placed in results.items()}


def check_forward(backend: Backend, case: Case, family: str | Callable[[], str]) -> None:
    """o and lse of a drawn case, written through ``out=`` into guarded memory, with dirty scratch.

    ``family`` may be asked once the call is done.
    """
    call = Call.of(backend, case)
    q, k, v = call["q"], call["k"], call["v"]
    results = {"o": call.hole("o"), "lse": call.hole("lse")}
    scratch = backend.empty_bytes(cuflash.workspace_nbytes("attention", q, k, v, **call.options))
    returned = cuflash.attention(
        q, k, v, return_lse=True, out=tuple(r.array for r in results.values()), workspace=scratch, **call.options
    )
    got = call.finish(results, returned)
    x = call.values
    family = family() if callable(family) else family
    wanted = expect(x["q"], x["k"], x["v"], family=family, on_host=backend is HOST, **call.reference_options)
    for name, array in got.items():
        wanted[name].check(array)
    if case.seed % 8 == 0:  # alone, o is the same
        assert same_bits(backend.get(cuflash.attention(q, k, v, **call.options)), got["o"])


def check_backward(
    backend: Backend, case: Case, family: str, need: tuple[str, ...] | None, has_do: bool, has_dlse: bool, **more: Any
) -> None:
    """The gradients that are asked for, from do, dlse or both."""
    call = Call.of(backend, case)
    q, k, v = call["q"], call["k"], call["v"]
    options = call.options | more
    o, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    inputs = ("q", "k", "v") + (("key_bias",) if case.key_bias is not None else ())
    need = None if need is None else tuple(name for name in need if name in inputs)
    results = {f"d{name}": call.hole(f"d{name}") for name in inputs if need is None or name in need}
    outs = tuple(results[f"d{name}"].array if f"d{name}" in results else None for name in inputs)
    scratch = backend.empty_bytes(cuflash.workspace_nbytes("attention_backward", q, k, v, **options))
    do, dlse = call["do"] if has_do else None, call["dlse"] if has_dlse else None
    returned = cuflash.attention_backward(
        do, q, k, v, o, lse, dlse=dlse, need=need, out=outs, workspace=scratch, **options
    )
    assert [x is None for x in returned] == [x is None for x in outs]
    got = call.finish(results, returned)
    x = call.values
    do_values, dlse_values = x["do"] if has_do else None, x["dlse"] if has_dlse else None
    wanted = expect(
        x["q"], x["k"], x["v"], do_values, dlse_values,
        family=family, on_host=backend is HOST, **call.reference_options,
    )  # fmt: skip
    for name, array in got.items():
        wanted[name].check(array)


def check_lse(backend: Backend, case: Case, family: str) -> None:
    """attention_lse of a drawn case, whose values are left out, and its gradients."""
    call = Call.of(backend, case)
    x, options = call.values, call.options
    shape = reference.dense(x["q"], x["k"], **call.reference_options).lse.shape
    dlse = np.random.default_rng(case.seed + 1).standard_normal(shape).astype(acc_dtype(case.dtype))
    q, k, room = call["q"], call["k"], place_hole(backend, shape, dlse.dtype)
    scratch = backend.empty_bytes(cuflash.workspace_nbytes("attention_lse", q, k, **options))
    lse = cuflash.attention_lse(q, k, out=room.array, workspace=scratch, **options)
    assert lse is room.array
    room.check_guards()
    again, vjp = cuflash.attention_lse_vjp(q, k, **options)
    assert same_bits(backend.get(again), backend.get(lse))
    names = ("dq", "dk") + (("dkey_bias",) if case.key_bias is not None else ())
    got = dict(zip(names, map(backend.get, vjp(put(backend, dlse))), strict=True)) | {"lse": backend.get(lse)}
    wanted = expect(x["q"], x["k"], dlse=dlse, family=family, on_host=backend is HOST, **call.reference_options)
    for name, array in got.items():
        wanted[name].check(array)


# --- memory ------------------------------------------------------------------------------------------------------


class Memory:
    """Bytes in use beyond those at the start: now at the most."""

    peak = 0


@contextmanager
def measured(backend: Backend) -> Iterator[Memory]:
    """Measure what is allocated inside the block."""
    memory = Memory()
    if backend is HOST:
        tracemalloc.start()
        try:
            yield memory
            memory.peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        return
    cupy = backend.xp
    pool = cupy.cuda.MemoryPool()

    def malloc(size: int) -> Any:
        block = pool.malloc(size)
        memory.peak = max(memory.peak, pool.used_bytes())
        return block

    with cupy.cuda.using_allocator(malloc):
        yield memory
