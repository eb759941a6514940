"""The store of compiled kernels: shared by processes, safe against kills and damage, optional."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny

from cuflash import compile, params

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tiny kernels and an empty store in ``tmp_path``, for this process."""
    folder = tiny.write_kernels(tmp_path / "kernels")
    monkeypatch.setattr(compile, "kernels_dir", lambda: folder)
    monkeypatch.setattr(params, "static_asserts", lambda dtype, maps: "")
    monkeypatch.setattr(compile, "_temporary", None)
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "store"))
    return folder


@pytest.fixture
def builds(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> list[compile.Variant]:
    """Variants that the compiler was asked for, in order."""
    asked: list[compile.Variant] = []
    build = compile.build

    def count(variant: compile.Variant) -> tuple[bytes, str]:
        asked.append(variant)
        return build(variant)

    monkeypatch.setattr(compile, "build", count)
    return asked


@pytest.fixture
def start(kernels: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts a process that runs some lines with the same kernels and store."""

    def start(lines: str, **environment: str | None) -> subprocess.Popen[str]:
        merged = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", **environment}
        return subprocess.Popen(
            [sys.executable, "-c", tiny.SCRIPT.format(folder=str(kernels)) + lines],
            env={name: value for name, value in merged.items() if value is not None},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip(), err


def wait_for(path: Path) -> None:
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.1)
    raise AssertionError(f"{path} has not come in a minute")


def store_files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "store").iterdir())


def test_an_entry_holds_the_cubin_and_its_log(builds: list[compile.Variant]) -> None:
    path = compile.cubin_path(tiny.variant())
    assert path.read_bytes().startswith(b"\x7fELF")  # what the driver reads comes first
    entry = compile._read(path)
    assert entry is not None and "Used" in entry.log
    assert compile.resources(tiny.variant()).registers > 0
    assert len(builds) == 1


def test_sixteen_processes_on_a_cold_store(tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    wait = f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
    processes = [start(wait + "print(compile.cubin_path(tiny.variant()))") for _ in range(16)]
    (tmp_path / "go").touch()
    paths = {finish(process)[0] for process in processes}
    assert len(paths) == 1
    assert store_files(tmp_path) == [Path(paths.pop()).name]


def test_a_second_process_compiles_nothing(tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    [path] = {finish(start("print(compile.cubin_path(tiny.variant()))"))[0]}
    before = os.stat(path).st_mtime_ns
    assert finish(start("compile._nvrtc = None\nprint(compile.cubin_path(tiny.variant()))"))[0] == path
    assert os.stat(path).st_mtime_ns == before


def test_a_process_killed_while_it_compiles(tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    started = tmp_path / "started"
    hang = f"compile._nvrtc = lambda *_: (open({str(started)!r}, 'w').close(), time.sleep(100))\n"
    process = start(hang + "compile.cubin_path(tiny.variant())")
    wait_for(started)
    process.kill()
    process.communicate()
    path = compile.cubin_path(tiny.variant())
    assert store_files(tmp_path) == [path.name]


def test_what_a_killed_write_leaves_is_removed(tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    kill = "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
    process = start(kill + "compile.cubin_path(tiny.variant())")
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    [left] = (tmp_path / "store").glob("*.tmp")

    compile.cubin_path(tiny.variant())
    assert left.exists(), "a young one may be another process's, just being written"
    os.utime(left, (0, 0))
    compile.cubin_path(tiny.variant(block_m=128))
    assert not left.exists()


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(KeyboardInterrupt):
        compile.cubin_path(tiny.variant())
    assert store_files(tmp_path) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
        lambda data: data + b"\0",
        lambda data: data[:-1] + b"0",
    ],
    ids=["truncated", "empty", "bit flipped", "longer", "other format"],
)
def test_a_damaged_entry_is_rebuilt_once(
    damage: Callable[[bytes], bytes], tmp_path: Path, builds: list[compile.Variant]
) -> None:
    path = compile.cubin_path(tiny.variant())
    path.write_bytes(damage(path.read_bytes()))
    assert compile.cubin_path(tiny.variant()) == path
    assert compile._read(path) is not None
    compile.cubin_path(tiny.variant())
    assert len(builds) == 2
    assert store_files(tmp_path) == [path.name]


def test_threads_compile_once(builds: list[compile.Variant]) -> None:
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(compile.cubin_path(tiny.variant()))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 8 and len(set(paths)) == 1 and len(builds) == 1


def test_a_home_that_cannot_be_written(tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    home = tmp_path / "home"
    home.touch()  # a file: no folder can be made in it, whoever asks
    lines = "\n".join(f"print(compile.cubin_path(tiny.variant(block_m={m})))" for m in (64, 128, 64))
    out, err = finish(start(lines, HOME=str(home), CUFLASH_CACHE_DIR=None, PYTHONWARNINGS="always"))
    paths = [Path(line) for line in out.splitlines()]
    assert paths[0] == paths[2] != paths[1]
    assert err.count("RuntimeWarning") == 1
    assert f"{home}/.cache/cuflash" in err and "CUFLASH_CACHE_DIR" in err
    assert not paths[0].parent.exists(), "the temporary folder goes with its process"


def test_a_store_that_cannot_be_written_is_still_read(
    tmp_path: Path, builds: list[compile.Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = compile.cubin_path(tiny.variant())
    replace = os.replace

    def refuse(source: Path, destination: Path) -> None:
        if destination.parent == path.parent:
            raise PermissionError("read-only")
        replace(source, destination)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.warns(RuntimeWarning, match="read-only"):
        other = compile.cubin_path(tiny.variant(block_m=128))
    assert other.parent != path.parent
    with warnings.catch_warnings(action="error"):
        assert compile.cubin_path(tiny.variant()) == path
        assert compile.cubin_path(tiny.variant(block_m=128)) == other
        assert compile.cubin_path(tiny.variant(block_m=32)).parent == other.parent
    assert len(builds) == 3
    assert store_files(tmp_path) == [path.name]


def test_the_key_depends_on_all_that_the_cubin_depends_on(
    tmp_path: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    variant = tiny.variant()
    keys = [compile._file_name(v) for v in (variant, tiny.variant(target="86"), tiny.variant(block_m=128))]

    edited = tiny.write_kernels(tmp_path / "edited")
    (edited / "include" / "unused.cuh").write_text("// any file: what includes what is not asked\n")
    digest = compile.kernels_digest()
    with monkeypatch.context() as patch:
        patch.setattr(compile, "kernels_dir", lambda: edited)
        assert compile.kernels_digest() != digest
        keys.append(compile._file_name(variant))
    with monkeypatch.context() as patch:
        success, major, minor = nvrtc.nvrtcVersion()
        patch.setattr(nvrtc, "nvrtcVersion", lambda: (success, major, minor + 1))
        keys.append(compile._file_name(variant))
    with monkeypatch.context() as patch:
        options = compile._options

        def with_fewer_registers(name: str, target: str, folder: Path | None) -> object:
            changed = options(name, target, folder)
            changed.max_register_count = 64
            return changed

        patch.setattr(compile, "_options", with_fewer_registers)
        keys.append(compile._file_name(variant))

    assert len(set(keys)) == len(keys)
    assert compile._file_name(variant) == keys[0]


def test_the_key_does_not_depend_on_where_the_sources_are(
    tmp_path: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = compile._file_name(tiny.variant())
    copy = tiny.write_kernels(tmp_path / "copy")
    monkeypatch.setattr(compile, "kernels_dir", lambda: copy)
    assert compile._file_name(tiny.variant()) == key


def test_where_the_store_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.delenv("CUFLASH_CACHE_DIR", raising=False)
    assert compile.cache_dir() == Path("/somewhere/.cache/cuflash")
    monkeypatch.setenv("CUFLASH_CACHE_DIR", "~/elsewhere")
    assert compile.cache_dir() == Path("/somewhere/elsewhere")
    monkeypatch.delenv("CUFLASH_CACHE_DIR")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # a user without a home
    assert compile.cache_dir().is_absolute()
