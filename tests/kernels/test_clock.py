"""The clock that multiprocessors ran at."""

from __future__ import annotations

import pytest
import torch

from interlace.kernels import clock


def test_of_multiprocessors_noted_twice() -> None:
    begin = torch.tensor([[1000, 50], [0, 0], [7000, 60], [500, 90], [800, 10]])
    end = torch.tensor([[4000, 2050], [9000, 2060], [10600, 2060], [0, 0], [800, 10]])
    assert clock.hertz(begin, end) == pytest.approx(1.5e9), "1.5 and 1.8 GHz, the lower of the two in the middle"
    assert clock.hertz(torch.zeros(2, 2), end[:2]) is None
    assert clock.hertz(None, end) is None


def test_there_is_none_without_a_gpu() -> None:
    assert clock.read(torch.device("cpu")) is None


@pytest.mark.gpu
def test_between_what_a_gpu_may_run_at() -> None:
    device = torch.device("cuda")
    begin = clock.read(device)
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    for _ in range(50):
        a = a @ a * 1e-2
    found = clock.hertz(begin, clock.read(device))
    assert found is not None
    assert 0.2e9 < found < 3e9
