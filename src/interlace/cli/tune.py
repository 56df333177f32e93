"""How products of the tensor axis are best run beside their transfers: `tune`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from interlace import errors
from interlace.cli.failures import guarded
from interlace.cli.options import Debug, Device, app
from interlace.cli.start import choose_device


@app.command()
def tune(
    rows: Annotated[int, typer.Argument(metavar="M", min=1, help="Rows of the whole product, of all ranks together.")],
    columns: Annotated[int, typer.Argument(metavar="N", min=1, help="Columns that one rank computes.")],
    inner: Annotated[int, typer.Argument(metavar="K", min=1, help="Inner size of one rank's product.")],
    op: Annotated[str, typer.Option(metavar="NAME", help="One product; all three when left out.")] = "all",
    dtype: Annotated[str, typer.Option(metavar="fp32|fp16|bf16")] = "bf16",
    nproc: Annotated[int, typer.Option(min=0, help="Ranks; 0 = all GPUs, or 2 on a CPU.")] = 0,
    bias: Annotated[bool, typer.Option("--bias", help="Products that add one.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Of interleaved samples; the median counts.")] = 11,
    search: Annotated[
        bool, typer.Option("--search", help="Try other chunks and tiles too; compiles for long.")
    ] = False,
    table: Annotated[str, typer.Option(metavar="FILE", help="The table to add to; the package's when left out.")] = "",
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Measure how a product of the tensor axis is best run beside its transfer, and remember it.

    Every way is held against a reference first.  Timings of a CPU, where kernels are interpreted, are kept only with
    --table.
    """

    def work() -> None:
        from interlace import launch
        from interlace.kernels import table as tables
        from interlace.kernels.tune import shipped
        from interlace.plan.fused import OPS
        from interlace.world import find_place

        if find_place() is not None:
            raise errors.ConfigError("interlace tune starts its own ranks; run it without torchrun or SLURM's srun.")
        _one_of("--op", op, ("all", *OPS))
        _one_of("--dtype", dtype, tuple(tables.DTYPES))
        ranks, where = _tuned_ranks(nproc, device)
        argument = {"ops": list(OPS) if op == "all" else [op], "M": rows, "N": columns, "K": inner}
        argument |= {"dtype": dtype, "bias": bias, "rounds": rounds, "search": search}
        if where == "cpu":
            os.environ.setdefault("TRITON_INTERPRET", "1")  # for the ranks
        found = launch.run_local("interlace.kernels.tune:run", ranks, argument, device=where, timeout=300.0)[0]
        for measured in found:
            print(measured["title"])
            print("\n".join(f"  {line}" for line in measured["lines"]))
        name = found[0]["device"]
        if where == "cpu" and not table:
            print("not kept: this is a CPU; --table FILE keeps it", file=sys.stderr)
            return
        path = Path(table) if table else tables.path_of(name)
        whole = tables.store(path, name, [tables.Entry(**measured["entry"]) for measured in found])
        shipped.cache_clear()
        print(f"wrote {path}: {len(whole.entries)} shapes, digest {whole.digest}", file=sys.stderr)

    guarded(work, debug)


def _one_of(option: str, given: str, known: Sequence[str]) -> None:
    if given not in known:
        near = errors.nearest(given, known)
        raise errors.ConfigError(
            f"{option} must be one of {', '.join(known)}, found {given}" + (f"; did you mean {near}?" if near else ".")
        )


def _tuned_ranks(nproc: int, device: str) -> tuple[int, str]:
    """How many ranks measure, and where: as many as asked, or all GPUs, or two processes."""
    from interlace.kernels.tune import num_gpus

    ranks = nproc or (max(2, num_gpus()) if device != "cpu" else 2)
    if ranks < 2:
        raise errors.ConfigError(f"--nproc must be at least 2, found {ranks}: one rank has nobody to wait for.")
    return ranks, choose_device(device, ranks)
