"""The public functions on the host and, through a stand-in for CuPy, along the CUDA branch: what they accept, what they
return, and where it lies in memory. How exact results are is the matter of test_host.py and test_gpu.py.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fake_gpu
import ml_dtypes
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import calls

OPTS: dict[str, Any] = {
    "causal": False,
    "align": None,
    "window": None,
    "softcap": None,
    "key_bias": None,
    "scale": None,
    "grouped_heads": False,
    "precision": None,
    "deterministic": True,
}
SIGNATURES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "attention": (["q", "k", "v"], {"return_lse": False, "out": None, "workspace": None}),
    "attention_vjp": (["q", "k", "v"], {"return_lse": False, "need": None}),
    "attention_backward": (
        ["do", "q", "k", "v", "o", "lse"],
        {"dlse": None, "need": None, "out": None, "workspace": None},
    ),
    "attention_lse": (["q", "k"], {"out": None, "workspace": None}),
    "attention_lse_vjp": (["q", "k"], {"need": None}),
    "workspace_nbytes": (["operation", "q", "k", "v"], {}),
}


@dataclass
class Backend:
    """Arrays of one kind, and how to see their values."""

    name: str
    launcher: fake_gpu.Launcher | None

    def put(self, x: Any, device: int = 0) -> Any:
        return x if self.launcher is None or x is None else fake_gpu.ndarray(x, device)

    def get(self, x: Any) -> Any:
        if self.launcher is None or x is None:
            assert x is None or type(x) is np.ndarray
            return x
        assert type(x) is fake_gpu.ndarray
        return x.memory

    def put_all(self, *xs: Any) -> list[Any]:
        return [self.put(x) for x in xs]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Backend:
    launcher = fake_gpu.Launcher()
    monkeypatch.setitem(sys.modules, "cupy", sys.modules[fake_gpu.__name__])
    monkeypatch.setattr(calls, "launcher", lambda: launcher)
    return Backend("fake gpu", launcher)


@pytest.fixture(params=["host", "fake gpu"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return Backend("host", None) if request.param == "host" else request.getfixturevalue("gpu")


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    x: np.ndarray = np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)
    return x


def close(x: Any, expected: Any) -> bool:
    """Within float32 rounding of small problems; shapes must be equal."""
    return x.shape == expected.shape and np.allclose(x, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    parameters = inspect.signature(getattr(cuflash, name)).parameters
    positional, extra = SIGNATURES[name]
    assert list(parameters) == [*positional, *OPTS, *extra]
    for parameter, p in parameters.items():
        expected = p.POSITIONAL_ONLY if parameter in positional else p.KEYWORD_ONLY
        assert p.kind == expected
        if parameter not in positional:
            assert p.default == (OPTS | extra)[parameter]


def test_signatures_of_the_rest() -> None:
    assert str(inspect.signature(cuflash.attention_merge)).startswith("(os: ")
    assert list(inspect.signature(cuflash.attention_merge).parameters) == ["os", "lses", "out"]
    assert set(typing.get_type_hints(cuflash.Options)) == set(OPTS)
    others = {"attention_merge", "lineage", "memory_traffic", "CompileError", "Options", "Vjp", "LseVjp"}
    assert set(cuflash.__all__) == {*SIGNATURES, *others}


@pytest.mark.parametrize("function", [cuflash.attention, cuflash.attention_vjp])
def test_types_follow_return_lse(function: Any) -> None:
    by_value = {}
    for overload in typing.get_overloads(function):
        hints = typing.get_type_hints(overload)
        result = hints["return"]
        if function is cuflash.attention_vjp:
            result, vjp = typing.get_args(result)
            assert vjp is cuflash.Vjp
        by_value[hints["return_lse"]] = result
    pair = tuple[Any, Any]
    assert by_value == {typing.Literal[False]: Any, typing.Literal[True]: pair, bool: Any | pair}


CASES: dict[str, dict[str, Any]] = {
    "2-D": {"q": (3, 4), "k": (5, 4), "v": (5, 6)},
    "batch": {"q": (2, 3, 4), "k": (2, 5, 4), "v": (2, 5, 6)},
    "broadcast": {"q": (2, 1, 3, 4), "k": (7, 5, 4), "v": (1, 5, 6), "key_bias": (2, 1, 5)},
    "q alone broadcasts": {"q": (3, 4), "k": (2, 7, 5, 4), "v": (7, 5, 6)},
    "v has the batch": {"q": (3, 4), "k": (5, 4), "v": (2, 5, 6)},
    "key_bias has the batch": {"q": (3, 4), "k": (5, 4), "v": (5, 6), "key_bias": (3, 2, 5)},
    "causal": {"q": (2, 5, 4), "k": (2, 5, 4), "v": (2, 5, 3), "causal": True},
    "causal, empty rows": {"q": (5, 4), "k": (2, 4), "v": (2, 6), "causal": True, "align": "bottom-right"},
    "window": {"q": (7, 4), "k": (5, 4), "v": (5, 6), "window": (1, None), "align": -1},
    "terms": {"q": (3, 4), "k": (5, 4), "v": (5, 6), "key_bias": (5,), "softcap": 0.7, "scale": -1.5},
    "grouped": {"q": (2, 6, 3, 4), "k": (2, 2, 5, 4), "v": (2, 5, 6), "grouped_heads": True},
    "grouped, bias": {"q": (6, 3, 4), "k": (2, 5, 4), "v": (2, 5, 6), "key_bias": (4, 6, 5), "grouped_heads": True},
    "grouped, one bias": {"q": (6, 3, 4), "k": (2, 5, 4), "v": (2, 5, 6), "key_bias": (4, 1, 5), "grouped_heads": True},
    "grouped by one": {"q": (2, 3, 4), "k": (2, 5, 4), "v": (2, 5, 6), "key_bias": (5,), "grouped_heads": True},
    "v has the batch and no features": {"q": (2, 3, 4), "k": (2, 5, 4), "v": (3, 2, 5, 0), "key_bias": (5,)},
}


def case(name: str) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Inputs q, k, v, and options."""
    options = dict(CASES[name])
    inputs = [normal(*options.pop(x), seed=i) for i, x in enumerate(("q", "k", "v"))]
    if "key_bias" in options:
        options["key_bias"] = normal(*options["key_bias"], seed=3)
    return inputs, options


def on(backend: Backend, options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "key_bias": backend.put(options.get("key_bias"))}


@pytest.mark.parametrize("name", CASES)
def test_forward(name: str, backend: Backend) -> None:
    inputs, options = case(name)
    o, lse = cuflash.attention(*backend.put_all(*inputs), return_lse=True, **on(backend, options))
    expected_o, expected_lse = reference.attention(*inputs, **options)
    assert close(backend.get(o), expected_o)
    assert close(backend.get(lse), expected_lse)
    assert backend.get(o).dtype == backend.get(lse).dtype == np.float32
    alone = cuflash.attention(*backend.put_all(*inputs), **on(backend, options))
    assert (backend.get(alone) == backend.get(o)).all()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("given", ["do", "dlse", "both"])
def test_gradients(name: str, given: str, backend: Backend) -> None:
    inputs, options = case(name)
    (o, lse), vjp = cuflash.attention_vjp(*backend.put_all(*inputs), return_lse=True, **on(backend, options))
    do = normal(*o.shape, seed=4) if given != "dlse" else None
    dlse = normal(*lse.shape, seed=5) if given != "do" else None
    before = [x.copy() for x in inputs]
    gradients = vjp(backend.put(do), dlse=backend.put(dlse))
    expected = reference.gradients(do, *inputs, dlse=dlse, **options)
    assert len(gradients) == 4 if "key_bias" in options else 3
    for gradient, x, wanted in zip(gradients, (*inputs, options.get("key_bias")), expected, strict=False):
        assert backend.get(gradient).dtype == x.dtype
        assert close(backend.get(gradient), wanted)
    again = cuflash.attention_backward(
        *(backend.put(do), *backend.put_all(*inputs), o, lse), dlse=backend.put(dlse), **on(backend, options)
    )
    for one, other in zip(gradients, again, strict=True):
        assert (backend.get(one) == backend.get(other)).all()
    assert all((x == y).all() for x, y in zip(inputs, before, strict=True))


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("v ")])
def test_lse(name: str, backend: Backend) -> None:
    (q, k, _), options = case(name)
    expected = reference.attention(q, k, **options)[1]
    assert close(backend.get(cuflash.attention_lse(*backend.put_all(q, k), **on(backend, options))), expected)
    lse, vjp = cuflash.attention_lse_vjp(*backend.put_all(q, k), **on(backend, options))
    dlse = normal(*lse.shape, seed=5)
    gradients = vjp(backend.put(dlse))
    wanted = [x for x in reference.gradients(None, q, k, dlse=dlse, **options) if x is not None]
    assert [x.shape for x in gradients] == [x.shape for x in (q, k, options.get("key_bias")) if x is not None]
    assert close(backend.get(lse), expected)
    assert all(close(backend.get(x), y) for x, y in zip(gradients, (wanted[0], wanted[1], wanted[-1]), strict=False))


def test_one_dict_serves_all(backend: Backend) -> None:
    q, k, v = backend.put_all(normal(4, 6, 8), normal(2, 6, 8), normal(2, 6, 8))
    options: cuflash.Options = {
        "causal": True,
        "align": "top-left",
        "window": (3, None),
        "softcap": 5.0,
        "key_bias": backend.put(normal(4, 6)),
        "scale": 0.3,
        "grouped_heads": True,
        "precision": "tf32",
        "deterministic": False,
    }
    o, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    (o2, lse2), vjp = cuflash.attention_vjp(q, k, v, return_lse=True, **options)
    assert (backend.get(o) == backend.get(o2)).all()
    assert (backend.get(lse) == backend.get(lse2)).all()
    assert (backend.get(lse) == backend.get(cuflash.attention_lse(q, k, **options))).all()
    assert len(vjp(o)) == len(cuflash.attention_backward(o, q, k, v, o, lse, **options)) == 4
    assert len(cuflash.attention_lse_vjp(q, k, **options)[1](lse)) == 3
    assert cuflash.workspace_nbytes("attention", q, k, v, **options) == (0 if backend.name == "host" else 16)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Inputs q, k, v in float64 and options; batch axes broadcast in every way, any length may be 0."""
    m, n, e = (draw(st.integers(0, 5)) for _ in range(3))
    d, group, kv_heads = (draw(st.integers(1, 4)) for _ in range(3))
    grouped = draw(st.booleans())
    batch = draw(st.lists(st.integers(0, 3), max_size=3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def shape(*core: int, heads: tuple[int, ...] = ()) -> tuple[int, ...]:
        own = [draw(st.sampled_from([length, 1])) for length in batch]
        return (*own[draw(st.integers(0, len(own))) :], *heads, *core)

    q_heads, k_heads = ((group * kv_heads,), (kv_heads,)) if grouped else ((), ())
    shapes = shape(m, d, heads=q_heads), shape(n, d, heads=k_heads), shape(n, e, heads=k_heads)
    key_bias = None
    if draw(st.booleans()):
        key_bias = rng.standard_normal(shape(n, heads=draw(st.sampled_from([q_heads, (1,) * grouped]))))
        key_bias[rng.random(key_bias.shape) < 0.2] = -np.inf
    sides = st.none() | st.integers(0, 6)
    options = {
        "causal": draw(st.booleans()),
        "align": draw(st.sampled_from(["top-left", "bottom-right"]) | st.integers(-6, 6)),
        "window": draw(st.none() | st.tuples(sides, sides)),
        "softcap": draw(st.none() | st.floats(0.1, 10)),
        "key_bias": key_bias,
        "scale": draw(st.none() | st.floats(-3, 3)),
        "grouped_heads": grouped,
    }
    return [rng.standard_normal(x) for x in shapes], options


@settings(max_examples=150)
@given(problems(), st.sampled_from(["do", "dlse", "both"]))
def test_any_problem(drawn: tuple[list[np.ndarray], dict[str, Any]], given: str) -> None:
    inputs, options = drawn
    (o, lse), vjp = cuflash.attention_vjp(*inputs, return_lse=True, **options)
    expected_o, expected_lse = reference.attention(*inputs, **options)
    np.testing.assert_allclose(o, expected_o, rtol=1e-11, atol=1e-11, strict=True)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-11, atol=1e-11, strict=True)
    do = normal(*o.shape, seed=1, dtype=np.float64) if given != "dlse" else None
    dlse = normal(*lse.shape, seed=2, dtype=np.float64) if given != "do" else None
    expected = reference.gradients(do, *inputs, dlse=dlse, **options)
    for gradient, wanted in zip(vjp(do, dlse=dlse), expected, strict=False):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-10, atol=1e-10, strict=True)


EMPTY_SHAPES = [
    ((0, 4), (5, 4), (5, 6)),
    ((3, 4), (0, 4), (0, 6)),
    ((0, 3, 4), (5, 4), (5, 6)),
    ((3, 4), (0, 5, 4), (0, 5, 6)),
    ((0, 4), (0, 4), (0, 0)),
    ((3, 4), (0, 4), (0, 0)),
]


@pytest.mark.parametrize("shapes", EMPTY_SHAPES)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_empty(shapes: tuple[tuple[int, ...], ...], dtype: Any, backend: Backend) -> None:
    q, k, v = (normal(*shape, dtype=dtype) for shape in shapes)
    key_bias = normal(k.shape[-2])
    (o, lse), vjp = cuflash.attention_vjp(
        *backend.put_all(q, k, v), key_bias=backend.put(key_bias), return_lse=True, causal=True, align="bottom-right"
    )
    batch = np.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    assert o.shape == (*batch, q.shape[-2], v.shape[-1])
    assert lse.shape == o.shape[:-1]
    assert (backend.get(o) == 0).all()
    assert (backend.get(lse) == -np.inf).all()
    do, dlse = normal(*o.shape, dtype=dtype), normal(*lse.shape)
    for gradient, x in zip(vjp(backend.put(do), dlse=backend.put(dlse)), (q, k, v, key_bias), strict=True):
        assert backend.get(gradient).shape == x.shape
        assert backend.get(gradient).dtype == x.dtype
        assert (backend.get(gradient) == 0).all()
    assert backend.launcher is None or not backend.launcher.calls


def test_nothing_is_computed_that_is_not_wanted(backend: Backend) -> None:
    q, k, v = backend.put_all(normal(3, 4), normal(5, 4), normal(5, 6))
    key_bias = backend.put(normal(5))
    _, vjp = cuflash.attention_vjp(q, k, v, key_bias=key_bias, need=["v", "key_bias"])
    do, dlse = backend.put(normal(3, 6)), backend.put(normal(3))
    dq, dk, dv, dkey_bias = vjp(do)
    assert dq is None
    assert dk is None
    assert (dv.shape, dkey_bias.shape) == ((5, 6), (5,))
    if backend.launcher is not None:
        backend.launcher.calls.clear()
    assert cuflash.attention_vjp(q, k, v, need=())[1](do) == (None, None, None)
    (_, _, dv) = cuflash.attention_vjp(q, k, v, need={"v"})[1](dlse=dlse)
    assert (backend.get(dv) == 0).all()
    empty = backend.put(normal(5, 0))
    assert cuflash.attention(q, k, empty).shape == (3, 0)
    dq, dk, dv = cuflash.attention_vjp(q, k, empty)[1](backend.put(normal(3, 0)))
    assert (backend.get(dq) == 0).all()
    assert (backend.get(dk) == 0).all()
    if backend.launcher is not None:  # the forward passes that a vjp needs, and none else
        assert backend.launcher.calls == ["forward"] * 3


@pytest.mark.parametrize("permutation", list(itertools.permutations(range(3))))
def test_results_lie_in_memory_as_their_inputs_do(permutation: tuple[int, ...], backend: Backend) -> None:
    inverse = np.argsort(permutation)
    q, k, v = (
        normal(*(shape[axis] for axis in permutation), shape[3], seed=i).transpose(*inverse, 3)
        for i, shape in enumerate([(2, 3, 5, 4), (2, 3, 5, 4), (2, 3, 5, 6)])
    )
    (o, lse), vjp = cuflash.attention_vjp(*backend.put_all(q, k, v), return_lse=True)
    do = normal(*o.shape)
    gradients = vjp(backend.put(do))
    for x in map(backend.get, (o, *gradients)):
        assert x.transpose(*permutation, 3).flags.c_contiguous
    assert backend.get(lse).flags.c_contiguous
    assert close(backend.get(o), reference.attention(q, k, v)[0])
    for x, wanted in zip(gradients, reference.gradients(do, q, k, v), strict=False):
        assert close(backend.get(x), wanted)


def test_any_strides(backend: Backend) -> None:
    packed = normal(5, 2, 3, 8)
    q, k, v = (packed[::-1, :, i, ::-2].swapaxes(0, 1) for i in range(3))
    shared = np.broadcast_to(normal(1, 5, 4), (2, 5, 4))
    shared.flags.writeable = False
    for inputs in ((q, k, v), (q, shared, v), (shared, shared, shared)):
        o, vjp = cuflash.attention_vjp(*backend.put_all(*inputs))
        assert close(backend.get(o), reference.attention(*inputs)[0])
        do = np.broadcast_to(np.float32(1), o.shape)
        for x, wanted in zip(vjp(backend.put(do)), reference.gradients(do, *inputs), strict=False):
            assert close(backend.get(x), wanted)


@pytest.mark.parametrize("grouped", [False, True])
def test_out(grouped: bool, backend: Backend) -> None:
    q, k, v = normal(2, 4, 3, 4), normal(2, 2 if grouped else 4, 5, 4), normal(2, 2 if grouped else 4, 5, 6)
    options = {"grouped_heads": grouped, "key_bias": backend.put(normal(4, 5))}
    (o, lse), vjp = cuflash.attention_vjp(*backend.put_all(q, k, v), return_lse=True, **options)
    gradients = vjp(o, dlse=lse)
    results = [o, lse, *gradients]
    # Room with other strides: every second feature, heads and rows swapped, the batch reversed.
    room = [
        np.full(x.shape, np.nan, x.dtype)
        if x.ndim < 4
        else np.full((x.shape[0], x.shape[2], x.shape[1], 2 * x.shape[3]), np.nan, x.dtype).swapaxes(1, 2)[
            ::-1, ..., ::2
        ]
        for x in map(backend.get, results)
    ]
    out = backend.put_all(*room)
    again = cuflash.attention(*backend.put_all(q, k, v), return_lse=True, out=tuple(out[:2]), **options)
    assert again[0] is out[0]
    assert again[1] is out[1]
    again = vjp(o, dlse=lse, out=tuple(out[2:]))
    assert all(x is y for x, y in zip(again, out[2:], strict=True))
    for x, expected in zip(room, results, strict=True):
        assert (x == backend.get(expected)).all()


def test_out_may_be_partial(backend: Backend) -> None:
    q, k, v = backend.put_all(normal(3, 4), normal(5, 4), normal(5, 6))
    expected = cuflash.attention(q, k, v)
    room, lse = np.full((3, 6), np.nan, np.float32), np.full(3, np.nan, np.float32)
    given, given_lse = backend.put_all(room, lse)
    assert cuflash.attention(q, k, v, out=given) is given
    assert (room == backend.get(expected)).all()
    room.fill(np.nan)
    assert cuflash.attention(q, k, v, out=(given,)) is given
    assert (room == backend.get(expected)).all()
    o, _ = cuflash.attention(q, k, v, return_lse=True, out=(None, given_lse))
    assert o is not given
    assert np.isfinite(lse).all()
    assert cuflash.attention_lse(q, k, out=given_lse) is given_lse
    dq, dk, dv = cuflash.attention_vjp(q, k, v, need=("k",))[1](expected, out=(None, backend.put(normal(5, 4)), None))
    assert (dq, dv) == (None, None)
    assert np.isfinite(backend.get(dk)).all()


def test_workspace_is_handed_on(backend: Backend) -> None:
    q, k, v = backend.put_all(normal(3, 4), normal(5, 4), normal(5, 6))
    for operation, nbytes in (("attention", 16), ("attention_lse", 32), ("attention_backward", 64)):
        needed = cuflash.workspace_nbytes(operation, q, k, v)
        assert needed == (0 if backend.name == "host" else nbytes)
    workspace = backend.put(np.zeros(64, np.uint8))
    o, lse = cuflash.attention(q, k, v, return_lse=True, workspace=workspace)
    cuflash.attention_lse(q, k, workspace=workspace)
    cuflash.attention_backward(o, q, k, v, o, lse, workspace=workspace)
    cuflash.attention_vjp(q, k, v)[1](o, workspace=workspace)
    cuflash.attention_lse_vjp(q, k)[1](lse, workspace=workspace)
    if backend.launcher is not None:
        handed = [x for x in backend.launcher.workspaces if x is not None]
        assert len(handed) == 5
        assert all(x is workspace for x in handed)
    assert cuflash.workspace_nbytes("attention", q, k[:0], v[:0]) == 0
    assert cuflash.workspace_nbytes("attention_backward", q, k) == (0 if backend.name == "host" else 64)


def test_the_device_of_the_arrays_is_used_and_the_callers_restored(gpu: Backend) -> None:
    q, k, v = (gpu.put(normal(3, 4, seed=i), device=1) for i in range(3))
    (o, lse), vjp = cuflash.attention_vjp(q, k, v, return_lse=True)
    merged = cuflash.attention_merge([o, o], [lse, lse])
    results = [o, lse, *vjp(o), *merged, *cuflash.attention_vjp(q, k[:0], v[:0])[1](o)]
    assert all(x.device_id == 1 for x in results)
    assert fake_gpu.Device.current == 0


class Bits(fake_gpu.Exporter):
    """A bfloat16 array as other libraries export it: DLPack's own type code, which NumPy refuses."""

    BFLOAT = 4

    def __dlpack__(self, *, stream: Any = None) -> Any:
        import ctypes

        capsule = self.memory.view(np.uint16).__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        ctypes.c_uint8.from_address(pointer(capsule, b"dltensor") + 20).value = self.BFLOAT
        return capsule


@pytest.mark.parametrize(("dtype", "exporter"), [(np.float32, fake_gpu.Exporter), (ml_dtypes.bfloat16, Bits)])
def test_dlpack(dtype: Any, exporter: Any, backend: Backend) -> None:
    q, k, v = (
        normal(2, 3, 4, dtype=dtype),
        normal(2, 5, 4, dtype=dtype).swapaxes(0, 1)[::-1].swapaxes(0, 1),
        normal(5, 6, dtype=dtype),
    )
    device = (1, 0) if backend.launcher is None else (fake_gpu.CUDA, 0)
    o = cuflash.attention(*(exporter(x, device) for x in (q, k, v)))
    expected = cuflash.attention(q, k, v)
    assert backend.get(o).dtype == dtype
    assert (backend.get(o) == expected).all()


def test_pinned_memory_is_on_the_host() -> None:
    q = normal(3, 4)
    o = cuflash.attention(fake_gpu.Exporter(q, (3, 0)), q, q)
    assert type(o) is np.ndarray
    assert (o == cuflash.attention(q, q, q)).all()


def test_cuda_array_interface(gpu: Backend) -> None:
    q = normal(3, 4)
    x = types.SimpleNamespace(__cuda_array_interface__=q.__array_interface__)
    o = cuflash.attention(x, x, x)
    assert (gpu.get(o) == cuflash.attention(q, q, q)).all()


def test_memory_mapped_files(tmp_path: Path) -> None:
    x = normal(3, 4)
    np.save(tmp_path / "x.npy", x)
    q = np.load(tmp_path / "x.npy", mmap_mode="r")
    o = cuflash.attention(q, q, q)
    assert type(o) is np.ndarray
    assert (o == cuflash.attention(x, x, x)).all()
    out = np.lib.format.open_memmap(tmp_path / "o.npy", "w+", np.float32, (3, 4))
    assert cuflash.attention(q, q, q, out=out) is out
    out.flush()
    assert (np.load(tmp_path / "o.npy") == o).all()


@pytest.mark.parametrize("dtype", [">f2", ">f4", ">f8"])
def test_other_byte_order(dtype: str) -> None:
    native = np.dtype(dtype).newbyteorder("=")
    q, k, v = normal(3, 4, dtype=native), normal(5, 4, dtype=native), normal(5, 6, dtype=native)
    expected, vjp = cuflash.attention_vjp(q, k, v)
    o, swapped_vjp = cuflash.attention_vjp(q.astype(dtype), k, v.astype(dtype))
    assert o.dtype == native
    assert (o == expected).all()
    out = np.empty((3, 6), dtype)
    assert cuflash.attention(q, k.astype(dtype), v, out=out) is out
    assert (out == expected).all()
    for x, y in zip(swapped_vjp(o.astype(dtype)), vjp(o), strict=True):
        assert x.dtype == native
        assert (x == y).all()


def test_vjp_may_be_called_again_and_keeps_references(backend: Backend) -> None:
    q, k, v = normal(3, 4), normal(5, 4), normal(5, 6)
    o, vjp = cuflash.attention_vjp(*backend.put_all(q, k, v))
    first, second = vjp(o), vjp(o)
    assert all((backend.get(x) == backend.get(y)).all() for x, y in zip(first, second, strict=True))
    q *= 2
    assert not (backend.get(vjp(o)[1]) == backend.get(first[1])).all()


@pytest.mark.parametrize("stacked", [False, True])
def test_merge(stacked: bool, backend: Backend) -> None:
    q, k, v = normal(2, 3, 4), normal(2, 9, 4), normal(2, 9, 6)
    parts = [cuflash.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 2), slice(2, 3), slice(3, 9))]
    os, lses = ([x[i] for x in parts] for i in range(2))
    if stacked:
        given = backend.put(np.stack(os)), backend.put(np.stack(lses))
    else:
        given = tuple(backend.put_all(*os)), backend.put_all(*lses)
    room = backend.put_all(np.full_like(os[0], np.nan), np.full_like(lses[0], np.nan))
    for out in (None, tuple(room), (None, room[1])):
        o, lse = cuflash.attention_merge(*given, out=out)
        assert out is None or (lse is out[1] and (out[0] is None or o is out[0]))
        assert close(backend.get(o), reference.attention(q, k, v)[0])
        assert close(backend.get(lse), reference.attention(q, k, v)[1])


@pytest.mark.parametrize("which", ["os", "lses"])
def test_merge_of_arrays_that_start_between_two_elements(which: str, gpu: Backend) -> None:
    shapes = {"os": (5, 4), "lses": (5,)}
    whole = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    memory = np.zeros(whole[which].nbytes + 4, np.uint8)[2:][: whole[which].nbytes]
    given = whole | {which: memory.view(np.float32).reshape(shapes[which])}
    with pytest.raises(NotImplementedError, match=rf"{which}\[0\] starts between two elements"):
        cuflash.attention_merge([gpu.put(given["os"])], [gpu.put(given["lses"])])


def test_merge_of_one_stacked_and_one_sequence(backend: Backend) -> None:
    os, lses = normal(3, 2, 5, 4), normal(3, 2, 5)
    o, lse = cuflash.attention_merge(backend.put(os), backend.put_all(*lses))
    expected = cuflash.attention_merge(os, lses)
    assert (backend.get(o) == expected[0]).all()
    assert (backend.get(lse) == expected[1]).all()


def test_merge_keeps_memory_order_and_handles_empty(backend: Backend) -> None:
    part = normal(2, 5, 3, 4).swapaxes(1, 2)
    o, lse = cuflash.attention_merge([backend.put(part)], [backend.put(normal(2, 3, 5))])
    assert (backend.get(o) == part).all()
    assert o.strides == part.strides
    assert backend.get(lse).flags.c_contiguous
    o, lse = cuflash.attention_merge([backend.put(normal(0, 4))], [backend.put(normal(0))])
    assert (o.shape, lse.shape) == ((0, 4), (0,))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_dtypes_of_results(dtype: Any) -> None:
    q, k, v = normal(3, 4, dtype=dtype), normal(5, 4, dtype=dtype), normal(5, 6, dtype=dtype)
    key_bias = normal(5, dtype=np.float64 if dtype is np.float64 else np.float32)
    (o, lse), vjp = cuflash.attention_vjp(q, k, v, key_bias=key_bias, return_lse=True)
    assert [x.dtype for x in (o, lse, *vjp(o))] == [
        np.dtype(dtype),
        key_bias.dtype,
        *[np.dtype(dtype)] * 3,
        key_bias.dtype,
    ]
    o, lse = cuflash.attention_merge([o], [lse])
    assert (o.dtype, lse.dtype) == (np.dtype(dtype), key_bias.dtype)


def test_a_warm_call_makes_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuflash import problem

    q, k, v = normal(3, 4), normal(5, 4), normal(5, 6)
    cuflash.attention(q, k, v, causal=True, align="top-left")
    before = problem._describe.cache_info()
    cuflash.attention(q, k.copy(), v, causal=True, align="top-left")
    after = problem._describe.cache_info()
    assert (after.misses, after.hits) == (before.misses, before.hits + 1)
