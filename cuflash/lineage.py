"""The steps that led to flash attention, each a working, exact implementation: what this package is measured against.

A softmax goes three times over its row to be safe (`safe_softmax`), twice where maximum and sum are found together
(`online_softmax`), and since such a pair merges with that of the next part of the row, attention need not have the row
in memory at all.

None of these is what to use where speed matters: that is `cuflash.attention`, whose results they have.
`cuflash.memory_traffic` predicts the bytes that each of them moves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, overload

import numpy as np

from cuflash import arrays, lineage_host
from cuflash.arrays import Result
from cuflash.problem import flag, integer, operand_dtypes, require

Array = Any
"""As in `cuflash.api`."""

__all__ = ["merge_statistics", "online_softmax", "safe_softmax", "softmax_statistics"]


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
        On a GPU, more than three axes beside ``axis`` that step through memory in ways of their own; bfloat16 before
        compute capability 8.0.
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
        float32 (float64 for float64), in C order; -inf and 0 of a row without elements, or with none above -inf.

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


# --- common to the functions above ---------------------------------------------------------------------------------


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
    dtype = np.dtype(np.float64 if arrays.dtype_name(x.dtype) == "float64" else np.float32)
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
