"""Drawn problems in the inner form that `cuflash.host` takes, run in drawn tiles and layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from backends import HOST, Layout, acc_dtype, dtype_of, place, place_hole
from gpu_cases import bands, batches_of, layouts
from hypothesis import strategies as st

from cuflash import host, score

Shape = tuple[int, ...]
DTYPES = ("float16", "bfloat16", "float32", "float64")
RESULTS = ("o", "lse", "dq", "dk", "dv", "dkey_bias")


@dataclass(frozen=True)
class HostCase:
    """One problem, and how the host is to run it."""

    dtype: str
    q: Shape
    k: Shape
    v: Shape
    key_bias: Shape | None
    options: dict[str, Any]
    has_do: bool
    has_dlse: bool
    tile: tuple[int, int] | None
    layouts: dict[str, Layout]
    seed: int

    @property
    def batch(self) -> Shape:
        return np.broadcast_shapes(*batches_of(self.q, self.k, self.v, self.key_bias))

    def arrays(self) -> dict[str, Any]:
        """q, k, v, do, dlse and key_bias; None where the case has none."""
        rng = np.random.default_rng(self.seed)
        rows = (*self.batch, self.q[-2])
        shapes = {"q": self.q, "k": self.k, "v": self.v, "do": (*rows, self.v[-1])}
        drawn: dict[str, Any] = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
        drawn = {name: x.astype(dtype_of(self.dtype)) for name, x in drawn.items()}
        drawn["dlse"] = rng.standard_normal(rows).astype(acc_dtype(self.dtype)) if self.has_dlse else None
        drawn["do"] = drawn["do"] if self.has_do else None
        drawn["key_bias"] = None
        if self.key_bias is not None:
            bias = 2 * rng.standard_normal(self.key_bias)
            bias[rng.random(self.key_bias) < 0.25] = -np.inf
            drawn["key_bias"] = bias.astype(acc_dtype(self.dtype))
        return {name: None if x is None else place(HOST, x, self.layouts.get(name)).array for name, x in drawn.items()}

    def settings(self) -> dict[str, Any]:
        """Keywords of `cuflash.host` that the options come to."""
        causal, align, window = (self.options.get(name) for name in ("causal", "align", "window"))
        return {
            "scale": self.options["scale"],
            "band": score.band(self.q[-2], self.k[-2], bool(causal), align, window),
            "softcap": self.options.get("softcap"),
            "tile": self.tile,
        }

    def run(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """All results, in outputs that were NaN inside and around; fails if anything around them was written."""
        q, k, v, bias, do, dlse = (arrays[name] for name in ("q", "k", "v", "key_bias", "do", "dlse"))
        rows = (*self.batch, self.q[-2])
        shapes = {"o": (*rows, self.v[-1]), "lse": rows, "dq": self.q, "dk": self.k, "dv": self.v}
        shapes |= {} if bias is None else {"dkey_bias": bias.shape}
        placed = {
            name: place_hole(
                HOST,
                shape,
                acc_dtype(self.dtype) if name in ("lse", "dkey_bias") else dtype_of(self.dtype),
                self.layouts.get(name),
            )
            for name, shape in shapes.items()
        }
        out = {name: x.array for name, x in placed.items()}
        host.forward(q, k, v, bias, out["o"], out["lse"], **self.settings())
        grads = (out["dq"], out["dk"], out["dv"], out.get("dkey_bias"))
        host.backward(q, k, v, bias, do, out["o"], out["lse"], dlse, *grads, **self.settings())
        for x in placed.values():
            x.check_guards()
        return out


lengths = st.one_of(st.sampled_from((0, 1, 2, 3)), st.integers(1, 70))
features = st.integers(1, 24)


@st.composite
def host_cases(draw: st.DrawFn, dtypes: tuple[str, ...] = DTYPES) -> HostCase:
    """Any problem of up to three batch axes, each input broadcast on axes of its own."""
    m = draw(lengths)
    n = draw(st.one_of(st.just(m), lengths))
    batch = tuple(draw(st.lists(st.sampled_from((1, 2, 3, 3, 0)), max_size=3)))

    def trimmed() -> Shape:
        """A batch shape that broadcasts to the batch: leading axes missing, axes of length 1."""
        axes = tuple(draw(st.sampled_from((size, 1))) for size in batch)
        return axes[draw(st.integers(0, len(batch))) :] if draw(st.booleans()) else batch

    d = draw(features)
    q, k, v = ((*trimmed(), length, width) for length, width in ((m, d), (n, d), (n, draw(st.integers(0, 24)))))
    bias = draw(st.sampled_from((None, (*trimmed(), n))))
    options = draw(bands(m, n))
    options["scale"] = draw(st.sampled_from((d**-0.5, d**-0.5, 1.0, 0.0, -0.5, 1e-60)))
    options["softcap"] = draw(st.sampled_from((None, None, 0.5, 5.0)))
    has_do = draw(st.booleans())
    ndims = {"q": len(q), "k": len(k), "v": len(v), "dq": len(q), "dk": len(k), "dv": len(v)}
    ndims["o"] = ndims["do"] = len(np.broadcast_shapes(*batches_of(q, k, v, bias))) + 2
    ndims["lse"] = ndims["dlse"] = ndims["o"] - 1
    if bias is not None:
        ndims |= {"key_bias": len(bias), "dkey_bias": len(bias)}
    return HostCase(
        dtype=draw(st.sampled_from(dtypes)),
        q=q,
        k=k,
        v=v,
        key_bias=bias,
        options=options,
        has_do=has_do,
        has_dlse=not has_do or draw(st.booleans()),
        tile=draw(st.one_of(st.none(), st.tuples(st.integers(1, 40), st.integers(1, 40)))),
        layouts={name: draw(layouts(ndim, writable=True)) for name, ndim in ndims.items() if draw(st.booleans())},
        seed=draw(st.integers(0, 2**32 - 1)),
    )
