"""The traffic model against counting, tile by tile; the table of ceilings; and ``explain`` on the command line."""

import itertools
import re
import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import cuflash
from cuflash import __main__, ceilings, cli_explain, cli_info, lineage_tiles, tiles, traffic

MB = 1e6


# --- the model -------------------------------------------------------------------------------------------------------


def test_the_known_figures_of_8192_tokens():
    """A matrix of 134 MB, 537 MB for four passes over it, and q, k, v and o beside them."""
    for d in (64, 128):
        standard = cuflash.memory_traffic("standard", 8192, 8192, d)
        assert standard["score_matrix"] == 2 * 8192**2 == pytest.approx(134e6, rel=0.01)
        operands = 4 * 8192 * d * 2
        assert standard["total"] - operands == 4 * standard["score_matrix"] == pytest.approx(537e6, rel=0.01)
        ours = cuflash.memory_traffic("cuflash", 8192, 8192, d, l2_bytes=50 * 2**20)
        assert ours["total"] == operands
        assert standard["total"] >= 10 * ours["total"]


def counted(algorithm, m, n, d, e, heads, dtype, rows, keys, causal):
    """Reads and writes by walking the loops of each algorithm."""
    size, wide = tiles.ITEMSIZE[dtype], tiles.accumulator_bytes(dtype)
    reads = writes = 0

    def sees(i, j):
        last_row = min(m, i + rows) - 1
        return not causal or j <= last_row + n - m

    if algorithm == "standard":
        reads = size * (m * d + n * d + m * n + m * n + n * e)
        writes = size * (2 * m * n + m * e)
    elif algorithm == "cuflash":
        for i in range(0, m, rows):
            height = min(m, i + rows) - i
            reads += size * height * d
            for j in range(0, n, keys):
                reads += size * (d + e) * (min(n, j + keys) - j) * sees(i, j)
            writes += size * height * e
    elif algorithm == "flash1":
        visits = dict.fromkeys(range(0, m, rows), 0)
        for j in range(0, n, keys):
            reads += size * (d + e) * (min(n, j + keys) - j)
            for i in range(0, m, rows):
                if j > 0 and not sees(i, j):
                    continue
                height = min(m, i + rows) - i
                reads += size * height * d
                if visits[i]:
                    reads += wide * height * (e + 2)
                    writes += wide * height * e  # what the pass before left
                writes += wide * height * 2
                visits[i] += 1
        writes += size * m * e
    else:
        passes = {"safe_softmax": 3, "online_softmax": 2}[algorithm]
        reads, writes = passes * size * m * n, size * m * n
    return heads * reads, heads * writes


sizes = st.integers(1, 70)


@given(
    algorithm=st.sampled_from(traffic.ALGORITHMS), m=sizes, n=sizes, d=sizes, e=sizes, heads=st.integers(1, 3),
    dtype=st.sampled_from(tuple(tiles.ITEMSIZE)), rows=st.integers(1, 80), keys=st.integers(1, 80),
    causal=st.booleans(),
)  # fmt: skip
@example(
    algorithm="flash1", m=70, n=3, d=8, e=8, heads=1, dtype="float32", rows=16, keys=2, causal=True
)  # most rows see no key
def test_the_model_is_what_the_loops_count(algorithm, m, n, d, e, heads, dtype, rows, keys, causal):
    options = {"value_dim": e, "heads": heads, "dtype": dtype, "block_m": rows, "block_n": keys, "causal": causal}
    got = cuflash.memory_traffic(algorithm, m, n, d, **options)
    assert (got["reads"], got["writes"]) == counted(algorithm, m, n, d, e, heads, dtype, rows, keys, causal)
    cached = cuflash.memory_traffic(algorithm, m, n, d, **options, l2_bytes=2**40)
    assert cached["reads"] <= got["reads"] and cached["writes"] <= got["writes"]
    assert got["total"] == got["reads"] + got["writes"]
    assert got["score_matrix"] == tiles.ITEMSIZE[dtype] * m * n


@pytest.mark.parametrize("algorithm", ["flash1", "cuflash"])
@pytest.mark.parametrize(("m", "n"), [(256, 256), (64, 512)])
def test_causal_tiles_that_nobody_sees_are_left_out(algorithm, m, n):
    got = cuflash.memory_traffic(algorithm, m, n, 16, block_m=32, block_n=16, causal=True)
    assert (got["reads"], got["writes"]) == counted(algorithm, m, n, 16, 16, 1, "float16", 32, 16, True)
    assert got["reads"] < cuflash.memory_traffic(algorithm, m, n, 16, block_m=32, block_n=16)["reads"]


@pytest.mark.parametrize("algorithm", ["standard", "flash1", "cuflash"])
def test_a_cache_absorbs_what_fits(algorithm):
    def total(l2_bytes, heads=2):
        return cuflash.memory_traffic(algorithm, 4096, 4096, 64, heads=heads, l2_bytes=l2_bytes)["total"] / heads

    at = [total(size) for size in (0, 2**14, 2**19, 2**23, 2**30)]
    assert at == sorted(at, reverse=True) and at[0] > at[-1]
    assert total(2**30, heads=2**20) == (total(2**30) if algorithm == "cuflash" else total(0))


def test_default_tiles_are_those_of_the_kernels():
    for dtype, d in itertools.product(tiles.ITEMSIZE, (1, 20, 64, 65, 128)):
        for algorithm in ("flash1", "cuflash"):
            tile = traffic.default_tile(algorithm, dtype, d)
            assert min(tile.head_dim, tile.value_dim) >= d
            given_tile = {"block_m": tile.block_m, "block_n": tile.block_n}
            default, given_too = (
                cuflash.memory_traffic(algorithm, 999, 999, d, dtype=dtype, **x) for x in ({}, given_tile)
            )
            assert default == given_too
    assert traffic.default_tile("cuflash", "bfloat16", 128) == tiles.sm90_forward("bfloat16", None, 128)


@pytest.mark.parametrize("target", ["75", "80", "86", "90a", "120"])
def test_tiles_of_flash1_fill_shared_memory(target):
    family = "sm75" if target == "75" else "sm80"
    for dtype in tiles.ITEMSIZE:
        for d in lineage_tiles.head_dims(lineage_tiles.FLASH1_FORWARD, dtype):
            tile = lineage_tiles.flash1_forward(dtype, d, target, family)
            used = tiles.ITEMSIZE[dtype] * d * (2 * tile.block_n + tile.stages * tile.block_m)
            assert tiles.SMEM_LIMIT[target] / 2 < used <= tiles.SMEM_LIMIT[target]
            assert tile.block_m == 16 * tile.warps


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "words"),
    [
        (("flash3", 8, 8, 8), {}, ValueError, "'flash3'"),
        ((3, 8, 8, 8), {}, TypeError, "algorithm must be a str"),
        (("standard", 0, 8, 8), {}, ValueError, "seqlen_q must be at least 1, got 0"),
        (("standard", 8, -1, 8), {}, ValueError, "seqlen_k must be at least 1, got -1"),
        (("standard", 8, 8.5, 8), {}, TypeError, "seqlen_k must be an int, got float"),
        (("standard", True, 8, 8), {}, TypeError, "seqlen_q must be an int, got bool"),
        (("standard", 8, 8, 8), {"dtype": "int8"}, ValueError, "'int8'"),
        (("standard", 8, 8, 8), {"dtype": np.float16}, TypeError, "dtype must be one of"),
        (("standard", 8, 8, 8), {"heads": 0}, ValueError, "heads must be at least 1, got 0"),
        (("standard", 8, 8, 8), {"causal": 1}, TypeError, "causal must be a bool"),
        (("cuflash", 8, 8, 8), {"block_m": 0}, ValueError, "block_m must be at least 1, got 0"),
        (("cuflash", 8, 8, 8), {"l2_bytes": -1}, ValueError, "l2_bytes must be at least 0, got -1"),
        (("cuflash", 8, 8, 257), {}, ValueError, "no tile for 257 features"),
        (("flash1", 8, 8, 64), {"dtype": "float64", "value_dim": 129}, ValueError, "no tile for 129 features"),
    ],
)  # fmt: skip
def test_bad_input(arguments, keywords, error, words):
    with pytest.raises(error, match=re.escape(words)):
        cuflash.memory_traffic(*arguments, **keywords)


def test_any_size_with_tiles_of_ones_own():
    got = cuflash.memory_traffic("cuflash", 8, 8, 1000, block_m=4, block_n=4)
    assert got["total"] == 2 * 8 * 1000 * (1 + 2 * 2 + 1)


def test_a_length_beyond_any_memory_takes_no_longer():
    """Nothing is counted tile by tile: of a causal square, half of the pairs of tiles and half of the diagonal."""
    m, tile = 2**50, 2**4
    got = cuflash.memory_traffic("cuflash", m, m, 1, block_m=tile, block_n=tile, causal=True)
    pairs = m // tile * (m // tile + 1) // 2
    assert got["total"] == 2 * (2 * m + 2 * tile * pairs)


# --- ceilings --------------------------------------------------------------------------------------------------------


def test_ceilings_are_found_by_the_name_of_the_driver():
    for name, wanted in {
        "NVIDIA H200": "H200", "NVIDIA H100 80GB HBM3": "H100", "NVIDIA A100-SXM4-80GB": "A100", "Tesla T4": "T4",
        "NVIDIA GeForce RTX 4090": "RTX 4090", "NVIDIA RTX A1000": None, "NVIDIA T400": None,
    }.items():  # fmt: skip
        row = ceilings.named(name)
        assert (row and row.name) == wanted, name


def test_ridge_points_and_float32():
    h200 = ceilings.named("H200")
    assert h200.ridge("float16") == pytest.approx(740 / 4.2)
    assert h200.flops_of("float32") == pytest.approx(392e12 / 3)
    assert ceilings.named("T4").flops_of("bfloat16") == 0


# --- explain ---------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(cli_info, "find_driver", lambda: None)


def explain(*options):
    return __main__.main(["explain", *map(str, options)])


def test_explain_argues_in_megabytes(capsys):
    assert explain("--seqlen", 8192, "--head-dim", 64) == 0
    out = capsys.readouterr().out
    for words in (
        "134.2 MB a head",
        "four passes, 536.9 MB",
        "ridge point 176",
        "541.1",
        "H200 (no GPU here; measured)",
    ):
        assert words in out
    rows = {line[:20].strip(): line[20:].split() for line in out.splitlines()}
    assert rows["standard attention"][3] == "memory" and rows["cuflash"][3] == "compute"
    assert float(rows["cuflash"][0]) == 4.2
    assert "moves 129 times fewer bytes" in out


def test_explain_times_are_bytes_or_operations_over_ceilings(capsys):
    assert explain("--seqlen", 4096, "--head-dim", 128, "--heads", 32, "--gpu", "A100", "--dtype", "bfloat16") == 0
    rows = {line[:20].strip(): line[20:].split() for line in capsys.readouterr().out.splitlines()}
    moved = cuflash.memory_traffic("standard", 4096, 4096, 128, heads=32)["total"]
    assert float(rows["standard attention"][4]) == pytest.approx(1e3 * moved / 2.04e12, abs=5e-4)
    assert float(rows["cuflash"][4]) == pytest.approx(1e3 * 32 * 4 * 4096**2 * 128 / 312e12, abs=5e-4)


@pytest.mark.parametrize(("m", "n"), [(5, 5), (3, 9), (9, 3)])
def test_causal_operations_are_those_of_what_is_seen(m, n):
    seen = np.tril(np.ones((m, n)), n - m).sum()
    shape = cli_explain.Shape(m, n, 4, 6, 2, "float16", True)
    assert shape.flops() == 2 * 2 * seen * (4 + 6)


def test_explain_says_when_the_matrix_does_not_fit(capsys):
    assert explain("--seqlen", 131072, "--head-dim", 64, "--heads", 16) == 0
    assert "more than the 141,000 MB of the H200: it does not run at all" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--seqlen", 0, "--head-dim", 64), "--seqlen must be at least 1, got 0"),
        (("--seqlen", 8, "--head-dim", -3), "--head-dim must be at least 1, got -3"),
        (("--seqlen", 8, "--head-dim", 64, "--heads", 0), "--heads must be at least 1"),
        (("--seqlen", 2**31, "--head-dim", 64), "kernels count rows up to 2147482623"),
        (("--seqlen", 8, "--head-dim", 300), "300 features; the kernels take at most 256"),
        (("--seqlen", 10**8, "--head-dim", 128, "--heads", 8), "the H200 has 141,000 MB of memory"),
        (("--seqlen", 8, "--head-dim", 64, "--gpu", "T4", "--dtype", "bfloat16"), "T4 has no matrix products"),
    ],
)  # fmt: skip
def test_explain_names_the_limit_that_a_size_breaks(options, words, capsys):
    assert explain(*options) == 2
    assert words in capsys.readouterr().err


def test_explain_leaves_out_what_has_no_kernel(capsys):
    assert explain("--seqlen", 512, "--head-dim", 200, "--dtype", "float32") == 0
    out = capsys.readouterr().out
    assert "FlashAttention-1" not in out and "cuflash" in out


def test_columns_of_explain_are_apart_and_small_numbers_are_there(capsys):
    for options in (("--seqlen", 5 * 10**8, "--head-dim", 1, "--causal"), ("--seqlen", 1, "--head-dim", 1)):
        assert explain(*options) == 0
        out = capsys.readouterr().out
        rows = {line[:20].strip(): line[20:].split() for line in out.splitlines()}
        for title in cli_explain.ALGORITHMS.values():
            moved, plain, _, bound, ms, _ = rows[title]
            assert 0 < float(moved.replace(",", "")) <= float(plain.replace(",", ""))
            assert bound in ("memory", "compute") and float(ms.replace(",", "")) > 0
    assert out.startswith("1 head, 1 query, 1 key, 1 feature, float16")


def test_explain_does_not_promise_what_cannot_be(capsys):
    """Where both wait for the same, cuflash is no faster; where a few queries read all keys, too."""
    assert explain("--seqlen", 8192, "--head-dim", 64, "--dtype", "float64", "--gpu", "RTX 4090") == 0
    assert "at best both are equally fast here, being bound by compute" in capsys.readouterr().out
    assert explain("--seqlen", 1, "--seqlen-k", 8192, "--head-dim", 128) == 0
    assert "at best both are equally fast here, being bound by memory" in capsys.readouterr().out


def test_explain_counts_parts_of_float32_where_there_are_some(capsys):
    extra = {}
    for gpu in ("H200", "A100"):
        assert explain("--seqlen", 1024, "--head-dim", 64, "--dtype", "float32", "--gpu", gpu) == 0
        [line] = (line for line in capsys.readouterr().out.splitlines() if line.startswith("cuflash  "))
        extra[gpu] = float(line.split()[-1])
    assert extra == {"H200": pytest.approx(6 * 3 * 1024 * 64 / MB, abs=0.05), "A100": 0}


def test_explain_draws(tmp_path, capsys):
    path = tmp_path / "traffic.png"
    assert explain("--seqlen", 8192, "--head-dim", 128, "--plot", path) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in capsys.readouterr().out


def test_explain_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert explain("--seqlen", 8, "--head-dim", 8, "--plot", tmp_path / "x.png") == 2
    assert 'pip install "cuflash[plot]"' in capsys.readouterr().err
