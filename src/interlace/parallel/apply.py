"""`parallelize`: the axes for a user's own module and loop, without the trainer."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from interlace.collectives import Meter, make_groups
from interlace.errors import ConfigError, PlanError, nearest
from interlace.launch import join
from interlace.mesh import FOLDS, ORDER, Mesh
from interlace.parallel import optimizers
from interlace.parallel.data import DataParallel
from interlace.parallel.meeting import Meeting
from interlace.parallel.part import holding
from interlace.parallel.roles import KINDS, Roles, resolve, split_module
from interlace.parallel.tensor import Axis
from interlace.spec import Role

UNDECAYED = (Role.NORM, Role.BIAS)


def parallelize(
    module: nn.Module,
    mesh: Mesh | str | None = None,
    roles: Roles | None = None,
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
        optimizer = torch.optim.AdamW(model.parameters())  # not the module's, which are views
        model(batch).mean().backward()
        model.clip_grad_norm_(1.0)  # over all ranks; torch's own would see this rank's part
        optimizer.step()

    Args:
        mesh: a `Mesh`, its text ("dp=4"; "dp=4 shard=2" to split over 2 neighbours and repeat that twice; "tp=2 dp=2",
            ranks of tp being neighbours in any order of the words), or None for all ranks along the data axis.  A
            process without a process group is joined to its torchrun or SLURM peers, and is a world of one if it has
            none.
        roles: name or pattern ("*.q_proj") of modules and parameters -> `spec.Role`, or (role, rows that stay together:
            a head's); the first pattern that fits decides.  How `tp` splits: `parallel.roles`.  NORM and BIAS take no
            weight decay (by default those with fewer than two dimensions).  Ranks of one tp group are given the same
            batch.
        zero, units, gradients, compute_dtype, wire_dtype: see `DataParallel`.
        timeout: seconds, the limit of every wait.

    Every rank calls it with the same module; rank 0's parameters and buffers are everyone's. From then on buffers are
    each rank's own: running means of BatchNorm are of its part of the batch, and of all only as `nn.SyncBatchNorm`.
    Hooks on the module's parameters see the gradient of this rank's part of the batch (`parallel.hooks`).
    Errors: `PlanError` when the mesh does not have as many ranks as there are processes, or needs an axis that cannot
    be executed, or heads do not divide by tp; `ConfigError` for a role of an unknown parameter, modules or arguments
    that ranks do not share, tensors tied by their memory alone, parts of another wrapped module, what `DataParallel`
    refuses, hooks that nobody would call, and, when it steps, an optimizer of the module's own parameters, or one that
    would train other numbers (`parallel.optimizers`).
    """
    _check(module)
    found = resolve(module, roles or {})
    decay = _decay(module, found)
    if dist.is_initialized():
        rank, size, meter = dist.get_rank(), dist.get_world_size(), Meter(record=False)
        cuda = dist.get_backend() != "gloo"
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    else:
        world = join(timeout)
        rank, size, device, meter = world.rank, world.size, world.device, Meter(world.waiting, record=False)
    mesh, meeting = _mesh(mesh, size), None
    if size > 1:
        meeting = Meeting(dist.distributed_c10d._get_default_store(), rank, size, timeout)
        given = {"zero": zero, "units": units, "gradients": gradients, "compute": compute_dtype, "wire": wire_dtype}
        meeting.agree(
            "parallelize", [f"mesh={mesh}", *(f"{key}={value}" for key, value in given.items()), *_told(module, found)]
        )
    groups = make_groups(mesh, rank, device, timeout, meter)
    module, parts = module.to(device), {}
    if mesh.size("tp") > 1:
        if not any(role in KINDS for role, _ in found.values()):
            raise ConfigError(f"the mesh {mesh} splits over tp, but roles names nothing to split; see parallel.roles.")
        axis = Axis(groups["tp"], sequence=False)
        parts = split_module(module, found, axis, holding(groups, "tp", timeout))
    model = DataParallel(
        module,
        groups["dp"],
        zero=zero,
        hybrid=(groups["shard"], groups["replica"]) if "shard" in groups.by_axis else None,
        units=units,
        gradients=gradients,
        compute_dtype=compute_dtype,
        wire_dtype=wire_dtype,
        decay=decay,
        parts=parts,
        tensor=groups.by_axis.get("tp"),
    )
    model.meeting = meeting
    optimizers.watch(model)
    model.look_for_reads()
    return model


def _check(module: nn.Module) -> None:
    for name, inner in module.named_modules():
        if isinstance(inner, DataParallel):
            raise ConfigError(f"{name or 'the module'} is wrapped already; wrap the whole module once.")
        if isinstance(inner, nn.Embedding | nn.EmbeddingBag) and inner.max_norm is not None:
            raise ConfigError(
                f"{name or 'the module'} has max_norm={inner.max_norm:g}, with which each rank would change rows of "
                "its own tokens alone; take it off, and scale rows after the optimizer's step, or not at all."
            )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ConfigError(f"{name} has no shape yet (a lazy module); run the module once before parallelize.")
        if tensor.is_meta:
            raise ConfigError(f"{name} is on the meta device; give it values before parallelize.")
    _refuse_wrapped_parts(module)
    _refuse_one_memory(module)


def _refuse_wrapped_parts(module: nn.Module) -> None:
    """`ConfigError` for a parameter of another wrapped module, or of one that is gone and left it without values."""
    own = dict(module.named_parameters())
    if optimizers.of_wrapped(own.values()):
        gc.collect()  # of one that nobody has any more
    held = optimizers.of_wrapped(own.values())
    for name, parameter in own.items():
        if id(parameter) in held:
            raise ConfigError(
                f"{name} belongs to a module that is wrapped already; wrap a module once, and modules that share one "
                "as parts of one module around them."
            )
        if any(stride == 0 and size > 1 for size, stride in zip(parameter.shape, parameter.stride(), strict=True)):
            raise ConfigError(
                f"several elements of {name} lie in one place of memory, as those of an expanded tensor do, or of a "
                "module whose wrapped form is gone; give it values of its own before parallelize."
            )


def _refuse_one_memory(module: nn.Module) -> None:
    """`ConfigError` for two tensors that are tied by their memory alone, one of which is trained."""
    named = [(name, tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.numel()]
    places = sorted(((_bytes(tensor), name, tensor) for name, tensor in named), key=lambda place: place[:2])
    for number, ((storage, _, end), name, tensor) in enumerate(places):
        for (other_storage, begin, _), other_name, other in places[number + 1 :]:
            if other_storage != storage or begin >= end:
                break
            if (tensor.requires_grad or other.requires_grad) and _overlap(tensor, other):
                first, second = sorted((name, other_name), key=[name for name, _ in named].index)
                raise ConfigError(
                    f"{first} and {second} share memory and are not one parameter, so a step on the one changes the "
                    f"other, which would end here; tie them as one parameter ({second} = {first}), or give one a copy."
                )


def _bytes(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Its storage, and there its first byte and one past its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin, size = int(tensor.storage_offset()), tensor.element_size()
    return tensor.untyped_storage().data_ptr(), begin * size, (begin + int(last) + 1) * size


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage have an element in common: columns of one matrix may lie among each other."""
    if one.dtype != other.dtype:
        return True
    base = min(one.storage_offset(), other.storage_offset())
    end = max(_bytes(tensor)[2] // tensor.element_size() for tensor in (one, other))
    taken = torch.zeros(end - base, dtype=torch.bool)
    views = [
        taken.as_strided(
            [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)],
            tensor.stride(),
            tensor.storage_offset() - base,
        )
        for tensor in (one, other)
    ]
    views[0].fill_(True)
    return bool(views[1].any())


def _told(module: nn.Module, roles: Mapping[str, tuple[Role, int]]) -> Iterator[str]:
    """What has to be the same on all ranks: roles, and parameters and buffers in their order, without values."""
    for name, (role, chunk) in roles.items():
        yield f"{name} as {role.name} of {chunk}"
    first: dict[int, str] = {}
    for name, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers()):
        tied = f" tied to {first[id(tensor)]}" if id(tensor) in first else ""
        first.setdefault(id(tensor), name)
        frozen = "" if tensor.requires_grad else " without gradient"
        yield f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{frozen}{tied}"


def _decay(module: nn.Module, roles: Mapping[str, tuple[Role, int]]) -> dict[str, bool]:
    """Parameter -> whether weight decay applies, as far as a role of it or of its module says."""
    decay = {}
    for name, _ in module.named_parameters(remove_duplicate=False):
        role, _ = roles.get(name) or roles.get(name.rpartition(".")[0]) or (None, 1)
        if role in UNDECAYED or (role is not None and name in roles):
            decay[name] = role not in UNDECAYED
    return decay


def _read(text: str) -> Mesh:
    """The mesh of a text, its axes in their order."""
    read = Mesh.parse(text)
    for axis, n in read.axes:
        if axis == "zero":
            raise PlanError(f'the mesh "{text}" names zero, which is no axis; give it apart, zero={n}.')
        if axis not in ORDER:
            near = nearest(axis, (*ORDER, *FOLDS))
            raise PlanError(
                f'the mesh "{text}" names {axis}, which is no axis; '
                + (f"did you mean {near}?" if near else "use dp, shard or tp.")
            )
    return Mesh(tuple(sorted(read.axes, key=lambda axis: ORDER.index(axis[0]))), read.folds)


def _mesh(mesh: Mesh | str | None, size: int) -> Mesh:
    """The mesh asked for, if `size` processes can run it."""
    if mesh is None:
        mesh = Mesh((("dp", size),))
    elif isinstance(mesh, str):
        mesh = _read(mesh)
    elif not isinstance(mesh, Mesh):
        raise PlanError(f'mesh={mesh!r} is no mesh; give a text such as "dp={size}", or a Mesh.')
    if mesh.world != size:
        raise PlanError(f"the mesh {mesh} has {mesh.world} ranks, but {size} are running; use dp={size}.")
    other = [axis for axis, n in (*mesh.axes, *mesh.folds) if axis not in ("dp", "shard", "tp") and n > 1]
    if other:
        raise PlanError(f"the mesh {mesh} splits over {other[0]}, which this release does not execute; use dp={size}.")
    return mesh if any(axis == "dp" for axis, _ in mesh.axes) else Mesh((*mesh.axes, ("dp", 1)))
