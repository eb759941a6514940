"""The frozen description of one attention problem, and every error in the arrays and options that describe it.

A ``Problem`` holds metadata only. It is made once for each combination of shapes, strides, dtypes and options and
looked up after that, so that a repeated call validates in one cache lookup.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np

from cuflash import arrays
from cuflash.arrays import Result
from cuflash.score import Band, band

DTYPES = ("float16", "bfloat16", "float32", "float64")
ALIGNMENTS = ("bottom-right", "top-left")
INPUTS = ("q", "k", "v", "key_bias")

AXES = "axes go (..., heads, sequence, features)"
ONE_A_KEY = "key_bias has one number for each key, (..., n); biases that are matrices (m, n) are not supported"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """One attention problem: what it computes on arrays of which layout, without the arrays.

    Inner shapes and strides have the head axis of grouped heads split into (kv head, member of its group), so that
    every input broadcasts plainly to ``inner_batch``, aligned on the right. Strides are in bytes.
    """

    device: int
    """CUDA device, -1 for the host."""
    dtype: str
    batch: Shape
    inner_batch: Shape
    q_batch: Shape
    k_batch: Shape
    v_batch: Shape | None
    bias_batch: Shape | None
    q_strides: Shape
    k_strides: Shape
    v_strides: Shape | None
    bias_strides: Shape | None
    grouped: bool
    heads: tuple[int, int]
    """(kv heads, query heads of each) with grouped heads, else (1, 1)."""
    m: int
    n: int
    d: int
    e: int
    """0 where there are no values."""
    has_value: bool
    scale: float
    band: Band
    softcap: float | None
    precision: str | None
    deterministic: bool
    o: Result | None
    lse: Result
    dq: Result
    dk: Result
    dv: Result | None
    dkey_bias: Result | None
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Hashed once: a problem is the key of the launcher's caches in every call.
        values = tuple(getattr(self, f.name) for f in fields(self) if f.compare)
        object.__setattr__(self, "_hash", hash(values))

    def __hash__(self) -> int:
        return self._hash

    @property
    def kind(self) -> str:
        """'host' or 'cuda'."""
        return "host" if self.device < 0 else "cuda"

    @property
    def accumulate(self) -> str:
        """Name of the dtype of lse and of all accumulation."""
        return arrays.dtype_name(self.lse.dtype)

    @property
    def has_key_bias(self) -> bool:
        return self.bias_batch is not None

    @functools.cached_property
    def empty(self) -> bool:
        """Whether there is no (query, key) pair at all, so that every result is known."""
        return 0 in (*self.batch, self.m, self.n)

    def split_heads(self, x: Any, tail: int) -> Any:
        """Inner view of an array with q's heads (q, do, o; lse, key_bias), which has ``tail`` axes after the heads."""
        if x is None or not self.grouped or x.ndim <= tail:
            return x
        at = x.ndim - tail - 1
        return x.reshape(x.shape[:at] + _split(x.shape[at], self.heads) + x.shape[at + 1 :])

    def group_axis(self, x: Any) -> Any:
        """Inner view of an array with k's heads (k, v and their gradients)."""
        return x if x is None or not self.grouped else x[..., None, :, :]

    def inner_inputs(self, q: Any, k: Any, v: Any, key_bias: Any) -> tuple[Any, Any, Any, Any]:
        """Inner views of the inputs."""
        if not self.grouped:
            return q, k, v, key_bias
        return self.split_heads(q, 2), self.group_axis(k), self.group_axis(v), self.split_heads(key_bias, 1)

    def inner_strides(self, like: Result, strides: Shape) -> Shape:
        """Strides of the inner view of an array that is ``like`` o or lse and has these."""
        return _inner(like.name, like.shape, strides, self.heads if self.grouped else None)[1]

    @functools.cached_property
    def reaches(self) -> tuple[tuple[int, int] | None, ...]:
        """``arrays.reach`` of q, k, v and key_bias, None where one is absent."""
        m, n, d, e = self.m, self.n, self.d, self.e
        operand, vector = self.dq.dtype.itemsize, self.lse.dtype.itemsize
        described = (
            (self.q_batch, (m, d), self.q_strides, operand),
            (self.k_batch, (n, d), self.k_strides, operand),
            (self.v_batch, (n, e), self.v_strides, operand),
            (self.bias_batch, (n,), self.bias_strides, vector),
        )
        return tuple(
            None if batch is None or strides is None else arrays.reach(batch + tail, strides, itemsize)
            for batch, tail, strides, itemsize in described
        )

    def require(self, name: str, x: Any, like: Result) -> None:
        """Raise unless the plain array ``x`` is where the problem is and is like ``like``."""
        require(name, x, like, {"q": self.device})


def require(name: str, x: Any, like: Result, where: Mapping[str, int]) -> None:
    """Raise unless the plain array ``x`` has shape and dtype of ``like``, in any byte order, and is on the device that
    ``where`` gives with the name of an array there."""
    device = arrays.device_of(x)
    if device not in where.values():
        _require_one_place({**where, name: device})
    if x.dtype != like.dtype and arrays.dtype_name(x.dtype) != arrays.dtype_name(like.dtype):
        wanted = arrays.dtype_name(like.dtype)
        hint = "it is written to, so allocate it as that" if name.startswith(("out", "workspace")) else _cast(x, wanted)
        raise TypeError(f"{name} must be {wanted} here, got {x.dtype}{hint and ': '}{hint}")
    if x.shape != like.shape:
        raise ValueError(f"{name} must have shape {like.shape} here, got {x.shape}")


@functools.lru_cache(maxsize=1024)
def without_value(problem: Problem) -> Problem:
    """The same scores with nothing to weigh: what ``attention_lse`` computes, and all there is where e is 0."""
    return replace(problem, has_value=False, e=0, v_batch=None, v_strides=None, o=None, dv=None)


class Options(NamedTuple):
    """The options of a call in canonical types: hashable, and equal only where they mean the same."""

    causal: bool
    align: str | int | None
    left: int | None
    right: int | None
    softcap: float | None
    scale: float | None
    grouped_heads: bool
    precision: str | None
    deterministic: bool


class _Meta(NamedTuple):
    device: int
    dtype: np.dtype[Any]
    shape: Shape
    strides: Shape


def describe(
    q: Any,
    k: Any,
    v: Any,
    key_bias: Any,
    causal: Any,
    align: Any,
    window: Any,
    softcap: Any,
    scale: Any,
    grouped_heads: Any,
    precision: Any,
    deterministic: Any,
) -> Problem:
    """The problem posed by plain arrays (v and key_bias may be None) and options as the user gave them.

    Here options only take their canonical types; everything else is checked once for each problem.
    """
    # type() instead of isinstance: one comparison for the types that nearly every call has.
    if type(causal) is not bool:
        causal = flag("causal", causal)
    if type(grouped_heads) is not bool:
        grouped_heads = flag("grouped_heads", grouped_heads)
    if type(deterministic) is not bool:
        deterministic = flag("deterministic", deterministic)
    if align is not None and type(align) is not int and type(align) is not str:
        align = integer("align", align, f"None, {ALIGNMENTS[0]!r}, {ALIGNMENTS[1]!r} or an int")
    left, right = (None, None) if window is None else _window_sides(window)
    if softcap is not None and type(softcap) is not float:
        softcap = real("softcap", softcap)
    if scale is not None and type(scale) is not float:
        scale = real("scale", scale)
    if precision is not None and type(precision) is not str:
        raise TypeError(f"precision must be None or 'tf32', got {type(precision).__name__} {precision!r}")
    return _describe(
        _meta(q),
        _meta(k),
        None if v is None else _meta(v),
        None if key_bias is None else _meta(key_bias),
        (causal, align, left, right, softcap, scale, grouped_heads, precision, deterministic),
    )


def _meta(x: Any) -> tuple[int, np.dtype[Any], Shape, Shape]:
    # A plain tuple, and no call of ``arrays.device_of``: this is done for each array of each call.
    return -1 if type(x) is np.ndarray else x.data.device_id, x.dtype, x.shape, x.strides


def flag(name: str, x: Any) -> bool:
    """A bool or NumPy bool as bool."""
    if type(x) is bool:
        return x
    if isinstance(x, np.bool_):
        return bool(x)
    raise TypeError(f"{name} must be a bool, got {type(x).__name__} {x!r}")


def integer(name: str, x: Any, wanted: str) -> int:
    """A Python or NumPy integer as int; bool is not one."""
    if isinstance(x, numbers.Integral) and not isinstance(x, bool):
        return int(x)
    raise TypeError(f"{name} must be {wanted}, got {type(x).__name__} {x!r}")


def real(name: str, x: Any) -> float:
    """A real number on the host as float: a Python or NumPy scalar, or a NumPy array with no axes."""
    if type(x) is np.ndarray and x.ndim == 0:
        x = x[()]
    if isinstance(x, numbers.Real) and not isinstance(x, bool):
        try:
            return float(x)
        except OverflowError:
            raise ValueError(f"{name} must be finite, got a number beyond float64") from None
    hint = ": reading a scalar on a GPU would wait for it" if hasattr(x, "__cuda_array_interface__") else ""
    raise TypeError(f"{name} must be None or a real number on the host, got {type(x).__name__}{hint}")


def _window_sides(window: Any) -> tuple[int | None, int | None]:
    if not isinstance(window, (tuple, list)):
        raise TypeError(f"window must be None or a pair (left, right), got {type(window).__name__} {window!r}")
    if len(window) != 2:
        raise ValueError(f"window must be a pair (left, right), got {len(window)} entries: {window!r}")
    left, right = window
    if left is not None and type(left) is not int:
        left = integer("the left side of window", left, "None or an int")
    if right is not None and type(right) is not int:
        right = integer("the right side of window", right, "None or an int")
    return left, right


@functools.lru_cache(maxsize=4096)
def _describe(q: Any, k: Any, v: Any, key_bias: Any, options: Any) -> Problem:
    """``describe`` after the types: all arguments are tuples of plain values."""
    given = {name: _Meta(*x) for name, x in zip(INPUTS, (q, k, v, key_bias), strict=True) if x is not None}
    option = Options(*options)
    _require_one_place({name: x.device for name, x in given.items()})
    native, lse_dtype = operand_dtypes({name: x.dtype for name, x in given.items() if name != "key_bias"})
    dtype = arrays.dtype_name(native)
    _check_bias_dtype(given.get("key_bias"), native, lse_dtype)
    m, n, d, e = _core_lengths(given)
    heads = _group_heads(given) if option.grouped_heads else (1, 1)
    batch, inner_batch = _batches(given, heads, option.grouped_heads)
    _check_values(option, dtype, lse_dtype, m, n)

    split = heads if option.grouped_heads else None
    inner = {name: _inner(name, x.shape, x.strides, split) for name, x in given.items()}
    shapes, strides = ({name: x[part] for name, x in inner.items()} for part in (0, 1))
    window = None if option.left is None and option.right is None else (option.left, option.right)
    gradients = {name: arrays.result(f"d{name}", native, x.shape, x) for name, x in given.items()}
    has_value, has_key_bias = "v" in given, "key_bias" in given
    return Problem(
        device=given["q"].device,
        dtype=dtype,
        batch=batch,
        inner_batch=inner_batch,
        q_batch=shapes["q"][:-2],
        k_batch=shapes["k"][:-2],
        v_batch=shapes["v"][:-2] if has_value else None,
        bias_batch=shapes["key_bias"][:-1] if has_key_bias else None,
        q_strides=strides["q"],
        k_strides=strides["k"],
        v_strides=strides.get("v"),
        bias_strides=strides.get("key_bias"),
        grouped=option.grouped_heads,
        heads=heads,
        m=m,
        n=n,
        d=d,
        e=e,
        has_value=has_value,
        scale=1.0 / math.sqrt(d) if option.scale is None else option.scale,
        band=band(m, n, option.causal, option.align, window),
        softcap=option.softcap,
        precision=option.precision,
        deterministic=option.deterministic,
        o=arrays.result("o", native, (*batch, m, e), given["q"]) if has_value else None,
        lse=arrays.result("lse", lse_dtype, (*batch, m)),
        dq=gradients["q"],
        dk=gradients["k"],
        dv=gradients.get("v"),
        dkey_bias=arrays.result("dkey_bias", lse_dtype, given["key_bias"].shape) if has_key_bias else None,
    )


def _require_one_place(devices: Mapping[str, int]) -> None:
    if len(set(devices.values())) == 1:
        return
    places = ", ".join(f"{name} is {arrays.place(device)}" for name, device in devices.items())
    if -1 in devices.values():
        raise TypeError(f"the arrays of a call must all be on the host or all on one GPU: {places}")
    raise ValueError(f"the arrays of a call must be on one GPU: {places}")


def operand_dtypes(dtypes: Mapping[str, np.dtype[Any]]) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """The one dtype of the operands, in native byte order, and the dtype of lse and of accumulation."""
    names = {name: arrays.dtype_name(dtype) for name, dtype in dtypes.items()}
    listed = ", ".join(f"{name} {dtype}" for name, dtype in names.items())
    for name, dtype in names.items():
        if dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {dtype}; supported are {', '.join(DTYPES)} (got {listed})")
    if len(set(names.values())) > 1:
        raise TypeError(f"the dtypes must be equal, got {listed}: convert with .astype")
    native = next(iter(dtypes.values())).newbyteorder("=")
    return native, np.dtype(np.float64 if native == np.float64 else np.float32)


def _cast(x: Any, wanted: str) -> str:
    """How to make an array of ``wanted`` of one with another dtype; empty where that takes thought."""
    return f"convert it with .astype({wanted!r})" if arrays.dtype_name(x.dtype) in DTYPES else ""


def _check_bias_dtype(bias: _Meta | None, native: np.dtype[Any], lse_dtype: np.dtype[Any]) -> None:
    if bias is None or arrays.dtype_name(bias.dtype) == arrays.dtype_name(lse_dtype):
        return
    hint = _cast(bias, lse_dtype.name)
    if bias.dtype.kind in "biu":
        hint = (
            "it is added to the scores and hides no key by itself; for a mask of the keys that are there, pass "
            f"np.where(mask, 0.0, -np.inf).astype({lse_dtype.name!r})"
        )
    raise TypeError(
        f"key_bias must be {lse_dtype} where q, k and v are {native.name}, got {bias.dtype}{hint and ': '}{hint}"
    )


def _shapes(given: Mapping[str, _Meta]) -> str:
    return ", ".join(f"{name} {x.shape}" for name, x in given.items())


def _core_lengths(given: Mapping[str, _Meta]) -> tuple[int, int, int, int]:
    """m, n, d, e from the axes that do not broadcast."""
    for name, x in given.items():
        least = 1 if name == "key_bias" else 2
        if len(x.shape) < least:
            axes = "an axis" if least == 1 else f"{least} axes"
            raise ValueError(f"{name} needs at least {axes}, has {len(x.shape)}: {_shapes(given)}")
    (m, d), (n, d_k) = given["q"].shape[-2:], given["k"].shape[-2:]
    if d != d_k:
        raise ValueError(f"q and k differ in features (axis -1), {d} and {d_k}: {_shapes(given)}; {AXES}")
    if d == 0:
        raise ValueError(f"q and k have no features (axis -1 has length 0): {_shapes(given)}")
    e = 0
    if "v" in given:
        n_v, e = given["v"].shape[-2:]
        if n != n_v:
            raise ValueError(f"k and v differ in the number of keys (axis -2), {n} and {n_v}: {_shapes(given)}")
    if "key_bias" in given and given["key_bias"].shape[-1] != n:
        length = given["key_bias"].shape[-1]
        raise ValueError(
            f"key_bias (axis -1) has length {length}, k has {n} keys (axis -2): {_shapes(given)}; {ONE_A_KEY}"
        )
    return m, n, d, e


def _group_heads(given: Mapping[str, _Meta]) -> tuple[int, int]:
    """(kv heads, group size) of grouped heads, from axis -3."""
    for name in ("q", "k", "v"):
        if name in given and len(given[name].shape) < 3:
            raise ValueError(f"grouped_heads=True needs a head axis (-3) in {name}: {_shapes(given)}")
    heads, kv_heads = given["q"].shape[-3], given["k"].shape[-3]
    if "v" in given and given["v"].shape[-3] != kv_heads:
        raise ValueError(f"k has {kv_heads} heads (axis -3), v has {given['v'].shape[-3]}: {_shapes(given)}")
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(
            f"grouped_heads=True: the {heads} heads of q (axis -3) are not a multiple of the {kv_heads} of k: "
            f"{_shapes(given)}; {AXES}"
        )
    bias = given.get("key_bias")
    if bias is not None and len(bias.shape) > 1 and bias.shape[-2] not in (1, heads):
        raise ValueError(
            f"grouped_heads=True: key_bias has {bias.shape[-2]} heads (axis -2), must be the {heads} of q or 1: "
            f"{_shapes(given)}{_matrix_hint(given)}"
        )
    return kv_heads, heads // kv_heads if kv_heads else 1


def _batches(given: Mapping[str, _Meta], heads: tuple[int, int], grouped: bool) -> tuple[Shape, Shape]:
    """Public and inner batch shape."""
    tail = {name: 1 if name == "key_bias" else 2 for name in given}
    batches = {name: x.shape[: len(x.shape) - tail[name] - grouped] for name, x in given.items()}
    batch: list[int] = []
    for axis in range(max(map(len, batches.values())), 0, -1):
        lengths = {name: shape[-axis] for name, shape in batches.items() if len(shape) >= axis}
        long = {name: length for name, length in lengths.items() if length != 1}
        if len(set(long.values())) > 1:
            counts = ", ".join(f"{name} has {length}" for name, length in long.items())
            hint = _matrix_hint(given) if "key_bias" in long else ""
            hint += _head_axis_hint(given) if axis == 1 and not grouped else ""
            raise ValueError(f"batch axis {-axis - 2 - grouped} does not broadcast, {counts}: {_shapes(given)}{hint}")
        batch.append(next(iter(long.values()), 1))
    if not grouped:
        return tuple(batch), tuple(batch)
    return (*batch, heads[0] * heads[1]), (*batch, *heads)


def _matrix_hint(given: Mapping[str, _Meta]) -> str:
    """For a key_bias that does not broadcast: whether it has the shape of the scores."""
    m, n = given["q"].shape[-2], given["k"].shape[-2]
    return f"; {ONE_A_KEY}" if given["key_bias"].shape[-2:] == (m, n) else ""


def _head_axis_hint(given: Mapping[str, _Meta]) -> str:
    """For an axis -3 that does not broadcast: what its lengths look like."""
    lengths = {name: x.shape[-3] for name, x in given.items() if name != "key_bias" and len(x.shape) > 2}
    if len(set(lengths.values()) - {1}) < 2:
        return ""
    heads, kv_heads = lengths.get("q", 1), lengths.get("k", 1)
    hints = []
    if kv_heads == lengths.get("v", kv_heads) and heads > kv_heads > 0 and heads % kv_heads == 0:
        hints.append("if these are heads that share keys, say grouped_heads=True")
    # Sequences differ in length where heads do not, and are the longer axis; so are they in (..., sequence, heads, d).
    short = {x.shape[-2] for name, x in given.items() if name != "key_bias"}
    if len(short) == 1 and min(lengths.values()) > max(short):
        hints.append(f"if these are sequences, {AXES}: swap them with .swapaxes(-3, -2)")
    return "".join(f"; {hint}" for hint in hints)


def _split(length: int, heads: tuple[int, int]) -> tuple[int, int]:
    """Inner lengths of an axis that has one entry for each query head, or a single one for all."""
    return (1, 1) if length == 1 else heads


def _inner(name: str, shape: Shape, strides: Shape, heads: tuple[int, int] | None) -> tuple[Shape, Shape]:
    """Shape and strides of the view that ``split_heads`` or ``group_axis`` gives; heads None: not grouped."""
    at = len(shape) - (2 if name in ("key_bias", "lse") else 3)
    if heads is None or at < 0:
        return shape, strides
    stride = strides[at]
    if name in ("k", "v"):
        lengths, steps = (shape[at], 1), (stride, 0)
    else:
        lengths = _split(shape[at], heads)
        steps = (stride * lengths[1], stride)
    return shape[:at] + lengths + shape[at + 1 :], strides[:at] + steps + strides[at + 1 :]


def _check_values(option: Options, dtype: str, lse_dtype: np.dtype[Any], m: int, n: int) -> None:
    """Raise for an option whose value, not type, is wrong."""
    smallest, largest = float(np.finfo(lse_dtype).tiny), float(np.finfo(lse_dtype).max)
    if option.scale is not None and not abs(option.scale) <= largest:
        raise ValueError(f"scale must be finite in {lse_dtype}, got {option.scale}")
    if option.softcap is not None and not smallest <= option.softcap <= largest:
        raise ValueError(
            f"softcap must be > 0, finite and a normal number of {lse_dtype}, got {option.softcap}; "
            "None switches it off"
        )
    if option.precision is not None and option.precision != "tf32":
        raise ValueError(f"precision must be None or 'tf32', got {option.precision!r}")
    if option.precision == "tf32" and dtype != "float32":
        raise ValueError(f"precision='tf32' is for float32 operands, these are {dtype}")
    for name, side in (("left", option.left), ("right", option.right)):
        if side is not None and side < 0:
            raise ValueError(
                f"the {name} side of window=({option.left}, {option.right}) is negative; "
                "a side is an int >= 0, or None for no limit"
            )
    if isinstance(option.align, str) and option.align not in ALIGNMENTS:
        raise ValueError(f"align must be None, 'bottom-right', 'top-left' or an int, got {option.align!r}")
    masked = option.causal or option.left is not None or option.right is not None
    if masked and option.align is None and m != n:
        raise ValueError(
            f"causal and window need align where q and k differ in length (m = {m}, n = {n}): "
            "'bottom-right' puts the last query at the last key (row i at key i + n - m), "
            "'top-left' the first at the first (row i at key i), an int a row i at key i + a"
        )


def needed(need: Iterable[str] | None, has_value: bool, has_key_bias: bool) -> tuple[bool, bool, bool, bool]:
    """Which of the gradients of q, k, v and key_bias are asked for."""
    present = tuple(name for name, there in zip(INPUTS, (True, True, has_value, has_key_bias), strict=True) if there)
    if need is None:
        chosen = set(present)
    elif isinstance(need, str) or not isinstance(need, Iterable):
        raise TypeError(f"need must be None or a collection of names such as ('q', 'k'), got {need!r}")
    else:
        chosen = set(need)
        unknown = sorted(map(repr, chosen.difference(present)))
        if unknown:
            raise ValueError(f"need names {', '.join(unknown)}; the inputs of this call are {', '.join(present)}")
    q, k, v, key_bias = (name in chosen for name in INPUTS)
    return q, k, v, key_bias
