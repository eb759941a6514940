"""One more contender: cuDNN by its own graphs, past torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from bench.device import Inputs
from bench.problems import Problem
from bench.registry import GRADIENTS, Prepared, Unsupported, peer


@peer("cudnn_fe", needs=("cupy", "cudnn"))
def cudnn_fe(problem: Problem, x: Inputs, op: str, mode: str) -> Prepared:
    import cudnn
    import cupy as cp

    p = problem
    if p.causal and p.seqlen != p.seqlen_k:
        raise Unsupported("use_causal_mask is aligned top-left")
    handle = _cudnn_handle()
    cudnn.set_stream(handle=handle, stream=cp.cuda.get_current_stream().ptr)
    kind = {"float16": cudnn.data_type.HALF, "bfloat16": cudnn.data_type.BFLOAT16}[p.dtype]
    o = cp.empty_like(x.do)
    stats = cp.empty((*x.q.shape[:-1], 1), cp.float32)
    arrays = {"q": x.q, "k": x.k, "v": x.v, "o": o, "stats": stats, "do": x.do}
    options = {"attn_scale": p.scale, "use_causal_mask": p.causal}

    def graph() -> Any:
        return cudnn.pygraph(
            io_data_type=kind,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=handle,
        )

    forward = graph()
    q, k, v = (_cudnn_tensor(forward, name, arrays[name], kind) for name in ("q", "k", "v"))
    out, out_stats = forward.sdpa(name="sdpa", q=q, k=k, v=v, generate_stats=True, **options)
    _cudnn_result(out, o, kind)
    _cudnn_result(out_stats, stats, cudnn.data_type.FLOAT)
    run = _cudnn_runner(cudnn, cp, forward, handle, {q: x.q, k: x.k, v: x.v, out: o, out_stats: stats})
    if op == "forward":
        return Prepared(run, lambda _: {"o": o, "lse": stats[..., 0]})
    run()
    backward = graph()
    t = {name: _cudnn_tensor(backward, name, a, kind) for name, a in arrays.items() if name != "stats"}
    t["stats"] = _cudnn_tensor(backward, "stats", stats, cudnn.data_type.FLOAT)
    do = t.pop("do")
    results = backward.sdpa_backward(name="sdpa_backward", dO=do, **t, **options)
    grads = [cp.empty_like(each) for each in (x.q, x.k, x.v)]
    for tensor, array in zip(results, grads, strict=True):
        _cudnn_result(tensor, array, kind)
    pack = {tensor: arrays[name] for name, tensor in t.items()} | {do: x.do} | dict(zip(results, grads, strict=True))
    run = _cudnn_runner(cudnn, cp, backward, handle, pack)
    return Prepared(run, lambda _: {"o": o, "lse": stats[..., 0]} | dict(zip(GRADIENTS, grads, strict=False)))


@functools.cache
def _cudnn_handle() -> Any:
    import cudnn

    return cudnn.create_handle()


def _cudnn_elements(array: Any) -> list[int]:
    return [stride // array.dtype.itemsize for stride in array.strides]


def _cudnn_tensor(graph: Any, name: str, array: Any, kind: Any) -> Any:
    return graph.tensor(name=name, dim=list(array.shape), stride=_cudnn_elements(array), data_type=kind)


def _cudnn_result(tensor: Any, array: Any, kind: Any) -> None:
    tensor.set_output(True).set_data_type(kind).set_dim(list(array.shape)).set_stride(_cudnn_elements(array))


def _cudnn_runner(cudnn: Any, cp: Any, graph: Any, handle: Any, pack: Mapping[Any, Any]) -> Callable[[], Any]:
    """Builds the graph; the arrays' addresses go in as numbers, so that no stream is synchronised on the way."""
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    workspace = cp.empty(max(1, graph.get_workspace_size()), cp.uint8)
    held = dict(pack)  # the graph is given addresses: the arrays must live as long as ``run``
    pointers = {tensor: int(array.data.ptr) for tensor, array in held.items()}

    def run() -> Any:
        graph.execute(pointers, int(workspace.data.ptr), handle=handle)
        return held

    return run
