"""The command line: ``python -m cuflash`` and its commands ``attend``, ``explain``, ``info`` and ``compile``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cuflash import __version__, cli_attend, cli_compile, cli_demo, cli_explain, cli_info

FAILED, BAD_INPUT = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m cuflash",
        description="Exact attention for NumPy and CuPy arrays. Without a command: compute real attention heads and a "
        "long problem, and check both against float64 (exit status 1 where an error is above its budget).",
    )
    parser.add_argument("--version", action="version", version=f"cuflash {__version__}")
    cli_demo.add_arguments(parser)
    commands = parser.add_subparsers(title="commands", metavar="{attend,explain,info,compile}")
    cli_attend.add_parser(commands)
    cli_explain.add_parser(commands)
    cli_info.add_parser(commands)
    cli_compile.add_parser(commands)
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except (ImportError, NotImplementedError, OSError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except (MemoryError, RuntimeError) as error:
        print(f"error: {error or 'not enough memory'}", file=sys.stderr)
        return FAILED
    return status


if __name__ == "__main__":
    sys.exit(main())
