"""What ``python -m cuflash`` does without a command: real attention heads and one long problem, checked in float64."""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

import cuflash
from cuflash import arrays, cli_dense, cli_info, host
from cuflash.cli_dense import Dense
from cuflash.score import Band

Array = NDArray[Any]

LAYERS = (0, 2)
"""Layers of the encoder that the packaged heads are from."""
HOST_TOKENS, GPU_TOKENS = 8192, 131072
ROUNDS = 3
"""Timed runs of each computation, after one that warms it up."""
COPIED_BYTES = 2**30
"""Size of the copy that measures a GPU's memory."""
BUSY = (
    "Where other programs keep the cores busy, BLAS threads wait for each other at each tile: OPENBLAS_NUM_THREADS=1."
)
"""What slows the host down beyond the dense formula."""
SAMPLED_ROWS = 64
KERNEL_TILE = (128, 64)
"""Rows and keys of the kernels' tiles at this head dim; the budgets hardly depend on it."""
SEED = 20260


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Make the demo what ``python -m cuflash`` does without a command."""
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> int:
    """Both parts, where the GPU is when it is usable; 1 where an error is above its budget."""
    begin = time.perf_counter()
    driver = cli_info.find_driver()
    fault = cli_info.missing(driver)
    place: Place = Host() if driver is None or fault else Gpu(driver.devices[0])
    print(f"cuflash {cuflash.__version__}, computing on {place}")
    if fault:
        print(f"note: {fault}")
    with resources.as_file(resources.files("cuflash") / "data" / "minilm_heads.npz") as path, np.load(path) as heads:
        q, k, v = (heads[name] for name in "qkv")
    good = _real_heads(place, q, k, v)
    good &= _long_problem(place, q, k, v)
    verdict = "every error is within its budget" if good else "AN ERROR IS ABOVE ITS BUDGET"
    print(f"\n{verdict}; {time.perf_counter() - begin:.1f} s in all")
    return 0 if good else 1


# --- where it runs ---------------------------------------------------------------------------------------------------


Compute: TypeAlias = Callable[[], tuple[Any, ...]]


class Measured(NamedTuple):
    """What a computation returned, and the seconds and the bytes beyond its results that it took."""

    results: tuple[Any, ...]
    seconds: float
    extra_bytes: int


def _measure(place: Place, computations: Mapping[str, Compute]) -> dict[str, Measured]:
    """Each measured alike: memory in a run of its own, which also warms up, and the median time of runs in which all
    take turns, because the speed of a machine drifts."""
    peaks = {name: place.peak_bytes(compute) for name, compute in computations.items()}
    seconds: dict[str, list[float]] = {name: [] for name in computations}
    for _ in range(ROUNDS):
        for name, compute in computations.items():
            seconds[name].append(place.seconds(compute))
    return {
        name: Measured(results, statistics.median(seconds[name]), peak - sum(x.nbytes for x in results))
        for name, (results, peak) in peaks.items()
    }


class Host:
    """NumPy. ``budgets`` is the most that the error of each result of one head may be, in units of its bound."""

    tokens = HOST_TOKENS
    dtypes = ("float16", "float32")

    def __str__(self) -> str:
        return f"the host with NumPy {np.__version__}, {platform.machine()}, {os.cpu_count()} cores"

    def put(self, x: Array) -> Array:
        return x

    def get(self, x: Array) -> Array:
        return x

    def seconds(self, compute: Compute) -> float:
        begin = time.perf_counter()
        compute()
        return time.perf_counter() - begin

    def peak_bytes(self, compute: Compute) -> tuple[tuple[Any, ...], int]:
        """The results, and what was held at most beyond what was there before, results included."""
        tracemalloc.start()
        results = compute()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return results, peak

    dense_words = "the forward as it is usually written, in float32, one head after the other"

    def dense(self, q: Array, k: Array, v: Array) -> Compute:
        """The forward of all heads as NumPy users write it."""

        def head(q: Array, k: Array, v: Array) -> Array:
            q, k, v = (x.astype(np.float32) for x in (q, k, v))
            s = q @ k.T * np.float32(1 / math.sqrt(q.shape[-1]))
            p = np.exp(s - s.max(axis=-1, keepdims=True))
            o: Array = (p / p.sum(axis=-1, keepdims=True)) @ v
            return o

        return lambda: (np.stack([head(*qkv) for qkv in zip(q, k, v, strict=True)]).astype(q.dtype),)

    def budgets(self, q: Array, k: Array, v: Array, do: Array, dense: Dense) -> dict[str, float]:
        return {name: cli_dense.host_budget(name, q.dtype, dense.max_score) for name in cli_dense.RESULTS}


class Gpu:
    """CuPy on the first device; the same methods."""

    tokens = GPU_TOKENS
    dtypes = ("float16",)

    def __init__(self, device: cli_info.Device) -> None:
        self.device = device
        self.xp = arrays.cupy()

    def __str__(self) -> str:
        return f"the GPU with CuPy {self.xp.__version__}: {self.device}"

    def put(self, x: Array) -> Any:
        return self.xp.asarray(x)

    def get(self, x: Any) -> Array:
        host_array: Array = self.xp.asnumpy(x)
        return host_array

    def seconds(self, compute: Compute) -> float:
        stream = self.xp.cuda.get_current_stream()
        stream.synchronize()
        begin = time.perf_counter()
        compute()
        stream.synchronize()
        return time.perf_counter() - begin

    def peak_bytes(self, compute: Compute) -> tuple[tuple[Any, ...], int]:
        pool = self.xp.cuda.MemoryPool()  # a pool of its own never shrinks, so its size in the end is the peak
        with self.xp.cuda.using_allocator(pool.malloc):
            results = compute()
        return results, pool.total_bytes()

    dense_words = "no computation, but its S x S scores written and read once, piece by piece"

    def dense(self, q: Array, k: Array, v: Array) -> Compute:
        """What takes less time than a dense forward: to write the S x S scores in float32 and read them once."""
        nbytes = _scores_bytes(q, k)
        source, target = (self.xp.empty(COPIED_BYTES, np.uint8) for _ in range(2))

        def copy() -> tuple[Any, ...]:
            for begin in range(0, nbytes, COPIED_BYTES):
                target.data.copy_from_device(source.data, min(COPIED_BYTES, nbytes - begin))
            return ()

        return copy

    def budgets(self, q: Array, k: Array, v: Array, do: Array, dense: Dense) -> dict[str, float]:
        features = q.shape[-1]
        chains = {"o": len(k), "lse": 0, "dq": len(k) + features}
        steps = {name: length / cli_dense.MMA_DEPTH for name, length in chains.items()}
        # The rows with a gradient may be far apart, each in a step of its own.
        steps |= dict.fromkeys(("dk", "dv"), len(q) + features / cli_dense.MMA_DEPTH)
        own = {name: cli_dense.error(name, x, dense) for name, x in _host_specification(q, k, v, do).items()}
        return {name: cli_dense.kernel_budget(name, q.dtype, own[name], steps[name], features, dense) for name in own}


Place: TypeAlias = Host | Gpu


def _scores_bytes(q: Array, k: Array) -> int:
    """Size of the scores of all heads in float32."""
    heads, m, n = len(q), int(q.shape[-2]), int(k.shape[-2])
    return heads * m * n * 4


def _host_specification(q: Array, k: Array, v: Array, do: Array) -> dict[str, Array]:
    """Float32 results of one head by the host, rounding in between to q's dtype where the kernels do."""
    options: dict[str, Any] = {
        "scale": 1 / math.sqrt(q.shape[-1]),
        "band": Band(-len(q), len(k)),
        "softcap": None,
        "tile": KERNEL_TILE,
        "operand": q.dtype,
    }
    o, dq, dk, dv = (np.empty(x.shape, np.float32) for x in (do, q, k, v))
    lse = np.empty(len(q), np.float32)
    host.forward(q, k, v, None, o, lse, **options)
    host.backward(q, k, v, None, do, o.astype(q.dtype), lse, None, dq, dk, dv, None, **options)
    return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def _worst_shares(
    place: Place, q: Array, k: Array, v: Array, do: Array, results: dict[str, Array]
) -> tuple[dict[str, float], float]:
    """Largest error of each result over the heads (axis 0) as a share of its budget, and the largest |score|."""
    shares: list[dict[str, float]] = []
    max_score = 0.0
    for head in range(len(q)):
        dense = cli_dense.attention(q[head], k[head], v[head], do[head])
        budgets = place.budgets(q[head], k[head], v[head], do[head], dense)
        shares.append({name: cli_dense.error(name, results[name][head], dense) / budgets[name] for name in budgets})
        max_score = max(max_score, dense.max_score)
    # np.max and not max: a NaN must win.
    return {name: float(np.max([share[name] for share in shares])) for name in cli_dense.RESULTS}, max_score


def _verdict(shares: dict[str, float]) -> bool:
    """Print the shares; whether each is at most 1, which NaN is not."""
    good = all(share <= 1 for share in shares.values())
    print("  ".join(f"{name} {share:.2f}" for name, share in shares.items()), "" if good else "  ABOVE BUDGET")
    return good


# --- the two parts ---------------------------------------------------------------------------------------------------


def _real_heads(place: Place, q: Array, k: Array, v: Array) -> bool:
    """Forward and gradients of the packaged heads, (layers, heads, tokens, features)."""
    _, heads, tokens, features = q.shape
    print(
        f"\n1. Real heads of a sentence encoder: {heads} of layer {LAYERS[0]} and {heads} of layer {LAYERS[1]}, "
        f"{tokens} tokens, head dim {features}.\n"
        "   Largest error against dense float64, as a share of its budget:"
    )
    good = True
    rng = np.random.default_rng(SEED)
    for index, layer in enumerate(LAYERS):
        for dtype in place.dtypes:
            ql, kl, vl = (x[index].astype(dtype) for x in (q, k, v))
            do = rng.standard_normal(vl.shape).astype(dtype)
            (o, lse), vjp = cuflash.attention_vjp(place.put(ql), place.put(kl), place.put(vl), return_lse=True)
            results = dict(zip(cli_dense.RESULTS, map(place.get, (o, lse, *vjp(place.put(do)))), strict=True))
            shares, max_score = _worst_shares(place, ql, kl, vl, do, results)
            print(f"   layer {layer}, {dtype}, scores to {max_score:4.1f}:  ", end="")
            good &= _verdict(shares)
    return good


def _long_problem(place: Place, q: Array, k: Array, v: Array) -> bool:
    """The first head of each layer on one long sequence of tokens, drawn from the real ones."""
    rng = np.random.default_rng(SEED)
    n, tokens = place.tokens, rng.integers(q.shape[-2], size=place.tokens)
    q, k, v = (np.ascontiguousarray(x[:, 0, tokens]) for x in (q, k, v))
    # The gradient of a loss over the sampled rows: dk and dv then are sums over those rows alone, and float64 can
    # afford to check all of them.
    rows = np.sort(rng.choice(n, SAMPLED_ROWS, replace=False))
    do = np.zeros_like(v)
    do[:, rows] = rng.standard_normal((len(q), SAMPLED_ROWS, v.shape[-1]))
    heads, _, features = q.shape
    print(f"\n2. A long problem: {n} tokens drawn from the real ones, {heads} heads, head dim {features}, {q.dtype}.")

    qx, kx, vx, dox = (place.put(x) for x in (q, k, v, do))
    ox, lsex = cuflash.attention(qx, kx, vx, return_lse=True)
    took = _measure(
        place,
        {
            "forward": lambda: cuflash.attention(qx, kx, vx, return_lse=True),
            "dense": place.dense(q, k, v),
            "backward": lambda: cuflash.attention_backward(dox, qx, kx, vx, ox, lsex),
        },
    )
    for name, measured in took.items():
        memory = f", {measured.extra_bytes / 1e6:.1f} MB beyond inputs and results" if measured.results else ""
        print(f"   {name:9}{measured.seconds:7.3f} s{memory}")
    print(f"   dense is {place.dense_words}; all S x S scores are {_scores_bytes(q, k) / 1e6:.1f} MB.")
    print(f"   Times are medians of {ROUNDS} runs in turns; memory is from a run of its own before them.")
    if isinstance(place, Host) and took["forward"].seconds > took["dense"].seconds:
        print(f"   {BUSY}")
    o, lse, dq, dk, dv = map(place.get, (*took["forward"].results, *took["backward"].results))
    results = {"o": o[:, rows], "lse": lse[:, rows], "dq": dq[:, rows], "dk": dk, "dv": dv}
    shares, _ = _worst_shares(place, q[:, rows], k, v, do[:, rows], results)
    print(f"   {SAMPLED_ROWS} rows a head against float64, share of the budget:  ", end="")
    return _verdict(shares)
