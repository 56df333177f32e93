"""Shortcuts through what Triton's interpreter does many times for each memory operation; results stay the same.

Beside `interpreter` the only place that touches its inside.  A kernel of a dozen lines makes some 700 calls of the
interpreter for each of its memory operations: types that are made anew for every value, constants turned into arrays,
checks of what has the same type already.  Here they are looked up; whatever is not the usual case goes the old way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

Patches = list[tuple[Any, str, Any]]  # owner, name, what takes its place

tensor, semantic, constexpr = tl.core.tensor, interpreter.TritonSemantic, tl.core.constexpr


def take() -> Any:
    """Puts the shortcuts in place; the result's `restore()` takes them away.

    They are there once: what they look up is compared by identity, and two sets of it would not be alike.
    """
    scope = interpreter._LangPatchScope()
    if hasattr(tl.core.block_type.__init__, "is_shortcut"):
        return scope
    constants, constant = _constants()
    for owner, name, member in (*_types(), *constants, *_arithmetic(constant), *_calls()):
        scope.set_attr(owner, name, member)
    return scope


def operations() -> dict[str, Callable[..., Any]]:
    """Of the builder: pointers and offsets, and products, sums .. of numbers of one size."""
    builder, binary_op = interpreter.interpreter_builder, interpreter.InterpreterBuilder.binary_op
    handle, unsigned, size_of = interpreter.TensorHandle, np.dtype(np.uint64), element_sizes()

    def create_addptr(pointers: Any, offset: Any) -> Any:
        kind = pointers.dtype
        return handle(pointers.data + size_of(kind) * offset.data.astype(unsigned), kind)

    def quick_binary_op(left: Any, right: Any, operation: Any) -> Any:
        kind = left.dtype.scalar
        if kind is tl.bfloat16:
            return as_bfloat16(operation(as_float32(left), as_float32(right)))
        made = operation(left.data, right.data)
        if made.dtype is left.data.dtype:  # no wider than what it was made of
            return handle(made, kind)
        return binary_op(builder, left, right, operation)

    return {"create_addptr": create_addptr, "binary_op": quick_binary_op, **bfloat16_operations()}


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


def scalars_as_bounds(patch: Callable[..., None]) -> Callable[..., None]:
    """`range(n)` over a number of the kernel: the interpreter's own way ends with NumPy 2.4, and warns before it."""

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patched


def _types() -> Patches:
    """Types of values and blocks, made once for each shape and element."""
    kinds, blocks = dict[Any, Any](), dict[Any, Any]()
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {(): (constexpr(1), tl.core.tuple([]))}
    np_dtype, make_block, address = interpreter._get_np_dtype, tl.core.block_type.__init__, np.dtype(np.uint64)

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
            found = (constexpr(math.prod(key)), tl.core.tuple([constexpr(n) for n in key]))
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

    initialise_block.is_shortcut = True  # type: ignore[attr-defined]
    return [
        (interpreter, "_get_np_dtype", cached_np_dtype),
        (tensor, "__init__", initialise),
        (tl.core.block_type, "__init__", initialise_block),
        (interpreter.TensorHandle, "__post_init__", lambda handle: None),
    ]


def _constants() -> tuple[Patches, Callable[..., Any]]:
    """Python's numbers as values, made once for each; and how the others ask for one."""
    numbers = dict[Any, Any]()
    make_tensor, make_constant = semantic.to_tensor, semantic.scalar_constant

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

    return [(semantic, "to_tensor", to_tensor), (semantic, "scalar_constant", constant)], constant


def _is_whole(kind: Any) -> bool:
    return kind is tl.int32 or kind is tl.int64


def _is_usual(kind: Any) -> bool:
    return kind is tl.int32 or kind is tl.int64 or kind is tl.float32


def _spread(scalar: Any, block: Any) -> Any:
    data = np.full(block.handle.data.shape, scalar.handle.data, dtype=scalar.handle.data.dtype)
    return tensor(interpreter.TensorHandle(data, scalar.dtype), block.type)


def _arithmetic(constant: Callable[..., Any]) -> Patches:
    """Two operands that fit each other already, or nearly; casts to the same type."""
    check_types, convert = semantic.binary_op_type_checking_impl, semantic.cast
    make_alike, add = semantic.broadcast_impl_value, semantic.add

    def checked(self: Any, left: Any, right: Any, *flags: Any, **options: Any) -> Any:
        """Numbers of one usual type, some of them Python's, of one shape or one of them a scalar."""
        if type(left) is int and type(right) is tensor and _is_whole(right.dtype):
            left = constant(self, left, right.dtype) if abs(left) < 1 << 31 else left
        elif type(right) is int and type(left) is tensor and _is_whole(left.dtype):
            right = constant(self, right, left.dtype) if abs(right) < 1 << 31 else right
        if type(left) is tensor and type(right) is tensor and left.dtype is right.dtype and _is_usual(left.dtype):
            if left.shape is right.shape:
                return left, right
            if not left.shape.values:
                return _spread(left, right), right
            if not right.shape.values:
                return left, _spread(right, left)
        return check_types(self, left, right, *flags, **options)

    def cast(self: Any, value: Any, kind: Any, rounding: Any = None) -> Any:
        return value if value.dtype is kind else convert(self, value, kind, rounding)

    def broadcast(self: Any, left: Any, right: Any) -> Any:
        return (left, right) if left.shape is right.shape else make_alike(self, left, right)

    def added(self: Any, left: Any, right: Any, sanitize_overflow: bool) -> Any:
        """A pointer, or pointers, and offsets; the usual numbers of one shape."""
        if type(right) is int and type(left) is tensor and left.dtype is not tl.int1:
            right = constant(self, right, tl.int32) if abs(right) < 1 << 31 else right
        if type(left) is tensor and type(right) is tensor:
            if left.shape is right.shape:
                if left.dtype is right.dtype and _is_usual(left.dtype):
                    made = self.builder.create_add if left.dtype is not tl.float32 else self.builder.create_fadd
                    return tensor(made(left.handle, right.handle), left.type)
                if _is_whole(right.dtype) and left.dtype.is_ptr():
                    return tensor(self.builder.create_addptr(left.handle, right.handle), left.type)
            elif _is_whole(right.dtype) and not left.shape.values and left.dtype.is_ptr():
                made = self.builder.create_addptr(left.handle, right.handle)
                return tensor(made, tl.core.block_type(left.dtype, right.shape))
        return add(self, left, right, sanitize_overflow)

    return [
        (semantic, "binary_op_type_checking_impl", checked),
        (semantic, "broadcast_impl_value", broadcast),
        (semantic, "add", added),
        (semantic, "cast", cast),
    ]


def _calls() -> Patches:
    """How a builtin is called, and what it does to its arguments first."""
    unwrap, nested = tl.core._unwrap_if_constexpr, (list, tuple, tl.core.tuple)

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

    return [
        (interpreter, "_patch_attr", patch),
        (interpreter, "_patch_lang_tensor", scalars_as_bounds(interpreter._patch_lang_tensor)),
        (tl.core, "_unwrap_if_constexpr", unwrapped),
    ]
