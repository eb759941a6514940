"""What the launcher asks of a device: its target, its multiprocessors, the kernel families that it uses."""

from __future__ import annotations

import os
from functools import cache, lru_cache
from typing import NamedTuple

from cuflash import compile, tiles


@cache
def target(device: int) -> str:
    """What is compiled for it, as ``compile.target_of`` names it."""
    import cupy

    capability = cupy.cuda.Device(device).compute_capability
    return compile.target_of((int(capability[:-1]), int(capability[-1])))


@cache
def multiprocessors(device: int) -> int:
    import cupy

    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


class Families(NamedTuple):
    """The kernel families that a device uses."""

    portable: str
    """That which serves every operation."""
    hopper: bool
    """Whether it has the sm90 family, and nobody asked for another."""


def families(device: int) -> Families:
    """By ``CUFLASH_FAMILY``, which may change from call to call, else the best."""
    return families_of(os.environ.get("CUFLASH_FAMILY") or None, device)


@lru_cache
def families_of(asked: str | None, device: int) -> Families:
    """Likewise, asked for by name, or by None."""
    own = target(device)
    if asked is None:
        return Families(tiles.best_family(own), own == "90a")
    if asked not in ("sm75", "sm80", "sm90"):
        raise ValueError(f"CUFLASH_FAMILY must be sm75, sm80 or sm90, got {asked!r}")
    if asked == "sm80" and own == "75":
        raise NotImplementedError("CUFLASH_FAMILY=sm80 needs compute capability 8.0, the device has 7.5")
    if asked == "sm90" and own != "90a":
        raise NotImplementedError(f"CUFLASH_FAMILY=sm90 needs compute capability 9.0, this is sm_{own}")
    return Families("sm80", True) if asked == "sm90" else Families(asked, False)
