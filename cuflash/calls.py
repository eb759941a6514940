"""From a checked problem to a filled result: outputs, workspaces, empty cases, and the backend that does the rest.

Everything that can be known to be wrong is raised here before the first result is written.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cuflash import arrays, host
from cuflash.arrays import Result
from cuflash.problem import Problem, describe, operand_dtypes, require, without_value

OPERATIONS = ("attention", "attention_backward", "attention_lse")
"""What ``workspace_nbytes`` knows, and the launcher."""

Need = tuple[bool, bool, bool, bool]
"""Whether the gradients of q, k, v and key_bias are asked for."""


@functools.cache
def launcher() -> Any:
    """The CUDA side, imported with the first array on a GPU."""
    from cuflash import launch

    return launch


class Inputs(NamedTuple):
    """The arrays of a call as the user shaped them, and the problem they pose."""

    problem: Problem
    q: Any
    k: Any
    v: Any
    key_bias: Any


class Upstream(NamedTuple):
    """What a backward pass is given beside the inputs; None where absent."""

    do: Any
    o: Any
    lse: Any
    dlse: Any


def inputs(q: Any, k: Any, v: Any, key_bias: Any, has_value: bool, *options: Any) -> Inputs:
    """Take in the arrays of a call; ``options`` are those of ``describe``, in its order."""
    plain = arrays.plain_kinds()
    if type(q) not in plain:
        q = arrays.as_array("q", q)
    if type(k) not in plain:
        k = arrays.as_array("k", k)
    if not has_value:
        v = None
    elif type(v) not in plain:
        v = arrays.as_array("v", v)
    if key_bias is not None and type(key_bias) not in plain:
        key_bias = arrays.as_array("key_bias", key_bias)
    return Inputs(describe(q, k, v, key_bias, *options), q, k, v, key_bias)


def upstream(problem: Problem, do: Any, o: Any, lse: Any, dlse: Any) -> Upstream:
    """Take in the arrays of a backward pass and check them against the problem."""
    if do is None and dlse is None:
        raise TypeError("do and dlse are both None: one of them is needed")
    if problem.o is not None and do is not None:
        do = arrays.as_array("do", do)
        problem.require("do", do, problem.o)
    if problem.o is not None and (do is not None or o is not None):
        o = arrays.as_array("o", o)
        problem.require("o", o, problem.o)
    lse = arrays.as_array("lse", lse)
    problem.require("lse", lse, problem.lse)
    if dlse is not None:
        dlse = arrays.as_array("dlse", dlse)
        problem.require("dlse", dlse, problem.lse)
    return Upstream(do, o, lse, dlse)


def workspace_nbytes(problem: Problem, operation: str) -> int:
    """Bytes of scratch memory that a caller may bring."""
    if problem.device < 0 or problem.empty:
        return 0
    if problem.has_value and problem.e == 0:
        problem = without_value(problem)
        operation = "attention_lse" if operation == "attention" else operation
    launcher().check(problem, operation)
    nbytes: int = launcher().workspace_nbytes(problem, operation)
    return nbytes


def forward(x: Inputs, want_o: bool, want_lse: bool, out: Any, workspace: Any) -> tuple[Any, ...]:
    """What is wanted of o and lse; entries of ``out`` are returned themselves."""
    problem = x.problem
    if not arrays.is_current(problem.device):  # rarely: other calls enter no context
        with arrays.current(problem.device):
            return forward(x, want_o, want_lse, out, workspace)
    operation = "attention" if want_o else "attention_lse"
    found = launcher().check(problem, operation) if problem.device >= 0 else None
    o_like, lse_like = problem.o if want_o else None, problem.lse if want_lse else None
    o = lse = None
    if out is not None or workspace is not None:
        wanted = [like for like in (o_like, lse_like) if like is not None]
        results = _seen_to_be_free(x, wanted, out) if workspace is None else None
        if results is None:
            results, workspace = _check_out(problem, operation, wanted, out, workspace, (x,))
        if results is not None:
            o, lse = results[0] if want_o else None, results[-1] if want_lse else None
    xp = arrays.module(problem.device)
    if o is None and o_like is not None:
        o = o_like.empty(xp)
    if lse is None and lse_like is not None:
        lse = lse_like.empty(xp)
    _fill_forward(x, o, lse, workspace, found)
    filled = (o,) * want_o + (lse,) * want_lse
    return filled if out is None or problem.device >= 0 else _returned(out, filled)


def _seen_to_be_free(x: Inputs, wanted: Sequence[Result], out: Any) -> Sequence[Any] | None:
    """The entries of ``out=`` where all are arrays on the GPU which metadata and addresses alone show to be writable
    without harm, as they nearly always do. Where not: None, and `_check_out` takes the time to find out and to say what
    is wrong."""
    device = x.problem.device
    results = out if isinstance(out, tuple) else (out,)
    if device < 0 or len(results) != len(wanted):
        return None
    taken = []  # addresses
    for y, reach in zip((x.q, x.k, x.v, x.key_bias), x.problem.reaches, strict=True):
        if reach is not None:
            at = y.data.ptr
            taken.append((at + reach[0], at + reach[1]))
    kind = arrays.plain_kinds()[1]
    for y, like in zip(results, wanted, strict=True):
        if type(y) is not kind or y.data.device_id != device or y.dtype != like.dtype or y.shape != like.shape:
            return None
        reach = arrays.reach_of_distinct(like.shape, y.strides, like.dtype.itemsize)
        if reach is None:
            return None
        at = y.data.ptr
        begin, end = at + reach[0], at + reach[1]
        for other_begin, other_end in taken:
            if begin < other_end and other_begin < end:
                return None
        taken.append((begin, end))
    return results


def backward(x: Inputs, up: Upstream, need: Need, out: Any, workspace: Any) -> tuple[Any, ...]:
    """(dq, dk[, dv][, dkey_bias]) with None for what is not asked for; entries of ``out`` are returned themselves."""
    problem = x.problem
    found = launcher().check(problem, "attention_backward") if problem.device >= 0 else None
    everything = (problem.dq, problem.dk, problem.dv, problem.dkey_bias)
    wanted = [r if asked else None for r, asked in zip(everything, need, strict=True) if r is not None]
    results, workspace = _check_out(problem, "attention_backward", wanted, out, workspace, (x, up))
    with arrays.current(problem.device):
        filled = _allocate(problem, wanted, results)
        rest = iter(filled)
        _fill_backward(x, up, [next(rest) if r is not None else None for r in everything], workspace, found)
    return tuple(filled) if out is None else _returned(out, filled)


def _returned(out: Any, filled: Sequence[Any]) -> tuple[Any, ...]:
    """The caller's own arrays where there are some: a memory-mapped file was written through a plain view of it."""
    given = out if isinstance(out, tuple) else (out,)
    return tuple([plain if mine is None else mine for plain, mine in zip(filled, given, strict=True)])


def _allocate(problem: Problem, wanted: Sequence[Result | None], results: Sequence[Any] | None) -> list[Any]:
    """The arrays to fill: those of ``out``, else new ones on the current device, else None where not wanted."""
    xp = arrays.module(problem.device)
    if results is None:
        return [None if r is None else r.empty(xp) for r in wanted]
    return [x if x is not None or r is None else r.empty(xp) for r, x in zip(wanted, results, strict=True)]


def _check_out(
    problem: Problem,
    operation: str,
    wanted: Sequence[Result | None],
    out: Any,
    workspace: Any,
    sources: Sequence[Inputs | Upstream],
) -> tuple[list[Any] | None, Any]:
    """``out`` and ``workspace`` as plain arrays that may be written without harm; None where there are none."""
    if out is None and workspace is None:
        return None, None
    where = {"q": problem.device}
    named = [entry for source in sources for entry in zip(source._fields, source, strict=True)]
    used = {name: x for name, x in named if x is not None and name != "problem"}
    results = None if out is None else check_results(wanted, out, where, used)
    if workspace is not None:
        nbytes = workspace_nbytes(problem, operation)
        plain = arrays.as_array("workspace", workspace)
        like = arrays.result("workspace", np.dtype(np.uint8), plain.shape)
        _check_writable("workspace", workspace, like, where, used)
        if plain.ndim != 1 or not plain.flags.c_contiguous or plain.size < nbytes:
            raise ValueError(
                f"workspace must be one-dimensional, contiguous and of at least {nbytes} bytes, "
                f"got shape {plain.shape}, strides {plain.strides}"
            )
        workspace = plain
    return results, workspace


def check_results(
    wanted: Sequence[Result | None], out: Any, where: Mapping[str, int], used: dict[str, Any]
) -> list[Any]:
    """The arrays of ``out=`` as plain arrays, None where one is to be allocated; they are added to ``used``."""
    if not isinstance(out, tuple):
        if len(wanted) > 1:
            raise TypeError(f"out must be a tuple ({_names(wanted)}), got {type(out).__name__}")
        out = (out,)
    if len(out) != len(wanted):
        raise ValueError(f"out must have {len(wanted)} entries ({_names(wanted)}), got {len(out)}")
    plain: list[Any] = []
    for position, (like, x) in enumerate(zip(wanted, out, strict=True)):
        if x is None:
            plain.append(None)
        elif like is None:
            raise ValueError(f"out[{position}] must be None: need does not ask for this gradient")
        else:
            name = f"out ({like.name})"
            plain.append(_check_writable(name, x, like, where, used))
            used[name] = plain[-1]
    return plain


def _names(wanted: Sequence[Result | None]) -> str:
    return ", ".join("None" if r is None else r.name for r in wanted)


def _check_writable(name: str, x: Any, like: Result, where: Mapping[str, int], used: Mapping[str, Any]) -> Any:
    if not arrays.is_array(x):
        raise TypeError(f"{name} must be a numpy.ndarray or a cupy.ndarray, got {type(x).__name__}")
    plain = arrays.as_array(name, x)
    require(name, plain, like, where)
    if isinstance(plain, np.ndarray) and not plain.flags.writeable:
        raise ValueError(f"{name} is read-only")
    if arrays.overlaps_itself(plain):
        raise ValueError(f"elements of {name} share memory: shape {plain.shape}, strides {plain.strides}")
    if (other := arrays.first_overlap(plain, used)) is not None:
        raise ValueError(f"{name} shares memory with {other}")
    return plain


def _fill_forward(x: Inputs, o: Any, lse: Any, workspace: Any, found: Any) -> None:
    """``found``: what the launcher's check has returned."""
    problem = x.problem
    if problem.empty:
        zero(o)
        if lse is not None:
            lse.fill(-np.inf)
        return
    v = x.v
    if problem.has_value and problem.e == 0:
        if lse is None:
            return
        problem, v = _lse_only(problem, v)
        o = None
    if problem.device >= 0:
        launcher().forward(problem, x.q, x.k, v, x.key_bias, o, lse, workspace, found)
    else:
        inner = problem.inner_inputs(x.q, x.k, v, x.key_bias)
        results = problem.split_heads(o, 2), problem.split_heads(lse, 1)
        host.forward(*inner, *results, scale=problem.scale, band=problem.band, softcap=problem.softcap)


def _fill_backward(x: Inputs, up: Upstream, gradients: Sequence[Any], workspace: Any, found: Any) -> None:
    problem, (dq, dk, dv, dkey_bias) = x.problem, gradients
    v, do, o, dlse = x.v, up.do, up.o, up.dlse
    if do is None or problem.e == 0:
        # Only lse has a gradient: v gets none, and the rest is the backward pass of attention_lse.
        zero(dv)
        problem, v = _lse_only(problem, v)
        do = o = dv = None
    if problem.empty or (do is None and dlse is None):
        for gradient in (dq, dk, dv, dkey_bias):
            zero(gradient)
        return
    if dq is None and dk is None and dv is None and dkey_bias is None:
        return
    inner = (
        *problem.inner_inputs(x.q, x.k, v, x.key_bias),
        problem.split_heads(do, 2),
        problem.split_heads(o, 2),
        problem.split_heads(up.lse, 1),
        problem.split_heads(dlse, 1),
        problem.split_heads(dq, 2),
        problem.group_axis(dk),
        problem.group_axis(dv),
        problem.split_heads(dkey_bias, 1),
    )
    if problem.device >= 0:
        launcher().backward(problem, *inner, workspace, found)
    else:
        host.backward(*inner, scale=problem.scale, band=problem.band, softcap=problem.softcap)


def _lse_only(problem: Problem, v: Any) -> tuple[Problem, Any]:
    """The problem without values, and what stands for v: on the host, which takes the batch from the shapes of the
    inputs, v without its features; else nothing."""
    if not problem.has_value:
        return problem, None
    return without_value(problem), v[..., :0] if problem.device < 0 else None


def zero(x: Any) -> None:
    """Fill with zeros, as bits: CuPy's own operations need not know bfloat16."""
    if x is not None:
        x.view(f"u{x.dtype.itemsize}").fill(0)


def merge(os: Any, lses: Any, out: Any) -> tuple[Any, ...]:
    """(o, lse) of partial results; entries of ``out`` are returned themselves."""
    (o_parts, o_stack), (lse_parts, lse_stack) = _parts("os", os, 2), _parts("lses", lses, 1)
    if len(o_parts) != len(lse_parts):
        raise ValueError(f"os has {len(o_parts)} parts, lses has {len(lse_parts)}")
    first = o_parts[0]
    dtype, lse_dtype = operand_dtypes({"os[0]": first.dtype})
    o_like, lse_like = arrays.result("o", dtype, first.shape, first), arrays.result("lse", lse_dtype, first.shape[:-1])
    device = arrays.device_of(first)
    where, used = {"os[0]": device}, {}
    for name, parts, like in (("os", o_parts, o_like), ("lses", lse_parts, lse_like)):
        for index, part in enumerate(parts):
            require(f"{name}[{index}]", part, like, where)
            used[f"{name}[{index}]"] = part
    plain = [None, None] if out is None else check_results((o_like, lse_like), out, where, used)
    for name, x in used.items():
        arrays.require_whole_elements(name, x)
    with arrays.current(device):
        xp = arrays.module(device)
        o, lse = (like.empty(xp) if x is None else x for like, x in zip((o_like, lse_like), plain, strict=True))
        if lse.size and device >= 0:
            stacked = o_stack is not None and lse_stack is not None
            launcher().merge(*((o_stack, lse_stack) if stacked else (o_parts, lse_parts)), o, lse)
        elif lse.size:
            host.merge(o_parts, lse_parts, o, lse)
    return (o, lse) if out is None else _returned(out, (o, lse))


def _parts(name: str, xs: Any, least_ndim: int) -> tuple[tuple[Any, ...], Any]:
    """The arrays of a sequence, or of a stacked array along its first axis; and that array, else None."""
    stacked = None
    if isinstance(xs, Sequence):
        parts = tuple(arrays.as_array(f"{name}[{index}]", x) for index, x in enumerate(xs))
    elif isinstance(xs, Iterator):
        raise TypeError(f"{name} must be a sequence of arrays or one stacked array, got {type(xs).__name__}: list it")
    else:
        stacked = arrays.as_array(name, xs)
        if stacked.ndim <= least_ndim:
            raise ValueError(f"{name} stacked in one array needs at least {least_ndim + 1} axes, got {stacked.shape}")
        parts = tuple(stacked[index] for index in range(stacked.shape[0]))
    if not parts:
        raise ValueError(f"{name} has no parts: at least one is needed")
    if parts[0].ndim < least_ndim:
        raise ValueError(f"{name}[0] needs at least {least_ndim} axes, got {parts[0].shape}")
    return parts, stacked
