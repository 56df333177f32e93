"""Training, and what goes into a run and comes out of it: `train`, `data`, `export`, `generate`."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interlace.cli.failures import error_file, guarded, said_once, told_how_to_go_on
from interlace.cli.options import Debug, Device, Parallel, RunFile, Set, app, step_range
from interlace.cli.start import at_home, check, check_folder, choose_device, claimed, names_folder, newest

if TYPE_CHECKING:
    from interlace.config import Config


@app.command()
def train(
    run: RunFile = "",
    parallel: Parallel = "",
    set_: Set = [],  # noqa: B006 - typer copies it
    resume: Annotated[
        str, typer.Option(metavar="auto|DIR", help="Go on from the newest checkpoint of the run, or of a folder.")
    ] = "",
    device: Device = "auto",
    port: Annotated[int, typer.Option(help="Loopback port where local ranks meet; 0 = none is needed.")] = 0,
    debug: Debug = False,
) -> None:
    """Train: starts local ranks, or joins those of torchrun or SLURM."""

    def work() -> None:
        from interlace import launch
        from interlace.config import load
        from interlace.world import find_place

        place = find_place()
        with said_once(place):
            cfg = at_home(load(run or None, set_, parallel or None, place.size if place else None))
            where = choose_device(device, cfg.plan.world, place)
            check(cfg, where, place)
            unnamed = place is None and not names_folder(run, set_)
            if unnamed and resume == "auto":
                cfg = newest(cfg)
            if unnamed and not resume:
                cfg = claimed(cfg)
            else:
                check_folder(cfg, resume)
        argument = {"config": cfg.to_toml(), "resume": resume}
        with error_file(cfg, enabled=place is None or place.rank == 0):
            if place is not None:
                _join(cfg, where, argument)
            else:
                world, timeout = cfg.plan.world, cfg.run.timeout
                with told_how_to_go_on(cfg):
                    launch.run_local(
                        "interlace.train.loop:run", world, argument, device=where, timeout=timeout, port=port or None
                    )

    guarded(work, debug)


def _join(cfg: Config, device: str, argument: dict[str, Any]) -> None:
    """This process is a rank of torchrun or SLURM."""
    from interlace import launch
    from interlace.train.loop import run as rank_run

    world = launch.join(cfg.run.timeout, device, {**alike(cfg), "--resume": argument["resume"]})
    with launch.told_to_end(world) as speaks_for_itself:
        try:
            rank_run(world, **argument)
        except Exception as error:
            speaks_for_itself()
            said = world.explain(error)
            if world.rank > 0 and "cause" in said.details:
                raise typer.Exit(said.details["cause"]["exit_code"]) from None  # the rank at fault speaks, and rank 0
            raise said from error
        finally:
            launch.leave()


def alike(cfg: Config) -> dict[str, str]:
    """What every rank must be told alike, by its key: all of a run file but where a host may keep the files it reads.

    Of a pipeline's table it is the content; of the data, the ranks compare digests when they have read them.
    """
    from interlace.forms import as_table, toml

    sections = {"model": cfg.model_config(), "data": cfg.data, "train": cfg.train, "run": cfg.run}
    found = {f"{name}.{key}": toml(value) for name, part in sections.items() for key, value in as_table(part).items()}
    for place in ("data.source", "data.tokenizer"):
        del found[place]
    plan = cfg.plan
    if plan.pp > 1 and plan.schedule.endswith(".csv"):
        found["the content of schedule"] = hashlib.blake2b(Path(plan.schedule).read_bytes(), digest_size=8).hexdigest()
        plan = replace(plan, schedule="own.csv")
    return found | {"parallel.plan": str(plan)}


@app.command()
def data(
    run: RunFile = "",
    steps: Annotated[str, typer.Option(metavar="A:B", help="Steps A to B-1, from 0.")] = "0:1",
    parallel: Parallel = "",
    set_: Set = [],  # noqa: B006
    debug: Debug = False,
) -> None:
    """Print what the model sees, one JSON line a sequence: the same for every plan."""

    def work() -> None:
        from interlace.config import load
        from interlace.train.data import Dataset, rows, spans_of

        cfg = load(run or None, set_, parallel or None)
        wanted = step_range(steps)
        dataset = Dataset.open(cfg.data, cfg.model_config().vocab_size, cfg.run.seed)
        print("\n".join([dataset.describe(cfg.train.global_batch), *dataset.skipped]), file=sys.stderr)
        spans = spans_of(run, dataset.digest, cfg.train.global_batch)
        for row in rows(dataset, wanted, cfg.train.global_batch, spans):
            print(json.dumps(row))

    guarded(work, debug)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder or a checkpoint.")],
    destination: Annotated[Path, typer.Argument(metavar="FOLDER", help="The Hugging Face folder to write.")],
    dtype: Annotated[str, typer.Option(metavar="fp32|bf16", help="How weights are stored.")] = "fp32",
    debug: Debug = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder: config.json and safetensors."""

    def work() -> None:
        from interlace.train.export import export as write

        write(run, destination, dtype)
        print(f"wrote {destination}")

    guarded(work, debug)


@app.command()
def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder or a checkpoint.")],
    prompt: Annotated[str, typer.Option(help="The text to go on from.")] = "def ",
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to add.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 = always the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Draw among the k likeliest; 0 = among all.")] = 50,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: Device = "cpu",
    debug: Debug = False,
) -> None:
    """Let a trained model write, on one process."""

    def work() -> None:
        from interlace.serve.generate import load, sample_text

        model, words, cfg = load(run, choose_device(device, 1))
        sys.stdout.write(prompt)
        for piece in sample_text(
            model,
            words,
            prompt,
            tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            context=cfg.data.sequence_length,
        ):
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")

    guarded(work, debug)
