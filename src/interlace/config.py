"""What a run is: frozen sections read from TOML, dotted overrides, and back to TOML.

    cfg = load("run.toml", overrides=["train.steps=50"], parallel="dp=2 zero=3", world=2)
    loads(cfg.to_toml()) == cfg

Only forms are checked here (`forms`: known keys, types, ranges), and fields of one section that contradict each other.
Whether a plan divides and fits the machine is `plan.fit`.  A run file's `[model] preset` may bring defaults for
the other sections; what the run file or an override says wins, key by key.
"""

from __future__ import annotations

import functools
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from interlace import hf_config
from interlace.errors import ConfigError, PlanError, nearest
from interlace.forms import (
    Above0,
    Amount,
    Count,
    OneOf,
    Positive,
    Probability,
    Range,
    Section,
    Text,
    as_table,
    checked,
    closest,
    rules,
    show,
    toml,
    typed,
    unknown,
)
from interlace.model_config import ModelConfig as ModelConfig  # names of this module too
from interlace.model_config import RopeScaling as RopeScaling

PRESETS = Path(__file__).parent / "models" / "presets"

Precision = Annotated[str, OneOf(("fp32", "bf16"))]


# --- the plan: how it is split -------------------------------------------------------------------------------------

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "v-half", "dualpipev")
AXES = ("dp", "tp", "pp", "cp", "ep")


@dataclass(frozen=True)
class ParallelPlan(Section):
    """How a run is split over ranks; the string of `--parallel`, e.g. "dp=2 tp=2 zero=3 micro_batches=8".

    `micro_batches` counts per data-parallel replica; `micro_batch_size` (sequences) 0 = what follows from it;
    `shard` is the inner group of hybrid sharding, 0 = off; `chunks` are virtual pipeline stages per rank; `schedule`
    may be a CSV file; `layers` is how many each stage has ("8/8/7/7"), chosen by cost when left out; `unsharded` is how
    many stages of a rank may be whole at a time under zero=3, 0 = each from its first use to its last.  `reduce`:
    gradients travel once a step, added up whole until then, or after each micro-batch, so that ZeRO-2 and 3 keep shards
    alone.  `sequence` splits what lies between the products over `tp` too: norms, residual, dropout.  `exchange` is how
    attention reaches keys of other `cp` ranks: from rank to rank, some heads of all at a time, or by dealing out heads;
    auto = what sends least.
    `expert_halves` cuts the rows of a layer of experts in two over `ep`, so that one half travels while the other is
    multiplied; `expert_room` is what the fused exchange has memory for at first, in times of the even rows.
    `overlap`: off lets every transfer run by itself; otherwise they run beside products, and those of `tp` as plain
    collectives (plain), by the best fused kernel (fused), or fused where the device's table says that it wins (auto);
    rows of experts by all-to-all (plain), by the fused exchange (fused), or by that where it pays on GPUs (auto).
    """

    _place: ClassVar[str] = ""
    _error: ClassVar[type[ConfigError]] = PlanError

    dp: Positive = 1
    tp: Positive = 1
    pp: Positive = 1
    cp: Positive = 1
    ep: Positive = 1
    zero: Annotated[int, OneOf((0, 1, 2, 3))] = 0
    shard: Count = 0
    schedule: Text = "1f1b"
    chunks: Positive = 1
    layers: str = ""
    unsharded: Count = 0
    micro_batches: Positive = 1
    micro_batch_size: Count = 0
    reduce: Annotated[str, OneOf(("step", "micro_batch"))] = "step"
    recompute: Annotated[str, OneOf(("none", "selective", "full"))] = "none"
    overlap: Annotated[str, OneOf(("auto", "plain", "fused", "off"))] = "auto"
    transport: Annotated[str, OneOf(("auto", "library", "copy"))] = "auto"
    sequence: Annotated[str, OneOf(("on", "off"))] = "on"
    exchange: Annotated[str, OneOf(("auto", "ring", "gather", "ulysses"))] = "auto"
    expert_halves: Annotated[str, OneOf(("on", "off"))] = "off"
    expert_room: Annotated[float, Range(low=1)] = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        is_file = self.schedule.endswith(".csv") and not re.search(r"\s", self.schedule)
        if self.schedule not in SCHEDULES and not is_file:
            within = (name for name in SCHEDULES if name in self.schedule.lower())
            near = nearest(self.schedule, SCHEDULES) or next(within, "1f1b")
            raise PlanError(
                f"schedule must be one of {', '.join(SCHEDULES)} or a .csv file without spaces in its name, "
                f"found {self.schedule}: nearest is {near}"
            )
        if not re.fullmatch(r"([0-9]{1,6}(/[0-9]{1,6})*)?", self.layers):
            raise PlanError(f"layers must be a number for each stage, as in layers=8/8/7/7, found {self.layers}")

    @property
    def world(self) -> int:
        """Ranks that the plan needs: dp x tp x pp x cp (ep folds dp and cp, it is no factor)."""
        return self.dp * self.tp * self.pp * self.cp

    @classmethod
    def parse(cls, text: str, world: int | None = None) -> ParallelPlan:
        """A plan from "key=value key=value"; with `world`, an omitted dp fills it.  PlanError on anything else."""
        values: dict[str, Any] = {}
        hints = rules(cls)
        for word in text.split():
            key, equals, value = word.partition("=")
            if any(f"{mark}{other}=" in value for mark in ",;" for other in hints):
                raise PlanError(f'the parallel plan "{text}" has no space before each key: write "key=value key=value"')
            if key not in hints:
                raise unknown("key", key, list(hints), f'the parallel plan "{text}"', PlanError)
            if not equals or not value:
                raise PlanError(f'{key} has no value in the parallel plan "{text}": write {key}=VALUE')
            if key in values:
                raise PlanError(f'{key} is given twice in the parallel plan "{text}"')
            values[key] = checked(typed(value, hints[key]), hints[key], key, PlanError)
        if world is not None and "dp" not in values:
            plan = cls(**values)
            if world % plan.world:
                raise PlanError(
                    f'the parallel plan "{text}" needs a multiple of {plan.world} ranks, found {world}: '
                    f"nearest is {max(plan.world, world - world % plan.world)} ranks"
                )
            values["dp"] = world // plan.world
        return cls(**values)

    def __str__(self) -> str:
        words = [f"{f.name}={value}" for f in fields(self) if (value := getattr(self, f.name)) != f.default]
        return " ".join(words) or "dp=1"


# --- the other sections --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelSection(Section):
    """`[model]`: a preset's name, or a Hugging Face folder (TOML key `from`), or neither; `dims` are ModelConfig fields
    that win over both."""

    _place: ClassVar[str] = "model"

    preset: str = ""
    from_: str = ""
    dims: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checked(self.preset, str, "model.preset")
        checked(self.from_, str, "model.from")
        if self.from_.startswith("~"):  # no shell has seen a run file
            object.__setattr__(self, "from_", os.path.expanduser(self.from_))
        if self.preset and self.from_:
            raise ConfigError(
                f'[model] takes preset or from, found both preset = "{self.preset}" and from = "{self.from_}"'
                "; take one out (--set model.preset= does, that of a command without a run file too)"
            )
        hints = rules(ModelConfig)
        for key in self.dims:
            if key not in hints:
                raise unknown("key", key, ["preset", "from", *hints], "[model]")
        dims = {key: checked(self.dims[key], hint, f"model.{key}") for key, hint in hints.items() if key in self.dims}
        object.__setattr__(self, "dims", dims)

    @classmethod
    def of(cls, table: Any) -> Self:
        if not isinstance(table, Mapping):
            raise ConfigError(f"model must be a table, found {show(table)}")
        dims = dict(table)
        return cls(preset=dims.pop("preset", ""), from_=dims.pop("from", ""), dims=dims)

    @functools.cached_property
    def resolved(self) -> ModelConfig:
        """The preset or Hugging Face folder, then `dims` on top.

        Without either, num_kv_heads defaults to num_heads and head_dim to hidden_size / num_heads.
        """
        dims: dict[str, Any] = {}
        if self.preset:
            dims = dict(preset(self.preset)["model"])
        elif self.from_:
            read = hf_config.read(self.from_)
            dims = {name: getattr(read, name) for name in rules(ModelConfig)}
        dims |= self.dims
        if not self.preset and not self.from_:
            if "num_heads" in dims:
                dims.setdefault("num_kv_heads", dims["num_heads"])
            if "hidden_size" in dims and "num_heads" in dims and "head_dim" not in dims:
                dims["head_dim"] = _head_dim(dims["hidden_size"], dims["num_heads"])
            if not dims:
                raise ConfigError(
                    "[model] is empty: give preset = NAME, from = FOLDER or dimensions; "
                    f"presets are {', '.join(preset_names())}"
                )
        return ModelConfig.of(dims)


def _head_dim(hidden: int, heads: int) -> int:
    if hidden % heads:
        near = closest(heads, [n for n in range(1, min(hidden, 2 * heads) + 1) if hidden % n == 0])
        raise ConfigError(
            f"[model] lacks head_dim, which is hidden_size / num_heads where these divide, and found {hidden} / "
            f"{heads}: give head_dim, or the nearest num_heads, {near}"
        )
    return hidden // heads


@dataclass(frozen=True)
class DataSection(Section):
    """`[data]`: what text, how it is cut; `sequence_length` in positions, `field` the text's key in .jsonl lines."""

    _place: ClassVar[str] = "data"

    source: Text = "corpus"
    field: Text = "text"
    tokenizer: Text = "bytes"
    sequence_length: Positive = 256
    documents: Annotated[str, OneOf(("separate", "joined"))] = "separate"
    shuffle: bool = True
    drop_last: bool = False
    skip_bad_lines: bool = False


@dataclass(frozen=True)
class TrainSection(Section):
    """`[train]`: `global_batch` in sequences; `epochs` 0 = by `steps`; `decay` 0 = a fifth of the steps ("wsd" only);
    `clip` 0 = off.

    graphs: compiled blocks are replayed as CUDA graphs, which costs the host less; on GPUs, of dense models, without a
    pipeline and a context axis, with documents joined; elsewhere blocks are compiled only, and a note says why.
    """

    _place: ClassVar[str] = "train"

    steps: Annotated[int, Range(low=1, most=10**12)] = 200
    epochs: Annotated[int, Range(low=0, most=10**9)] = 0
    global_batch: Annotated[int, Range(low=1, most=10**8)] = 32
    optimizer: Annotated[str, OneOf(("adamw", "sgd"))] = "adamw"
    learning_rate: Above0 = 3e-4
    min_learning_rate: Amount = 0.0
    lr_schedule: Annotated[str, OneOf(("cosine", "wsd", "constant"))] = "cosine"
    warmup: Count = 20
    decay: Count = 0
    weight_decay: Amount = 0.1
    betas: tuple[Probability, Probability] = (0.9, 0.95)
    eps: Above0 = 1e-8
    momentum: Probability = 0.0
    clip: Amount = 1.0
    precision: Precision = "fp32"
    reduce_dtype: Precision = "fp32"
    compile: bool = False
    graphs: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.graphs and not self.compile:
            raise ConfigError(
                "train.graphs=true replays compiled blocks, found train.compile=false; set it to true too"
            )
        if self.min_learning_rate > self.learning_rate:
            raise ConfigError(
                f"train.min_learning_rate must be at most learning_rate {self.learning_rate:g}, "
                f"found {self.min_learning_rate:g}"
            )

    @property
    def itemsize(self) -> int:
        """Bytes of a number that computes."""
        return 2 if self.precision == "bf16" else 4


@dataclass(frozen=True)
class RunSection(Section):
    """`[run]`: `save_every` 0 = only at the end, `keep` 0 = all checkpoints, `timeout` in seconds limits every wait.

    contention_every: one step in so many waits for each transfer at once, which tells how much slower the others
    compute beside theirs; on GPUs, without a pipeline; 0 = none does.
    """

    _place: ClassVar[str] = "run"

    out: Text = "runs/demo"
    seed: Annotated[int, Range(low=0, below=2**63)] = 0
    save_every: Count = 50
    keep: Count = 0
    log_every: Positive = 1
    timeout: Annotated[float, Range(above=0, most=1e8)] = 60.0
    deterministic: bool = False
    reproducible: Annotated[str, OneOf(("none", "plan"))] = "none"
    tensorboard: bool = False
    contention_every: Count = 100


_SECTIONS: dict[str, type[Section]] = {
    "model": ModelSection,
    "data": DataSection,
    "train": TrainSection,
    "run": RunSection,
}
_KEYS: dict[str, list[str]] = {
    "model": ["preset", "from", *rules(ModelConfig)],
    "parallel": ["plan"],
    **{name: list(rules(_SECTIONS[name])) for name in ("data", "train", "run")},
}


@dataclass(frozen=True)
class Config:
    """One run: what, how it is split, on what, how, and where to."""

    model: ModelSection = field(default_factory=ModelSection)
    plan: ParallelPlan = field(default_factory=ParallelPlan)
    data: DataSection = field(default_factory=DataSection)
    train: TrainSection = field(default_factory=TrainSection)
    run: RunSection = field(default_factory=RunSection)

    def model_config(self) -> ModelConfig:
        """The resolved dimensions."""
        return self.model.resolved

    def to_toml(self) -> str:
        """The whole run file, every key as used: `loads(cfg.to_toml()) == cfg`."""
        model: dict[str, Any] = {"preset": self.model.preset} if self.model.preset else {}
        if self.model.from_:
            model["from"] = self.model.from_
        tables = {
            "model": model | dict(self.model.dims),
            "parallel": {"plan": str(self.plan)},
            **{name: as_table(getattr(self, name)) for name in ("data", "train", "run")},
        }
        return "\n".join(
            f"[{name}]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in table.items())
            for name, table in tables.items()
        )


# --- reading and writing -------------------------------------------------------------------------------------------


def load(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    parallel: str | None = None,
    world: int | None = None,
    preset: str = "demo",
) -> Config:
    """A run file, then `overrides` ("train.steps=50"), then `parallel` (replaces the plan).

    path: None = a run file that says only `[model] preset = PRESET`.
    world: ranks at hand; a plan without dp fills them.
    Errors: ConfigError, one sentence with the file and, for syntax, the line.
    """
    if path is None:
        return loads(f"[model]\npreset = {toml(preset)}\n", overrides, parallel, world, where=f"preset {preset}")
    return loads(_read(Path(path), "run file"), overrides, parallel, world, where=str(path))


def loads(
    text: str,
    overrides: Sequence[str] = (),
    parallel: str | None = None,
    world: int | None = None,
    where: str = "run file",
) -> Config:
    """`load` from the text of a run file; `where` names it in errors."""
    tables = _parse(text, where)
    for override in overrides:
        section, key, value = _override(override)
        tables[section][key] = value
    model = ModelSection.of(tables["model"])
    if model.preset:
        for name, defaults in preset(model.preset).items():
            if name != "model":
                tables[name] = {**defaults, **tables[name]}
    plan = parallel if parallel is not None else checked(tables["parallel"].get("plan", ""), str, "parallel.plan")
    return Config(
        model=model,
        plan=ParallelPlan.parse(plan, world),
        data=DataSection.of(tables["data"]),
        train=TrainSection.of(tables["train"]),
        run=RunSection.of(tables["run"]),
    )


def preset_names() -> tuple[str, ...]:
    """Names that `[model] preset` takes."""
    return tuple(sorted(path.stem for path in PRESETS.glob("*.toml")))


def preset(name: str) -> dict[str, dict[str, Any]]:
    """A preset's tables: `model` with all dimensions, and defaults for other sections."""
    if name not in preset_names():
        raise unknown("preset", name, preset_names(), "[model]")
    return _parse(_read(PRESETS / f"{name}.toml", "preset"), f"preset {name}")


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte-order mark
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} {path} must be UTF-8 text, found byte {error.object[error.start]:#x}") from None
    except OSError as error:
        hint = f"; the preset of that name is model.preset={path}" if str(path) in preset_names() else ""
        raise ConfigError(f"cannot read {what} {path}: {(error.strerror or str(error)).lower()}{hint}") from None


def _parse(text: str, where: str) -> dict[str, dict[str, Any]]:
    """TOML text -> every section's table (empty where absent), names checked."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        at = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", message)
        what = message[: at.start()] if at else message
        line = at[1] if at and at[1] else str(max(1, len(text.rstrip().splitlines())))
        column = f", column {at[2]}" if at and at[2] else ""
        raise ConfigError(f"{where}, line {line}{column}: {what[:1].lower()}{what[1:]}") from None
    except RecursionError:
        raise ConfigError(f"{where}: values are nested too deeply for a run file") from None
    for name, table in raw.items():
        if name not in _KEYS:
            raise unknown("section", name, list(_KEYS), where)
        if not isinstance(table, dict):
            raise ConfigError(f"{where}: {name} must be a section [{name}], found {show(table)}")
        for key in table:
            _known(name, key, where)
    return {name: dict(raw.get(name, {})) for name in _KEYS}


def _known(section: str, key: str, where: str) -> None:
    """Refuses a key that the section lacks, naming where it belongs or the nearest one."""
    if key in _KEYS[section]:
        return
    if section == "parallel" and key in rules(ParallelPlan):
        raise ConfigError(f'unknown key {key} in [parallel] of {where}: write plan = "{key}=VALUE"')
    for other, keys in _KEYS.items():
        if key in keys:
            raise ConfigError(f"unknown key {key} in [{section}] of {where}: it belongs to [{other}]")
    raise unknown("key", key, _KEYS[section], f"[{section}] of {where}")


def _override(text: str) -> tuple[str, str, Any]:
    """ "train.steps=50" -> ("train", "steps", 50), typed by the field it names."""
    path, equals, value = text.partition("=")
    section, dot, key = path.strip().partition(".")
    where = f'the override "{text}"'
    if not equals or not dot or not key:
        raise ConfigError(f'cannot read {where}: write SECTION.KEY=VALUE, for example "train.steps=50"')
    if section not in _KEYS:
        raise unknown("section", section, list(_KEYS), where)
    if key.startswith("rope_scaling."):
        raise ConfigError(
            f"cannot read {where}: give the whole table, "
            'for example model.rope_scaling={type = "linear", factor = 4.0}'
        )
    _known(section, key, where)
    if section == "model":
        hint = rules(ModelConfig).get(key, str)
    else:
        hint = str if section == "parallel" else rules(_SECTIONS[section])[key]
    return section, key, checked(typed(value.strip(), hint), hint, f"{section}.{key}")
