"""What the primitives compile to for a Hopper GPU, on any machine; and what the interpreter models of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from interlace.errors import ConfigError
from interlace.symmetric import device
from interlace.symmetric.interpreter import instructions
from interlace.symmetric.record import HEAD, RECORD, Record, name_word, stream_record


@triton.jit
def signals_and_waits(x, out, flag, count, heap, BLOCK: tl.constexpr):
    device.put_signal(out, x, count, flag, 3, 1, heap, BLOCK)
    device.wait_until(flag, 3, 1, heap, "kernel")
    device.admit_descriptors()


@triton.jit
def flushes(heap):
    device.quiet()


def ptx(kernel: object, signature: dict[str, str], constants: dict[str, int]) -> list[str]:
    aligned = {(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]}
    attributes = {at: what for at, what in aligned.items() if at[0] < len(signature)}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert len(made.asm["cubin"]) > 0
    return [line.strip() for line in made.asm["ptx"].splitlines()]


def test_order_scope_and_width_in_ptx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"x": "*fp32", "out": "*fp32", "flag": "*i32", "count": "i32", "heap": "*i64", "BLOCK": "constexpr"}
    lines = ptx(signals_and_waits, types, {"BLOCK": 1024})
    interesting = [
        line
        for line in lines
        if re.search(r"st\.(global|release)|bar\.sync|atom|ld\.(global\.sys|relaxed)|fence", line)
    ]
    release = next(n for n, line in enumerate(interesting) if line.startswith("@first st.release.sys.global.b32"))
    assert "bar.sync" in interesting[release - 1]  # all threads' stores come before one thread's release
    assert any("st.global.v4" in line for line in interesting[:release])  # the peer's address keeps its alignment
    after = interesting[release + 1 :]
    assert "ld.global.sys.acquire" in after[0]  # a poll is a plain load
    assert "bar.sync" in after[1]  # its value goes to all threads
    hint = next(n for n, line in enumerate(after) if line.startswith("ld.relaxed.sys"))
    assert not any("atom" in line for line in after[:hint])  # nothing that slows signals down before a first long look
    assert not any("acquire.add" in line or "acquire.cas" in line for line in lines)
    assert any(line.startswith("fence.proxy.async") for line in lines)


def test_a_descriptor_store_is_awaited_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    lines = "\n".join(ptx(flushes, {"heap": "*i64"}, {}))
    wait, fence = lines.index("cp.async.bulk.wait_group 0;"), lines.index("fence.acq_rel.sys;")
    assert wait < lines.index("bar.sync") < fence
    assert "wait_group.read" not in lines


def test_ptx_without_a_model_is_refused() -> None:
    assert instructions("fence.proxy.async; mov.u32 $0, 0;") == ["fence.proxy.async"]
    assert instructions("mov.u64 $0, %globaltimer;") == ["mov.u64 $0, %globaltimer"]
    with pytest.raises(ConfigError, match=r"inline PTX \"multimem.red .*\" has no model"):
        instructions("multimem.red [$1], $2")


def test_a_record_is_read_as_it_was_written() -> None:
    words = stream_record(2, 4096, 7, -1, 0.25)
    words[0], words[1] = name_word("all_gather_matmul", 0), name_word("all_gather_matmul", 1)
    head = bytearray(HEAD)
    head[RECORD : RECORD + 64] = b"".join(word.to_bytes(8, "little", signed=True) for word in words)
    assert Record.read(1, bytes(head)) is None
    head[8] = 1
    record = Record.read(1, bytes(head))
    assert record == Record("all_gather_matmu", 1, 0, 2, 4096, 7, -1, 0.25)
    assert record.sentence("signals[3]").startswith(
        "rank 1 waited 0.250 s in all_gather_matmu, program 0, for signals[3] to reach 7, found -1: rank 2 has not"
    )
