"""Every user error: what is given, the exception's type, and the words and values its message must hold."""

from __future__ import annotations

import fractions
import sys
import types
from typing import Any

import fake_gpu
import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import arrays, calls

F4, F8 = np.float32, np.float64
NAN, INF = float("nan"), float("inf")


def zeros(*shape: int, dtype: Any = F4) -> np.ndarray:
    return np.zeros(shape, dtype)


def gpu(*shape: int, dtype: Any = F4, device: int = 0) -> fake_gpu.ndarray:
    return fake_gpu.ndarray(np.zeros(shape, dtype), device)


@pytest.fixture(autouse=True)
def fake_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", sys.modules[fake_gpu.__name__])
    launcher = fake_gpu.Launcher()
    monkeypatch.setattr(calls, "launcher", lambda: launcher)


Q, K, V = zeros(2, 3, 4), zeros(2, 5, 4), zeros(2, 5, 6)
O, LSE = zeros(2, 3, 6), zeros(2, 3)  # noqa: E741 - the names of the arguments
SQUARE = {"k": zeros(2, 3, 4), "v": zeros(2, 3, 6)}


class Subclass(np.ndarray):
    pass


class OnTpu:
    def __dlpack_device__(self) -> tuple[int, int]:
        return 15, 0


class RequiresGrad(fake_gpu.Exporter):
    def __dlpack__(self, *, stream: Any = None) -> Any:
        raise BufferError("detach it first")


DEVICE_SCALAR = types.SimpleNamespace(__cuda_array_interface__={})
PACKED = zeros(2, 3, 18)

# Arguments of attention beside (Q, K, V); exception; fragments of its message.
FORWARD: list[tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = [
    # kinds of array
    ({"q": [[1.0]]}, TypeError, ("q must be", "got list")),
    ({"k": None}, TypeError, ("k must be", "got NoneType")),
    ({"v": 1.0}, TypeError, ("v must be", "got float")),
    ({"v": np.float32(1)}, TypeError, ("v must be", "numpy.float32: a scalar")),
    ({"q": np.ma.masked_array(Q)}, TypeError, ("q", "MaskedArray")),
    ({"k": np.ma.masked_array(K)}, TypeError, ("k", "MaskedArray", "key_bias=np.where(hidden, -np.inf, 0.0)")),
    ({"q": zeros(3, 4).view(np.matrix)}, TypeError, ("q", "matrix")),
    ({"v": V.view(Subclass)}, TypeError, ("v", "Subclass")),
    ({"key_bias": [0.0] * 5}, TypeError, ("key_bias", "list")),
    ({"q": OnTpu()}, TypeError, ("q", "OnTpu", "device type 15")),
    ({"q": RequiresGrad(Q)}, TypeError, ("q", "detach it first")),
    # host and device
    ({"k": gpu(2, 5, 4)}, TypeError, ("q is on the host", "k is on GPU 0", "v is on the host")),
    ({"q": gpu(2, 3, 4), "k": gpu(2, 5, 4)}, TypeError, ("v is on the host", "q is on GPU 0")),
    (
        {"q": gpu(2, 3, 4), "k": gpu(2, 5, 4, device=1), "v": gpu(2, 5, 6)},
        ValueError,
        ("q is on GPU 0", "k is on GPU 1"),
    ),
    ({"key_bias": gpu(5)}, TypeError, ("key_bias is on GPU 0", "on the host")),
    ({"out": gpu(2, 3, 6)}, TypeError, ("out (o) is on GPU 0", "on the host")),
    ({"workspace": gpu(64, dtype=np.uint8)}, TypeError, ("workspace is on GPU 0",)),
    # dtypes
    ({"q": zeros(2, 3, 4, dtype=np.int32)}, TypeError, ("q has dtype int32", "float16, bfloat16, float32, float64")),
    ({"v": zeros(2, 5, 6, dtype=bool)}, TypeError, ("v has dtype bool",)),
    ({"v": zeros(2, 5, 6, dtype=np.complex64)}, TypeError, ("v has dtype complex64",)),
    ({"v": zeros(2, 5, 6, dtype=object)}, TypeError, ("v has dtype object",)),
    ({"v": zeros(2, 5, 6, dtype=np.longdouble)}, TypeError, ("v has dtype",)),
    ({"q": zeros(2, 3, 4, dtype=F8)}, TypeError, ("equal", "q float64", "k float32", "v float32")),
    (
        {"q": zeros(2, 3, 4, dtype=np.float16), "k": zeros(2, 5, 4, dtype=ml_dtypes.bfloat16)},
        TypeError,
        ("q float16", "k bfloat16", "v float32"),
    ),
    ({"key_bias": zeros(5, dtype=F8)}, TypeError, ("key_bias must be float32", "float64", ".astype('float32')")),
    ({"key_bias": zeros(5, dtype=np.float16)}, TypeError, ("key_bias must be float32", "float16")),
    ({"key_bias": zeros(5, dtype=complex)}, TypeError, ("key_bias must be float32", "complex128")),
    *(
        ({"key_bias": zeros(5, dtype=dtype)}, TypeError, ("float32", dtype.__name__, "np.where(mask, 0.0, -np.inf)"))
        for dtype in (np.bool_, np.int8, np.uint8, np.int64)
    ),
    # shapes
    ({"q": zeros(4)}, ValueError, ("q needs at least 2 axes", "(4,)", "(2, 5, 4)", "(2, 5, 6)")),
    ({"v": np.array(1.0, F4)}, ValueError, ("v needs at least 2 axes", "()")),
    ({"key_bias": np.array(1.0, F4)}, ValueError, ("key_bias needs at least an axis", "()")),
    ({"k": zeros(2, 5, 8)}, ValueError, ("features", "4 and 8", "(2, 3, 4)", "(2, 5, 8)", "(2, 5, 6)")),
    ({"q": zeros(2, 3, 0), "k": zeros(2, 5, 0)}, ValueError, ("no features", "(2, 3, 0)")),
    ({"v": zeros(2, 7, 6)}, ValueError, ("keys", "5 and 7", "(2, 3, 4)", "(2, 5, 4)", "(2, 7, 6)")),
    ({"key_bias": zeros(3)}, ValueError, ("key_bias (axis -1) has length 3", "5 keys", "(2, 5, 4)")),
    ({"key_bias": zeros(5, 3)}, ValueError, ("length 3", "5 keys", "one number for each key, (..., n)", "(m, n)")),
    ({"q": zeros(8, 3, 4)}, ValueError, ("axis -3", "q has 8", "k has 2", "grouped_heads=True", "(8, 3, 4)")),
    ({"q": zeros(3, 2, 3, 4), "k": zeros(2, 2, 5, 4)}, ValueError, ("axis -4", "q has 3", "k has 2", "(3, 2, 3, 4)")),
    ({"key_bias": zeros(3, 5)}, ValueError, ("key_bias has 3", "(3, 5)", "one number for each key", "not supported")),
    ({"key_bias": zeros(2, 3, 5)}, ValueError, ("(2, 3, 5)", "one number for each key", "not supported")),
    # grouped heads
    ({"q": zeros(3, 3, 4), "grouped_heads": True}, ValueError, ("3 heads", "multiple of the 2", "(3, 3, 4)")),
    ({"q": zeros(2, 3, 4), "k": zeros(4, 5, 4), "v": zeros(4, 5, 6), "grouped_heads": True}, ValueError, ("2", "4")),
    (
        {"q": zeros(4, 3, 4), "k": zeros(0, 5, 4), "v": zeros(0, 5, 6), "grouped_heads": True},
        ValueError,
        ("4 heads", "the 0 of k"),
    ),
    ({"v": zeros(1, 5, 6), "grouped_heads": True}, ValueError, ("k has 2 heads", "v has 1")),
    ({"q": zeros(3, 4), "grouped_heads": True}, ValueError, ("head axis (-3) in q", "(3, 4)")),
    ({"q": zeros(4, 3, 4), "key_bias": zeros(2, 5), "grouped_heads": True}, ValueError, ("2 heads (axis -2)", "4")),
    (
        {"q": zeros(4, 3, 4), "key_bias": zeros(3, 5), "grouped_heads": True},
        ValueError,
        ("3 heads (axis -2)", "one number for each key", "not supported"),
    ),
    (
        {"q": zeros(3, 4, 3, 4), "k": zeros(2, 2, 5, 4), "grouped_heads": True},
        ValueError,
        ("axis -4", "q has 3", "k has 2"),
    ),
    # options
    ({"causal": 1}, TypeError, ("causal must be a bool", "int 1")),
    ({"causal": None}, TypeError, ("causal must be a bool", "NoneType")),
    ({"grouped_heads": "yes"}, TypeError, ("grouped_heads", "str 'yes'")),
    ({"deterministic": 0}, TypeError, ("deterministic", "int 0")),
    ({"return_lse": 1}, TypeError, ("return_lse", "int 1")),
    ({"causal": True}, ValueError, ("m = 3", "n = 5", "'bottom-right'", "'top-left'")),
    ({"window": (1, None)}, ValueError, ("m = 3", "n = 5", "align")),
    ({"align": "bottom_right"}, ValueError, ("'bottom-right'", "'top-left'", "'bottom_right'")),
    ({"align": True}, TypeError, ("align", "bool True")),
    ({"align": 1.0}, TypeError, ("align", "float 1.0")),
    ({"align": [1]}, TypeError, ("align", "list")),
    ({"window": (-1, 0), "align": 0}, ValueError, ("left", "window=(-1, 0)", "None")),
    ({"window": (0, -3), "align": 0}, ValueError, ("right", "window=(0, -3)", "None")),
    ({"window": 3}, TypeError, ("window", "pair", "int 3")),
    ({"window": (1, 2, 3)}, ValueError, ("window", "pair", "3 entries")),
    ({"window": (1.0, 2), "align": 0}, TypeError, ("left side of window", "float 1.0")),
    ({"window": (1, True), "align": 0}, TypeError, ("right side of window", "bool True")),
    ({"softcap": 0}, ValueError, ("softcap", "> 0", "0.0")),
    ({"softcap": -1.0}, ValueError, ("softcap", "-1.0")),
    ({"softcap": NAN}, ValueError, ("softcap", "nan")),
    ({"softcap": INF}, ValueError, ("softcap", "inf")),
    ({"softcap": 1e-40}, ValueError, ("softcap", "normal", "float32")),
    ({"softcap": True}, TypeError, ("softcap", "bool")),
    ({"softcap": "5"}, TypeError, ("softcap", "str")),
    ({"scale": NAN}, ValueError, ("scale must be finite", "nan")),
    ({"scale": -INF}, ValueError, ("scale must be finite", "-inf")),
    ({"scale": 1e300}, ValueError, ("scale must be finite in float32", "1e+300")),
    ({"scale": 10**400}, ValueError, ("scale must be finite",)),
    ({"scale": True}, TypeError, ("scale", "bool")),
    ({"scale": np.bool_(True)}, TypeError, ("scale", "bool")),
    ({"scale": "1"}, TypeError, ("scale", "str")),
    ({"scale": 1j}, TypeError, ("scale", "complex")),
    ({"scale": np.ones(1)}, TypeError, ("scale", "ndarray")),
    ({"scale": np.array(True)}, TypeError, ("scale", "bool")),
    ({"scale": DEVICE_SCALAR}, TypeError, ("scale", "on the host", "wait")),
    ({"precision": "fp32"}, ValueError, ("'tf32'", "'fp32'")),
    ({"precision": 32}, TypeError, ("'tf32'", "int 32")),
    (
        {
            "q": zeros(2, 3, 4, dtype=F8),
            "k": zeros(2, 5, 4, dtype=F8),
            "v": zeros(2, 5, 6, dtype=F8),
            "precision": "tf32",
        },
        ValueError,
        ("tf32", "float32 operands", "float64"),
    ),
    # out and workspace
    ({"out": [O]}, TypeError, ("out (o)", "list")),
    ({"out": (O, LSE)}, ValueError, ("1 entries (o)", "got 2")),
    ({"out": O, "return_lse": True}, TypeError, ("tuple (o, lse)", "ndarray")),
    ({"out": (O,), "return_lse": True}, ValueError, ("2 entries (o, lse)", "got 1")),
    ({"out": zeros(2, 3, 6, dtype=F8)}, TypeError, ("out (o) must be float32", "float64")),
    ({"out": (O, zeros(2, 3, dtype=F8)), "return_lse": True}, TypeError, ("out (lse) must be float32", "float64")),
    ({"out": zeros(2, 3, 7)}, ValueError, ("out (o) must have shape (2, 3, 6)", "(2, 3, 7)")),
    ({"out": np.ma.masked_array(O)}, TypeError, ("out (o)", "MaskedArray")),
    ({"out": fake_gpu.Exporter(O)}, TypeError, ("out (o)", "Exporter")),
    ({"out": np.broadcast_to(zeros(1, 3, 6), (2, 3, 6))}, ValueError, ("out (o)", "read-only")),
    ({"out": np.lib.stride_tricks.as_strided(O, (2, 3, 6), (24, 24, 4))}, ValueError, ("share memory", "(24, 24, 4)")),
    ({**SQUARE, "v": O, "out": O}, ValueError, ("out (o) shares memory with v",)),
    ({**SQUARE, "v": PACKED[..., 6:12], "out": PACKED[..., 11:17]}, ValueError, ("shares memory with v",)),
    ({"out": (PACKED[..., :6], PACKED[..., 5]), "return_lse": True}, ValueError, ("(lse) shares memory with out (o)",)),
    ({"workspace": bytearray(8)}, TypeError, ("workspace", "bytearray")),
    ({"workspace": zeros(8)}, TypeError, ("workspace must be uint8", "float32")),
    ({"workspace": zeros(8, 8, dtype=np.uint8)}, ValueError, ("workspace", "one-dimensional", "(8, 8)")),
    ({"workspace": zeros(8, dtype=np.uint8)[::2]}, ValueError, ("workspace", "contiguous", "(2,)")),
    ({"workspace": Q.reshape(-1).view(np.uint8)}, ValueError, ("workspace shares memory with q",)),
    ({"out": O, "workspace": O.reshape(-1).view(np.uint8)}, ValueError, ("workspace shares memory with out (o)",)),
]


def identify(value: Any) -> str | None:
    if isinstance(value, dict):
        return ",".join(
            f"{name}={type(x).__name__ if isinstance(x, np.ndarray) else x!r}"[:40] for name, x in value.items()
        )
    return value.__name__ if isinstance(value, type) else ""


@pytest.mark.parametrize(("given", "error", "words"), FORWARD, ids=identify)
def test_attention(given: dict[str, Any], error: type[Exception], words: tuple[str, ...]) -> None:
    given = dict(given)
    q, k, v = given.pop("q", Q), given.pop("k", K), given.pop("v", V)
    with pytest.raises(error) as raised:
        cuflash.attention(q, k, v, **given)
    assert raised.type is error
    for word in words:
        assert word in str(raised.value)


def backward(**given: Any) -> Any:
    arguments = [
        given.pop(name, x) for name, x in zip(("do", "q", "k", "v", "o", "lse"), (O, Q, K, V, O, LSE), strict=True)
    ]
    return cuflash.attention_backward(*arguments, **given)


DQ, DK, DV = np.zeros_like(Q), np.zeros_like(K), np.zeros_like(V)
BACKWARD: list[tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = [
    ({"do": None}, TypeError, ("do and dlse are both None",)),
    ({"do": [1.0]}, TypeError, ("do must be", "list")),
    ({"do": zeros(2, 3, 7)}, ValueError, ("do must have shape (2, 3, 6)", "(2, 3, 7)")),
    ({"do": zeros(3, 6)}, ValueError, ("do must have shape (2, 3, 6)", "(3, 6)")),
    ({"do": zeros(2, 3, 6, dtype=np.float16)}, TypeError, ("do must be float32", "float16", ".astype('float32')")),
    ({"do": zeros(2, 3, 6, dtype=object)}, TypeError, ("do must be float32", "object")),
    ({"out": (DQ.astype(F8), None, None)}, TypeError, ("out (dq) must be float32", "float64", "allocate it as that")),
    ({"do": gpu(2, 3, 6)}, TypeError, ("q is on the host", "do is on GPU 0")),
    ({"o": None}, TypeError, ("o must be", "NoneType")),
    ({"o": zeros(2, 3, 4)}, ValueError, ("o must have shape (2, 3, 6)", "(2, 3, 4)")),
    ({"o": zeros(2, 3, 6, dtype=F8)}, TypeError, ("o must be float32", "float64")),
    ({"lse": None}, TypeError, ("lse must be", "NoneType")),
    ({"lse": zeros(2, 3, 1)}, ValueError, ("lse must have shape (2, 3)", "(2, 3, 1)")),
    ({"lse": zeros(2, 3, dtype=np.float16)}, TypeError, ("lse must be float32", "float16")),
    ({"dlse": zeros(3)}, ValueError, ("dlse must have shape (2, 3)", "(3,)")),
    ({"dlse": zeros(2, 3, dtype=F8)}, TypeError, ("dlse must be float32", "float64")),
    ({"dlse": 1.0}, TypeError, ("dlse must be", "float")),
    ({"need": "q"}, TypeError, ("need", "'q'")),
    ({"need": 3}, TypeError, ("need", "3")),
    ({"need": ("q", "x")}, ValueError, ("need names 'x'", "q, k, v")),
    ({"need": ("key_bias",)}, ValueError, ("need names 'key_bias'", "q, k, v")),
    ({"out": DQ}, TypeError, ("tuple (dq, dk, dv)", "ndarray")),
    ({"out": (DQ, DK)}, ValueError, ("3 entries (dq, dk, dv)", "got 2")),
    ({"out": (DQ, DK, DK)}, ValueError, ("out (dv) must have shape (2, 5, 6)", "(2, 5, 4)")),
    ({"out": (DQ, DK, DV), "need": ("q", "k")}, ValueError, ("out[2] must be None", "need")),
    ({"out": (O[..., :4], None, None)}, ValueError, ("out (dq) shares memory with do",)),
    ({"out": (None, DK, DV), "o": DV[:, :3]}, ValueError, ("out (dv) shares memory with o",)),
    (
        {"k": zeros(2, 3, 4), "v": zeros(2, 3, 6), "out": (DQ, DQ, None)},
        ValueError,
        ("(dk) shares memory with out (dq)",),
    ),
    ({"causal": True}, ValueError, ("align", "m = 3", "n = 5")),
    ({"workspace": O.reshape(-1).view(np.uint8)}, ValueError, ("workspace shares memory with do",)),
]


@pytest.mark.parametrize(("given", "error", "words"), BACKWARD, ids=identify)
def test_attention_backward(given: dict[str, Any], error: type[Exception], words: tuple[str, ...]) -> None:
    with pytest.raises(error) as raised:
        backward(**given)
    assert raised.type is error
    for word in words:
        assert word in str(raised.value)


OTHERS: list[tuple[str, Any, type[Exception], tuple[str, ...]]] = [
    ("merge of nothing", lambda: cuflash.attention_merge([], []), ValueError, ("os has no parts",)),
    ("merge of no stack", lambda: cuflash.attention_merge(zeros(0, 3, 6), zeros(0, 3)), ValueError, ("no parts",)),
    ("merge of one part", lambda: cuflash.attention_merge(zeros(3, 6), zeros(3)), ValueError, ("3 axes", "(3, 6)")),
    ("merge of a number", lambda: cuflash.attention_merge(1.0, [LSE]), TypeError, ("os must be", "float")),
    (
        "merge of vectors",
        lambda: cuflash.attention_merge([zeros(6)], [zeros()]),
        ValueError,
        ("os[0]", "2 axes", "(6,)"),
    ),
    ("merge of a generator", lambda: cuflash.attention_merge(iter([O]), [LSE]), TypeError, ("os must be a sequence",)),
    ("merge of lists", lambda: cuflash.attention_merge([[1.0]], [LSE]), TypeError, ("os[0] must be", "list")),
    ("merge, uneven", lambda: cuflash.attention_merge([O, O], [LSE]), ValueError, ("os has 2", "lses has 1")),
    (
        "merge, shapes",
        lambda: cuflash.attention_merge([O, zeros(2, 4, 6)], [LSE, LSE]),
        ValueError,
        ("os[1] must have shape (2, 3, 6)", "(2, 4, 6)"),
    ),
    (
        "merge, lse shape",
        lambda: cuflash.attention_merge([O, O], [LSE, zeros(2, 4)]),
        ValueError,
        ("lses[1] must have shape (2, 3)", "(2, 4)"),
    ),
    (
        "merge, lse dtype",
        lambda: cuflash.attention_merge([O], [zeros(2, 3, dtype=F8)]),
        TypeError,
        ("lses[0] must be float32", "float64"),
    ),
    ("merge, dtype", lambda: cuflash.attention_merge([O.astype(int)], [LSE]), TypeError, ("os[0] has dtype int",)),
    (
        "merge, devices",
        lambda: cuflash.attention_merge([O], [gpu(2, 3)]),
        TypeError,
        ("os[0] is on the host", "lses[0]"),
    ),
    (
        "merge, out",
        lambda: cuflash.attention_merge([O], [LSE], out=(O, None)),
        ValueError,
        ("out (o) shares memory with os[0]",),
    ),
    ("merge, out array", lambda: cuflash.attention_merge([O], [LSE], out=DQ), TypeError, ("tuple (o, lse)",)),
    (
        "workspace of what",
        lambda: cuflash.workspace_nbytes("forward", Q, K, V),
        ValueError,
        ("'attention'", "'forward'"),
    ),
    ("workspace without an operation", lambda: cuflash.workspace_nbytes(Q, K, V), TypeError, ("first", "ndarray")),
    ("workspace without v", lambda: cuflash.workspace_nbytes("attention", Q, K), TypeError, ("needs v",)),
    ("lse need v", lambda: cuflash.attention_lse_vjp(Q, K, need=("v",)), ValueError, ("need names 'v'", "q, k")),
    ("lse vjp None", lambda: cuflash.attention_lse_vjp(Q, K)[1](None), TypeError, ("None",)),
    ("need, early", lambda: cuflash.attention_vjp(Q, K, V, need=("w",)), ValueError, ("need names 'w'",)),
    ("vjp None", lambda: cuflash.attention_vjp(Q, K, V)[1](None), TypeError, ("do and dlse",)),
    ("vjp of nothing", lambda: cuflash.attention_vjp(Q, K, V)[1](), TypeError, ("do and dlse are both None",)),
    ("vjp shape", lambda: cuflash.attention_vjp(Q, K, V)[1](LSE), ValueError, ("do must have shape (2, 3, 6)",)),
    ("misspelled", lambda: cuflash.attention(Q, K, V, casual=True), TypeError, ("casual",)),
    ("by name", lambda: cuflash.attention(q=Q, k=K, v=V), TypeError, ("positional",)),
    (
        "not built",
        lambda: cuflash.attention(gpu(3, 257), gpu(5, 257), gpu(5, 6)),
        NotImplementedError,
        ("at most 256 features", "d = 257"),
    ),
    (
        "device out",
        lambda: cuflash.attention(gpu(3, 4), gpu(5, 4), gpu(5, 6), out=gpu(3, 6, device=1)),
        ValueError,
        ("q is on GPU 0", "out (o) is on GPU 1"),
    ),
    (
        "small workspace",
        lambda: cuflash.attention(gpu(3, 4), gpu(5, 4), gpu(5, 6), workspace=gpu(15, dtype=np.uint8)),
        ValueError,
        ("at least 16 bytes", "(15,)"),
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), [row[1:] for row in OTHERS], ids=[row[0] for row in OTHERS])
def test_others(call: Any, error: type[Exception], words: tuple[str, ...]) -> None:
    with pytest.raises(error) as raised:
        call()
    assert raised.type is error
    for word in words:
        assert word in str(raised.value)


GROUPED, SWAP, MATRIX = "grouped_heads=True", ".swapaxes(-3, -2)", "not supported"


@pytest.mark.parametrize(
    ("q", "k", "key_bias", "hints"),
    [
        ((8, 3, 4), (2, 5, 4), None, {GROUPED}),
        ((2, 8, 3, 4), (2, 2, 5, 4), None, {GROUPED}),
        ((8, 3, 4), (2, 5, 4), (8, 5), {GROUPED}),
        ((2, 3, 4), (8, 5, 4), None, set()),  # more heads in k than in q
        ((7, 3, 4), (2, 5, 4), None, set()),  # not a multiple
        ((8, 3, 4), (0, 5, 4), None, set()),
        ((6, 2, 8, 4), (5, 2, 9, 4), None, set()),  # not the axis of heads
        ((10, 2, 4), (7, 2, 4), None, {SWAP}),  # (sequence, heads, features)
        ((3, 7, 2, 4), (3, 10, 2, 4), None, {SWAP}),
        ((10, 2, 4), (5, 2, 4), None, {SWAP, GROUPED}),  # which of the two, shapes do not tell
        ((8, 9, 4), (2, 9, 4), None, {GROUPED}),
        ((8, 9, 4), (8, 9, 4), (3, 9), set()),  # only key_bias is at fault
        ((8, 3, 4), (8, 5, 4), (3, 5), {MATRIX}),
    ],
)
def test_hints_about_axes_come_where_they_fit(q: Any, k: Any, key_bias: Any, hints: set[str]) -> None:
    bias = None if key_bias is None else zeros(*key_bias)
    with pytest.raises(ValueError, match="does not broadcast") as raised:
        cuflash.attention(zeros(*q), zeros(*k), zeros(*k), key_bias=bias)
    assert {hint for hint in (GROUPED, SWAP, MATRIX) if hint in str(raised.value)} == hints


def test_the_advice_for_masks_is_taken() -> None:
    """What the message about a mask says, and what it says about dtypes, is itself accepted and right."""
    mask = np.array([True, False, True, True, False])
    with pytest.raises(TypeError) as raised:
        cuflash.attention(Q + 1, K, V, key_bias=mask)
    advice = str(raised.value).split("pass ")[1]
    key_bias = eval(advice, {"np": np, "mask": mask})
    values = np.arange(30, dtype=F4).reshape(5, 6)
    np.testing.assert_allclose(
        cuflash.attention(Q, K, values, key_bias=key_bias), np.full((2, 3, 1), 1) * values[mask].mean(0)
    )


@pytest.mark.parametrize(
    "given", [{"causal": True}, {"window": (-1, 0)}, {"workspace": zeros(8)}, {"scale": NAN}], ids=str
)
def test_an_error_leaves_out_unwritten(given: dict[str, Any]) -> None:
    o, lse = np.full((2, 3, 6), 7, F4), np.full((2, 3), 7, F4)
    with pytest.raises((TypeError, ValueError)):
        cuflash.attention(Q, K, V, out=(o, lse), return_lse=True, **given)
    dq, dk, dv = (np.full_like(x, 7) for x in (Q, K, V))
    with pytest.raises((TypeError, ValueError)):
        backward(out=(dq, dk, dv), **given)
    assert all((x == 7).all() for x in (o, lse, dq, dk, dv))


@pytest.mark.parametrize(
    "scale",
    [
        2,
        2.0,
        np.float16(2),
        np.float32(2),
        np.float64(2),
        np.int8(2),
        np.array(2.0),
        np.array(2),
        fractions.Fraction(2),
    ],
)
def test_real_numbers_are_alike(scale: Any) -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 4, 2))
    expected = cuflash.attention(q, k, v, scale=2.0, softcap=2.0)
    assert (cuflash.attention(q, k, v, scale=scale, softcap=scale) == expected).all()


def test_numpy_scalars_are_options() -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 4, 2))
    expected = cuflash.attention(q, k, v, causal=True, window=(2, None), align=1)
    got = cuflash.attention(q, k, v, causal=np.bool_(True), window=[np.int64(2), None], align=np.int32(1))
    assert (got == expected).all()


def test_an_accepted_value_does_not_admit_its_equals() -> None:
    """1 == True == 1.0 as keys of a cache: what was accepted as one must not let in the others."""
    q, k, v = np.zeros((3, 4, 2))
    assert cuflash.attention(q, k, v, causal=True, window=(1, 1), scale=1, align=1).shape == (4, 2)
    for wrong in (
        {"causal": 1},
        {"causal": 1.0},
        {"window": (True, 1)},
        {"window": (1.0, 1)},
        {"scale": True},
        {"align": True},
    ):
        with pytest.raises(TypeError):
            cuflash.attention(q, k, v, **{"causal": True, "window": (1, 1), "scale": 1, "align": 1, **wrong})


def test_missing_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    x = fake_gpu.Exporter(Q, (fake_gpu.CUDA, 0))
    with pytest.raises(ImportError, match=r'pip install "cuflash\[cuda13\]"'):
        cuflash.attention(x, x, x)


def test_bfloat16_without_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    x = fake_gpu.Exporter(zeros(2, 2))
    x.dtype = "bfloat16"
    with pytest.raises(TypeError, match="pip install ml_dtypes"):
        arrays.as_array("q", x)
