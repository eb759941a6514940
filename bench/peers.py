"""The contenders: cuflash, plain CuPy, torch's attention, the FlashAttention packages; peers_cudnn.py has one more.

Arrays cross by DLPack, and each peer is given the layout that is its own. None of them is a dependency.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from bench.device import Inputs, dtype_of, from_float32, from_jax, from_torch, to_float64, to_jax, to_torch
from bench.problems import DTYPES, Problem
from bench.registry import GRADIENTS, HALF, Prepared, Unsupported, peer

# ---- ours


@contextmanager
def family(name: str) -> Iterator[None]:
    """Kernels of one family, whatever the device would be given."""
    before = os.environ.get("CUFLASH_FAMILY")
    os.environ["CUFLASH_FAMILY"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUFLASH_FAMILY"]
        else:
            os.environ["CUFLASH_FAMILY"] = before


OURS: dict[str, Any] = {
    "needs": ("cupy", "cuflash"),
    "ops": ("forward", "backward", "lse"),
    "dtypes": DTYPES,
    "options": ("window", "softcap", "key_bias", "precision"),
    "modes": ("default", "fast"),
}


@peer("cuflash", **OURS)
def cuflash(problem: Problem, x: Inputs, op: str, mode: str) -> Prepared:
    import cuflash as ours

    options: dict[str, Any] = {
        "causal": problem.causal,
        "align": "bottom-right",
        "window": problem.window,
        "softcap": problem.softcap,
        "key_bias": x.key_bias,
        "grouped_heads": problem.kv_heads != problem.heads,
        "precision": problem.precision,
        "deterministic": mode == "default",
    }
    if op == "forward":
        return Prepared(lambda: ours.attention(x.q, x.k, x.v, **options), lambda o: {"o": o})
    if op == "lse":
        return Prepared(lambda: ours.attention_lse(x.q, x.k, **options), lambda lse: {"lse": lse})
    o, lse = ours.attention(x.q, x.k, x.v, return_lse=True, **options)
    return Prepared(
        lambda: ours.attention_backward(x.do, x.q, x.k, x.v, o, lse, **options),
        lambda grads: {"o": o, "lse": lse} | dict(zip(GRADIENTS, grads, strict=False)),
    )


@peer("cuflash_sm80", **OURS)
def cuflash_sm80(problem: Problem, x: Inputs, op: str, mode: str) -> Prepared:
    with family("sm80"):
        prepared = cuflash(problem, x, op, mode)

    def run() -> Any:
        with family("sm80"):
            return prepared.run()

    return Prepared(run, prepared.outputs)


# ---- what a CuPy user writes without us: matmul, softmax, matmul


@peer(
    "cupy",
    needs=("cupy",),
    ops=("forward", "backward", "lse"),
    dtypes=DTYPES,
    options=("window", "softcap", "key_bias"),
    dense=True,
)
def cupy(problem: Problem, x: Inputs, op: str, mode: str) -> Prepared:
    import cupy as cp

    return dense(problem, x, op, cp)


def dense(p: Problem, x: Inputs, op: str, xp: Any) -> Prepared:
    """The peer ``cupy`` in the module ``xp``: each step in the dtype of the inputs, in place where that is possible."""
    group = p.heads // p.kv_heads
    if p.key_bias and group > 1:
        raise Unsupported("key_bias with grouped heads is not written here")
    if p.softcap is not None and op == "backward":
        raise Unsupported("the slope of softcap is not written here")
    # The rows of a group of heads share their keys: they are stacked, and nothing is repeated.
    stacked = (p.batch, p.kv_heads, group * p.seqlen)
    q, do = x.q.reshape(*stacked, p.head_dim), x.do.reshape(*stacked, p.value_dim)
    k, v = x.k, x.v
    mask = additive_mask(p, xp)
    terms = [] if mask is None else [xp.concatenate([mask] * group)]
    if p.key_bias:
        terms.append(from_float32(x.key_bias[..., None, :], p.dtype))

    def constant(value: float) -> Any:
        # An array of the operands' dtype: NumPy's rules promote bfloat16 with a Python float.
        wide = xp.full(1, value, dtype=xp.float64)
        return from_float32(wide.astype(xp.float32), p.dtype) if p.dtype == "bfloat16" else wide.astype(p.dtype)

    scale, softcap = constant(p.scale), constant(p.softcap or 1.0)

    def scores() -> Any:
        s = xp.matmul(q, k.swapaxes(-1, -2))
        s *= scale
        if p.softcap is not None:
            s /= softcap
            xp.tanh(s, out=s)
            s *= softcap
        for term in terms:
            s += term
        return s

    def softmax(s: Any) -> Any:
        s -= s.max(axis=-1, keepdims=True)
        xp.exp(s, out=s)
        s /= s.sum(axis=-1, keepdims=True)
        return s

    def log_sum_exp() -> Any:
        s = scores()
        top = s.max(axis=-1, keepdims=True)
        s -= top
        xp.exp(s, out=s)
        total = s.sum(axis=-1, dtype=xp.float64 if p.dtype == "float64" else xp.float32)
        return xp.log(total) + to_float64(top.reshape(total.shape))

    def gradients(prob: Any) -> tuple[Any, ...]:
        dv = xp.matmul(prob.swapaxes(-1, -2), do)
        ds = xp.matmul(do, v.swapaxes(-1, -2))
        ds -= (ds * prob).sum(axis=-1, keepdims=True)
        ds *= prob
        dbias = (ds.sum(axis=-2),) if p.key_bias else ()
        ds *= scale
        return xp.matmul(ds, k), xp.matmul(ds.swapaxes(-1, -2), q), dv, *dbias

    if op == "forward":
        return Prepared(lambda: xp.matmul(softmax(scores()), v), lambda o: {"o": o.reshape(x.do.shape)})
    if op == "lse":
        return Prepared(log_sum_exp, lambda lse: {"lse": lse.reshape(x.q.shape[:-1])})
    kept = softmax(scores())  # as a user would keep it from the forward pass
    return Prepared(
        lambda: gradients(kept),
        lambda grads: dict(zip(GRADIENTS, (grads[0].reshape(x.q.shape), *grads[1:]), strict=False)),
    )


def additive_mask(p: Problem, xp: Any) -> Any:
    """-inf where a row does not see a key, else 0; None without a mask."""
    if not p.causal and p.window is None:
        return None
    left, right = p.window or (None, None)
    right = 0 if p.causal else right
    offset = xp.arange(p.seqlen_k)[None, :] - (xp.arange(p.seqlen)[:, None] + p.shift)
    hidden = xp.zeros(offset.shape, dtype=bool)
    hidden |= False if left is None else offset < -left
    hidden |= False if right is None else offset > right
    infinity = np.array(-np.inf, dtype_of(p.dtype))
    bits = infinity.view(f"u{infinity.itemsize}")
    return (hidden.astype(bits.dtype) * bits[()]).view(infinity.dtype)


# ---- torch


def _torch_prepared(
    op: str, forward: Callable[..., Any], x: Inputs, layout: Callable[[Any], Any], back: Callable[[Any], Any]
) -> Prepared:
    """``forward(q, k, v)`` on tensors in the order of ``layout``, or its gradients by autograd; ``back`` undoes it."""
    import torch

    q, k, v, do = (to_torch(layout(each)) for each in (x.q, x.k, x.v, x.do))
    if op == "forward":

        def run() -> Any:
            with torch.no_grad():
                return forward(q, k, v)

        return Prepared(run, lambda o: {"o": back(from_torch(o))})
    leaves = [each.requires_grad_() for each in (q, k, v)]
    o = forward(*leaves)
    return Prepared(
        lambda: torch.autograd.grad(o, leaves, do, retain_graph=True),
        lambda grads: (
            {"o": back(from_torch(o))} | {n: back(from_torch(g)) for n, g in zip(GRADIENTS, grads, strict=False)}
        ),
    )


@contextmanager
def torch_tf32(on: bool) -> Iterator[None]:
    """Whether torch's own float32 matrix products are TF32's; not by default."""
    import torch

    flags = torch.backends.cuda.matmul
    before, flags.allow_tf32 = flags.allow_tf32, on
    try:
        yield
    finally:
        flags.allow_tf32 = before


def _sdpa(backend: str) -> Callable[[Problem, Inputs, str, str], Prepared]:
    def prepare(problem: Problem, x: Inputs, op: str, mode: str) -> Prepared:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        if problem.causal and problem.seqlen != problem.seqlen_k:
            raise Unsupported("is_causal is aligned top-left")
        if problem.causal and problem.key_bias:
            raise Unsupported("is_causal excludes attn_mask")
        more: dict[str, Any] = {"enable_gqa": True} if problem.kv_heads != problem.heads else {}
        if problem.key_bias:  # in the dtype of q, which some backends take it for unseen
            bias = to_torch(from_float32(x.key_bias, problem.dtype))[..., None, :]
            more["attn_mask"] = bias.expand(*bias.shape[:-2], problem.seqlen, -1)
        chosen = getattr(SDPBackend, backend)

        def forward(q: Any, k: Any, v: Any) -> Any:
            with sdpa_kernel(chosen):
                return scaled_dot_product_attention(q, k, v, is_causal=problem.causal, **more)

        tf32 = problem.precision == "tf32"
        with torch_tf32(tf32):
            prepared = _torch_prepared(op, forward, x, lambda a: a, lambda a: a)

        def run() -> Any:
            with torch_tf32(tf32):
                return prepared.run()

        return Prepared(run, prepared.outputs)

    return prepare


peer("sdpa_flash", needs=("cupy", "torch"))(_sdpa("FLASH_ATTENTION"))
peer("sdpa_cudnn", needs=("cupy", "torch"), options=("key_bias",))(_sdpa("CUDNN_ATTENTION"))
peer("sdpa_efficient", needs=("cupy", "torch"), dtypes=(*HALF, "float32"), options=("key_bias",))(
    _sdpa("EFFICIENT_ATTENTION")
)
peer("sdpa_math", needs=("cupy", "torch"), dtypes=DTYPES, options=("precision", "key_bias"), dense=True)(_sdpa("MATH"))


def sequence_first(a: Any) -> Any:
    """(batch, sequence, heads, features), C-ordered: the layout of the flash-attn packages."""
    import cupy as cp

    return cp.ascontiguousarray(a.swapaxes(1, 2))


def heads_first(a: Any) -> Any:
    """The view back to (batch, heads, sequence, features)."""
    return a.swapaxes(1, 2)


def _first(result: Any) -> Any:
    """o, where some versions return (o, lse)."""
    return result[0] if isinstance(result, tuple) else result


@peer("fa3", needs=("cupy", "torch", "flash_attn_interface"), options=("window", "softcap"))
def fa3(problem: Problem, x: Inputs, op: str, mode: str) -> Prepared:
    from flash_attn_interface import flash_attn_func

    left, right = problem.window or (None, None)
    options = {
        "causal": problem.causal,
        "window_size": (-1 if left is None else left, -1 if right is None else right),
        "softcap": problem.softcap or 0.0,
    }
    return _torch_prepared(
        op, lambda q, k, v: _first(flash_attn_func(q, k, v, **options)), x, sequence_first, heads_first
    )


def _fa4(deterministic: bool) -> Callable[[Problem, Inputs, str, str], Prepared]:
    def prepare(problem: Problem, x: Inputs, op: str, mode: str) -> Prepared:
        from flash_attn.cute import flash_attn_func

        options = {
            "causal": problem.causal,
            "window_size": problem.window or (None, None),
            "softcap": problem.softcap or 0.0,
            "deterministic": deterministic,
        }
        return _torch_prepared(
            op, lambda q, k, v: _first(flash_attn_func(q, k, v, **options)), x, sequence_first, heads_first
        )

    return prepare


FA4: dict[str, Any] = {"needs": ("cupy", "torch", "flash_attn.cute"), "options": ("window", "softcap")}
peer("fa4", **FA4)(_fa4(deterministic=False))
# Of the backward alone: this is what the default of cuflash is to be held against.
peer("fa4_deterministic", ops=("backward",), **FA4)(_fa4(deterministic=True))


# ---- without torch


@peer("fa3_jax", needs=("cupy", "jax", "flash_attn3_jax"), options=("window",))
def fa3_jax(problem: Problem, x: Inputs, op: str, mode: str) -> Prepared:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes most of the device's memory
    import jax
    from flash_attn3_jax import flash_mha

    left, right = problem.window or (None, None)
    window = (-1 if left is None else left, -1 if right is None else right)
    q, k, v, do = (to_jax(sequence_first(each)) for each in (x.q, x.k, x.v, x.do))

    def attend(q: Any, k: Any, v: Any) -> Any:
        return flash_mha(q, k, v, is_causal=problem.causal, window_size=window)

    if op == "forward":
        forward = jax.jit(attend)
        return Prepared(lambda: forward(q, k, v), lambda o: {"o": heads_first(from_jax(o))}, jax.block_until_ready)
    _, vjp = jax.vjp(attend, q, k, v)  # holds o and lse: the jitted call below is the backward alone
    backward = jax.jit(lambda vjp, do: vjp(do))
    return Prepared(
        lambda: backward(vjp, do),
        lambda grads: {n: heads_first(from_jax(g)) for n, g in zip(GRADIENTS, grads, strict=False)},
        jax.block_until_ready,
    )
