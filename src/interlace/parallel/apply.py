"""`parallelize`: the axes for a user's own module and loop, without the trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from interlace.collectives import Groups, make_groups
from interlace.errors import PlanError
from interlace.launch import World, join
from interlace.mesh import Mesh
from interlace.parallel.data import DataParallel
from interlace.spec import Role

UNDECAYED = (Role.NORM, Role.BIAS)


def parallelize(
    module: nn.Module,
    mesh: Mesh | str | None = None,
    roles: Mapping[str, Role] | None = None,
    *,
    zero: int = 0,
    units: Sequence[str] | None = None,
    gradients: str = "mean",
    compute_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    timeout: float = 60.0,
) -> DataParallel:
    """Splits `module` over the ranks of `mesh` and returns it wrapped; train it as the original.

        model = interlace.parallelize(module, zero=3)
        optimizer = torch.optim.AdamW(model.parameters())
        model(batch).mean().backward()
        optimizer.step()

    Args:
        mesh: a `Mesh`, its text ("dp=4"), or None for all ranks along the data axis.  The process is joined to its
            torchrun or SLURM peers if it has no process group yet, and is a world of one otherwise.
        roles: parameter name -> `spec.Role`; on the data axis it says which parameters take no weight decay (norms
            and biases; by default those with fewer than two dimensions).
        zero, units, gradients, compute_dtype, wire_dtype: see `DataParallel`.
        timeout: seconds, the limit of every wait.

    Every rank calls it with the same module; rank 0's parameter values are everyone's.  Errors: `PlanError` when the
    mesh does not have as many ranks as there are processes, or needs an axis that cannot be executed.
    """
    world = join(timeout)
    groups = _groups(mesh, world, timeout)
    decay = {name: role not in UNDECAYED for name, role in (roles or {}).items()}
    return DataParallel(
        module.to(world.device),
        groups["dp"],
        zero=zero,
        units=units,
        gradients=gradients,
        compute_dtype=compute_dtype,
        wire_dtype=wire_dtype,
        decay=decay,
    )


def _groups(mesh: Mesh | str | None, world: World, timeout: float) -> Groups:
    if mesh is None:
        mesh = Mesh((("dp", world.size),))
    elif isinstance(mesh, str):
        mesh = Mesh.parse(mesh)
    if mesh.world != world.size:
        raise PlanError(f"the mesh {mesh} has {mesh.world} ranks, but {world.size} are running; use dp={world.size}.")
    other = [axis for axis, size in mesh.axes if size > 1 and axis != "dp"]
    if other:
        raise PlanError(
            f"the mesh {mesh} splits over {other[0]}, which this release does not execute; use dp={world.size}."
        )
    return make_groups(mesh, world.rank, world.device, timeout)
