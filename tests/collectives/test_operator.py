"""Operators of compiled graphs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

ENTRY = """
from interlace.collectives import operator
made = operator.entry("kept(Tensor x) -> Tensor", lambda group, x: x * {factor})
alone = operator.Operator("kept_alone(Tensor x) -> Tensor", lambda group, x: x * {factor}, lambda group, x: x.clone())
"""


def names(folder: Path, factor: int) -> list[str]:
    name = f"written_with_{factor}"
    (folder / f"{name}.py").write_text(ENTRY.format(factor=factor), encoding="utf-8")
    module: Any = importlib.import_module(name)
    return [module.made._schema.name, module.alone.operator._schema.name]


def test_graphs_on_disk_are_not_those_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch finds them by the names of the operators in them."""
    monkeypatch.syspath_prepend(tmp_path)
    before, after = (names(tmp_path, factor) for factor in (1, 2))
    for one, other, name in zip(before, after, ("kept", "kept_alone"), strict=True):
        assert one.startswith(f"interlace::{name}_")
        assert one != other
