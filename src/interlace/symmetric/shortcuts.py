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
    return [*_types(), *_calls(Recorded(interpreter.interpreter_builder))]


BINARY = {  # the builder's operations that are one of NumPy's on two values
    **{name: np.add for name in ("add", "fadd")},
    **{name: np.subtract for name in ("sub", "fsub")},
    **{name: np.multiply for name in ("mul", "fmul")},
    **{name: np.fmod for name in ("srem", "urem", "frem")},
    **{name: np.minimum for name in ("minsi", "minui", "minimumf", "minnumf")},
    **{name: np.maximum for name in ("maxsi", "maxui", "maximumf", "maxnumf")},
    **{name: np.less for name in ("icmpSLT", "icmpULT", "fcmpOLT", "fcmpULT")},
    **{name: np.less_equal for name in ("icmpSLE", "icmpULE", "fcmpOLE", "fcmpULE")},
    **{name: np.greater for name in ("icmpSGT", "icmpUGT", "fcmpOGT", "fcmpUGT")},
    **{name: np.greater_equal for name in ("icmpSGE", "icmpUGE", "fcmpOGE", "fcmpUGE")},
    **{name: np.equal for name in ("icmpEQ", "fcmpOEQ", "fcmpUEQ")},
    **{name: np.not_equal for name in ("icmpNE", "fcmpONE", "fcmpUNE")},
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def operations() -> dict[str, Callable[..., Any]]:
    """Of the builder: pointers and offsets, and products, sums .. of numbers of one size."""
    handle, unsigned, size_of = interpreter.TensorHandle, np.dtype(np.uint64), element_sizes()

    def create_addptr(pointers: Any, offset: Any) -> Any:
        kind = pointers.dtype
        return handle(pointers.data + size_of(kind) * offset.data.astype(unsigned), kind)

    def binary(operation: Any) -> Callable[..., Any]:
        return lambda left, right: binary_op(left, right, operation)

    made = {f"create_{name}": binary(operation) for name, operation in BINARY.items()}
    return {**made, "create_addptr": create_addptr, "binary_op": binary_op, **bfloat16_operations()}


def binary_op(left: Any, right: Any, operation: Any) -> Any:
    kind, data = left.dtype.scalar, left.data
    if kind is tl.bfloat16:
        return as_bfloat16(operation(as_float32(left), as_float32(right)))
    made = operation(data, right.data)
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


# Triton's interpreter keeps the 16 bits of a bfloat16 and calculates with them as with an integer.


def as_float32(operand: Any) -> Any:
    """The numbers of a handle, whose bits those of a bfloat16 are."""
    if operand.dtype.scalar is not tl.bfloat16:
        return operand.data
    return (np.asarray(operand.data).astype(np.uint32) << 16).view(np.float32)


def as_bfloat16(numbers: Any) -> Any:
    """A handle of numbers rounded to the nearest bfloat16, ties to even, as GPUs do; what comparisons give stays so."""
    if np.asarray(numbers).dtype == bool:
        return interpreter.TensorHandle(numbers, tl.bfloat16)
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


def _types() -> Patches:
    """What a value's type tells of it, made once for each; handles without a check of what the builder has made."""
    kinds, facts = dict[Any, Any](), dict[Any, Any]()
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
        return found  # type: ignore[no-any-return]

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
        (interpreter, "_patch_attr", patch),
        (interpreter, "_patch_lang_tensor", _looks(interpreter._patch_lang_tensor, builtins)),
        (semantic, "to_tensor", to_tensor),
        (tl.core, "_unwrap_if_constexpr", unwrapped),
    ]
