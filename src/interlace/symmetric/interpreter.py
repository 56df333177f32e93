"""The only place that touches the inside of Triton's interpreter.

Stock Triton refuses inline PTX there.  `install` gives its builder a `create_inline_asm` that models the few
instructions of `interlace.symmetric.device`: fences are no-ops between processes (the interpreter's loads, stores and
atomics are sequential), the timer is the host's, and sleeping sleeps.

`watched` is for the checker: inside it every load, store, atomic, barrier and fence of every kernel goes to a
`Watcher`, launches too, and kernels compiled for GPUs are interpreted all the same.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import re
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from interlace.errors import ConfigError

MODELLED = re.compile(
    r"mov\.u64 \$0, %globaltimer|nanosleep\.u32|cp\.async\.bulk\.wait_group 0|fence\.proxy\.async"
    r"|(?:fence\.(?:acq_rel|sc)|membar)\.(?:cta|gpu|gl|sys)"
)
HARMLESS = re.compile(r"^mov\.u32 \$0, 0x0$|^mov\.u32 \$0, 0$|^$")


@dataclass(frozen=True)
class Results:
    """What a builder hands back for inline PTX."""

    handles: list[Any]

    def get_result(self, index: int) -> Any:
        return self.handles[index]


def instructions(asm: str) -> list[str]:
    """The modelled instructions of a piece of PTX, in order.  Anything else is refused."""
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


def inline_asm(act: Callable[[str], int]) -> Callable[..., Results]:
    """A `create_inline_asm` that calls `act` for each instruction and returns the last result."""

    def create_inline_asm(asm: str, constraints: str, values: Any, types: list[Any], is_pure: bool, pack: int) -> Any:
        value = 0
        for word in instructions(asm):
            value = act(word)
        handles = []
        for kind in types:
            data = np.full(getattr(kind, "shape", (1,)) or (1,), value, dtype=interpreter._get_np_dtype(kind))
            handles.append(interpreter.TensorHandle(data, kind.scalar))
        return Results(handles)

    return create_inline_asm


def _act(word: str) -> int:
    if word.startswith("nanosleep"):
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
        interpreter._patch_lang_tensor = _scalars_as_bounds(interpreter._patch_lang_tensor)


def _everywhere() -> Any:
    """A function that sees all of the language, for the interpreter to patch what a function sees."""
    return types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})


def _scalars_as_bounds(patch: Callable[..., None]) -> Callable[..., None]:
    """`range(n)` over a number of the kernel: the interpreter's own way ends with NumPy 2.4, and warns before it."""

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patched


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


@dataclass(frozen=True)
class Access:
    """A load or store of a block: addresses of the elements whose mask is set, bytes of one."""

    addresses: Any  # uint64, flat
    size: int
    write: bool
    volatile: bool = False
    proxy: bool = False  # by a descriptor


@dataclass(frozen=True)
class Atomic:
    """An atomic on one or several words.  `changes` is False where it cannot change any, as an addition of 0."""

    addresses: Any
    size: int
    sem: str  # relaxed, acquire, release, acq_rel
    scope: str  # cta, gpu, sys
    changes: bool
    operation: str
    wanted: Any = None  # what a compare-and-swap compares with


class Watcher(Protocol):
    """Who is told.  `do` performs the operation and returns its values; whoever is told may run others before it."""

    def access(self, what: Access, do: Callable[[], Any]) -> Any: ...

    def atomic(self, what: Atomic, do: Callable[[], Any]) -> Any: ...

    def barrier(self) -> None: ...

    def ptx(self, word: str) -> int: ...

    def compared(self, left: Any, right: Any, how: str) -> None: ...

    def launch(self, kernel: Launch) -> None: ...


@dataclass(frozen=True)
class Launch:
    """A kernel with converted arguments.  `body(**arguments)` runs one program, at the index `place` set."""

    name: str
    body: Callable[..., None]
    arguments: dict[str, Any]
    tensors: dict[str, Any]  # by parameter, the tensors among them
    grid: tuple[int, int, int]

    def place(self, index: tuple[int, int, int]) -> None:
        """The next interpreted operations are of the program at this index."""
        interpreter.interpreter_builder.grid_dim = self.grid
        interpreter.interpreter_builder.grid_idx = index


def _interpreted(function: Any, cache: dict[Any, Any]) -> Any:
    """The rewritten Python function of a kernel or device function, compiled or interpreted."""
    found = cache.get(function.fn)
    if found is None:
        if isinstance(function, JITFunction):
            found = interpreter.InterpretedFunction(function.fn).rewrite()
        else:
            found = function.rewrite()
        cache[function.fn] = found
    return found


def _launch(function: Any, cache: dict[Any, Any], grid: Any, args: Any, options: dict[str, Any]) -> Launch:
    body = _interpreted(function, cache)
    names = inspect.getfullargspec(body).args
    bound = inspect.getcallargs(body, *args, **{key: value for key, value in options.items() if key in names})
    kinds = inspect.get_annotations(body)
    tensors = {}
    for name, value in bound.items():
        base = getattr(value, "base", value)  # of a tensor descriptor
        if hasattr(base, "data_ptr"):
            tensors[name] = base
    arguments = {
        name: value if "constexpr" in str(kinds.get(name, "")) else interpreter._implicit_cvt(value)
        for name, value in bound.items()
    }
    width, height, depth = (*(int(n) for n in (grid(bound) if callable(grid) else grid)), 1, 1)[:3]
    return Launch(function.fn.__name__, body, arguments, tensors, (width, height, depth))


def _flat(pointers: Any, mask: Any) -> Any:
    data = pointers.data
    chosen = np.asarray(mask.data, dtype=bool)
    return data.ravel() if chosen.all() else data[np.broadcast_to(chosen, data.shape)].ravel()


def _size(pointers: Any) -> int:
    return max(1, pointers.get_element_ty().primitive_bitwidth // 8)


@functools.cache
def _word(value: Any) -> str:
    """The name of an enumeration's value, in Triton's Python words."""
    word = str(value).rsplit(".", 1)[-1].lower()
    return {"acquire_release": "acq_rel", "system": "sys", "cluster": "gpu"}.get(word, word)


COMPARED = {"SLT": "<", "SLE": "<=", "SGT": ">", "SGE": ">=", "EQ": "==", "NE": "!="}
COMPARED |= {"ULT": "<", "ULE": "<=", "UGT": ">", "UGE": ">="}


def _watching(watcher: Watcher) -> dict[str, Callable[..., Any]]:
    """What takes the place of the builder's operations."""
    kind = interpreter.InterpreterBuilder
    builder = interpreter.interpreter_builder
    descriptor = [False]  # set only between a descriptor operation and the load or store it makes

    def load(pointers: Any, mask: Any, other: Any, cache_modifier: Any, eviction_policy: Any, is_volatile: bool) -> Any:
        proxy, descriptor[0] = descriptor[0], False
        cache, eviction, volatile = cache_modifier, eviction_policy, is_volatile
        uncached = volatile or _word(cache) == "cv"
        what = Access(_flat(pointers, mask), _size(pointers), False, uncached, proxy)
        return watcher.access(
            what, lambda: kind.create_masked_load(builder, pointers, mask, other, cache, eviction, volatile)
        )

    def store(pointers: Any, value: Any, mask: Any, cache: Any, eviction: Any) -> Any:
        proxy, descriptor[0] = descriptor[0], False
        what = Access(_flat(pointers, mask), _size(pointers), True, False, proxy)
        return watcher.access(what, lambda: kind.create_masked_store(builder, pointers, value, mask, cache, eviction))

    def descriptor_load(*args: Any) -> Any:
        descriptor[0] = True
        return kind.create_descriptor_load(builder, *args)

    def descriptor_store(*args: Any) -> Any:
        descriptor[0] = True
        return kind.create_descriptor_store(builder, *args)

    def rmw(operation: Any, pointers: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        word = _word(operation)
        changes = word == "xchg" or word == "and" or bool(np.any(value.data))
        what = Atomic(_flat(pointers, mask), _size(pointers), _word(sem), _word(scope), changes, word)
        return watcher.atomic(
            what, lambda: kind.create_atomic_rmw(builder, operation, pointers, value, mask, sem, scope)
        )

    def cas(pointers: Any, old: Any, new: Any, sem: Any, scope: Any) -> Any:
        changes = bool(np.any(old.data != new.data))
        addresses = pointers.data.ravel()
        what = Atomic(addresses, _size(pointers), _word(sem), _word(scope), changes, "cas", old.data)
        return watcher.atomic(what, lambda: kind.create_atomic_cas(builder, pointers, old, new, sem, scope))

    def compare(name: str, how: str) -> Callable[..., Any]:
        original = getattr(kind, name)

        def compared(left: Any, right: Any) -> Any:
            watcher.compared(left, right, how)
            return original(builder, left, right)

        return compared

    def subtract(left: Any, right: Any) -> Any:
        made = kind.create_sub(builder, left, right)
        watcher.compared(left, right, "-")
        return made

    def dot(a: Any, b: Any, total: Any, precision: Any, most: Any) -> Any:
        return kind.create_dot(builder, as_float(a), as_float(b), total, precision, most)

    def as_float(operand: Any) -> Any:
        """The interpreter multiplies the 16 bits of a bfloat16 as an integer."""
        if operand.dtype.scalar is not tl.bfloat16:
            return operand
        bits = operand.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def every(pointers: Any) -> Any:
        return interpreter.TensorHandle(np.ones_like(pointers.data, dtype=bool), tl.int1)

    return {
        "create_masked_load": load,
        "create_masked_store": store,
        "create_load": lambda p, cache, eviction, volatile: load(p, every(p), None, cache, eviction, volatile),
        "create_store": lambda p, value, cache, eviction: store(p, value, every(p), cache, eviction),
        "create_descriptor_load": descriptor_load,
        "create_descriptor_store": descriptor_store,
        "create_atomic_rmw": rmw,
        "create_atomic_cas": cas,
        "create_barrier": lambda: watcher.barrier(),
        "create_inline_asm": inline_asm(lambda word: watcher.ptx(word)),
        "create_sub": subtract,
        "create_dot": dot,
        **{f"create_icmp{name}": compare(f"create_icmp{name}", how) for name, how in COMPARED.items()},
    }


def _quicker() -> Any:
    """Shortcuts through what the interpreter does many times for each memory operation; results stay the same."""
    scope = interpreter._LangPatchScope()
    tensor, semantic = tl.core.tensor, interpreter.TritonSemantic
    kinds: dict[Any, Any] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {(): (tl.core.constexpr(1), tl.core.tuple([]))}
    blocks, make_block = dict[Any, Any](), tl.core.block_type.__init__
    np_dtype, check_types = interpreter._get_np_dtype, semantic.binary_op_type_checking_impl
    unwrap, constexpr, nested = tl.core._unwrap_if_constexpr, tl.core.constexpr, (list, tuple, tl.core.tuple)

    def cached_np_dtype(kind: Any) -> Any:
        if isinstance(kind, tl.block_type):
            kind = kind.element_ty
        if isinstance(kind, tl.pointer_type):
            return address
        found = kinds.get(kind)
        if found is None:
            found = kinds[kind] = np_dtype(kind)
        return found

    def initialise(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type = handle, kind
        block = kind.is_block()
        key = tuple([int(n) for n in kind.shape]) if block else ()
        found = shapes.get(key)
        if found is None:
            found = (tl.core.constexpr(math.prod(key)), tl.core.tuple([tl.core.constexpr(n) for n in key]))
            shapes[key] = found
        self.numel, self.shape = found
        self.dtype = kind.element_ty if block else kind

    def initialise_block(self: Any, element: Any, shape: Any) -> None:
        values = shape.values if type(shape) is tl.core.tuple else shape
        key = (element.name, *[n.value if type(n) is constexpr else n for n in values])
        found = blocks.get(key)
        if found is None:
            make_block(self, element, shape)
            found = blocks[key] = (self.shape, self.numel, self.name)
        self.element_ty = element
        self.shape, self.numel, self.name = found

    def is_whole(kind: Any) -> bool:
        return kind is tl.int32 or kind is tl.int64

    def is_usual(kind: Any) -> bool:
        return kind is tl.int32 or kind is tl.int64 or kind is tl.float32

    def checked(self: Any, left: Any, right: Any, *flags: Any, **options: Any) -> Any:
        """Numbers of one usual type, some of them Python's, of one shape or one of them a scalar."""
        if type(left) is int and type(right) is tensor and is_whole(right.dtype):
            left = constant(self, left, right.dtype) if abs(left) < 1 << 31 else left
        elif type(right) is int and type(left) is tensor and is_whole(left.dtype):
            right = constant(self, right, left.dtype) if abs(right) < 1 << 31 else right
        if type(left) is tensor and type(right) is tensor and left.dtype is right.dtype and is_usual(left.dtype):
            if left.shape is right.shape:
                return left, right
            if not left.shape.values:
                return spread(left, right), right
            if not right.shape.values:
                return left, spread(right, left)
        return check_types(self, left, right, *flags, **options)

    def spread(scalar: Any, block: Any) -> Any:
        data = np.full(block.handle.data.shape, scalar.handle.data, dtype=scalar.handle.data.dtype)
        return tensor(interpreter.TensorHandle(data, scalar.dtype), block.type)

    def cast(self: Any, value: Any, kind: Any, rounding: Any = None) -> Any:
        return value if value.dtype is kind else convert(self, value, kind, rounding)

    def to_tensor(self: Any, value: Any, check_type: bool = True) -> Any:
        if type(value) is tensor:
            return value
        if type(value) is not int:
            return make_tensor(self, value, check_type)
        found = numbers.get(value)
        if found is None:
            found = numbers[value] = make_tensor(self, value)
        return found

    def constant(self: Any, value: Any, dtype: Any) -> Any:
        key = (value, type(value), dtype)
        found = numbers.get(key)
        if found is None:
            found = numbers[key] = make_constant(self, value, dtype)
        return found

    def broadcast(self: Any, left: Any, right: Any) -> Any:
        return (left, right) if left.shape is right.shape else make_alike(self, left, right)

    def added(self: Any, left: Any, right: Any, sanitize_overflow: bool) -> Any:
        """A pointer, or pointers, and offsets; the usual numbers of one shape."""
        if type(right) is int and type(left) is tensor and left.dtype is not tl.int1:
            right = constant(self, right, tl.int32) if abs(right) < 1 << 31 else right
        if type(left) is tensor and type(right) is tensor:
            if left.shape is right.shape:
                if left.dtype is right.dtype and is_usual(left.dtype):
                    made = self.builder.create_add if left.dtype is not tl.float32 else self.builder.create_fadd
                    return tensor(made(left.handle, right.handle), left.type)
                if is_whole(right.dtype) and left.dtype.is_ptr():
                    return tensor(self.builder.create_addptr(left.handle, right.handle), left.type)
            elif is_whole(right.dtype) and not left.shape.values and left.dtype.is_ptr():
                made = self.builder.create_addptr(left.handle, right.handle)
                return tensor(made, tl.core.block_type(left.dtype, right.shape))
        return add(self, left, right, sanitize_overflow)

    def patch(owner: Any, name: str, member: Any, builder: Any, changes: Any) -> None:
        """A builtin that is given the interpreter's semantics, without a wrapper around a wrapper."""
        raw = getattr(member, "__wrapped__", member)

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = interpreter.interpreter_semantic
            return raw(*args, **options)

        changes.set_attr(owner, name, call)

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind is constexpr:
            return value.value
        return unwrap(value) if kind in nested else value

    address = np.dtype(np.uint64)
    numbers, convert = dict[Any, Any](), semantic.cast
    make_tensor, make_constant = semantic.to_tensor, semantic.scalar_constant
    make_alike, add = semantic.broadcast_impl_value, semantic.add
    scope.set_attr(interpreter, "_get_np_dtype", cached_np_dtype)
    scope.set_attr(interpreter, "_patch_attr", patch)
    scope.set_attr(interpreter, "_patch_lang_tensor", _scalars_as_bounds(interpreter._patch_lang_tensor))
    scope.set_attr(tl.core, "_unwrap_if_constexpr", unwrapped)
    scope.set_attr(tensor, "__init__", initialise)
    scope.set_attr(tl.core.block_type, "__init__", initialise_block)
    scope.set_attr(semantic, "binary_op_type_checking_impl", checked)
    scope.set_attr(semantic, "to_tensor", to_tensor)
    scope.set_attr(semantic, "scalar_constant", constant)
    scope.set_attr(semantic, "broadcast_impl_value", broadcast)
    scope.set_attr(semantic, "add", added)
    scope.set_attr(semantic, "cast", cast)
    scope.set_attr(interpreter.TensorHandle, "__post_init__", lambda handle: None)
    return scope


@contextlib.contextmanager
def watched(watcher: Watcher, cache: dict[Any, Any]) -> Iterator[None]:
    """Inside the block every kernel is interpreted under a watcher; `cache` keeps rewritten functions."""
    builder = interpreter.interpreter_builder
    before = dict(vars(builder))
    classes = (interpreter.InterpretedFunction, JITFunction)
    methods = [(each, name, each.__dict__.get(name)) for each in classes for name in ("run", "__call__")]
    methods.append((Autotuner, "run", Autotuner.run))

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        if not warmup:
            watcher.launch(_launch(self, cache, grid, args, options))

    def call(self: Any, *args: Any, **options: Any) -> Any:
        options.pop("_semantic", None)
        return _interpreted(self, cache)(*args, **options)

    def first(self: Any, *args: Any, **options: Any) -> None:
        """Of candidates the first: there is nothing to time here."""
        self.fn.run(*args, **{**self.configs[0].all_kwargs(), **options})

    scope_of_types, options = _quicker(), builder.options
    scope = interpreter._patch_lang(_everywhere())
    try:
        vars(builder).update(_watching(watcher), options=replace(options, sanitize_overflow=False))
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
        scope_of_types.restore()
