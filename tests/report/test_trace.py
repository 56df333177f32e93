"""Traces of other programs, made by hand with known answers; and damaged ones, each refused in one sentence."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.errors import DataError
from interlace.report.ledger import SECOND, Account, ledgers
from interlace.report.trace import Traced, from_traces, read
from traces import GEMM, NCCL, Entry, collective, kernel, ranked, span, trace


def read_all(*traces: dict[str, Any]) -> Traced:
    return from_traces([(f"{number}.json", each) for number, each in enumerate(traces)])


def accounts(found: Traced) -> dict[int, Account]:
    (ledger,) = ledgers(found.events, found.groups)
    return {account.rank: account for account in ledger.accounts}


def rows(account: Account) -> dict[str, float]:
    """In microseconds."""
    assert sum(account.rows.values()) == account.span
    return {row.label: round(ticks * 1e6 / SECOND, 6) for row, ticks in account.rows.items()}


# --- known answers ---------------------------------------------------------------------------------------------------


def test_several_streams_and_two_devices_in_one_file() -> None:
    found = read_all(
        trace(
            kernel(NCCL, 1008, 8, 3),
            kernel(GEMM, 1012, 8, 1),
            kernel(GEMM, 1000, 10, 1),
            kernel(NCCL, 1005, 9, 2),
            kernel(NCCL, 1007, 0, 2),
            kernel(GEMM, 1000, 4, 1, device=1),
            kernel(NCCL, 1004, 2, 2, device=1),
        )
    )
    first, second = accounts(found)[0], accounts(found)[1]
    assert rows(first) == {"compute": 18, "exposed transfer": 2}
    assert [n / 1e6 for n in (first.busy, first.hidden, first.total)] == [11, 9, 17]
    assert rows(second) == {"compute": 4, "exposed transfer": 2}
    assert any("2 devices: each is shown as a rank" in note for note in found.notes)


def test_no_communication_is_said() -> None:
    found = read_all(trace(kernel(GEMM, 0, 10), kernel("void at::native::reduce_kernel<512>(int)", 10, 5)))
    account = accounts(found)[0]
    assert rows(account) == {"compute": 15}
    assert (account.busy, account.hidden, account.total) == (0, 0, 0)
    assert "no communication found" in found.notes
    assert "the trace names no rank: taken as rank 0" in found.notes


def test_a_range_of_the_host_is_no_transfer() -> None:
    found = read_all(trace(kernel(GEMM, 0, 10), span("user_annotation", "nccl:all_reduce", 0, 5),
                           span("cuda_sync", "Event Sync", 0, 9)))  # fmt: skip
    assert "no communication found" in found.notes
    assert rows(accounts(found)[0]) == {"compute": 10}


def test_kinds_have_rows_of_their_own() -> None:
    found = read_all(
        trace(
            kernel("gemm_rs_kernel", 0, 4),
            kernel("magic", 4, 3),
            {**kernel("Memcpy HtoD", 7, 1), "cat": "gpu_memcpy"},
            {**kernel("Memcpy PtoP (Device -> Device)", 8, 2, bytes=4096), "cat": "gpu_memcpy"},
            kernel("multimem_all_gather_kernel", 10, 1),
        )
    )
    assert rows(accounts(found)[0]) == {
        "fused compute and transfer": 4,
        "unknown": 3,
        "other": 1,
        "exposed transfer peer copy": 2,
        "exposed transfer symmetric": 1,
    }
    assert "1 names of kernels are unknown, first magic (1)" in found.notes
    assert [event.bytes for event in found.events if event.name == "Memcpy PtoP"] == [4096]


def test_a_collective_is_laid_on_the_axis_of_its_group() -> None:
    both = {"Process Group Ranks": "[0, 1]", "Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP"}
    found = read_all(
        ranked(0, collective(0, 2), collective(2, 3, group="7", **both), collective(5, 1, group="9"), world=4)
    )
    assert rows(accounts(found)[0]) == {
        "exposed transfer dp": 2, "exposed transfer tp": 3, "exposed transfer group 9": 1
    }  # fmt: skip
    assert found.groups == {"dp": [(0, 1, 2, 3)], "tp": [(0, 1)]}
    assert {event.bytes for event in found.events if event.kind == "comm"} == {4096}
    assert any("no trace of rank 1, 2, 3" in note for note in found.notes)


def test_groups_of_one_description_through_one_rank_are_told_apart() -> None:
    config = [
        {"pg_name": "1", "pg_desc": "mesh_dp", "ranks": [0, 1]},
        {"pg_name": "2", "pg_desc": "mesh_dp", "ranks": [0, 1, 2, 3]},
        {"pg_name": "3", "pg_desc": "mesh_dp", "ranks": [0, 2]},
    ]
    one = trace(
        *(collective(i, 1, group=str(i + 1)) for i in range(3)), distributedInfo={"rank": 0, "pg_config": config}
    )
    assert found_lanes(read_all(one)) == ["comm.dp", "comm.dp of 4", "comm.dp of 2"]


def found_lanes(found: Traced) -> list[str]:
    return [event.lane for event in found.events if event.kind == "comm"]


def test_a_kernel_known_by_name_is_of_the_only_group_there_is() -> None:
    found = read_all(ranked(0, kernel(NCCL, 0, 2), kernel(GEMM, 2, 1)))
    assert found_lanes(found) == ["comm.dp"]


def test_ranks_are_laid_together_by_the_transfers_they_share() -> None:
    """Rank 1's clock is 5 s ahead, and its file counts from another moment; it comes 30 µs late to the second."""
    first = ranked(0, kernel(GEMM, 0, 100), collective(100, 20), kernel(GEMM, 120, 70), collective(190, 50),
                   kernel(GEMM, 240, 10), baseTimeNanoseconds=1_700_000_000_000_000_000)  # fmt: skip
    late = 5_000_000 - 2_000_000
    second = ranked(1, kernel(GEMM, late + 0, 95), collective(late + 95, 25), kernel(GEMM, late + 120, 100),
                    collective(late + 220, 20), kernel(GEMM, late + 240, 10),
                    baseTimeNanoseconds=1_700_000_002_000_000_000)  # fmt: skip
    found = read_all(first, second)
    ends = [[event.end for event in found.events if event.rank == rank and event.kind == "comm"] for rank in (0, 1)]
    assert ends[0] == pytest.approx(ends[1], abs=1e-9)
    assert min(event.begin for event in found.events) == 0
    assert rows(accounts(found)[0]) == {"compute": 180, "exposed transfer dp": 40, "waiting dp for rank 1": 30}
    assert rows(accounts(found)[1]) == {"compute": 205, "waiting dp for rank 0": 5, "exposed transfer dp": 40}


def test_ends_between_two_ranks_are_matched_by_who_sends_to_whom() -> None:
    send = {"Src Rank": 0, "Dst Rank": 1, "Process Group Description": "mesh_pp", "Process Group Ranks": "[0, 1]"}
    back = send | {"Src Rank": 1, "Dst Rank": 0}
    found = read_all(
        ranked(0, kernel(GEMM, 0, 10), collective(10, 2, "send", "5", **send), collective(12, 8, "recv", "5", **back)),
        ranked(1, collective(0, 12, "recv", "5", **send), kernel(GEMM, 12, 6), collective(18, 2, "send", "5", **back)),
    )
    assert rows(accounts(found)[0]) == {"compute": 10, "exposed transfer pp": 4, "pipeline bubble": 6}
    assert rows(accounts(found)[1]) == {"pipeline bubble": 10, "exposed transfer pp": 4, "compute": 6}


def test_sends_of_one_size_to_different_ranks_are_told_apart() -> None:
    """Rank 1 first hears from rank 2 and then sends to rank 0; by order alone these two would be taken for one."""
    group = {"Process Group Ranks": "[0, 1, 2]", "Process Group Description": "mesh_pp"}
    up, down = group | {"Src Rank": 2, "Dst Rank": 1}, group | {"Src Rank": 1, "Dst Rank": 0}
    found = read_all(
        ranked(0, collective(0, 30, "recv", "5", **down), world=3),
        ranked(1, collective(0, 10, "recv", "5", **up), collective(20, 10, "send", "5", **down), world=3),
        ranked(2, collective(7, 3, "send", "5", **up), kernel(GEMM, 10, 20), world=3),
    )
    assert rows(accounts(found)[0]) == {"pipeline bubble": 20, "exposed transfer pp": 10}
    assert rows(accounts(found)[1]) == {"pipeline bubble": 7, "exposed transfer pp": 13, "host gap": 10}


def test_files_that_count_from_different_moments() -> None:
    second = 1_000_000_000
    found = read_all(
        ranked(0, kernel(GEMM, 1_000_000, 10), baseTimeNanoseconds=1_700_000_000 * second),
        ranked(1, kernel(GEMM, 4, 10), baseTimeNanoseconds=1_700_000_001 * second),
    )
    begins = [event.begin for event in found.events if event.lane != "step"]
    assert begins == pytest.approx([0, 4e-6], abs=1e-12)


def test_ranks_that_share_nothing_keep_their_clocks() -> None:
    found = read_all(ranked(0, kernel(GEMM, 0, 10)), ranked(1, kernel(GEMM, 3, 10)))
    assert "rank 1 shares no transfer with rank 0: its clock is as recorded" in found.notes
    assert [event.begin for event in found.events if event.rank == 1 and event.lane != "step"] == [3e-6]


def test_a_missing_rank_is_said() -> None:
    found = read_all(ranked(0, collective(0, 9), world=3), ranked(2, collective(5, 4), world=3))
    assert any("no trace of rank 1" in note for note in found.notes)
    assert rows(accounts(found)[0]) == {"waiting dp for rank 2": 5, "exposed transfer dp": 4}


def test_steps_by_the_marks_on_the_device() -> None:
    entries = [kernel(GEMM, ts, 6) for ts in (0, 10, 22)]
    for number, ts in enumerate((0, 10, 20)):
        entries += [span("gpu_user_annotation", f"ProfilerStep#{number + 3}", ts, 8, pid=0, device=0, stream=7)]
        entries += [span("user_annotation", f"ProfilerStep#{number + 3}", ts - 5, 9)]
    found = ledgers(read_all(trace(*entries)).events)
    assert [(each.step, rows(each.accounts[0])) for each in found] == [
        ("step 3", {"compute": 6, "host gap": 4}),  # to the begin of the next
        ("step 4", {"compute": 6, "host gap": 4}),
        ("step 5", {"host gap": 2, "compute": 6}),
    ]


def test_steps_by_what_each_launched() -> None:
    """The device lags behind: its work counts for the step that launched it."""
    entries = [kernel(GEMM, 100 + ts, 6, correlation=i) for i, ts in enumerate((0, 10, 20))]
    entries += [span("cuda_runtime", "cudaLaunchKernel", ts, 1, correlation=i) for i, ts in enumerate((1, 2, 11))]
    entries += [span("user_annotation", f"ProfilerStep#{n}", 10 * n, 10) for n in (0, 1)]
    found = ledgers(read_all(trace(*entries)).events)
    assert [(each.step, rows(each.accounts[0])) for each in found] == [
        ("step 0", {"compute": 12, "host gap": 8}),
        ("step 1", {"compute": 6}),
    ]


def test_steps_by_their_marks_on_the_host_where_no_launch_is_recorded() -> None:
    entries = [kernel(GEMM, ts, 6) for ts in (31, 11, 12, 41)]
    entries += [span("user_annotation", f"ProfilerStep#{n}", 10 * n, 10) for n in (3, 1, 4)]
    found = ledgers(read_all(trace(*entries)).events)
    assert [(each.step, rows(each.accounts[0])) for each in found] == [
        ("step 1", {"compute": 7, "host gap": 13}),
        ("step 3", {"compute": 6, "host gap": 4}),
        ("step 4", {"compute": 6}),
    ]


@pytest.mark.parametrize("bad", [{"dur": -5}, {"dur": None}, {"ts": float("nan")}, {"ts": "20"}, {"dur": 2**64 - 1}])
def test_events_without_times_are_counted(bad: dict[str, Any]) -> None:
    found = read_all(trace(kernel(GEMM, 0, 10), kernel(GEMM, 20, 5) | bad))
    assert "1 GPU events without a usable begin or length are left out" in found.notes
    assert rows(accounts(found)[0]) == {"compute": 10}
    assert not any("left out" in note for note in read_all(trace(kernel(GEMM, 0, 10))).notes)


def test_an_event_days_away_from_the_others_has_no_time() -> None:
    """Zero begin and length, as the profiler writes what the driver gave no time for."""
    first = 1615207264505000
    found = read_all(trace(kernel(GEMM, 0, 0), kernel(GEMM, first, 10), kernel(NCCL, first + 8, 10, 20)))
    assert rows(accounts(found)[0]) == {"compute": 10, "exposed transfer": 8}
    assert "1 GPU events without a usable begin or length are left out" in found.notes


def test_the_update_is_what_the_optimizer_launched() -> None:
    found = read_all(
        trace(
            kernel("void at::native::multi_tensor_apply_kernel<A>(int)", 50, 7, correlation=1),
            kernel("void at::native::multi_tensor_apply_kernel<A>(int)", 57, 3, correlation=2),
            span("cuda_runtime", "cudaLaunchKernel", 12, 1, correlation=1),
            span("cuda_runtime", "cudaLaunchKernel", 22, 1, correlation=2),
            span("user_annotation", "Optimizer.step#AdamW.step", 10, 10),
        )
    )
    assert rows(accounts(found)[0]) == {"optimizer": 7, "compute": 3}


def test_a_kernel_without_a_name_is_what_its_operator_is() -> None:
    found = read_all(
        trace(
            kernel("magic", 0, 5, correlation=1),
            kernel("trick", 5, 2, **{"External id": 9}),
            span("cuda_runtime", "cudaLaunchKernel", 0, 1, correlation=1, **{"External id": 8}),
            span("cpu_op", "aten::frobnicate", 0, 2, **{"External id": 8}),
            span("cpu_op", "mine::trick", 3, 2, **{"External id": 9}),
        )
    )
    assert rows(accounts(found)[0]) == {"compute": 5, "unknown": 2}


def test_products_of_one_shape_are_slowed_beside_a_transfer() -> None:
    def product(at: float, dur: float, n: int, inner: int) -> list[Entry]:
        return [
            kernel(GEMM, at, dur, grid=[8, 8, 1], **{"External id": n}),
            span("cpu_op", "aten::mm", at, 1, **{"External id": n, "Input Dims": [[64, inner], [inner, 32]]}),
        ]

    found = read_all(
        trace(
            *product(0, 10, 1, 16),
            *product(10, 10, 2, 16),
            *product(20, 14, 3, 16),
            *product(34, 30, 4, 48),
            kernel(NCCL, 20, 44, 20),
        )
    )
    flops = [event.flops for event in found.events if event.kind == "compute" and event.lane != "step"]
    assert flops == [2 * 64 * 16 * 32] * 3 + [2 * 64 * 48 * 32]
    assert rows(accounts(found)[0]) == {"compute": 60, "compute slowed by contention": 4}


def test_memory_over_time() -> None:
    said = {"Device Type": 1, "Device Id": 0, "Bytes": 512, "Total Allocated": 2048, "Total Reserved": 4096}
    on_cpu = said | {"Device Type": 0}
    notes = [{"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": 3, "args": a} for a in (said, on_cpu)]
    assert read_all(trace(kernel(GEMM, 0, 10), *notes)).memory == {0: [(3e-6, 2048.0)]}


# --- damaged and incomplete ------------------------------------------------------------------------------------------

GOOD = json.dumps(ranked(0, kernel(GEMM, 0, 10), collective(10, 2))).encode()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (gzip.compress(GOOD)[:-20], r"cut off or damaged: copy it again"),
        (gzip.compress(GOOD)[:40] + b"xxxx" + gzip.compress(GOOD)[44:], r"cut off or damaged"),
        (b"\x1f\x8b", r"cut off or damaged"),
        (b"", r"is empty: record"),
        (gzip.compress(b"", mtime=0), r"is empty"),
        (b" \n", r"is empty"),
        (GOOD[:-30], r"the JSON is cut off at its end: wait until it is written"),
        (GOOD[:-1], r"cut off at its end"),
        (json.dumps([kernel(GEMM, 0, 10)]).encode()[:-1] + b",\n", r"cut off at its end"),
        (GOOD.replace(b"}", b"]", 1), r"not JSON"),
        (b"\x28\xb5\x2f\xfd\x00", r"packed by zstd: unpack it"),
        (b"\xff\xfe\x00", r"not JSON"),
        (b"[" * 100_000, r"not JSON"),
        (b"{}", r"no list 'traceEvents'"),
        (b'{"traceEvents": {}}', r"no list 'traceEvents'"),
        (b"3", r"no list 'traceEvents'"),
        (json.dumps(trace(kernel(GEMM, float("nan"), 1))).encode(), r"none of its 1 GPU events has a usable begin and"),
        (b'{"traceEvents": []}', r"no GPU events among its 0"),
        (json.dumps(trace(span("cpu_op", "aten::mm", 0, 1))).encode(), r"no GPU events among its 1: profile on a GPU"),
    ],
)
def test_each_fault_is_one_sentence(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(data)
    with pytest.raises(DataError, match=said) as error:
        read([path])
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_files_are_read_plain_or_packed(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(GOOD)
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(GOOD.replace(b'"rank": 0', b'"rank": 1')))
    found = read([tmp_path / "a.json", tmp_path / "b.json.gz"])
    assert {event.rank for event in found.events} == {0, 1}
    (tmp_path / "c.json").write_bytes(json.dumps(json.loads(GOOD)["traceEvents"]).encode())
    assert len(read([tmp_path / "c.json"]).events) == 3
    with pytest.raises(DataError, match=r"none.json: cannot be read"):
        read([tmp_path / "none.json"])


def test_names_that_are_no_proper_text(tmp_path: Path) -> None:
    """A control character, as of a kernel's source, and a byte that is no UTF-8."""
    path = tmp_path / "a.json"
    path.write_bytes(GOOD.replace(GEMM.encode(), b"gemm\tof\n\xff"))
    assert [event.kind for event in read([path]).events] == ["compute", "comm", "compute"]


def test_what_the_profiler_wrote_that_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for number in (b"inf", b"-inf", b"nan", b"-nan", b"N/A"):
        path.write_bytes(GOOD.replace(b'"stream": 7', b'"stream": 7, "memory bandwidth (GB/s)": ' + number))
        assert [event.kind for event in read([path]).events] == ["compute", "comm", "compute"], number
    for name in (r'{"device": "cpu", "dtype": "float32"}(12): run', r"C:\Users\x\good.py(3): run, inf", r'said \"nan"'):
        path.write_bytes(GOOD.replace(GEMM.encode(), name.encode()))
        names = [event.name for event in read([path]).events]
        assert name.replace(r"\"", '"') in names, names
    frame = '{"ph": "X", "cat": "python_function", "name": "lib = Library("_x", "IMPL")\n(1): <module>", "pid": 1}'
    path.write_text(GOOD.decode().replace('"traceEvents": [', '"traceEvents": [' + frame + ", "))
    assert [event.kind for event in read([path]).events] == ["compute", "comm", "compute"]
    path.write_text(GOOD.decode().replace(GEMM, 'a "b"').replace("[", '[{"ph": "M", "args": {"name": "python"}}, ', 1))
    assert 'a "b"' in [event.name for event in read([path]).events]  # the name before it ends its object
    path.write_bytes(GOOD.replace(GEMM.encode(), rb"C:\Users")[:-30])
    with pytest.raises(DataError, match=r"not JSON \(Invalid .escape: line 1 column \d+"):  # of the file as it is
        read([path])


def test_what_a_rank_does_on_another_gpu_is_left_out() -> None:
    """One thing in a hundred at most, as a context on the first GPU makes; more of it is another rank's."""
    own = [kernel(GEMM, 10 * i, 10, device=1) for i in range(99)]
    one = ranked(0, kernel(GEMM, 0, 990))
    found = read_all(one, ranked(1, *own, kernel("memset", 3, 1)))
    assert rows(accounts(found)[1]) == {"compute": 990}
    assert "1.json: 1 events on GPU 0 are left out, the others are on GPU 1" in found.notes
    with pytest.raises(DataError, match=r"1.json: holds 2 devices"):
        read_all(one, ranked(1, *own, kernel("memset", 3, 1), kernel("memset", 6, 1)))


def test_files_that_cannot_be_laid_together() -> None:
    one = ranked(0, kernel(GEMM, 0, 1))
    with pytest.raises(DataError, match=r"1.json: it has no distributedInfo, so it cannot be laid beside"):
        read_all(one, trace(kernel(GEMM, 0, 1)))
    with pytest.raises(DataError, match=r"1.json: distributedInfo names no rank"):
        read_all(one, trace(kernel(GEMM, 0, 1), distributedInfo={"backend": "nccl"}))
    with pytest.raises(DataError, match=r"1.json and 0.json are both of rank 0"):
        read_all(one, one)
    with pytest.raises(DataError, match=r"worlds of different sizes, 2 \(0.json\) and 4 \(1.json\): give those of one"):
        read_all(one, ranked(1, kernel(GEMM, 0, 1), world=4))
    with pytest.raises(DataError, match=r"1.json: holds 2 devices"):
        read_all(one, ranked(1, kernel(GEMM, 0, 1), kernel(GEMM, 0, 1, device=1)))


odd = st.one_of(st.none(), st.booleans(), st.integers(-5, 2**70), st.floats(), st.text(max_size=3), st.just([]),
                st.just({}), st.just([[1]]))  # fmt: skip
TOP = "ph cat name pid tid ts dur args"
ARGS = "correlation,External id,stream,device,Process Group Ranks,Process Group Name,Seq,grid,Input Dims,In msg nelems"
keys = st.sampled_from([*TOP.split(), *ARGS.split(",")])


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), keys, odd), min_size=1, max_size=6), odd)
def test_odd_values_are_passed_over(changes: list[tuple[int, str, Any]], info: Any) -> None:
    """Whatever stands in an entry: events whose accounts add up, or one sentence."""
    entries = [
        kernel(GEMM, 0, 10, correlation=1, grid=[1, 1, 1]),
        collective(8, 4),
        span("cuda_runtime", "cudaLaunchKernel", 0, 1, correlation=1, **{"External id": 2}),
        span("cpu_op", "aten::mm", 0, 1, **{"External id": 2, "Input Dims": [[2, 3], [3, 2]]}),
    ]
    for which, key, value in changes:
        entry = entries[which]
        place = entry["args"] if key not in entry and isinstance(entry.get("args"), dict) else entry
        place[key] = value
    try:
        found = read_all(trace(*entries, distributedInfo=info, baseTimeNanoseconds=info))
    except DataError:
        return
    for ledger in ledgers(found.events, found.groups):
        for account in ledger.accounts:
            assert sum(account.rows.values()) == account.span
