"""The command line: what it computes, what it writes, and what it does with bad input."""

import contextlib
import itertools
import os
import re
import subprocess
import sys
import tracemalloc
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest

import cuflash
from cuflash import __main__, arrays, cli_attend, cli_compile, cli_demo, cli_dense, cli_info, compile, tiles

ROOT = Path(__file__).resolve().parent.parent
HEADS = ROOT / "cuflash" / "data" / "minilm_heads.npz"


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


# --- attend: results -------------------------------------------------------------------------------------------------


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        __main__.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == f"cuflash {cuflash.__version__}"


def test_attend_writes_o_and_lse(files, capsys):
    assert attend(files) == 0
    o, lse = cuflash.attention(*load(files, "q", "k", "v"), return_lse=True)
    with np.load(files / "x.npz") as x:
        assert sorted(x.files) == ["lse", "o"]
        np.testing.assert_array_equal(x["o"], o)
        np.testing.assert_array_equal(x["lse"], lse)
    assert "host" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, keywords",
    [
        (["--causal", "--align", "bottom-right"], {"causal": True, "align": "bottom-right"}),
        (["--causal", "--align", "-1"], {"causal": True, "align": -1}),
        (["--window", "1", "none", "--align", "top-left"], {"window": (1, None), "align": "top-left"}),
        (["--window", "none", "0", "--align", "2"], {"window": (None, 0), "align": 2}),
        (["--scale", "-0.5"], {"scale": -0.5}),
        (["--softcap", "2"], {"softcap": 2.0}),
    ],
)
def test_attend_passes_its_options_on(files, options, keywords):
    assert attend(files, *options, "--grad", files / "do.npy") == 0
    q, k, v, do = load(files, "q", "k", "v", "do")
    (o, lse), vjp = cuflash.attention_vjp(q, k, v, **keywords, return_lse=True)
    with np.load(files / "x.npz") as x:
        assert sorted(x.files) == ["dk", "dq", "dv", "lse", "o"]
        for name, wanted in zip(["o", "lse", "dq", "dk", "dv"], [o, lse, *vjp(do)], strict=True):
            np.testing.assert_array_equal(x[name], wanted)


def test_attend_takes_key_bias_and_returns_its_gradient(files):
    key_bias = np.array([0, -np.inf, 1, 0, 0, 2, -3])  # float64: converted to what float32 operands need
    np.save(files / "b.npy", key_bias)
    assert attend(files, "--key-bias", files / "b.npy", "--grad", files / "do.npy") == 0
    q, k, v, do = load(files, "q", "k", "v", "do")
    _, vjp = cuflash.attention_vjp(q, k, v, key_bias=key_bias.astype(np.float32))
    with np.load(files / "x.npz") as x:
        np.testing.assert_array_equal(x["dkey_bias"], vjp(do)[3])


def test_attend_takes_grouped_heads(tmp_path):
    rng = np.random.default_rng(3)
    for name, heads in (("q", 6), ("k", 2), ("v", 2)):
        np.save(tmp_path / f"{name}.npy", rng.standard_normal((heads, 5, 4)))
    assert attend(tmp_path) == 2
    assert attend(tmp_path, "--grouped-heads") == 0


def test_attend_takes_one_npz(files, capsys):
    q, k, v = load(files, "q", "k", "v")
    np.savez_compressed(files / "qkv.npz", q=q, k=k, v=v, labels=np.arange(3))
    assert attend(files, inputs=["qkv.npz"]) == 0
    assert "labels" in capsys.readouterr().err
    with np.load(files / "x.npz") as x:
        np.testing.assert_array_equal(x["o"], cuflash.attention(q, k, v))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_attend_converts_and_saves_bfloat16_as_float32(files, capsys, dtype):
    assert attend(files, "--dtype", dtype, "--grad", files / "do.npy") == 0
    printed = capsys.readouterr().out
    assert f"o (2, 5, 3) {'float32' if dtype == 'bfloat16' else dtype}" in printed
    assert ("the bfloat16 results are in the file as float32" in printed) == (dtype == "bfloat16")
    wanted = cli_attend._dtype(dtype)
    q, k, v, do = (x.astype(wanted) for x in load(files, "q", "k", "v", "do"))
    o, vjp = cuflash.attention_vjp(q, k, v)
    with np.load(files / "x.npz") as x:
        assert x["o"].dtype == (np.float32 if dtype == "bfloat16" else wanted)
        for name, y in zip(["o", "dq", "dk", "dv"], [o, *vjp(do)], strict=True):
            np.testing.assert_array_equal(x[name], y.astype(x[name].dtype))


def test_attend_reads_bfloat16_that_numpy_saved(files):
    """A .npy file keeps its bits under the dtype V2."""
    bfloat16 = cli_attend._dtype("bfloat16")
    for name, x in zip("qkv", load(files, "q", "k", "v"), strict=True):
        np.save(files / f"{name}.npy", x)
        np.save(files / f"{name}16.npy", x.astype(bfloat16))
    assert attend(files, "--dtype", "bfloat16") == 0
    assert attend(files, "--dtype", "bfloat16", inputs=["q16.npy", "k16.npy", "v16.npy"], output="y.npz") == 0
    assert (files / "x.npz").read_bytes() == (files / "y.npz").read_bytes() or np.array_equal(
        np.load(files / "x.npz")["o"], np.load(files / "y.npz")["o"]
    )


def test_attend_reads_foreign_byte_order_and_fortran_order(files):
    q, k, v = load(files, "q", "k", "v")
    np.save(files / "q.npy", np.asfortranarray(q.astype(">f4")))
    assert attend(files) == 0
    np.testing.assert_array_equal(np.load(files / "x.npz")["o"], cuflash.attention(q, k, v))


def test_attend_on_no_tokens(tmp_path):
    for name, shape in {"q": (0, 4), "k": (3, 4), "v": (3, 2)}.items():
        np.save(tmp_path / f"{name}.npy", np.ones(shape))
    assert attend(tmp_path) == 0
    assert np.load(tmp_path / "x.npz")["o"].shape == (0, 2)


# --- attend: bad input -----------------------------------------------------------------------------------------------


def test_attend_refuses_shapes_that_do_not_fit(files, capsys):
    np.save(files / "k.npy", np.ones((2, 7, 5), np.float32))
    assert_fails(attend(files), capsys, files, "(2, 5, 4)", "(2, 7, 5)", "(2, 7, 3)")


def test_attend_refuses_integers_and_takes_them_with_a_dtype(files, capsys):
    for name in "qkv":
        np.save(files / f"{name}.npy", np.arange(6).reshape(3, 2))
    assert_fails(attend(files), capsys, files, "int64", "--dtype")
    assert attend(files, "--dtype", "float32") == 0


@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int64, np.float16, np.float64])
def test_attend_never_casts_unasked(files, capsys, name, dtype):
    """One array of another dtype, float or not, is refused, whatever the option that would convert it."""
    np.save(files / f"{name}.npy", np.load(files / f"{name}.npy").astype(dtype))
    grad = ["--grad", files / "do.npy"]
    assert_fails(attend(files, *grad), capsys, files, name, np.dtype(dtype).name, "--dtype")
    assert attend(files, *grad, "--dtype", "float32") == 0


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int64, complex, "U3", "V2"])
@pytest.mark.parametrize("convert", [[], ["--dtype", "float16"]])
def test_attend_refuses_a_key_bias_that_is_not_of_floats(files, capsys, dtype, convert):
    """A mask cast to float32 would be a bias of 1 for the keys that are there, and hide none."""
    np.save(files / "b.npy", np.ones(7, np.uint16 if dtype == "V2" else dtype).astype(dtype))
    words = ["np.where(mask, 0.0, -np.inf)"] if np.dtype(dtype).kind in "biu" else []
    assert_fails(
        attend(files, *convert, "--key-bias", files / "b.npy"), capsys, files, "key_bias", *words, left=["b.npy"]
    )


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.longdouble])
@pytest.mark.parametrize("operands", ["float16", "float32", "float64"])
def test_attend_gives_a_key_bias_of_floats_its_width(files, dtype, operands):
    np.save(files / "b.npy", np.array([0, -np.inf, 1, 0, 0, 2, -3], dtype))
    assert attend(files, "--dtype", operands, "--key-bias", files / "b.npy") == 0


def test_attend_names_the_option_for_bits_of_bfloat16(files, capsys):
    bfloat16 = cli_attend._dtype("bfloat16")
    for name, x in zip("qkv", load(files, "q", "k", "v"), strict=True):
        np.save(files / f"{name}.npy", x.astype(bfloat16))
    assert_fails(attend(files), capsys, files, "--dtype bfloat16")


def test_attend_refuses_pickles(files, capsys):
    np.save(files / "q.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert_fails(attend(files), capsys, files, "q.npy", "allow_pickle")


def test_attend_refuses_complex_numbers(files, capsys):
    np.save(files / "q.npy", np.ones((2, 5, 4), complex))
    assert_fails(attend(files, "--dtype", "float32"), capsys, files, "q", "complex128")


def test_attend_refuses_values_beyond_the_dtype(files, capsys):
    np.save(files / "v.npy", np.full((2, 7, 3), 1e6, np.float32))
    assert_fails(attend(files, "--dtype", "float16"), capsys, files, "v", "1e+06", "float16")


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"not an array at all", b"PK\x03\x04 not a zip file"])
def test_attend_refuses_damaged_files(files, capsys, content):
    (files / "q.npy").write_bytes(content)
    assert_fails(attend(files), capsys, files, "q.npy")


@pytest.mark.parametrize("content", [b"", b"1.0 2.0\n3.0 4.0\n", b"a,b\n1,2\n", b"\x80\x04}\x94."])
def test_attend_says_what_to_write_where_a_file_is_of_another_kind(files, capsys, content):
    (files / "q.npy").write_bytes(content)
    assert_fails(attend(files), capsys, files, "q.npy is not a .npy file", "numpy.save")
    assert_fails(attend(files, inputs=["q.npy"]), capsys, files, "q.npy", "numpy.savez")


@pytest.mark.parametrize("keep", [40, 130, 200])
def test_attend_refuses_truncated_files(files, capsys, keep):
    whole = (files / "q.npy").read_bytes()
    (files / "q.npy").write_bytes(whole[:keep])
    assert_fails(attend(files), capsys, files, "q.npy")


def test_attend_refuses_a_header_that_claims_more_than_there_is(files, capsys):
    whole = (files / "q.npy").read_bytes()
    (files / "q.npy").write_bytes(whole.replace(b"(2, 5, 4), }" + b" " * 12, b"(2, 5, 4000000000000), }"))
    assert (files / "q.npy").read_bytes() != whole
    assert_fails(attend(files), capsys, files, "q.npy")


def test_attend_refuses_a_damaged_npz(files, capsys):
    q, k, v = load(files, "q", "k", "v")
    np.savez_compressed(files / "qkv.npz", q=q, k=k, v=v)
    data = bytearray((files / "qkv.npz").read_bytes())
    with zipfile.ZipFile(files / "qkv.npz") as archive:
        begin = archive.infolist()[1].header_offset + 100
    data[begin : begin + 20] = bytes(20)
    (files / "qkv.npz").write_bytes(data)
    assert_fails(attend(files, inputs=["qkv.npz"]), capsys, files, "qkv.npz", left=["qkv.npz"])


@pytest.mark.parametrize(
    "inputs, words",
    [
        (["q.npy"], ["q.npy", "one array"]),
        (["q.npy", "k.npy"], ["2 files"]),
        (["q.npy", "k.npy", "missing.npy"], ["missing.npy"]),
        (["qk.npz"], ["qk.npz", "no v"]),
        (["q.npy", "k.npy", "qk.npz"], ["qk.npz", ".npy"]),
        (["q.npy", "k.npy", "."], ["directory"]),
    ],
)
def test_attend_refuses_the_wrong_files(files, capsys, inputs, words):
    q, k = load(files, "q", "k")
    np.savez(files / "qk.npz", q=q, k=k)
    assert_fails(attend(files, inputs=inputs), capsys, files, *words, left=["qk.npz"])


@pytest.mark.parametrize(
    "options, words",
    [
        (["--causal"], ["align"]),
        (["--window", "-1", "0", "--align", "0"], ["None"]),
        (["--scale", "nan"], ["scale"]),
        (["--softcap", "0"], ["softcap"]),
        (["--align", "middle", "--causal"], ["middle"]),
        (["--precision", "tf32", "--dtype", "float16"], ["tf32"]),
    ],
)
def test_attend_refuses_bad_options(files, capsys, options, words):
    assert_fails(attend(files, *options), capsys, files, *words)


def test_attend_says_what_the_sides_of_a_window_are(files, capsys):
    for sides in (["a", "3"], ["1.5", "2"], ["1", ""]):
        with pytest.raises(SystemExit):
            attend(files, "--window", *sides)
        assert "ints or none" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--window", "1"], ["--window", "a", "b"], ["--dtype", "int8"], ["--scale", "x"]])
def test_attend_refuses_options_that_do_not_parse(files, capsys, options):
    with pytest.raises(SystemExit) as exit:
        attend(files, *options)
    assert_fails(exit.value.code, capsys, files, options[0])


def test_attend_refuses_a_gradient_of_another_shape(files, capsys):
    np.save(files / "do.npy", np.ones((2, 4, 3), np.float32))
    assert_fails(attend(files, "--grad", files / "do.npy"), capsys, files, "(2, 4, 3)", "(2, 5, 3)")


def test_attend_never_overwrites_unless_forced(files, capsys):
    (files / "x.npz").write_bytes(b"precious")
    assert_fails(attend(files), capsys, files, "--force", left=["x.npz"])
    assert (files / "x.npz").read_bytes() == b"precious"
    assert attend(files, "--force") == 0
    assert "o" in np.load(files / "x.npz").files
    assert sorted(path.name for path in files.iterdir()) == ["do.npy", "k.npy", "q.npy", "v.npy", "x.npz"]


def test_attend_never_overwrites_a_file_that_appears_meanwhile(files, capsys, monkeypatch):
    def compute(named, options):
        (files / "x.npz").write_bytes(b"someone else's")
        return {"o": named["q"]}

    monkeypatch.setattr(cli_attend, "_compute", compute)
    assert_fails(attend(files), capsys, files, "--force", left=["x.npz"])
    assert (files / "x.npz").read_bytes() == b"someone else's"


def test_attend_works_on_file_systems_without_hard_links(files, monkeypatch):
    def no_links(*_):
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", no_links)
    assert attend(files) == 0
    assert "o" in np.load(files / "x.npz").files


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_attend_leaves_nothing_when_writing_fails(files, capsys, monkeypatch, force):
    def full(file, **_):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    assert_fails(attend(files, *force), capsys, files, "No space left")


@pytest.mark.parametrize("output", ["missing/x.npz", "."])
def test_attend_refuses_an_output_that_cannot_be(files, capsys, output):
    assert_fails(attend(files, output=output), capsys, files, "cannot write")


@pytest.mark.parametrize("output", ["result.dat", "result", "result.npy", "x.npz.gz"])
@pytest.mark.parametrize("force", [[], ["--force"]])
def test_attend_refuses_an_output_with_another_suffix(files, capsys, output, force):
    assert_fails(attend(files, *force, output=output), capsys, files, "cannot write", output, ".npz")


@pytest.mark.parametrize("role", ["q", "k", "v", "--grad", "--key-bias", "npz", "symbolic link", "hard link"])
@pytest.mark.parametrize("force", [[], ["--force"]])
def test_attend_never_writes_over_an_input(files, capsys, role, force):
    """Whichever input it is, and under whichever name."""
    q, k, v = load(files, "q", "k", "v")
    inputs, output, options = ["q.npy", "k.npy", "v.npy"], "in.npz", list(force)
    if role in "qkv":
        np.save(files / "q.npy", q)
        inputs["qkv".index(role)] = output = f"{role}.npy"
    elif role.startswith("--"):
        (files / "in.npz").write_bytes((files / "do.npy").read_bytes())
        options += [role, files / "in.npz"]
    else:
        np.savez(files / "qkv.npz", q=q, k=k, v=v)
        inputs, output = ["qkv.npz"], "qkv.npz"
        if role == "symbolic link":
            (files / "in.npz").symlink_to("qkv.npz")
            output = "in.npz"
        elif role == "hard link":
            os.link(files / "qkv.npz", files / "in.npz")
            output = "in.npz"
    before = {path: path.read_bytes() for path in files.iterdir()}
    status = attend(files, *options, inputs=inputs, output=output)
    assert_fails(status, capsys, files, output, "is an input too", left=["in.npz", "qkv.npz"])
    assert {path: path.read_bytes() for path in files.iterdir()} == before


def test_attend_writes_over_an_older_result_next_to_its_inputs(files):
    assert attend(files) == attend(files, "--force") == 0
    assert attend(files, output="X2.NPZ") == 0


# --- backends and info -----------------------------------------------------------------------------------------------

HOPPER = cli_info.Device("NVIDIA H200", (9, 0), 150 * 2**30)


def pretend(monkeypatch, driver, absent=()):
    """A machine with this driver, without these modules."""
    find = cli_info._is_importable
    monkeypatch.setattr(cli_info, "find_driver", lambda: driver)
    monkeypatch.setattr(cli_info, "_is_importable", lambda module: module not in absent and find(module))


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


# --- compile ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def asked_for(monkeypatch, *arguments):
    """The variants that the command would compile, and its exit status."""
    seen = []

    def compile_all(variants, *, processes, progress):
        seen.extend(variants)
        progress(len(seen), len(seen))
        return []

    with monkeypatch.context() as patch:
        patch.setattr(compile, "compile_all", compile_all)
        status = __main__.main(["compile", *arguments])
    return seen, status


def test_compile_selects(monkeypatch, capsys):
    everything, status = asked_for(monkeypatch, "--all")
    assert status == 0
    assert {variant.target for variant in everything} == set(compile.targets())
    every_86, _ = asked_for(monkeypatch, "--arch", "86")
    assert every_86 == [variant for variant in everything if variant.target == "86"]
    assert asked_for(monkeypatch, "--arch", "sm_86", "86")[0] == every_86
    half, _ = asked_for(monkeypatch, "--arch", "86", "--dtype", "float16")
    assert half and {variant.dtype for variant in half} == {"float16"}
    assert asked_for(monkeypatch, "--arch", "90")[0] == asked_for(monkeypatch, "--arch", "90a")[0]


@pytest.mark.parametrize(
    "head_dim, aligned, others, operations",
    [
        (8, 32, 64, ["backward_dkv", "backward_dq", "forward"]),
        (72, 96, 128, ["backward_dkv", "backward_dq", "forward"]),
        (128, 128, 128, ["backward_dkv", "backward_dq", "forward"]),
        (130, 192, 256, ["backward_dk", "backward_dq", "backward_dv", "forward"]),
    ],
)
def test_compile_selects_what_the_launcher_asks_for_at_a_head_dim(monkeypatch, head_dim, aligned, others, operations):
    """The next tile up for each kind of load; and the kernels that work on rows, which are needed for any head dim."""
    some, _ = asked_for(monkeypatch, "--arch", "86", "--dtype", "float16", "--head-dim", str(head_dim))
    fused = [x for x in some if x.operation == "attention_backward_dqkv"]  # vectors alone, and fewer head dims
    tiled = {(x.operation, x.load, x.tile.head_dim) for x in some if x.tile != tiles.ROW_KERNEL and x not in fused}
    loads = {"16": aligned, "8": others, "4": others, "strided": others}
    assert tiled == {(f"attention_{operation}", load, d) for operation in operations for load, d in loads.items()}
    assert {x.tile.head_dim for x in fused} == ({64 if head_dim <= 64 else 128} if head_dim <= 128 else set())
    rows = {x.operation for x in some if x.tile == tiles.ROW_KERNEL}
    assert rows == {"attention_convert", "attention_delta", "attention_merge", "attention_merge_splits"}


@pytest.mark.parametrize(
    "head_dim, whole, dkv, dq",
    [
        (64, 64, [], [(64, 64)]),
        (72, 96, [], [(128, 128)]),
        (128, 128, [], [(128, 128)]),
        (130, None, [(192, 128), (192, 192)], [(192, 128), (192, 192)]),
        (200, None, [(256, 256)], [(256, 256)]),
    ],
)
def test_compile_selects_gradients_of_hopper_at_a_head_dim(monkeypatch, head_dim, whole, dkv, dq):
    """Whichever of d and e is the larger one, and with score terms."""
    some, _ = asked_for(monkeypatch, "--arch", "90", "--dtype", "bfloat16", "--head-dim", str(head_dim))
    own = [x for x in some if x.family == "sm90"]
    found = {
        operation: sorted(
            {(x.tile.head_dim, x.tile.value_dim) for x in own if x.operation == operation and not x.scores}
        )
        for operation in (tiles.FUSED, tiles.DKV, tiles.DQ)
    }
    assert found == {tiles.FUSED: [(whole, whole)] if whole else [], tiles.DKV: dkv, tiles.DQ: dq}
    without_dq = {x.tile.head_dim for x in own if not x.needs_dq}
    assert without_dq == ({64 if head_dim <= 64 else 128} if whole else set())
    assert any(x.scores for x in own if x.operation in (tiles.FUSED, tiles.DKV))
    assert {"attention_delta", "attention_dkey_bias"} <= {x.operation for x in own}


def test_compile_of_the_lineage(monkeypatch, capsys):
    """Only where it is asked for: nobody needs these kernels for speed."""
    some, status = asked_for(monkeypatch, "--lineage", "--arch", "90", "75")
    assert status == 0 and {x.operation for x in some} >= {"safe_softmax", "online_softmax"}
    assert {(x.family, x.target) for x in some} == {("sm80", "90a"), ("sm75", "75")}
    assert not {x.operation for x in asked_for(monkeypatch, "--arch", "90")[0]} & {x.operation for x in some}
    half, _ = asked_for(monkeypatch, "--lineage", "--arch", "90", "--dtype", "float16")
    assert {x.dtype for x in half} == {"float16"}
    assert asked_for(monkeypatch, "--lineage", "--arch", "90", "--head-dim", "64") == ([], 2)
    assert "leave --head-dim out" in capsys.readouterr().err


def test_compile_knows_the_precisions_of_float32(monkeypatch):
    """A float32 problem with precision='tf32' has kernels of its own, where the tensor cores have TF32."""
    for target, precisions in (("75", {None}), ("86", {None, "tf32"})):
        some, _ = asked_for(monkeypatch, "--arch", target, "--dtype", "float32", "--head-dim", "64")
        assert {x.precision for x in some if x.operation == "attention_forward"} == precisions


@pytest.mark.parametrize(
    "arguments, notes",
    [
        (["--arch", "75", "80", "--dtype", "float32", "--head-dim", "64"], []),
        (["--arch", "75", "80", "--dtype", "float64", "float16"], []),
        (["--arch", "75", "80", "--dtype", "bfloat16"], ["no bfloat16 attention kernels for sm_75,"]),
        (["--arch", "80", "--dtype", "float16", "bfloat16"], []),
        (["--arch", "80"], []),
    ],
)
def test_compile_says_which_dtypes_have_no_attention(monkeypatch, capsys, arguments, notes):
    variants, status = asked_for(monkeypatch, *arguments)
    assert status == 0 and variants
    said = capsys.readouterr().err
    assert said.count("no ") == len(notes) and all(note in said for note in notes)


def test_compile_without_a_gpu_or_an_architecture_says_what_to_add(monkeypatch, capsys):
    pretend(monkeypatch, None)
    assert asked_for(monkeypatch) == ([], 2)
    assert "--arch" in capsys.readouterr().err


def test_compile_takes_the_architecture_of_the_gpu(monkeypatch):
    pretend(monkeypatch, cli_info.Driver((13, 0), (HOPPER, HOPPER)))
    variants, status = asked_for(monkeypatch)
    assert status == 0 and {variant.target for variant in variants} == {"90a"}
    assert len(set(variants)) == len(variants)


@pytest.mark.parametrize(
    "arguments, word",
    [
        (["--arch", "70"], "70"),
        (["--arch", "86", "--head-dim", "257"], "257"),
        (["--arch", "86", "--head-dim", "0"], "0"),
        (["--arch", "75", "--dtype", "bfloat16"], "no kernel"),
        (["--all", "--dtype", "float16"], "--all"),
        (["--arch", "86", "--jobs", "0"], "--jobs"),
    ],
)
def test_compile_refuses(monkeypatch, capsys, arguments, word):
    assert asked_for(monkeypatch, *arguments) == ([], 2)
    assert word in capsys.readouterr().err


def test_compile_fills_the_cache_once(cache, capsys, monkeypatch):
    one = tiles.variants("86", "sm80")[:1]
    monkeypatch.setattr(cli_compile, "_variants", lambda *_: one)
    for _ in range(2):
        assert __main__.main(["compile", "--arch", "86"]) == 0
        assert "1/1 kernels" in capsys.readouterr().out
    assert len(list(cache.glob("*.cubin"))) == 1


def test_compile_reports_what_did_not_compile(cache, capsys, monkeypatch):
    one = tiles.variants("86", "sm80")[0]
    error = compile.CompileError(one, "error: expected a ';'", cache / "x.cubin")
    monkeypatch.setattr(compile, "compile_all", lambda *_, **__: [error])
    assert __main__.main(["compile", "--arch", "86"]) == 1
    assert "expected a ';'" in capsys.readouterr().err


def test_the_bar_ends_with_everything(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    progress = cli_compile._Progress()
    for done in range(4):
        progress(done, 3)
    lines = capsys.readouterr().out
    assert lines.endswith("\n") and lines.count("\n") == 1
    assert f"[{'#' * cli_compile.BAR_WIDTH}] 3/3" in lines


# --- the demo --------------------------------------------------------------------------------------------------------


def short(monkeypatch):
    monkeypatch.setattr(cli_demo.Host, "tokens", 512)
    monkeypatch.setattr(cli_info, "find_driver", lambda: None)


def test_the_demo_compares_real_heads_and_a_long_problem(capsys, monkeypatch):
    short(monkeypatch)
    assert __main__.main([]) == 0
    output = capsys.readouterr().out
    assert "the host with NumPy" in output and "no CUDA driver" in output
    assert output.count("layer 0, float") == output.count("layer 2, float") == 2
    assert "512 tokens" in output and "64 rows" in output
    shares = [float(x) for x in re.findall(r"(?:o|lse|dq|dk|dv) (\d\.\d\d)", output)]
    assert len(shares) == 5 * (4 + 1) and 0 < max(shares) <= 1


def test_the_demo_fails_above_budget(capsys, monkeypatch):
    short(monkeypatch)
    monkeypatch.setattr(cli_dense, "host_budget", lambda name, dtype, max_score: 1e-9)
    assert __main__.main([]) == 1
    output = capsys.readouterr().out
    assert output.count("ABOVE BUDGET") == 5 and "AN ERROR IS ABOVE ITS BUDGET" in output


def test_the_demo_measures_everything_alike():
    """Warmed up, in turns, the median, and memory in a run that is not timed."""
    ran, clock = [], iter([1.0, 5.0, 8.0, 7.0, 2.0, 6.0])

    class Place:
        def seconds(self, compute):
            compute()
            return next(clock)

        def peak_bytes(self, compute):
            ran.append("memory")
            return compute(), 1000

    def run(name):
        return lambda: (ran.append(name) or np.zeros(10),)

    measured = cli_demo._measure(Place(), {"a": run("a"), "b": run("b")})
    assert ran == ["memory", "a", "memory", "b"] + ["a", "b"] * cli_demo.ROUNDS
    assert (measured["a"].seconds, measured["b"].seconds) == (2.0, 6.0)
    assert measured["a"].extra_bytes == 1000 - 80


def test_time_on_the_host_is_not_taken_while_memory_is_traced():
    traced = []
    compute = lambda: traced.append(tracemalloc.is_tracing()) or (np.zeros(1000),)  # noqa: E731
    place = cli_demo.Host()
    assert place.seconds(compute) >= 0
    results, peak = place.peak_bytes(compute)
    assert traced == [False, True] and 8000 <= peak < 20000 and results[0].nbytes == 8000


def test_the_demos_dense_forward_is_attention_on_the_same_arrays():
    q, k, v = np.random.default_rng(2).standard_normal((3, 2, 50, 8)).astype(np.float16)
    [o] = cli_demo.Host().dense(q, k, v)()
    assert o.dtype == np.float16
    np.testing.assert_allclose(o, cuflash.attention(q, k, v), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("slow", [True, False])
def test_the_demo_says_what_slows_the_host_down(capsys, monkeypatch, slow):
    short(monkeypatch)
    seconds = itertools.cycle([2.0, 1.0, 1.0] if slow else [1.0, 2.0, 1.0])
    monkeypatch.setattr(cli_demo.Host, "seconds", lambda self, compute: next(seconds))
    assert __main__.main([]) == 0
    output = capsys.readouterr().out
    assert (cli_demo.BUSY in output) == slow
    assert f"forward    {2 if slow else 1}.000 s" in output and f"dense      {1 if slow else 2}.000 s" in output


@pytest.mark.parametrize("name", ["o", "dq", "dk", "dv"])
def test_the_demo_finds_a_wrong_result(capsys, monkeypatch, name):
    """One element of one result of each computation is off by a fiftieth of the largest."""
    short(monkeypatch)
    get = cli_demo.Host.get
    shapes = iter(["o", "lse", "dq", "dk", "dv"] * 5)

    def spoil(self, x):
        x = get(self, x)
        if next(shapes) == name:
            x = x.copy()
            x[0, 3, 3] += 0.02 * np.abs(x).max()
        return x

    monkeypatch.setattr(cli_demo.Host, "get", spoil)
    assert __main__.main([]) == 1


def test_nan_is_above_every_budget(monkeypatch):
    assert not cli_demo._verdict({"o": 0.5, "dq": float("nan")})


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


def test_the_demo_prefers_the_gpu_and_its_budgets(pretended_gpu, capsys, monkeypatch):
    monkeypatch.setattr(cli_demo.Gpu, "tokens", 512)
    assert __main__.main([]) == 0
    output = capsys.readouterr().out
    assert "the GPU with CuPy 14.2.0: NVIDIA H200, compute capability 9.0, 150 GiB" in output
    assert "the host" not in output and "float32, scores" not in output


def test_the_budgets_of_a_gpu_are_near_those_of_the_host():
    """Of the same size, since both round results to float16: a budget that is far above would find nothing."""
    with np.load(HEADS) as heads:
        q, k, v = (heads[name][0, 1] for name in "qkv")
    do = np.random.default_rng(1).standard_normal(v.shape).astype(np.float16)
    dense = cli_dense.attention(q, k, v, do)
    gpu = cli_demo.Gpu.budgets(None, q, k, v, do, dense)
    host = cli_demo.Host().budgets(q, k, v, do, dense)
    assert all(host[name] < gpu[name] < 6 * host[name] for name in cli_dense.RESULTS)


def test_attend_prefers_the_gpu(pretended_gpu, files, capsys):
    q, k, v = load(files, "q", "k", "v")
    np.save(files / "q.npy", np.asfortranarray(q.astype(">f4")))
    paths = [str(files / f"{name}.npy") for name in "qkv"]
    assert __main__.main(["attend", *paths, "-o", str(files / "x.npz")]) == 0
    assert "computed on NVIDIA H200" in capsys.readouterr().out
    np.testing.assert_array_equal(np.load(files / "x.npz")["o"], cuflash.attention(q, k, v))


def test_dense_gradients_are_derivatives():
    """The demo's own reference against finite differences."""
    rng = np.random.default_rng(5)
    q, k, v, do = (rng.standard_normal((3, 4)) for _ in range(4))
    dense = cli_dense.attention(q, k, v, do)
    step = 1e-6
    for name, x in (("dq", q), ("dk", k), ("dv", v)):
        numeric = np.empty_like(x)
        for at in np.ndindex(x.shape):
            x[at] += step
            above = (cli_dense.attention(q, k, v, do).values["o"] * do).sum()
            x[at] -= 2 * step
            below = (cli_dense.attention(q, k, v, do).values["o"] * do).sum()
            x[at] += step
            numeric[at] = (above - below) / (2 * step)
        np.testing.assert_allclose(dense.values[name], numeric, atol=1e-8)


def test_python_m_cuflash():
    """The whole of it as users start it, from a folder that is not the checkout."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-m", "cuflash"], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "every error is within its budget" in result.stdout
    assert result.stderr == ""


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_the_demo_on_a_gpu(capsys):
    assert __main__.main([]) == 0
    assert "the GPU with CuPy" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_attend_on_a_gpu_agrees_with_the_host(tmp_path, capsys, dtype):
    """Both are within a budget of float64 in other tests; here it is the path of the files that counts."""
    with np.load(HEADS) as heads:
        np.save(tmp_path / "do.npy", np.random.default_rng(1).standard_normal(heads["v"].shape))
    arguments = ["attend", str(HEADS), "--dtype", dtype, "--grad", str(tmp_path / "do.npy")]
    assert __main__.main([*arguments, "-o", str(tmp_path / "gpu.npz")]) == 0
    assert "the host" not in capsys.readouterr().out
    assert __main__.main([*arguments, "-o", str(tmp_path / "host.npz"), "--backend", "host"]) == 0
    # Layer 0's scores reach 72, and rounding one of them in float32 or float64 is relative to it.
    unit = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 72 * 2.0**-23, "float64": 72 * 2.0**-52}[dtype]
    with np.load(tmp_path / "gpu.npz") as gpu, np.load(tmp_path / "host.npz") as host:
        assert gpu.files == host.files
        for name in gpu.files:
            a, b = gpu[name].astype(np.float64), host[name].astype(np.float64)
            assert np.abs(a - b).max() <= 8 * unit * np.abs(b).max(), name
