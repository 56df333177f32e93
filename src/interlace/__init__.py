"""Interlace splits a transformer over GPUs along axes that compose.

    from interlace import Mesh, ParallelPlan, parallelize

Every public name is imported on first use, so `import interlace` itself does not import torch: the planner and the
command line start at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interlace.check.explore import explore as explore
    from interlace.config import Config as Config
    from interlace.config import ModelConfig as ModelConfig
    from interlace.config import ParallelPlan as ParallelPlan
    from interlace.errors import CheckpointError as CheckpointError
    from interlace.errors import ConfigError as ConfigError
    from interlace.errors import DataError as DataError
    from interlace.errors import Hang as Hang
    from interlace.errors import InterlaceError as InterlaceError
    from interlace.errors import NumericsError as NumericsError
    from interlace.errors import PeerLost as PeerLost
    from interlace.errors import PlanError as PlanError
    from interlace.errors import ResourceError as ResourceError
    from interlace.errors import SecurityError as SecurityError
    from interlace.layout import Layout as Layout
    from interlace.mesh import Mesh as Mesh
    from interlace.parallel.apply import parallelize as parallelize
    from interlace.symmetric.heap import SymmetricHeap as SymmetricHeap

__version__ = "0.1.0"

_MODULE_OF = {
    "CheckpointError": "interlace.errors",
    "Config": "interlace.config",
    "ConfigError": "interlace.errors",
    "DataError": "interlace.errors",
    "Hang": "interlace.errors",
    "InterlaceError": "interlace.errors",
    "Layout": "interlace.layout",
    "Mesh": "interlace.mesh",
    "ModelConfig": "interlace.config",
    "NumericsError": "interlace.errors",
    "ParallelPlan": "interlace.config",
    "PeerLost": "interlace.errors",
    "PlanError": "interlace.errors",
    "ResourceError": "interlace.errors",
    "SecurityError": "interlace.errors",
    "SymmetricHeap": "interlace.symmetric.heap",
    "explore": "interlace.check.explore",
    "parallelize": "interlace.parallel.apply",
}


def __getattr__(name: str) -> Any:
    """Imports a public name from its module on first use (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
