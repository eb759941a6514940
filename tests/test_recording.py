"""Records of runs: what their digest covers, and what the check of them says."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import recording


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("kernels_cu/a.cu", "kernels_cu/include/b.cuh", "cuflash/tiles.py", "cuflash/host.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("kernels_cu/a.cu", True),
        ("kernels_cu/include/b.cuh", True),
        ("cuflash/tiles.py", True),
        ("cuflash/host.py", False),
    ],
)
def test_the_digest_covers_what_runs_on_a_gpu(tree: Path, name: str, counts: bool) -> None:
    before = recording.sources_digest(tree)
    (tree / name).write_text("changed")
    assert (recording.sources_digest(tree) != before) == counts


def test_the_digest_covers_names(tree: Path) -> None:
    before = recording.sources_digest(tree)
    (tree / "kernels_cu/a.cu").rename(tree / "kernels_cu/c.cu")
    assert recording.sources_digest(tree) != before


@pytest.mark.parametrize(("sources", "failed", "matches"), [(None, 0, True), ("other", 0, False), (None, 1, False)])
def test_a_record_matches_if_its_sources_are_these_and_nothing_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    sources: str | None, failed: int, matches: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(recording, "RECORDS", tmp_path)
    record = {"gpu": "X", "date": "2000-01-01", "passed": 3, "failed": failed}
    (tmp_path / "x.json").write_text(json.dumps(record | {"sources": sources or recording.sources_digest()}))
    assert recording.main() == (0 if matches else 1)
    assert ("run the GPU suite again" in capsys.readouterr().out) != matches


def part(index: int, count: int, **more: object) -> dict[str, object]:
    """The record of a part of a run."""
    counts = {"passed": 10 + index, "failed": index - 1, "skipped": 1, "hypothesis_examples": 100}
    where = {"gpu": "X", "driver": "1", "nvrtc": "(13, 0)", "sources": "same"}
    when = {"date": f"2000-01-0{index}", "seconds": 5.0 * index, "hypothesis_seed": index}
    return {**where, **counts, **when, "part": f"{index}/{count}", **more}


def written(folder: Path, records: list[dict[str, object]]) -> list[Path]:
    paths = [folder / f"{at}.json" for at in range(len(records))]
    for path, record in zip(paths, records, strict=True):
        path.write_text(json.dumps(record))
    return paths


def test_parts_of_a_run_join(tmp_path: Path) -> None:
    out = tmp_path / "whole.json"
    recording.join(out, written(tmp_path, [part(2, 2), part(1, 2)]))
    whole = json.loads(out.read_text())
    assert (whole["passed"], whole["failed"], whole["skipped"], whole["hypothesis_examples"]) == (23, 1, 2, 200)
    assert whole["hypothesis_seed"] == [2, 1] and whole["seconds"] == 10 and whole["date"] == "2000-01-02"
    assert "part" not in whole and whole["sources"] == "same"


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([part(1, 2)], "1/2"),
        ([part(1, 2), part(1, 2)], "1/2, 1/2"),
        ([part(1, 2), part(2, 3)], "2/3"),
        ([part(1, 2), part(2, 2, sources="other")], "sources: other, same"),
    ],
)
def test_what_is_not_each_part_of_one_run_does_not_join(
    tmp_path: Path, records: list[dict[str, object]], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        recording.join(tmp_path / "whole.json", written(tmp_path, records))


def test_parts_share_out_the_tests() -> None:
    def collected(*options: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *options, __file__]
        answer = subprocess.run(command, cwd=recording.ROOT, capture_output=True, text=True, timeout=120)
        return [line for line in answer.stdout.splitlines() if "::" in line] or [answer.stderr]

    thirds = [collected("--part", f"{index}/3", "-k", "digest") for index in (1, 2, 3)]
    assert sorted(itertools.chain(*thirds)) == sorted(collected("-k", "digest")) and all(thirds)
    assert "--part must be I/N" in collected("--part", "4/3")[0]


@pytest.mark.skipif(not recording.gpu_missing(), reason="there is a GPU")
def test_a_record_without_a_gpu_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "record.json"
    command = [sys.executable, "-m", "pytest", "--record", str(target), "--collect-only", "-q", __file__]
    answer = subprocess.run(command, cwd=recording.ROOT, capture_output=True, text=True, timeout=120)
    assert answer.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--record needs a GPU" in answer.stderr and not target.exists()
