"""The share-out of the forward for few features, by shapes, strides and alignment alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from backends import dtype_of
from hypothesis import given
from hypothesis import strategies as st
from test_problem import describe

from cuflash import few, memory, problem, tiles

SMS = 132


def described(
    m: int, n: int, d: int, dtype: str = "float32", batch: tuple[int, ...] = (), biased: bool = False, **options: object
) -> problem.Problem:
    """Rows side by side."""
    q, k = np.zeros((*batch, m, d), dtype_of(dtype)), np.zeros((*batch, n, d), dtype_of(dtype))
    bias = np.zeros((*batch, n), np.float64 if dtype == "float64" else np.float32) if biased else None
    return describe(q, k, k, key_bias=bias, **options)


def kernels(one: problem.Problem, hopper: bool = True, processors: int = SMS) -> tuple[few.Few, ...]:
    return few.forwards(one, "90a", "sm80", hopper, processors)


def layout_of(one: problem.Problem) -> memory.Layout:
    strides = {"q": one.q_strides, "k": one.k_strides, "v": one.v_strides, "key_bias": one.bias_strides}
    return memory.layout_of(one, strides)


def names(found: tuple[few.Few, ...]) -> list[tuple[str, str]]:
    return [(kernel.variant.operation, kernel.variant.family) for kernel in found]


def test_the_best_comes_first_and_the_last_takes_anything() -> None:
    portable = (tiles.NARROW, "sm80")
    assert names(kernels(described(100, 100, 3))) == [(tiles.NARROW, "sm90"), portable]
    assert names(kernels(described(1, 100, 3))) == [(tiles.ONE_QUERY, "sm90"), portable]
    assert names(kernels(described(2, 100, 3, "float64"))) == [(tiles.NARROW_F64, "sm90"), portable]
    assert names(kernels(described(1, 100, 3, "float64"))) == [(tiles.ONE_QUERY, "sm90"), portable]
    assert names(kernels(described(100, 100, 3), hopper=False)) == [portable]
    assert names(kernels(described(100, 100, 6))) == [portable], "few rows"
    assert not kernels(described(100, 100, 9)) and not kernels(described(100, 100, 3, softcap=2.0))
    q, k, v = (np.zeros((9, d), np.float32) for d in (3, 3, 2))
    assert names(kernels(describe(q, k, v))) == [portable], "rows of K and V differ"
    without = problem.without_value(described(100, 100, 3))
    assert names(kernels(without)) == [(tiles.NARROW, "sm90"), portable]


LANES, PORTABLE = (tiles.LANES, "sm90"), (tiles.NARROW, "sm80")


@pytest.mark.parametrize("d", sorted(tiles.SM90_LANES["float32"]))
def test_lanes_own_rows_where_there_are_enough(d: int) -> None:
    rest = [PORTABLE] if d <= 8 else []
    assert names(kernels(described(4096, 4096, d))) == [LANES, *rest]
    assert names(kernels(problem.without_value(described(4096, 4096, d)))) == [LANES, *rest]
    assert names(kernels(described(128, 100_000, d))) == [LANES, *rest]
    assert names(kernels(described(127, 100_000, d))) == rest, "less than a warp has"
    assert names(kernels(described(1024, 1024, d))) == rest, "most of the device would be idle"
    assert names(kernels(described(1024, 1024, d, batch=(64,)))) == [LANES, *rest]
    assert names(kernels(described(4096, 4096, d), hopper=False)) == rest
    assert names(kernels(described(4096, 4096, d, "float64"))) == [], "of float32 alone"
    tf32 = names(kernels(described(4096, 4096, d, precision="tf32")))
    assert tf32 == ([LANES, *rest] if d <= 8 else []), "one product on tensor cores"


def test_lanes_take_the_very_features() -> None:
    assert names(kernels(described(4096, 4096, 10))) == []
    q, k, v = (np.zeros((4096, d), np.float32) for d in (8, 8, 7))
    assert names(kernels(describe(q, k, v))) == [PORTABLE]
    for n, whole in ((4096, True), (4095, False)):
        one = described(4096, n, 5, batch=(3,), biased=True)
        assert few.takes(kernels(one)[0], one, layout_of(one), (0, 0, 0)) == whole
    wide = np.zeros((4096, 24), np.float32)
    strided = describe(wide[:, :12], wide[:, 12:], wide[:, 12:])
    assert names(kernels(strided)) == [LANES] and not few.takes(
        kernels(strided)[0], strided, layout_of(strided), (0,) * 3
    )


@pytest.mark.parametrize(
    ("m", "heads", "options", "key_warps", "splits"),
    [
        (16384, 1, {}, 4, 4),
        (4096, 8, {}, 8, 1),
        (1024, 64, {}, 4, 1),
        (4096, 1, {}, 8, 8),
        (16384, 1, {"causal": True}, 8, 8),  # not measured: the last rows have the longest parts, others follow them
    ],
    ids=str,
)
def test_lanes_are_shared_out_as_was_best_on_the_device(
    m: int, heads: int, options: dict[str, bool], key_warps: int, splits: int
) -> None:
    kernel = kernels(described(m, m, 8, batch=(heads,), **options))[0]
    assert (kernel.key_warps, kernel.splits) == (key_warps, splits)


@given(
    m=st.integers(1, 3000),
    n=st.integers(0, 3000),
    rows=st.sampled_from([1, 128, 1024]),
    sides=st.tuples(st.none() | st.integers(0, 900), st.none() | st.integers(0, 900)),
    align=st.integers(-4000, 4000),
)
def test_visible_tiles_are_those_that_the_kernel_visits(
    m: int, n: int, rows: int, sides: tuple[int | None, int | None], align: int
) -> None:
    one, keys = described(m, n, 8, window=sides, align=align), 512
    visible = few._visible_tiles(one, rows, keys)
    assert len(visible) == -(-m // rows)
    for block in {0, len(visible) // 2, len(visible) - 1}:
        first, last = block * rows, min(m, (block + 1) * rows) - 1
        begin, end = max(0, first + one.band.lo), min(n, last + one.band.hi + 1)
        assert visible[block] == len({key // keys for key in range(begin, end)})


@pytest.mark.parametrize("dtype", tiles.ITEMSIZE)
@pytest.mark.parametrize("d", [1, 2, 3, 4])
def test_tiles_take_rows_side_by_side_in_whole_vectors(dtype: str, d: int) -> None:
    one = described(100, 1024, d, dtype, (3,), biased=True)
    quick, portable = kernels(one)
    layout = layout_of(one)
    assert few.takes(quick, one, layout, (0, 0, 0))
    for bits in ((8, 0, 0), (0, 8, 0), (0, 0, 8)):
        assert not few.takes(quick, one, layout, bits) and few.takes(portable, one, layout, bits)
    odd = described(100, 1023, d, dtype, (3,))
    whole = 1023 * d * tiles.ITEMSIZE[dtype] % 16 == 0
    assert few.takes(kernels(odd)[0], odd, layout_of(odd), (0, 0, 0)) == whole, "the second head begins between two"
    padded = np.zeros((1024, d + 1), dtype_of(dtype))
    strided = describe(padded[:, :d], padded[:, :d], padded[:, :d])
    assert not few.takes(kernels(strided)[0], strided, layout_of(strided), (0, 0, 0))
    if d == 1:
        return  # the only column has rows side by side, however it lies
    turned = describe(*(np.zeros((d, 1024), dtype_of(dtype)).T for _ in range(3)))
    assert not few.takes(kernels(turned)[0], turned, layout_of(turned), (0, 0, 0))


@given(
    dtype=st.sampled_from(list(tiles.ITEMSIZE)),
    d=st.integers(1, 4),
    begins=st.tuples(st.integers(0, 15), st.integers(0, 15)),
    n=st.integers(1, 40),
)
def test_one_query_takes_rows_of_which_some_begin_with_a_vector_in_k_as_in_v(
    dtype: str, d: int, begins: tuple[int, int], n: int
) -> None:
    itemsize = tiles.ITEMSIZE[dtype]
    one = described(1, n, d, dtype, (2,))
    quick = kernels(one)[0]
    bits = [itemsize * begin % 16 for begin in begins]
    starts = [[(own + head * n * d * itemsize) % 16 for head in range(2)] for own in bits]
    somewhere = all(any((start + key * d * itemsize) % 16 == 0 for key in range(16)) for start in starts[0])
    assert few.takes(quick, one, layout_of(one), (*bits, 0)) == (starts[0] == starts[1] and somewhere)


@pytest.mark.parametrize("m", [1, 2, 32, 5000])
@pytest.mark.parametrize("batch", [(), (7,), (3000,)])
@pytest.mark.parametrize("d", [3, 8])
def test_the_grid_fills_the_device_and_scratch_memory_has_room_for_all_parts(
    m: int, batch: tuple[int, ...], d: int
) -> None:
    one = described(m, 200_000, d, batch=batch)
    for kernel in kernels(one):
        rows, heads = kernel.row_blocks, math.prod(batch)
        parts = few.scratch(one, kernel)
        if kernel.splits == 1:
            assert rows * heads >= SMS and parts.nbytes == 0
            continue
        assert rows * heads * kernel.splits >= SMS
        assert parts.split_rows % 16 == 0 and (
            parts.split_rows >= 4 * heads if kernel.merges else parts.split_rows == 0
        )
        assert parts.nbytes >= parts.split_rows + 4 * kernel.splits * heads * m * (2 + d)
    assert kernels(described(1, 10, 3))[0].splits == 1


def test_sums_of_many_keys_are_not_one_long_chain() -> None:
    """Though queries alone fill the device: 32-bit sums of as many as there are keys would drift."""
    queries, row = np.zeros((1000, 1, 3), np.float32), np.zeros((1, 3), np.float32)
    keys = np.broadcast_to(row, (4_000_000, 3))
    alone = kernels(describe(queries, keys, keys))[0]
    many_rows = kernels(described(5000, 4_000_000, 8))[0]
    assert alone.variant.operation == tiles.ONE_QUERY and many_rows.variant.operation == tiles.LANES
    assert 4_000_000 / (alone.splits * alone.variant.tile.threads) <= few.LONGEST_CHAIN
    assert 4_000_000 / (many_rows.splits * many_rows.variant.tile.block_n) <= few.LONGEST_CHAIN


@pytest.mark.parametrize("dtype", tiles.ITEMSIZE)
@pytest.mark.parametrize("d", [1, 2, 3, 4])
def test_an_sm_holds_the_ctas_of_a_row(dtype: str, d: int) -> None:
    variant = tiles.sm90_few(tiles.NARROW_F64 if dtype == "float64" else tiles.NARROW, dtype, d)
    assert variant is not None and variant.smem_bytes <= tiles.SMEM_LIMIT["90a"]
    assert tiles.resident(variant.smem_bytes, variant.tile, "90a") == variant.tile.resident


@pytest.mark.parametrize(
    ("m", "key_warps", "row_blocks"), [(2, 16, 1), (16, 16, 1), (17, 8, 1), (64, 4, 1), (300, 1, 2)]
)
def test_a_warp_has_the_rows_of_a_product_in_float64(m: int, key_warps: int, row_blocks: int) -> None:
    kernel = kernels(described(m, 5000, 3, "float64"))[0]
    assert (kernel.key_warps, kernel.row_blocks) == (key_warps, row_blocks)
