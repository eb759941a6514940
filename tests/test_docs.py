"""Every example of a docstring and of README runs, and README speaks of what is there."""

import doctest
import importlib
import pkgutil
import re
import tomllib
from pathlib import Path

import pytest

import cuflash
from cuflash import cli_compile, compile

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
MODULES = ["cuflash", *(f"cuflash.{module.name}" for module in pkgutil.iter_modules(cuflash.__path__))]
PUBLIC = [name for name in cuflash.__all__ if name.islower() and name != "lineage"]


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_of_a_module(module):
    assert doctest.testmod(importlib.import_module(module)).failed == 0


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_function_has_an_example(name):
    function = getattr(cuflash, name)
    assert any(test.examples for test in doctest.DocTestFinder(recurse=False).find(function, name))


@pytest.mark.parametrize("name", cuflash.lineage.__all__)
def test_every_function_of_the_lineage_has_an_example(name):
    function = getattr(cuflash.lineage, name)
    assert any(test.examples for test in doctest.DocTestFinder(recurse=False).find(function, name))


def test_the_examples_of_readme():
    result = doctest.testfile(str(README), module_relative=False)
    assert result.failed == 0
    assert result.attempted >= 20


def test_readme_counts_the_kernels_of_an_architecture():
    counts = {target: len(cli_compile._variants(target, None, None)) for target in compile.TARGETS}
    hopper = counts.pop("90a")
    assert f"{min(counts.values())} to {max(counts.values())} of them, Hopper {hopper}," in README.read_text()


def test_readme_names_extras_commands_and_files_that_exist():
    text = README.read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(re.findall(r"cuflash\[(\w+)\]", text)) | set(re.findall(r"\.\[(\w+)\]", text))
    assert extras and extras <= set(project["optional-dependencies"])
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / target).exists(), target
    for name in re.findall(r"`cuflash\.(\w+)", text):
        assert hasattr(cuflash, name), name


def test_readme_has_the_place_of_the_results():
    """The table between the markers is generated; both must be there, once, in this order."""
    text = README.read_text()
    assert re.fullmatch(r"(?s)[^\0]*<!-- results:begin -->.*<!-- results:end -->[^\0]*", text)
    assert text.count("<!-- results:begin -->") == text.count("<!-- results:end -->") == 1


def test_readme_installs_as_messages_do():
    """Both forms of the command: for a checkout, and the one that errors and ``info`` print."""
    text = README.read_text()
    for extra in ("cuda12", "cuda13"):
        assert f'"cuflash[{extra}]"' in compile.install_hint("CuPy")
        assert f"`{extra}`" in text
    assert 'pip install ".[cuda13]"' in text and 'pip install "cuflash[cuda13]"' in text
    assert "'cuflash[" not in text and "'.[" not in text
