"""Plans of the sm90 family: which of its kernels a call takes, where `hopper` finds that it can."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial

from cuflash import compile, devices, hopper, memory, tiles, tma
from cuflash.needs import POINTERS, Needs
from cuflash.planning import BACKWARD_TENSORS, NEED, Bits, Launch, Plan, input_strides, is_plain, prepare
from cuflash.problem import Problem


def forward(
    problem: Problem,
    sm90: hopper.Forward,
    results: Mapping[str, memory.Strides],
    bits: Bits,
    key_bias_bits: int,
) -> Plan | None:
    """None where the copy engine cannot follow the arrays."""
    if bits.loads % tma.ALIGNMENT and sm90.planes == 1 and not sm90.copies:
        return None
    copied = _copied(problem, sm90, key_bias_bits)
    taken = hopper.with_copies(problem, copied) if copied else problem
    try:
        layout = memory.layout_of(taken, {**input_strides(taken), **results}, planes=sm90.planes > 1)
    except NotImplementedError:  # planes have batch axes of their own
        return None
    maps = hopper.maps(taken, layout, sm90)
    if maps is None:
        return None
    vector = memory.load_kind(problem.dtype, layout, ("o",), bits.rows) == "16"
    main = tiles.sm90_variant(problem.dtype, sm90.tile, problem.precision, _terms(problem, sm90.plain))
    output = None
    if problem.has_value and sm90.tile.q_stages > 1 and bits.rows % tma.ALIGNMENT == 0:
        output = hopper.output_map(problem, layout)
    ctas = min(sm90.tiles, devices.multiprocessors(problem.device))
    launches = [
        prepare(taken, main, layout, store_vector=vector, sections=sm90.sections, maps=maps, output=output, ctas=ctas)
    ]
    if sm90.planes > 1:
        split = tiles.row_variant("attention_planes", problem.dtype, "strided", "90a", "sm90", problem.precision)
        launches.insert(0, prepare(taken, split, layout, ctas=-(-hopper.plane_warps(taken) // split.tile.warps)))
    return Plan(tuple(launches), _forward_needs(problem, sm90, copied))


def _copied(problem: Problem, sm90: hopper.Forward, key_bias_bits: int) -> tuple[str, ...]:
    """Arrays that are copied for the copy engine, given the address of key_bias."""
    names = tuple(hopper.operands(problem)) if sm90.copies else ()
    if problem.has_key_bias and (key_bias_bits % tma.ALIGNMENT or not hopper.follows(problem, "key_bias")):
        names += ("key_bias",)
    return names


def _forward_needs(problem: Problem, sm90: hopper.Forward, copied: tuple[str, ...]) -> Needs | None:
    if sm90.planes == 1 and not copied and not sm90.claims:
        return None
    scratch = hopper.scratch(problem, sm90)
    begins = scratch._asdict()
    parts = {f"{name}_planes": begins[name] for name in "qkv"} if sm90.planes > 1 else {}
    parts |= {name: begins[name] for name in copied}
    return Needs(
        scratch.nbytes,
        tuple((POINTERS[name], begin) for name, begin in parts.items()),
        tuple((POINTERS[name], memory.own_batch(problem, name)) for name in copied),
        hopper.CLAIMS_NBYTES if sm90.claims else 0,
        scratch.claims,
    )


def _terms(problem: Problem, plain: bool) -> tuple[str, ...]:
    """Score terms of the variant that takes a problem, one of ``tiles.SM90_TERMS``."""
    if plain:
        return ()
    has = {"Softcap": problem.softcap is not None, "KeyBias": problem.has_key_bias or problem.softcap is None}
    return tuple(term for term in compile.SCORE_TERMS if has[term])


@lru_cache(maxsize=4096)
def backward(
    problem: Problem, strides: tuple[memory.Strides | None, ...], bits: Bits, *gradient_bits: int
) -> Plan | None:
    """None where the portable kernels serve."""
    bits.check(problem.dtype)
    for gradient in gradient_bits:
        Bits(gradient, 0, 0).check(problem.dtype)
    given = dict(zip(BACKWARD_TENSORS, strides, strict=True))
    if not problem.has_value or given["dout"] is None or bits.loads % tma.ALIGNMENT:
        return None
    kernels = _backward_kernels(problem, tuple(name for name in NEED if given[name] is not None))
    if not kernels:
        return None
    own_bits = dict(zip(("dq", "dk", "dv"), gradient_bits, strict=True))
    whole = next((taken for taken, _ in kernels if isinstance(taken, hopper.Backward)), None)
    layout = memory.layout_of(problem, given, whole.sums if whole else None)
    launches: tuple[Launch, ...] = ()
    for taken, names in kernels:
        if isinstance(taken, hopper.Backward):
            found = _gradients(problem, taken, layout, names, own_bits)
        else:
            found = _some_gradients(problem, taken, layout, names, own_bits)
        if not found:
            return None
        launches += found
    needs = _backward_needs(problem, layout, whole)
    return Plan((_delta(problem, layout, bits), *launches), needs)


def backward_nbytes(problem: Problem) -> int:
    """Bytes of scratch memory of a backward, whichever of the kernels take it."""
    whole = _whole(problem)
    nbytes = hopper.backward_scratch(problem, whole).nbytes if whole else 0
    if hopper.split_backward(problem, is_plain(problem)):
        nbytes = max(nbytes, hopper.backward_scratch(problem).nbytes)
    return nbytes


def _backward_kernels(
    problem: Problem, asked: tuple[str, ...]
) -> tuple[tuple[hopper.Backward | tiles.Tile, tuple[str, ...]], ...]:
    """Which kernels of the sm90 family compute which of the gradients that are asked for, none where others do."""
    of_keys = tuple(name for name in asked if name != "dq")
    together = "dq" in asked and {"dk", "dv"} <= set(of_keys)
    whole = _whole(problem, together)
    if whole and (together or (asked and asked == of_keys)):
        return ((whole, asked),)
    split = hopper.split_backward(problem, is_plain(problem))
    if split is None:
        return ()
    kernels: list[tuple[hopper.Backward | tiles.Tile | None, tuple[str, ...]]] = []
    if of_keys:  # without dq the kernel for all gradients does what that for dk and dv does above 128 features
        kernels.append((whole or split.dkv, of_keys))
    if "dq" in asked:
        kernels.append((split.dq, ("dq",)))
    found = tuple((taken, names) for taken, names in kernels if taken)
    return found if len(found) == len(kernels) else ()


def _whole(problem: Problem, needs_dq: bool = True) -> hopper.Backward | None:
    """How the kernel for all gradients, or that for all but dq, takes a problem."""
    return hopper.backward(problem, devices.multiprocessors(problem.device), is_plain(problem), needs_dq)


def _gradients(
    problem: Problem, taken: hopper.Backward, layout: memory.Layout, names: tuple[str, ...], own_bits: Mapping[str, int]
) -> tuple[Launch, ...]:
    """The kernel for all gradients, or for some of all but dq, and what sums dkey_bias. None of them where the copy
    engine cannot follow the arrays, or dk and dv are summed over different axes or dq over any."""
    if any(own_bits[name] % tma.ALIGNMENT for name in ("dk", "dv")):
        return ()
    if "dq" in names and memory.summed_axes(layout, "dq"):
        return ()
    summed = _axes_summed_by_blocks_of_keys(layout, names)
    maps = hopper.backward_maps(problem, layout, taken)
    if summed is None or maps is None:
        return ()
    vector = "dq" in names and _is_vector(problem, layout, "dq", own_bits)
    terms = _terms(problem, is_plain(problem))
    variant = tiles.sm90_backward_variant(problem.dtype, taken.tile, taken.in_order, terms, "dq" in names)
    sections = partial(hopper.dqkv_sections, problem, taken)
    # As the kernel finds it by the strides of dk: positions with a sum in common are on axes that are not looped over.
    looped = () if taken.shares.by_position else summed
    main = _over_tiles(problem, variant, layout, looped, names, vector, sections, maps, taken.shares.tiles)
    return main, *_sum_of_key_bias(problem, layout)


def _sum_of_key_bias(problem: Problem, layout: memory.Layout) -> tuple[Launch, ...]:
    """What sums dkey_bias over batch axes, where there are any."""
    axes = _bias_axes(layout)
    if not axes:
        return ()
    variant = tiles.row_variant("attention_dkey_bias", problem.dtype, "strided", "90a", "sm90")
    return (prepare(problem, variant, layout, -(-problem.n // 32), axes),)


def _axes_summed_by_blocks_of_keys(layout: memory.Layout, names: tuple[str, ...]) -> tuple[int, ...] | None:
    """Batch axes over which a CTA sums dk and dv while it holds a block of k and of v, None where there is no such sum:
    dk and dv are summed over different axes, or k or v is another one from position to position."""
    found = {memory.summed_axes(layout, name) for name in names if name in ("dk", "dv")} or {()}
    summed = next(iter(found))
    held = all(set(summed) <= set(memory.summed_axes(layout, name)) for name in ("k", "v"))
    return summed if held and len(found) == 1 else None


def _bias_axes(layout: memory.Layout) -> tuple[int, ...]:
    """Batch axes over which dkey_bias is summed, where it is asked for."""
    return memory.summed_axes(layout, "dkey_bias") if "dkey_bias" in layout.strides else ()


def _some_gradients(
    problem: Problem,
    tile: tiles.Tile | None,
    layout: memory.Layout,
    names: tuple[str, ...],
    own_bits: Mapping[str, int],
) -> tuple[Launch, ...]:
    """The kernel for dq alone, or that for dk, dv and dkey_bias, and what sums dkey_bias. None of them where there is
    no such kernel, or the copy engine cannot follow the arrays, or dk and dv are not summed alike."""
    maps = hopper.split_maps(problem, layout, tile) if tile else None
    if tile is None or maps is None:
        return ()
    plain = is_plain(problem)
    summed: tuple[int, ...] | None
    if names == ("dq",):
        summed = memory.summed_axes(layout, "dq")
        variant, sections = tiles.sm90_backward_dq_variant(problem.dtype, tile, plain), hopper.dq_sections
    else:
        summed = _axes_summed_by_blocks_of_keys(layout, names)
        variant, sections = tiles.sm90_backward_dkv_variant(problem.dtype, tile, plain), hopper.dkv_sections
    if summed is None:
        return ()
    vector = all(_is_vector(problem, layout, name, own_bits) for name in names if name in own_bits)
    main = _over_tiles(problem, variant, layout, summed, names, vector, partial(sections, problem), maps)
    return main, *(_sum_of_key_bias(problem, layout) if "dkey_bias" in names else ())


def _is_vector(problem: Problem, layout: memory.Layout, name: str, own_bits: Mapping[str, int]) -> bool:
    """Whether rows of dq, dk or dv are stored in vectors."""
    return memory.load_kind(problem.dtype, layout, (name,), own_bits[name]) == "16"


def _delta(problem: Problem, layout: memory.Layout, bits: Bits) -> Launch:
    load = "16" if memory.load_kind(problem.dtype, layout, ("o", "dout"), bits.rows) == "16" else "strided"
    variant = tiles.row_variant("attention_delta", problem.dtype, load, "90a", "sm90")
    return prepare(problem, variant, layout, memory.padded_rows(problem.m) // hopper.DELTA_ROWS)


def _over_tiles(
    problem: Problem,
    variant: compile.Variant,
    layout: memory.Layout,
    summed: tuple[int, ...],
    names: tuple[str, ...],
    store_vector: bool,
    sections: Callable[[int, int, int], hopper.Sections],
    maps: tuple[hopper.Map, ...],
    split_tiles: int = 0,
) -> Launch:
    """A kernel for some gradients whose CTAs claim tiles of rows of dq or else of keys, and which waits itself for the
    one ahead of it. ``sections``: of so many batch positions, tiles of each and multiprocessors; ``split_tiles``: the
    last ones, which are taken in parts."""
    tile = variant.tile
    blocks = -(-problem.m // tile.block_m) if variant.operation == tiles.DQ else -(-problem.n // tile.block_n)
    owned = math.prod(layout.extents[i] for i in range(memory.MAX_BATCH_AXES) if i not in summed)
    sms = devices.multiprocessors(problem.device)
    launch = prepare(
        problem, variant, layout, loop=summed, need=sum(NEED[name] for name in names), store_vector=store_vector,
        sections=sections(owned, blocks, sms), maps=maps, ctas=min(blocks * owned, sms),
        splits=hopper.LAST_TILE_PARTS if split_tiles else 1, split_tiles=split_tiles,
    )  # fmt: skip
    return replace(launch, overlaps=True)


def _backward_needs(problem: Problem, layout: memory.Layout, whole: hopper.Backward | None) -> Needs:
    """``whole``: how the kernel for all gradients, or for all but dq, takes the problem, where it does."""
    scratch = hopper.backward_scratch(problem, whole)
    begins, has_sums = scratch._asdict(), whole is not None and whole.sums is not None
    asked = {
        "row_terms": whole is not None and whole.takes_terms,
        "dq_accum": has_sums,
        "partials": _bias_axes(layout) != (),
    }
    names = ("row_lse", "delta", *(name for name, is_asked in asked.items() if is_asked))
    parts = tuple((POINTERS[name], begins[name]) for name in names)
    # Kernels of a call count one after the other.
    counters = {"claims": 0} | ({"careful": hopper.CAREFUL_AT} if whole else {})
    counters |= {"dq_turn": hopper.CLAIMS_NBYTES} if has_sums else {}
    numbered = tuple((POINTERS[name], begin) for name, begin in counters.items())
    return Needs(scratch.nbytes, parts, (), scratch.counts_nbytes, scratch.counts, numbered)
