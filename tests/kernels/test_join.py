"""Results of attention over different keys joined by one kernel, against the plain operations."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from interlace.parallel.blocks import merge

HERE = Path(__file__).resolve().parent


def check(device: str) -> None:
    """Views of larger tensors, rows that saw nothing here, there or anywhere, an odd head size."""
    from interlace.kernels.join import join

    for dtype, E in ((torch.float32, 12), (torch.float16, 128), (torch.float16, 96)):
        made = torch.Generator().manual_seed(E)
        whole, logs = torch.randn(2, 21, 5, E, generator=made), 3 * torch.randn(2, 5, 21, generator=made)
        other = torch.randn(2, 3, 13, E, generator=made).to(dtype).transpose(1, 2)
        theirs = 3 * torch.randn(2, 3, 13, generator=made)
        logs[0, 1:4, 4:9] = float("-inf")
        whole[0, 4:9, 1:4] = 0.0
        theirs[:, :, 2:4] = float("-inf")
        other[:, 2:4] = 0.0
        index, log_index = (slice(None), slice(4, 17), slice(1, 4)), (slice(None), slice(1, 4), slice(4, 17))
        expected, expected_logs = whole.clone(), logs.clone()
        merge(expected[index], expected_logs[log_index], other.float(), theirs)
        whole, logs, other, theirs = (x.to(device) for x in (whole, logs, other, theirs))
        join(whole[index], logs[log_index], other, theirs)
        torch.testing.assert_close(whole.cpu(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(logs.cpu(), expected_logs, rtol=1e-5, atol=1e-6)
        assert logs.isneginf().sum() > 0


def test_interpreted() -> None:
    path = os.pathsep.join([str(HERE), os.environ["PYTHONPATH"]])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", "import test_join; test_join.check('cpu')"], env=environment, check=True)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    check("cuda")
