"""The page that goes from a broken all-reduce to a right one: every step gives the report the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from interlace.check import KINDS, explore, load

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "checking-kernels.md").read_text(encoding="utf-8")


def changed(source: str, diff: str) -> str:
    """The source after a diff's hunks, which blank lines separate."""
    lines = source.splitlines()
    for hunk in diff.strip("\n").split("\n\n"):
        minus, plus = ([line[1:] for line in hunk.splitlines() if line[0] == sign] for sign in "-+")
        (at,) = [n for n in range(len(lines)) if lines[n : n + len(minus)] == minus]
        lines[at : at + len(minus)] = plus
    return "\n".join(lines) + "\n"


def test_every_step_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    steps = re.findall(r"```(diff|text|)\n(.*?)```", PAGE[PAGE.index(source) + len(source) + 3 :], re.S)
    replays, shown = 0, 0
    for kind, text in steps:
        if kind == "diff":
            source = changed(source, text)
        elif not kind:
            replays = int((re.findall(r"--replays (\d+)", text) or ["0"])[0])
        else:
            Path("all_reduce.py").write_text(source)
            launch, name = load("all_reduce.py:launch")
            verdict = explore(launch, ranks=2, schedules=20, replays=replays, name=name)
            head, *rest = text.strip("\n").splitlines()
            assert head == f"{name}: {len(verdict.reports)} reports in {verdict.schedules} schedules of 2 ranks"
            assert [
                line.replace(f"{tmp_path}/", "") for report in verdict.reports for line in str(report).splitlines()
            ] == rest
            shown += 1
    assert shown == 6


def test_the_page_names_every_kind() -> None:
    assert set(re.findall(r"^\| ([a-z ]+) \|", PAGE, re.M)) - {"kind"} == set(KINDS)
