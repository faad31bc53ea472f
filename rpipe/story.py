"""`rpipe story RUN ID`: what happened to one trajectory, group or step, record by record?"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rpipe.analysis.run import Record, RunError
from rpipe.analysis.story import Line, Target, as_rows, story


def main(argv: Sequence[str]) -> int:
    """0: told; 2: nothing to tell, said in one line on stderr."""
    parser = argparse.ArgumentParser(prog="rpipe story", description="Everything in a run's log that touched one thing.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run dir")
    parser.add_argument(
        "id", metavar="ID", help="12.5: trajectory 5 of group 12; 12: the group; s7: optimizer step 7 of each attempt"
    )
    parser.add_argument("--json", action="store_true", help="print the records, one a line")
    asked = parser.parse_args(list(argv))
    try:
        lines = story(asked.run, Target.parse(asked.id))
    except RunError as error:
        print(f"{error} ({asked.id})" if asked.id not in str(error) else error, file=sys.stderr)
        return 2
    if asked.json:
        for row in as_rows(lines):
            print(json.dumps(row))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    for attempt in sorted({line.attempt for line in lines}):
        console.print(_table(attempt, [line for line in lines if line.attempt == attempt]))
    return 0


def _table(attempt: int, lines: list[Line]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title=f"attempt {attempt}", title_justify="left")
    for heading, justify in (("s", "right"), ("later by", "right"), ("rank", "right"), ("kind", "left"), ("", "left")):
        table.add_column(heading, justify="right" if justify == "right" else "left", no_wrap=heading != "")
    before: float | None = None
    for line in lines:
        t = line.record["t"]
        later = "" if before is None else f"+{t - before:.3f}"
        named = _named(line.record)
        style = "dim" if line.record["io"] == "command" else ""
        table.add_row(f"{t:.3f}", later, str(line.record["rank"]), line.record["kind"], named + line.text, style=style)
        before = t
    return table


def _named(record: Record) -> str:
    """The trajectory or group that a record speaks of."""
    if "trajectory" in record:
        return "{}.{}  ".format(*record["trajectory"])
    return f"{record['group']}  " if "group" in record else ""
