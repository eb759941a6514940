"""Contenders by name: a peer registers by decorator and prepares one problem.

Everything but the operation itself (imports, layouts, graphs, compilation, the forward that a backward needs) happens
in ``prepare``, before the clock starts. A peer that cannot take a problem says why: the reason becomes the row.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.device import Inputs
from bench.problems import Problem

HALF = ("float16", "bfloat16")
GRADIENTS = ("dq", "dk", "dv", "dkey_bias")


class Unsupported(Exception):
    """The peer does not do this problem; the message says what is in the way."""


@dataclass(frozen=True)
class Prepared:
    """One operation, ready to be enqueued again and again.

    ``run`` enqueues it and returns what the peer returns; ``outputs`` turns that into CuPy arrays by name (o, lse, dq,
    dk, dv, dkey_bias), each (batch, heads, sequence, features). ``wait`` is given by a peer with streams of its own: it
    waits for what ``run`` returned, and the host's clock is used instead of events.
    """

    run: Callable[[], Any]
    outputs: Callable[[Any], dict[str, Any]]
    wait: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Peer:
    """A registered contender. ``dense`` ones hold score matrices: they are timed alone, for memory."""

    name: str
    prepare: Callable[[Problem, Inputs, str, str], Prepared]
    needs: tuple[str, ...]
    ops: tuple[str, ...]
    dtypes: tuple[str, ...]
    options: tuple[str, ...]
    modes: tuple[str, ...]
    dense: bool

    def missing(self) -> str | None:
        """Why the peer cannot be used on this machine, or None."""
        for module in self.needs:
            try:
                found = importlib.util.find_spec(module) is not None
            except ImportError:  # a parent package is absent
                found = False
            if not found:
                return f"{module} is not installed"
        return None

    def modes_of(self, op: str) -> tuple[str, ...]:
        """The modes to run: only the backward has a faster one."""
        return self.modes if op == "backward" else ("default",)

    def refusal(self, problem: Problem, op: str) -> str | None:
        """Why the peer does not take this problem, as far as can be told without trying; or None."""
        if op not in self.ops:
            return f"has no {op}"
        if problem.dtype not in self.dtypes:
            return f"has no {problem.dtype}"
        asked = ("window", "softcap", "key_bias", "precision")
        refused = [name for name in asked if getattr(problem, name) and name not in self.options]
        return f"has no {', '.join(refused)}" if refused else self.missing()


PEERS: dict[str, Peer] = {}


def peer(
    name: str,
    *,
    needs: tuple[str, ...],
    ops: tuple[str, ...] = ("forward", "backward"),
    dtypes: tuple[str, ...] = HALF,
    options: tuple[str, ...] = (),
    modes: tuple[str, ...] = ("default",),
    dense: bool = False,
) -> Callable[[Callable[[Problem, Inputs, str, str], Prepared]], Callable[[Problem, Inputs, str, str], Prepared]]:
    """Registers ``prepare(problem, inputs, op, mode)`` under ``name``; ``options`` are the score options it knows."""

    def register(prepare: Callable[[Problem, Inputs, str, str], Prepared]) -> Callable[..., Prepared]:
        PEERS[name] = Peer(name, prepare, needs, ops, dtypes, options, modes, dense)
        return prepare

    return register
