"""The demo: what it compares, measures and says."""

import itertools
import re
import tracemalloc

import numpy as np
import pytest
from command import HEADS

import cuflash
from cuflash import __main__, cli_demo, cli_dense, cli_info


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


@pytest.mark.gpu
def test_the_demo_on_a_gpu(capsys):
    assert __main__.main([]) == 0
    assert "the GPU with CuPy" in capsys.readouterr().out
