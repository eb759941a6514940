"""Dependencies point one way: between modules of cuflash, between files of kernels_cu, and to other packages."""

import ast
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "cuflash"
KERNELS = ROOT / "kernels_cu"

# What each module may import of cuflash. Anything on the right is closer to the leaves.
ALLOWED = {
    "score": set(),
    "params": set(),
    "tma": {"params"},
    "arrays": set(),
    "compile": {"params"},
    "problem": {"arrays", "score"},
    "tiles": {"compile", "params"},
    "host": {"problem", "score", "tiles"},
    "memory": {"params", "problem", "tiles"},
    "hopper": {"memory", "params", "problem", "tiles", "tma"},
    "few": {"compile", "memory", "problem", "tiles"},
    "overlap": set(),
    "needs": {"memory", "params", "tma"},
    "devices": {"compile", "tiles"},
    "planning": {"compile", "hopper", "memory", "needs", "params", "problem", "tiles"},
    "plan_sm90": {"compile", "devices", "hopper", "memory", "needs", "planning", "problem", "tiles", "tma"},
    "launch": {
        "compile",
        "devices",
        "few",
        "hopper",
        "memory",
        "needs",
        "overlap",
        "params",
        "plan_sm90",
        "planning",
        "problem",
        "tiles",
    },
    "calls": {"arrays", "host", "launch", "problem"},
    "api": {"arrays", "calls", "problem"},
    "lineage_tiles": {"compile", "tiles"},
    "lineage_host": {"host", "problem"},
    "lineage_launch": {
        "compile",
        "devices",
        "launch",
        "lineage_tiles",
        "memory",
        "params",
        "planning",
        "problem",
        "tiles",
    },
    "lineage": {"api", "arrays", "calls", "lineage_host", "lineage_launch", "lineage_tiles", "problem"},
    "traffic": {"lineage_tiles", "problem", "tiles"},
    "ceilings": set(),
    "cli_dense": set(),
    "cli_info": {"arrays", "compile", "tiles"},
    "cli_compile": {"cli_info", "compile", "lineage_tiles", "problem", "tiles"},
    "cli_attend": {"arrays", "cli_info", "problem"},
    "cli_demo": {"arrays", "cli_dense", "cli_info", "host", "score"},
    "cli_explain": {"ceilings", "cli_info", "params", "problem", "tiles", "traffic"},
    "__main__": {"cli_attend", "cli_compile", "cli_demo", "cli_explain", "cli_info"},
    "__init__": {"api", "compile", "lineage", "traffic"},
}
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py"))

# Who may import CuPy and the CUDA packages, and even these only inside a function.
USES_CUDA = {"arrays", "compile", "devices", "launch", "lineage_launch", "needs", "overlap", "tma"}
CUDA_PACKAGES = {"cupy", "cuda", "cupyx"}


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _imports(tree: ast.AST, inside_function: bool = False):
    """(name, whether inside a function) of each module that is imported at run time."""
    for node in ast.iter_child_nodes(tree):
        if _is_for_type_checkers(node):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, inside_function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, ["cuflash" if node.level else "", node.module or ""]))
            if base == "cuflash":  # from cuflash import host: a submodule; other names are public ones of the package
                names = (f"cuflash.{alias.name}" if alias.name in MODULES else "cuflash" for alias in node.names)
                yield from ((name, inside_function) for name in names)
            else:
                yield base, inside_function
        else:
            nested = inside_function or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _imports(node, nested)


def _imports_of(module: str):
    return list(_imports(ast.parse((PACKAGE / f"{module}.py").read_text())))


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_is_closer_to_the_leaves(module):
    internal = {name.removeprefix("cuflash.") for name, _ in _imports_of(module) if name.startswith("cuflash.")}
    assert internal <= ALLOWED[module], f"{module} may not import {internal - ALLOWED[module]}"


def test_the_allowed_imports_have_no_cycle():
    done = set()
    while ready := {module for module, needs in ALLOWED.items() if module not in done and needs <= done}:
        done |= ready
    assert done == set(ALLOWED)


@pytest.mark.parametrize("module", MODULES)
def test_at_import_time_a_module_needs_the_standard_library_and_numpy(module):
    at_import = {name.split(".")[0] for name, inside_function in _imports_of(module) if not inside_function}
    assert at_import <= set(sys.stdlib_module_names) | {"numpy", "cuflash"}


@pytest.mark.parametrize("module", sorted(set(MODULES) - USES_CUDA))
def test_cuda_packages_are_imported_by_few(module):
    assert not CUDA_PACKAGES & {name.split(".")[0] for name, _ in _imports_of(module)}


NUMPY_ALONE = """
import sys, importlib.abc

class NumpyAlone(importlib.abc.MetaPathFinder):
    allowed = set(sys.stdlib_module_names) | {"numpy", "cuflash"}
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in self.allowed:
            raise ImportError(f"{name} must not be needed")

sys.meta_path.insert(0, NumpyAlone())
import numpy as np, cuflash
q = np.ones((3, 2), np.float32)
assert (cuflash.attention(q, q, q) == 1).all()
loaded = open("/proc/self/maps").read() if sys.platform == "linux" else ""
assert "libcuda" not in loaded and "libnvrtc" not in loaded, "importing cuflash loads CUDA libraries"
"""


def test_import_and_host_need_numpy_alone_and_touch_no_cuda_library():
    subprocess.run([sys.executable, "-c", NUMPY_ALONE], cwd=ROOT, check=True)


# --- kernels_cu ------------------------------------------------------------------------------------------------------

INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]', re.MULTILINE)

# The layers of the headers, leaves first: a file includes files of its own layer (without cycles) and of those below.
LAYERS = (
    ("ptx/*", "common.cuh", "exp2*.cuh", "accumulator.cuh", "params.cuh"),
    (
        "copy_*.cuh", "pack_*.cuh", "fragment.cuh", "shared.cuh", "split_barrier.cuh", "plain_tiles.cuh", "locate.cuh",
        "planes.cuh",
    ),
    (
        "score.cuh", "terms_*.cuh", "blocks.cuh", "order.cuh", "softmax*.cuh", "recompute*.cuh", "warp_grid.cuh",
        "store*.cuh", "red.cuh", "gemm*.cuh", "product.cuh", "pipeline*.cuh", "epilogue.cuh", "feature_tile.cuh",
        "narrow_*.cuh", "row_*.cuh", "dq_*.cuh", "mask.cuh", "bases.cuh", "merge_splits.cuh", "key_*.cuh",
        "dense_keys.cuh",
    ),
    ("attention_*.cuh", "lineage/*.cuh"),
    ("*.cu",),
)  # fmt: skip


def _files() -> dict[str, Path]:
    headers = KERNELS / "include"
    files = {path.relative_to(headers).as_posix(): path for path in headers.rglob("*.cuh")}
    files |= {path.relative_to(KERNELS).as_posix(): path for path in (KERNELS / "lineage").glob("*.cuh")}
    return files | {path.relative_to(KERNELS).as_posix(): path for path in KERNELS.rglob("*.cu")}


def _layer(name: str) -> int:
    matches = [rank for rank, patterns in enumerate(LAYERS) if any(Path(name).match(p) for p in patterns)]
    assert matches, f"{name} is in no layer: give it one in LAYERS"
    return matches[0]


def _includes(path: Path) -> list[tuple[str, str]]:
    return INCLUDE.findall(path.read_text())


@pytest.mark.parametrize("name", sorted(_files()))
def test_a_cuda_file_includes_only_our_own_files_of_its_layer_or_below(name):
    files = _files()
    for quote, included in _includes(files[name]):
        assert quote == '"' and included in files, f"{name} includes {included}, which a toolkit would have to bring"
        assert not included.endswith(".cu"), f"{name} includes a kernel"
        assert _layer(included) <= _layer(name), f"{name} includes {included} of a layer above"


def test_cuda_includes_have_no_cycle():
    needs = {name: {included for _, included in _includes(path)} for name, path in _files().items()}
    done = set()
    while ready := {name for name, included in needs.items() if name not in done and included <= done}:
        done |= ready
    assert not set(needs) - done


@pytest.mark.parametrize("name", sorted(name for name in _files() if name.endswith(".cuh")))
def test_a_header_is_included_once_and_by_someone(name):
    assert "#pragma once" in _files()[name].read_text()
    everything = itertools.chain.from_iterable(_includes(path) for path in _files().values())
    generated = {"common.cuh"}  # the source that compile.py writes includes it
    assert name in generated | {included for _, included in everything}


@pytest.mark.parametrize("name", sorted(_files()))
def test_architectures_are_files_and_not_preprocessor_branches(name):
    assert "__CUDA_ARCH__" not in _files()[name].read_text()
