"""Run every kernel on tiny problems under the eyes of compute-sanitizer. A script, not a test.

The first run, without a tool, compiles; the tools then watch kernels only::

    export PYTHONPATH=.
    python tests/sanitize.py
    for tool in memcheck racecheck initcheck synccheck; do
      compute-sanitizer --tool $tool --report-api-errors no --error-exitcode 1 python tests/sanitize.py || exit 1
    done

Words after the script's name pick the problems whose description has one of them: ``python tests/sanitize.py d=3``.

API errors are left out: cuda.bindings asks the driver for functions of newer versions and expects a refusal.

Arrays are allocated to the byte and without a pool, so that memcheck knows where each one ends. Results are compared
with the host's, so a run says that kernels ran and computed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from backends import GPU, acc_dtype, bits_dtype, normal
from gpu_cases import most_features, target

import cuflash
from cuflash import devices, hopper


@dataclass(frozen=True)
class Problem:
    """Shapes and options of a call; ``shift`` elements put the arrays off their alignment."""

    m: int
    n: int
    d: int
    e: int
    dtype: str = "float16"
    heads: int = 2
    kv_heads: int = 2
    shift: int = 0
    key_bias: bool = False
    options: dict[str, Any] = field(default_factory=dict)


PROBLEMS = (
    Problem(1, 1, 8, 8),
    Problem(70, 130, 64, 64, options={"causal": True, "align": "bottom-right"}),
    Problem(130, 70, 40, 24, shift=1, key_bias=True, options={"softcap": 5.0}),
    Problem(65, 65, 128, 128, dtype="bfloat16", heads=4, kv_heads=1, options={"causal": True, "grouped_heads": True}),
    Problem(33, 97, 256, 256, options={"window": (40, 8), "align": "bottom-right"}),
    Problem(40, 100, 200, 36, dtype="bfloat16", shift=2, key_bias=True, options={"scale": -0.1}),
    # Each row of the tables of float32 and float64, with blocks that are not full; above 128 features two kernels.
    Problem(70, 130, 20, 32, dtype="float32", key_bias=True, options={"softcap": 5.0}),
    Problem(70, 130, 64, 64, dtype="float32", options={"causal": True, "align": "bottom-right"}),
    Problem(70, 130, 128, 100, dtype="float32", shift=1, options={"window": (40, 8), "align": "bottom-right"}),
    Problem(33, 97, 256, 256, dtype="float32", heads=4, kv_heads=1, options={"grouped_heads": True}),
    Problem(70, 130, 64, 64, dtype="float32", options={"precision": "tf32"}),
    Problem(33, 97, 256, 200, dtype="float32", key_bias=True, options={"precision": "tf32", "scale": -0.1}),
    Problem(70, 130, 20, 32, dtype="float64", key_bias=True, options={"softcap": 5.0}),
    Problem(70, 130, 64, 64, dtype="float64", options={"causal": True, "align": "bottom-right"}),
    Problem(33, 97, 128, 100, dtype="float64", shift=1, options={"window": (40, 8), "align": "bottom-right"}),
    Problem(33, 97, 256, 256, dtype="float64", heads=4, kv_heads=1, options={"grouped_heads": True}),
    # Few features: whole and cut tiles, rows of a band, one row, keys split in two and in three.
    Problem(70, 1100, 3, 3, dtype="float32", options={"causal": True, "align": "bottom-right"}),
    Problem(300, 1100, 8, 8, dtype="float32", options={"causal": True, "align": "bottom-right"}),  # lanes own rows
    Problem(20, 2100, 3, 3, dtype="float16"),  # a cut tile where another was before
    Problem(3, 8300, 2, 3, dtype="float32", heads=1, kv_heads=1, shift=1, key_bias=True),
    Problem(5, 4200, 4, 1, dtype="float64", shift=1),
    Problem(1, 1030, 1, 1, dtype="float16", key_bias=True),
    Problem(1, 4100, 3, 3, dtype="float32"),
    Problem(20, 1100, 3, 3, dtype="float64", key_bias=True),
    Problem(70, 130, 8, 8, dtype="float64", options={"causal": True, "align": "bottom-right"}),
    Problem(20, 300, 16, 16, dtype="float32", options={"window": (40, 8), "align": "bottom-right"}),
    Problem(20, 300, 12, 16, dtype="float64", key_bias=True),
    Problem(5, 40960, 3, 3, dtype="float32", heads=1, kv_heads=1),  # more splits than a warp has lanes
    # Three warpgroups on Hopper, which take over where rows see more than 1024 keys; scores with terms.
    Problem(200, 1300, 64, 64, key_bias=True, options={"causal": True, "align": "bottom-right"}),
    Problem(200, 1300, 64, 60, dtype="bfloat16", shift=1, options={"window": (1200, 40), "align": "bottom-right"}),
    Problem(300, 201, 128, 128, key_bias=True, options={"softcap": 5.0}),
    Problem(70, 98, 256, 256, key_bias=True),
    Problem(300, 420, 64, 64, options={"softcap": 5.0}),  # warps of a warpgroup take different series
    # All gradients on Hopper: more blocks of keys than one, sums of dq of several, rows and keys that see nothing.
    Problem(300, 400, 64, 64, heads=4, options={"grouped_heads": True}),
    # Sums of dk and dv that CTAs with other query heads share; in others those with other query rows do.
    Problem(400, 400, 64, 64, heads=4, options={"causal": True, "grouped_heads": True}),
    Problem(300, 300, 128, 128, heads=4, key_bias=True, options={"causal": True, "grouped_heads": True}),
    Problem(200, 300, 128, 128, dtype="bfloat16", options={"causal": True, "align": "bottom-right"}),
    Problem(300, 200, 96, 72, options={"window": (40, 8), "align": -90}),
    Problem(200, 300, 128, 128, options={"scale": 65.0}),  # lse up to 3200: rows that need care
    Problem(300, 400, 64, 64, options={"softcap": 5.0}),
    Problem(200, 300, 128, 128, heads=4, key_bias=True, options={"grouped_heads": True}),
    Problem(200, 300, 96, 96, key_bias=True, options={"softcap": 5.0, "causal": True, "align": "bottom-right"}),
    # Above 128 features by two kernels.
    Problem(200, 300, 192, 128, options={"causal": True, "align": "bottom-right"}),
    Problem(150, 200, 192, 128, heads=4, key_bias=True, options={"grouped_heads": True}),
    Problem(150, 200, 192, 192, options={"softcap": 5.0, "causal": True, "align": "bottom-right"}),
    Problem(
        150, 200, 256, 256, dtype="bfloat16", heads=4, key_bias=True, options={"softcap": 5.0, "grouped_heads": True}
    ),
)
FAMILIES = ("sm90", "sm80", "sm75")
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-4, "tf32": 1e-2, "float64": 1e-11}
"""Of the largest magnitude: wide enough for any rounding, narrow enough for a wrong element."""


def tolerance(problem: Problem) -> float:
    """Of all results: lse and dkey_bias of 16-bit operands are not rounded, and start from what was."""
    return TOLERANCE[problem.options.get("precision") or problem.dtype]


def serves(family: str, problem: Problem) -> bool:
    """Whether the kernels of a family take a problem here."""
    fits = max(problem.d, problem.e) <= most_features(problem.dtype, "sm75" if family == "sm75" else "sm80")
    return fits and (family != "sm75" or "precision" not in problem.options)


def upload(values: np.ndarray, shift: int = 0) -> Any:
    """A CuPy array over an allocation that ends where it ends."""
    bits = np.zeros(shift + values.size, bits_dtype(values.dtype))
    bits[shift:] = values.ravel().view(bits.dtype)
    return GPU.view(GPU.put(bits), values.dtype, shift * values.itemsize, values.shape, values.strides)


def compare(names: tuple[str, ...], got: tuple[Any, ...], want: tuple[Any, ...], tolerance: float) -> None:
    """Raise unless results agree with the host's."""
    for name, x, y in zip(names, got, want, strict=True):
        a, b = GPU.get(x).astype(np.float64), y.astype(np.float64)
        finite = np.isfinite(b)
        allowed = tolerance * max(1.0, np.abs(b[finite]).max(initial=0))
        with np.errstate(invalid="ignore"):
            wrong = np.where(finite, ~(np.abs(a - b) <= allowed), a != b)
        if wrong.any():
            raise SystemExit(f"{name}: {wrong.sum()} of {wrong.size} elements are wrong, first {np.argwhere(wrong)[0]}")


def calls(
    arrays: list[Any], dlse: Any, options: dict[str, Any], o: Any, room: tuple[Any, ...]
) -> Iterator[tuple[tuple[str, ...], tuple[Any, ...]]]:
    """Every operation on these arrays, with names for its results. ``o``: where that goes, or None; ``room``: where dq,
    dk and dv go, likewise."""
    q, k, v, do = arrays
    gradients = ("dq", "dk", "dv") + (("dkey_bias",) if "key_bias" in options else ())
    o, lse = cuflash.attention(q, k, v, return_lse=True, out=(o, None), **options)
    yield ("o", "lse"), (o, lse)
    out = room + (None,) * (len(gradients) - 3)
    for deterministic in (True, False):
        more = {"dlse": dlse, "deterministic": deterministic, "out": out, **options}
        yield gradients, cuflash.attention_backward(do, q, k, v, o, lse, **more)
    dq = cuflash.attention_backward(do, q, k, v, o, lse, dlse=dlse, need=("q",), **options)
    yield gradients[:1], dq[:1]
    without_dq = cuflash.attention_backward(
        do, q, k, v, o, lse, dlse=dlse, need=[x[1:] for x in gradients[1:]], out=(None, *out[1:]), **options
    )
    yield gradients[1:], without_dq[1:]
    lse, vjp = cuflash.attention_lse_vjp(q, k, **options)
    yield ("lse", *(name for name in gradients if name != "dv")), (lse, *vjp(dlse))
    yield ("o", "lse"), cuflash.attention_merge((o, o), (lse, lse))


def main() -> None:
    """Run all problems on both families."""
    GPU.xp.cuda.set_allocator(None)
    # So that the kernel for all gradients also takes problems too small to gain from it.
    devices.multiprocessors = lambda device: 1
    hopper.WORTH_PLANES = 0  # nor for those of the sm90 family
    hopper.WORTH_SHARES = hopper.WORTH_PARTS = 0  # nor for sums that CTAs share
    hopper.LAST_TILES = 2  # not all tiles of a problem
    for family in FAMILIES:
        if family == "sm90" and target() != "90a":
            continue
        os.environ["CUFLASH_FAMILY"] = family
        for problem in PROBLEMS:
            if not serves(family, problem) or not any(word in str(problem) for word in sys.argv[1:] or [""]):
                continue
            rng = np.random.default_rng(problem.m)
            shapes = (
                (problem.heads, problem.m, problem.d),
                (problem.kv_heads, problem.n, problem.d),
                (problem.kv_heads, problem.n, problem.e),
                (problem.heads, problem.m, problem.e),
            )
            host = [normal(rng, shape, problem.dtype) for shape in shapes]
            accumulator = acc_dtype(problem.dtype)
            dlse = rng.standard_normal((problem.heads, problem.m)).astype(accumulator)
            on_host, on_gpu = dict(problem.options), dict(problem.options)
            if problem.key_bias:
                on_host["key_bias"] = rng.standard_normal(problem.n).astype(accumulator)
                on_host["key_bias"][::7] = -np.inf
                on_gpu["key_bias"] = upload(on_host["key_bias"], problem.shift)
            device = [upload(x, problem.shift) for x in host]
            # initcheck does not see what the copy engine writes: that is written before. NaN fails the comparison.
            *room, o = (upload(np.full_like(x, np.nan)) for x in host)
            got_and_wanted = (
                calls(device, upload(dlse), on_gpu, o, tuple(room)),
                calls(host, dlse, on_host, None, (None,) * 3),
            )
            both = zip(*got_and_wanted, strict=True)
            for (names, got), (_, want) in both:
                compare(names, got, want, tolerance(problem))
            print(f"{family}: {problem}", flush=True)
    GPU.xp.cuda.Device().synchronize()


if __name__ == "__main__":
    main()
