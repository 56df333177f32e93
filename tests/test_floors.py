"""Imports go down only: who may import whom inside the package, and which third party each part may know.

The table below is the rule of docs and review; the tests walk every import in src/, at any indentation, and fail with a
sentence.  A new module needs a line in the table first.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "interlace"


@dataclass(frozen=True)
class Part:
    """A module or subpackage directly below interlace: its floor, and what it may import."""

    floor: int
    below: frozenset[str]
    third_party: frozenset[str]


def table() -> dict[str, Part]:
    parts: dict[str, Part] = {}

    def add(floor: int, names: str, below: str, third_party: str = "") -> None:
        for name in names.split():
            parts[name] = Part(floor, frozenset(below.split()), frozenset(third_party.split()))

    # Floor 0: the standard library only, step by step.
    words = "errors forms model_config config hf_config hf_latent hf_rotary mesh"
    values = "layout topology spec schedule events"
    ground = f"{words} {values} plan report"
    add(0, "errors", "")
    add(0, "forms", "errors")
    add(0, "model_config", "errors forms")
    add(0, "config hf_config hf_latent hf_rotary mesh", words)
    add(0, "layout", words)
    add(0, "topology spec schedule events", f"{words} layout")
    add(0, "plan report", ground)
    # Floor 1: numbers, memory, text.
    add(1, "random", ground, "torch triton")
    add(1, "streams permute", "", "torch")
    add(1, "symmetric", f"{ground} random streams", "torch triton numpy")
    add(1, "tokenizer", "errors", "tokenizers")
    first = f"{ground} random streams permute symmetric"
    # Floor 2: transfers and files.
    add(2, "failure", first, "torch")
    add(2, "world", f"{first} failure", "torch")
    add(2, "collectives", f"{first} failure world", "torch")
    add(2, "launch", f"{first} failure world collectives", "torch")
    add(2, "checkpoint", f"{first} failure world collectives", "torch safetensors")
    second = f"{first} failure world collectives launch checkpoint"
    # Floor 3: kernels are given sizes, never a run's configuration.
    add(
        3,
        "kernels",
        " ".join({*second.split()} - {"forms", "model_config", "config", "hf_config", "hf_latent", "hf_rotary"}),
        "torch triton",
    )
    # Floor 4: siblings; models know nothing of processes.
    add(4, "parallel", f"{second} kernels", "torch")
    add(4, "models", f"{ground} random permute", "torch safetensors")
    # Floor 5: siblings.
    fourth = f"{second} kernels parallel models tokenizer"
    add(5, "train", fourth, "torch rich safetensors")
    add(5, "serve", fourth, "torch")
    # A wing: kernels are handed in as launches.
    add(1, "check", first, "torch triton numpy greenlet")
    # The roof: one file for each group of commands.
    add(6, "cli", " ".join(parts), "rich typer")
    add(6, "__main__", "cli")
    return parts


PARTS = table()


@dataclass(frozen=True)
class Import:
    module: str
    line: int
    top_level: bool


def imports(source: str, module: str, is_package: bool = False) -> Iterator[Import]:
    """Every module an import statement or importlib call of `source` names, `from` relative ones resolved."""
    tree = ast.parse(source)
    top = {id(node) for node in tree.body}
    home = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = home[: len(home) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            # `from interlace import mesh` names the part mesh, not the root.
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "interlace" else [base]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            names = [str(word.value) for word in node.args[:1] if isinstance(word, ast.Constant)]
        for name in names:
            yield Import(name, node.lineno, id(node) in top)


def crimes(source: str, module: str, is_package: bool = False) -> list[str]:
    """One sentence for each import that the table does not allow."""
    part = module.split(".")[1]
    if part not in PARTS:
        return [f"interlace.{part} has no floor: give it a line in tests/test_floors.py"]
    rule, found = PARTS[part], []
    for each in imports(source, module, is_package):
        root, _, rest = each.module.partition(".")
        target = rest.partition(".")[0]
        at = f"({module} line {each.line})"
        if root == "interlace":
            if target in ("", "__version__") or target == part:
                continue
            if target not in PARTS:
                found.append(f"{part} may not take {target} from the package's root; name its module {at}")
            elif target not in rule.below:
                found.append(f"{part} may not import {target} {at}")
            elif part == "cli" and each.top_level and PARTS[target].floor > 0:
                found.append(f"cli may import {target} only inside the command that needs it {at}")
        elif root not in sys.stdlib_module_names and root not in rule.third_party:
            found.append(f"{part} may not import {root} {at}")
    return found


def modules() -> list[tuple[str, Path]]:
    """(dotted name, file) of everything in the package but its root `__init__`."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        names = path.relative_to(PACKAGE.parent).with_suffix("").parts
        if path != PACKAGE / "__init__.py":
            found.append((".".join(names[:-1] if names[-1] == "__init__" else names), path))
    return found


@pytest.mark.parametrize(("module", "path"), modules(), ids=[name for name, _ in modules()])
def test_imports_go_down_only(module: str, path: Path) -> None:
    found = crimes(path.read_text(), module, path.name == "__init__.py")
    assert not found, "; ".join(found)


@pytest.mark.parametrize(
    ("module", "source", "crime"),
    [
        ("interlace.kernels.tile", "import interlace.train.step", "kernels may not import train"),
        (
            "interlace.kernels.tile",
            "def f():\n  if 1:\n    from interlace import config",
            "kernels may not import config",
        ),
        ("interlace.models.decoder", "from interlace.parallel import apply", "models may not import parallel"),
        ("interlace.parallel.apply", "from ..models.decoder import Decoder", "parallel may not import models"),
        ("interlace.train.loop", "from interlace.cli import main", "train may not import cli"),
        ("interlace.train.loop", "from interlace.serve import cache", "train may not import serve"),
        ("interlace.collectives.ops", "import interlace.checkpoint", "collectives may not import checkpoint"),
        ("interlace.mesh", "from interlace.layout import Layout", "mesh may not import layout"),
        ("interlace.forms", "from interlace.config import Config", "forms may not import config"),
        ("interlace.tokenizer", "from interlace.train import text", "tokenizer may not import train"),
        ("interlace.tokenizer", "import torch", "tokenizer may not import torch"),
        ("interlace.cli", "def f():\n  import torch", "cli may not import torch"),
        ("interlace.__main__", "from interlace import launch", "__main__ may not import launch"),
        ("interlace.mesh", "try:\n  import torch\nexcept ImportError: pass", "mesh may not import torch"),
        ("interlace.spec", "import importlib\nimportlib.import_module('numpy.linalg')", "spec may not import numpy"),
        ("interlace.check.order", "import interlace.kernels.tile", "check may not import kernels"),
        ("interlace.train.loop", "from interlace import Layout", "may not take Layout from the package's root"),
        ("interlace.cli", "from interlace.train import loop", "only inside the command that needs it"),
        ("interlace.cli.verify", "from interlace.train import verify", "only inside the command that needs it"),
        ("interlace.utils", "", "interlace.utils has no floor"),
    ],
)
def test_a_forbidden_import_is_named(module: str, source: str, crime: str) -> None:
    found = crimes(source, module)
    assert len(found) == 1
    assert crime in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("interlace.parallel.data", "from . import apply\nfrom interlace.collectives import ops\nimport torch.nn"),
        ("interlace.mesh", "import dataclasses\nfrom interlace.config import ParallelPlan"),
        (
            "interlace.cli",
            "import rich\nfrom interlace.errors import InterlaceError\ndef f():\n  import interlace.train",
        ),
        ("interlace.plan.cost", "from interlace import layout, __version__"),
        ("interlace.__main__", "from interlace.cli import main"),
    ],
)
def test_an_allowed_import_is_not(module: str, source: str) -> None:
    assert crimes(source, module) == []


def test_floor_0_needs_no_third_party() -> None:
    lowest = {name for name, part in PARTS.items() if part.floor == 0}
    ground = [name for name, _ in modules() if name.split(".")[1] in lowest]
    assert "interlace.errors" in ground
    code = (
        "import importlib, sys\n"
        f"sys.path.insert(0, {str(PACKAGE.parent)!r})\n"
        "for name in ('torch', 'numpy', 'triton'): sys.modules[name] = None  # an import of these raises\n"
        f"for name in {ground!r}: importlib.import_module(name)\n"
    )
    # -S leaves out installed packages altogether.
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
