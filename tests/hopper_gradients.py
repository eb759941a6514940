"""What is asked of gradients by the kernels of the sm90 family on a GPU, whichever of them a call takes.

``kernels`` are those that give the gradients of a call, by how the names of their variants begin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from backends import bits_dtype, normal, put
from checks import expect, run
from gpu_cases import Case
from on_gpu import BACKEND, hopper_kernels

import cuflash
from cuflash import needs, tiles

WHOLE, DKV, DQ = (f"{operation}_sm90" for operation in (tiles.FUSED, tiles.DKV, tiles.DQ))
"""The kernel for all gradients, that for dk and dv, and that for dq."""

both_dtypes = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
BANDS = (
    {},
    {"causal": True, "align": "bottom-right"},
    {"window": (130, 20), "align": "top-left"},
)


def taken(launched: Sequence[str]) -> set[str]:
    """Which of the three are among the launched."""
    return {kernel for kernel in (WHOLE, DKV, DQ) for name in launched if name.startswith(kernel)}


def aligned(case: Case) -> Case:
    """The case with rows of whole vectors, whatever its score terms."""
    d, e = (-(-length // 8) * 8 for length in (case.q[-1], case.v[-1] or 8))
    return replace(case, q=(*case.q[:-1], d), k=(*case.k[:-1], d), v=(*case.v[:-1], e))


def in_16_bits(case: Case) -> Case:
    """The case in a dtype and with features that it takes."""
    dtype = case.dtype if case.dtype == "bfloat16" else "float16"
    shapes = {name: (*shape[:-1], min(128, shape[-1])) for name, shape in (("q", case.q), ("k", case.k), ("v", case.v))}
    values = "normal" if case.values == "small" and dtype != case.dtype else case.values
    options = {name: value for name, value in case.options.items() if name != "precision"}
    return replace(case, dtype=dtype, options=options, values=values, **shapes)


SCORE_TERMS: tuple[dict[str, Any], ...] = (
    {"softcap": 0.5},
    {"softcap": 30.0},
    {"scale": -0.1},
    {"scale": 0.0},
    {"key_bias": "weights"},
    {"key_bias": "some absent"},
    {"softcap": 2.0, "key_bias": "some absent"},
)
"""Each series of tanh, a scale alone, weights with and without absent keys, both terms."""


def weights(rng: np.random.Generator, shape: tuple[int, ...], what: str) -> np.ndarray:
    """A key_bias."""
    values = rng.standard_normal(shape).astype(np.float32)
    if what == "some absent":
        values[..., ::7] = -np.inf
        values[..., : shape[-1] // 3] = -np.inf  # whole warps' keys, too
    return values


def check_terms(
    dtype: str,
    q: tuple[int, ...],
    k: tuple[int, ...],
    bias: tuple[int, ...],
    options: dict[str, Any],
    need: tuple[str, ...] | None = None,
    wide: float = 1.0,
    e: int | None = None,
    kernels: Set[str] = frozenset({WHOLE}),
) -> None:
    """The gradients of a call with score terms, in order and not, of values of ``e`` features; `key_bias` among the
    options names `weights`. ``kernels``: how the names of those begin that give gradients."""
    rng = np.random.default_rng(21)
    e = e or q[-1]
    x, y, z, do = (normal(rng, shape, dtype) for shape in (q, k, (*k[:-1], e), (*q[:-1], e)))
    x = (wide * x.astype(np.float32)).astype(x.dtype)
    dlse = rng.standard_normal(q[:-1]).astype(np.float32)
    options = dict(options)
    if "key_bias" in options:
        options["key_bias"] = weights(rng, (*bias, k[-2]), options["key_bias"])
    wanted = expect(x, y, z, do, dlse, family="sm90", **options)
    names = ("q", "k", "v") + (("key_bias",) if "key_bias" in options else ())
    options |= {"key_bias": put(BACKEND, options["key_bias"])} if "key_bias" in options else {}
    x, y, z, do, dlse = (put(BACKEND, array) for array in (x, y, z, do, dlse))
    for deterministic in (True, False):
        with hopper_kernels("name") as launched:
            o, lse = cuflash.attention(x, y, z, return_lse=True, **options)
            more = {"dlse": dlse, "need": need, "deterministic": deterministic, **options}
            got = cuflash.attention_backward(do, x, y, z, o, lse, **more)
        main = [name for name in launched if "_backward_" in name]
        assert all(any(name.startswith(kernel) for name in main) for kernel in kernels), launched
        assert all(name.startswith(tuple(kernels)) for name in main), launched
        for name, gradient in zip(names, got, strict=True):
            assert (gradient is None) == (need is not None and name not in need)
            if gradient is not None:
                wanted[f"d{name}"].check(BACKEND.get(gradient))


# --- whatever the kernels ---------------------------------------------------------------------------------------------


def check_terms_of_lengths(
    dtype: str, d: int, e: int, terms: dict[str, Any], kernels: Set[str] = frozenset({WHOLE})
) -> None:
    """Lengths that no block divides, a block of keys and several, scores beyond each series' limit."""
    for band in BANDS:
        for heads, m, n, wide in ((2, 200, 300, 1.0), (2, 70, 90, 4.0), (1, 1, 300, 1.0)):
            check_terms(dtype, (heads, m, d), (heads, n, d), (heads,), terms | band, wide=wide, e=e, kernels=kernels)


def check_sums_of_dkey_bias(
    q: tuple[int, ...],
    k: tuple[int, ...],
    bias: tuple[int, ...],
    grouped: bool,
    options: dict[str, Any],
    d: int,
    kernels: Set[str] = frozenset({WHOLE}),
) -> None:
    """Of batch axes ``q``, ``k`` and ``bias``, with a softcap and without."""
    options = options | {"key_bias": "some absent"} | ({"grouped_heads": True} if grouped else {})
    for more in ({}, {"softcap": 3.0}):
        check_terms("bfloat16", (*q, 100, d), (*k, 150, d), bias, options | more, kernels=kernels)


def check_without_weight(d: int, options: Mapping[str, Any], kernels: Set[str], **mode: Any) -> None:
    """Gradients are 0, and none is NaN: heads without any key that has a weight, and keys that no row sees."""
    rng = np.random.default_rng(22)
    q, k, v, do = (normal(rng, (3, 200, d), "float16") for _ in range(4))
    key_bias = rng.standard_normal((3, 200)).astype(np.float32)
    key_bias[1] = -np.inf
    arrays = [put(BACKEND, x) for x in (q, k, v)]
    more = {"key_bias": put(BACKEND, key_bias), **options}
    with hopper_kernels("name") as launched:
        o, lse = cuflash.attention(*arrays, return_lse=True, **more)
        got = cuflash.attention_backward(put(BACKEND, do), *arrays, o, lse, **mode, **more)
    assert taken(launched) == kernels
    wanted = expect(q, k, v, do, family="sm90", key_bias=key_bias, **options)
    for name, gradient in zip(("dq", "dk", "dv", "dkey_bias"), map(BACKEND.get, got), strict=True):
        wanted[name].check(gradient)
        assert not gradient[1].any(), name


def check_infinite_key(d: int, kernels: Set[str], **mode: Any) -> None:
    """One without weight has no gradient. Rows beyond the length, which are zeros in shared memory, have none for it
    either. The last block is cut."""
    rng = np.random.default_rng(13)
    q, k, v, do = (normal(rng, (1, 70, d), "float16") for _ in range(4))
    q[..., 5] = -1 - abs(q[..., 5])
    others = np.delete(np.arange(70), 33)
    wanted = expect(q, k[:, others], v[:, others], do, family="sm90")
    k[:, 33, 5] = np.inf
    arrays = [put(BACKEND, x) for x in (q, k, v)]
    with hopper_kernels("name") as launched:
        o, lse = cuflash.attention(*arrays, return_lse=True)
        gradients = cuflash.attention_backward(put(BACKEND, do), *arrays, o, lse, **mode)
    assert taken(launched) == kernels
    for name, gradient in zip(("dk", "dv"), gradients[1:], strict=True):
        got = BACKEND.get(gradient)
        assert not got[:, 33].any(), name
        wanted[name].check(got[:, others])


def check_counters() -> None:
    """They are 0, as every call leaves them."""
    assert all(not x.any() for x in needs._zeros.values())


def check_same_bits(
    arrays: Sequence[np.ndarray], options: Mapping[str, Any], kernels: Set[str], modes: Sequence[Mapping[str, Any]]
) -> None:
    """A call with q, k, v and do, and one more with each of ``modes``, all of which give the same bits. Counters are 0
    after each."""
    q, k, v, do = (put(BACKEND, x) for x in arrays)
    with hopper_kernels("name") as launched:
        forward = {name: value for name, value in options.items() if name != "need"}
        o, lse = cuflash.attention(q, k, v, return_lse=True, **forward)

        def bits(**mode: Any) -> list[Any]:
            found = cuflash.attention_backward(do, q, k, v, o, lse, **options, **mode)
            return [x.view(bits_dtype(x.dtype)) for x in found if x is not None]

        first = bits()
        for mode in modes:
            assert all(bool((x == y).all()) for x, y in zip(first, bits(**mode), strict=True))
            check_counters()
    assert taken(launched) == kernels


def check_same_bits_with_terms(
    terms: Mapping[str, Any], d: int, kernels: Set[str], need: tuple[str, ...] | None = None
) -> None:
    """`check_same_bits` of 50 calls more, with sums of dkey_bias over heads, too."""
    rng = np.random.default_rng(23)
    arrays = [normal(rng, (40, 900, d), "bfloat16") for _ in range(4)]
    options: dict[str, Any] = {"causal": True, "need": need, **terms}
    if "key_bias" in terms:
        options["key_bias"] = put(BACKEND, weights(rng, (900,), terms["key_bias"]))
    check_same_bits(arrays, options, kernels, [{}] * 50)


def check_replays_of_a_graph(d: int, kernels: Set[str], own_workspace: bool, **mode: Any) -> None:
    """Blocks are claimed, and turns taken, anew in each."""
    import cupy

    rng = np.random.default_rng(3)
    versions = [[normal(rng, (6, 400, d), "float16") for _ in range(4)] for _ in range(2)]
    q, k, v, do = (put(BACKEND, x) for x in versions[0])
    o, lse = cupy.empty_like(q), cupy.empty(q.shape[:-1], np.float32)
    gradients = tuple(cupy.empty_like(q) for _ in range(3))
    options = {"causal": True, **mode}
    with hopper_kernels("name") as launched:
        workspace = BACKEND.empty_bytes(cuflash.workspace_nbytes("attention_backward", q, k, v, **options))
        given = {"workspace": workspace} if own_workspace else {}
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()

        def enqueue() -> None:
            cuflash.attention(q, k, v, causal=True, return_lse=True, out=(o, lse))
            cuflash.attention_backward(do, q, k, v, o, lse, out=gradients, **options, **given)

        with stream:
            enqueue()
            stream.begin_capture()
            enqueue()
            graph = stream.end_capture()
            for values in versions[::-1]:
                for array, new in zip((q, k, v, do), values, strict=True):
                    array.set(new)
                for x in gradients:
                    x.data.memset_async(255, x.nbytes, stream)
                graph.launch(stream)
                stream.synchronize()
                wanted = expect(*values, family="sm90", causal=True)
                for name, x in zip(("dq", "dk", "dv"), gradients, strict=True):
                    wanted[name].check(BACKEND.get(x))
    assert taken(launched) == kernels


TERMS_OF_LARGE_SCORES: tuple[dict[str, float], ...] = (
    {},
    {"key_bias": 3.0},
    {"softcap": 1e9},
    {"softcap": 1e9, "key_bias": 3.0},
    {"softcap": 1e12},
)


def check_beyond_the_fraction(terms: Mapping[str, float], d: int, kernels: Set[str], **mode: Any) -> None:
    """Scores of up to 4e9 in some rows, beside small ones in the same tile: p is 1 in all, as there is one key."""
    rng = np.random.default_rng(16)
    q = np.where(np.arange(300)[:, None] % 3 == 1, 20001.0, rng.standard_normal((300, d))).astype(np.float16)
    k = np.full((1, d), 20001, np.float16)
    v, do = np.ones((1, d), np.float16), np.ones((300, d), np.float16)
    options: dict[str, Any] = dict(terms)
    if "key_bias" in terms:
        options["key_bias"] = np.full(1, terms["key_bias"], np.float32)
    with hopper_kernels("name") as launched:
        got = run(BACKEND, q, k, v, do, **mode, **options)
    assert taken(launched) == kernels
    assert (got.dv == 300).all() and np.isfinite(got.dq).all() and np.isfinite(got.dk).all()
