"""Export: a folder from which transformers computes a checkpoint's logits, or one sentence that says why not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import save_values
from interlace import config, hf_config
from interlace.config import Config
from interlace.errors import CheckpointError, ConfigError, DataError, ResourceError
from interlace.models.decoder import Decoder, initialise
from interlace.train.export import export
from tokenizer_files import word_level

torch.set_num_threads(1)

CONFIG = """
[model]
vocab_size = 43
hidden_size = 24
num_layers = 2
num_heads = 3
num_kv_heads = 1
head_dim = 8
ffn_size = 40
init_std = 0.3
rope_theta = 500.0
"""
QWEN3 = "qk_norm = true\ntie_embeddings = true\n"


def run_config(more: str = "", tokenizer: str = "bytes") -> Config:
    known = CONFIG.replace("num_kv_heads = 1\n", "") if "num_kv_heads" in more else CONFIG
    return config.loads(known + more, [f"data.tokenizer={tokenizer}"])


def save_run(out: Path, cfg: Config, change: dict[str, torch.Tensor | None] | None = None, step: int = 3) -> Decoder:
    """A checkpoint of two ranks, with an optimizer's state that is not exported."""
    model = Decoder(cfg.model_config())
    initialise(model, cfg.model_config(), step)
    tensors: dict[str, Any] = {f"main/{name}": tensor.detach() for name, tensor in model.named_parameters()}
    tensors |= {f"exp_avg/{name}": torch.zeros_like(tensor) for name, tensor in model.named_parameters()}
    tensors |= change or {}
    meta = {"config": cfg.to_toml(), "model": dataclasses.asdict(cfg.model_config())}
    save_values(out / "checkpoints", step, {name: value for name, value in tensors.items() if value is not None}, meta)
    return model


@pytest.mark.parametrize(
    "more",
    [
        "",
        QWEN3,
        "qkv_bias = true\nout_bias = true\nmlp_bias = true\n",
        "qkv_bias = true\ntie_embeddings = true\n",
        "sliding_window = 5\n",
        "qkv_bias = true\nsliding_window = 5\nwindow_layers = [1]\n",
        "num_kv_heads = 3\nkv_rank = 10\nq_rank = 9\nrotary_dim = 4\nvalue_dim = 6\n",
    ],
)
def test_transformers_computes_the_same_logits(tmp_path: Path, more: str) -> None:
    transformers = pytest.importorskip("transformers")
    model = save_run(tmp_path / "run", run_config(more))
    export(tmp_path / "run", tmp_path / "out", "fp32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    tokens_BT = torch.randint(43, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, expected = theirs(tokens_BT).logits, model.eval()(tokens_BT)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_bf16_is_the_rounded_main_weight(tmp_path: Path) -> None:
    model = save_run(tmp_path, run_config())
    export(tmp_path / "checkpoints" / "step-3", tmp_path / "out")
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in held.values()} == {torch.bfloat16}
    assert torch.equal(held["model.embed_tokens.weight"], model.embedding.weight.bfloat16())
    assert torch.equal(held["model.layers.1.mlp.down_proj.weight"], model.blocks[1].mlp.down.weight.bfloat16())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


def test_the_newest_checkpoint_of_a_run_is_taken(tmp_path: Path) -> None:
    save_run(tmp_path, run_config(), step=3)
    new = save_run(tmp_path, run_config(), step=12)
    export(tmp_path, tmp_path / "out", "fp32")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"], new.head.output.weight)


@pytest.mark.parametrize("stated", [None, 2, 4, [4, 2], [4, 5], "four", {"id": 4}])
def test_generation_stops_where_documents_ended(tmp_path: Path, stated: object) -> None:
    """And where it stopped in the folder that the run began from, of the same tokens."""
    words = tmp_path / "words"
    words.mkdir()
    word_level(words)  # "</s>" is 2
    (words / "generation_config.json").write_text(json.dumps({"eos_token_id": stated}))
    held = run_config(tokenizer=str(words))
    (words / "config.json").write_text(json.dumps(hf_config.to_hf(held.model_config()) | {"eos_token_id": 3}))
    save_run(tmp_path, dataclasses.replace(held, model=dataclasses.replace(held.model, from_=str(words))))
    export(tmp_path, tmp_path / "out")
    ends = json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"]
    assert ends == {"None": [2, 3], "2": [2, 3], "4": [2, 3, 4], "[4, 5]": [2, 3, 4, 5], "[4, 2]": [2, 3, 4]}.get(
        str(stated), [2, 3]
    )


def test_transformers_stops_there(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    words = tmp_path / "words"
    words.mkdir()
    word_level(words)
    save_run(tmp_path, run_config(tokenizer=str(words)))
    export(tmp_path, tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == 2


def test_the_runs_tokenizer_goes_along(tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.mkdir()
    word_level(words)
    (words / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    save_run(tmp_path, run_config(tokenizer=str(words)))
    export(tmp_path, tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (words / name).read_bytes()
    (words / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="with which the run was trained, is not there"):
        export(tmp_path, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ('norm = "layernorm"\n', "llama, has no norm = layernorm"),
        ('activation = "gelu"\n', "llama, has no activation = gelu"),
        ("out_bias = true\n", "llama, has no qkv_bias = false with out_bias = true"),
        ("sliding_window = 8\nwindow_layers = [1]\n", "mistral, has no window_layers"),
        ("qk_norm = true\nmlp_bias = true\n", "qwen3, has no mlp_bias = true"),
    ],
)
def test_what_no_hugging_face_model_does_is_refused(tmp_path: Path, more: str, found: str) -> None:
    save_run(tmp_path, run_config(more))
    with pytest.raises(ConfigError) as caught:
        export(tmp_path, tmp_path / "out")
    assert found in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"main/blocks.1.mlp.up.weight": torch.zeros(41, 24)},
            "blocks.1.mlp.up.weight has shape [41, 24], not [40, 24]",
        ),
        ({"main/blocks.0.attention.k.weight": None}, "blocks.0.attention.k.weight did not come"),
        ({"main/blocks.2.mlp.up.weight": torch.zeros(40, 24)}, "blocks.2.mlp.up.weight is no parameter"),
    ],
)
def test_foreign_weights_are_refused_by_name(
    tmp_path: Path, change: dict[str, torch.Tensor | None], sentence: str
) -> None:
    save_run(tmp_path, run_config(), change)
    with pytest.raises(CheckpointError) as caught:
        export(tmp_path, tmp_path / "out")
    assert sentence in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*partial*"))


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        export(tmp_path, tmp_path / "out")
    save_run(tmp_path, run_config())
    with pytest.raises(ConfigError, match="bf16 or fp32, found bf61; nearest is bf16"):
        export(tmp_path, tmp_path / "out", "bf61")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        export(tmp_path, tmp_path / "full")
    with pytest.raises(ResourceError, match="cannot write"):
        export(tmp_path, tmp_path / "full" / "file" / "out")
