"""attend: what it computes, what it writes, and what it does with bad input."""

import os
import zipfile

import numpy as np
import pytest
from command import HEADS, assert_fails, attend, load

import cuflash
from cuflash import __main__, cli_attend


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


# --- bad input -------------------------------------------------------------------------------------------------------


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


def test_attend_prefers_the_gpu(pretended_gpu, files, capsys):
    q, k, v = load(files, "q", "k", "v")
    np.save(files / "q.npy", np.asfortranarray(q.astype(">f4")))
    paths = [str(files / f"{name}.npy") for name in "qkv"]
    assert __main__.main(["attend", *paths, "-o", str(files / "x.npz")]) == 0
    assert "computed on NVIDIA H200" in capsys.readouterr().out
    np.testing.assert_array_equal(np.load(files / "x.npz")["o"], cuflash.attention(q, k, v))


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
