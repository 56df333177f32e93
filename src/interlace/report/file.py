"""The file of a trace by `torch.profiler` -> its JSON, plain or gzip.

Control characters and bytes that are no text, as names have, are let pass, and what several versions of the profiler
wrote that is no JSON is read too: quotes and line ends in the name of a Python frame, backslashes of Windows paths, and
numbers that are none, as a bandwidth over no time.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from pathlib import Path
from typing import Any

from interlace.errors import DataError

_NAME = re.compile(  # up to what may stand behind it: another key, or the end of its object
    r'("name"\s*:\s*")(.*?)("\s*(?:,\s*"(?:ph|cat|pid|tid|ts|dur|args|id|bp|s)"\s*:|\}\s*[,}\]]))', re.DOTALL
)
_PART = re.compile(r'"(?:[^"\\]|\\.)*"|(?<![\w."])-?(?:nan|inf|N/A)(?![\w."])', re.DOTALL)
_PACKED = {b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
_ESCAPE = re.compile(r'(\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))|\\')


def load(path: str | Path) -> dict[str, Any]:
    """The JSON of a trace; DataError says in one sentence what is wrong with the file."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}): give a trace", file=str(path)) from None
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error):
            raise DataError(
                f"{path}: the gzip file is cut off or damaged: copy it again, or record the trace again", file=str(path)
            ) from None
    if not data.strip():
        raise DataError(f"{path}: the file is empty: record the trace again", file=str(path))
    if packed := next((name for mark, name in _PACKED.items() if data.startswith(mark)), ""):
        raise DataError(f"{path}: packed by {packed}: unpack it, or give a plain or gzip trace", file=str(path))
    try:
        trace = _parsed(data.decode(json.detect_encoding(data), errors="replace"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and _is_cut(error):
            raise DataError(
                f"{path}: the JSON is cut off at its end: wait until it is written, copy it again, or record the trace "
                "again",
                file=str(path),
            ) from None
        raise DataError(f"{path}: not JSON ({error}): give a Chrome trace by torch.profiler", file=str(path)) from None
    if isinstance(trace, list):
        trace = {"traceEvents": trace}
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise DataError(f"{path}: no list 'traceEvents': give a Chrome trace by torch.profiler", file=str(path))
    return trace


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except json.JSONDecodeError as error:
        try:
            return json.loads(_mended(text), strict=False)
        except json.JSONDecodeError:  # at a place of another text
            raise error from None


def _is_cut(error: json.JSONDecodeError) -> bool:
    """Whether the text ended where more was expected."""
    return error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string")


def _mended(text: str) -> str:
    """The text with names escaped, and null for numbers that are none."""
    text = _NAME.sub(lambda name: name[1] + re.sub(r'(?<!\\)"', r"\"", name[2]) + name[3], text)
    return _PART.sub(lambda part: _escaped(part[0]) if part[0][0] == '"' else "null", text)


def _escaped(string: str) -> str:
    return _ESCAPE.sub(lambda found: found[1] or r"\\", string)
