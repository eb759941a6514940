"""Records of runs: what their digest covers, and what the check of them says."""

from __future__ import annotations

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
    assert ("does not match" in capsys.readouterr().out) != matches


@pytest.mark.skipif(not recording.gpu_missing(), reason="there is a GPU")
def test_a_record_without_a_gpu_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "record.json"
    command = [sys.executable, "-m", "pytest", "--record", str(target), "--collect-only", "-q", __file__]
    answer = subprocess.run(command, cwd=recording.ROOT, capture_output=True, text=True, timeout=120)
    assert answer.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--record needs a GPU" in answer.stderr and not target.exists()
