"""Attention on arrays in files: ``python -m cuflash attend``."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

import cuflash
from cuflash import arrays, cli_info, problem

Array = NDArray[Any]
T = TypeVar("T")

NPY_MAGIC, ZIP_MAGIC = b"\x93NUMPY", b"PK"

EPILOG = """\
Arrays have shape (..., sequence, features); the batch axes before those two broadcast. The results are o and lse (the
natural log-sum-exp of the scores of each query) and, with --grad, dq, dk, dv (and dkey_bias with --key-bias). bfloat16
results are saved as float32, for .npz files have no bfloat16; float32 input holds it exactly, with --dtype bfloat16.

  python -m cuflash attend q.npy k.npy v.npy -o x.npz --causal
  python -m cuflash attend qkv.npz -o x.npz --window 128 128 --dtype float16
  python -m cuflash attend q.npy k.npy v.npy -o x.npz --grad do.npy --backend host

Exit status: 0, or 2 where the input is at fault; then no file is written."""


class InputError(ValueError):
    """A file or an option that is at fault, in words that name it."""


def add_parser(subparsers: Any) -> None:
    """Add the command to the subparsers of ``python -m cuflash``."""
    parser = subparsers.add_parser(
        "attend",
        help="attention on arrays in .npy or .npz files",
        description="Compute attention on arrays in files and write the results to a .npz file.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("inputs", nargs="+", type=Path, metavar="FILE", help="q.npy k.npy v.npy, or a .npz of q, k, v")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="FILE", help="the .npz file to write")
    parser.add_argument("--force", action="store_true", help="replace the output file where it exists")
    parser.add_argument("--grad", type=Path, metavar="FILE", help=".npy file of do, the gradient of o: adds gradients")
    parser.add_argument("--key-bias", type=Path, metavar="FILE", help=".npy file of log-weights of the keys, (..., n)")
    parser.add_argument("--causal", action="store_true", help="each query sees the keys up to its own position")
    parser.add_argument(
        "--align", type=_align, metavar="A", help="bottom-right, top-left or an int a: query i sits at key i + a"
    )
    parser.add_argument(
        "--window", nargs=2, type=_side, metavar=("L", "R"), help="keys seen on the left and right: ints, or none"
    )
    parser.add_argument("--scale", type=float, metavar="X", help="factor of the scores (default: 1/sqrt(features))")
    parser.add_argument("--softcap", type=float, metavar="X", help="bound of the scores, softcap * tanh(s / softcap)")
    parser.add_argument("--grouped-heads", action="store_true", help="axis -3 of q has a multiple of the heads of k, v")
    parser.add_argument("--precision", choices=["tf32"], help="tf32 for float32 arrays on a GPU")
    parser.add_argument("--dtype", choices=problem.DTYPES, help="convert the arrays first")
    parser.add_argument("--backend", choices=["host", "cuda"], help="default: the GPU when usable, else the host")
    parser.set_defaults(run=run)


def _align(text: str) -> str | int:
    try:
        return int(text)
    except ValueError:
        return text


def _side(text: str) -> int | None:
    if text.lower() == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: the sides are ints or none") from None


def run(arguments: argparse.Namespace) -> int:
    """Read, compute, write; raises before anything is written."""
    output: Path = arguments.output
    files = [*arguments.inputs, *filter(None, (arguments.grad, arguments.key_bias))]
    _check_output(output, arguments.force, files)
    named = _read_inputs(arguments.inputs)
    if arguments.grad:
        named["do"] = _read_npy(arguments.grad)
    if arguments.dtype:
        named = {name: _convert(name, x, _dtype(arguments.dtype)) for name, x in named.items()}
    lse_dtype = _check_dtypes(named)
    if arguments.key_bias:
        key_bias = _read_npy(arguments.key_bias)
        # The width follows from the other arrays; anything but a float is a mistake that the library explains.
        named["key_bias"] = _convert("key_bias", key_bias, lse_dtype) if key_bias.dtype.kind == "f" else key_bias
    options: dict[str, Any] = {
        "causal": arguments.causal,
        "align": arguments.align,
        "window": None if arguments.window is None else tuple(arguments.window),
        "scale": arguments.scale,
        "softcap": arguments.softcap,
        "grouped_heads": arguments.grouped_heads,
        "precision": arguments.precision,
    }
    begin = time.perf_counter()
    results, place = _compute_somewhere(arguments.backend, named, options)
    seconds = time.perf_counter() - begin
    stored = {name: _storable(x) for name, x in results.items()}
    _write(output, stored, arguments.force)
    print(f"{output}: {', '.join(f'{name} {x.shape} {x.dtype}' for name, x in stored.items())}")
    if results["o"].dtype != stored["o"].dtype:
        print(f"the {results['o'].dtype} results are in the file as {stored['o'].dtype}, which holds them exactly")
    print(f"computed on {place} in {seconds:.3g} s")
    return 0


# --- computing -------------------------------------------------------------------------------------------------------


def _compute_somewhere(
    backend: str | None, named: Mapping[str, Array], options: Mapping[str, Any]
) -> tuple[dict[str, Array], str]:
    """The results, and where they were computed."""
    if backend == "host":
        return _compute(named, options), "the host"
    driver = cli_info.find_driver()
    fault = cli_info.missing(driver)
    if backend == "cuda" and fault:
        raise InputError(f"--backend cuda: {fault}")
    if driver is not None and not fault:
        try:
            return _compute_on_gpu(named, options), driver.devices[0].name
        except NotImplementedError as limit:
            if backend == "cuda":
                raise
            fault = f"computed on the host, for on the GPU: {limit}"
    if driver is not None:
        print(f"note: {fault}", file=sys.stderr)
    return _compute(named, options), "the host"


def _compute_on_gpu(named: Mapping[str, Array], options: Mapping[str, Any]) -> dict[str, Array]:
    cupy = arrays.cupy()
    # Contiguous here and so contiguous there: CuPy copies such arrays without compiling a kernel for it.
    on_gpu = {name: cupy.asarray(np.ascontiguousarray(x)) for name, x in named.items()}
    return {name: cupy.asnumpy(x) for name, x in _compute(on_gpu, options).items()}


def _compute(named: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    q, k, v, do = (named.get(name) for name in ("q", "k", "v", "do"))
    options = {**options, "key_bias": named.get("key_bias")}
    if do is None:
        o, lse = cuflash.attention(q, k, v, **options, return_lse=True)
        return {"o": o, "lse": lse}
    (o, lse), vjp = cuflash.attention_vjp(q, k, v, **options, return_lse=True)
    gradients = zip(("dq", "dk", "dv", "dkey_bias"), vjp(do), strict=False)
    return {"o": o, "lse": lse, **dict(gradients)}


# --- reading ---------------------------------------------------------------------------------------------------------


def _read_inputs(paths: list[Path]) -> dict[str, Array]:
    if len(paths) == 3:
        return {name: _read_npy(path) for name, path in zip("qkv", paths, strict=True)}
    if len(paths) != 1:
        raise InputError(f"give three .npy files, q k v, or one .npz file of them; got {len(paths)} files")
    return _read(paths[0], _take_qkv)


def _take_qkv(path: Path, content: Any) -> dict[str, Array]:
    if not isinstance(content, np.lib.npyio.NpzFile):
        raise InputError(f"{path} holds one array: give three .npy files, q k v, or one .npz file of them")
    if absent := [name for name in "qkv" if name not in content.files]:
        raise InputError(f"{path} has no {', '.join(absent)}; it has {', '.join(content.files) or 'nothing'}")
    if others := sorted(set(content.files) - set("qkv")):
        print(f"note: {path}: only q, k and v are read, not {', '.join(others)}", file=sys.stderr)
    return {name: _native(content[name]) for name in "qkv"}


def _read_npy(path: Path) -> Array:
    return _read(path, _take_array)


def _take_array(path: Path, content: Any) -> Array:
    if isinstance(content, np.lib.npyio.NpzFile):
        raise InputError(f"{path} is a .npz file of {', '.join(content.files)}; a .npy file of one array is needed")
    return _native(content)


def _read(path: Path, take: Callable[[Path, Any], T]) -> T:
    try:
        with path.open("rb") as file:
            if not file.read(len(NPY_MAGIC)).startswith((NPY_MAGIC, ZIP_MAGIC)):
                raise InputError(
                    f"{path} is not a .npy file; write it with numpy.save (or q, k and v into a .npz with numpy.savez)"
                )
            file.seek(0)
            content = np.load(file, allow_pickle=False)
            with content if isinstance(content, np.lib.npyio.NpzFile) else contextlib.nullcontext():
                return take(path, content)
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # what NumPy and zipfile raise for a damaged file is not one family
        raise InputError(f"{path} is not a file of arrays that can be read: {error}") from error


def _native(x: Array) -> Array:
    """CuPy takes no foreign byte order."""
    return x.astype(x.dtype.newbyteorder("="), copy=False)


def _check_dtypes(named: Mapping[str, Array]) -> np.dtype[Any]:
    """The dtype of lse, which is that of key_bias; refused where q, k, v and do have not one supported dtype."""
    try:
        return problem.operand_dtypes({name: x.dtype for name, x in named.items()})[1]
    except TypeError as error:
        hint = ""
        if all(x.dtype.kind in "biuf" for x in named.values()):
            hint = "; --dtype float32 (or another) converts them"
        elif all(x.dtype.kind == "V" and x.dtype.itemsize == 2 for x in named.values()):
            hint = "; if numpy.save wrote them from bfloat16 arrays, say --dtype bfloat16"
        raise InputError(f"{error}{hint}") from error


def _dtype(name: str) -> np.dtype[Any]:
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise InputError("--dtype bfloat16 needs ml_dtypes: pip install ml_dtypes") from error
    bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return bfloat16


def _convert(name: str, x: Array, dtype: np.dtype[Any]) -> Array:
    """The array in another dtype, refused where that would turn finite values into infinite ones."""
    if dtype.name == "bfloat16" and x.dtype.kind == "V" and x.dtype.itemsize == 2:
        return x.view(dtype)  # a .npy file keeps the bits of bfloat16, but not its name
    if x.dtype.kind not in "biuf":
        raise InputError(f"{name} has dtype {x.dtype}, which does not convert to {dtype.name}")
    with np.errstate(over="ignore"):
        converted = x.astype(dtype, copy=False)
    if not np.array_equal(np.isfinite(x), np.isfinite(converted)):
        largest = np.abs(x[np.isfinite(x)]).max()
        raise InputError(f"{name} has values up to {largest:.3g}, too large for {dtype.name}")
    return converted


# --- writing ---------------------------------------------------------------------------------------------------------


def _check_output(path: Path, force: bool, inputs: Iterable[Path]) -> None:
    """Refuse before any work what could not be written after it, or would replace what is read."""
    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder")
    for file in inputs:
        if path.exists() and file.exists() and path.samefile(file):
            raise InputError(f"cannot write {path}: it is an input too ({file})")
    if path.suffix.lower() != ".npz":
        raise InputError(f"cannot write {path}: results are a .npz file, so name it {path.with_suffix('.npz')}")
    if not force and os.path.lexists(path):
        raise InputError(f"{path} exists; --force replaces it")


def _storable(x: Array) -> Array:
    return x.astype(np.float32) if x.dtype.name == "bfloat16" else x


def _write(path: Path, named: dict[str, Any], force: bool) -> None:
    """Write a .npz file that is either complete or not there, never over an existing one unless forced."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("xb") as file:
            np.savez(file, **named)
            file.flush()
            os.fsync(file.fileno())
        if force:
            os.replace(temporary, path)
        else:
            _place(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _place(temporary: Path, path: Path) -> None:
    """Give a complete file its name, unless another process took that name in the meantime."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise InputError(f"{path} exists; --force replaces it") from None
    except OSError:  # a file system without hard links
        if os.path.lexists(path):
            raise InputError(f"{path} exists; --force replaces it") from None
        os.replace(temporary, path)
