"""The package works in the four ways it is found: wheel elsewhere, wheel from the checkout, editable, bare checkout.

Each runs in a virtual environment of its own, which sees the packages of the tests' environment (NumPy above all) after
its own. Nothing is downloaded.
"""

import email
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest

import cuflash

ROOT = Path(__file__).resolve().parent.parent

REPORT = """
import json, cuflash
from cuflash import compile
print(json.dumps({
    "package": cuflash.__path__[0],
    "kernels": str(compile.kernels_dir()),
    "files": sorted(p.relative_to(compile.kernels_dir()).as_posix() for p in compile.kernels_dir().rglob("*.cu*")),
}))
"""


def run(*command, cwd, **environment):
    """Output of a command that succeeds, with nothing of this checkout on its path."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run([*map(str, command)], cwd=cwd, env=clean | environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def pip(*arguments, cwd):
    return run(sys.executable, "-m", "pip", "--quiet", *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT, cwd=folder)
    [path] = folder.glob("*.whl")
    return path


def environment(folder: Path) -> Path:
    """A virtual environment; returns its Python."""
    venv.create(folder, with_pip=False)
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    # Listed in a .pth file, folders go to the end of the path, and .pth files in them are not followed.
    paths = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    Path(site, "tests_environment.pth").write_text("".join(f"{path}\n" for path in paths))
    return python


@pytest.fixture(scope="module")
def wheel_python(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel_venv")
    python = environment(folder)
    pip("--python", python, "install", "--no-deps", "--no-index", "--ignore-installed", wheel, cwd=folder)
    return python


@pytest.fixture(scope="module")
def editable_python(tmp_path_factory):
    folder = tmp_path_factory.mktemp("editable_venv")
    python = environment(folder)
    arguments = ["install", "--no-deps", "--no-index", "--ignore-installed", "--no-build-isolation", "--editable", ROOT]
    pip("--python", python, *arguments, cwd=folder)
    return python


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    return environment(tmp_path_factory.mktemp("bare_venv"))


def check(python, cwd, root, tmp_path, *flags):
    """Package and kernels are those under ``root``, and the command line computes what the tests' cuflash computes."""
    report = json.loads(run(python, *flags, "-c", REPORT, cwd=cwd))
    assert Path(report["package"]).resolve() == root / "cuflash"
    assert Path(report["kernels"]).resolve() in (root / "cuflash" / "kernels_cu", root / "kernels_cu")
    expected = (path.relative_to(ROOT / "kernels_cu").as_posix() for path in (ROOT / "kernels_cu").rglob("*.cu*"))
    assert report["files"] == sorted(expected)

    heads, result = Path(report["package"], "data", "minilm_heads.npz"), tmp_path / "x.npz"
    run(python, *flags, "-m", "cuflash", "attend", heads, "-o", result, "--backend", "host", "--causal", cwd=cwd)
    with np.load(heads) as x, np.load(result) as y:
        np.testing.assert_array_equal(y["o"], cuflash.attention(x["q"], x["k"], x["v"], causal=True))
    run(python, *flags, "-m", "cuflash", "info", cwd=cwd)


def site_of(python):
    return Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd="/").strip()).resolve()


def test_wheel_installed_elsewhere(wheel_python, tmp_path):
    check(wheel_python, tmp_path, site_of(wheel_python), tmp_path)


def test_wheel_run_from_the_root_of_the_checkout(wheel_python, tmp_path):
    """``python -m`` finds the checkout first, then with its kernels; with -P it finds the wheel, with the wheel's."""
    check(wheel_python, ROOT, ROOT, tmp_path)
    (tmp_path / "x.npz").unlink()
    check(wheel_python, ROOT, site_of(wheel_python), tmp_path, "-P")


def test_editable(editable_python, tmp_path):
    check(editable_python, tmp_path, ROOT, tmp_path)


def test_bare_checkout(bare_python, tmp_path):
    check(bare_python, ROOT, ROOT, tmp_path)


# --- what is in the wheel --------------------------------------------------------------------------------------------


def tracked(folder: str) -> set[str]:
    """Files under a folder of the checkout that belong into the wheel."""
    paths = (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in paths}


def test_the_wheel_holds_the_package_the_kernels_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in names if ".dist-info/" not in name}
    assert package == tracked("cuflash") | {f"cuflash/{name}" for name in tracked("kernels_cu")}
    assert "cuflash/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_packaged_data_is_small(wheel):
    sizes = {
        x.filename: x.file_size for x in zipfile.ZipFile(wheel).infolist() if x.filename.startswith("cuflash/data/")
    }
    assert 0 < sum(sizes.values()) <= 200_000


def test_the_packaged_heads_are_those_of_the_tests(wheel):
    with np.load(ROOT / "cuflash" / "data" / "minilm_heads.npz") as heads:
        for index, (layer, chosen) in enumerate({0: [2, 5], 2: [0, 11]}.items()):
            with np.load(ROOT / "tests" / "data" / f"minilm_layer{layer}_qkv.npz") as whole:
                for name in "qkv":
                    np.testing.assert_array_equal(heads[name][index], whole[name][chosen])


def test_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Version"] == cuflash.__version__
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata["Requires-Python"] == ">=3.11"
    required = metadata.get_all("Requires-Dist")
    assert [re.split(r"[<>=!~]", line)[0] for line in required if "extra ==" not in line] == ["numpy"]
    assert set(metadata.get_all("Provides-Extra")) == {"cuda12", "cuda13", "plot", "test", "bench"}


def test_a_source_distribution_builds_the_same_wheel(wheel, tmp_path):
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path, cwd=ROOT)
    [sdist] = tmp_path.glob("*.tar.gz")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, sdist, cwd=tmp_path)
    [again] = tmp_path.glob("*.whl")
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def test_the_gpu_extras_differ_in_their_cuda_version_alone():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    as_13 = [
        line.replace("12x", "13x").replace("nvrtc-cu12==12", "nvrtc==13").replace("12.*", "13.*")
        for line in extras["cuda12"]
    ]
    assert as_13 == extras["cuda13"]
    # What compiles kernels is in the extra of the tests, so that compile tests never skip.
    compiler = [
        line for line in extras["cuda13"] if line.startswith(("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc"))
    ]
    assert len(compiler) == 3 and set(compiler) <= set(extras["test"])
