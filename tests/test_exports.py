"""The public names: listed once, found lazily, and no torch before one of them needs it."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import interlace

PUBLIC = sorted(interlace._MODULE_OF)


@pytest.mark.parametrize("name", PUBLIC)
def test_each_name_resolves_to_the_object_of_its_module(name: str) -> None:
    assert getattr(interlace, name) is getattr(importlib.import_module(interlace._MODULE_OF[name]), name)


def test_every_error_class_is_public() -> None:
    from interlace import errors

    classes = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert classes <= set(PUBLIC)


def test_dir_lists_the_names_and_an_unknown_one_is_an_attribute_error() -> None:
    assert {*PUBLIC, "__version__"} <= set(dir(interlace))
    with pytest.raises(AttributeError, match="'interlace' has no attribute 'paralelize'"):
        _ = interlace.paralelize


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(interlace.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert {node.names[0].asname: node.module for node in imports} == interlace._MODULE_OF


@pytest.mark.parametrize("statement", ["import interlace", "from interlace import Config, Layout, Mesh, PlanError"])
def test_importing_does_not_import_torch(statement: str) -> None:
    code = f"{statement}; import sys; print(sorted({{'torch', 'numpy', 'typer', 'rich'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_version_is_the_installed_one() -> None:
    try:
        installed = metadata.version("interlace")
    except metadata.PackageNotFoundError:  # run from the source tree alone
        return
    assert installed == interlace.__version__
