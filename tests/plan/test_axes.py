"""docs/axes.md lists every key of a plan and every sentence in which one is refused, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from interlace.config import ParallelPlan

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "axes.md").read_text(encoding="utf-8")
RULES = {
    "fit.py": ("check", "_check_data", "_check_fixed", "_axes", "_ranks", "_divides_model", "_pipeline",
               "_divides_batch", "_fixed_batch", "_suggestion"),
    "stages.py": ("_disorder", "_wrong_zero"),
}  # fmt: skip


def words(node: ast.expr) -> str:
    """A string of the source, "…" for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)  # type: ignore[misc]
    if isinstance(node, ast.BinOp):
        return words(node.left) + words(node.right)
    return "…"


def sentences(source: str, names: tuple[str, ...]) -> Iterator[str]:
    """What these functions return or raise in words; a sentence that another function has made is "…"."""
    tree = ast.parse(source)
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for name in names:
        for node in ast.walk(functions[name]):
            value: ast.expr | None = None
            if isinstance(node, ast.Return):
                value = node.value.elts[-1] if isinstance(node.value, ast.Tuple) else node.value  # beside an action
            elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                value = node.exc.args[0]
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                value = node.value if node.targets[0].id == "reason" else None
            branches = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
            for branch in branches:
                found = words(branch) if branch is not None else ""
                if re.search(r"[a-z]{2}", found):
                    yield found


def listed() -> set[str]:
    table = PAGE.partition("## Refusals")[2]
    return {row.strip().strip("`").strip() for row in re.findall(r"^\| (``? ?.+? ?``?) \|", table, re.M)}


def test_every_refusal_is_on_the_page() -> None:
    found = {
        sentence
        for file, names in RULES.items()
        for sentence in sentences((ROOT / "src" / "interlace" / "plan" / file).read_text(encoding="utf-8"), names)
    }
    assert found, "the rules say nothing"
    assert found - listed() == set(), "refusals that docs/axes.md does not list"
    assert {row for row in listed() if row != "sentence"} - found == set(), "docs/axes.md lists what is never said"


def test_every_rule_is_read() -> None:
    """A new rule of `refused` must be named above."""
    tree = ast.parse((ROOT / "src" / "interlace" / "plan" / "fit.py").read_text(encoding="utf-8"))
    returning = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.returns is not None and ast.unparse(node.returns) == "str | None"
    }
    assert returning - {"refused"} <= set(RULES["fit.py"])


def test_every_key_is_on_the_page() -> None:
    keys = PAGE.partition("## Keys")[2].partition("## Refusals")[0]
    named = {
        name for row in keys.splitlines() if row.startswith("| `") for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert named == {field.name for field in fields(ParallelPlan)}
