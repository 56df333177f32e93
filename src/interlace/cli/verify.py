"""Proofs: `verify` of one plan, of its bits, and of plans drawn at random."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from interlace import errors
from interlace.cli.failures import guarded, quiet_stdout
from interlace.cli.options import AXES, Debug, Device, Parallel, RunFile, Set, app
from interlace.cli.start import check, choose_device

if TYPE_CHECKING:
    from interlace.config import Config


@app.command()
def verify(
    run: RunFile = "",
    parallel: Parallel = "",
    steps: Annotated[int, typer.Option(min=1, help="Steps to compare; at least 2 are made.")] = 3,
    exact: Annotated[bool, typer.Option("--exact", help='The same bits, as run.reproducible = "plan" gives.')] = False,
    sweep: Annotated[int, typer.Option(min=0, metavar="N", help="N plans of up to 8 ranks, drawn at random.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Which plans --sweep draws.")] = 0,
    set_: Set = [],  # noqa: B006
    device: Device = "cpu",
    debug: Debug = False,
) -> None:
    """Prove that a plan gives the numbers of one process, and that its work is really split."""

    def work() -> None:
        from interlace.config import load
        from interlace.train import verify as proof

        if sweep and (parallel or exact):
            other = "--parallel" if parallel else "--exact"
            raise errors.ConfigError(f"--sweep draws its own plans and compares numbers; leave {other} out.")
        cfg = load(run or None, set_, parallel or None, preset="tiny")
        if sweep:
            return _sweep(proof.checked(cfg), sweep, seed, max(steps, 2), device)
        cfg = proof.fixed(cfg) if exact else proof.checked(cfg)
        where = choose_device(device, cfg.plan.world)
        check(cfg, where)
        report: proof.Exact | proof.Report
        if exact:
            report = proof.exact(cfg, max(steps, 2), where)
            text = proof.exact_lines(report)
        else:
            report = proof.verify(cfg, max(steps, 2), where)
            text = proof.lines(report)
        with contextlib.suppress(BrokenPipeError):  # whoever stops reading still gets the verdict
            for line in text:
                print(line)
            sys.stdout.flush()
        if not report.passed:
            quiet_stdout()
            raise typer.Exit(errors.NumericsError.exit_code)

    guarded(work, debug)


def _sweep(cfg: Config, count: int, seed: int, steps: int, device: str) -> None:
    from interlace.plan import fit
    from interlace.train import verify as proof

    plans = fit.random_plans(cfg, count, seed, available_axes=AXES)
    for plan in plans:
        check(replace(cfg, plan=plan), device)
    wrong = 0
    for report in proof.sweep(cfg, plans, steps, device):
        wrong += not report.passed
        print(proof.verdict(report), flush=True)
    print(f"verify: {len(plans) - wrong} of {len(plans)} plans drawn with --seed {seed} equal one process")
    if wrong:
        raise typer.Exit(errors.NumericsError.exit_code)
