"""Builtins of Triton's language, recorded once for every combination of operands' types.

Equals calling them: what a builtin asks of the interpreter's builder follows from the types of its operands and from
the constants it is given, not from numbers.  Quicker because only that is done again: of the ten or more Python
functions between `a + b` and NumPy's addition four are left.  A call that was seen before is recorded, and recorded
again; where both agree, a function of just these operations takes its place.  What looks at numbers, or makes values in
other ways than by the builder, is called as ever.
"""

from __future__ import annotations

import collections
import re
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

tensor, constexpr, handle = tl.core.tensor, tl.core.constexpr, interpreter.TensorHandle
HANDLES = (handle, interpreter.BlockPointerHandle, interpreter.TensorDescHandle)
FOLDED = frozenset({"create_splat", "create_make_range"})  # of constants: made once
SPREAD = frozenset({"create_splat", "create_broadcast"})  # NumPy does these by itself
WATCHED = ("create_icmp", "create_sub")  # what the left one is, a checker looks at
MOST = 4096  # combinations of one builtin that are kept
TRIES = 8  # recordings of one combination, after which it is called as ever
SIGHTINGS = 2  # of a combination before it is worth a recording
NAMES = """
add sub mul truediv floordiv mod and or xor lshift rshift lt le gt ge eq ne
"""
OPERATORS = frozenset(f"__{side}{name}__" for side in ("", "r") for name in NAMES.split())  # of two operands


class _Unusual(Exception):
    """An argument that is neither an operand nor a plain constant."""


def key_of(given: Any) -> Any:
    """What of an argument decides what a builtin does: equal for arguments that are alike."""
    kind = type(given)
    if kind is tensor:
        return given.key
    if given is None:
        return None
    if kind is int or kind is bool or kind is str:
        return kind, given
    if kind is constexpr:
        return kind, key_of(given.value)
    if kind is float:
        return kind, given.hex()
    if kind is list or kind is tuple:
        return kind, *map(key_of, given)
    if isinstance(given, tl.dtype):
        return kind, given.name, getattr(given, "address_space", None)
    if kind is slice and given == slice(None):
        return slice
    raise _Unusual


class _Log:
    """A builder that notes, as lines of Python, what it is asked."""

    def __init__(self, builder: Any, table: Recorded) -> None:
        self._builder, self._table, self._kept = builder, table, list[Any]()
        self.names: dict[int, str] = {}  # of handles
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.asked: dict[str, tuple[str, list[str]]] = {}  # by result
        self.values: dict[str, Any] = {}  # constants
        self.told: list[str] = []  # constants that are no handles, for comparing two recordings
        self.is_whole = True

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._builder, name)
        if not name.startswith(("create_", "get_")):
            return member
        return lambda *args, **options: self._ask(name, member, args, options)

    def _ask(self, name: str, member: Any, args: Any, options: Any) -> Any:
        try:
            words = [self._word(each) for each in args]
            words += [f"{key}={self._word(each)}" for key, each in options.items()]
        except _Unusual:
            self.is_whole, words = False, []
        before = self._table.looks
        made = member(*args, **options)
        self._table.looks = before  # whoever ran meanwhile may look at his numbers
        used = [self.names.get(id(each), "") for each in args if isinstance(each, HANDLES)]
        if name.startswith("get_") or (name in FOLDED and all(word in self.values for word in used)):
            if isinstance(made, HANDLES):
                self.name(made, self._constant(made))
            return made
        result = f"v{len(self.asked)}"
        self.asked[result] = name, words
        self._kept.append(made)
        parts = getattr(made, "handles", made if isinstance(made, tuple) else ())
        for path, each in [(result, made), *((f"{result}.handles[{i}]", each) for i, each in enumerate(parts))]:
            if isinstance(each, HANDLES):
                self.name(each, path)
        self.is_whole &= not isinstance(made, tuple)
        return made

    def name(self, value: Any, path: str) -> str:
        self.names[id(value)] = path
        self.shapes[path] = getattr(getattr(value, "data", None), "shape", ())
        return path

    def _constant(self, value: Any) -> str:
        name = f"k{len(self.values)}"
        self.values[name] = value
        return name

    def _word(self, value: Any) -> str:
        if isinstance(value, HANDLES):
            found = self.names.get(id(value))
            if found is None and id(value) in self._table.constants:
                found = self.name(value, self._constant(value))
            if found is None:
                raise _Unusual
            return found
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        if type(value) in (list, tuple):
            return f"[{', '.join(map(self._word, value))}]"
        plain = isinstance(value, tl.dtype | tl.core.tuple | float) or type(value).__module__.startswith("triton._C")
        if not plain:
            raise _Unusual
        self.told.append(repr(value))
        return self._constant(value)

    def lines(self, elementwise: frozenset[str], end: str) -> list[str]:
        """What was asked, less the blocks made of a scalar, or of a row, for an operation that spreads it by itself."""
        everything = " ".join([end, *(word for _, words in self.asked.values() for word in words)])
        times = collections.Counter(re.findall(r"\bv\d+\b", everything))
        once = {result for result in self.asked if times[result] == 1 and not re.search(rf"\b{result}\b", end)}
        spread = {
            result: words[name == "create_splat"]
            for result, (name, words) in self.asked.items()
            if name in SPREAD and result in once
        }
        made, gone = {}, set[str]()
        for result, (name, words) in self.asked.items():
            if name in elementwise:
                words, before = self._unspread(name, words, self.shapes[result], spread), {*words}
                gone |= before - {*words}
            made[result] = f"{result} = _builder.{name}({', '.join(words)})"
        return [line for result, line in made.items() if result not in gone]

    def _unspread(self, name: str, words: list[str], shape: Any, spread: dict[str, str]) -> list[str]:
        """The two operands as they were before they were spread, as far as the result stays the same."""
        left, right = words
        pairs = [(left, spread.get(right, right))]
        if not name.startswith(WATCHED):
            pairs.insert(0, (spread.get(left, left), spread.get(right, right)))
        for pair in pairs:
            if np.broadcast_shapes(*(self.shapes[each] for each in pair)) == shape:
                return [*pair]
        return words

    def end(self, made: Any) -> str:
        """The last line; what a builtin returns."""
        if made is None:
            return "return None"
        if type(made) is not tensor:
            raise _Unusual
        value = "None" if made.handle is None else self._word(made.handle)
        self.told.append(repr(made.type))
        return f"return _tensor({value}, {self._constant(made.type)})"


class Recorded:
    """The functions that have taken the place of builtins, for one process.

    `elementwise` are the builder's operations that are one of NumPy's on two values.
    `looks` counts how often a number of the kernel has decided something.
    """

    def __init__(self, builder: Any, elementwise: frozenset[str]) -> None:
        self._builder, self._elementwise, self.looks = builder, elementwise, 0
        self.constants: dict[int, Any] = {}  # handles that never change, by identity
        self._semantic = interpreter.interpreter_semantic
        self._wrapped: dict[tuple[Any, bool], Callable[..., Any]] = {}

    def keep(self, value: Any) -> Any:
        """A value made once for all: an operand that is one is none for a recording."""
        self.constants[id(value.handle)] = value.handle
        return value

    def wrapped(self, raw: Callable[..., Any], name: str) -> Callable[..., Any]:
        """What stands for a builtin; `raw` takes the semantics by name."""
        key = raw, name in OPERATORS
        if key not in self._wrapped:
            self._wrapped[key] = self._wrap(*key)
        return self._wrapped[key]

    def _wrap(self, raw: Callable[..., Any], is_operator: bool) -> Callable[..., Any]:
        programs: dict[Any, Any] = {}
        semantic, first, function = self._semantic, self._first, types.FunctionType

        def call(*args: Any, **options: Any) -> Any:
            if options.get("_semantic") is not None:  # one builtin inside another
                return raw(*args, **options)
            options.pop("_semantic", None)
            try:
                key: Any = tuple([key_of(each) for each in args])
                if options:
                    key = *key, *options, *[key_of(each) for each in options.values()]
            except _Unusual:
                return raw(*args, **options, _semantic=semantic)
            program = programs.get(key)
            if type(program) is function:
                return program(*args, **options)
            return first(programs, key, raw, args, options)

        def operate(left: Any, right: Any, **options: Any) -> Any:
            kind = type(right)
            if kind is tensor:
                program = programs.get((left.key, right.key))
            elif kind is int:
                program = programs.get((left.key, (int, right)))
            else:
                return call(left, right, **options)
            if type(program) is function and not options:
                return program(left, right)
            return call(left, right, **options)

        return operate if is_operator else call

    def _first(self, programs: dict[Any, Any], key: Any, raw: Any, args: Any, options: dict[str, Any]) -> Any:
        """A combination that has no function yet: recorded when it comes again, and once more."""
        text, times = programs.get(key, ("", 0))
        if len(programs) >= MOST:
            programs.clear()
        programs[key] = text, times + 1
        if not SIGHTINGS <= times + 1 < SIGHTINGS + TRIES:
            return raw(*args, **options, _semantic=self._semantic)
        log, before = _Log(self._builder, self), self.looks
        try:
            given, named = self._operands(log, args, options)
        except _Unusual:
            return raw(*args, **options, _semantic=self._semantic)
        made = raw(*given, **named, _semantic=interpreter.TritonSemantic(log))
        try:
            end = log.end(made)
        except _Unusual:
            return made
        if log.is_whole and self.looks == before:
            parameters = [f"a{i}" for i in range(len(args))] + (["*", *options] if options else [])
            source = "\n    ".join([f"def program({', '.join(parameters)}):", *log.lines(self._elementwise, end), end])
            told = f"{source}\n# {log.told}"
            if told == text:
                scope = {"_builder": self._builder, "_tensor": tensor, **log.values}
                exec(compile(source, __file__, "exec"), scope)
                programs[key] = scope["program"]
            else:
                programs[key] = told, times + 1
        return made

    def _operands(self, log: _Log, args: Any, options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments, their handles named; one that is given twice or is a constant becomes another one."""

        def named(value: Any, path: str) -> Any:
            if type(value) in (list, tuple):
                return type(value)([named(each, f"{path}[{i}]") for i, each in enumerate(value)])
            if type(value) is not tensor:
                return value
            if id(value.handle) in self.constants or id(value.handle) in log.names:
                if type(value.handle) is not handle:
                    raise _Unusual
                value = tensor(handle(value.handle.data, value.handle.dtype), value.type)
                log._kept.append(value)
            log.name(value.handle, f"{path}.handle")
            return value

        return (
            [named(each, f"a{i}") for i, each in enumerate(args)],
            {name: named(each, name) for name, each in options.items()},
        )
