"""compile: which kernels it selects, and what it says of them."""

import sys

import pytest
from command import HOPPER, pretend

from cuflash import __main__, cli_compile, cli_info, compile, tiles


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
