"""Result files: a JSON array of rows, one row a line, appended to and never rewritten."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"

COLUMNS = (
    "run", "device", "versions", "op", "dtype", "precision", "head_dim", "value_dim", "causal", "window", "softcap",
    "key_bias", "batch", "heads", "kv_heads", "seqlen", "seqlen_k", "peer", "mode", "ms", "tflops", "gbs", "peak_bytes",
    "reason",
)  # fmt: skip
"""Columns of a row, in order. What does not apply is null."""


def row(values: Mapping[str, Any]) -> dict[str, Any]:
    """A whole row: ``values`` in the order of the columns, null elsewhere; a name that is no column is an error."""
    unknown = set(values) - set(COLUMNS)
    if unknown:
        raise ValueError(f"no such column: {', '.join(sorted(unknown))}")
    return {name: values.get(name) for name in COLUMNS}


def slug(device: str) -> str:
    """A device's name as a file name: 'NVIDIA H200' is 'h200'."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower().removeprefix("nvidia ")).strip("-")


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a result file; none where there is no file."""
    return json.loads(path.read_text()) if path.exists() else []


def append(path: Path, new: Iterable[Mapping[str, Any]]) -> None:
    """Adds rows in one step: a run that is stopped loses nothing and leaves no torn file."""
    lines = [json.dumps(each) for each in (*read(path), *new)]
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w") as file:
        file.write("[\n" + ",\n".join(lines) + "\n]\n")
    os.chmod(temporary, 0o644)
    os.replace(temporary, path)
