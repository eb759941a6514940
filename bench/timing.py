"""Clocks: CUDA events around each call, L2 flushed before it, peers of a shape interleaved, medians.

The card is power-limited: figures drift by several percent within minutes. Peers that are compared take turns in short
rounds, so that the drift falls on all of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ROUNDS = 5
TARGET_MS = 80.0
"""Time to spend on one peer of one shape, about, flushes not counted; at least MIN_CALLS calls are made."""
MIN_CALLS, MAX_CALLS_PER_ROUND = 3, 12
WALL_CALLS = 40
"""Calls of a peer with streams of its own that one reading of the host's clock covers."""

Batch = Callable[[str, int], Sequence[float]]
"""(name, number of calls) -> milliseconds of each call."""


@dataclass(frozen=True)
class Timing:
    """``ms`` is the median of ``calls`` calls; ``spread`` the range of the middle 80 percent, relative to it."""

    ms: float
    spread: float
    calls: int


def summarize(samples: Sequence[float]) -> Timing:
    """Median and spread of milliseconds."""
    ms = float(np.median(samples))
    low, high = np.percentile(samples, [10, 90])
    return Timing(ms, float((high - low) / ms), len(samples))


def interleave(
    names: Sequence[str], batch: Batch, target_ms: float = TARGET_MS, rounds: int = ROUNDS
) -> dict[str, Timing]:
    """Times each name in ``rounds`` turns, in another order each time: after a peer that needs much power a card runs
    slower, which is not always to be the same one's loss. Slow ones sit out the later rounds."""
    orders = np.random.default_rng(0)
    estimate = {name: float(np.median(batch(name, MIN_CALLS))) for name in names}
    samples: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for number in orders.permutation(len(names)):
            name = names[number]
            made = len(samples[name])
            if made >= MIN_CALLS and made * estimate[name] >= target_ms:
                continue
            wanted = round(target_ms / rounds / max(estimate[name], 1e-3))
            samples[name] += batch(name, min(max(wanted, 1), MAX_CALLS_PER_ROUND))
    return {name: summarize(samples[name]) for name in names}


class Stopwatch:
    """Times prepared operations on the current device."""

    def __init__(self, prepared: Mapping[str, Any]) -> None:
        import cupy

        self._cupy = cupy
        self._prepared = prepared
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        self._scratch = cupy.empty(max(4 * properties["l2CacheSize"], 256 << 20) // 8, cupy.uint64)
        self._most = cupy.empty((), cupy.uint64)

    def batch(self, name: str, calls: int) -> Sequence[float]:
        """Milliseconds of each of ``calls`` calls, enqueued without waiting in between."""
        one = self._prepared[name]
        return self._wall(one) if one.wait is not None else self._events(one.run, calls)

    def flush(self) -> None:
        """Evict all that L2 holds. Reading after writing leaves nothing in it that has yet to be written back: that
        would be traffic of the call that is timed. Both take long enough for the host to stay ahead of the device.
        """
        self._scratch.data.memset_async(0, self._scratch.nbytes)
        self._scratch.max(out=self._most)

    def _events(self, run: Callable[[], Any], calls: int) -> list[float]:
        cuda = self._cupy.cuda
        pairs = [(cuda.Event(), cuda.Event()) for _ in range(calls)]
        self.flush()
        for start, end in pairs:
            self.flush()
            start.record()
            run()
            end.record()
        cuda.runtime.deviceSynchronize()
        return [float(cuda.get_elapsed_time(start, end)) for start, end in pairs]

    def _wall(self, one: Any) -> list[float]:
        """One reading over WALL_CALLS calls: nothing is known of the streams, so L2 is not flushed in between."""
        one.wait(one.run())
        self._cupy.cuda.runtime.deviceSynchronize()
        begin = time.perf_counter()
        for _ in range(WALL_CALLS):
            result = one.run()
        one.wait(result)
        return [(time.perf_counter() - begin) * 1e3 / WALL_CALLS]
