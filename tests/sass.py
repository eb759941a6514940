"""What a cubin is made of: opcode counts from nvdisasm."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from pathlib import Path

# "        /*0040*/              @P0 LDGSTS.E.BYPASS.128 [R5], [R2.64] ;": address, perhaps a predicate, opcode.
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)", re.MULTILINE)


def nvdisasm() -> str | None:
    """The disassembler of the ``nvidia-cuda-nvdisasm`` package, else the one of an installed toolkit, else None."""
    site = Path(sysconfig.get_paths()["purelib"], "nvidia")
    packaged = sorted(site.glob("*/bin/nvdisasm*"))
    return str(packaged[-1]) if packaged else shutil.which("nvdisasm")


class Opcodes(Counter[str]):
    """How often each opcode occurs with its modifiers: ``{"HMMA.16816.F32": 128, "LDGSTS.E.BYPASS.128": 24, ...}``."""

    def __init__(self, in_order: list[str]) -> None:
        super().__init__(in_order)
        self.in_order = in_order

    def positions(self, *names: str) -> list[int]:
        """Where in the code opcodes occur, with any modifiers."""
        return [at for at, opcode in enumerate(self.in_order) if opcode.split(".")[0] in names]

    def count(self, name: str) -> int:
        """How often an opcode occurs with at least these leading modifiers."""
        return sum(count for opcode, count in self.items() if f"{opcode}.".startswith(f"{name}."))


def opcodes(cubin: Path) -> Opcodes:
    """The instructions of a cubin."""
    tool = nvdisasm()
    if tool is None:  # no skip: what has not been looked at is not proven
        raise RuntimeError('nvdisasm is missing: pip install "nvidia-cuda-nvdisasm==13.*"')
    text = subprocess.run([tool, "-c", cubin], check=True, capture_output=True, text=True).stdout
    return Opcodes(_INSTRUCTION.findall(text))
