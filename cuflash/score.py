"""What a score is: the band of keys that a row sees, and the terms that change a score before it is masked.

Pure arithmetic, shared by the host backend and by whoever plans a launch; the kernels hold the same formulas under the
same names (``kernels_cu/include/score.cuh`` and ``blocks.cuh``). The order of the terms is part of the contract:
scale, softcap, key_bias, then the band.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]

EMPTY, PARTIAL, FULL = 0, 1, 2
"""What a block of keys is to a block of rows: seen by none of them, by some, or every key by every row."""


@dataclass(frozen=True)
class Band:
    """Causal and window as one run-time term: row i sees key j if and only if ``i + lo <= j <= i + hi``.

    Parameters
    ----------
    lo, hi : int
        Both in [-m, n], so they fit an int32 whatever the caller's window was. An open side is ``lo = -m`` or
        ``hi = n``.

    Examples
    --------
    >>> [[Band(-1, 0).sees(i, j) for j in range(3)] for i in range(3)]
    [[True, False, False], [True, True, False], [False, True, True]]
    """

    lo: int
    hi: int

    def sees(self, row: int, key: int) -> bool:
        """Whether the row sees the key."""
        return row + self.lo <= key <= row + self.hi

    def is_full(self, m: int, n: int) -> bool:
        """Whether each of m rows sees each of n keys."""
        return self.covers(0, m, 0, n)

    def covers(self, row_begin: int, row_end: int, key_begin: int, key_end: int) -> bool:
        """Whether each row of [row_begin, row_end) sees each key of [key_begin, key_end)."""
        return row_end - 1 + self.lo <= key_begin and key_end - 1 <= row_begin + self.hi

    def transposed(self) -> Band:
        """The same band with the parts of rows and keys exchanged."""
        return Band(-self.hi, -self.lo)

    def hidden(self, row_begin: int, row_end: int, key_begin: int, key_end: int) -> NDArray[np.bool_]:
        """Mask of shape (rows, keys), True where the row does not see the key."""
        rows, keys = np.arange(row_begin, row_end)[:, None], np.arange(key_begin, key_end)
        hidden = rows > keys - self.lo
        hidden |= rows < keys - self.hi
        return hidden


def band(m: int, n: int, causal: bool, align: str | int | None, window: tuple[int | None, int | None] | None) -> Band:
    """Band of validated options; ``align=None`` stands for equal lengths, where both named alignments agree.

    Parameters
    ----------
    m, n : int
        Numbers of rows and keys.
    causal : bool
        Hide the keys after the row's own.
    align : {'bottom-right', 'top-left'} or int or None
        Row i sits at key i + a, with a = n - m, 0 or the int.
    window : tuple or None
        Numbers of keys seen before and after the row's own; None is open.

    Returns
    -------
    Band

    Examples
    --------
    >>> band(2, 5, True, "bottom-right", None)
    Band(lo=-2, hi=3)
    >>> band(4, 4, True, None, (1, 2))
    Band(lo=-1, hi=0)
    """
    left, right = (None, None) if window is None else window
    if causal:
        right = 0 if right is None else min(right, 0)
    if align is None or align == "top-left":
        diagonal = 0
    elif isinstance(align, str):
        diagonal = n - m
    else:
        diagonal = int(align)
    lo = -m if left is None else diagonal - left
    hi = n if right is None else diagonal + right
    return Band(_clip(lo, -m, n), _clip(hi, -m, n))


def key_range(band: Band, row_begin: int, row_end: int, n: int) -> tuple[int, int, int, int]:
    """Interval of keys that any row of [row_begin, row_end) sees, and within it that of the keys every row sees.

    Returns
    -------
    begin, full_begin, full_end, end : int
        Ordered; ``begin == end`` where no row sees a key, ``full_begin == full_end`` where no key is seen by all.
    """
    begin = _clip(row_begin + band.lo, 0, n)
    end = _clip(row_end + band.hi, 0, n)
    if row_begin >= row_end or begin >= end:
        return begin, begin, begin, begin
    full_begin = _clip(row_end - 1 + band.lo, begin, end)
    full_end = _clip(row_begin + 1 + band.hi, full_begin, end)
    return begin, full_begin, full_end, end


def key_blocks(band: Band, row_begin: int, row_end: int, n: int, block_n: int) -> Iterator[tuple[int, int]]:
    """Blocks of keys in the order in which the kernels visit them: last to first.

    The last come first because under a causal band they are the masked ones: the loop then runs over masked-right, full
    and masked-left blocks, each stretch without a test in it.

    Yields
    ------
    index, kind : int
        PARTIAL or FULL; a block cut by the end of the keys is PARTIAL, an EMPTY one is never yielded.

    Examples
    --------
    >>> list(key_blocks(Band(-8, 0), 4, 8, 8, 2))
    [(3, 1), (2, 1), (1, 2), (0, 2)]
    """
    begin, full_begin, full_end, end = key_range(band, row_begin, row_end, n)
    if begin == end:
        return
    for index in range((end - 1) // block_n, begin // block_n - 1, -1):
        inside = index * block_n >= full_begin and (index + 1) * block_n <= full_end
        yield index, FULL if inside else PARTIAL


def query_blocks(band: Band, key_begin: int, key_end: int, m: int, block_m: int) -> Iterator[tuple[int, int]]:
    """Blocks of rows that see a key of [key_begin, key_end), first to last, as the backward visits them.

    Yields
    ------
    index, kind : int
        As for `key_blocks`, with the end of the rows in place of the end of the keys.
    """
    yield from reversed(list(key_blocks(band.transposed(), key_begin, key_end, m, block_m)))


@dataclass(frozen=True)
class Softcap:
    """Score term ``cap * tanh(s / cap)``: bounds the scores smoothly by plus and minus cap."""

    cap: float

    def value_and_slope(self, s: Floats, slope: Floats | None = None) -> None:
        """Replace scores by capped ones, and fill slope with the derivative ``1 - tanh(s / cap)**2``, in place."""
        # A cap beyond the dtype's range acts like one at its end, and must not become 0 or inf here.
        limits = np.finfo(s.dtype)
        cap = np.clip(self.cap, limits.tiny, limits.max).astype(s.dtype)
        s /= cap
        np.tanh(s, out=s)
        if slope is not None:
            np.multiply(s, s, out=slope)
            np.subtract(1, slope, out=slope)
        s *= cap


@dataclass(frozen=True)
class KeyBias:
    """Score term that adds a weight to every score of a key; -inf takes the key away, whatever it holds."""

    bias: Floats

    def value(self, s: Floats) -> None:
        """Add the bias, of shape (..., keys), to scores (..., rows, keys), in place."""
        bias = self.bias[..., None, :]
        s += bias
        absent = np.isneginf(bias)
        if absent.any():
            np.copyto(s, -np.inf, where=absent)

    @staticmethod
    def on_grad(ds: Floats) -> Floats:
        """Gradient of the bias from that of the scores: its sum over rows."""
        summed: Floats = np.sum(ds, axis=-2)
        return summed


def _clip(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))
