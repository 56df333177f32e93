"""Entries of a profiler's trace, made by hand.  Times in microseconds."""

from __future__ import annotations

from typing import Any

GEMM = "ampere_sgemm_128x64_nn"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
Entry = dict[str, Any]


def kernel(name: str, ts: float, dur: float, stream: int = 7, device: int = 0, **args: Any) -> Entry:
    more = {"device": device, "stream": stream} | args
    return {"ph": "X", "cat": "kernel", "name": name, "pid": device, "tid": stream, "ts": ts, "dur": dur, "args": more}


def collective(ts: float, dur: float, name: str = "all_reduce", group: str = "1", **args: Any) -> Entry:
    said = {"Collective name": name, "Process Group Name": group, "In msg nelems": 1024, "dtype": "Float"}
    return kernel(NCCL, ts, dur, 20, **(said | args))


def span(category: str, name: str, ts: float, dur: float, pid: int = 900, **args: Any) -> Entry:
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": pid, "ts": ts, "dur": dur, "args": args}


def trace(*entries: Entry, **more: Any) -> dict[str, Any]:
    return {"traceEvents": list(entries), **more}


def ranked(rank: int, *entries: Entry, world: int = 2, **more: Any) -> dict[str, Any]:
    config = [{"pg_name": "1", "pg_desc": "mesh_dp", "ranks": list(range(world)), "pg_size": world}]
    info = {"rank": rank, "world_size": world, "backend": "nccl", "pg_config": config}
    return trace(*entries, distributedInfo=info, **more)
