"""Finds races, deadlocks and lost signals in multi-GPU Triton kernels on a machine without a GPU.

interlace check module.py:launch --ranks 2,3,4 --schedules 1000
"""

from interlace.check.explore import Verdict, explore, explore_all, load, numbers
from interlace.check.report import KINDS, Report, Step

__all__ = ["KINDS", "Report", "Step", "Verdict", "explore", "explore_all", "load", "numbers"]
