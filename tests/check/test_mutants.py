"""The examples with one wait, signal or barrier taken out, or one order weakened: each must be reported."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from example_files import FOLDER, NAMES
from interlace.check import explore
from interlace.symmetric.device import put

TAKEN_OUT = ("wait_until", "barrier", "signal")


def mutants(source: str) -> Iterator[tuple[str, str]]:
    """(what was done, the changed source), one change at a time."""
    calls = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name)
    ]
    for node in calls:
        name = node.value.func.id
        lines = source.splitlines()
        indent = " " * node.col_offset
        if name in TAKEN_OUT:
            changed = f"{indent}pass"
        elif name == "put_signal":  # the elements alone, without the flag
            x = node.value.args
            kept = ", ".join(ast.unparse(each) for each in (*x[:3], *x[5:7]))
            block = ast.unparse(x[7]) if len(x) > 7 else ast.unparse(node.value.keywords[0].value)
            changed = f"{indent}put({kept}, {block})"
        else:
            continue
        lines[node.lineno - 1 : node.end_lineno] = [changed]
        yield f"line {node.lineno} without {name}", "\n".join(lines) + "\n"


CASES = [(name, what) for name in NAMES for what, _ in mutants((FOLDER / f"{name}.py").read_text())]


def loaded(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.put = put  # the mutants of put_signal call it
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("name", "what"), CASES, ids=[f"{name}: {what}" for name, what in CASES])
def test_a_mutant_is_reported(name: str, what: str, tmp_path: Path) -> None:
    source = dict(mutants((FOLDER / f"{name}.py").read_text()))[what]
    path = tmp_path / f"{name}_mutant.py"
    path.write_text(source)
    verdict = explore(loaded(path).launch, ranks=2, schedules=25, nbytes=1 << 16)
    assert not verdict.ok, f"{name}: {what} was not reported"
