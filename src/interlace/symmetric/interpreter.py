"""The only place, beside `shortcuts`, that touches the inside of Triton's interpreter.

Stock Triton refuses inline PTX there.  `install` gives its builder a `create_inline_asm` that models the few
instructions of `interlace.symmetric.device`: fences are no-ops between processes (the interpreter's loads, stores and
atomics are sequential), the timer is the host's, and sleeping sleeps.

`watched` is for the checker: inside it every load, store, atomic, barrier and fence of every kernel goes to a
`Watcher`, launches too, and kernels compiled for GPUs are interpreted all the same.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import operator
import re
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import torch
import triton.language as tl
from triton.backends.amd.compiler import HIPOptions
from triton.backends.nvidia.compiler import CUDAOptions
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from interlace.errors import ConfigError, nearest
from interlace.symmetric import shortcuts
from interlace.symmetric.ptx import MODELS

MODELLED = re.compile(
    r"mov\.u64 \$0, %globaltimer|nanosleep\.u32|cp\.async\.bulk\.wait_group 0|fence\.proxy\.async"
    r"|(?:fence\.(?:acq_rel|sc)|membar)\.(?:cta|gpu|gl|sys)"
)
OPTIONS = frozenset(each.name for kind in (CUDAOptions, HIPOptions) for each in fields(kind))  # of a launch
HARMLESS = re.compile(r"^mov\.u32 \$0, 0x0$|^mov\.u32 \$0, 0$|^$")


@dataclass(frozen=True)
class Results:
    """What a builder hands back for inline PTX."""

    handles: list[Any]

    def get_result(self, index: int) -> Any:
        return self.handles[index]


@functools.cache
def instructions(asm: str) -> list[str]:
    """The modelled instructions of a piece of PTX, in order.  Anything else is refused."""
    if asm in MODELS:
        return [MODELS[asm]]
    found = []
    for line in (part.strip() for part in asm.replace("\n", ";").split(";")):
        match = MODELLED.match(line)
        if match:
            found.append(match[0])
        elif not HARMLESS.match(line):
            raise ConfigError(
                f'inline PTX "{line}" has no model on the host; use the primitives of interlace.symmetric.device, or '
                "keep it out of kernels that run in the interpreter."
            )
    return found


def inline_asm(act: Callable[[str, list[Any]], int]) -> Callable[..., Results]:
    """A `create_inline_asm` that calls `act` with each instruction and the operands, and returns the last result."""

    def create_inline_asm(asm: str, constraints: str, values: Any, types: list[Any], is_pure: bool, pack: int) -> Any:
        value = 0
        for word in instructions(asm):
            value = act(word, values)
        handles = []
        for kind in types:
            of = interpreter._get_np_dtype(kind)
            data = np.full(kind.shape, value, of) if kind.is_block() else np.array([value], of)
            handles.append(interpreter.TensorHandle(data, kind.scalar))
        return Results(handles)

    return create_inline_asm


def store_release(pointers: Any, value: Any) -> Any:
    """As an exchange whose result nobody takes: it has an order, which the interpreter's stores have not."""
    exchange, release = interpreter._ir.ATOMIC_OP.XCHG, interpreter._ir.MEM_SEMANTIC.RELEASE
    return shortcuts.atomic(exchange, pointers, value, None, release)


def _act(word: str, operands: list[Any]) -> int:
    if word == "st.release.sys":
        store_release(*operands)
    elif word.startswith("nanosleep"):
        time.sleep(20e-6)
    return time.monotonic_ns() if "globaltimer" in word else 0


def install() -> None:
    """Lets this process interpret the primitives, and Triton's own functions though it was imported before the switch.

    (tl.cdiv and others are decorated when Triton is imported, maybe by torch and before TRITON_INTERPRET was set.)
    """
    if "create_inline_asm" not in vars(interpreter.interpreter_builder):
        interpreter.interpreter_builder.create_inline_asm = inline_asm(_act)
        made: dict[Any, Any] = {}

        def call(self: Any, *args: Any, **options: Any) -> Any:
            if self.fn not in made:
                made[self.fn] = interpreter.InterpretedFunction(self.fn)
            return made[self.fn](*args, **options)

        def call_inside(self: Any, *args: Any, **options: Any) -> Any:
            """A device function: the language is patched by the launch around it, as a whole, and not again."""
            return self.rewrite()(*args, **options)

        patch, everywhere = interpreter._patch_lang, _everywhere()
        interpreter._patch_lang = lambda function: patch(everywhere)
        JITFunction.__call__ = call
        interpreter.InterpretedFunction.__call__ = call_inside
        interpreter.InterpretedFunction.rewrite = lambda self: _rewritten(self.fn)
        scope = shortcuts.take()  # and never given back
        _bind_methods(scope)
        scope.set_attr(interpreter.InterpreterBuilder, "__getattr__", _missing)
        builder = interpreter.interpreter_builder
        vars(builder).update(shortcuts.operations(), options=replace(builder.options, sanitize_overflow=False))


def _missing(self: Any, name: str) -> Any:
    """What Triton's interpreter cannot do."""
    if not name.startswith(("create_", "new_")):
        raise AttributeError(name)
    raise ConfigError(
        f"Triton's interpreter has no {name.partition('_')[2].replace('_', ' ')}; keep it out of kernels that run on "
        "the host, or write it by other operations."
    )


def _bind_methods(scope: Any) -> None:
    """`x.sum(0)` is `tl.sum(x, 0)`: of a compiled language these members of a tensor are no methods."""

    def bound(function: Any) -> Callable[..., Any]:
        return lambda self, *args, **options: function(self, *args, **options)

    for name, member in list(vars(tl.tensor).items()):
        if isinstance(member, JITFunction):
            scope.set_attr(tl.tensor, name, bound(member))


def _everywhere() -> Any:
    """A function that sees all of the language, for the interpreter to patch what a function sees."""
    return types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})


@contextlib.contextmanager
def before_launch(act: Callable[[], None]) -> Iterator[None]:
    """Inside the block, `act` is called before each interpreted launch."""
    original = interpreter.InterpretedFunction.run

    def run(self: Any, *args: Any, **options: Any) -> Any:
        act()
        return original(self, *args, **options)

    interpreter.InterpretedFunction.run = run
    try:
        yield
    finally:
        interpreter.InterpretedFunction.run = original


# --- for the checker -------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Access:
    """A load or store of a block: addresses of the elements whose mask is set, bytes of one, type of the pointers."""

    addresses: Any  # uint64, flat
    size: int
    write: bool
    kind: Any
    volatile: bool = False
    proxy: bool = False  # by a descriptor


@dataclass(eq=False, slots=True)
class Atomic:
    """An atomic on one or several words.  `changes` is False where it may be a mere look, as an addition of 0."""

    addresses: Any
    size: int
    sem: str  # relaxed, acquire, release, acq_rel
    scope: str  # cta, gpu, sys
    changes: bool
    operation: str
    wanted: Any = None  # what a compare-and-swap compares with: bits, as signed integers, a lane each

    @property
    def reads(self) -> bool:
        """All but a store do."""
        return self.operation != "store"


class Watcher(Protocol):
    """Who is told.  `do` performs the operation and returns its values; whoever is told may run others before it."""

    def access(self, what: Access, do: Callable[[], Any]) -> Any: ...

    def atomic(self, what: Atomic, do: Callable[[], Any]) -> Any: ...

    def barrier(self) -> None: ...

    def ptx(self, word: str) -> int: ...

    def compared(self, left: Any, right: Any, how: str) -> None: ...

    def launch(self, kernel: Launch) -> None: ...

    def called(self, name: str) -> None:
        """A kernel or device function without a grid."""


@dataclass(frozen=True)
class Launch:
    """A kernel with converted arguments.  `body(**arguments)` runs one program, at the index `place` set."""

    name: str
    body: Callable[..., None]
    arguments: dict[str, Any]
    tensors: dict[str, Any]  # by parameter, the tensors among them and in their tuples
    grid: tuple[int, int, int]

    def place(self, index: tuple[int, int, int]) -> None:
        """The next interpreted operations are of the program at this index."""
        interpreter.interpreter_builder.grid_dim = self.grid
        interpreter.interpreter_builder.grid_idx = index


class _Rewriter(interpreter.FunctionRewriter):  # type: ignore[misc]
    """Also of functions that use names of the function they were defined in, as compiled ones may."""

    def _transform_ast(self, src: str) -> Any:
        tree, name, free = super()._transform_ast(src), self.fn.__name__, self.fn.__code__.co_freevars
        if not free:
            return tree
        around = ast.parse(f"def {name}({', '.join(free)}):\n    return {name}")
        around.body[0].body.insert(0, tree.body[0])  # type: ignore[attr-defined]
        return around

    def _compile_and_exec(self, transformed_ast: Any) -> Any:
        made = super()._compile_and_exec(transformed_ast)
        cells = self.fn.__closure__
        return made(*[cell.cell_contents for cell in cells]) if cells else made


@functools.cache
def _rewritten(function: Any) -> Any:
    """The Python function that is interpreted for a kernel or device function."""
    return _Rewriter(function).rewrite_ast()


@functools.cache
def _parameters(body: Any) -> tuple[tuple[str, ...], frozenset[str]]:
    """Names of a kernel's parameters, and of those that are constants of the compiler."""
    kinds = inspect.get_annotations(body)
    names = inspect.getfullargspec(body).args
    return tuple(names), frozenset(name for name in names if "constexpr" in str(kinds.get(name, "")))


def _bound(called: str, body: Any, args: Any, options: dict[str, Any]) -> dict[str, Any]:
    """A kernel's arguments by name; what Triton refuses is refused."""
    names, _ = _parameters(body)
    if len(args) == len(names) and OPTIONS.issuperset(options) and not options.keys() & names:
        return dict(zip(names, args, strict=True))
    unknown = [key for key in options if key not in names and key not in OPTIONS]
    if unknown:
        close = nearest(unknown[0], [*names, *OPTIONS])
        hint = f'did you mean "{close}"?' if close else f"its parameters are {', '.join(names)}."
        raise ConfigError(f"{called} was given {unknown[0]}, which is no parameter and no option of a launch; {hint}")
    try:
        return inspect.getcallargs(body, *args, **{key: value for key, value in options.items() if key in names})
    except TypeError as error:
        words = str(error).removeprefix(f"{called}() ")
        raise ConfigError(f"{called} {words}; its parameters are {', '.join(names)}.") from None


def _programs(called: str, grid: Any, bound: dict[str, Any]) -> tuple[int, int, int]:
    made = grid(bound) if callable(grid) else grid
    try:
        sizes = tuple(operator.index(size) for size in made)
    except TypeError:
        sizes = ()
    if not 1 <= len(sizes) <= 3 or min(sizes) < 0:
        raise ConfigError(f"{called}[{made!r}]: a grid is 1 to 3 whole numbers, as in {called}[(programs,)](...).")
    width, height, depth = (*sizes, 1, 1)[:3]
    return width, height, depth


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The tensors of an argument, also those inside of tuples and descriptors, with names."""
    if isinstance(value, tuple):
        for at, each in enumerate(value):
            yield from _tensors(f"{name}[{at}]", each)
        return
    base = getattr(value, "base", value)  # of a tensor descriptor
    if hasattr(base, "data_ptr"):
        base.data_ptr()  # of what has none, says so
        if isinstance(base, torch.Tensor) and base.device.type != "cpu":
            raise ConfigError(f"{name} lies on {base.device}, which cannot be interpreted; make it on heap.device.")
        yield name, base


def _launch(function: Any, grid: Any, args: Any, options: dict[str, Any]) -> Launch:
    body, called = _rewritten(function.fn), function.fn.__name__
    bound = _bound(called, body, args, options)
    _, constants = _parameters(body)
    with torch._C.DisableTorchFunction():
        tensors = {label: tensor for name, value in bound.items() for label, tensor in _tensors(name, value)}
        arguments = {
            name: value if name in constants else interpreter._implicit_cvt(value) for name, value in bound.items()
        }
    return Launch(called, body, arguments, tensors, _programs(called, grid, bound))


def _flat(pointers: Any, mask: Any) -> Any:
    """Addresses of the elements whose mask is set."""
    data = pointers.data
    chosen = np.asarray(mask.data, dtype=bool)
    if b"\0" in chosen.tobytes():
        data = data[np.broadcast_to(chosen, data.shape)]
    return data.ravel()


@functools.cache
def _word(value: Any) -> str:
    """The name of an enumeration's value, in Triton's Python words."""
    word = str(value).rsplit(".", 1)[-1].lower()
    return {"acquire_release": "acq_rel", "system": "sys"}.get(word, word)


COMPARED = {"SLT": "<", "SLE": "<=", "SGT": ">", "SGE": ">=", "EQ": "==", "NE": "!="}
COMPARED |= {"ULT": "<", "ULE": "<=", "UGT": ">", "UGE": ">="}
COMPARED = {f"icmp{name}": how for name, how in COMPARED.items()}
COMPARED |= {f"fcmp{name}": "" for name in ("OLT", "OLE", "OGT", "OGE", "OEQ", "UNE")}  # of no word that is polled


def _watching(watcher: Watcher) -> dict[str, Callable[..., Any]]:
    """What takes the place of the builder's operations."""
    kind, quick = interpreter.InterpreterBuilder, shortcuts.operations()
    builder, size_of = interpreter.interpreter_builder, shortcuts.element_sizes()
    descriptor = [False]  # set only between a descriptor operation and the load or store it makes

    def load(pointers: Any, mask: Any, other: Any, cache: Any, eviction: Any, volatile: bool) -> Any:
        proxy, descriptor[0] = descriptor[0], False
        uncached = volatile or _word(cache) == "cv"
        addresses = pointers.data.ravel() if mask is None else _flat(pointers, mask)
        what = Access(addresses, size_of(pointers.dtype), False, pointers.dtype.name, uncached, proxy)
        return watcher.access(what, lambda: shortcuts.load(pointers, mask, other))

    def masked_load(
        pointers: Any, mask: Any, other: Any, cache_modifier: Any, eviction_policy: Any, is_volatile: bool
    ) -> Any:
        return load(pointers, mask, other, cache_modifier, eviction_policy, is_volatile)

    def store(pointers: Any, value: Any, mask: Any, cache: Any, eviction: Any) -> Any:
        proxy, descriptor[0] = descriptor[0], False
        addresses = pointers.data.ravel() if mask is None else _flat(pointers, mask)
        what = Access(addresses, size_of(pointers.dtype), True, pointers.dtype.name, False, proxy)
        return watcher.access(what, lambda: shortcuts.store(pointers, value, mask))

    def descriptor_load(*args: Any) -> Any:
        descriptor[0] = True
        return kind.create_descriptor_load(builder, *args)

    def descriptor_store(*args: Any) -> Any:
        descriptor[0] = True
        return kind.create_descriptor_store(builder, *args)

    def rmw(operation: Any, pointers: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        word, data = _word(operation), value.data
        changes = word == "xchg" or word == "and" or bool(data if data.size == 1 else data[mask.data].any())
        what = Atomic(_flat(pointers, mask), size_of(pointers.dtype), _word(sem), _word(scope), changes, word)
        return watcher.atomic(what, lambda: shortcuts.atomic(operation, pointers, value, mask, sem))

    def cas(pointers: Any, old: Any, new: Any, sem: Any, scope: Any) -> Any:
        addresses, size = pointers.data.ravel(), size_of(pointers.dtype)
        wanted, instead = (each.data.view(f"i{size}").ravel() for each in (old, new))
        changes = bool(np.any(wanted != instead))
        what = Atomic(addresses, size, _word(sem), _word(scope), changes, "cas", wanted)
        return watcher.atomic(what, lambda: kind.create_atomic_cas(builder, pointers, old, new, sem, scope))

    def compare(name: str, how: str) -> Callable[..., Any]:
        original = quick[name]

        def compared(left: Any, right: Any) -> Any:
            watcher.compared(left, right, how)
            return original(left, right)

        return compared

    def subtract(left: Any, right: Any) -> Any:
        made = quick["create_sub"](left, right)
        watcher.compared(left, right, "-")
        return made

    def ptx(word: str, operands: list[Any]) -> int:
        if word != "st.release.sys":
            return watcher.ptx(word)
        pointers, value = operands
        what = Atomic(pointers.data.ravel(), size_of(pointers.dtype), "release", "sys", True, "store")
        watcher.atomic(what, lambda: store_release(pointers, value))
        return 0

    return {
        "create_masked_load": masked_load,
        "create_masked_store": store,
        "create_load": lambda p, cache, eviction, volatile: load(p, None, None, cache, eviction, volatile),
        "create_store": lambda p, value, cache, eviction: store(p, value, None, cache, eviction),
        "create_descriptor_load": descriptor_load,
        "create_descriptor_store": descriptor_store,
        "create_atomic_rmw": rmw,
        "create_atomic_cas": cas,
        "create_barrier": lambda: watcher.barrier(),
        "create_inline_asm": inline_asm(ptx),
        "create_sub": subtract,
        **{f"create_{name}": compare(f"create_{name}", how) for name, how in COMPARED.items()},
    }


@contextlib.contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Inside the block every kernel is interpreted under a watcher."""
    builder = interpreter.interpreter_builder
    before = dict(vars(builder))
    classes = (interpreter.InterpretedFunction, JITFunction)
    methods = [(each, name, each.__dict__.get(name)) for each in classes for name in ("run", "__call__")]
    methods.append((Autotuner, "run", Autotuner.run))

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        if not warmup:
            watcher.launch(_launch(self, grid, args, options))

    def call(self: Any, *args: Any, **options: Any) -> Any:
        watcher.called(self.fn.__name__)
        options.pop("_semantic", None)
        body = _rewritten(self.fn)
        try:
            return body(*args, **options)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # not of its lines
                raise ConfigError(f"{error}; its parameters are {', '.join(_parameters(body)[0])}.") from None
            raise

    def first(self: Any, *args: Any, **options: Any) -> None:
        """Of the candidates that fit the first: there is nothing to time here."""
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        config = next(iter(self.prune_configs(options)))
        given = {**config.all_kwargs(), **options}
        if config.pre_hook is not None:
            config.pre_hook({**self.nargs, **given})
        self.fn.run(*args, **given)

    quicker, options = shortcuts.take(), builder.options
    scope = interpreter._patch_lang(_everywhere())
    _bind_methods(scope)
    scope.set_attr(interpreter.InterpreterBuilder, "__getattr__", _missing)
    try:
        vars(builder).update(
            {**shortcuts.operations(), **_watching(watcher)}, options=replace(options, sanitize_overflow=False)
        )
        for each in classes:
            each.run, each.__call__ = run, call
        Autotuner.run = first
        yield
    finally:
        for each, name, method in methods:
            if method is None:
                delattr(each, name)
            else:
                setattr(each, name, method)
        vars(builder).clear()
        vars(builder).update(before)
        scope.restore()
        quicker.restore()
