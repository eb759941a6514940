"""The steps that led to flash attention, each a working, exact implementation: what this package is measured against.

A softmax goes three times over its row to be safe (`safe_softmax`), twice where maximum and sum are found together
(`online_softmax`), and since such a pair merges with that of the next part of the row, attention need not have the row
in memory at all. `standard_attention` does: it has the whole matrix of scores there. `flash1_attention` has what is
summed of each row there, and goes over that once for each tile of keys.

None of these is what to use where speed matters: that is `cuflash.attention`, whose results they have.
`cuflash.memory_traffic` predicts the bytes that each of them moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, overload

import numpy as np

from cuflash import arrays, calls, lineage_host, lineage_tiles
from cuflash.api import Align, Array
from cuflash.arrays import Result
from cuflash.calls import Inputs, zero
from cuflash.problem import Problem, flag, integer, operand_dtypes, require

__all__ = [
    "flash1_attention",
    "flash1_attention_backward",
    "merge_statistics",
    "online_softmax",
    "safe_softmax",
    "softmax_statistics",
    "standard_attention",
    "standard_attention_backward",
]


def safe_softmax(x: Array, /, *, axis: int = -1) -> Array:
    r"""Softmax in three passes: the maximum, the sum of exponentials, the quotients.

    .. math:: y_i = \frac{e^{x_i - m}}{\sum_j e^{x_j - m}}, \quad m = \max_j x_j

    Every element is loaded three times and stored once. Subtracting the maximum is what makes it safe: no exponential
    is above 1.

    Parameters
    ----------
    x : array, shape (..., n, ...)
        float16, bfloat16, float32 or float64, of any strides, with at least one axis. Arrays of other libraries are
        taken in as in `cuflash.attention`.
    axis : int
        The axis along which results sum to 1, of any length.

    Returns
    -------
    y : array, shape of x
        In x's dtype; computed in float32, float64 for float64. NaN where the maximum of a row is infinite.

    Raises
    ------
    TypeError
        Wrong kinds of arrays, dtypes or Python types.
    ValueError
        No axis, or none of that number.
    NotImplementedError
        On a GPU, more than three axes beside ``axis`` that step through memory in ways of their own, 2^31 rows or more,
        and bfloat16 before compute capability 8.0.
    ImportError, CompileError
        As in `cuflash.attention`.

    Notes
    -----
    Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), Algorithm 2. No memory beyond the
    result is used on a GPU; on the host, blocks of about a million elements.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash import lineage
    >>> lineage.safe_softmax(np.log([[1.0, 3.0], [2.0, 2.0]]) + 1000)
    array([[0.25, 0.75],
           [0.5 , 0.5 ]])
    """
    x, at = _rows(x, axis)
    y = arrays.result("y", x.dtype.newbyteorder("="), x.shape, x)
    return _softmax("safe_softmax", x, at, y)


@overload
def online_softmax(x: Array, /, *, axis: int = -1, return_statistics: Literal[False] = False) -> Array: ...
@overload
def online_softmax(x: Array, /, *, axis: int = -1, return_statistics: Literal[True]) -> tuple[Array, Array, Array]: ...
def online_softmax(x: Array, /, *, axis: int = -1, return_statistics: bool = False) -> Any:
    r"""Softmax in two passes: maximum and sum together, then the quotients.

    The running sum is of exponentials against the running maximum, and is rescaled when that grows:

    .. math:: m' = \max(m, x_j), \quad l' = l\, e^{m - m'} + e^{x_j - m'}

    Every element is loaded twice and stored once.

    Parameters
    ----------
    x, axis
        As in `safe_softmax`.
    return_statistics : bool
        Return (y, maximum, total).

    Returns
    -------
    y : array, shape of x
        As in `safe_softmax`.
    maximum, total : array, shape of x without ``axis``
        With ``return_statistics=True``: m and l of each row, float32 (float64 for float64), in C order.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError, CompileError
        As in `safe_softmax`.

    Notes
    -----
    Milakov and Gimelshein (2018), Algorithm 3. Memory as of `safe_softmax`.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash import lineage
    >>> y, maximum, total = lineage.online_softmax(np.log([[1.0, 3.0, 4.0]]), return_statistics=True)
    >>> y, np.exp(maximum), total
    (array([[0.125, 0.375, 0.5  ]]), array([4.]), array([2.]))
    """
    x, at = _rows(x, axis)
    with_statistics = flag("return_statistics", return_statistics)
    y = arrays.result("y", x.dtype.newbyteorder("="), x.shape, x)
    if not with_statistics:
        return _softmax("online_softmax", x, at, y)
    return _softmax("online_softmax", x, at, y, *_statistics_of(x, at))


def softmax_statistics(x: Array, /, *, axis: int = -1) -> tuple[Array, Array]:
    """The maximum of each row, and the sum of its exponentials against it: the first pass of `online_softmax` alone.

    Pairs of parts of a row are merged by `merge_statistics`; ``maximum + log(total)`` is the row's log-sum-exp.

    Parameters
    ----------
    x, axis
        As in `safe_softmax`.

    Returns
    -------
    maximum, total : array, shape of x without ``axis``
        float32 (float64 for float64), in C order; -inf and 0 of a row without elements, or with none above -inf. A NaN
        shows in the total, not in the maximum, which is that of the other elements.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, ImportError, CompileError
        As in `safe_softmax`.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash import lineage
    >>> x = np.random.default_rng(0).standard_normal((3, 10))
    >>> parts = [lineage.softmax_statistics(part) for part in (x[:, :4], x[:, 4:])]
    >>> maximum, total = lineage.merge_statistics(*zip(*parts))
    >>> bool(np.allclose(np.exp(x - maximum[:, None]) / total[:, None], lineage.safe_softmax(x)))
    True
    """
    x, at = _rows(x, axis)
    maximum, total = _softmax("online_softmax", x, at, None, *_statistics_of(x, at))
    return maximum, total


def merge_statistics(maxima: Iterable[Array], totals: Iterable[Array], /) -> tuple[Array, Array]:
    r"""Maximum and sum of rows, from those of disjoint parts of them.

    .. math:: m = \max_i m_i, \quad l = \sum_i l_i\, e^{m_i - m}

    Parameters
    ----------
    maxima, totals : iterable of arrays, or an array stacked along its first axis
        What `softmax_statistics` returned for each part, of equal shapes; at least one.

    Returns
    -------
    maximum, total : array
        Of the shape and dtype of the parts; merged in the order given.

    Raises
    ------
    TypeError
        Wrong kinds of arrays or dtypes.
    ValueError
        No parts, not as many maxima as totals, or shapes that differ.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash import lineage
    >>> lineage.merge_statistics(np.array([[0.0], [np.log(2)]]), np.array([[1.0], [3.0]]))
    (array([0.69314718]), array([3.5]))
    """
    parts = {"maxima": _parts("maxima", maxima), "totals": _parts("totals", totals)}
    if len(parts["maxima"]) != len(parts["totals"]):
        raise ValueError(f"maxima has {len(parts['maxima'])} parts, totals has {len(parts['totals'])}")
    first = parts["maxima"][0]
    if first.dtype.newbyteorder("=") not in (np.float32, np.float64):
        raise TypeError(f"maxima[0] must be float32 or float64, got {first.dtype}")
    like = arrays.result("maximum", first.dtype.newbyteorder("="), first.shape)
    where = {"maxima[0]": arrays.device_of(first)}
    for name, xs in parts.items():
        for index, x in enumerate(xs):
            require(f"{name}[{index}]", x, like, where)
    device = where["maxima[0]"]
    with arrays.current(device):
        xp = arrays.module(device)
        maximum, total = like.empty(xp), like.empty(xp)
        lineage_host.merge_statistics(xp, parts["maxima"], parts["totals"], maximum, total)
    return maximum, total


# --- attention with the matrix in memory --------------------------------------------------------------------------


@overload
def standard_attention(
    q: Array,
    k: Array,
    v: Array,
    /,
    *,
    causal: bool = False,
    align: Align = None,
    scale: float | None = None,
    return_probabilities: Literal[False] = False,
) -> Array: ...
@overload
def standard_attention(
    q: Array,
    k: Array,
    v: Array,
    /,
    *,
    causal: bool = False,
    align: Align = None,
    scale: float | None = None,
    return_probabilities: Literal[True],
) -> tuple[Array, Array]: ...
def standard_attention(
    q: Array,
    k: Array,
    v: Array,
    /,
    *,
    causal: bool = False,
    align: Align = None,
    scale: float | None = None,
    return_probabilities: bool = False,
) -> Any:
    r"""Attention in three steps, each of which has the whole matrix of scores in memory.

    .. math:: S = \mathrm{scale}\, q k^T, \quad P = \mathrm{softmax}(S), \quad o = P v

    The matrix, m x n elements of q's dtype for each head, is written, read, written and read: S as a product, the
    softmax in its place, and the product with v. On a GPU the products are cuBLAS's, and the softmax keeps a row on
    chip, so that it loads and stores each element once.

    Parameters
    ----------
    q, k, v : array, shape (..., m, d), (..., n, d) and (..., n, e)
        As in `cuflash.attention`; on a GPU, arrays that are not in C order, or are broadcast, are copied.
    causal, align, scale
        As in `cuflash.attention`. Hidden scores are computed all the same, and masked by the softmax.
    return_probabilities : bool
        Return (o, p).

    Returns
    -------
    o : array, shape (..., m, e)
        In q's dtype and C order. Zero in a row that sees no key.
    p : array, shape (..., m, n)
        With ``return_probabilities=True``: the matrix of probabilities, in q's dtype and C order.

    Raises
    ------
    TypeError, ValueError, ImportError, CompileError
        As in `cuflash.attention`.
    NotImplementedError
        On a GPU, rows of scores that do not fit on a multiprocessor (the message says how many keys do), 2^31 rows or
        more in all heads, and bfloat16 before compute capability 8.0.
    MemoryError
        No room for the matrix; its size is in the message. On a GPU this is CuPy's ``OutOfMemoryError``.

    Notes
    -----
    Memory beyond inputs and results is m n elements of q's dtype for each head: 134 MB at 8192 tokens in 16 bits. The
    host takes twice as much, or three times for 16 bits, which it computes in float32.

    Scores are rounded to q's dtype: in float16 they must stay below 65504, and results are off by as much as a
    rounding of the largest score, which `cuflash.attention` does not do. float32 is multiplied without TF32.

    Dao et al. (2022), Algorithm 0.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> from cuflash import lineage
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 4))
    >>> o, p = lineage.standard_attention(q, k, v, causal=True, return_probabilities=True)
    >>> bool(np.allclose(o, cuflash.attention(q, k, v, causal=True))), bool(np.allclose(p.sum(-1), 1))
    (True, True)
    """
    x = _inputs(q, k, v, causal, align, scale)
    with_probabilities, problem = flag("return_probabilities", return_probabilities), x.problem
    backend = _backend(problem)
    if problem.device >= 0:
        _check_standard(x, lineage_tiles.ROW_SOFTMAX)
    with arrays.current(problem.device), _matrix_named(problem):
        o, p = (result.empty(arrays.module(problem.device)) for result in _standard_results(problem))
        if problem.empty:
            zero(o)
            zero(p)
        else:
            backend.standard_attention(problem, x.q, x.k, x.v, p, o)
    return (o, p) if with_probabilities else o


def standard_attention_backward(
    do: Array, q: Array, k: Array, v: Array, p: Array, /, *, scale: float | None = None
) -> tuple[Array, Array, Array]:
    r"""Gradients of `standard_attention`, from the probabilities that it returned.

    .. math:: dv = P^T do, \quad dP = do\, v^T, \quad dS = P \circ (dP - \mathrm{rowsum}(P \circ dP)), \quad
              dq = \mathrm{scale}\; dS\, k, \quad dk = \mathrm{scale}\; dS^T q

    P is read three times; dP is written, read, written as dS in its place, and read twice.

    Parameters
    ----------
    do : array, shape (..., m, e)
        Gradient with respect to o, of its shape and dtype.
    q, k, v : array
        As they were given to `standard_attention`.
    p : array, shape (..., m, n)
        What that returned with ``return_probabilities=True``. Masks are in it: hidden keys have the probability 0.
    scale : float, optional
        As it was given to `standard_attention`.

    Returns
    -------
    dq, dk, dv : array
        Each in shape and dtype of its input, in C order.

    Raises
    ------
    TypeError, ValueError, ImportError, CompileError
        As in `standard_attention`.
    NotImplementedError, MemoryError
        As in `standard_attention`, with half as many keys; on a GPU also inputs that are broadcast: give each batch
        position its own, and add up.

    Notes
    -----
    Memory beyond inputs and results is a second matrix of m n elements of q's dtype for each head. It is rounded to
    that dtype as dP and as dS. The host takes twice as much, or seven times for 16 bits, which it computes in float32.

    Dao et al. (2022), Algorithm 3.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash import lineage
    >>> q, k, v = np.zeros((3, 4)), np.ones((2, 4)), np.ones((2, 1))
    >>> o, p = lineage.standard_attention(q, k, v, return_probabilities=True)
    >>> lineage.standard_attention_backward(np.ones((3, 1)), q, k, v, p)[2]
    array([[1.5],
           [1.5]])
    """
    x = _inputs(q, k, v, False, None, scale)
    problem, backend = x.problem, _backend(x.problem)
    like_o, like_p = _standard_results(problem)
    do, p = arrays.as_array("do", do), arrays.as_array("p", p)
    problem.require("do", do, like_o)
    problem.require("p", p, like_p)
    _require_own_inputs(problem)
    if problem.device >= 0:
        _check_standard(x, lineage_tiles.ROW_SOFTMAX_BACKWARD, do=do, p=p)
    with _matrix_named(problem):
        return _gradients(backend.standard_attention_backward, x, do, p)


def _check_standard(x: Inputs, operation: str, **more: Array) -> None:
    """Raise NotImplementedError for a valid call that standard attention does not take on a GPU."""
    for name, a in ({"q": x.q, "k": x.k, "v": x.v} | more).items():
        arrays.require_whole_elements(name, a)
    _launcher().check_standard(x.problem, operation)


@contextmanager
def _matrix_named(problem: Problem) -> Iterator[None]:
    """Say what takes the memory where there is none left; the error stays what it is."""
    try:
        yield
    except MemoryError as error:
        p = _standard_results(problem)[1]
        megabytes = math.prod(p.shape) * p.dtype.itemsize / 1e6
        error.add_note(
            f"standard attention has the whole matrix in memory: {p.shape} elements in {p.dtype} are {megabytes:,.1f} "
            "MB; cuflash.attention has the same result without it"
        )
        raise


def _standard_results(problem: Problem) -> tuple[Result, Result]:
    """o and p."""
    assert problem.o is not None
    *rows, _ = problem.o.shape
    dtype = problem.o.dtype
    return arrays.result("o", dtype, (*rows, problem.e)), arrays.result("p", dtype, (*rows, problem.n))


# --- FlashAttention-1 ----------------------------------------------------------------------------------------------


@overload
def flash1_attention(
    q: Array,
    k: Array,
    v: Array,
    /,
    *,
    causal: bool = False,
    align: Align = None,
    scale: float | None = None,
    return_statistics: Literal[False] = False,
) -> Array: ...
@overload
def flash1_attention(
    q: Array,
    k: Array,
    v: Array,
    /,
    *,
    causal: bool = False,
    align: Align = None,
    scale: float | None = None,
    return_statistics: Literal[True],
) -> tuple[Array, Array, Array]: ...
def flash1_attention(
    q: Array,
    k: Array,
    v: Array,
    /,
    *,
    causal: bool = False,
    align: Align = None,
    scale: float | None = None,
    return_statistics: bool = False,
) -> Any:
    r"""FlashAttention-1: key tiles outside, query tiles inside, o rescaled in memory on each pass.

    A tile of keys and values is loaded once, and all queries of the head pass by it. Their o, l and m are read from
    memory, brought to the new maximum, and written again:

    .. math:: m' = \max(m, \max_j s_j), \quad l' = l\, e^{m - m'} + \sum_j e^{s_j - m'}, \quad
              o' = \frac{l\, e^{m - m'} o + \sum_j e^{s_j - m'} v_j}{l'}

    `cuflash.attention` has the loops the other way round: a query tile keeps o, l and m on chip, and it is keys and
    values that are read again.

    Parameters
    ----------
    q, k, v, causal, align, scale
        As in `cuflash.attention`.
    return_statistics : bool
        Return (o, maximum, total).

    Returns
    -------
    o : array, shape (..., m, e)
        In q's dtype and C order. Zero in a row that sees no key.
    maximum, total : array, shape (..., m)
        With ``return_statistics=True``: m and l of each row, float32 (float64 for float64), such that
        ``maximum + log(total)`` is its log-sum-exp. On a GPU the maximum may be that of some keys before the last: it
        moves only where it would grow by a factor of 2^8 in exponentials.

    Raises
    ------
    TypeError, ValueError, ImportError, CompileError
        As in `cuflash.attention`.
    NotImplementedError
        On a GPU, more than 256 features (float32, float64: 128), batch axes that kernels cannot follow, and bfloat16
        before compute capability 8.0.

    Notes
    -----
    Memory beyond inputs and results: o in float32 (float64 for float64) and two numbers a row. A head is one CTA's, as
    in the paper; only where there are too few heads to fill the GPU are the rows of a head divided.

    Dao et al. (2022), Algorithm 1. On a GPU, key tiles of as many keys as shared memory holds, and the same tensor-core
    instructions as in `cuflash.attention` before compute capability 9.0.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> from cuflash import lineage
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 4))
    >>> o, maximum, total = lineage.flash1_attention(q, k, v, return_statistics=True)
    >>> ours, lse = cuflash.attention(q, k, v, return_lse=True)
    >>> bool(np.allclose(o, ours)), bool(np.allclose(maximum + np.log(total), lse))
    (True, True)
    """
    x = _inputs(q, k, v, causal, align, scale)
    with_statistics, problem = flag("return_statistics", return_statistics), x.problem
    backend = _backend(problem)
    if problem.device >= 0:
        backend.check_flash1(problem, lineage_tiles.FLASH1_FORWARD)
    with arrays.current(problem.device):
        o = _standard_results(problem)[0].empty(arrays.module(problem.device))
        maximum, total = backend.flash1_statistics(problem)
        if problem.empty:
            zero(o)
            maximum.fill(-np.inf)
            total.fill(0)
        else:
            backend.flash1_attention(problem, x.q, x.k, x.v, o, maximum, total)
    return (o, maximum, total) if with_statistics else o


def flash1_attention_backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    maximum: Array,
    total: Array,
    /,
    *,
    causal: bool = False,
    align: Align = None,
    scale: float | None = None,
) -> tuple[Array, Array, Array]:
    r"""Gradients of `flash1_attention`, from its o, m and l; the probabilities are computed again.

    .. math:: p_{ij} = e^{s_{ij} - m_i} / l_i, \quad
              ds_{ij} = p_{ij} (do_i \cdot v_j - do_i \cdot o_i)

    A tile of keys and values is loaded once, and stays with the sums of its dk and dv while all queries of the head
    pass by; the sums of their dq are read from memory, added to, and written again.

    Parameters
    ----------
    do : array, shape (..., m, e)
        Gradient with respect to o, of its shape and dtype.
    q, k, v, causal, align, scale
        As they were given to `flash1_attention`.
    o, maximum, total : array
        What that returned with ``return_statistics=True``.

    Returns
    -------
    dq, dk, dv : array
        Each in shape and dtype of its input, in C order.

    Raises
    ------
    TypeError, ValueError, ImportError, CompileError
        As in `flash1_attention`.
    NotImplementedError
        On a GPU, more than 128 features (float64: 64), inputs that are broadcast, and what `flash1_attention` does not
        take.

    Notes
    -----
    Memory beyond inputs and results: dq in float32 (float64 for float64), rows in multiples of 128, and three numbers a
    row. On a GPU a head is one CTA's, as in the paper: few heads leave most of it idle.

    Dao et al. (2022), Algorithm 4; do o is formed once for each row, not again in each pass.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash import lineage
    >>> q, k, v = np.zeros((3, 4)), np.ones((2, 4)), np.ones((2, 1))
    >>> state = lineage.flash1_attention(q, k, v, return_statistics=True)
    >>> lineage.flash1_attention_backward(np.ones((3, 1)), q, k, v, *state)[2]
    array([[1.5],
           [1.5]])
    """
    x = _inputs(q, k, v, causal, align, scale)
    problem, backend = x.problem, _backend(x.problem)
    do, o, maximum, total = (
        arrays.as_array(name, a) for name, a in (("do", do), ("o", o), ("maximum", maximum), ("total", total))
    )
    for name, a in (("do", do), ("o", o)):
        problem.require(name, a, _standard_results(problem)[0])
    for name, a in (("maximum", maximum), ("total", total)):
        problem.require(name, a, problem.lse)
    _require_own_inputs(problem)
    if problem.device >= 0:
        for name, a in (("maximum", maximum), ("total", total)):
            arrays.require_whole_elements(name, a)
        backend.check_flash1(problem, lineage_tiles.FLASH1_BACKWARD)
    return _gradients(backend.flash1_attention_backward, x, do, o, maximum, total)


# --- common to attention -------------------------------------------------------------------------------------------


def _inputs(q: Array, k: Array, v: Array, causal: bool, align: Align, scale: float | None) -> Inputs:
    return calls.inputs(q, k, v, None, True, causal, align, None, None, scale, False, None, True)


def _backend(problem: Problem) -> Any:
    return lineage_host if problem.device < 0 else _launcher()


def _require_own_inputs(problem: Problem) -> None:
    """Raise on a GPU where an input of a backward pass is broadcast: nothing sums its gradient there."""
    if problem.device < 0:
        return
    batches = {"q": problem.q_batch, "k": problem.k_batch, "v": problem.v_batch}
    for name, batch in batches.items():
        if batch != problem.batch:
            raise NotImplementedError(
                f"{name} has batch axes {batch}, the call {problem.batch}: on a GPU the backward passes of the lineage "
                "do not sum over broadcast axes; cuflash.attention_backward does"
            )


def _gradients(backward: Callable[..., None], x: Inputs, do: Array, *state: Array) -> tuple[Array, Array, Array]:
    """dq, dk and dv in C order, filled by a backend's backward pass from do and what the forward pass left."""
    problem, xp = x.problem, arrays.module(x.problem.device)
    named = {"dq": x.q, "dk": x.k, "dv": x.v}
    with arrays.current(problem.device):
        dq, dk, dv = (arrays.result(name, a.dtype.newbyteorder("="), a.shape).empty(xp) for name, a in named.items())
        if problem.empty or problem.e == 0:
            for gradient in (dq, dk, dv):
                zero(gradient)
        else:
            backward(problem, do, x.q, x.k, x.v, *state, dq, dk, dv)
    return dq, dk, dv


# --- common to the softmaxes ---------------------------------------------------------------------------------


def _rows(x: Array, axis: int) -> tuple[Any, int]:
    """x as a plain array of a dtype that is known, and the axis counted from the front."""
    x = arrays.as_array("x", x)
    operand_dtypes({"x": x.dtype})
    at = integer("axis", axis, "an int")
    if x.ndim == 0:
        raise ValueError("x has no axis: a softmax needs one")
    if not -x.ndim <= at < x.ndim:
        raise ValueError(f"axis must be {-x.ndim} to {x.ndim - 1} for an array of {x.ndim} axes, got {at}")
    arrays.require_whole_elements("x", x)
    return x, at % x.ndim


def _statistics_of(x: Array, axis: int) -> tuple[Result, Result]:
    shape = x.shape[:axis] + x.shape[axis + 1 :]
    dtype = operand_dtypes({"x": x.dtype})[1]
    return arrays.result("maximum", dtype, shape), arrays.result("total", dtype, shape)


def _softmax(operation: str, x: Array, axis: int, *results: Result | None) -> Any:
    """What a softmax is asked for, on the backend of its array: y, and the statistics; one result alone as it is."""
    device = arrays.device_of(x)
    with arrays.current(device):
        xp = arrays.module(device)
        y, maximum, total = ([None if r is None else r.empty(xp) for r in results] + [None, None])[:3]
        rows = xp.moveaxis(x, axis, -1)
        outputs = None if y is None else xp.moveaxis(y, axis, -1)
        if device < 0:
            getattr(lineage_host, operation)(rows, outputs, maximum, total)
        else:
            _launcher().softmax(operation, rows, outputs, maximum, total)
    found = tuple(x for x in (y, maximum, total) if x is not None)
    return found[0] if len(found) == 1 else found


def _parts(name: str, xs: Iterable[Array]) -> list[Any]:
    """The arrays of an iterable: those of a stacked array along its first axis."""
    if not isinstance(xs, Iterable):
        raise TypeError(f"{name} must be an iterable of arrays, got {type(xs).__name__}")
    parts = [arrays.as_array(f"{name}[{index}]", x) for index, x in enumerate(xs)]
    if not parts:
        raise ValueError(f"{name} has no parts: at least one is needed")
    return parts


def _launcher() -> Any:
    """The CUDA side, imported with the first array on a GPU."""
    from cuflash import lineage_launch

    return lineage_launch
