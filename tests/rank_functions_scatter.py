"""What rank processes run for the tests of fused products whose sums travel; kernels are interpreted."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is decorated; this module is only imported by ranks

from scatter_calls import several

__all__ = ["several"]
