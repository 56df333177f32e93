"""Before any process starts: what cannot run is refused, and a run finds its folder and devices."""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from interlace import errors
from interlace.cli.options import AXES

if TYPE_CHECKING:
    from interlace.config import Config
    from interlace.plan.overlap import Chooser
    from interlace.world import Place


PROCESS = 160 << 20  # bytes of its own that a process with PyTorch loaded takes at least


def check(cfg: Config, device: str, place: Place | None = None) -> None:
    """Refuses what cannot run, in one sentence with the nearest that can.  `place`: where a launcher has put us."""
    from interlace.plan import fit

    if cfg.run.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise errors.ConfigError("run.tensorboard = true needs TensorBoard; install interlace[tensorboard].")
    if cfg.train.compile and device == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):
        raise errors.ConfigError("train.compile = true needs a C++ compiler on the CPU; install g++, or leave it out.")
    ranks = place.size if place else cfg.plan.world
    local = (place.local_size or 1) if place else ranks
    memory = check_room(device, local)
    fit.check(cfg, ranks, memory, AXES, device, _ways(cfg, device))


def check_room(device: str, local: int) -> int | None:
    """Bytes that each of `local` ranks on this machine may use, or None when it cannot be known; refuses processes that
    do not even start."""
    memory = _memory_per_rank(device, local)
    if device == "cpu" and memory is not None and memory < PROCESS:
        free, most = memory * local, memory * local // PROCESS
        raise errors.ResourceError(
            f"{local} ranks on this machine of {free / 2**30:.1f} GiB free memory, of which a process takes about "
            f"{PROCESS >> 20} MiB before any model; use at most {most} here, or more machines."
        )
    return memory


def check_folder(cfg: Config, resume: str) -> None:
    """Refuses to mix a new run, or one that goes on from elsewhere, with the checkpoints of another."""
    from interlace.train import state

    out = Path(cfg.run.out)
    folder, _ = state.find_checkpoint(cfg, resume)
    own = folder is not None and state.is_own(cfg, folder)
    names = [path.name for path in (out / "checkpoints").glob("step-*")]
    made = [int(match[1]) for match in (re.fullmatch(r"step-(\d+)(\.old)?", name) for name in names) if match]
    if made and not own:
        raise errors.ConfigError(
            f"{out} already holds checkpoints (step-{max(made)}); go on with --resume auto, or choose another folder "
            f"with --set run.out={_free(out)}."
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise _cannot_write(out, error) from None


def _free(out: Path) -> Path:
    return next(place for place in _numbered(out) if not place.exists())


def _numbered(out: Path) -> Iterator[Path]:
    """runs/demo, runs/demo-2, runs/demo-3, ..."""
    yield out
    for number in itertools.count(2):
        yield out.with_name(f"{out.name}-{number}")


def names_folder(run: str, set_: Sequence[str]) -> bool:
    """Whether the run file or an override says where the run goes."""
    if any(override.partition("=")[0].strip() == "run.out" for override in set_):
        return True
    return bool(run) and "out" in tomllib.loads(Path(run).read_text(encoding="utf-8")).get("run", {})


def claimed(cfg: Config) -> Config:
    """The configuration with a folder that this run alone has made: the usual one, or the next number that is free.

    So two runs started at once with defaults do not meet in one folder.
    """
    out = Path(cfg.run.out)
    for place in _numbered(out):
        with contextlib.suppress(OSError):  # a run that failed before its first step leaves nothing to keep
            if os.listdir(place) == ["error.json"]:  # an empty one may just have been made by another run
                shutil.rmtree(place)
        try:
            place.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise _cannot_write(place, error) from None
        if place != out:
            print(f"{out} is another run's folder; this one writes to {place}", file=sys.stderr)
        return replace(cfg, run=replace(cfg.run, out=str(place)))
    raise AssertionError("numbers do not end")


def newest(cfg: Config) -> Config:
    """The configuration with the folder, of those that runs without a name of their own have made, saved to last."""
    out = Path(cfg.run.out)
    saved = [
        (step.stat().st_mtime, place)
        for place in out.parent.glob(f"{glob.escape(out.name)}*")
        if re.fullmatch(rf"{re.escape(out.name)}(-\d+)?", place.name)
        for step in (place / "checkpoints").glob("step-*[0-9]")
    ]
    place = max(saved)[1] if saved else out
    if place != out:
        print(f"going on in {place}, the newest of the runs beside {out}", file=sys.stderr)
    return replace(cfg, run=replace(cfg.run, out=str(place)))


def at_home(cfg: Config) -> Config:
    """The configuration with "~" at the head of run.out as the user's folder, as a shell would have it."""
    return replace(cfg, run=replace(cfg.run, out=str(Path(cfg.run.out).expanduser())))


def _cannot_write(out: Path, error: OSError) -> errors.ResourceError:
    reason = error.strerror or str(error)
    return errors.ResourceError(f"cannot write to {out} ({reason}); choose another folder with --set run.out=FOLDER.")


def choose_device(asked: str, ranks: int, place: Place | None = None) -> str:
    """ "cpu" or "cuda"; "auto" takes GPUs when there are enough for the ranks on this machine."""
    from interlace.world import choose_device as choose

    rank, size = (place.local_rank, place.local_size) if place else (0, ranks)
    return choose(asked, rank, size).type


def _ways(cfg: Config, device: str) -> Chooser | None:
    """How products of tp run by the table of this machine's GPU; None where there is nothing to choose."""
    if device != "cuda" or cfg.plan.tp == 1 or cfg.plan.overlap != "auto":
        return None
    from interlace.kernels import tune

    name = next(iter(_ask_driver("name")), "")
    return tune.planned(name, "bf16" if cfg.train.precision == "bf16" else "fp32")


def _ask_driver(what: str) -> list[str]:
    """A property of every GPU, without a context on one of them; nothing where the driver's tool does not answer."""
    query = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in found.splitlines()]


def _memory_per_rank(device: str, local_ranks: int) -> int | None:
    """Bytes that a rank may use, or None when it cannot be known."""
    if device == "cuda":
        try:
            return min(int(value) for value in _ask_driver("memory.total")) << 20
        except ValueError:
            return None
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        return (kib << 10) // local_ranks
    except (OSError, StopIteration, ValueError):
        return None
