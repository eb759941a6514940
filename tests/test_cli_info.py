"""Where the command line computes, and what it says of the machine."""

import numpy as np
import pytest
from command import HOPPER, attend, pretend

import cuflash
from cuflash import __main__, cli_attend, cli_info, compile


@pytest.mark.parametrize("version, extra", [((13, 0), "cuda13"), ((12, 4), "cuda12")])
def test_a_gpu_without_cupy_is_said_loudly(files, capsys, monkeypatch, version, extra):
    pretend(monkeypatch, cli_info.Driver(version, (HOPPER,)), absent=["cupy"])
    paths = [str(files / f"{name}.npy") for name in "qkv"]
    assert __main__.main(["info"]) == 0
    info = capsys.readouterr().out
    assert __main__.main(["attend", *paths, "-o", str(files / "x.npz")]) == 0
    attended = capsys.readouterr()
    assert "the host" in attended.out
    assert __main__.main(["attend", *paths, "-o", str(files / "y.npz"), "--backend", "cuda"]) == 2
    refused = capsys.readouterr().err
    for text in (info, attended.err, refused):
        for word in ("THERE IS A GPU", "NVIDIA H200", "CuPy", f'pip install "cuflash[{extra}]"', f'".[{extra}]"'):
            assert word in text


@pytest.mark.parametrize(
    "driver, words",
    [
        (None, "no CUDA driver"),
        (cli_info.Driver((13, 0), ()), "sees no device"),
        (cli_info.Driver((11, 8), (HOPPER,)), "CUDA 11.8, CuPy needs 12"),
        (cli_info.Driver((13, 0), (cli_info.Device("NVIDIA GeForce GTX 1080", (6, 1), 2**33),)), "GTX 1080"),
    ],
)
def test_what_keeps_a_gpu_from_being_used_is_said(files, capsys, monkeypatch, driver, words):
    pretend(monkeypatch, driver)
    monkeypatch.setattr(cli_info, "_is_importable", lambda module: True)
    assert __main__.main(["info"]) == 0
    assert words in capsys.readouterr().out
    assert attend(files, "--backend", "cuda") == 2
    assert words in capsys.readouterr().err


def test_an_unused_driver_is_not_mentioned_where_the_host_was_asked_for(files, capsys, monkeypatch):
    pretend(monkeypatch, cli_info.Driver((13, 0), (HOPPER,)), absent=["cupy"])
    assert attend(files) == 0
    assert capsys.readouterr().err == ""


def test_what_a_gpu_does_not_do_is_computed_on_the_host_and_said(files, capsys, monkeypatch):
    def limit(named, options):
        raise NotImplementedError("float32 on a GPU is not built yet")

    pretend(monkeypatch, cli_info.Driver((13, 0), (HOPPER,)))
    monkeypatch.setattr(cli_info, "missing", lambda driver: "")
    monkeypatch.setattr(cli_attend, "_compute_on_gpu", limit)
    paths = [str(files / f"{name}.npy") for name in "qkv"]
    assert __main__.main(["attend", *paths, "-o", str(files / "x.npz")]) == 0
    output = capsys.readouterr()
    assert "not built yet" in output.err and "the host" in output.out
    assert __main__.main(["attend", *paths, "-o", str(files / "y.npz"), "--backend", "cuda"]) == 2
    assert not (files / "y.npz").exists()


def test_info_names_versions_and_the_cache(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "kernels"))
    assert __main__.main(["info"]) == 0
    output = capsys.readouterr().out
    assert cuflash.__version__ in output and np.__version__ in output
    assert f"{tmp_path / 'kernels'}: 0 kernels" in output


def test_info_works_without_nvrtc(capsys, monkeypatch):
    def absent():
        raise ImportError("NVRTC is missing")

    monkeypatch.setattr(compile, "nvrtc_version", absent)
    monkeypatch.setattr(compile, "targets", absent)
    assert __main__.main(["info"]) == 0
    assert "NVRTC is missing" in capsys.readouterr().out
