"""Drawn calls: shapes, layouts, options and values of one attention problem, as hypothesis strategies.

A ``Case`` says everything about a call but where it runs, so the same case poses the same problem on either backend.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import recording
from backends import Layout, acc_dtype, dtype_of
from hypothesis import strategies as st

from cuflash import compile, tiles

Shape = tuple[int, ...]

EDGES = (0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129, 257)
"""Lengths around the sizes of fragments and blocks."""
HEAD_DIMS = (1, 2, 3, 4, 5, 8, 16, 17, 31, 32, 33, 40, 64, 65, 72, 80, 96, 104, 128, 129, 160, 192, 255, 256)
VALUE_DIMS = ("like d",) * 4 + ("any",) * 4 + ("none",)
MOST_SCORES = 150_000
"""Scores of one case: the dense float64 reference takes milliseconds."""
VALUES = ("normal", "wide", "spike", "constant", "equal keys", "small")
SMALL = {"float16": 2.0**-14, "bfloat16": 2.0**-14, "float32": 2.0**-130, "float64": 2.0**-1030}
"""Factors that leave float16, float32 and float64 subnormal."""
DTYPES = ("float16", "bfloat16") * 2 + ("float32", "float32", "float64", "float64")
"""From which a case draws: tensor cores of 16 bits serve half of them."""


def target() -> str:
    """The target of this GPU; where there is none, one that serves everything."""
    if recording.gpu_missing():
        return "90a"
    import cupy

    capability = cupy.cuda.Device().compute_capability
    return compile.target_of((int(capability[:-1]), int(capability[-1])))


def most_features(dtype: str, family: str, operation: str = "attention_backward") -> int:
    """How many features the kernels of a family take here; 0 where they do not know the dtype."""
    here, family = target(), "sm80" if family == "sm90" else family  # which serves what sm90 does not
    served = dtype in tiles.dtypes("75" if family == "sm75" else here, family)
    return tiles.max_head_dim(operation, dtype, here, family) if served else 0


def batches_of(q: Shape, k: Shape, v: Shape, key_bias: Shape | None) -> list[Shape]:
    """Batch shapes of the inputs that are there."""
    return [q[:-2], k[:-2], v[:-2]] + ([] if key_bias is None else [key_bias[:-1]])


@dataclass(frozen=True)
class Case:
    """One call of the public functions, without a place to run it."""

    dtype: str
    q: Shape
    k: Shape
    v: Shape
    key_bias: Shape | None
    options: dict[str, Any]
    layouts: dict[str, Layout]
    values: str
    seed: int

    @property
    def grouped(self) -> bool:
        return bool(self.options.get("grouped_heads"))

    @property
    def batch(self) -> Shape:
        """Public batch shape of the results."""
        batches = batches_of(self.q, self.k, self.v, self.key_bias)
        if self.grouped:
            outer = np.broadcast_shapes(*(b[:-1] for b in batches))
            return (*outer, self.q[-3])
        return np.broadcast_shapes(*batches)

    @property
    def o(self) -> Shape:
        return (*self.batch, self.q[-2], self.v[-1])

    @property
    def lse(self) -> Shape:
        return self.o[:-1]

    def layout(self, name: str) -> Layout:
        return self.layouts.get(name, Layout())

    def arrays(self) -> dict[str, np.ndarray]:
        """Values of q, k, v, key_bias (where there is one), do and dlse, drawn from the seed."""
        rng = np.random.default_rng(self.seed)
        drawn = {}
        for name, shape in (("q", self.q), ("k", self.k), ("v", self.v), ("do", self.o)):
            # Where the range allows it v is small too, half of the time, and o with it.
            small = self.values == "small" and name == "v" and self.dtype in ("float32", "float64") and self.seed % 2
            kind = self.values if name in "qk" or small else "normal"
            drawn[name] = _values(rng, shape, kind, self.dtype).astype(dtype_of(self.dtype))
        drawn["dlse"] = rng.standard_normal(self.lse).astype(acc_dtype(self.dtype))
        if self.key_bias is not None:
            bias = 3 * rng.standard_normal(self.key_bias)
            bias[rng.random(self.key_bias) < 0.2] = -np.inf
            if bias.ndim > 1 and bias.size and self.seed % 4 == 0:
                bias.reshape(-1, bias.shape[-1])[0] = -np.inf  # a batch element whose rows have no key at all
            drawn["key_bias"] = bias.astype(acc_dtype(self.dtype))
        for name, values in drawn.items():
            drawn[name] = _repeat(values, self.layout(name))
        return drawn


def _values(rng: np.random.Generator, shape: Shape, kind: str, dtype: str) -> np.ndarray:
    x = rng.standard_normal(shape)
    match kind:
        case "wide":
            return 4 * x
        case "spike":  # one row far longer than the others: one huge logit where two such rows meet
            if x.size:
                x.reshape(-1, shape[-1])[rng.integers(x.size // shape[-1])] *= 16
            return x
        case "constant":
            return np.broadcast_to(x[..., :1], shape).copy()
        case "equal keys":
            return np.broadcast_to(x[..., :1, :], shape).copy() if shape[-2] else x
        case "small":
            return SMALL[dtype] * x
    return x


def _repeat(values: np.ndarray, layout: Layout) -> np.ndarray:
    """The same value along every axis that the layout broadcasts with stride 0."""
    if layout.steps is None or 0 in values.shape:
        return values
    first = tuple(slice(0, 1) if step == 0 else slice(None) for step in layout.steps)
    return np.broadcast_to(values[first], values.shape)


lengths = st.one_of(st.sampled_from(EDGES), st.integers(1, 300), st.integers(100, 300), st.integers(1, 40))
long_lengths = st.integers(700, 1100)


def head_dims(most: int) -> st.SearchStrategy[int]:
    """Numbers of features, often those around the tables' head dims."""
    return st.one_of(st.sampled_from([d for d in HEAD_DIMS if d <= most]), st.integers(1, most))


@st.composite
def layouts(draw: st.DrawFn, ndim: int, writable: bool = False, features_last: bool = False) -> Layout:
    """Any placement: swapped axes, gaps, reversal, steps, a base off its alignment; for inputs also stride 0."""
    kind = draw(st.sampled_from(("plain", "swapped", "padded", "shifted", "rows", "any")))
    order = list(range(ndim))
    steps = [1] * ndim
    if kind == "swapped" and ndim > 2:
        order[-3], order[-2] = order[-2], order[-3]
    if kind == "rows" and ndim > 1:
        steps[-2] = draw(st.sampled_from((2, -1, -2)))
    if kind == "any":
        order = draw(st.permutations(order))
        choices = (1, 1, 1, 2, -1) if writable else (1, 1, 1, 2, -1, 0)
        steps = [draw(st.sampled_from(choices)) for _ in order]
    pad = draw(st.sampled_from((1, 2, 4, 8))) if kind in ("padded", "any") else 0
    shift = draw(st.sampled_from((1, 2, 4))) if kind in ("shifted", "any") else 0
    return Layout(tuple(order), tuple(steps), pad, shift)


@st.composite
def bands(draw: st.DrawFn, m: int, n: int) -> dict[str, Any]:
    """causal, align and window."""
    options: dict[str, Any] = {}
    causal = draw(st.booleans())
    sides = st.one_of(st.none(), st.sampled_from((0, 1, 5, 64)), st.integers(0, n + 3))
    window = draw(st.one_of(st.none(), st.tuples(sides, sides)))
    if causal:
        options["causal"] = True
    if window is not None:
        options["window"] = window
    align = draw(st.sampled_from(("bottom-right", "top-left", "int", None)))
    if align == "int":
        align = draw(st.integers(-m - 2, n + 2))
    if align is None and m != n and options:
        align = "bottom-right"
    if align is not None:
        options["align"] = align
    return options


@st.composite
def options(draw: st.DrawFn, m: int, n: int, d: int) -> dict[str, Any]:
    """Everything that changes scores, and grouped_heads left out."""
    chosen = draw(bands(m, n))
    softcap = draw(st.sampled_from((None, None, 0.5, 3.0, 30.0)))
    if softcap is not None:
        chosen["softcap"] = softcap
    scale = draw(st.sampled_from((None, None, 1.0, 0.0, -1.0, 0.3)))
    if scale is not None:
        chosen["scale"] = scale / math.sqrt(d)
    return chosen


@st.composite
def cases(
    draw: st.DrawFn,
    family: str = "sm80",
    operation: str = "attention_backward",
    grouped: bool | None = None,
    with_layouts: bool = True,
) -> Case:
    """Any valid call that kernels of the family serve; few long ones, because a reference is dense."""
    dtype = draw(st.sampled_from([dtype for dtype in DTYPES if most_features(dtype, family)]))
    features = head_dims(most_features(dtype, family, operation))
    long = draw(st.integers(0, 19)) == 19
    m = draw(long_lengths if long and draw(st.booleans()) else lengths)
    n = draw(st.one_of(st.just(m), long_lengths if long else lengths))
    d = draw(features)
    e = {"like d": d, "none": 0}.get(draw(st.sampled_from(VALUE_DIMS)), draw(features))
    if grouped is None:
        grouped = draw(st.integers(0, 3)) == 3
    axes = draw(st.integers(0, 1 if grouped else 3))
    most = max(1, MOST_SCORES // max(1, m * n))
    heads: Shape = ()
    if grouped:
        group = draw(st.integers(1, min(5, max(2, most))))
        kv_heads = draw(st.integers(1, min(3, max(1, most // group))))
        heads, most = (kv_heads, kv_heads * group), most // (kv_heads * group)
    batch: list[int] = []
    for _ in range(axes):
        longest = min(4, most // max(1, math.prod(batch)))
        batch.append(0 if draw(st.integers(0, 40)) == 40 else draw(st.integers(1, max(1, longest))))

    def trimmed(keep: bool, inner: Shape) -> Shape:
        """A batch shape that broadcasts to ``batch``: missing leading axes, axes of length 1."""
        if keep:
            return (*batch, *inner)
        some = tuple(draw(st.sampled_from((length, 1))) for length in batch)
        return (*some[draw(st.integers(0, axes)) :], *inner)

    whole = draw(st.sampled_from(("q", "k", "v")))  # the one that has every batch axis, so that none is lost
    q = (*trimmed(whole == "q", heads[1:]), m, d)
    k = (*trimmed(whole == "k", heads[:1]), n, d)
    v = (*trimmed(whole == "v", heads[:1]), n, e)
    key_bias = None
    if draw(st.integers(0, 2)) == 2:
        bias_heads: Shape = (draw(st.sampled_from((1, heads[1]))),) if grouped else ()
        key_bias = (*trimmed(False, bias_heads), n)
        if draw(st.booleans()):
            key_bias = (n,)
    chosen = draw(options(m, n, d))
    if grouped:
        chosen["grouped_heads"] = True
    precision = draw(st.sampled_from(tiles.precisions(dtype, family)))
    if precision is not None:
        chosen["precision"] = precision
    case = Case(
        dtype=dtype, q=q, k=k, v=v, key_bias=key_bias, options=chosen, layouts={},
        values=draw(st.sampled_from(VALUES)), seed=draw(st.integers(0, 2**32 - 1)),
    )  # fmt: skip
    if not with_layouts:
        return case
    ndims = {"q": len(q), "k": len(k), "v": len(v), "do": len(case.o), "dlse": len(case.lse)}
    if key_bias is not None:
        ndims["key_bias"] = len(key_bias)
    placed = {name: draw(layouts(ndim)) for name, ndim in ndims.items() if draw(st.booleans())}
    results = {"o": len(case.o), "lse": len(case.lse), "dq": len(q), "dk": len(k), "dv": len(v)}
    if key_bias is not None:
        results["dkey_bias"] = len(key_bias)
    placed |= {name: draw(layouts(ndim, writable=True)) for name, ndim in results.items() if draw(st.booleans())}
    return Case(**{**case.__dict__, "layouts": placed})
