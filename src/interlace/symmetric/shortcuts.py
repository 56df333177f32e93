"""Shortcuts through what Triton's interpreter does many times for each memory operation; results stay the same.

Beside `interpreter` the only place that touches its inside.  A kernel of a dozen lines makes some 700 calls of the
interpreter for each of its memory operations: types that are made anew for every value, constants turned into arrays,
checks of what has the same type already.  Here they are looked up; whatever is not the usual case goes the old way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from interlace.errors import ConfigError
from interlace.symmetric.recorded import Recorded

Patches = list[tuple[Any, str, Any]]  # owner, name, what takes its place

tensor, semantic, constexpr = tl.core.tensor, interpreter.TritonSemantic, tl.core.constexpr


def take() -> Any:
    """Puts the shortcuts in place; the result's `restore()` takes them away."""
    scope = interpreter._LangPatchScope()
    for owner, name, member in _patches():
        if getattr(owner, name) is not member:
            scope.set_attr(owner, name, member)
    return scope


@functools.cache
def _patches() -> Patches:
    """One set for the whole process: what it has seen, it need not look at again."""
    elementwise = frozenset(f"create_{name}" for name in (*BINARY, "addptr"))
    return [*_types(), *_calls(Recorded(interpreter.interpreter_builder, elementwise))]


BINARY = {  # the builder's operations that are one of NumPy's on two values
    name: operation
    for operation, *names in (
        (np.add, "add", "fadd"),
        (np.subtract, "sub", "fsub"),
        (np.multiply, "mul", "fmul"),
        (np.fmod, "srem", "urem", "frem"),
        (np.minimum, "minsi", "minui", "minimumf", "minnumf"),
        (np.maximum, "maxsi", "maxui", "maximumf", "maxnumf"),
        (np.less, "icmpSLT", "icmpULT", "fcmpOLT", "fcmpULT"),
        (np.less_equal, "icmpSLE", "icmpULE", "fcmpOLE", "fcmpULE"),
        (np.greater, "icmpSGT", "icmpUGT", "fcmpOGT", "fcmpUGT"),
        (np.greater_equal, "icmpSGE", "icmpUGE", "fcmpOGE", "fcmpUGE"),
        (np.equal, "icmpEQ", "fcmpOEQ", "fcmpUEQ"),
        (np.not_equal, "icmpNE", "fcmpONE", "fcmpUNE"),
        (np.bitwise_and, "and"),
        (np.bitwise_or, "or"),
        (np.bitwise_xor, "xor"),
    )
    for name in names
}


def operations() -> dict[str, Callable[..., Any]]:
    """Of the builder: pointers and offsets, and products, sums .. of numbers of one size."""
    handle, unsigned, size_of = interpreter.TensorHandle, np.dtype(np.uint64), element_sizes()

    def create_addptr(pointers: Any, offset: Any) -> Any:
        kind, data, by = pointers.dtype, pointers.data, offset.data
        if data.shape == by.shape == (1,):
            return handle(np.array([(data.item() + size_of(kind) * by.item()) % (1 << 64)], unsigned), kind)
        return handle(data + size_of(kind) * by.astype(unsigned), kind)

    def create_splat(kind: Any, value: Any) -> Any:
        data = value.data if value.data.ndim == 0 else value.data[0]
        return handle(np.full(kind.shape, data, value.data.dtype), value.dtype.scalar)

    def create_expand_dims(value: Any, axis: int) -> Any:
        shape = list(value.data.shape)
        shape.insert(axis if axis >= 0 else len(shape) + 1 + axis, 1)
        return handle(value.data.reshape(shape), value.dtype.scalar)

    def of_one_kind(name: str) -> Callable[..., Any]:
        original = getattr(interpreter.InterpreterBuilder, f"create_{name}")

        def create(left: Any, right: Any) -> Any:
            kinds = left.dtype.scalar, right.dtype.scalar
            if kinds[0] != kinds[1]:
                raise ConfigError(f"tl.{name} was given {kinds[0]} and {kinds[1]}; cast one to the other's type.")
            return original(interpreter.interpreter_builder, left, right)

        return create

    def create_histogram(data: Any, bins: int, mask: Any) -> Any:
        made = interpreter.InterpreterBuilder.create_histogram(interpreter.interpreter_builder, data, bins, mask)
        return handle(made.data.astype(np.int32), tl.int32)

    def get_all_ones_value(kind: Any) -> Any:
        return handle(np.full(1, -1).astype(interpreter._get_np_dtype(kind)), kind.scalar)

    def binary(operation: Any) -> Callable[..., Any]:
        return lambda left, right: binary_op(left, right, operation)

    made = {f"create_{name}": binary(operation) for name, operation in BINARY.items()}
    made |= {"create_addptr": create_addptr, "create_splat": create_splat, "create_expand_dims": create_expand_dims}
    made |= {"create_cat": of_one_kind("cat"), "create_join": of_one_kind("join")}
    made |= {"create_histogram": create_histogram, "get_all_ones_value": get_all_ones_value}
    made["create_atomic_rmw"] = lambda operation, pointers, value, mask, sem, scope: atomic(
        operation, pointers, value, mask, sem
    )
    return {**made, "binary_op": binary_op, **bfloat16_operations()}


def binary_op(left: Any, right: Any, operation: Any) -> Any:
    kind, data = left.dtype.scalar, left.data
    if kind is tl.bfloat16:
        made = operation(as_float32(left), as_float32(right))
    else:
        made = operation(data, right.data)
    if made.dtype == bool:
        return interpreter.TensorHandle(made, tl.int1)
    if kind is tl.bfloat16:
        return as_bfloat16(made)
    if made.itemsize > data.itemsize and not isinstance(kind, tl.pointer_type):  # wider than what it was made of
        made = made.astype(interpreter._get_np_dtype(kind))
    return interpreter.TensorHandle(made, kind)


@functools.cache
def _blank(shape: tuple[int, ...], kind: Any, value: int) -> Any:
    """An array that nobody writes to."""
    made = np.full(shape, value, kind)
    made.flags.writeable = False
    return made


def load(pointers: Any, mask: Any, other: Any) -> Any:
    """What a masked load of the builder gives, or one without a mask; no cache and no order."""
    data, element = pointers.data, pointers.get_element_ty()
    kind = interpreter._get_np_dtype(element)
    chosen = _blank(data.shape, bool, 1) if mask is None else mask.data
    instead = _blank(data.shape, kind, 0) if other is None else other.data
    return interpreter.TensorHandle(interpreter._interpreter.load(data, chosen, instead, kind), element)


def store(pointers: Any, value: Any, mask: Any) -> None:
    data = pointers.data
    interpreter._interpreter.store(data, value.data, _blank(data.shape, bool, 1) if mask is None else mask.data)


def atomic(operation: Any, pointers: Any, value: Any, mask: Any, sem: Any) -> Any:
    """What an atomic of the builder gives; lanes whose mask is not set get 0, not what happens to lie there."""
    kind, data = interpreter.InterpreterBuilder, pointers.data
    chosen = _blank(data.shape, bool, 1) if mask is None else mask.data
    word, order = kind.ir_rmw_op_to_interpreter_rmw_op[operation], kind.ir_sem_to_interpreter_sem[sem]
    given = value.data
    if given.dtype.kind == "f" and operation == interpreter._ir.ATOMIC_OP.XCHG:  # of bits, whatever they stand for
        given = given.view(f"i{given.itemsize}")
    made = interpreter._interpreter.atomic_rmw(word, data, given, chosen, order)
    if given is not value.data:
        made = made.view(value.data.dtype)
    if b"\0" in chosen.tobytes():
        made = np.where(chosen, made, made.dtype.type(0))
    return interpreter.TensorHandle(made, value.dtype.scalar)


# Triton's interpreter keeps the 16 bits of a bfloat16 and calculates with them as with an integer.


def as_float32(operand: Any) -> Any:
    """The numbers of a handle, whose bits those of a bfloat16 are."""
    if operand.dtype.scalar is not tl.bfloat16:
        return operand.data
    return (np.asarray(operand.data).astype(np.uint32) << 16).view(np.float32)


def as_bfloat16(numbers: Any) -> Any:
    """A handle of numbers rounded to the nearest bfloat16, ties to even, as GPUs do."""
    single = np.asarray(numbers, np.float32)
    bits = single.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return interpreter.TensorHandle(np.where(np.isnan(single), np.uint16(0x7FC0), rounded), tl.bfloat16)


def bfloat16_operations() -> dict[str, Callable[..., Any]]:
    """Of the builder: what must see numbers in a bfloat16; binary operations see to it themselves."""
    builder, kind = interpreter.interpreter_builder, interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle

    def floats(operand: Any) -> Any:
        return handle(as_float32(operand), tl.float32) if operand.dtype.scalar is tl.bfloat16 else operand

    def cast_impl(source: Any, target: Any) -> Any:
        if target.scalar is tl.bfloat16 and source.dtype.scalar is not tl.bfloat16:
            return as_bfloat16(source.data)
        return kind.cast_impl(builder, floats(source) if target.scalar is not tl.bfloat16 else source, target)

    def unary_op(operand: Any, operation: Any) -> Any:
        if operand.dtype.scalar is tl.bfloat16:
            return as_bfloat16(operation(as_float32(operand)))
        return kind.unary_op(builder, operand, operation)

    def ternary_op(one: Any, two: Any, three: Any, operation: Any) -> Any:
        if one.dtype.scalar is tl.bfloat16:  # not of a choice, which copies
            return as_bfloat16(operation(*(as_float32(each) for each in (one, two, three))))
        return kind.ternary_op(builder, one, two, three, operation)

    def fma(one: Any, two: Any, three: Any) -> Any:
        if one.dtype.scalar is tl.bfloat16:
            return as_bfloat16(as_float32(one) * as_float32(two) + as_float32(three))
        return kind.create_fma(builder, one, two, three)

    def dot(one: Any, two: Any, total: Any, precision: Any, most: Any) -> Any:
        return kind.create_dot(builder, floats(one), floats(two), total, precision, most)

    return {
        "get_bf16": lambda value: as_bfloat16(np.array([value])),
        "cast_impl": cast_impl,
        "unary_op": unary_op,
        "ternary_op": ternary_op,
        "create_fma": fma,
        "create_dot": dot,
    }


def element_sizes() -> Callable[[Any], int]:
    """(kind of pointers) -> bytes of what one points at, as the interpreter counts them."""
    sizes: dict[str, int] = {}

    def size_of(kind: Any) -> int:
        while not isinstance(kind, tl.pointer_type):
            kind = kind.element_ty
        element = kind.element_ty
        found = sizes.get(element.name)
        if found is None:
            found = sizes[element.name] = max(1, element.primitive_bitwidth // 8)
        return found

    return size_of


def _looks(patch: Callable[..., None], builtins: Recorded) -> Callable[..., None]:
    """Where a number of the kernel decides something: `if`, `while`, `range(n)`.

    (Of the last the interpreter's own way ends with NumPy 2.4, and warns before it.)
    """

    def is_true(self: Any) -> bool:
        data = self.handle.data
        if data.size != 1:  # of a block, only that there is one
            return True
        builtins.looks += 1
        return bool(data)

    def index(self: Any) -> int:
        builtins.looks += 1
        return int(self.handle.data.item())

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", index)
        scope.set_attr(tensor, "__bool__", is_true)

    return patched


@functools.cache
def _facts() -> dict[Any, tuple[Any, Any, Any, int]]:
    """By type of values; one for the whole process, since the types keep what was found."""
    return {}


def _types() -> Patches:
    """What a value's type tells of it, made once for each; handles without a check of what the builder has made."""
    kinds, facts = dict[Any, Any](), _facts()
    np_dtype, address = interpreter._get_np_dtype, np.dtype(np.uint64)

    def cached_np_dtype(kind: Any) -> Any:
        if isinstance(kind, tl.block_type):
            kind = kind.element_ty
        if isinstance(kind, tl.pointer_type):
            return address
        found = kinds.get(kind)
        if found is None:
            found = kinds[kind] = np_dtype(kind)
        return found

    def facts_of(kind: Any) -> tuple[Any, Any, Any, int]:
        """(number of elements, their shape, type of one, a number that equal types share)."""
        element, sizes = kind.scalar, tuple([int(n) for n in kind.shape]) if kind.is_block() else ()
        key = (type(element), element.name, getattr(element, "address_space", None), sizes)
        found = facts.get(key)
        if found is None:
            shape = tl.core.tuple([constexpr(n) for n in sizes])
            found = facts[key] = (constexpr(math.prod(sizes)), shape, element, len(facts))
        kind._facts = found
        return found

    def initialise(self: Any, made: Any, kind: Any) -> None:
        self.handle, self.type = made, kind
        try:
            self.numel, self.shape, self.dtype, self.key = kind._facts
        except AttributeError:
            self.numel, self.shape, self.dtype, self.key = facts_of(kind)

    def initialise_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    return [
        (interpreter, "_get_np_dtype", cached_np_dtype),
        (tensor, "__init__", initialise),
        (interpreter.TensorHandle, "__init__", initialise_handle),
    ]


def _wide(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Reductions and scans, those of bfloat16 by way of float32."""

    def cast(value: Any, kind: Any) -> Any:
        made = as_bfloat16(value.handle.data) if kind is tl.bfloat16 else as_float32(value.handle)
        made = made if kind is tl.bfloat16 else interpreter.TensorHandle(made, kind)
        return tensor(made, value.type.with_element_ty(kind) if value.type.is_block() else kind)

    def applied(self: Any, given: Any) -> Any:
        if not isinstance(given, tuple):
            return applied(self, (given,))[0]
        narrow = [getattr(each, "dtype", None) is tl.bfloat16 for each in given]
        if not any(narrow):
            return apply(self, given)
        wide = tuple(
            [cast(each, tl.float32) if is_narrow else each for each, is_narrow in zip(given, narrow, strict=True)]
        )
        made = apply(self, wide)
        return tuple(
            [cast(each, tl.bfloat16) if is_narrow else each for each, is_narrow in zip(made, narrow, strict=True)]
        )

    return applied


def _wrapping(to_tensor: Callable[..., Any]) -> Callable[..., Any]:
    """What a reduction gives, of integers less what goes beyond their bits."""

    def wrapped(self: Any, ret: Any, dtype: Any) -> Any:
        return to_tensor(self, np.asarray(ret).astype(interpreter._get_np_dtype(dtype))[()], dtype)

    return wrapped


def _calls(builtins: Recorded) -> Patches:
    """How a builtin is called; Python's whole numbers as values, made once for each."""
    unwrap, nested = tl.core._unwrap_if_constexpr, (list, tuple, tl.core.tuple)
    numbers, make_tensor = dict[int, Any](), semantic.to_tensor

    def patch(owner: Any, name: str, member: Any, builder: Any, changes: Any) -> None:
        changes.set_attr(owner, name, builtins.wrapped(getattr(member, "__wrapped__", member), name))

    def to_tensor(self: Any, value: Any, check_type: bool = True) -> Any:
        if type(value) is tensor:
            return value
        if type(value) is not int:
            return make_tensor(self, value, check_type)
        found = numbers.get(value)
        if found is None:
            found = numbers[value] = builtins.keep(make_tensor(self, value))
        return found

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind is constexpr:
            return value.value
        return unwrap(value) if kind in nested else value

    return [
        (interpreter.ReduceScanOpInterface, "apply", _wide(interpreter.ReduceScanOpInterface.apply)),
        (interpreter.ReduceScanOpInterface, "to_tensor", _wrapping(interpreter.ReduceScanOpInterface.to_tensor)),
        (interpreter, "_patch_attr", patch),
        (interpreter, "_patch_lang_tensor", _looks(interpreter._patch_lang_tensor, builtins)),
        (semantic, "to_tensor", to_tensor),
        (tl.core, "_unwrap_if_constexpr", unwrapped),
    ]
