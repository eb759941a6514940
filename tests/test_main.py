"""The command line as a whole."""

import os
import subprocess
import sys

import pytest
from command import ROOT

import cuflash
from cuflash import __main__


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        __main__.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == f"cuflash {cuflash.__version__}"


def test_python_m_cuflash():
    """The whole of it as users start it, from a folder that is not the checkout."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-m", "cuflash"], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "every error is within its budget" in result.stdout
    assert result.stderr == ""
