"""The traffic benchmark's own parts, on rows and on an ncu table that are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import traffic, traffic_report
from bench.traffic import Shape

L2 = 50 * 2**20

NCU = """==PROF== Connected to process 7
"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","lts__t_bytes.sum",\
"l1tex__t_bytes_pipe_lsu_mem_global_op_ld.sum","l1tex__t_bytes_pipe_lsu_mem_global_op_st.sum"
"","","byte","byte","byte","byte","byte"
"0","sm90_xmma_gemm_f16f16","1,000","200","30","4","5"
"1","row_softmax_sm80_float16","100","20","3","40","50"
"2","flash1_forward_sm80_float16_d64","7","8","9","10","11"
"3","attention_forward_sm90_float16","1","2","3.0","4","5"
"4","online_softmax_sm80","21","22","23","24","25"
==PROF== Disconnected
"""


def made_rows(factor: float = 1.0) -> list[dict[str, Any]]:
    """Rows as the benchmark writes them, of a device that does what is predicted."""
    base = {"run": "2026-12-01T00:00:00+00:00", "device": "NVIDIA H200", "versions": {}}
    made: list[dict[str, Any]] = []
    for head_dim in (64, 128):
        for seqlen in (512, 1024, 2048, 4096, 8192, 16384, 32768):
            shape = Shape(seqlen, head_dim, traffic.heads_for(seqlen, head_dim, "float16", L2), "float16", False)
            matrix = 2 * shape.heads * seqlen**2
            passes = {"safe_softmax": (3, 1), "online_softmax": (2, 1)}
            ms = {"standard": 3.0, "flash1": 2.0, "cuflash": 1.0, "safe_softmax": 1.0, "online_softmax": 0.8}
            held = {"standard": matrix, "flash1": 4 * seqlen * head_dim * shape.heads, "cuflash": 0}
            counters = {
                name: {"dram_read": 0, "dram_write": 0, "l2_bytes": 1, "kernels": [name]}
                | {"l1_load": passes.get(name, (1, 1))[0] * matrix, "l1_store": matrix}
                for name in ms
            }
            times = {
                name: {
                    "ms": value * seqlen**2 / 1e6,
                    "peak_bytes": held.get(name, matrix) + 2 * seqlen * head_dim * shape.heads,
                }
                for name, value in ms.items()
            }
            for row in traffic.table(shape, base, L2, counters, times):
                row |= {"dram_read": factor * row["predicted_reads"], "dram_write": factor * row["predicted_writes"]}
                made.append(row)
    return made


def test_heads_exceed_four_times_the_l2() -> None:
    for seqlen, head_dim in ((512, 64), (8192, 128), (32768, 64)):
        heads = traffic.heads_for(seqlen, head_dim, "float16", L2)
        assert (heads - 1) * 8 * seqlen * head_dim <= 4 * L2 < heads * 8 * seqlen * head_dim


def test_counters_are_summed_by_algorithm() -> None:
    found = traffic.parse(NCU)
    assert set(found) == {"standard", "flash1", "cuflash", "online_softmax"}
    assert found["standard"]["dram_read"] == 1100 and found["standard"]["l1_store"] == 55
    assert found["standard"]["kernels"] == ["sm90_xmma_gemm_f16f16", "row_softmax_sm80_float16"]
    assert found["cuflash"] == {
        "dram_read": 1, "dram_write": 2, "l2_bytes": 3, "l1_load": 4, "l1_store": 5,
        "kernels": ["attention_forward_sm90_float16"],
    }  # fmt: skip


def test_an_ncu_that_measures_nothing_says_why() -> None:
    with pytest.raises(ValueError, match="ERR_NVGPUCTRPERM"):
        traffic.parse("==ERROR== ERR_NVGPUCTRPERM: no permission to access counters")


def test_ncu_runs_the_workload(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its log is parsed; what it says is passed on where it fails."""
    commands: list[list[str]] = []
    shape = Shape(512, 64, 3, "float16", False)

    class Done:
        returncode, stderr, stdout = 0, "", ""

    def run(command: list[str], **_: Any) -> Done:
        commands.append(command)
        Path(command[command.index("--log-file") + 1]).write_text(NCU)
        return Done()

    monkeypatch.setattr(traffic.subprocess, "run", run)
    assert traffic.counted(shape, "/opt/ncu") == traffic.parse(NCU)
    [command] = commands
    assert command[0] == "/opt/ncu" and set(command[command.index("--metrics") + 1].split(",")) == set(traffic.METRICS)
    assert Shape(**json.loads(command[-1])) == shape and command[-2] == "--workload"
    Done.returncode, Done.stderr = 1, "==ERROR== no such device"
    with pytest.raises(RuntimeError, match="no such device"):
        traffic.counted(shape, "ncu")


def test_a_device_that_does_what_is_predicted_meets_the_bars() -> None:
    assert not list(traffic_report.missed(traffic_report.latest(made_rows())))


def test_every_bar_can_be_missed() -> None:
    table = traffic_report.latest(made_rows(1.2))
    wrong = list(traffic_report.missed(table))
    # Two algorithms, four lengths, two head dims, but for the one that the L2 cannot hold.
    assert len(wrong) == 15 and all("+20%" in line for line in wrong)
    [line] = traffic_report.explained(table)
    assert line.startswith("cuflash, S 32768, d 128: +20%, as k and v of two heads exceed half of the L2")
    table = [dict(row) for row in traffic_report.latest(made_rows())]
    for row in table:
        if (row["seqlen"], row["head_dim"]) == (8192, 64):
            row["ms"] = 1.0 if row["algorithm"] == "standard" else 2.0
            row["l1_load"] *= 1.06
            row["dram_read"] *= 20 if row["algorithm"] == "cuflash" else 1
    wrong = list(traffic_report.missed(table))
    for words in ("3.18 loads", "2.12 loads", "times are not in order", "times our bytes, bar 10", "cuflash, S 8192"):
        assert sum(words in line for line in wrong) == 1, (words, wrong)


def test_the_latest_run_counts() -> None:
    old, new = made_rows(1.0), made_rows(1.1)
    for row in new:
        row["run"] = "2026-12-02T00:00:00+00:00"
    assert traffic_report.latest(new + old) == traffic_report.latest(new)


def test_the_table_is_by_head() -> None:
    lines = traffic_report.markdown(traffic_report.latest(made_rows())).splitlines()
    assert len(lines) == 2 + 14 * 3
    [line] = (line for line in lines if line.startswith("| 8192 | 64 ") and "standard" in line)
    assert "| 541 | 541 |" in line


def test_the_readme_has_one_length_and_says_what_is_moved_over_ours(tmp_path: Path) -> None:
    table = traffic_report.latest(made_rows())
    lines = traffic_report.readme(table).splitlines()
    assert "NVIDIA H200, 2026-12-01, S 8192, float16" in lines[0] and len(lines) == 4 + 2 * 3
    assert lines[4].startswith("| 64 | ") and lines[4].endswith("| 129, 3.00 |")
    with pytest.raises(ValueError, match="no rows of length 8192"):
        traffic_report.readme([row for row in table if row["seqlen"] != 8192])
    results, readme = tmp_path / "rows.json", tmp_path / "README.md"
    results.write_text(json.dumps(made_rows()))
    readme.write_text("<!-- traffic:begin -->\nold\n<!-- traffic:end -->\n")
    assert traffic_report.main([str(results), "--readme", str(readme)]) == 0
    assert "old" not in readme.read_text() and "standard attention" in readme.read_text()


def test_figures_and_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    results = tmp_path / "h200_traffic.json"
    results.write_text(json.dumps(made_rows()))
    assert traffic_report.main([str(results), "--plots", str(tmp_path)]) == 0
    assert "the bars are met" in capsys.readouterr().out
    for name in ("h200_traffic.png", "h200_traffic_softmax.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert traffic_report.main([str(tmp_path / "none.json")]) == 2


def test_without_a_gpu_the_benchmark_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(SystemExit) as caught:
        traffic.main([])
    assert caught.value.code == 2 and "CUDA device" in capsys.readouterr().err
