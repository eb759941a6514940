"""The public functions.

One set of options serves every function on q and k (``Options``); arrays are positional, everything else is given by
name. The docstring of ``attention`` describes the options, the others refer to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, Unpack, overload

from cuflash import calls
from cuflash.problem import flag, needed

Array: TypeAlias = Any
"""A numpy.ndarray or cupy.ndarray; as an argument also any array with DLPack or ``__cuda_array_interface__``."""


class Options(TypedDict, total=False):
    """The options that all functions on q and k accept alike, so that one dict serves a forward and a backward pass."""

    causal: bool
    align: Literal["bottom-right", "top-left"] | int | None
    window: tuple[int | None, int | None] | None
    softcap: float | None
    key_bias: Array | None
    scale: float | None
    grouped_heads: bool
    precision: Literal["tf32"] | None
    deterministic: bool


Align: TypeAlias = Literal["bottom-right", "top-left"] | int | None
Window: TypeAlias = tuple[int | None, int | None] | None
Precision: TypeAlias = Literal["tf32"] | None


class Vjp(Protocol):
    """Gradients of one call of ``attention``, from those of its results."""

    def __call__(
        self,
        do: Array | None = None,
        /,
        *,
        dlse: Array | None = None,
        out: tuple[Array | None, ...] | None = None,
        workspace: Array | None = None,
    ) -> tuple[Array, ...]:
        """Return (dq, dk, dv[, dkey_bias]), as ``attention_backward`` does."""


class LseVjp(Protocol):
    """Gradients of one call of ``attention_lse``, from those of its result."""

    def __call__(
        self,
        dlse: Array,
        /,
        *,
        out: tuple[Array | None, ...] | None = None,
        workspace: Array | None = None,
    ) -> tuple[Array, ...]:
        """Return (dq, dk[, dkey_bias])."""


@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    /,
    *,
    return_lse: Literal[False] = False,
    out: Array | None = None,
    workspace: Array | None = None,
    **options: Unpack[Options],
) -> Array: ...
@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    /,
    *,
    return_lse: Literal[True],
    out: tuple[Array | None, Array | None] | None = None,
    workspace: Array | None = None,
    **options: Unpack[Options],
) -> tuple[Array, Array]: ...
@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    /,
    *,
    return_lse: bool,
    out: Any = None,
    workspace: Array | None = None,
    **options: Unpack[Options],
) -> Array | tuple[Array, Array]: ...
def attention(
    q: Array,
    k: Array,
    v: Array,
    /,
    *,
    causal: bool = False,
    align: Align = None,
    window: Window = None,
    softcap: float | None = None,
    key_bias: Array | None = None,
    scale: float | None = None,
    grouped_heads: bool = False,
    precision: Precision = None,
    deterministic: bool = True,
    return_lse: bool = False,
    out: Any = None,
    workspace: Array | None = None,
) -> Any:
    r"""Exact attention: averages of the rows of v, weighted by the softmax of the scores of q and k.

    .. math:: o_i = \sum_j p_{ij} v_j, \quad p_{ij} = \exp(s_{ij} - \mathrm{lse}_i), \quad
              \mathrm{lse}_i = \log \sum_j \exp(s_{ij})

    with :math:`s_{ij} = \mathrm{scale}\; q_i \cdot k_j`, then softcap, then key_bias, then the masks. No m x n array is
    made: memory beyond inputs and results is O(m) for each head; on a GPU it is next to none, some megabytes where
    queries of few features do not fill it and the keys are split, and on compute capability 9.0 for float32, which
    multiplies 16-bit parts of them, 6 bytes for each element of q, k and v, for 16-bit arrays of rows that do not begin
    at multiples of 16 bytes a copy (`workspace_nbytes`).

    Parameters
    ----------
    q : array, shape (..., m, d)
        Queries, with heads before the sequence: (batch, heads, m, d), not (batch, m, heads, d), which is
        ``x.swapaxes(-2, -3)`` and needs no copy. Axes in another order often broadcast and then mean something else.
        float16, bfloat16, float32 or float64, of any strides; all on the host or all on one GPU.
        Arrays of other libraries are taken in through DLPack or ``__cuda_array_interface__`` without a copy.
    k : array, shape (..., n, d)
        Keys, of q's dtype. Batch axes (all but the last two) broadcast over all inputs as in NumPy.
    v : array, shape (..., n, e)
        Values, of q's dtype.
    causal : bool
        Row i, which sits at key i + a, sees no key after it: j <= i + a.
    align : {'bottom-right', 'top-left'} or int, optional
        Where row i sits: a = n - m, a = 0, or a = the int (as ``k`` in ``numpy.tril``; -1 is strictly past). May be
        left out where m == n, where both words mean a = 0, and where neither causal nor window is given.
    window : (int or None, int or None), optional
        Row i sees keys i + a - left <= j <= i + a + right only. None is an open side. With causal: both hold.
    softcap : float, optional
        Scores become ``softcap * tanh(s / softcap)``; > 0.
    key_bias : array, shape (..., n), optional
        Added to every score of a key, after softcap: the natural logarithm of a weight, -inf where the key is absent.
        float32 (float64 for float64 inputs). ``np.where(mask, 0.0, -np.inf)``, in that dtype, makes it of a mask of the
        keys that are there. Its batch axes broadcast with the others: beware that an array (m, n) is not a bias of each
        query and key, but a batch of m biases.
    scale : float, optional
        Factor on the dot products, any finite number; 1 / sqrt(d) by default.
    grouped_heads : bool
        Axis -3 of q holds g times the heads of k and v, and g successive heads of q share one of theirs. (Axis -2 of
        key_bias then has q's heads, or length 1.)
    precision : {'tf32'}, optional
        Allow TensorFloat-32 products of float32 inputs on a GPU. The host computes in float32 all the same.
    deterministic : bool
        The same call on the same GPU gives the same bits, gradients included. False allows a faster backward pass; on
        the host it changes nothing.
    return_lse : bool
        Return (o, lse).
    out : array or tuple of arrays, optional
        Where the results go, in the order they are returned; returned itself. An entry None is allocated.
        Any strides, but no memory shared with an input, another result or itself.
    workspace : array, shape (nbytes,), optional
        uint8 scratch memory of at least ``workspace_nbytes("attention", ...)`` bytes, for use in CUDA graphs.

    Returns
    -------
    o : array, shape (..., m, e)
        In q's dtype. Its batch and sequence axes lie in memory in the order of q's. Zero in a row that sees no key.
    lse : array, shape (..., m)
        With ``return_lse=True``. float32 (float64 for float64 inputs); -inf in a row that sees no key.

    Raises
    ------
    TypeError
        Wrong Python types, array kinds or dtypes; arrays on the host and on a GPU in one call.
    ValueError
        Shapes that do not fit, values out of range, arrays on different GPUs.
    NotImplementedError
        A valid call that has no kernel yet.
    ImportError
        Arrays on a GPU without the packages that drive it.
    CompileError
        A kernel failed to compile.

    Notes
    -----
    On a GPU the work goes to CuPy's current stream on the device of the arrays and memory comes from CuPy's current
    allocator; nothing is synchronised. A non-finite value of v at a masked position may make rows NaN that do not see
    it; one beyond the arrays' lengths never matters. float32 on tensor cores (compute capability 8.0 and later) is
    computed from operands that are split in two: an infinite one may leave NaN.

    The algorithm is that of Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness"
    (2022), with the online softmax of Milakov and Gimelshein (2018).

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.zeros((2, 4)), np.ones((5, 4)), np.eye(5)
    >>> cuflash.attention(q, k, v, causal=True, align="bottom-right")
    array([[0.25, 0.25, 0.25, 0.25, 0.  ],
           [0.2 , 0.2 , 0.2 , 0.2 , 0.2 ]])
    >>> o, lse = cuflash.attention(q, k, v, window=(0, 1), align="top-left", return_lse=True)
    >>> np.exp(lse)                                                     # each row sees two keys, at score 0
    array([2., 2.])
    """
    x = calls.inputs(
        *(q, k, v, key_bias, True, causal, align, window, softcap, scale, grouped_heads, precision, deterministic)
    )
    results = calls.forward(x, True, flag("return_lse", return_lse), out, workspace)
    return results if return_lse else results[0]


@overload
def attention_vjp(
    q: Array,
    k: Array,
    v: Array,
    /,
    *,
    return_lse: Literal[False] = False,
    need: Iterable[str] | None = None,
    **options: Unpack[Options],
) -> tuple[Array, Vjp]: ...
@overload
def attention_vjp(
    q: Array,
    k: Array,
    v: Array,
    /,
    *,
    return_lse: Literal[True],
    need: Iterable[str] | None = None,
    **options: Unpack[Options],
) -> tuple[tuple[Array, Array], Vjp]: ...
@overload
def attention_vjp(
    q: Array,
    k: Array,
    v: Array,
    /,
    *,
    return_lse: bool,
    need: Iterable[str] | None = None,
    **options: Unpack[Options],
) -> tuple[Array | tuple[Array, Array], Vjp]: ...
def attention_vjp(
    q: Array,
    k: Array,
    v: Array,
    /,
    *,
    causal: bool = False,
    align: Align = None,
    window: Window = None,
    softcap: float | None = None,
    key_bias: Array | None = None,
    scale: float | None = None,
    grouped_heads: bool = False,
    precision: Precision = None,
    deterministic: bool = True,
    return_lse: bool = False,
    need: Iterable[str] | None = None,
) -> tuple[Any, Vjp]:
    """Attention, and the function that pulls gradients of its results back to its inputs.

    Parameters
    ----------
    q, k, v, causal, align, window, softcap, key_bias, scale, grouped_heads, precision, deterministic, return_lse
        As in `attention`.
    need : collection of {'q', 'k', 'v', 'key_bias'}, optional
        The gradients that will be asked for; all by default. The others come back as None and are not computed.

    Returns
    -------
    o : array, shape (..., m, e), or (o, lse)
        As in `attention`.
    vjp : function
        ``vjp(do, *, dlse=None, out=None, workspace=None) -> (dq, dk, dv[, dkey_bias])``, as often as wanted. ``do`` is
        the gradient with respect to o, of its shape and dtype, ``dlse`` that with respect to lse (whether or not it was
        returned); one of them may be None or left out. dkey_bias is there where key_bias was given.

    Notes
    -----
    ``vjp`` holds references to q, k, v, key_bias, o and lse, not copies: do not change them before it is called. Its
    ``out`` and ``workspace`` are those of `attention_backward`, whose notes hold here as well.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError, CompileError
        As in `attention`; ``need`` is checked here, do and dlse by ``vjp``.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.zeros((3, 4)), np.ones((2, 4)), np.ones((2, 1))
    >>> o, vjp = cuflash.attention_vjp(q, k, v)
    >>> dq, dk, dv = vjp(np.ones((3, 1)))
    >>> dv                                              # every row gives half of its weight to each key
    array([[1.5],
           [1.5]])
    >>> dq, dk, dv = vjp(dlse=np.ones(3))               # the gradient of lse.sum()
    >>> dq[0]
    array([0.5, 0.5, 0.5, 0.5])
    """
    x = calls.inputs(
        *(q, k, v, key_bias, True, causal, align, window, softcap, scale, grouped_heads, precision, deterministic)
    )
    with_lse = flag("return_lse", return_lse)
    asked = needed(need, True, key_bias is not None)
    o, lse = calls.forward(x, True, True, None, None)

    def vjp(
        do: Array | None = None,
        /,
        *,
        dlse: Array | None = None,
        out: tuple[Array | None, ...] | None = None,
        workspace: Array | None = None,
    ) -> tuple[Array, ...]:
        """Return (dq, dk, dv[, dkey_bias]), given the gradients with respect to o and lse."""
        return calls.backward(x, calls.upstream(x.problem, do, o, lse, dlse), asked, out, workspace)

    return (o, lse) if with_lse else o, vjp


def attention_backward(
    do: Array | None,
    q: Array,
    k: Array,
    v: Array,
    o: Array | None,
    lse: Array,
    /,
    *,
    causal: bool = False,
    align: Align = None,
    window: Window = None,
    softcap: float | None = None,
    key_bias: Array | None = None,
    scale: float | None = None,
    grouped_heads: bool = False,
    precision: Precision = None,
    deterministic: bool = True,
    dlse: Array | None = None,
    need: Iterable[str] | None = None,
    out: tuple[Array | None, ...] | None = None,
    workspace: Array | None = None,
) -> tuple[Array, ...]:
    """Gradients of attention for state that the caller kept; `attention_vjp` is the simpler way to them.

    Nothing of size m x n is kept or made: the scores are computed again, memory beyond inputs and results is
    O(m + n) rows for each head.

    Parameters
    ----------
    do : array, shape (..., m, e), or None
        Gradient with respect to o, of its shape and dtype. None, with ``dlse``, stands for zeros.
    q, k, v : array
        As they were given to `attention`.
    o, lse : array, shape (..., m, e) and (..., m)
        What `attention` returned with ``return_lse=True`` and the same options, which is not checked. o may be None
        where do is.
    causal, align, window, softcap, key_bias, scale, grouped_heads, precision, deterministic
        As they were given to `attention`.
    dlse : array, shape (..., m), optional
        Gradient with respect to lse, of its shape and dtype.
    need : collection of {'q', 'k', 'v', 'key_bias'}, optional
        Gradients to compute, all by default; the others come back as None.
    out : tuple of arrays, optional
        Where the gradients go, in the order they are returned, None for each that is to be allocated or not needed.
    workspace : array, shape (nbytes,), optional
        uint8 scratch memory of at least ``workspace_nbytes("attention_backward", ...)`` bytes.

    Returns
    -------
    dq, dk, dv[, dkey_bias] : array or None
        Each in shape and dtype of its input, summed over the axes that it was broadcast on; dkey_bias only where
        key_bias was given. Axes lie in memory in the order of the input's, the last one contiguous.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError, CompileError
        As in `attention`.

    Notes
    -----
    Gradients in float16 above 65504 become inf, and so do, on a GPU, those of the scores, which are rounded before they
    meet q and k: scale do down where that is not so, or use bfloat16. A non-finite q, k, v, do or dlse may reach rows
    and keys of its block that do not see it; dlse of a row without keys does not matter.

    Beyond inputs and results a call on a GPU takes up to six numbers of lse's dtype a query row, and up to 256 more
    (float64: 128) where one kernel computes all gradients; on Hopper in 16 bits with key_bias one a key and head.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 4, 2))
    >>> options: cuflash.Options = dict(causal=True, window=(2, None))
    >>> o, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    >>> dq, dk, dv = cuflash.attention_backward(np.ones_like(o), q, k, v, o, lse, **options)
    >>> bool(np.allclose(dv.sum(axis=0), 4))
    True
    """
    x = calls.inputs(
        *(q, k, v, key_bias, True, causal, align, window, softcap, scale, grouped_heads, precision, deterministic)
    )
    asked = needed(need, True, key_bias is not None)
    return calls.backward(x, calls.upstream(x.problem, do, o, lse, dlse), asked, out, workspace)


def attention_lse(
    q: Array,
    k: Array,
    /,
    *,
    causal: bool = False,
    align: Align = None,
    window: Window = None,
    softcap: float | None = None,
    key_bias: Array | None = None,
    scale: float | None = None,
    grouped_heads: bool = False,
    precision: Precision = None,
    deterministic: bool = True,
    out: Array | None = None,
    workspace: Array | None = None,
) -> Array:
    """Log-sum-exp of the scores of each query: attention without values.

    Sinkhorn iterations, kernel density estimates and free energies are of this form. No m x n array is made.

    Parameters
    ----------
    q, k, causal, align, window, softcap, key_bias, scale, grouped_heads, precision, deterministic
        As in `attention`.
    out : array, shape (..., m), optional
        Where the result goes; returned itself.
    workspace : array, shape (nbytes,), optional
        uint8 scratch memory of at least ``workspace_nbytes("attention_lse", ...)`` bytes.

    Returns
    -------
    lse : array, shape (..., m)
        Natural logarithm; float32 (float64 for float64 inputs), in C order. -inf in a row that sees no key.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError, CompileError
        As in `attention`.

    Examples
    --------
    The logarithm of a density estimate with Gaussian kernels at three points y, evaluated at x:

    >>> import numpy as np, cuflash
    >>> x, y, h = np.array([[0.0], [5.0]]), np.array([[-1.0], [0.0], [1.0]]), 0.5
    >>> lse = cuflash.attention_lse(x, y, scale=h**-2, key_bias=-(y**2).sum(-1) / (2 * h**2))
    >>> density = np.exp(lse - (x**2).sum(-1) / (2 * h**2)) / (len(y) * h * np.sqrt(2 * np.pi))
    >>> bool(np.allclose(density[0], np.exp(-0.5 * (y[:, 0] / h) ** 2).mean() / (h * np.sqrt(2 * np.pi))))
    True
    """
    x = calls.inputs(
        *(q, k, None, key_bias, False, causal, align, window, softcap, scale, grouped_heads, precision, deterministic)
    )
    return calls.forward(x, False, True, out, workspace)[0]


def attention_lse_vjp(
    q: Array,
    k: Array,
    /,
    *,
    causal: bool = False,
    align: Align = None,
    window: Window = None,
    softcap: float | None = None,
    key_bias: Array | None = None,
    scale: float | None = None,
    grouped_heads: bool = False,
    precision: Precision = None,
    deterministic: bool = True,
    need: Iterable[str] | None = None,
) -> tuple[Array, LseVjp]:
    """Log-sum-exp of the scores, and the function that pulls its gradient back to the inputs.

    Parameters
    ----------
    q, k, causal, align, window, softcap, key_bias, scale, grouped_heads, precision, deterministic
        As in `attention`.
    need : collection of {'q', 'k', 'key_bias'}, optional
        The gradients that will be asked for; all by default.

    Returns
    -------
    lse : array, shape (..., m)
        As in `attention_lse`.
    vjp : function
        ``vjp(dlse, *, out=None, workspace=None) -> (dq, dk[, dkey_bias])``; dlse has shape and dtype of lse. It holds
        references to q, k, key_bias and lse, not copies.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError, CompileError
        As in `attention`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, logw = np.zeros((1, 2)), np.eye(2), np.log([1.0, 3.0])
    >>> lse, vjp = cuflash.attention_lse_vjp(q, k, key_bias=logw, need=["key_bias"])
    >>> dq, dk, dlogw = vjp(np.ones(1))
    >>> np.round(np.exp(lse), 12), np.round(dlogw, 12)             # the gradient is the weights of the keys
    (array([4.]), array([0.25, 0.75]))
    """
    x = calls.inputs(
        *(q, k, None, key_bias, False, causal, align, window, softcap, scale, grouped_heads, precision, deterministic)
    )
    asked = needed(need, False, key_bias is not None)
    (lse,) = calls.forward(x, False, True, None, None)

    def vjp(
        dlse: Array, /, *, out: tuple[Array | None, ...] | None = None, workspace: Array | None = None
    ) -> tuple[Array, ...]:
        """Return (dq, dk[, dkey_bias]), given the gradient with respect to lse."""
        return calls.backward(x, calls.upstream(x.problem, None, None, lse, dlse), asked, out, workspace)

    return lse, vjp


def attention_merge(
    os: Sequence[Array] | Array,
    lses: Sequence[Array] | Array,
    /,
    *,
    out: tuple[Array | None, Array | None] | None = None,
) -> tuple[Array, Array]:
    """Attention over a union of disjoint key sets, from the results over each of them.

    Parameters
    ----------
    os : sequence of arrays, each (..., m, e), or one array stacked along its first axis
        Results of `attention` of equal shape and dtype, at least one.
    lses : sequence of arrays, each (..., m), or one stacked array
        Their lse.
    out : tuple of arrays, optional
        Where (o, lse) go; None for an entry that is to be allocated. No memory shared with the parts.

    Returns
    -------
    o : array, shape (..., m, e)
        In the dtype of the parts; accumulated in that of lse, in the order given.
    lse : array, shape (..., m)
        Natural logarithm. A row that no part sees has o = 0 and lse = -inf; one that a single part sees has that
        part's values, bit for bit.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError, CompileError
        As in `attention`.

    Notes
    -----
    A part whose lse is -inf has no weight, whatever its o holds. No memory beyond the results is used.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 6, 2))
    >>> parts = [cuflash.attention(q, k[s], v[s], return_lse=True) for s in (slice(0, 2), slice(2, 6))]
    >>> o, lse = cuflash.attention_merge(*zip(*parts))
    >>> bool(np.allclose(o, cuflash.attention(q, k, v)))
    True
    """
    o, lse = calls.merge(os, lses, out)
    return o, lse


def workspace_nbytes(
    operation: Literal["attention", "attention_backward", "attention_lse"],
    q: Array,
    k: Array,
    v: Array | None = None,
    /,
    *,
    causal: bool = False,
    align: Align = None,
    window: Window = None,
    softcap: float | None = None,
    key_bias: Array | None = None,
    scale: float | None = None,
    grouped_heads: bool = False,
    precision: Precision = None,
    deterministic: bool = True,
) -> int:
    """Bytes of scratch memory that a call on such arrays uses, for ``workspace=``.

    Parameters
    ----------
    operation : {'attention', 'attention_backward', 'attention_lse'}
        The function to be called. The backward pass of `attention_lse_vjp` is 'attention_backward' without v.
    q, k, v, causal, align, window, softcap, key_bias, scale, grouped_heads, precision, deterministic
        As in `attention`; 'attention_lse' needs no v.

    Returns
    -------
    int
        0 on the host. Depends on shapes, strides and dtypes, never on values.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError
        As in `attention`; ValueError for another operation.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = k = v = np.ones((8, 4), np.float32)
    >>> cuflash.workspace_nbytes("attention_backward", q, k, v, causal=True)
    0
    """
    names = ", ".join(map(repr, calls.OPERATIONS))
    if not isinstance(operation, str):
        raise TypeError(f"operation, the first argument, must be one of {names}, got {type(operation).__name__}")
    if operation not in calls.OPERATIONS:
        raise ValueError(f"operation must be one of {names}, got {operation!r}")
    if operation == "attention" and v is None:
        raise TypeError("operation 'attention' needs v")
    has_value = v is not None and operation != "attention_lse"
    x = calls.inputs(
        *(q, k, v, key_bias, has_value, causal, align, window, softcap, scale, grouped_heads, precision, deterministic)
    )
    return calls.workspace_nbytes(x.problem, operation)
