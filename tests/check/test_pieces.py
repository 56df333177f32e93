"""Tiles of the product that are cut along K, in many orders of its programs: no race, the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from interlace.check import explore
from interlace.kernels import tile
from interlace.kernels.candidate import Tile
from interlace.symmetric import SymmetricHeap


def launch(split: int) -> Callable[[SymmetricHeap], Callable[[], None]]:
    """Two shapes in turn, twice: 9 and 3 tiles on 7 places."""

    def program(heap: SymmetricHeap) -> Callable[[], None]:
        generator = torch.Generator().manual_seed(0)
        factors = [
            [torch.randn(*shape, generator=generator) for shape in ((M, K), (N, K), (N,))]
            for M, N, K in ((33, 40, 80), (10, 35, 100))
        ]
        found = [[torch.empty(len(x), len(weight)) for x, weight, _ in factors] for _ in range(2)]
        for call in found:
            for (x, weight, bias), out in zip(factors, call, strict=True):
                tile.matmul(x, weight, bias, out, Tile(16, 16, 16, 2, 4, 2, split=split))

        def check() -> None:
            for (x, weight, bias), once, again in zip(factors, *found, strict=True):
                torch.testing.assert_close(once, F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)
                assert torch.equal(once, again)

        return check

    return program


@pytest.fixture(autouse=True)
def seven_places() -> Iterator[None]:
    tile._counters.cache_clear()
    with mock.patch.object(tile, "programs", lambda device, tiles: min(7, tiles)):
        yield


@pytest.mark.parametrize("split", [0, 3])
def test_whoever_comes_last_adds_up_in_the_order_of_k(split: int) -> None:
    verdict = explore(launch(split), ranks=1, schedules=6)
    assert verdict.ok, verdict


@pytest.mark.parametrize("split", [0, 3])
def test_repeated_as_a_graph(split: int) -> None:
    verdict = explore(launch(split), ranks=1, schedules=3, replays=2)
    assert verdict.ok, verdict
