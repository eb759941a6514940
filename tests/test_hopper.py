"""The sm90 family's forward on paper: what it takes, its scratch memory, and arrays as the copy engine sees them."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pytest
from test_problem import describe

from cuflash import hopper, memory, params, plan_sm90, planning, problem, tiles, tma

SMS = 132


def of_shape(m: int, n: int, d: int, dtype: Any = np.float32, heads: int = 1, **options: Any) -> problem.Problem:
    q, k = np.zeros((heads, m, d), dtype), np.zeros((heads, n, d), dtype)
    return describe(q, k, k, **options)


def test_a_box_has_the_axes_of_the_array_from_columns_to_batch() -> None:
    box = tma.box("float16", (1000, 64), (2, 3, 4), (3 * 4 * 64000, 4 * 64000, 64000, 64, 1), 128)
    assert box == tma.Box("float16", (64, 1000, 4, 3, 2), (128, 128000, 512000, 1536000), 128)


def test_a_broadcast_axis_of_a_box_is_there_once() -> None:
    box = tma.box("bfloat16", (10, 8), (5, 3, 1), (0, 80, 0, 8, 1), 64)
    assert box is not None and box.extents == (8, 10, 1, 3, 1)
    assert all(stride % tma.ALIGNMENT == 0 and stride > 0 for stride in box.strides)


@pytest.mark.parametrize(
    ("what", "strides"),
    [
        ("columns apart", (0, 0, 0, 64, 2)),
        ("rows that are no multiple of 16 bytes apart", (0, 0, 0, 36, 1)),
        ("rows backwards", (0, 0, 0, -64, 1)),
        ("one row again and again", (0, 0, 0, 0, 1)),
        ("batches backwards", (0, 0, -6400, 64, 1)),
        ("batches too far apart", (0, 0, 1 << 39, 64, 1)),
    ],
)
def test_the_copy_engine_cannot_follow(what: str, strides: tuple[int, ...]) -> None:
    assert tma.box("float16", (100, 32), (1, 1, 2), strides, 64) is None, what


def test_one_column_has_no_stride_to_speak_of() -> None:
    assert tma.box("float16", (100, 1), (1, 1, 1), (0, 0, 0, 8, 5), 64) is not None


def test_o_has_a_map_where_the_copy_engine_can_write_it() -> None:
    described = of_shape(100, 90, 40, np.float16, 2)
    strides = {"q": described.q_strides, "k": described.k_strides, "v": described.v_strides}
    for o, rows in (((8000, 80, 2), 80), ((8200, 82, 2), None), ((16000, 160, 4), None), ((8000, -80, 2), None)):
        layout = memory.layout_of(described, {**strides, "o": o})
        found = hopper.output_map(described, layout)
        assert (found is None) == (rows is None), o
        assert found is None or (found.box is not None and found.box.strides[0] == rows and found.box.rows == 64)


def test_o_has_no_map_where_its_rows_end_within_16_bytes() -> None:
    """One row of 5 columns: the copy engine wrote 8."""
    for m, e in ((1, 5), (100, 36)):
        described = of_shape(m, 90, e, np.float16)
        strides = {"q": described.q_strides, "k": described.k_strides, "v": described.v_strides, "o": (144 * m, 144, 2)}
        assert hopper.output_map(described, memory.layout_of(described, strides)) is None


def test_planes_are_made_where_they_pay() -> None:
    assert hopper.forward(of_shape(4096, 4096, 128), SMS, True)
    assert hopper.forward(of_shape(1, 1 << 20, 128), SMS, True) is None, "few queries"
    assert hopper.forward(of_shape(1 << 17, 20, 128), SMS, True) is None, "few keys"
    assert hopper.forward(of_shape(1 << 14, 1 << 14, 128, window=(16, 0)), SMS, True) is None, "few keys in the window"
    assert hopper.forward(of_shape(4096, 4096, 136), SMS, True) is None, "no room in shared memory"
    assert hopper.forward(of_shape(4096, 4096, 64, np.float64), SMS, True) is None


@pytest.mark.parametrize("options", [{}, {"precision": "tf32"}], ids=str)
def test_planes_of_few_features_do_not_pay(options: dict[str, Any]) -> None:
    for d in (1, 12, 16):
        described = of_shape(4096, 4096, d, **options)
        assert hopper.forward(described, SMS, True) is None
        assert hopper.forward(problem.without_value(described), SMS, True) is None
        assert hopper.forward(of_shape(4096, 4096, d, np.float16), SMS, True), "there are none in 16 bits"
    assert hopper.forward(of_shape(4096, 4096, 17, **options), SMS, True)
    q, v = np.zeros((4096, 12), np.float32), np.zeros((4096, 20), np.float32)
    assert hopper.forward(describe(q, q, v, **options), SMS, True), "the wider of k and v decides"


def test_lse_alone_makes_nothing_of_values() -> None:
    described = problem.without_value(of_shape(4096, 4096, 64))
    taken = hopper.forward(described, SMS, True)
    assert taken and taken.tile.value_dim == 0
    assert hopper.scratch(described, taken).nbytes == 2 * 3 * 2 * 4096 * 64 + 16
    layout = memory.layout_of(described, {"q": described.q_strides, "k": described.k_strides}, planes=True)
    maps = hopper.maps(described, layout, taken)
    assert maps is not None and [each == hopper.NO_MAP for each in maps] == [False] * 6 + [True] * 3


def test_short_rows_have_tiles_of_their_own() -> None:
    short, long = (hopper.forward(of_shape(512, n, 64, np.float16), SMS, True) for n in (1024, 1025))
    assert short and short.tile == tiles.SM90_SHORT["16 bits", None][64]
    assert long and long.tile == tiles.SM90_FORWARD["16 bits", None][64]
    causal = hopper.forward(of_shape(2047, 2047, 64, np.float16, causal=True), SMS, True)
    assert causal and causal.tile == short.tile, "half of the keys on average"


@pytest.mark.parametrize(("m", "n"), [(7, 9), (9, 7), (1, 5), (5, 1), (6, 6)])
def test_scores_are_counted_one_by_one(m: int, n: int) -> None:
    """Those that a band leaves, wherever it lies."""
    for align in (-12, -3, 0, 2, 11):
        for window in ((0, 0), (2, 1), (None, 0), (1, None), (20, 20)):
            bounds = [np.inf if side is None else side for side in window]
            at = np.arange(n) - np.arange(m)[:, None] - align
            seen = ((at >= -bounds[0]) & (at <= bounds[1])).sum()
            assert hopper._scores(of_shape(m, n, 8, window=window, align=align)) == seen
    assert hopper._scores(of_shape(m, n, 8)) == m * n


def test_sections_and_tiles_stay_in_32_bits() -> None:
    q, k = np.zeros((8, 1 << 16, 128), np.float16), np.zeros((8, 1, 128), np.float16)
    few_keys = hopper.forward(describe(q, k, k, causal=True, align="bottom-right"), SMS, True)
    assert few_keys and few_keys.sections == (8, 8)
    many = np.lib.stride_tricks.as_strided(np.zeros((1, 72), np.float16), (2**31 - 100, 1, 72), (0, 144, 2))
    assert hopper.forward(describe(many, k[:1, :, :72], k[:1]), SMS, True) is None


def test_tiles_are_claimed_where_their_lengths_differ() -> None:
    even, uneven = (
        hopper.forward(of_shape(4096, 4096, 128, np.float16, 16, causal=c), SMS, True) for c in (False, True)
    )
    assert even and not even.claims and even.sections == (1, 1)
    assert hopper.forward(of_shape(4096, 4096, 128, np.float16, 16, window=(512, 512)), SMS, True).claims
    last = -(-hopper.LAST_SECTION_TILES * SMS // 32)
    assert uneven and uneven.claims and uneven.sections == (hopper.SECTION_BYTES // (4096 * 256 * 2), last)
    few = hopper.forward(of_shape(4096, 4096, 128, np.float16, causal=True), SMS, True)
    assert few and not few.claims


def test_scratch_holds_what_the_maps_name() -> None:
    """Planes of an array that is broadcast are made once."""
    q, k = np.zeros((3, 4, 1000, 100), np.float32), np.zeros((3, 1, 900, 100), np.float32)
    described = describe(q, k, np.broadcast_to(k, (3, 4, 900, 100))[..., :37])
    taken = hopper.forward(described, SMS, True)
    assert taken and taken.planes == 3
    scratch = hopper.scratch(described, taken)
    sizes = 3 * 2 * np.array([12 * 1000 * 104, 3 * 900 * 104, 3 * 900 * 40])
    assert scratch == (0, sizes[0], sizes[:2].sum(), sizes.sum(), sizes.sum(), sizes.sum() + 16)
    strides = {"q": described.q_strides, "k": described.k_strides, "v": described.v_strides}
    layout = memory.layout_of(described, strides, planes=True)
    maps = hopper.maps(described, layout, taken)
    assert maps is not None
    assert [params.TENSORS[each.tensor] for each in maps] == [x for x in memory.PLANES for _ in range(3)]
    starts = {"q_planes": 0, "k_planes": scratch.k, "v_planes": scratch.v}
    ends = {"q_planes": scratch.k, "k_planes": scratch.v, "v_planes": scratch.claims}
    for each in maps:
        name, (cols, rows, *batch) = params.TENSORS[each.tensor], each.box.extents
        reach = 2 * cols + sum(
            (length - 1) * step for length, step in zip((rows, *batch), each.box.strides, strict=True)
        )
        assert each.offset + reach <= ends[name] - starts[name]


def test_a_warp_makes_planes_of_as_many_rows_as_the_kernel_says() -> None:
    from cuflash import compile

    text = (compile.kernels_dir() / "attention_planes.cu").read_text()
    assert f"kWarpRows = {hopper.PLANE_ROWS};" in text
    assert hopper.plane_warps(of_shape(9, 17, 64, heads=2)) == 2 * (2 + 3 + 3)


def test_blocks_of_query_rows_have_as_many_bytes_of_counters_as_the_kernel_says() -> None:
    from cuflash import compile

    text = (compile.kernels_dir() / "include" / "dq_turns_sm90.cuh").read_text()
    [record] = re.findall(r"struct DqTurn {(.*?)};", text, re.DOTALL)
    assert 4 * len(re.findall(r"^  u32 ", record, re.MULTILINE)) == hopper.TURN_NBYTES


@pytest.mark.parametrize("d", sorted(tiles.SM90_BACKWARD))
def test_scratch_of_gradients_holds_row_vectors_sums_and_counters(d: int) -> None:
    described = of_shape(1000, 300, d, np.float16, heads=3)
    taken = hopper.backward(described, SMS)
    assert taken is not None and taken.tile is tiles.SM90_BACKWARD[d]
    variants = [
        tiles.sm90_backward_variant("float16", taken.tile, True, terms, needs_dq)
        for terms in tiles.SM90_TERMS
        for needs_dq in (True, False)
        if needs_dq or d in tiles.SM90_BACKWARD_KEYS
    ]
    assert all(0 < variant.smem_bytes <= tiles.SMEM_LIMIT["90a"] for variant in variants)
    rows, blocks = 3 * memory.padded_rows(1000), -(-1000 // taken.tile.block_m)
    sums = 4 * 3 * blocks * taken.tile.block_m * d
    counts = hopper.CLAIMS_NBYTES + hopper.TURN_NBYTES * 3 * blocks
    for plain in (True, False):
        taken = hopper.backward(described, SMS, plain)
        assert taken is not None and taken.takes_terms == (plain and d > 64)
        sums_at = (8 + 16 * taken.takes_terms) * rows
        expected = (0, 4 * rows, 8 * rows, sums_at, sums_at, sums_at + sums, sums_at + sums + counts + 16, counts)
        assert hopper.backward_scratch(described, taken) == expected
    end = 8 * rows + hopper.CLAIMS_NBYTES
    without_dq = (0, 4 * rows, *(8 * rows,) * 4, end + 16, hopper.CLAIMS_NBYTES)
    for whole in (None, hopper.backward(described, SMS, needs_dq=False)):
        assert hopper.backward_scratch(described, whole) == without_dq
    shared = hopper.backward_scratch(described, taken._replace(shares=hopper.KeyShares(True, 0, 12)))
    assert shared.counts - shared.dq_accum == sums + 12 * 4 * taken.tile.block_m * d
    assert shared.counts_nbytes == counts + 12 * hopper.TURN_NBYTES
    biased = of_shape(1000, 300, d, np.float16, heads=3, key_bias=np.zeros(300, np.float32))
    more = 4 * 3 * 300
    expected = (*expected[:4], *(x + more for x in expected[4:7]), counts)
    assert hopper.backward_scratch(biased, taken) == expected


@pytest.mark.parametrize(
    ("d", "e", "tile"),
    [
        (129, 8, (192, 128)),
        (192, 128, (192, 128)),
        (136, 136, (192, 192)),
        (40, 200, (256, 256)),
        (256, 256, (256, 256)),
    ],
)
def test_kernels_for_some_of_the_gradients_have_row_vectors_and_a_count(d: int, e: int, tile: tuple[int, int]) -> None:
    """And the same claims, one after the other."""
    q, k, v = (
        np.zeros((3, n, cols), np.float16) for n, cols in ((1000, 8 * -(-d // 8)), (300, 8 * -(-d // 8)), (300, e))
    )
    described = describe(q[..., :d], k[..., :d], v)
    taken = hopper.split_backward(described)
    assert taken is not None and taken.dq is not None and taken.dkv is not None
    assert (taken.dkv.head_dim, taken.dkv.value_dim) == tile
    for variant in (
        of_tile("float16", tile, plain)
        for of_tile, tile in (
            (tiles.sm90_backward_dq_variant, taken.dq),
            (tiles.sm90_backward_dkv_variant, taken.dkv),
        )
        for plain in (True, False)
    ):
        assert 0 < variant.smem_bytes <= tiles.SMEM_LIMIT["90a"] and variant.maps == 4
    rows, counts = 3 * memory.padded_rows(1000), hopper.CLAIMS_NBYTES
    nbytes = 8 * rows + counts + 16
    assert hopper.backward_scratch(described) == (0, 4 * rows, *(8 * rows,) * 4, nbytes, counts)


def test_few_features_have_no_kernel_for_dk_and_dv_alone() -> None:
    taken = hopper.split_backward(of_shape(100, 90, 128, np.float16))
    assert taken is not None and taken.dq is not None and taken.dkv is None
    assert hopper.split_backward(of_shape(100, 90, 192, np.float32)) is None
    assert hopper.split_backward(of_shape(100, 90, 132, np.float16)) is None  # rows that do not begin at whole 16 bytes


def test_blocks_of_keys_are_taken_in_sections_whose_q_and_do_the_l2_holds() -> None:
    described = of_shape(4096, 16384, 256, np.float16, heads=12)
    held = hopper.BACKWARD_SECTION_BYTES // (4096 * 2 * 512)
    assert hopper.dkv_sections(described, 12, 256, SMS) == (held, held)
    assert hopper.dkv_sections(of_shape(64, 64, 256, np.float16), 1, 1, SMS) == (1, 1)
    causal = of_shape(4096, 16384, 256, np.float16, heads=12, causal=True, align=0)
    assert hopper.dkv_sections(causal, 12, 64, SMS) == (held, -(-hopper.LAST_SECTION_TILES * SMS // 64))


@pytest.mark.parametrize(
    ("causal", "in_order", "owned", "wanted"),
    [
        (False, True, 8, (3, 3)),  # their sums of dq wait for one another
        (False, False, 8, (1, 1)),
        (True, True, 32, (12, 12)),  # and those of dk and dv, where each has a CTA
        (True, False, 32, (12, 24)),
    ],
)
def test_query_heads_of_a_group_are_taken_together(
    causal: bool, in_order: bool, owned: int, wanted: tuple[int, int]
) -> None:
    q, k = np.zeros((2, 16, 2048, 128), np.float16), np.zeros((2, 4, 2048, 128), np.float16)
    described = describe(q, k, k, causal=causal, grouped_heads=True, deterministic=in_order)
    taken = hopper.backward(described, SMS)
    assert taken is not None and taken.in_order == in_order
    assert hopper.dqkv_sections(described, taken, owned, 16, SMS) == wanted


@pytest.mark.parametrize(("held", "group", "wanted"), [(3, 8, 2), (0, 8, 1), (12, 4, 12), (14, 4, 12), (5, 7, 1)])
def test_a_section_has_whole_groups_or_a_part_of_one(held: int, group: int, wanted: int) -> None:
    assert hopper._whole_groups(held, group) == wanted


@pytest.mark.parametrize(("m", "each"), [(512, 3), (2048, 1)])
def test_of_even_tiles_a_head_is_taken_after_the_other_where_blocks_of_keys_are_many(m: int, each: int) -> None:
    described = of_shape(m, m, 128, np.float16, heads=3, deterministic=False)
    taken = hopper.backward(described, SMS)
    assert taken is not None
    assert hopper.dqkv_sections(described, taken, 3, m // taken.tile.block_n, SMS) == (each, each)


def test_gradients_of_other_features_and_dtypes_are_for_other_kernels() -> None:
    assert hopper.backward(of_shape(100, 90, 129, np.float16), SMS) is None
    assert hopper.backward(of_shape(100, 90, 64, np.float32), SMS) is None
    assert hopper.backward(of_shape(100, 90, 60, np.float16), SMS) is None  # rows that do not begin at whole 16 bytes
    for d, tile in ((8, 64), (64, 64), (72, 96), (104, 128), (128, 128)):
        taken = hopper.backward(of_shape(100, 90, d, np.float16), SMS)
        assert taken is not None and taken.tile.head_dim == tile
        without_dq = hopper.backward(of_shape(100, 90, d, np.float16), SMS, needs_dq=False)
        assert without_dq is not None and without_dq.tile.head_dim == (64 if tile == 64 else 128)


@pytest.mark.parametrize("tile", tiles.SM90_BACKWARD_DQ, ids=lambda tile: f"{tile.head_dim}-{tile.value_dim}")
def test_a_tile_for_dq_alone_fits_and_leaves_registers(tile: tiles.Tile) -> None:
    """Of a consumer's 232 or 240: sums, scores, what becomes ds, and ds."""
    assert 0 < tiles.sm90_backward_dq_variant("float16", tile).smem_bytes <= tiles.SMEM_LIMIT["90a"]
    assert tile.block_m == params.ROW_PADDING == 2 * hopper.WARPGROUP_ROWS and tile.threads == 384
    assert tile.head_dim // 2 + 2 * tile.block_n // 2 + tile.block_n // 4 <= 208


def test_dq_alone_takes_the_narrowest_tile() -> None:
    for d, e, wanted in ((8, 64, (64, 64)), (72, 40, (128, 128)), (128, 8, (128, 128)), (192, 128, (192, 128)),
                         (136, 136, (192, 192)), (40, 256, (256, 256)), (256, 256, (256, 256))):  # fmt: skip
        tile = tiles.sm90_backward_dq("bfloat16", d, e)
        assert tile is not None and (tile.head_dim, tile.value_dim) == wanted
        with_terms = tiles.sm90_backward_dq("bfloat16", d, e, plain=False)
        assert with_terms is not None and (with_terms.head_dim, with_terms.value_dim) == max(wanted, (192, 128))
    assert tiles.sm90_backward_dq("float16", 257, 64) is None
    assert tiles.sm90_backward_dq("float32", 64, 64) is None


def test_maps_for_some_of_the_gradients_bring_rows_of_a_warpgroup_and_blocks_of_keys() -> None:
    described = of_shape(1000, 300, 192, np.float16, heads=3)
    strides = {"q": described.q_strides, "k": described.k_strides, "v": described.v_strides}
    tile = tiles.sm90_backward_dq("float16", 192, 192)
    assert tile is not None
    for rows_apart, followed in ((384, True), (388, False)):
        layout = memory.layout_of(described, {**strides, "dout": (1000 * rows_apart, rows_apart, 2)})
        maps = hopper.split_maps(described, layout, tile)
        assert (maps is not None) == followed
        if maps is not None:
            assert [params.TENSORS[each.tensor] for each in maps] == ["q", "k", "v", "dout"]
            assert [each.box.rows for each in maps if each.box] == [64, tile.block_n, tile.block_n, 64]


@pytest.mark.parametrize(
    ("q", "k", "options", "blocks"),
    [
        ((6,), (6,), {"causal": True}, 0),  # each head has keys of its own
        ((6,), (2,), {"causal": True}, 2 * 64),
        ((6,), (1,), {"window": (2500, 0)}, 64),
        ((6,), (2,), {"window": (100, 0)}, 0),  # few steps
        ((6,), (2,), {}, 0),  # blocks of keys are as long
    ],
)
@pytest.mark.parametrize("d", [64, 128])
def test_sums_of_dk_and_dv_are_shared_where_blocks_of_keys_are_uneven(
    q: tuple[int, ...], k: tuple[int, ...], options: dict[str, Any], blocks: int, d: int
) -> None:
    heads, keys = (np.zeros((*batch, 8192, d), np.float16) for batch in (q, k))
    described = describe(heads, keys, keys, grouped_heads=q != k, deterministic=False, **options)
    taken = hopper.backward(described, SMS)
    assert taken is not None
    halves = 1 if d == 64 else 2
    assert taken.shares.sums == 2 * halves * blocks and taken.shares.by_position == (blocks > 0)


@pytest.mark.parametrize(
    ("heads", "m", "n", "options", "is_split"),
    [
        (66, 4096, 1024, {}, True),
        (66, 4096, 1024, {"deterministic": False}, True),  # a whole number of tiles for each CTA
        (70, 4096, 1024, {"deterministic": False}, True),  # and few more
        (74, 4096, 1024, {"deterministic": False}, False),  # many more: whole ones do well
        (74, 4096, 1024, {}, True),
        (16, 4096, 1024, {}, False),  # as many CTAs as tiles
        (66, 1024, 1024, {}, False),  # few steps
        (66, 8192, 8192, {"causal": True}, True),  # the longest tiles come last
        (66, 8192, 8192, {"causal": True, "deterministic": False}, False),  # or first
        (66, 8192, 8192, {"causal": True, "deterministic": False, "softcap": 5.0}, True),
        (66, 4096, 1024, {"key_bias": np.zeros(1024, np.float32)}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("d", [64, 128])
def test_the_last_blocks_of_keys_are_taken_in_parts_where_they_would_end_late(
    heads: int, m: int, n: int, options: dict[str, Any], is_split: bool, d: int
) -> None:
    described = of_shape(m, n, d, np.float16, heads, **options)
    taken = hopper.backward(described, SMS, planning.is_plain(described))
    assert taken is not None
    assert taken.shares == (hopper.KeyShares(False, 16, 32 if d == 64 else 64) if is_split else hopper.NO_SHARES)


def test_tiles_of_dq_alone_are_taken_in_sections_where_their_lengths_differ() -> None:
    assert hopper.dq_sections(of_shape(4096, 4096, 256, np.float16, 16), 16, 32, SMS) == (1, 1)
    assert hopper.dq_sections(of_shape(4096, 4096, 256, np.float16, 16, causal=True), 16, 32, SMS) == (4, 8)
    assert hopper.dq_sections(of_shape(64, 64, 64, np.float16, causal=True), 1, 1, SMS) == (1, 1)


def test_caps_at_the_ends_of_float32_are_for_other_kernels() -> None:
    for cap, scale in ((30.0, None), (1e-19, 0.0), (1e19, 3e38), (1e-19, -1.0)):
        described = of_shape(4096, 4096, 64, np.float16, softcap=cap, scale=scale)
        assert hopper.forward(described, SMS, False) and hopper.backward(described, SMS), (cap, scale)
    for cap, scale in ((1e-21, None), (1e21, None), (1e-19, 30.0), (1e-3, -3e17)):
        described = of_shape(4096, 4096, 64, np.float16, softcap=cap, scale=scale)
        assert hopper.forward(described, SMS, False) is None and hopper.backward(described, SMS) is None, (cap, scale)
        assert hopper.split_backward(of_shape(4096, 4096, 192, np.float16, softcap=cap, scale=scale), False) is None


def test_a_problem_has_the_terms_that_it_asks_for() -> None:
    bias = {"key_bias": np.zeros(100, np.float32)}
    for options, terms in (
        ({}, ()),
        (bias, ("KeyBias",)),
        ({"scale": -1.0}, ("KeyBias",)),
        ({"softcap": 30.0}, ("Softcap",)),
        ({"softcap": 30.0, **bias}, ("Softcap", "KeyBias")),
    ):
        described = of_shape(100, 100, 64, np.float16, **options)
        assert plan_sm90._terms(described, planning.is_plain(described)) == terms
        assert terms in tiles.SM90_TERMS


def test_lse_alone_of_a_softcap_in_16_bits_takes_weights_of_0() -> None:
    for dtype in ("bfloat16", "float32"):
        for has_value in (True, False):
            tile = tiles.sm90_forward(dtype, None, 64, has_value=has_value, capped=True)
            assert tile is not None
            both = dtype == "bfloat16" and not has_value
            scores = tiles.sm90_variant(dtype, tile, None, ("Softcap",)).scores
            assert scores == (("Softcap", "KeyBias") if both else ("Softcap",))


@pytest.mark.parametrize(("kind", "precision"), list(tiles.SM90_FORWARD))
def test_a_tile_of_the_sm90_family_fits(kind: str, precision: str | None) -> None:
    dtype = "float16" if kind == "16 bits" else kind
    short = tiles.SM90_SHORT.get((kind, precision), {})
    capped = tiles.SM90_CAPPED.get((kind, precision), {})
    for tile in itertools.chain(
        *(rows.values() for rows in (tiles.SM90_FORWARD[kind, precision], short, capped)),
        tiles.SM90_LSE[kind, precision].values(),
    ):
        variant = tiles.sm90_variant(dtype, tile, precision, ())
        assert 0 < variant.smem_bytes <= tiles.SMEM_LIMIT["90a"]
        assert tile.block_m == 64 * (tile.warps // 4 - 1)
