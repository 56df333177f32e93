"""`parallelize`: the axes for a user's own module and loop, without the trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from interlace.collectives import Meter, make_groups
from interlace.errors import ConfigError, PlanError, nearest
from interlace.launch import join
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
        mesh: a `Mesh`, its text ("dp=4", or "dp=4 shard=2" to split over 2 neighbours and repeat that twice), or None
            for all ranks along the data axis.  A process without a process
            group is joined to its torchrun or SLURM peers, and is a world of one if it has none.
        roles: parameter name -> `spec.Role`; on the data axis it says which parameters take no weight decay (norms
            and biases; by default those with fewer than two dimensions).
        zero, units, gradients, compute_dtype, wire_dtype: see `DataParallel`.
        timeout: seconds, the limit of every wait.

    Every rank calls it with the same module; rank 0's parameter values are everyone's.  Errors: `PlanError` when the
    mesh does not have as many ranks as there are processes, or needs an axis that cannot be executed; `ConfigError` for
    a role of an unknown parameter, and what `DataParallel` refuses.
    """
    decay = {name: role not in UNDECAYED for name, role in (roles or {}).items()}
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    for name in decay:
        if name not in names:
            known = nearest(name, names)
            raise ConfigError(
                f'roles names "{name}", but the module has no parameter of that name'
                + (f'; did you mean "{known}"?' if known else ".")
            )
    if dist.is_initialized():
        rank, size, meter = dist.get_rank(), dist.get_world_size(), Meter(record=False)
        cuda = dist.get_backend() != "gloo"
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    else:
        world = join(timeout)
        rank, size, device, meter = world.rank, world.size, world.device, Meter(world.waiting, record=False)
    groups = make_groups(_data_mesh(mesh, size), rank, device, timeout, meter)
    return DataParallel(
        module.to(device),
        groups["dp"],
        zero=zero,
        hybrid=(groups["shard"], groups["replica"]) if "shard" in groups.by_axis else None,
        units=units,
        gradients=gradients,
        compute_dtype=compute_dtype,
        wire_dtype=wire_dtype,
        decay=decay,
    )


def _data_mesh(mesh: Mesh | str | None, size: int) -> Mesh:
    """The mesh asked for, if `size` processes can run it."""
    if mesh is None:
        mesh = Mesh((("dp", size),))
    elif isinstance(mesh, str):
        mesh = Mesh.parse(mesh)
    if mesh.world != size:
        raise PlanError(f"the mesh {mesh} has {mesh.world} ranks, but {size} are running; use dp={size}.")
    other = [axis for axis, n in (*mesh.axes, *mesh.folds) if axis not in ("dp", "shard") and n > 1]
    if other:
        raise PlanError(f"the mesh {mesh} splits over {other[0]}, which this release does not execute; use dp={size}.")
    return mesh if any(axis == "dp" for axis, _ in mesh.axes) else Mesh((*mesh.axes, ("dp", 1)))
