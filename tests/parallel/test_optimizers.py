"""What a wrapped module's optimizer may be, and calls that every rank has to make."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import interlace
import rank_functions_steps as steps
from interlace.errors import CheckpointError, ConfigError
from interlace.launch import leave
from interlace.parallel.optimizers import _is_elementwise

Run = Callable[..., list[Any]]
PLACE = torch.device("cpu")


class Lamb(torch.optim.Adam):
    """Adam whose step is as long as the tensor."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        before = [p.clone() for p in parameters]
        super().step()
        for p, old in zip(parameters, before, strict=True):
            p.copy_(old + (p - old) * old.norm() / (p - old).norm())


class Strange(torch.optim.SGD):
    """Takes no closure, and a step wants more than a tensor."""

    def step(self) -> None:  # type: ignore[override]
        assert all(isinstance(p, Wrapped) for group in self.param_groups for p in group["params"])


class Wrapped(Tensor):
    pass


def made(kind: Any, **options: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = kind([nn.Parameter(torch.ones(3))], **options)
    return optimizer


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "lr": 0.0}),
        (torch.optim.AdamW, {"amsgrad": True, "foreach": True}),
        (torch.optim.AdamW, {"fused": True, "lr": torch.tensor(0.1)}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.Rprop, {}),
        (torch.optim.Adagrad, {}),
        (Strange, {}),
    ],
)
def test_what_works_element_by_element_is_taken(kind: Any, options: dict[str, Any]) -> None:
    assert _is_elementwise(made(kind, **options), PLACE, True)


def test_what_does_not_is_refused_by_name() -> None:
    for kind in (torch.optim.Adafactor, Lamb):
        assert not _is_elementwise(made(kind), PLACE, False)
    lbfgs = made(torch.optim.LBFGS)  # sees all there is: right on a rank that holds all, wrong on one of several
    assert _is_elementwise(lbfgs, PLACE, False)
    assert not _is_elementwise(lbfgs, PLACE, True)


@pytest.fixture
def _alone() -> Iterator[None]:
    yield
    leave()


@pytest.mark.usefixtures("_alone")
def test_it_is_refused_when_it_steps() -> None:
    model = interlace.parallelize(nn.Linear(3, 2))
    model(torch.ones(1, 3)).sum().backward()
    before = model.state_dict()
    with pytest.raises(ConfigError, match=r"^Adafactor does not work element by element.*such as AdamW or SGD\.$"):
        torch.optim.Adafactor(model.parameters()).step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("how", ["added", "replaced", "tied"])
def test_parameters_that_come_later_are_refused(how: str) -> None:
    model = interlace.parallelize(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    model(torch.ones(1, 3)).sum().backward()
    if how == "added":
        model.module[1].extra = nn.Parameter(torch.ones(2))
    elif how == "replaced":
        model.module[1] = nn.Linear(3, 3)
    else:
        model.module[1].weight = model.module[0].weight
    said = rf"^1\.{'extra' if how == 'added' else 'weight'} was set after the module was wrapped"
    for call in (torch.optim.SGD(model.parameters()).step, model.state_dict, lambda: model.load_state_dict({})):
        with pytest.raises(ConfigError, match=said):
            call()


@pytest.mark.usefixtures("_alone")
def test_groups_told_apart_by_name_or_shape_are_refused() -> None:
    """The usual recipes for weight decay, which find nothing in flat runs; those that say what is meant go on."""
    model = interlace.parallelize(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)))
    model(torch.randn(2, 3)).square().sum().backward()
    named = list(model.named_parameters())

    def step(matrices: list[Any], rest: list[Any]) -> None:
        torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]).step()

    by_name = [[p for name, p in named if ("bias" in name) == chosen] for chosen in (False, True)]
    by_shape = [[p for _, p in named if (p.dim() < 2) == chosen] for chosen in (False, True)]
    for groups, found in (
        (by_name, "gives weight decay to root.no_decay"),
        (by_shape, "gives no weight decay to root.d"),
    ):
        with pytest.raises(
            ConfigError, match=rf"group of the optimizer is empty, and another {found}.*parameter_groups"
        ):
            step(*groups)
    torch.optim.AdamW(model.parameter_groups(0.1)).step()
    torch.optim.AdamW(model.parameters(), weight_decay=0.1).step()
    torch.optim.AdamW([{"params": model.parameters()}, {"params": []}], weight_decay=0.1).step()
    lora = interlace.parallelize(nn.Linear(3, 3, bias=False))
    lora(torch.ones(1, 3)).sum().backward()
    step([p for _, p in lora.named_parameters()], [])


@pytest.mark.usefixtures("_alone")
def test_a_rate_for_a_name_that_no_flat_run_has_is_refused() -> None:
    """A head with its own rate would go on with that of the rest; its unit has a name that can be chosen by."""

    def step(units: list[str] | None, **own: Any) -> None:
        module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2))
        model = interlace.parallelize(module, units=units)
        model(torch.randn(2, 3)).square().sum().backward()
        head = [
            [p for name, p in model.named_parameters() if name.startswith("2") == chosen] for chosen in (True, False)
        ]
        torch.optim.AdamW([{"params": head[0], **own}, {"params": head[1]}], lr=1e-3, weight_decay=0.0).step()

    for own in ({"lr": 0.1}, {"betas": (0.8, 0.9)}):
        said = rf"group of the optimizer is empty, and another gives another {next(iter(own))} to root.*units"
        with pytest.raises(ConfigError, match=said):
            step(None, **own)
    step(None)
    step(["0", "1", "2"], lr=0.1)


def tied_by_memory(module: nn.Sequential) -> None:
    module[1].weight.data = module[0].weight.data


def rows_of_one(module: nn.Sequential) -> None:
    module[1].weight = nn.Parameter(module[0].weight.detach()[1:])


def kept_as_buffer(module: nn.Sequential) -> None:
    module[1].register_buffer("kept", module[0].weight.data)


def columns_of_one(module: nn.Sequential) -> None:
    whole = torch.randn(3, 6)
    for number in range(2):
        module[number].weight = nn.Parameter(whole[:, 3 * number : 3 * number + 3])


def frozen_alike(module: nn.Sequential) -> None:
    tied_by_memory(module.requires_grad_(False))


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("tie", [tied_by_memory, rows_of_one, kept_as_buffer, columns_of_one, frozen_alike])
def test_what_is_tied_by_its_memory_alone_is_refused(tie: Callable[[nn.Sequential], None]) -> None:
    """Wrapped, each would be in a place of its own; columns of one matrix, and what nobody trains, may stay."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tie(module)
    if tie in (columns_of_one, frozen_alike):
        interlace.parallelize(module)
        return
    said = rf"^0\.weight and 1\.{'kept' if tie is kept_as_buffer else 'weight'} share memory and are not one parameter"
    with pytest.raises(ConfigError, match=said):
        interlace.parallelize(module)


@pytest.mark.usefixtures("_alone")
def test_a_call_of_a_part_outside_is_refused_where_its_weights_may_be_away() -> None:
    """After a step copies of weights are away; between a forward pass and its backward a head may be used."""
    torch.manual_seed(0)
    x = torch.ones(1, 3, dtype=torch.float64)
    for dtype in (torch.float64, None):
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(dtype or torch.float64)
        plain, model = (
            copy.deepcopy(module),
            interlace.parallelize(module, compute_dtype=torch.float32 if dtype else None),
        )
        y = x.float() if dtype else x
        plain[1](plain(x)).sum().backward()
        model.module[1](model(y)).sum().backward()
        assert torch.allclose(dict(model.whole_gradients())["1.weight"], plain[1].weight.grad, 1e-4, 1e-5)  # type: ignore[arg-type]
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        if dtype is None:  # the main weights themselves
            model(model.module[0](y)).sum().backward()
            continue
        for mode in (torch.no_grad(), torch.enable_grad()):
            with mode, pytest.raises(ConfigError, match=r"^0 was called outside the wrapped module; call the object"):
                model.module[0](y)


@pytest.mark.usefixtures("_alone")
def test_what_is_wrapped_already_is_refused() -> None:
    """Twice, or as a part of another module; what was wrapped by something that is gone has values or says so."""
    shared = nn.Linear(3, 3)
    first, second = nn.Sequential(nn.Linear(3, 3), shared), nn.Sequential(shared, nn.Linear(3, 3))
    model = interlace.parallelize(first)
    for module, name in ((first, r"0\.weight"), (second, r"0\.weight"), (shared, "weight")):
        with pytest.raises(ConfigError, match=rf"^{name} belongs to a module that is wrapped already"):
            interlace.parallelize(module)
    del model
    model = interlace.parallelize(second)
    model(torch.ones(1, 3)).sum().backward()
    expanded = nn.Linear(3, 3)
    expanded.bias = nn.Parameter(torch.ones(1).expand(3))
    with pytest.raises(ConfigError, match=r"^several elements of bias lie in one place of memory"):
        interlace.parallelize(expanded)


WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "initialised": lambda module: module.apply(lambda each: each is module[0] and each.reset_parameters()),
    "clamped": lambda module: module[0].weight.clamp_(-0.1, 0.1),
}


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_to_the_modules_own_copies_are_refused(write: Callable[[nn.Module], Any]) -> None:
    """The next weights would undo them; those that are the main weights themselves stay, and a load makes all anew."""
    for dtype in (None, torch.bfloat16):
        model = interlace.parallelize(nn.Sequential(nn.Linear(3, 3)), compute_dtype=dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        before = model.state_dict()
        with torch.no_grad():
            write(model.module)
        model(torch.ones(1, 3, dtype=dtype)).sum().backward()
        if dtype is None:
            optimizer.step()
            assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])
            continue
        for call in (optimizer.step, model.state_dict):
            with pytest.raises(
                ConfigError, match=r"^0\.(weight|bias) of the module itself was written to.* parameters\(\)"
            ):
                call()
        model.load_state_dict(before)
        optimizer.step()
        assert torch.equal(model.state_dict()["0.weight"], before["0.weight"])


@pytest.mark.usefixtures("_alone")
def test_the_modules_own_state_is_refused_where_it_is_a_copy() -> None:
    """It would lag a step behind, and what is loaded into it would be undone."""
    plain = nn.Sequential(nn.Linear(3, 3)).state_dict()
    model = interlace.parallelize(nn.Sequential(nn.Linear(3, 3)))
    model.module.load_state_dict(plain)
    assert all(torch.equal(value, plain[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, plain[name]) for name, value in model.module.state_dict().items())
    model = interlace.parallelize(nn.Sequential(nn.Linear(3, 3)), compute_dtype=torch.bfloat16)
    for module, state in ((model.module, plain), (model.module[0], nn.Linear(3, 3).state_dict())):
        with pytest.raises(ConfigError, match=r"^state_dict of the wrapped module itself .* what parallelize returned"):
            module.state_dict()
        with pytest.raises(ConfigError, match=r"^load_state_dict of the wrapped module itself"):
            module.load_state_dict(state)
    model.load_state_dict(plain)
    assert all(torch.equal(value, plain[name]) for name, value in model.state_dict().items())
    module = model.module
    del model
    gc.collect()
    module.state_dict()


def test_penalties_on_the_weights_themselves_are_added(run_ranks: Run) -> None:
    """Whenever they are computed, and however many passes there are."""
    everyone = run_ranks("rank_functions_steps:penalties", 2)
    assert all("the optimizer's step found gradients that were not added up" in said["split"] for said in everyone)
    for zero, said in itertools.product((0, 1, 3), everyone):
        assert ("were written to after a backward pass inside no_sync()" in said[f"zeroed {zero}"]) is (zero > 0)
        assert "were written to after a backward pass inside no_sync()" in said[f"both {zero}"]


@pytest.mark.usefixtures("_alone")
def test_penalties_are_in_what_one_process_has_added_up() -> None:
    """Where nothing is reduced, a step may come after a pass inside no_sync(), and gradients may be written to."""
    module = nn.Linear(3, 2, bias=False)
    model = interlace.parallelize(copy.deepcopy(module))
    with model.no_sync():
        for _ in range(3):
            for each in (module, model):
                penalty = sum(p.square().sum() for p in each.parameters())
                (each(torch.ones(1, 3)).sum() + penalty).backward()
                penalty = sum(p.square().sum() for p in each.parameters())
                (penalty + each(torch.ones(1, 3)).sum()).backward()
                sum(p.square().sum() for p in each.parameters()).backward()  # type: ignore[union-attr]
                for p in each.parameters():
                    assert p.grad is not None
                    p.grad.mul_(0.5)
            assert torch.allclose(dict(model.whole_gradients())["weight"], module.weight.grad)  # type: ignore[arg-type]


def test_weights_read_where_their_unit_does_not_run(run_ranks: Run) -> None:
    """They train as in one process where copies of them stay, and are refused by name where they do not."""
    for said in run_ranks("rank_functions_steps:borrowed", 2):
        refused = {name for name, sentence in said.items() if sentence != "nothing"}
        assert refused == {"early 3", "late 3"}
        for name in refused:
            assert said[name].startswith(
                "ConfigError: blocks.2.weight was read while blocks.2 did not run, where zero=3"
            )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of PyTorch's compiler
def test_copies_that_may_be_old_are_never_read(run_ranks: Run) -> None:
    """They are gathered anew after writes that torch does not count, and read as NaN until then; compiled or not."""
    run_ranks("rank_functions_steps:copies", 2)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of PyTorch's compiler
@pytest.mark.usefixtures("_alone")
def test_weights_read_before_their_unit_runs_in_a_narrower_copy() -> None:
    module = steps.Borrowing("early").bfloat16()
    for compiled in (False, True):
        plain, other = copy.deepcopy(module), copy.deepcopy(module)
        if compiled:
            other.compile(backend="eager")
        model = interlace.parallelize(other, compute_dtype=torch.bfloat16)
        x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        model(x).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        plain.load_state_dict(model.state_dict())
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_copies_of_the_module_and_parts_without_parameters_have_states_of_their_own(dtype: torch.dtype | None) -> None:
    """An average of the weights, say, begins as a copy."""
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False))
    model = interlace.parallelize(module, compute_dtype=dtype)
    state = model.state_dict()
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for copied in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        copied.load_state_dict({name: value + 1 for name, value in state.items()})
        assert torch.equal(copied.state_dict()["0.bias"].float(), (state["0.bias"] + 1).to(dtype).float())
    module[1].load_state_dict({**module[1].state_dict(), "running_mean": torch.ones(3)})
    assert torch.equal(model.state_dict()["1.running_mean"], torch.ones(3))
    assert torch.equal(model.state_dict()["0.bias"], state["0.bias"])


def test_a_method_may_run_units_again(run_ranks: Run) -> None:
    assert run_ranks("rank_functions_steps:written", 2) == [True, True]


def test_steps_that_would_train_other_numbers_are_refused(run_ranks: Run) -> None:
    for rank, said in enumerate(run_ranks("rank_functions_steps:refused", 2)):
        for zero in (0, 1):
            assert said[f"unreduced step {zero}"].startswith(
                "ConfigError: the optimizer's step found gradients that we"
            )
            assert said[f"unreduced norm {zero}"].endswith("outside of it, the last of a shorter accumulation too.")
        for name in steps.NORMS:
            assert said[f"{name} 0"] == "nothing"
            for zero in (1, 3):
                assert said[f"{name} {zero}"].startswith(
                    "ConfigError: torch.nn.utils takes the norm of this rank's part"
                )
        assert said["scaler"].startswith("ConfigError: a GradScaler looks for overflow in this rank's part")
        for zero in (1, 2):
            assert said[f"own state of a module {zero}"].startswith(
                "ConfigError: state_dict of the wrapped module itself"
            )
            assert said[f"written {zero}"].startswith("ConfigError: weight of the module itself was written to")
        assert said["own state"] == "nothing"
        other = (
            "ConfigError: the optimizer has the state of rank 0 of dp=2 with zero=1, and this is rank 1 of dp=2 with"
        )
        assert said["state of rank 0"].startswith(other if rank else "nothing")
        assert "exp_avg has 7 elements where this rank holds 4,096; load" in said["state of another size"]


def test_a_rate_for_what_another_rank_holds_is_taken(run_ranks: Run) -> None:
    """Rank 0 holds nothing without decay; a rate for a name that no run has is refused by rank 1."""
    first, second = run_ranks("rank_functions_steps:rates", 2)
    assert first == {"by decay": "nothing", "by name": "nothing"}
    assert second["by decay"] == "nothing"
    assert "group of the optimizer is empty, and another gives another lr to root." in second["by name"]


def test_a_gradient_that_overflows_on_one_rank_is_skipped_on_all(run_ranks: Run) -> None:
    """As in one process: two steps are skipped, the scale is halved for each, and two are made."""
    found = run_ranks("rank_functions_steps:overflow", 2)
    assert found[0] == found[1]
    for scales, means in found[0]:
        assert scales == [2.0**15, 2.0**14, 2.0**14, 2.0**14]
        assert means == pytest.approx([1 - 2e-4, 1 - 2e-5], abs=2e-6)


def test_what_ranks_are_given_must_be_the_same(run_ranks: Run) -> None:
    first, second = run_ranks("rank_functions_steps:given", 2)
    assert first.pop("values") == second.pop("values") == "nothing"
    assert set(first.values()) == {
        "ConfigError: rank 1 calls parallelize with another module or other arguments than rank 0, as it says itself; "
        "every rank gives the same."
    }
    assert {name: said.partition("; ")[0] for name, said in second.items()} == {
        name: f"ConfigError: rank 1 calls parallelize with {own}, and rank 0 with {others}"
        for name, own, others in (
            ("larger", "weight [3, 3] float32", "weight [2, 3] float32"),
            ("more", "1.weight [3, 3] float32 tied to 0.weight", "nothing more"),
            ("frozen", "weight [2, 3] float32 without gradient", "weight [2, 3] float32"),
            ("tied", "1.weight [3, 3] float32 tied to 0.weight", "1.weight [3, 3] float32"),
            ("zero", "zero=2", "zero=0"),
            ("roles", "weight as NORM of 1", "weight [2, 3] float32"),
        )
    }


def test_a_call_that_rank_0_alone_makes_is_told(run_ranks: Run) -> None:
    first, second = run_ranks("rank_functions_steps:alone", 2)
    for name, call in (("saves", "state_dict"), ("loads", "load_state_dict")):
        assert first[name] == (
            f"Hang: {call} was called by rank 0 and not by 1 within 0.9 s; every rank calls it, not rank 0 alone."
        )
    assert first["saves what it has"] == first["all"] == second["all"] == "nothing"
    assert {first["another"], second["another"]} <= {
        "ConfigError: rank 0 called digest while rank 1 called state_dict; every rank calls the same.",
        "ConfigError: rank 1 called state_dict while rank 0 called digest; every rank calls the same.",
    }


def test_waits_end_within_their_limit_in_a_world_that_waits_longer(run_ranks: Run) -> None:
    """A process group of the user's has a limit of its own, half an hour with gloo."""
    for rank, said in enumerate(run_ranks("rank_functions_steps:waits", 2)):
        assert ("needs all its ranks" in said) == (rank == 0)


STATES = StateDictOptions(full_state_dict=True)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("dp=2", 1), ("dp=3", 3)),
        (("dp=2", 3), ("tp=2", 0)),
        (("dp=2 tp=2", 2), ("dp=2", 0)),
        (("tp=2", 0), ("dp=2", 2)),
    ],
)
def test_an_optimizer_goes_on_under_another_mesh(
    run_ranks: Run, tmp_path: Path, first: tuple[str, int], second: tuple[str, int], kind: str
) -> None:
    paths = ["", str(tmp_path / "a"), str(tmp_path / "b")]
    for place, (mesh, zero) in enumerate((first, second)):
        ways = math.prod(int(word.partition("=")[2]) for word in mesh.split())
        given = {"mesh": mesh, "zero": zero, "kind": kind, "numbers": [3 * place, 3 * place + 3]}
        run_ranks("rank_functions_steps:moved", ways, given | {"source": paths[place], "target": paths[place + 1]})
    plain = steps.parts()
    optimizer = steps.OPTIMIZERS[kind](steps.by_decay(plain))
    for place, path in enumerate(paths[1:]):
        steps.steps_of(plain, optimizer, range(3 * place, 3 * place + 3))
        found, expected = torch.load(path), get_optimizer_state_dict(plain, optimizer, options=STATES)
        same(found["model"], plain.state_dict())
        assert found["optimizer"]["state"].keys() == expected["state"].keys()
        for name, entry in expected["state"].items():
            same(found["optimizer"]["state"][name], entry)
        for own, theirs in zip(found["optimizer"]["param_groups"], expected["param_groups"], strict=True):
            assert sorted(own.pop("params")) == sorted(theirs.pop("params"))
            assert own == theirs


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape
        assert (found[name] - value).abs().max() <= 1e-5 * value.abs().max(), name


@pytest.mark.usefixtures("_alone")
def test_an_optimizer_moves_between_a_plain_and_a_wrapped_module() -> None:
    plain = steps.parts()
    own = steps.OPTIMIZERS["adamw"](steps.by_decay(plain))
    steps.steps_of(plain, own, range(3))
    model, again = interlace.parallelize(steps.parts()), steps.parts()
    model.load_state_dict(plain.state_dict())
    optimizer = steps.OPTIMIZERS["adamw"]([{**group, "lr": 0.5} for group in model.parameter_groups(0.3)])
    model.load_optimizer_state_dict(optimizer, get_optimizer_state_dict(plain, own, options=STATES))
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.02, 0.1), (0.02, 0.0)]
    again.load_state_dict(model.state_dict())
    back = steps.OPTIMIZERS["adamw"](steps.by_decay(again))
    set_optimizer_state_dict(again, back, model.optimizer_state_dict(optimizer), options=STATES)
    for module, each in ((plain, own), (model, optimizer), (again, back)):
        steps.steps_of(module, each, range(3, 6))
    same(model.state_dict(), plain.state_dict())
    same(again.state_dict(), plain.state_dict())


@pytest.mark.ranks
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_every_rank_refuses_a_state_alike(run_ranks: Run, zero: int) -> None:
    """Also of what is on other ranks alone, and where a rank has another state than rank 0."""
    first, second = run_ranks("rank_functions_steps:refusals", 2, {"zero": zero})
    apart = [name for name in first if name.startswith("on one rank")]
    assert len(apart) == 4
    assert all("ConfigError: rank 1 calls load_" in each[name] for name in apart for each in (first, second))
    for name in set(first) - set(apart):
        assert first[name].startswith("CheckpointError: "), (name, first)
        assert second[name] == first[name], (name, first, second)


@pytest.mark.usefixtures("_alone")
def test_an_optimizer_of_two_modules_has_a_state_of_each() -> None:
    """Loading one leaves the other as it is."""
    plain = [steps.parts(), nn.Linear(3, 3)]
    models = [interlace.parallelize(copy.deepcopy(module)) for module in plain]

    def step(both: list[Any], optimizer: torch.optim.Optimizer) -> None:
        both[1](both[0](torch.ones(2, 6))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def made(both: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for module in both for p in module.parameters() if p.requires_grad], lr=0.1)

    reference, optimizer = made(plain), made(models)
    for each in ((plain, reference), (models, optimizer)) * 2:
        step(*each)
    states = [model.optimizer_state_dict(optimizer) for model in models]
    assert [len(state["state"]) for state in states] == [7, 2]
    weights = [model.state_dict() for model in models]
    models = [interlace.parallelize(copy.deepcopy(module)) for module in plain]
    optimizer = made(models)
    for model, state, own in zip(models, states, weights, strict=True):
        model.load_state_dict(own)
        model.load_optimizer_state_dict(optimizer, state)
    for each in ((plain, reference), (models, optimizer)):
        step(*each)
    for model, module in zip(models, plain, strict=True):
        for name, value in module.state_dict().items():
            assert torch.allclose(model.state_dict()[name], value, rtol=1e-5, atol=1e-6), name


@pytest.mark.usefixtures("_alone")
def test_a_state_of_other_parameters_is_refused_before_anything_changes() -> None:
    model = interlace.parallelize(steps.parts())
    optimizer = steps.OPTIMIZERS["adamw"](model.parameter_groups(0.1))
    steps.steps_of(model, optimizer, range(2))
    state = model.optimizer_state_dict(optimizer)

    def refused(error: type[Exception], match: str, change: Callable[[Any], None]) -> None:
        other = copy.deepcopy(state)
        change(other)
        with pytest.raises(error, match=match):
            model.load_optimizer_state_dict(optimizer, other)
        after = model.optimizer_state_dict(optimizer)["state"]
        assert all(
            torch.equal(after[name][key], value) for name in after for key, value in state["state"][name].items()
        )

    def another_rate(given: Any) -> None:
        given["param_groups"].append({**given["param_groups"][0], "lr": 7.0, "params": ["up.weight"]})

    refused(CheckpointError, 'has "more", which the module lacks', lambda s: s["state"].update(more={}))
    refused(CheckpointError, 'no step of "down.weight", and "up.weight" has', lambda s: s["state"].pop("down.weight"))
    refused(CheckpointError, 'no exp_avg_sq of "up.weight"', lambda s: s["state"]["up.weight"].pop("exp_avg_sq"))
    refused(CheckpointError, "numbers for names, .* get_optimizer_state_dict", lambda s: s.update(state={0: {}}))
    refused(CheckpointError, 'has no "param_groups"', lambda s: s.pop("param_groups"))
    refused(
        CheckpointError,
        r"exp_avg of .* is \[2\] in .* \[3\]",
        lambda s: s["state"]["down.bias"].update(exp_avg=torch.ones(2)),
    )
    refused(
        CheckpointError,
        "is 9 in .* takes steps together",
        lambda s: s["state"]["down.bias"].update(step=torch.tensor(9.0)),
    )
    refused(ConfigError, "make the optimizer with the groups that it was saved with", another_rate)
    model.load_optimizer_state_dict(optimizer, {"state": {}, "param_groups": []})
    assert not optimizer.state
