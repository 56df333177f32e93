"""One layer of a Llama-3 70B decoder over the tensor axis, forward and backward: fused, plain, serial, and PyTorch's.

    python benchmarks/decoder_layer.py --out FILE.json [--sizes tp8,tp2] [--length 8192] [--variants serial,plain,...]
        [--rounds 15] [--nproc N]
    python benchmarks/decoder_layer.py --smoke           a tiny layer, on CPU ranks too

Starts its own ranks.  `tp2` is the layer itself, split over the ranks; `tp8` is what a rank of tp=8 has, on as many
ranks as there are: an eighth of the heads and of the MLP for each.  The residual stream is split over rows.  Weights
and activations are bf16; --length positions of one sequence, on all ranks together.

    serial      every transfer by itself (overlap=off)
    plain       the library's collectives beside products (overlap=plain)
    auto        fused where the package's table says so
    fused       the best fused candidates (overlap=fused)
    torch       DTensor's sequence parallel plan, compiled (peers/torch_tensor.py)
    async-tp    the same with products split by Inductor (needs GPUs)

The output, the gradient of the input and those of the split weights are first held against the whole layer on one rank.
Then all run in turn; medians of the slowest rank, 95 % intervals of the ratios round by round.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parent))
import peers.torch_tensor as native
from fused.targets import SLOWER, interval
from fused_matmul import NO_MULTICAST, commit

from interlace import launch, spec
from interlace.collectives import Groups, make_groups
from interlace.config import ModelConfig
from interlace.kernels import measure, tune
from interlace.layout import split
from interlace.mesh import Mesh
from interlace.models.decoder import Decoder, initialise
from interlace.parallel.part import Part, holding
from interlace.parallel.tensor import Axis, split_decoder
from interlace.world import World

POLICIES = {"serial": "off", "plain": "plain", "auto": "auto", "fused": "fused"}
PEERS = ("torch", "async-tp")
SHARES = {"tp8": 8, "tp2": 2}
PARTS_OF_70B = {"hidden_size": 8192, "num_heads": 64, "num_kv_heads": 8, "head_dim": 128, "ffn_size": 28672}
TINY = {"hidden_size": 16, "num_heads": 16, "num_kv_heads": 8, "head_dim": 4, "ffn_size": 64}


def sizes(share: str, world: int, length: int, tiny: bool) -> ModelConfig:
    """A layer of which each of `world` ranks holds what a rank of tp=2 or tp=8 holds of the real one."""
    whole = dict(TINY if tiny else PARTS_OF_70B)
    for name in ("num_heads", "num_kv_heads", "ffn_size"):
        whole[name] = whole[name] * world // SHARES[share]
    return ModelConfig(vocab_size=world, num_layers=1, max_positions=length, **whole)


@dataclass(eq=False)
class Layer:
    """A split layer on this rank.  run(x_1rD) -> y_1rD; parts: the slices of its weights, by name; {} of a peer's."""

    name: str
    block: nn.Module
    run: Callable[[Tensor], Tensor]
    parts: dict[str, Part]

    def step(self, x: Tensor, grad: Tensor) -> None:
        """Forward and backward."""
        x.grad = None
        for parameter in self.block.parameters():
            parameter.grad = None
        self.run(x).backward(grad)


def build(name: str, cfg: ModelConfig, groups: Groups, length: int, dtype: torch.dtype) -> Layer:
    group = groups["tp"]
    decoder = whole(cfg, group.device, dtype)
    if name in POLICIES:
        axis = Axis(group, sequence=True, overlap=POLICIES[name])
        parts = split_decoder(decoder, spec.parameters(cfg), axis, holding(groups, "tp", 300.0))
    else:
        parts = {}
        native.layer(decoder, group.device, group.size, asynchronous=name == "async-tp")
    block, context = decoder.blocks[0], contexts(decoder, cfg, length, group.device, dtype)
    return Layer(name, block, lambda x: block(x, context), parts)


def whole(cfg: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """With weights that keep a product's results about 1, so that what the layer adds to x is as large as x."""
    decoder = Decoder(cfg, device=device, dtype=dtype)
    initialise(decoder, cfg, seed=0)
    with torch.no_grad():
        for weight in decoder.blocks[0].parameters():
            if weight.dim() == 2:
                weight.mul_(weight.shape[1] ** -0.5 / weight.float().std())
    return decoder


def contexts(decoder: Decoder, cfg: ModelConfig, length: int, device: torch.device, dtype: torch.dtype) -> Any:
    made = decoder.context((1, length), device)
    for pattern in made.patterns.values():
        pattern.prepare(dtype, cfg.head_dim)
    return made


def inputs(cfg: ModelConfig, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x and the gradient of y, [1 T D], the same on every rank."""
    generator = torch.Generator(device).manual_seed(1)
    made = torch.zeros(2, 1, length, cfg.hidden_size, dtype=dtype, device=device).normal_(generator=generator)
    return made[0], made[1]


def reference(cfg: ModelConfig, length: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Of the whole layer on this rank alone: "y", "x", and the gradient of every weight by name."""
    decoder = whole(cfg, device, dtype)
    block, context = decoder.blocks[0], contexts(decoder, cfg, length, device, dtype)
    x, grad = inputs(cfg, length, device, dtype)
    x.requires_grad_()
    y = block(x, context)
    y.backward(grad)
    assert x.grad is not None
    found = {"y": y.detach(), "x": x.grad}
    found |= {f"blocks.0.{name}": p.grad for name, p in block.named_parameters() if p.grad is not None}
    return found


def check(layer: Layer, expected: dict[str, Tensor], x: Tensor, grad: Tensor, rows: tuple[int, int]) -> float:
    """The largest difference on this rank, in units of each tensor's largest value."""
    x.grad = None
    y = layer.run(x)
    y.backward(grad)
    assert x.grad is not None
    first, last = rows
    pairs = [(y.detach(), expected["y"][:, first:last]), (x.grad, expected["x"][:, first:last])]
    for name, parameter in layer.block.named_parameters():
        part = layer.parts.get(f"blocks.0.{name}")
        if part is not None and part.owed is None and part.slicing.copies < part.group.size:
            start, stop = part.bound
            assert parameter.grad is not None
            pairs.append((parameter.grad, expected[f"blocks.0.{name}"].narrow(part.slicing.dim, start, stop - start)))
    return max(measure.difference(got, wanted.float()) for got, wanted in pairs)


def measure_size(share: str, world: World, groups: Groups, given: dict[str, Any]) -> dict[str, Any]:
    """The record of one size.  Collective."""
    group, length = groups["tp"], given["length"]
    dtype = torch.float32 if given["smoke"] else torch.bfloat16
    cfg = sizes(share, world.size, length, given["smoke"])
    rows = split(length, world.size, world.rank)
    x, grad = (made[:, rows[0] : rows[1]].contiguous() for made in inputs(cfg, length, world.device, dtype))
    x.requires_grad_()
    expected = reference(cfg, length, world.device, dtype)
    allowed = 1e-5 if dtype == torch.float32 else 3e-2  # bf16 rounds at every product, sum and norm of the layer
    layers: dict[str, Layer] = {}
    errors, wrong = {}, {}
    for name in given["variants"]:
        world.status(operation=f"building {name}")

        def first(name: str = name) -> float:
            layers[name] = build(name, cfg, groups, length, dtype)
            return check(layers[name], expected, x, grad, rows)

        found = measure.attempt(first, group)
        if isinstance(found, str):
            wrong[name] = found
        elif (most := measure.worst([found], group)) > allowed:
            wrong[name] = f"off by {most:.2g} of the largest value, allowed is {allowed:.2g}"
        else:
            errors[name] = most
    expected.clear()
    calls: dict[str, measure.Call] = {}
    for name in errors:
        if world.device.type == "cuda":  # where something compiles
            for _ in range(3):
                layers[name].step(x, grad)
        calls[name] = lambda layer=layers[name]: layer.step(x, grad)  # type: ignore[misc]
    samples, hosts = measure.interleaved(calls, group, given["rounds"])
    return {
        "key": f"70b layer {share} {length} x {world.size} ranks", "size": share, "length": length,
        "samples": {name: [round(1e6 * value, 2) for value in values] for name, values in samples.items()},
        "hosts": {name: round(1e6 * value, 1) for name, value in hosts.items()},
        "errors": errors, "wrong": wrong, "table": tune.identity(world.device),
    }  # fmt: skip


def rank_main(world: World, **given: Any) -> None:
    groups = make_groups(Mesh((("tp", world.size),)), world.rank, world.device, world.timeout)
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    path = Path(given["out"])
    for share in given["sizes"]:
        record = measure_size(share, world, groups, given) | {"date": str(datetime.date.today())}
        record |= {key: given[key] for key in ("machine", "versions", "commit")}
        if world.rank == 0:
            records = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            records[record["key"]] = record
            path.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
            text = "\n".join(line for each in records.values() for line in report(each))
            path.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
            print("\n".join(report(record)), flush=True)


def report(record: dict[str, Any]) -> list[str]:
    """Markdown: the targets and a row a variant."""
    samples: dict[str, list[float]] = record["samples"]
    medians = {name: statistics.median(values) for name, values in samples.items()}
    made_by = ", ".join(record[key] for key in ("machine", "versions", "date"))
    lines = [f"## {record['key']}", "", f"{made_by}, commit {record['commit']}, table {record['table']}", ""]
    for name in ("auto", "fused"):
        for other in ("serial", *PEERS):
            if name in samples and other in samples:
                low, middle, high = ratio(samples[name], samples[other])
                word = "FAIL" if low > SLOWER else "pass"
                lines.append(f"- {word}: {name} takes {middle:.3f} of {other} ({low:.3f} to {high:.3f})")
    lines += [f"- WRONG: {name}: {why}" for name, why in record["wrong"].items()]
    lines += [
        "",
        "| variant | us | lowest | highest | host us | serial / it | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, middle in medians.items():
        gain = f"{medians['serial'] / middle:.3f}" if "serial" in medians else "-"
        low, high = min(samples[name]), max(samples[name])
        words = f"{low:.1f} | {high:.1f} | {record['hosts'][name]:.0f} | {gain} | {record['errors'][name]:.1e}"
        lines.append(f"| {name} | {middle:.1f} | {words} |")
    return [*lines, ""]


def ratio(own: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """(low, median, high) of own over theirs, round by round."""
    found = [a / b for a, b in zip(own, theirs, strict=True)]
    low, high = interval(found)
    return low, statistics.median(found), high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="tp8,tp2")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--variants", default="serial,plain,auto,fused,torch,async-tp")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--nproc", type=int, default=0)
    parser.add_argument("--out", default="decoder_layer.json")
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    gpus = tune.num_gpus()
    device = "cuda" if gpus > 1 and not given.smoke else "cpu"
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    for name in NO_MULTICAST:
        os.environ.setdefault(name, "1" if name.startswith("TORCH") else "0")
    ranks = given.nproc or (gpus if device == "cuda" else 2)
    argument = {
        "sizes": given.sizes.split(","), "variants": given.variants.split(","), "rounds": given.rounds,
        "length": 8 if given.smoke else given.length, "out": given.out, "smoke": given.smoke, "commit": commit(),
        "machine": f"{ranks} x {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}",
        "versions": f"torch {torch.__version__}, triton {importlib.metadata.version('triton')}",
    }  # fmt: skip
    launch.run_local("decoder_layer:rank_main", ranks, argument, device=device, timeout=300.0)


if __name__ == "__main__":
    main()
