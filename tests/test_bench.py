"""The benchmarks' own parts: the grid, result rows, the float64 check, turn taking, the report."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuflash
from bench import accuracy, check, device, host_time, memory, peers, problems, report, rows, run, timing
from bench.problems import Problem
from bench.registry import PEERS, Peer, Prepared

BENCH = Path(problems.__file__).parent
SMALL: dict[str, Any] = {"dtype": "float32", "head_dim": 8, "batch": 2, "heads": 4, "seqlen": 24}


def test_the_grid_has_36_shapes_of_one_size() -> None:
    grid = problems.full("bfloat16")
    assert len(set(grid)) == 36
    assert {(p.head_dim, p.causal, p.seqlen) for p in grid} == {
        (d, c, s) for d in (64, 128, 256) for c in (False, True) for s in (512, 1024, 2048, 4096, 8192, 16384)
    }
    assert {p.batch * p.seqlen for p in grid} == {16384}
    assert {p.heads * p.head_dim for p in grid} == {2048}


def test_flops_follow_the_protocol() -> None:
    p = Problem(dtype="float16", head_dim=128, batch=2, heads=16, seqlen=4096)
    causal = Problem(dtype="float16", head_dim=128, batch=2, heads=16, seqlen=4096, causal=True)
    assert p.flops("forward") == 4 * 2 * 16 * 4096**2 * 128
    assert causal.flops("forward") == p.flops("forward") / 2
    assert p.flops("backward") == 2.5 * p.flops("forward")
    assert p.flops("lse") == p.flops("forward") / 2
    window = Problem(dtype="float16", head_dim=128, batch=1, heads=1, seqlen=6, window=(1, 0))
    assert window.visible_pairs() == 1 + 5 * 2


@pytest.mark.parametrize("grid", list(problems.GRIDS))
def test_problems_are_valid_calls(grid: str) -> None:
    for p in problems.GRIDS[grid]("float16"):
        assert p.heads % p.kv_heads == 0 and p.nbytes("forward") > 0 and set(p.columns()) < set(rows.COLUMNS)


def test_columns_of_a_row_are_exact() -> None:
    row = rows.row({"peer": "cuflash", "ms": 1.5})
    names = (
        "run device versions op dtype precision head_dim value_dim causal window softcap key_bias batch heads kv_heads",
        "seqlen seqlen_k peer mode ms tflops gbs peak_bytes reason",
    )
    assert list(row) == " ".join(names).split()
    assert row["peer"] == "cuflash" and row["tflops"] is None
    with pytest.raises(ValueError, match="no such column: speed"):
        rows.row({"speed": 1})


def test_rows_are_appended_one_a_line(tmp_path: Path) -> None:
    path = tmp_path / "new" / "gpu.json"
    rows.append(path, [rows.row({"peer": "a"})])
    rows.append(path, [rows.row({"peer": "b"}), rows.row({"peer": "c"})])
    assert [row["peer"] for row in rows.read(path)] == ["a", "b", "c"]
    assert len(path.read_text().splitlines()) == 5
    assert [each.name for each in path.parent.iterdir()] == ["gpu.json"]


@pytest.mark.parametrize(
    ("name", "expected"), [("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090")]
)
def test_a_device_names_its_file(name: str, expected: str) -> None:
    assert rows.slug(name) == expected


def test_every_contender_of_the_design_is_registered() -> None:
    assert set(PEERS) == {
        "cuflash", "cuflash_sm80", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math", "fa3", "fa3_jax", "fa4",
        "fa4_deterministic", "cudnn_fe", "cupy",
    }  # fmt: skip


def test_absent_and_unable_peers_say_why() -> None:
    half = problems.full("float16")[0]
    for name, module in (("fa3", "flash_attn_interface"), ("fa4", "flash_attn.cute"), ("cudnn_fe", "cudnn")):
        if not installed(module):
            reason = PEERS[name].refusal(half, "forward")
            assert reason is not None and reason.endswith("is not installed")
    assert PEERS["fa4"].refusal(half, "lse") == "has no lse"
    assert PEERS["fa4_deterministic"].refusal(half, "forward") == "has no forward"
    assert PEERS["fa4"].refusal(problems.full("float64")[0], "forward") == "has no float64"
    tf32 = Problem(dtype="float32", head_dim=64, batch=1, heads=1, seqlen=8, precision="tf32")
    assert PEERS["sdpa_efficient"].refusal(tf32, "forward") == "has no precision"
    biased = Problem(dtype="float16", head_dim=64, batch=1, heads=1, seqlen=8, key_bias=True, softcap=2.0)
    assert PEERS["sdpa_flash"].refusal(biased, "forward") == "has no softcap, key_bias"
    assert PEERS["cuflash"].modes_of("forward") == ("default",)
    assert PEERS["cuflash"].modes_of("backward") == ("default", "fast")


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def test_a_family_is_forced_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUFLASH_FAMILY", raising=False)
    with peers.family("sm80"):
        assert os.environ["CUFLASH_FAMILY"] == "sm80"
    assert "CUFLASH_FAMILY" not in os.environ


def test_bfloat16_is_rounded_to_nearest_even() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.random.default_rng(0).standard_normal(10000, dtype=np.float32)
    x[:4] = 1 + np.array([1, 3, 1.001, -1], np.float32) * 2**-8
    rounded = device.from_float32(x, "bfloat16")
    assert rounded.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(device.to_float64(rounded), x.astype(ml_dtypes.bfloat16).astype(np.float64))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": (3, 5)},
    {"window": (6, None), "causal": True, "seqlen_k": 31},
    {"kv_heads": 2, "causal": True},
    {"softcap": 1.5},
    {"key_bias": True},
    {"key_bias": True, "softcap": 2.0, "value_dim": 5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("op", ["forward", "backward", "lse"])
def test_ours_and_the_dense_peer_agree_with_float64(op: str, options: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(check, "ROWS", 10)  # several blocks of rows, the last one cut
    p = Problem(**(SMALL | {"dtype": "float64"} | options))
    x = device.random_inputs(p, np)
    expected = {at: check.reference(p, x, at, np, op == "backward") for at in check.sampled_heads(p)}
    assert run.wrong(p, PEERS["cuflash"].prepare(p, x, op, "default"), expected) is None
    if not (p.softcap and op == "backward"):
        assert run.wrong(p, peers.dense(p, x, op, np), expected) is None


@pytest.mark.parametrize(("dtype", "right"), [("float16", 480), ("bfloat16", 448), ("float32", 510)])
def test_limits_pass_ours_and_stop_a_wrong_mask(dtype: str, right: int) -> None:
    """``right`` hides a few pairs of 262144: the narrowest fault that each limit is asked to find."""
    p = Problem(dtype=dtype, head_dim=64, batch=1, heads=1, seqlen=512)
    x = device.random_inputs(p, np)
    expected = {at: check.reference(p, x, at, np, True) for at in check.sampled_heads(p)}
    assert run.wrong(p, PEERS["cuflash"].prepare(p, x, "backward", "default"), expected) is None
    for o in (cuflash.attention(x.q, x.k, x.v, window=(None, right)), np.full_like(x.q, np.nan)):
        reason = run.wrong(p, Prepared(partial(np.copy, o), lambda o: {"o": o}), expected)
        assert reason is not None and reason.startswith("wrong: o of head (0, 0)")


def test_turns_differ_and_slow_ones_sit_out() -> None:
    turns: list[str] = []
    cost = {"fast": 2.0, "slow": 40.0, "odd": 8.0}

    def batch(name: str, calls: int) -> list[float]:
        turns.append(name)
        return [cost[name]] * calls

    timings = timing.interleave(list(cost), batch, target_ms=80, rounds=5)
    assert {name: t.ms for name, t in timings.items()} == cost
    assert turns[:3] == ["fast", "slow", "odd"]  # warm-up and estimate
    rounds = [turns[3 + 3 * i : 6 + 3 * i] for i in range(2)]
    assert rounds[0] != rounds[1] and all(set(each) == set(cost) for each in rounds)
    assert timings["slow"].calls == 3 and timings["fast"].calls == 40 and timings["odd"].calls == 10
    assert timings["fast"].spread == 0


def test_a_shape_is_measured_whatever_one_peer_throws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of run.py but the device: on host arrays, with a clock of its own."""

    class Clock:
        def __init__(self, prepared: dict[str, Prepared]) -> None:
            self.prepared = prepared

        def batch(self, name: str, calls: int) -> list[float]:
            for _ in range(calls):
                self.prepared[name].run()
            return [2.0] * calls

    def broken(*_: Any) -> Prepared:
        raise RuntimeError("no kernel\nsecond line")

    monkeypatch.setattr(run, "Stopwatch", Clock)
    monkeypatch.setattr(device, "free_memory", lambda: None)
    monkeypatch.setattr(device, "peak_bytes", lambda call: 7)
    contender = Peer("broken", broken, (), ("forward",), ("float32",), (), ("default",), False)
    p = Problem(**SMALL)
    ours = dataclasses.replace(PEERS["cuflash"], needs=())  # the arrays are NumPy's
    entries = [(ours, "default"), (ours, "fast"), (contender, "default")]
    found = [rows.row(each) for each in run.measure(p, ["forward", "backward"], entries, np)]
    told = {(row["op"], row["peer"], row["mode"]): (row["ms"], row["reason"]) for row in found}
    assert told == {
        ("forward", "cuflash", "default"): (2.0, None),
        ("forward", "broken", "default"): (None, "RuntimeError: no kernel"),
        ("backward", "cuflash", "default"): (2.0, None),
        ("backward", "cuflash", "fast"): (2.0, None),
        ("backward", "broken", "default"): (None, "has no backward"),
    }
    assert found[0]["tflops"] == p.flops("forward") / 2e9 and found[0]["peak_bytes"] == 7


def fixture_rows() -> list[dict[str, Any]]:
    """Two runs over the grid, d 64 forward: torch at 100, cupy at 10, ours at 50 in the first and 80 in the second."""
    table = []
    for run_, ours in (("2026-01-01T00:00:00+00:00", 50.0), ("2026-01-02T00:00:00+00:00", 80.0)):
        for p in problems.full("bfloat16"):
            if p.head_dim != 64:
                continue
            for peer, tflops in (("cuflash", ours), ("sdpa_flash", 100.0), ("cupy", 10.0)):
                values = p.columns() | {"run": run_, "device": "NVIDIA H200", "versions": {"cuflash": "0.1.0"}}
                values |= {"op": "forward", "peer": peer, "mode": "default", "ms": 1.0, "tflops": tflops}
                table.append(rows.row(values))
    gemm = {"op": "gemm", "dtype": "bfloat16", "ms": 1.0, "tflops": 700.0, "peer": "cupy", "mode": "default"}
    gone = {"op": "forward", "peer": "fa4", "mode": "default", "reason": "flash_attn.cute is not installed"}
    where = {"run": table[0]["run"], "device": "NVIDIA H200", "versions": {"cuflash": "0.1.0"}}
    return [*table, rows.row(where | gemm), rows.row(where | gone | problems.full("bfloat16")[0].columns())]


def test_ratios_are_of_the_latest_run_and_means_geometric() -> None:
    table = fixture_rows()
    means = report.means(report.ratios(table))
    assert list(means) == [("forward", "bfloat16", "default", 64)]
    by_peer = means["forward", "bfloat16", "default", 64]
    mean, least, count = by_peer["sdpa_flash"]
    assert (round(mean, 9), round(least, 9), count) == (0.8, 0.8, 12)
    assert by_peer["cupy"][0] == pytest.approx(8) and "fa4" not in by_peer
    assert report.geometric_mean([1, 4]) == pytest.approx(2)
    text = report.terminal(table)
    assert re.search(r"sdpa_flash\s+0.800", text)


def test_tf32_is_told_from_float32() -> None:
    """A precision is not compared with, nor drawn over, the dtype's own."""
    table = []
    for precision, ours in ((None, 40.0), ("tf32", 120.0)):
        for p in problems.full("float32"):
            values = p.columns() | {"run": "2026-01-01T00:00:00+00:00", "device": "NVIDIA H200", "versions": {}}
            for peer, tflops in (("cuflash", ours), ("sdpa_math", 20.0)):
                more = {"op": "forward", "peer": peer, "mode": "default", "ms": 1.0, "tflops": tflops}
                table.append(rows.row(values | more | {"precision": precision}))
    means = report.means(report.ratios(table))
    assert {key[1]: round(by_peer["sdpa_math"][0], 9) for key, by_peer in means.items()} == {"float32": 2, "tf32": 6}
    assert {key[1]: speed for key, speed in report.speeds(table).items()} == {"float32": 40, "tf32": 120}


def test_the_section_lands_between_the_markers(tmp_path: Path) -> None:
    results, readme = tmp_path / "h200.json", tmp_path / "README.md"
    results.write_text(json.dumps(fixture_rows()))
    readme.write_text("# Title\n\n<!-- results:begin -->\nold\n<!-- results:end -->\n\nrest\n")
    assert report.main([str(results), "--readme", str(readme)]) == 0
    text = readme.read_text()
    assert text.startswith("# Title\n\n<!-- results:begin -->\n") and text.endswith("<!-- results:end -->\n\nrest\n")
    assert "old" not in text and "NVIDIA H200, 2026-01-02" in text and "bfloat16 matrix product 700 TFLOP/s" in text
    assert "| forward | bfloat16 | 64 | 0.80 | 8.00 |" in text
    assert "| forward | bfloat16 | 64 | yes | 80 | 80 | 80 | 80 | 80 | 80 |" in text
    with pytest.raises(ValueError, match="once each"):
        report.put_into("no markers", "section")


def test_few_features_are_a_table_of_times() -> None:
    table = []
    for run_, ours in (("2026-01-01T00:00:00+00:00", 5.0), ("2026-01-02T00:00:00+00:00", 0.5)):
        for p in (problems.points("float32")[2], problems.points("float64")[5]):
            for peer, ms in (("cuflash", ours), ("cupy", 4.0)):
                values = p.columns() | {"run": run_, "device": "NVIDIA H200", "versions": {}, "tflops": 1.0}
                table.append(rows.row(values | {"op": "forward", "peer": peer, "mode": "default", "ms": ms}))
    assert report.few_features(table)[2:] == [
        "| 3 | 16,384 | 16,384 | 0.500 (8.0) |  |",
        "| 3 | 1 | 4,000,000 |  | 0.500 (8.0) |",
    ]
    assert "| 3 | 1 | 4,000,000 |" in report.markdown(table)
    assert report.few_features(fixture_rows()) == []


def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (picture,) = report.plots(fixture_rows(), tmp_path, "h200")
    assert picture.name == "h200_forward_bfloat16.png" and picture.read_bytes().startswith(b"\x89PNG")


def test_standard_attention_is_rounded_and_its_gradients_are_right() -> None:
    q, k, v, do = (x[0, :64, :32] for x in accuracy.outliers(1, 64, 32, seed=1))
    p = Problem(dtype="float16", head_dim=32, batch=1, heads=1, seqlen=64)
    x = device.Inputs(q[None, None], k[None, None], v[None, None], do[None, None], None)
    expected = check.reference(p, x, (0, 0), np, True)
    found = accuracy.standard(q, k, v, do, p.scale, np)
    assert all(each.dtype == np.float16 for each in found.values())
    errors = check.errors(p, {name: each[None, None] for name, each in found.items()}, (0, 0), expected)
    assert max(errors.values()) < check.LIMITS["float16"]


def test_real_data_is_within_its_bar_on_the_host() -> None:
    q, k, v, do = (x[:2] for x in accuracy.real(0))
    for head in accuracy.compare((q, k, v, do), accuracy.RESULTS, np):
        for name, each in head.items():
            assert each["ours"] <= accuracy.REAL_BAR * each["standard"], name


def test_memory_of_the_host_is_seen_and_judged() -> None:
    table = list(memory.measure(2048, 64, "float16", False, np, host=True))
    assert [row["op"] for row in table] == ["forward", "backward"]
    assert all(0 < row["extra"] < row["score_matrix"] * 2 for row in table)
    assert memory.host_peak(lambda: np.zeros(1 << 20, np.uint8)) >= 1 << 20
    linear = [{"op": "forward", "seqlen": s, "extra": s, "ratio": 1.0} for s in (8192, 16384)]
    assert memory.missed(linear) == []
    square = [{"op": "forward", "seqlen": s, "extra": s * s, "ratio": 3.0} for s in (8192, 16384)]
    assert len(memory.missed(square)) == 2


def test_host_time_counts_single_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_time, "WARM_SECONDS", 0.0)
    waits: list[None] = []
    median, low, high = host_time.microseconds(lambda: None, lambda: waits.append(None))
    assert 0 <= low <= median <= high < 1e3 and len(waits) == host_time.BURSTS


@pytest.mark.parametrize("script", ["run", "report", "memory", "host_time", "accuracy"])
def test_scripts_start_without_a_gpu(script: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH / f"{script}.py"), "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "usage" in done.stdout, done.stderr


def test_what_needs_a_gpu_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(SystemExit) as stop:
        run.main(["--out", str(tmp_path / "x.json")])
    assert stop.value.code == 2 and "needs CuPy and a CUDA device" in capsys.readouterr().err
    assert run.main(["--list", "--grid", "quick"]) == 0
    assert "bfloat16 d64 S512" in capsys.readouterr().out
