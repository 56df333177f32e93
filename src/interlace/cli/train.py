"""Training, and what goes into a run and comes out of it: `train`, `data`, `export`, `generate`."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from interlace import errors
from interlace.cli.failures import error_file, guarded, said_once, told_how_to_go_on
from interlace.cli.options import Debug, Device, Parallel, RunFile, Set, app, step_range
from interlace.cli.start import at_home, check, check_folder, check_room, choose_device, claimed, names_folder, newest

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
                from interlace.train.loop import run as rank_run

                _join(rank_run, cfg.run.timeout, where, {**alike(cfg), "--resume": resume}, argument)
            else:
                world, timeout = cfg.plan.world, cfg.run.timeout
                with told_how_to_go_on(cfg):
                    launch.run_local(
                        "interlace.train.loop:run", world, argument, device=where, timeout=timeout, port=port or None
                    )

    guarded(work, debug)


def _join(
    rank_run: Callable[..., Any], timeout: float, device: str, same: dict[str, str], argument: dict[str, Any]
) -> None:
    """This process is a rank of torchrun or SLURM.  same: what every rank must be told alike, by its key."""
    from interlace import launch

    world = launch.join(timeout, device, same)
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
    prompt: Annotated[
        list[str], typer.Option(help='A text to go on from, "def " when left out; several give a JSON line each.')
    ] = [],  # noqa: B006
    prompts: Annotated[
        str, typer.Option(metavar="FILE.jsonl", help='Prompts from a file, one {"prompt": "..."} a line.')
    ] = "",
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to add to each.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 = always the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Draw among the k likeliest; 0 = among all.")] = 50,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Prompts at a time; it changes no text.")] = 8,
    parallel: Annotated[str, typer.Option("--parallel", "-p", metavar="PLAN", help='For example "tp=2 pp=2".')] = "",
    timeout: Annotated[float, typer.Option(min=0.0, help="Seconds a rank waits for another; 0 = as the run did.")] = 0,
    device: Device = "cpu",
    debug: Debug = False,
) -> None:
    """Let a trained model write, on one process or split over ranks by tp and pp."""

    def work() -> None:
        from interlace import launch
        from interlace.config import ParallelPlan
        from interlace.plan import serving
        from interlace.serve.generate import load, opened
        from interlace.serve.ranks import Asked, pieces, read_prompts
        from interlace.serve.ranks import run as rank_run
        from interlace.world import find_place

        place = find_place()
        with said_once(place):
            if prompt and prompts:
                raise errors.ConfigError(f"--prompt and --prompts {prompts} were both given; leave one of them out.")
            if temperature == float("inf"):
                raise errors.ConfigError("--temperature is inf; write a finite number from 0 on.")
            plan = ParallelPlan.parse(parallel, place.size if place else None)
            texts = read_prompts(Path(prompts)) if prompts else prompt or ["def "]
            asked = Asked(texts, bool(prompts) or len(texts) > 1, tokens, temperature, top_k, seed, batch)
            reader, _, cfg, model_cfg = opened(run)
            serving.check(model_cfg, plan, cfg.data.sequence_length)
            where = choose_device(device, plan.world, place)
            check_room(where, (place.local_size or 1) if place else plan.world)
        limit = timeout or cfg.run.timeout
        argument = {"checkpoint": str(reader.folder), "plan": str(plan), "asked": asdict(asked), "timeout": limit}
        if place is not None:
            same = {"--parallel": str(plan), "the checkpoint": reader.folder.name, "prompts or options": str(asked)}
            _join(rank_run, limit, where, same, argument)
        elif plan.world > 1:
            launch.run_local("interlace.serve.ranks:run", plan.world, argument, device=where, timeout=limit)
        else:
            model, words, _ = load(reader.folder, where)
            for piece in pieces(model, words, asked, cfg.data.sequence_length):
                sys.stdout.write(piece)
                sys.stdout.flush()

    guarded(work, debug)
