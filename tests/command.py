"""The command line in tests: files that it reads, what it is to do with bad input, and a GPU that is not there."""

import contextlib
import types
from pathlib import Path

import numpy as np
import pytest

from cuflash import __main__, arrays, cli_info

ROOT = Path(__file__).resolve().parent.parent
HEADS = ROOT / "cuflash" / "data" / "minilm_heads.npz"
HOPPER = cli_info.Device("NVIDIA H200", (9, 0), 150 * 2**30)


@pytest.fixture
def files(tmp_path):
    """q, k, v and do as .npy files, in a folder of their own."""
    rng = np.random.default_rng(7)
    shapes = {"q": (2, 5, 4), "k": (2, 7, 4), "v": (2, 7, 3), "do": (2, 5, 3)}
    for name, shape in shapes.items():
        np.save(tmp_path / f"{name}.npy", rng.standard_normal(shape).astype(np.float32))
    return tmp_path


def load(folder, *names):
    return [np.load(folder / f"{name}.npy") for name in names]


def attend(folder, *options, inputs=("q.npy", "k.npy", "v.npy"), output="x.npz"):
    """Exit status of attend on the host, for files of a folder."""
    arguments = ["attend", *(str(folder / name) for name in inputs), "-o", str(folder / output), "--backend", "host"]
    return __main__.main([*arguments, *map(str, options)])


def assert_fails(status, capsys, folder, *words, left=()):
    """Status 2, a message with the words, and no file but the inputs and those named in ``left``."""
    message = capsys.readouterr().err
    assert status == 2
    for word in words:
        assert word in message
    assert "Traceback" not in message
    known = {"q.npy", "k.npy", "v.npy", "do.npy", *left}
    assert {path.name for path in folder.iterdir()} <= known


def pretend(monkeypatch, driver, absent=()):
    """A machine with this driver, without these modules."""
    find = cli_info._is_importable
    monkeypatch.setattr(cli_info, "find_driver", lambda: driver)
    monkeypatch.setattr(cli_info, "_is_importable", lambda module: module not in absent and find(module))


class PretendedCupy:
    """What the command line asks of CuPy, on NumPy arrays: so the host computes what a GPU would."""

    __version__ = "14.2.0"

    class cuda:
        using_allocator = staticmethod(contextlib.nullcontext)

        class MemoryPool:
            malloc = None

            def total_bytes(self):
                return 10**9

        @staticmethod
        def get_current_stream():
            return types.SimpleNamespace(synchronize=lambda: None)

    @staticmethod
    def asarray(x):
        assert x.flags.c_contiguous and x.dtype.isnative
        return x

    @staticmethod
    def asnumpy(x):
        return x

    @staticmethod
    def empty(size, dtype):
        return types.SimpleNamespace(data=types.SimpleNamespace(copy_from_device=lambda *_: None))


@pytest.fixture
def pretended_gpu(monkeypatch):
    pretend(monkeypatch, cli_info.Driver((13, 0), (HOPPER,)))
    monkeypatch.setattr(cli_info, "missing", lambda driver: "")
    monkeypatch.setattr(arrays, "cupy", PretendedCupy)
