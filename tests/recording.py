"""Records of test runs on GPUs: what ran where, and the sources it ran.

``python tests/recording.py`` says of each record in ``tests/records`` whether it still matches the sources;
``python tests/recording.py join OUT PART...`` makes one record of those of all parts of a run.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "tests" / "records"
HOST_SOURCES = (
    "launch",
    "planning",
    "plan_sm90",
    "devices",
    "needs",
    "overlap",
    "hopper",
    "few",
    "memory",
    "compile",
    "params",
    "tma",
    "tiles",
    "lineage_launch",
    "lineage_tiles",
)
"""Modules of cuflash that decide what runs on a GPU; those that exist count."""


def sources_digest(root: Path = ROOT) -> str:
    """Digest of everything that decides what runs on a GPU: sorted paths and bytes."""
    digest = hashlib.sha256()
    for path in sorted(_sources(root), key=lambda path: path.relative_to(root).as_posix()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _sources(root: Path) -> Iterator[Path]:
    kernels = root / "kernels_cu"
    hidden = (path for path in kernels.rglob("*") if path.is_file())
    yield from (path for path in hidden if not any(part.startswith((".", "__")) for part in path.parts[-2:]))
    yield from (path for name in HOST_SOURCES if (path := root / "cuflash" / f"{name}.py").is_file())


@functools.cache
def gpu_missing() -> str:
    """Why no GPU can be used, or an empty string."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy is not usable ({error})"
    try:
        return "" if cupy.cuda.runtime.getDeviceCount() else "no CUDA device"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA device ({error})"


def write(path: Path, **results: int | float | str) -> None:
    """Write the record of a run that gave these results on the current GPU."""
    import cupy

    from cuflash.compile import nvrtc_version

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    record = {
        "gpu": properties["name"].decode(),
        "driver": _driver_version(),
        "nvrtc": str(nvrtc_version()),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **results,
        "sources": sources_digest(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")


def _driver_version() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    return answer.stdout.splitlines()[0].strip() if answer.returncode == 0 and answer.stdout else "unknown"


def join(out: Path, parts: Sequence[Path]) -> None:
    """Write the record of a whole run from those of its parts, which ran side by side.

    Raises
    ------
    ValueError
        They are not all parts of one run, each once.
    """
    records = [json.loads(path.read_text()) for path in parts]
    named = sorted(record["part"] for record in records)
    if named != sorted(f"{index + 1}/{len(records)}" for index in range(len(records))):
        raise ValueError(f"{len(records)} records are of the parts {', '.join(named)}: not each of as many once")
    for key in ("gpu", "driver", "nvrtc", "sources"):
        if len(values := {record[key] for record in records}) > 1:
            raise ValueError(f"the parts differ in {key}: {', '.join(sorted(values))}")
    whole = {key: value for key, value in records[0].items() if key != "part"}
    for key in ("passed", "failed", "skipped", "hypothesis_examples"):
        whole[key] = sum(record[key] for record in records)
    whole["hypothesis_seed"] = [record["hypothesis_seed"] for record in records]
    whole["date"], whole["seconds"] = (max(record[key] for record in records) for key in ("date", "seconds"))
    out.write_text(json.dumps(whole, indent=2) + "\n")


def main() -> int:
    """Say of each record whether it matches; the exit status is 0 only if there are some and all do."""
    records = sorted(RECORDS.glob("*.json"))
    digest = sources_digest()
    matching = 0
    for path in records:
        record = json.loads(path.read_text())
        matches, failed = record["sources"] == digest, record["failed"]
        matching += matches and failed == 0
        verdict = f"{'matches' if matches else 'does not match'} the sources"
        if failed:
            verdict += f", {failed} failed"
        if failed or not matches:
            verdict += ": run the GPU suite again"
        print(f"{path.name}: {record['gpu']}, {record['date']}, {record['passed']} passed: {verdict}")
    if not records:
        print(f"no record in {RECORDS.relative_to(ROOT)}")
    return 0 if records and matching == len(records) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["join"]:
        join(Path(sys.argv[2]), [Path(part) for part in sys.argv[3:]])
    else:
        sys.exit(main())
