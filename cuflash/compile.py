"""Variant -> CUDA source -> cubin -> ``cupy.RawModule``.

NVRTC compiles through ``cuda.core``, which needs neither a GPU nor a driver; only `kernel` needs CuPy and a device.
Compiled kernels are kept in a folder of plain files, one a variant, that any number of processes may share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import io
import multiprocessing
import os
import re
import secrets
import struct
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cuflash import params

if TYPE_CHECKING:
    from cuflash.tiles import Tile

TARGETS = ("75", "80", "86", "87", "89", "90a", "100", "103", "110", "120")
"""GPU architectures that cuflash builds for, as NVRTC writes them after ``sm_``."""

SCORE_TERMS = ("Softcap", "KeyBias")
"""Score terms of the general variants; each can be off at run time, so one variant serves every combination."""

_CPP_TYPES = {"float16": "Half", "bfloat16": "BFloat16", "float32": "float", "float64": "double"}
_LOAD_KINDS = {"16": "k16", "8": "k8", "4": "k4", "strided": "kStrided"}


@dataclass(frozen=True)
class Variant:
    """Everything a compiled kernel depends on, and nothing else: lengths, strides and scale are run-time parameters.

    Parameters
    ----------
    operation : str
        ``attention_forward``, ``attention_backward_dkv``, ...: the stem of a file of ``kernels_cu``.
    family : str
        Instruction family: ``sm75``, ``sm80`` or ``sm90``.
    target : str
        One of `TARGETS`.
    dtype, out_dtype : str
        Names of the dtypes of the operands and of what the kernel writes.
    tile : Tile
        Block sizes and the head dims, rounded up to the table's, that the kernel is unrolled for.
    scores : tuple of str
        The score terms that are compiled in, out of `SCORE_TERMS`.
    load : str
        Bytes of one load, ``16``, ``8`` or ``4``, or ``strided`` for element by element.
    prescaled : bool
        Whether scores get their scale before the softmax and not inside its exponent.
    deterministic : bool
        Whether equal inputs give equal bits.
    precision : str, optional
        ``tf32``, or None for the precision of ``dtype``.
    needs_dq : bool
        Whether a kernel for all gradients forms that of the queries, too.
    """

    operation: str
    family: str
    target: str
    dtype: str
    out_dtype: str
    tile: Tile
    scores: tuple[str, ...]
    load: str
    prescaled: bool
    deterministic: bool = True
    precision: str | None = None
    needs_dq: bool = True

    @functools.cached_property
    def name(self) -> str:
        """Name of the kernel in its module: unique among the variants of one target."""
        t = self.tile
        parts = [
            f"{self.operation}_{self.family}_{self.dtype}",
            f"to_{self.out_dtype}" if self.out_dtype != self.dtype else "",
            f"d{t.head_dim}_e{t.value_dim}_m{t.block_m}_n{t.block_n}_s{t.stages}_w{t.warps}_load{self.load}",
            f"c{t.column_warps}" if t.column_warps > 1 else "",
            f"low{t.low_bits}" if t.low_bits else "",
            f"r{t.resident}" if t.resident > 1 else "",
            f"q{t.q_stages}" if t.q_stages > 1 else "",
            *(term.lower() for term in self.scores),
            "prescaled" if self.prescaled else "",
            "" if self.deterministic else "unordered",
            self.precision or "",
            "" if self.needs_dq else "no_dq",
        ]
        return "_".join(part for part in parts if part)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.tile.smem_bytes(self.operation, self.dtype, self.precision, self.family)

    @property
    def maps(self) -> int:
        """How many tensor maps the kernel takes."""
        if self.family != "sm90":
            return 0
        planes = params.planes(self.dtype, self.precision)
        counts = {
            "attention_forward": 3 * planes + 1,
            "attention_backward_dqkv": 4 * planes + 2,
            "attention_backward_dq": 4 * planes,
            "attention_backward_dkv": 4 * planes,
        }
        return counts.get(self.operation, 0)

    def __str__(self) -> str:
        return f"{self.name} for sm_{self.target}"


class CompileError(RuntimeError):
    """A kernel did not compile: a fault of cuflash or a compiler that it does not fit, never of the caller's arrays.

    Attributes
    ----------
    variant : Variant
    log : str
        What NVRTC said.
    cache_path : pathlib.Path
        Where the compiled kernel would have been kept.
    """

    def __init__(self, variant: Variant, log: str, cache_path: Path) -> None:
        super().__init__(variant, log, cache_path)
        self.variant, self.log, self.cache_path = variant, log, cache_path

    def __str__(self) -> str:
        return f"{self.variant} did not compile (it would be kept in {self.cache_path}); NVRTC says:\n{self.log}"


class Resources(NamedTuple):
    """What one thread (registers, bytes of spills and stack) and one block (bytes of shared memory) of a kernel use."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    smem_bytes: int


class _Entry(NamedTuple):
    cubin: bytes
    log: str


# --- the tools ---------------------------------------------------------------------------------------------------


def install_hint(missing: str) -> str:
    """Say what is missing and which command installs it."""
    return (
        f"{missing} is missing, and cuflash needs it to run on, or compile for, a GPU. Install it with\n"
        '    pip install "cuflash[cuda13]"    for a driver that supports CUDA 13 (580 or newer), or\n'
        '    pip install "cuflash[cuda12]"    for a driver that supports CUDA 12'
    )


_PACKAGES = {"cuda.core": "cuda-core", "cuda.core.utils": "cuda-core", "cupy": "CuPy"}


def _require(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(install_hint(f"{_PACKAGES.get(module, 'cuda-bindings')} ({error})")) from error


def _nvrtc_query(function: str) -> Any:
    nvrtc = _require("cuda.bindings.nvrtc")
    try:
        status, *answer = getattr(nvrtc, function)()
    except RuntimeError as error:  # the bindings are there, the library that they load is not
        raise ImportError(install_hint("NVRTC, the CUDA run-time compiler,")) from error
    if int(status) != 0:
        raise ImportError(f"NVRTC does not work: {function} returns {status.name}")
    return answer


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """Version of the CUDA run-time compiler. ImportError, with the pip line, where there is none."""
    major, minor = _nvrtc_query("nvrtcVersion")
    return int(major), int(minor)


@functools.cache
def targets() -> tuple[str, ...]:
    """Those of `TARGETS` that the installed NVRTC compiles for."""
    [known] = _nvrtc_query("nvrtcGetSupportedArchs")
    return tuple(target for target in TARGETS if int(target.rstrip("a")) in known)


def target_of(capability: tuple[int, int], known: Sequence[str] | None = None) -> str:
    """The target whose kernels run on a GPU of a compute capability, out of ``known`` (default: `targets`).

    Raises
    ------
    NotImplementedError
        No target does: an older GPU, or one that is newer than cuflash or than NVRTC.

    Examples
    --------
    >>> from cuflash.compile import TARGETS, target_of
    >>> target_of((8, 6), TARGETS), target_of((9, 0), TARGETS), target_of((12, 1), TARGETS)
    ('86', '90a', '120')
    """
    known = targets() if known is None else known
    major, minor = capability
    best = None
    for target in known:
        target_major, target_minor = divmod(int(target.rstrip("a")), 10)
        # Cubins run on later minor versions of their major one; those of an "a" target on that very version alone.
        reaches = target_minor == minor if target.endswith("a") else target_minor <= minor
        if target_major == major and reaches:
            best = target  # known goes upwards
    if best is None:
        raise NotImplementedError(
            f"cuflash has no kernels for GPUs of compute capability {major}.{minor}: it builds for "
            f"{', '.join('sm_' + target for target in known)} with the installed NVRTC; copy the arrays to the host"
        )
    return best


# --- source and cubin --------------------------------------------------------------------------------------------


def kernels_dir() -> Path:
    """The folder of the CUDA sources: inside an installed package, beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    inside, beside = package / "kernels_cu", package.parent / "kernels_cu"
    for folder in (inside, beside):
        if folder.is_dir():
            return folder
    raise RuntimeError(f"the CUDA sources are neither in {inside} nor in {beside}: the installation is incomplete")


@functools.cache
def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.cu*")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def kernels_digest() -> str:
    """SHA-256 of the names and contents of all CUDA sources. They are read once in a process."""
    return _digest(kernels_dir())


def source(variant: Variant) -> str:
    """The CUDA source of a variant: its constants, the kernel's file, and the layout that the host packs."""
    tile = ", ".join(f".{f.name} = {getattr(variant.tile, f.name)}" for f in dataclasses.fields(variant.tile))
    terms = ", ".join(f"k{term} = {_bool(term in variant.scores)}" for term in SCORE_TERMS)
    return f"""\
// cuflash {variant}; kernels_cu sha256 {kernels_digest()}
#include "common.cuh"
namespace cuflash {{
using Operand = {_CPP_TYPES[variant.dtype]};
using Output = {_CPP_TYPES[variant.out_dtype]};
inline constexpr Tile kTile{{{tile}}};
inline constexpr int kSmemBytes = {variant.smem_bytes};
inline constexpr int kTarget = {variant.target.rstrip("a")};
inline constexpr LoadKind kLoad = LoadKind::{_LOAD_KINDS[variant.load]};
inline constexpr bool kPrescaled = {_bool(variant.prescaled)};
inline constexpr bool kDeterministic = {_bool(variant.deterministic)};
inline constexpr bool kTf32 = {_bool(variant.precision == "tf32")};
inline constexpr bool kNeedsDq = {_bool(variant.needs_dq)};
inline constexpr bool {terms};
}}
#define KERNEL {variant.name}
#include "{_kernel_file(variant)}"
{params.static_asserts(variant.dtype, variant.maps)}"""


def _kernel_file(variant: Variant) -> str:
    """The kernel's file, below `kernels_dir`: the family's own where there is one. Those of `lineage` have a folder."""
    names = (f"{variant.operation}_{variant.family}.cu", f"{variant.operation}.cu")
    candidates = [f"{folder}{name}" for name in names for folder in ("", "lineage/")]
    return next((name for name in candidates if (kernels_dir() / name).is_file()), names[-1])


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _options(name: str, target: str, folder: Path | None) -> Any:
    """NVRTC's options, with the sources of a folder. Without one they say what is compiled, wherever it was."""
    return _require("cuda.core").ProgramOptions(
        name=f"{name}.cu",
        arch=f"sm_{target}",
        std="c++20",
        include_path=None if folder is None else [str(folder), str(folder / "include")],
        device_as_default_execution_space=True,  # generic lambdas are host functions otherwise
        ptxas_options=["-v"],
    )


def _nvrtc(code: str, options: Any) -> tuple[bytes | None, str]:
    """The cubin, or None where there is none, and the compiler's log."""
    log = io.StringIO()
    try:
        program = _require("cuda.core").Program(code, "c++", options)
        cubin = bytes(program.compile("cubin", logs=log).code)
    except ImportError:
        raise
    except Exception as error:  # cuda.core's own error class is not public; its text carries NVRTC's log
        return None, str(error).strip("\0 \n")
    return cubin, log.getvalue().strip("\0 \n")


def build(variant: Variant) -> tuple[bytes, str]:
    """Compile a variant, past the store: its cubin and the compiler's log. Needs no GPU and no driver.

    Raises
    ------
    CompileError
        NVRTC refuses the source or the target.
    ImportError
        cuda-core or NVRTC is missing.
    """
    nvrtc_version()
    return _checked(variant, *_nvrtc(source(variant), _options(variant.name, variant.target, kernels_dir())))


def _checked(variant: Variant, cubin: bytes | None, log: str) -> _Entry:
    if cubin is None:
        if variant.target not in targets():
            log += f"\n(NVRTC {'.'.join(map(str, nvrtc_version()))} does not know sm_{variant.target}; a newer one may)"
        raise CompileError(variant, log, cache_dir() / _file_name(variant))
    return _Entry(cubin, log)


# --- the store ---------------------------------------------------------------------------------------------------

# An entry is the cubin, the log, and this footer: their lengths, the digest of both, the format. The driver finds the
# end of a cubin by its ELF headers (cuModuleLoadData gets a bare pointer), so it reads the file as it is, and what
# belongs together is replaced together.
_FOOTER = struct.Struct("<QQ32s8s")
_FORMAT = b"cuflash1"
_STALE_SECONDS = 3600.0

_lock = threading.RLock()
_temporary: tempfile.TemporaryDirectory[str] | None = None


def cache_dir() -> Path:
    """Where compiled kernels are kept: ``$CUFLASH_CACHE_DIR``, else ``~/.cache/cuflash``."""
    if configured := os.environ.get("CUFLASH_CACHE_DIR"):
        return Path(os.path.expanduser(configured))
    home = os.path.expanduser("~")
    if not os.path.isabs(home):  # a user without a home, whose "~" must not become a folder of that name
        home = "/nonexistent"
    return Path(home, ".cache", "cuflash")


def _file_name(variant: Variant) -> str:
    """Name of the entry: a digest of source, options, compiler version and everything that the source includes."""
    nvrtc_version()  # where there is no NVRTC, its ImportError and not a key that says "unknown"
    key: bytes = _require("cuda.core.utils").make_program_cache_key(
        code=source(variant),
        code_type="c++",
        options=_options(variant.name, variant.target, None),  # entries are good for any copy of the same sources
        target_type="cubin",
        extra_digest=bytes.fromhex(kernels_digest()),
    )
    return f"{key.hex()}.cubin"


def _read(path: Path) -> _Entry | None:
    """The entry, or None where there is none or it is damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) < _FOOTER.size:
        return None
    body, footer = data[: -_FOOTER.size], data[-_FOOTER.size :]
    cubin_bytes, log_bytes, digest, version = _FOOTER.unpack(footer)
    if version != _FORMAT or len(body) != cubin_bytes + log_bytes or hashlib.sha256(body).digest() != digest:
        return None
    return _Entry(body[:cubin_bytes], body[cubin_bytes:].decode())


def _write(name: str, entry: _Entry) -> Path:
    """Put an entry into the store, or into a folder of this process where the store cannot be written."""
    log = entry.log.encode()
    body = entry.cubin + log
    data = body + _FOOTER.pack(len(entry.cubin), len(log), hashlib.sha256(body).digest(), _FORMAT)
    if _temporary is None:
        try:
            return _replace(cache_dir(), name, data)
        except OSError as error:
            return _replace(_temporary_dir(error), name, data)
    return _replace(Path(_temporary.name), name, data)


def _replace(folder: Path, name: str, data: bytes) -> Path:
    """Write a file so that others see all of it or nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob("*.tmp"):  # by a process that was killed between the open and the replace below
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                left.unlink()
    temporary = folder / f"{name}.{secrets.token_hex(8)}.tmp"
    try:
        with temporary.open("xb") as file:
            file.write(data)
        os.replace(temporary, folder / name)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return folder / name


def _temporary_dir(error: OSError) -> Path:
    """The folder of this process, once the store has turned out not to be writable, and one warning about it."""
    global _temporary
    with _lock:
        if _temporary is None:
            _temporary = tempfile.TemporaryDirectory(prefix="cuflash-", ignore_cleanup_errors=True)
            warnings.warn(
                f"compiled kernels cannot be kept in {cache_dir()} ({error}); this process compiles its own. "
                "Set CUFLASH_CACHE_DIR to a folder that can be written",
                RuntimeWarning,
                stacklevel=2,
            )
    return Path(_temporary.name)


def _find(variant: Variant) -> tuple[Path, _Entry] | None:
    name = _file_name(variant)
    folders = [cache_dir()] + ([Path(_temporary.name)] if _temporary is not None else [])
    for folder in folders:
        if entry := _read(folder / name):
            return folder / name, entry
    return None


def _obtain(variant: Variant) -> tuple[Path, _Entry]:
    with _lock:  # two first calls in one process compile once
        found = _find(variant)
        if found is None:
            entry = _Entry(*build(variant))
            found = _write(_file_name(variant), entry), entry
    return found


def cubin_path(variant: Variant) -> Path:
    """The compiled kernel's file in the store; it is compiled first where the store has none, or a damaged one.

    With ``CUFLASH_DUMP=1`` the source is printed to stderr, with the registers, spills and shared memory of the kernel.
    """
    path, entry = _obtain(variant)
    if os.environ.get("CUFLASH_DUMP", "0") not in ("", "0"):
        used = _resources(variant, entry.log)
        print(
            f"{source(variant)}// {path}\n// {used.registers} registers, {used.spill_bytes} bytes spilled, "
            f"{used.stack_bytes} bytes stack, {used.smem_bytes} bytes shared memory",
            file=sys.stderr,
        )
    return path


def compile_all(
    variants: Iterable[Variant],
    *,
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[CompileError]:
    """Fill the store, in processes because NVRTC does not run in parallel in one. Needs no GPU.

    Parameters
    ----------
    variants : iterable of Variant
    processes : int, optional
        How many; as many as there are cores by default.
    progress : callable, optional
        Called with (done, total), first with the number of variants that the store already has.

    Returns
    -------
    list of CompileError
        Of the variants that did not compile.
    """
    names = {_file_name(variant): variant for variant in variants}
    missing = {name: variant for name, variant in names.items() if _find(variant) is None}
    report = progress or (lambda done, total: None)
    done = len(names) - len(missing)
    report(done, len(names))
    errors: list[CompileError] = []
    if not missing:
        return errors
    if processes is None:
        processes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Not forked: the caller may have threads, or a CUDA context.
    with ProcessPoolExecutor(min(processes, len(missing)), mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = {
            pool.submit(_nvrtc, source(variant), _options(variant.name, variant.target, kernels_dir())): name
            for name, variant in missing.items()
        }
        try:
            for job in as_completed(jobs):
                name = jobs[job]
                try:
                    _write(name, _checked(names[name], *job.result()))
                except CompileError as error:
                    errors.append(error)
                done += 1
                report(done, len(names))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return errors


# --- resources and kernels ---------------------------------------------------------------------------------------


def resources(variant: Variant) -> Resources:
    """Registers, spills, stack and shared memory of a variant, as the compiler reports them."""
    return _resources(variant, _obtain(variant)[1].log)


def _resources(variant: Variant, log: str) -> Resources:
    def total(pattern: str) -> int:
        return sum(int(number) for number in re.findall(pattern, log))

    return Resources(
        registers=max((int(number) for number in re.findall(r"Used (\d+) registers", log)), default=0),
        spill_bytes=total(r"(\d+) bytes spill (?:stores|loads)"),
        stack_bytes=total(r"(\d+) bytes stack frame"),
        smem_bytes=total(r"(\d+) bytes smem") + variant.smem_bytes,
    )


@functools.cache
def kernel(variant: Variant, device: int) -> Any:
    """The kernel, loaded on a device and ready to launch: the ``cupy.cuda.Function`` that a ``cupy.RawKernel`` looks up
    for each launch.

    Raises
    ------
    RuntimeError
        The current stream is capturing a graph: loading a module is not a stream operation, so the first call must
        come before the capture. Nothing has been enqueued.
    CompileError, ImportError
        As `build`.
    """
    cupy = _require("cupy")
    with _lock, cupy.cuda.Device(device):
        if cupy.cuda.get_current_stream().is_capturing():
            raise RuntimeError(
                f"{variant.name} is not loaded yet, and that cannot be done while a stream is capturing a CUDA graph: "
                "make the same call once before the capture"
            )
        function = cupy.RawModule(path=str(cubin_path(variant))).get_function(variant.name)
        if variant.smem_bytes:
            function.max_dynamic_shared_size_bytes = variant.smem_bytes
        loaded = function.kernel
        _check_parameters(variant, loaded.ptr)
    return loaded


def _check_parameters(variant: Variant, function: int) -> None:
    """CuPy copies as many bytes of a parameter as the kernel says; hold it to what the host packs."""
    driver = _require("cuda.bindings.driver")
    expected = params.size(variant.operation, variant.dtype, variant.maps)
    try:
        status, _, size = driver.cuFuncGetParamInfo(function, 0)
        second, _, _ = driver.cuFuncGetParamInfo(function, 1)
    except RuntimeError:  # drivers before CUDA 12.4 cannot say; the static_asserts of the source stand alone there
        return
    if int(status) != 0 or size != expected or int(second) == 0:
        raise RuntimeError(
            f"{variant} must take one parameter of {expected} bytes, and takes one of {size} bytes first "
            f"({status.name}, then {second.name}): {cubin_path(variant)} is not this version's"
        )
