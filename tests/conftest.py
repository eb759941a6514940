"""Hypothesis profiles, the skipping of GPU tests without a GPU, and the record of a run (``--record FILE``).

A run may be divided (``--part 1/4``): its parts take turns at the tests, so that they can run side by side on one GPU,
and their records are joined by ``python tests/recording.py join``.
"""

from __future__ import annotations

import functools
import os
import secrets
import time
from pathlib import Path
from typing import Any

import pytest
import recording
from command import files, pretended_gpu  # noqa: F401 - fixtures
from hypothesis import HealthCheck, settings

# No deadline: a first example compiles kernels. No database: a run depends on its seed alone, which is in the record.
settings.register_profile("host", deadline=None, database=None, max_examples=100)
settings.register_profile(
    "gpu", deadline=None, database=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("host")

EXAMPLES = pytest.StashKey[list[int]]()
STARTED = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="FILE", type=Path, help="write the record of this run on its GPU to FILE")
    parser.addoption("--part", metavar="I/N", help="of the tests that are selected, every N-th from the I-th on")


def _part(config: pytest.Config) -> tuple[int, int]:
    text = config.getoption("--part") or "1/1"
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise pytest.UsageError(f"--part must be I/N with 1 <= I <= N, got {text!r}")
    return int(index), int(count)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.stash[EXAMPLES] = [0]
    config.stash[STARTED] = time.monotonic()
    if _part(config)[1] > 1:  # or an error, before anything is collected
        # Before NumPy is loaded: threads of OpenBLAS that share cores with those of other parts wait for each other.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if config.getoption("--record") is not None:
        if recording.gpu_missing():
            raise pytest.UsageError(f"--record needs a GPU: {recording.gpu_missing()}")
        if config.getoption("--hypothesis-seed") is None:
            # Before hypothesis' own pytest_configure reads it: the record then names the seed that was used.
            config.option.hypothesis_seed = str(secrets.randbits(32))


@pytest.hookimpl(trylast=True)  # after -m and -k have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    index, count = _part(config)
    others = [item for at, item in enumerate(items) if at % count != index - 1]
    items[:] = items[index - 1 :: count]
    if others:
        config.hook.pytest_deselected(items=others)
    for item in items:
        if item.get_closest_marker("gpu") and recording.gpu_missing():
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {recording.gpu_missing()}"))
        _count_examples(getattr(item, "obj", None), config.stash[EXAMPLES])


def _count_examples(test: Any, count: list[int]) -> None:
    """Count the examples that hypothesis runs of a test; parametrised items share one function, wrapped once."""
    handle: Any = getattr(test, "hypothesis", None)
    inner = getattr(handle, "inner_test", None)
    if inner is None or hasattr(inner, "counts_examples"):
        return

    @functools.wraps(inner)
    def counted(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return inner(*args, **kwargs)

    counted.counts_examples = True  # type: ignore[attr-defined]
    handle.inner_test = counted


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    examples = config.stash[EXAMPLES][0]
    if examples:
        terminalreporter.write_line(f"hypothesis examples: {examples}")
    path = config.getoption("--record")
    if path is None:
        return
    counts = {name: len(terminalreporter.stats.get(name, [])) for name in ("passed", "failed", "error", "skipped")}
    recording.write(
        path,
        passed=counts["passed"],
        failed=counts["failed"] + counts["error"],
        skipped=counts["skipped"],
        hypothesis_examples=examples,
        hypothesis_seed=int(config.getoption("--hypothesis-seed")),
        part="{}/{}".format(*_part(config)),
        seconds=round(time.monotonic() - config.stash[STARTED], 1),
    )
    terminalreporter.write_line(f"record: {path}")
