"""Faults that users of other attention libraries met, continued: compiling, caching, installing, importing.

Each test carries the number of its row in the catalogue of such faults.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import tiny

from cuflash import compile, tiles

ROOT = Path(__file__).resolve().parent.parent
gpu = pytest.mark.gpu


def start(code: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err[-4000:]
    return out.strip()


def test_b60_processes_share_a_damaged_store_and_lose_one_of_them(tmp_path: Path) -> None:
    folder, store = tiny.write_kernels(tmp_path / "kernels"), tmp_path / "store"
    script = tiny.SCRIPT.format(folder=str(folder))
    environment = {"CUFLASH_CACHE_DIR": str(store)}
    entry = Path(finish(start(script + "print(compile.cubin_path(tiny.variant()))", **environment)))
    whole = entry.read_bytes()
    entry.write_bytes(whole[: len(whole) // 3])
    killed = start(script + "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
                   "compile.cubin_path(tiny.variant())", **environment)  # fmt: skip
    others = [start(script + "print(compile.cubin_path(tiny.variant()))", **environment) for _ in range(7)]
    killed.communicate(timeout=120)
    assert killed.returncode in (0, -signal.SIGKILL)  # 0 where another one had already repaired the entry
    assert {finish(process) for process in others} == {str(entry)}
    assert compile._read(entry) is not None


def test_b61_a_second_process_reads_what_the_first_compiled(tmp_path: Path) -> None:
    folder, store = tiny.write_kernels(tmp_path / "kernels"), tmp_path / "missing" / "store"
    script = tiny.SCRIPT.format(folder=str(folder))
    entry = Path(finish(start(script + "print(compile.cubin_path(tiny.variant()))", CUFLASH_CACHE_DIR=str(store))))
    before = entry.stat().st_mtime_ns
    timed = script + "t = time.perf_counter(); compile.cubin_path(tiny.variant()); print(time.perf_counter() - t)"
    assert float(finish(start(timed, CUFLASH_CACHE_DIR=str(store)))) < 1
    assert entry.stat().st_mtime_ns == before


@pytest.mark.parametrize("target", sorted(tiles.SMEM_LIMIT))
@pytest.mark.parametrize("family", ["sm75", "sm80"])
def test_b62_every_tile_fits_the_shared_memory_of_its_target(family: str, target: str) -> None:
    if family == "sm80" and target == "75":
        pytest.skip("sm_75 has no cp.async: its family is sm75")
    variants = tiles.variants(target, family)
    assert variants
    for variant in variants:
        assert variant.smem_bytes <= tiles.SMEM_LIMIT[target], str(variant)


def test_b62_gpus_without_kernels() -> None:
    for capability in ((6, 1), (7, 0), (13, 0)):
        with pytest.raises(NotImplementedError, match=re.escape("{}.{}".format(*capability))):
            compile.target_of(capability, compile.TARGETS)
    with pytest.raises(NotImplementedError, match=re.escape("12.0")):  # an NVRTC that is older than the card
        compile.target_of((12, 0), ("75", "80", "90a"))


def test_b63_the_sources_include_nothing_that_a_wheel_might_lack() -> None:
    folder = compile.kernels_dir()
    sources = sorted(folder.rglob("*.cu*"))
    assert sources
    for path in sources:
        for line in path.read_text().splitlines():
            if not line.startswith("#include"):
                continue
            name = re.fullmatch(r'#include "([\w/.]+)".*', line)
            assert name, f"{path.name}: {line}: a header from outside"
            assert any((where / name[1]).is_file() for where in (folder, folder / "include", path.parent)), line


def test_b74_importing_touches_neither_gpu_nor_gpu_packages() -> None:
    code = """
    import sys
    import numpy as np
    import cuflash
    x = np.ones((4, 8), np.float32)
    assert (cuflash.attention(x, x, x) == 1).all()
    loaded = {name.partition(".")[0] for name in sys.modules}
    print(sorted(loaded & {"cupy", "cuda", "ml_dtypes", "torch", "scipy"}))
    """
    assert finish(start(code, CUDA_VISIBLE_DEVICES="")) == "[]"


@gpu
def test_b74_fork_after_import() -> None:
    code = """
    import os
    import numpy as np
    import cuflash
    if os.fork() == 0:
        import cupy
        x = cupy.asarray(np.ones((4, 8), np.float16))
        assert (cuflash.attention(x, x, x).get() == 1).all()
        print("done", flush=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    """
    assert finish(start(code)) == "done"


@gpu
def test_b74_a_host_call_makes_no_context() -> None:
    code = """
    import cupy, numpy as np
    import cuflash
    from cuda.bindings import driver
    x = np.ones((4, 8), np.float32)
    cuflash.attention(x, x, x)
    driver.cuInit(0)
    _, device = driver.cuDeviceGet(0)
    print(driver.cuDevicePrimaryCtxGetState(device)[2])
    """
    assert finish(start(code)) == "0"
