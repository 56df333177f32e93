"""What rank processes run for the tests of wide groups; kernels are interpreted."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is decorated; this module is only imported by ranks

from wide_calls import gradients, values

__all__ = ["gradients", "values"]
