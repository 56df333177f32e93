"""A decoder cut down to some of its units, as a rank of a pipeline holds it; parameters keep their names."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import nn

from interlace.models.decoder import Decoder


def keep(decoder: Decoder, names: Sequence[str]) -> None:
    """Leaves out every unit that is not named.  A tied weight stays known by its first name, wherever it is used, and
    belongs to no unit: an alias stands where the other use would be."""
    tied = decoder.cfg.tie_embeddings and not {"embedding", "head"} <= set(names)
    if tied and "embedding" in names:
        decoder.head.norm = None  # type: ignore[assignment]
    if "embedding" not in names and not (tied and "head" in names):  # else it stays for its weight, and is not run
        decoder.embedding = None  # type: ignore[assignment]
    if "head" not in names and not (tied and "embedding" in names):
        decoder.head = None  # type: ignore[assignment]
    for number in range(len(decoder.blocks)):
        if f"blocks.{number}" not in names:
            decoder.blocks[number] = None  # type: ignore[assignment]


def view(decoder: Decoder, names: Sequence[str]) -> Decoder:
    """The same modules, those of the named units alone."""
    part = copy.copy(decoder)
    part._modules = dict(decoder._modules)
    chosen = [block if f"blocks.{number}" in names else None for number, block in enumerate(decoder.blocks)]
    part._modules["blocks"] = nn.ModuleList(chosen)  # type: ignore[arg-type]
    for name in ("embedding", "head"):
        if name not in names:
            part._modules[name] = None
    return part
