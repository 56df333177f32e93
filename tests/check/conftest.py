"""A GPU machine's own Python may lack greenlet, which only the checker needs."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch


@pytest.fixture(autouse=True)
def no_mode_is_left() -> Iterator[None]:
    """A mode for torch operations that outlived its schedule would meet every test that follows."""
    before = torch._C._len_torch_function_stack()
    yield
    assert torch._C._len_torch_function_stack() == before


collect_ignore_glob = [] if find_spec("greenlet") else ["test_*.py"]
