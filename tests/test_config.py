"""Run files: layers of defaults, overrides, refusals in one sentence, and the round trip through TOML."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace import config
from interlace.config import (
    Config,
    DataSection,
    ModelConfig,
    ModelSection,
    ParallelPlan,
    RopeScaling,
    RunSection,
    TrainSection,
    load,
    loads,
)
from interlace.errors import ConfigError, PlanError

DIMS = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_layers": 3,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 4,
    "ffn_size": 40,
}


# --- round trip ----------------------------------------------------------------------------------------------------

text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12)
count = st.integers(0, 2**40)
positive = st.integers(1, 2**40)
above0 = st.floats(1e-300, 1e300)
share = st.floats(0, 1, exclude_max=True)

scalings = st.builds(
    RopeScaling,
    type=st.sampled_from(["llama3", "linear", "yarn"]),
    factor=st.floats(1, 1e6),
    low_freq_factor=st.floats(0.5, 1),
    high_freq_factor=st.floats(2, 8),
    original_max_position_embeddings=positive,
    attention_factor=st.none() | above0,
    mscale=st.none() | share,
    mscale_all_dim=st.none() | share,
    truncate=st.booleans(),
)
dims = st.fixed_dictionaries(
    {},
    optional={
        "num_layers": st.integers(1, 10_000),
        "norm": st.sampled_from(["rmsnorm", "layernorm"]),
        "rope_theta": above0,
        "rope_scaling": st.none() | scalings,
        "sliding_window": st.none() | positive,
        "window_layers": st.none() | st.lists(count, max_size=4).map(tuple),
        "attention_sinks": st.booleans(),
        "sink_tokens": count,
        "tie_embeddings": st.booleans(),
        "dropout": share,
    },
)
plans = st.builds(
    ParallelPlan,
    dp=positive,
    tp=positive,
    zero=st.integers(0, 3),
    shard=count,
    schedule=st.sampled_from([*config.SCHEDULES, "own/table.csv"]),
    micro_batches=positive,
    micro_batch_size=count,
    recompute=st.sampled_from(["none", "selective", "full"]),
    overlap=st.sampled_from(["auto", "plain", "fused", "off"]),
    transport=st.sampled_from(["auto", "library", "copy"]),
)
configs = st.builds(
    Config,
    model=st.one_of(
        st.builds(ModelSection, preset=st.sampled_from(["", *config.preset_names()]), dims=dims),
        st.builds(ModelSection, from_=text, dims=dims),
    ),
    plan=plans,
    data=st.builds(DataSection, source=text, field=text, sequence_length=positive, shuffle=st.booleans()),
    train=st.builds(
        TrainSection,
        steps=st.integers(1, 10**12),
        learning_rate=st.floats(1e-3, 10),
        min_learning_rate=st.floats(0, 1e-3),
        betas=st.tuples(share, share),
        eps=above0,
        precision=st.sampled_from(["fp32", "bf16"]),
    ),
    run=st.builds(
        RunSection, out=text, seed=st.integers(0, 2**63 - 1), timeout=st.floats(1e-300, 1e8), tensorboard=st.booleans()
    ),
)


@given(configs)
@settings(max_examples=60)
def test_toml_round_trip(cfg: Config) -> None:
    assert loads(cfg.to_toml()) == cfg


@given(plans)
def test_plan_round_trip(plan: ParallelPlan) -> None:
    assert ParallelPlan.parse(str(plan)) == plan


def test_to_toml_writes_every_key() -> None:
    tables = tomllib.loads(load(None).to_toml())
    assert set(tables) == {"model", "parallel", "data", "train", "run"}
    for name, section in (("data", DataSection), ("train", TrainSection), ("run", RunSection)):
        assert list(tables[name]) == [field.name for field in dataclasses.fields(section)]


# --- layers: preset, file, override, --parallel --------------------------------------------------------------------


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b'\xef\xbb\xbf[model]\r\npreset = "tiny"\r\n')
    assert load(path).model.preset == "tiny"


def test_without_a_file_the_demo_runs() -> None:
    cfg = load(None)
    assert (cfg.model.preset, str(cfg.plan)) == ("demo", "dp=2 tp=2")
    assert load(None, preset="tiny").model_config().hidden_size == 64


def test_file_wins_over_preset_and_override_over_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model]\npreset = "demo"\n[train]\nglobal_batch = 8\nwarmup = 3\n', encoding="utf-8")
    cfg = load(path, overrides=["train.warmup=5", "model.num_layers=4", "run.out=a b"])
    expected = (config.preset("demo")["train"]["steps"], 8, 5)  # preset, file, override
    assert (cfg.train.steps, cfg.train.global_batch, cfg.train.warmup) == expected
    assert cfg.run.out == "a b"
    assert cfg.model_config().num_layers == 4
    assert str(cfg.plan) == "dp=2 tp=2"
    assert str(load(path, parallel="tp=2", world=6).plan) == "dp=3 tp=2"
    assert str(load(path, overrides=["parallel.plan=dp=2 zero=1"]).plan) == "dp=2 zero=1"


def test_a_preset_named_by_an_override_brings_its_defaults() -> None:
    cfg = loads("", overrides=["model.preset=tiny"])
    assert (cfg.data.sequence_length, cfg.train.global_batch) == (64, 16)


def test_override_types() -> None:
    cfg = loads(
        "",
        overrides=[
            "train.betas=[0.8, 0.9]",
            "train.clip=0",
            'data.source="quoted # text"',
            "data.field=true",
            "run.deterministic=true",
            "model.sliding_window=none",
            'model.rope_scaling={type = "linear", factor = 4}',
        ],
    )
    assert cfg.train.betas == (0.8, 0.9)
    assert isinstance(cfg.train.clip, float)
    assert (cfg.data.source, cfg.data.field) == ("quoted # text", "true")
    assert cfg.run.deterministic is True
    assert cfg.model.dims == {"sliding_window": None, "rope_scaling": RopeScaling("linear", 4.0)}


def test_dimensions_without_a_preset() -> None:
    lines = [f"{key} = {value}" for key, value in DIMS.items() if key not in ("num_kv_heads", "head_dim")]
    model = loads("[model]\n" + "\n".join(lines)).model_config()
    assert (model.num_kv_heads, model.head_dim) == (6, 4)
    with pytest.raises(ConfigError, match=r"\[model\] lacks head_dim, .* found 24 / 5: give .* nearest num_heads, 4"):
        loads("[model]\n" + "\n".join(lines).replace("num_heads = 6", "num_heads = 5")).model_config()
    with pytest.raises(ConfigError, match=r"\[model\] lacks .*vocab_size"):
        loads("[model]\nnum_layers = 2").model_config()
    with pytest.raises(ConfigError, match=r"\[model\] is empty: .*presets are .*tiny"):
        loads("").model_config()


def test_every_preset_is_whole() -> None:
    names = {"tiny", "demo", "1.2b", "8b", "llama-3.1-8b", "qwen3-0.6b", "qwen3-8b", "13b"}
    names |= {"deepseek-v2-lite", "tiny-deepseek"}
    assert set(config.preset_names()) == names
    for name in config.preset_names():
        cfg = load(None, preset=name)
        assert isinstance(cfg.model_config(), ModelConfig)
        assert cfg.data.sequence_length <= cfg.model_config().max_positions
    assert load(None, preset="llama-3.1-8b").model_config().rope_scaling == RopeScaling(
        "llama3", 8.0, original_max_position_embeddings=8192
    )


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[trian]\nsteps = 1", "unknown section trian in run.toml: did you mean train?"),
        ("[train]\nstep = 1", "unknown key step in [train] of run.toml: did you mean steps?"),
        ("[train]\nseed = 1", "unknown key seed in [train] of run.toml: it belongs to [run]"),
        ("[parallel]\ndp = 2", 'unknown key dp in [parallel] of run.toml: write plan = "dp=VALUE"'),
        ("[model]\nlayers = 2", "unknown key layers in [model] of run.toml: did you mean num_layers?"),
        ("train = 1", "run.toml: train must be a section [train], found 1 (integer)"),
        ("[train]\nsteps = = 1", "run.toml, line 2, column 9: invalid value"),
        ("[train]\nsteps = 1\nsteps = 2", "run.toml, line 3: cannot overwrite a value"),
        ("[train]\nsteps = 0", "train.steps must be an integer of at least 1, found 0 (integer)"),
        ("[train]\nsteps = true", "train.steps must be an integer of at least 1, found true (truth value)"),
        ("[train]\nsteps = 2.0", "train.steps must be an integer of at least 1, found 2.0 (number)"),
        ("[train]\nlearning_rate = nan", "train.learning_rate must be a number above 0, found nan (number)"),
        ("[train]\nlearning_rate = 1e-4\nmin_learning_rate = 1", "train.min_learning_rate must be at most"),
        (
            '[train]\noptimizer = "adam"',
            'train.optimizer must be one of adamw, sgd, found "adam" (string); nearest is adamw',
        ),
        (
            "[train]\nbetas = [0.9]",
            "train.betas must be a list of 2 values, each a number of at least 0 and below 1, found [0.9]",
        ),
        (
            "[train]\nsteps = 1000000000001",
            "train.steps must be an integer of at least 1 and at most 1e+12, found 1000000000001",
        ),
        (
            "[train]\nglobal_batch = 100000001",
            "train.global_batch must be an integer of at least 1 and at most 1e+08, found",
        ),
        ("[train]\nepochs = 1000000001", "train.epochs must be an integer of at least 0 and at most 1e+09, found"),
        (
            "[model]\nnum_layers = 10001",
            "model.num_layers must be an integer of at least 1 and at most 10000, found 10001",
        ),
        ("[run]\ntimeout = 1e300", "run.timeout must be a number above 0 and at most 1e+08, found 1e+300 (number)"),
        ('[run]\nout = "a\\u0000b"', "run.out must be a string that is not empty and holds no NUL, found "),
        ('[model]\nfrom = "a\\u0000b"', "model.from must be a string and holds no NUL, found "),
        ('[data]\nsource = ""', 'data.source must be a string that is not empty, found "" (string)'),
        ("[run]\ndeterministic = 1", "run.deterministic must be true or false, found 1 (integer)"),
        ('[model]\npreset = "tny"', "unknown preset tny in [model]: did you mean tiny?"),
        ('[model]\npreset = "tiny"\nfrom = "x"', '[model] takes preset or from, found both preset = "tiny"'),
        ('[model]\nrope_scaling = {type = "ntk", factor = 2}', "model.rope_scaling.type must be one of llama3, linear"),
        ("[model]\nrope_scaling = {factor = 2}", "[model.rope_scaling] lacks type"),
        ("[parallel]\nplan = 4", "parallel.plan must be a string, found 4 (integer)"),
    ],
)
def test_refusals_of_a_run_file(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loads(text, where="run.toml")
    assert caught.value.message.startswith(sentence)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("steps", 'cannot read the override "steps": write SECTION.KEY=VALUE'),
        ("train.stesp=1", "unknown key stesp in [train] of the override"),
        ("train.steps=fifty", 'train.steps must be an integer of at least 1, found "fifty" (string)'),
        ("train.steps=1\nclip=2", "train.steps must be an integer"),
        ("model.rope_scaling.factor=2", "cannot read the override"),
    ],
)
def test_refusals_of_an_override(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, overrides=[override])
    assert caught.value.message.startswith(sentence)


def test_a_folder_in_place_of_the_preset_that_a_command_takes_by_itself(tmp_path: Path) -> None:
    """Its refusal names the override that helps, and that one does."""
    config = {"model_type": "llama", "vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "intermediate_size": 24}
    (tmp_path / "config.json").write_text(json.dumps(config))
    override = f"model.from={tmp_path}"
    with pytest.raises(ConfigError, match=r"found both preset = .*take one out \(--set model\.preset= does"):
        load(None, overrides=[override])
    assert load(None, overrides=["model.preset=", override]).model_config().num_layers == 2


def test_the_users_own_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    found = load(None, overrides=["model.preset=", "model.from=~/weights"])
    assert found.model.from_ == str(tmp_path / "weights")
    assert loads(found.to_toml()) == found


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot read run file tiny: .*model\.preset=tiny"):
        load("tiny")
    with pytest.raises(ConfigError, match=r"cannot read run file \.: is a directory"):
        load(".")
    Path("latin.toml").write_bytes(b"[run]\nout = '\xe9'\n")
    with pytest.raises(ConfigError, match=r"latin\.toml must be UTF-8 text, found byte 0xe9"):
        load("latin.toml")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_kv_heads": 4}, "model.num_kv_heads must divide num_heads 6, found 4: nearest is 3"),
        ({"head_dim": 5}, "model.head_dim must be even for rotary positions, found 5: nearest is 6"),
        ({"dropout": 1.0}, "model.dropout must be a number of at least 0 and below 1"),
        ({"num_experts": 4}, "model.expert_ffn_size must be at least 1 with num_experts 4, found 0"),
        ({"num_experts": 1, "expert_ffn_size": 8}, "model.experts_per_token must be at most num_experts 1, found 2"),
        ({"num_experts": 4, "expert_ffn_size": 8, "activation": "gelu"}, "model.num_experts 4 needs activation"),
        ({"num_experts": 4, "expert_ffn_size": 8, "mlp_bias": True}, "model.num_experts 4 needs activation"),
        ({"window_layers": (0,)}, "model.window_layers needs model.sliding_window"),
        ({"sliding_window": 4, "window_layers": (1, 3)}, "model.window_layers must be rising layer numbers below"),
        ({"dense_layers": (0,)}, "model.dense_layers [0] needs model.num_experts of at least 1, found 0"),
        (
            {"num_experts": 2, "expert_ffn_size": 8, "dense_layers": (2, 1)},
            "model.dense_layers must be rising layer numbers below num_layers 3, found [2, 1]",
        ),
        (
            {"num_experts": 2, "expert_ffn_size": 8, "dense_layers": (0, 1, 2)},
            "model.dense_layers leaves none of 3 layers to model.num_experts 2",
        ),
        (
            {"rotary_dim": 8},
            "model.rotary_dim must be even and below head_dim 4 (0 = all of it), found 8: nearest is 2",
        ),
        ({"vocab_size": "61"}, 'model.vocab_size must be an integer of at least 1, found "61"'),
    ],
)
def test_refusals_of_dimensions(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig(**(DIMS | change))  # type: ignore[arg-type]
    assert caught.value.message.startswith(sentence)


def test_window_of_a_layer() -> None:
    assert ModelConfig(**DIMS).window(0) is None
    assert ModelConfig(**DIMS, sliding_window=5).window(2) == 5
    some = ModelConfig(**DIMS, sliding_window=5, window_layers=(1,))
    assert [some.window(layer) for layer in range(3)] == [None, 5, None]


# --- parallel plans ------------------------------------------------------------------------------------------------


def test_plan_fills_the_world_and_prints_what_is_not_default() -> None:
    assert str(ParallelPlan()) == "dp=1"
    assert ParallelPlan.parse("tp=2 pp=3", world=24) == ParallelPlan(dp=4, tp=2, pp=3)
    assert ParallelPlan.parse("dp=2", world=24).dp == 2  # what is asked stands; whether it fits is plan.fit's question
    assert ParallelPlan(dp=3, tp=2, pp=5, cp=7, ep=3).world == 210
    assert str(ParallelPlan.parse("zero=3  dp=4")) == "dp=4 zero=3"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("zero=5", "zero must be one of 0, 1, 2, 3, found 5 (integer); nearest is 3"),
        ("dp=0", "dp must be an integer of at least 1, found 0 (integer)"),
        ("dp=2,tp=2", 'the parallel plan "dp=2,tp=2" has no space before each key'),
        ("dp=two", 'dp must be an integer of at least 1, found "two" (string)'),
        ("dp", 'dp has no value in the parallel plan "dp": write dp=VALUE'),
        ("dp=2 dp=2", 'dp is given twice in the parallel plan "dp=2 dp=2"'),
        ("micro_batch=2", 'unknown key micro_batch in the parallel plan "micro_batch=2": did you mean micro_batches?'),
        ("recompute=ful", 'recompute must be one of none, selective, full, found "ful" (string); nearest is full'),
        ("schedule=1f2b", "schedule must be one of gpipe, 1f1b"),
        ("tp=3", 'the parallel plan "tp=3" needs a multiple of 3 ranks, found 8: nearest is 6 ranks'),
    ],
)
def test_refusals_of_a_plan(text: str, sentence: str) -> None:
    with pytest.raises(PlanError) as caught:
        ParallelPlan.parse(text, world=8)
    assert caught.value.message.startswith(sentence)


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("schedule=ZBV", "found ZBV: nearest is zbv"),
        ("schedule=GPipe", "nearest is gpipe"),
        ("schedule=DualPipe", "nearest is dualpipev"),
        ("schedule=Interleaved1F1B", "nearest is interleaved"),
        ("schedule=ZBVZeroBubble", "nearest is zbv"),
        ("schedule=looped", "nearest is 1f1b"),
        ("Micro_Batches=2", "did you mean micro_batches?"),
    ],
)
def test_names_of_other_programs_and_in_other_case_are_understood(text: str, nearest: str) -> None:
    with pytest.raises(PlanError) as caught:
        ParallelPlan.parse(text)
    assert caught.value.message.endswith(nearest)


words = st.one_of(
    st.tuples(
        st.sampled_from([field.name for field in dataclasses.fields(ParallelPlan)] + ["", "dP"]),
        st.sampled_from(["=", "", "=="]),
        st.sampled_from(["1", "2", "-1", "2.0", "full", "on", "x.csv", "", "[", '"1"']),
    ).map("".join),
    st.text(max_size=8),
)


@given(st.lists(words, max_size=4).map(" ".join))
@settings(max_examples=60)
def test_any_text_is_a_plan_or_a_plan_error(text: str) -> None:
    plan = None
    with contextlib.suppress(PlanError):
        plan = ParallelPlan.parse(text)
    assert plan is None or ParallelPlan.parse(str(plan)) == plan
