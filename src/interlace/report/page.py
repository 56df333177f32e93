"""One HTML file: the timeline, the ledger as a table, what took the time by name, and what is not known.

It needs no other file and follows the reader's light or dark scheme.
"""

from __future__ import annotations

from collections.abc import Sequence

from interlace.report.ledger import ALL, Ledger
from interlace.report.svg import text
from interlace.report.table import Table, differences, named_lines, table, transfer_lines
from interlace.report.timeline import Scene, timeline

STYLE = """
:root{color-scheme:light dark;--fg:#1f2328;--soft:#59636e;--bg:#f6f8fa;--card:#fff;--line:#d1d9e0}
@media (prefers-color-scheme:dark){:root{--fg:#f0f6fc;--soft:#9198a1;--bg:#010409;--card:#0d1117;--line:#30363d}}
body{font:14px/1.5 system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;color:var(--fg);background:var(--bg);
margin:24px auto;max-width:1180px;padding:0 12px}
svg{width:100%;height:auto}h1{font-size:18px}h2{font-size:15px;margin:24px 0 8px}p,li{color:var(--soft);margin:4px 0}
table{border-collapse:collapse;background:var(--card);border:1px solid var(--line)}
th,td{padding:4px 12px;text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
th{color:var(--soft);font-weight:600;border-bottom:1px solid var(--line)}th:first-child,td:first-child{text-align:left}
tr.sum td{border-top:1px solid var(--line);font-weight:600}pre{color:var(--soft);margin:4px 0}.wide{overflow-x:auto}
"""


def page(
    title: str, summary: str, scenes: Sequence[Scene], everything: Sequence[Ledger], notes: Sequence[str] = ()
) -> str:
    """The report of the last scene; one before it is what it is held against.  `everything`: ledgers of all steps."""
    chosen = scenes[-1].ledger
    assert chosen is not None
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>{text(title)}</title>",
        f"<style>{STYLE}</style></head><body>",
        f"<h1>{text(title)}</h1>",
        f"<p>{text(summary)}</p>",
        timeline(scenes),
        f"<h2>Ledger{'' if chosen.step == ALL else f' of {text(chosen.step)}'}</h2>",
        _html(table(chosen, everything)),
        *(f"<p>{text(line)}</p>" for line in transfer_lines(chosen)),
    ]
    for heading, kinds in (
        ("Longest exposed transfers and waits, a rank's mean", ("transfer", "waiting", "bubble")),
        ("Kernels that nobody could name, a rank's mean", ("unknown",)),
    ):
        if lines := named_lines(chosen, kinds):
            parts += [f"<h2>{heading}</h2>", *(f"<pre>{text(line)}</pre>" for line in lines)]
    if len(scenes) > 1 and scenes[0].ledger is not None:
        parts += ["<h2>Against the other</h2>", _html(differences(chosen, scenes[0].ledger))]
    if notes:
        parts += ["<h2>Remarks</h2>", "<ul>", *(f"<li>{text(note)}</li>" for note in notes), "</ul>"]
    return "\n".join([*parts, "</body></html>"]) + "\n"


def _html(shown: Table) -> str:
    heads = "".join(f"<th>{text(head)}</th>" for head in shown.heads)
    lines = []
    for number, line in enumerate(shown.lines):
        is_sum = number >= len(shown.lines) - shown.sums
        cells = "".join(f"<td>{text(cell)}</td>" for cell in line)
        kind = "sum" if is_sum else "row"
        lines.append(f'<tr class="{kind}">{cells}</tr>')
    return f'<div class="wide"><table><tr>{heads}</tr>{"".join(lines)}</table></div>'
