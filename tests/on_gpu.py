"""Runs on a GPU with the kernels of one family, and what the tests of all of them share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from backends import GPU
from checks import expect, planned_anew, run
from gpu_cases import Case, target
from hypothesis import settings
from hypothesis import strategies as st

import cuflash
from cuflash import hopper

BACKEND = GPU
FAMILIES = ("sm80", "sm75")
"""Those that every GPU has from compute capability 8.0 on: an example can be drawn for them."""
WIDE = ("float32", "float64")


def examples(count: int) -> settings:
    return settings(settings.get_profile("gpu"), max_examples=count)


@contextmanager
def family(name: str) -> Iterator[None]:
    """Make the launcher take the kernels of a family: sm90's also for problems too small to gain from it."""
    if name == "sm90" and target() != "90a":
        pytest.skip(f"the sm90 family needs compute capability 9.0, this GPU is an sm_{target()}")
    with planned_anew(hopper.forward), pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUFLASH_FAMILY", name)
        patch.setattr(hopper, "WORTH_PLANES", 0)
        yield


def plain(case: Case) -> Case:
    """The case as the kernel for all gradients takes it: rows of whole vectors, no score terms, a positive scale."""
    d, e = (-(-length // 8) * 8 for length in (case.q[-1], case.v[-1] or 8))
    options = {name: value for name, value in case.options.items() if name not in ("softcap", "scale")}
    shapes = {"q": (*case.q[:-1], d), "k": (*case.k[:-1], d), "v": (*case.v[:-1], e)}
    return replace(case, **shapes, key_bias=None, options=options)


@contextmanager
def hopper_kernels(what: str = "family") -> Iterator[list[str]]:
    """Make the launcher take the sm90 family, and yield this field of the variants that are launched meanwhile."""
    launch = cuflash.calls.launcher()
    launched: list[str] = []
    run = launch.enqueue

    def recorded(plan: Any, *more: Any) -> None:
        launched.extend(getattr(x.variant, what) for x in plan)
        run(plan, *more)

    with family("sm90"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "enqueue", recorded)
        yield launched


needs = st.one_of(st.none(), st.lists(st.sampled_from(("q", "k", "v", "key_bias")), min_size=1, unique=True).map(tuple))
upstream = st.sampled_from(((True, False), (True, True), (False, True)))
"""Whether there is a do, and a dlse."""
every_dtype = pytest.mark.parametrize("dtype", BACKEND.dtypes)
every_family = pytest.mark.parametrize("name", ("sm90", *FAMILIES))


def held(name: str, *x: np.ndarray, **options: Any) -> Any:
    """`check` with the kernels of a family."""
    with family(name):
        got = run(BACKEND, *x, **options)
    for result, expected in expect(*x, family=name, **options).items():
        expected.check(getattr(got, result))
    return got


def same_as_on_host(got: Any, on_host: Any, allowed: float, allowed_lse: float, what: Any) -> None:
    """Two (o, lse): NaN and infinities in the same places, o within ``allowed``, lse within a part of 1 + |lse|."""
    (o, lse), (host_o, host_lse) = got, on_host
    assert np.array_equal(np.isnan(o), np.isnan(host_o)), what
    finite, there = np.isfinite(host_lse), ~np.isnan(host_o)
    assert np.array_equal(lse[~finite], host_lse[~finite], equal_nan=True), what
    with np.errstate(over="ignore"):
        assert np.abs(o[there] - host_o[there]).max(initial=0) <= allowed, what
        relative = np.abs(lse[finite] - host_lse[finite]) / (1 + np.abs(host_lse[finite]))
    assert relative.max(initial=0) <= allowed_lse, what
