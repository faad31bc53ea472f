"""`rpipe report RUN`: what did a run take, make and learn, and where did its time go?

Everything comes from the event log (docs/event-log.md defines each figure). Needs no torch: it runs on a laptop.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from rpipe.analysis.comparison import compare, ratio
from rpipe.analysis.foreign.report import report as foreign
from rpipe.analysis.run import RunError
from rpipe.analysis.summary import Report, report

ALL_ROWS = 24  # beyond: the first and the last ones only
EDGE_ROWS = 8

# column: key of a row, heading, format
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("iteration", "iter-\nation", "d"),
    ("rollout_s", "rollout\ns", ".2f"),
    ("train_busy_s", "train\nbusy s", ".2f"),
    ("rollout_to_train_end_s", "to train\nend s", ".2f"),
    ("first_dispatch_s", "first dis-\npatch s", ".2f"),
    ("waiting_ratio_start", "waits\nstart", ".0%"),
    ("waiting_ratio_busy", "waits\nall", ".0%"),
    ("steps", "steps", "g"),
    ("groups_trained", "groups", "g"),
    ("groups_dropped", "drop-\nped", "g"),
    ("generated_tokens", "tokens", ",.0f"),
    ("reward_mean", "reward", ".3f"),
    ("logprob_gap_mean", "log-prob\ngap", ".1e"),
    ("logprob_gap_max", "\nmax", ".1e"),
)
# what other systems' logs tell beside those
FOREIGN_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("trajectories", "trajec-\ntories", "g"),
    ("response_tokens_mean", "response\ntokens", ",.0f"),
    ("response_characters_mean", "response\ncharacters", ",.0f"),
    ("turns_mean", "turns", ".1f"),
    ("tokens", "tokens in\nand out", ",.0f"),
    ("publish_s", "publish\ns", ".2f"),
    ("checkpoint_s", "save\ns", ".2f"),
    ("reward_s", "rewards\ns", ".2f"),
    ("tool_s", "tools\ns", ".2f"),
    ("trajectory_s_mean", "trajectory\ns", ".2f"),
)
NARROW = {"iteration", "rollout_s", "train_busy_s", "rollout_to_train_end_s", "first_dispatch_s", "waiting_ratio_busy", "steps"}
NARROW |= {"reward_mean", "logprob_gap_mean"}  # the columns of a terminal that has no room for all
ALL_COLUMNS_WIDTH = 116
HTML_HELP = "also write a page to look around in (default RUN/report.html); with two runs, both side by side"
COMPARED = (*(key for key, _, _ in COLUMNS[1:]),)


def main(argv: Sequence[str]) -> int:
    """0: printed; 2: there is nothing to report, said in one line on stderr."""
    parser = argparse.ArgumentParser(prog="rpipe report", description="Figures of a run, from its event log.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run dir; several: their medians side by side")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON; of two runs with their ratios")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write a row an iteration; of two runs, a row a figure")
    parser.add_argument("--timeline", type=Path, metavar="FILE.png", help="also draw one iteration: engines, tools, trainer")
    parser.add_argument("--html", type=Path, nargs="?", const=Path(), metavar="FILE", help=HTML_HELP)
    parser.add_argument("--trace", type=Path, metavar="FILE.json", help="also write a trace for Perfetto or chrome://tracing")
    parser.add_argument("--iteration", type=int, metavar="N", help="which one to draw (default: the last complete one)")
    asked = parser.parse_args(list(argv))
    try:
        if len(asked.runs) > 1 and (asked.timeline or asked.trace):
            raise RunError("--timeline and --trace want one run")
        if len(asked.runs) > 2 and (asked.json or asked.csv):
            raise RunError("--json and --csv want one run, or two to compare")
        if asked.iteration is not None and not asked.timeline:
            raise RunError("--iteration says what --timeline FILE.png draws; wanted: both")
        names = _names(asked.runs)
        pages = _pages(asked.runs, names, asked.html)
        reports = [page["report"] for page in pages] or [foreign(*one) or report(*one) for one in zip(asked.runs, names)]
        if asked.csv:
            _write_csv(asked.csv, reports)
        if asked.trace:
            from rpipe.analysis import trace

            print(f"wrote {asked.trace}: {trace.write(asked.runs[0], asked.trace):,} events", file=sys.stderr)
        if asked.html is not None:
            _write_page(asked.html, asked.runs, pages)
        if asked.timeline:
            from rpipe.analysis.picture import draw  # matplotlib takes a second to import

            draw(asked.runs[0], asked.iteration, asked.timeline)
            print(f"wrote {asked.timeline}", file=sys.stderr)
    except RunError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error.filename}: cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    if asked.json:
        print(json.dumps(compare(*reports) if len(reports) == 2 else reports[0]))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 132, highlight=False, soft_wrap=False)
    if len(reports) > 1:
        console.print(_side_by_side(reports))
    else:
        _show(console, reports[0])
    return 0


def write(run_dir: Path) -> str:
    """Write `run_dir`/report.json, whole or not at all, and return the lines that a job ends with. Raises RunError, OSError."""
    told = report(run_dir, _name(run_dir))
    target, draft = run_dir / "report.json", run_dir / f".report.json.{os.getpid()}"
    with draft.open("w") as file:
        json.dump(told, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(target)
    return summary(told)


def summary(told: Report) -> str:
    """A run in a few lines of plain text."""
    run, median, count = told["run"], told["run"]["medians"], len(told["iterations"])
    attempts = f" in {told['attempts']} attempts" if told["attempts"] > 1 else ""
    simulated = " (simulated)" if run["simulated"] else ""
    lines = [f"{run['name']}{simulated}: {count} iteration{'s' * (count != 1)} in {_duration(run['seconds'])}{attempts}"]
    if run["simulated"]:
        lines.append(f"  hardware         {run['simulated']}")
    if told["evaluations"]:
        first, last = told["evaluations"][0], told["evaluations"][-1]
        line = f"  held-out reward  {first['reward_mean']:.3f}"
        if last is not first:
            line += f" -> {last['reward_mean']:.3f} ({last['reward_mean'] - first['reward_mean']:+.3f})"
        lines.append(f"{line}, {last['count']} trajectories")
    if count:
        first, last = told["iterations"][0], told["iterations"][-1]
        lines.append(f"  training reward  {_f(first['reward_mean'], '.3f')} -> {_f(last['reward_mean'], '.3f')}")
        lines.append(
            f"  median iteration rollout {_f(median['rollout_s'], '.2f')} s, train {_f(median['train_busy_s'], '.2f')} s,"
            f" rollout to train end {_f(median['rollout_to_train_end_s'], '.2f')} s;"
            f" the trainer waits {_f(median['waiting_ratio_busy'], '.0%')}"
        )
        lines.append(
            f"  generated        {sum(row['generated_tokens'] for row in told['iterations']):,} tokens"
            f" at {_f(run['tokens_per_s'], ',.0f')} tokens/s of rollout;"
            f" responses p50 {_f(run['response_tokens_p50'], 'd')}, p95 {_f(run['response_tokens_p95'], 'd')} tokens,"
            f" {_f(run['truncation_rate'], '.0%')} cut"
        )
        if (tools := run.get("tools")) is not None:
            lines.append(
                f"  tools            {tools['calls']:,} calls, {_f(tools['turns_mean'], '.1f')} turns a trajectory;"
                f" a call p50 {tools['seconds_p50']:.3g} s, p95 {tools['seconds_p95']:.3g} s, {tools['failed']} failed"
            )
        lines.append(
            f"  log-prob gap     mean {_f(median['logprob_gap_mean'], '.1e')}, max {_f(median['logprob_gap_max'], '.1e')}"
            f" (medians); {run['skipped_steps']} skipped steps"
        )
    lines += [f"{' ' * 19}- {line}" if index else f"  why              {line}" for index, line in enumerate(run["diagnosis"])]
    lines += [f"  note: {problem}" for problem in run["problems"]]
    if run["other_events"]:
        counted = ", ".join(f"{kind} {count}" for kind, count in sorted(run["other_events"].items()))
        lines.append(f"  other events: {counted} (rpipe story, --html and --trace show them)")
    return "\n".join(lines)


def _name(run: Path) -> str:
    """run.name of the run's config, or the directory's."""
    try:
        tree = yaml.safe_load((run / "config.yaml").read_text())
        return str(tree["run"]["name"])
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return run.resolve().name


def _names(runs: Sequence[Path]) -> list[str]:
    """Of each run or log; where two have the same, with their directories."""
    names = [_name(run) if run.is_dir() else run.name for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({run.resolve().name})" for name, run in zip(names, runs)]


def _f(value: Any, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


# ---- tables


def _show(console: Console, told: Report) -> None:
    rows: list[Report] = told["iterations"]
    if "system" in told["run"]:
        _show_foreign(console, told)
        return
    if rows:
        console.print(_iterations(rows, told["run"]["medians"], console.width < ALL_COLUMNS_WIDTH))
    if told["evaluations"]:
        console.print(_evaluations(told["evaluations"]), soft_wrap=True)
    console.print(where_time_went(told), soft_wrap=True)
    console.print(summary(told), soft_wrap=True, markup=False)


def _show_foreign(console: Console, told: Report) -> None:
    run = told["run"]
    console.print(_iterations(told["iterations"], run["medians"], False))
    if told["evaluations"]:
        console.print(_evaluations(told["evaluations"]), soft_wrap=True)
    if run["time_s"]:
        console.print(where_time_went(told), soft_wrap=True)
    console.print(f"{run['name']}: {run['system']}, {len(told['iterations'])} rows", markup=False)
    for line in run["unread"]:
        console.print(f"  note: {line}", soft_wrap=True, markup=False)


def _iterations(rows: list[Report], medians: Report, narrow: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = [column for column in COLUMNS if not narrow or column[0] in NARROW]
    if "rollout_s" not in rows[0] or "raw" in rows[0]:  # another system's: the columns that it fills
        known = [column for column in (*COLUMNS, *FOREIGN_COLUMNS) if any(row.get(column[0]) is not None for row in rows)]
        columns = [(key, heading, "g" if key == "iteration" else spec) for key, heading, spec in known]
    for _, heading, _ in columns:
        table.add_column(heading, justify="right", vertical="bottom", no_wrap=True)
    many = len(rows) > ALL_ROWS
    for row in rows[:EDGE_ROWS] if many else rows:
        table.add_row(*(_f(row.get(key), spec) for key, _, spec in columns))
    if many:
        table.add_row(f"+{len(rows) - 2 * EDGE_ROWS}", *("..." for _ in columns[1:]), style="dim")
        for row in rows[-EDGE_ROWS:]:
            table.add_row(*(_f(row.get(key), spec) for key, _, spec in columns))
    if len(rows) > 1:
        table.add_section()
        table.add_row("median", *(_f(medians.get(key), spec) for key, _, spec in columns[1:]), style="bold")
    return table


def _evaluations(rows: list[Report]) -> str:
    shown = [f"{row['reward_mean']:.3f} after {row['iteration']}" for row in rows]
    if len(shown) > EDGE_ROWS:
        shown = [*shown[:2], "...", *shown[2 - EDGE_ROWS :]]
    return f"held-out reward: {', '.join(shown)} iterations"


def where_time_went(told: Report) -> str:
    """One line: shares of the job's seconds, largest first; what took under half a percent is left out."""
    total = told["run"]["seconds"]
    parts = sorted(told["run"]["time_s"].items(), key=lambda part: -part[1])
    shares = [f"{name} {seconds / total:.0%}" for name, seconds in parts if total and seconds / total >= 0.005]
    return f"where {_duration(total)} went: " + ", ".join(shares)


def _side_by_side(reports: list[Report]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title="medians", title_justify="left")
    table.add_column("")
    for told in reports:
        simulated = " (simulated)" if told["run"].get("simulated") else ""
        table.add_column(f"{told['run']['name']}{simulated}\n{len(told['iterations'])} iterations", justify="right")
    if len(reports) == 2:
        table.add_column("second / first", justify="right")
    specs = {key: spec for key, _, spec in COLUMNS}
    for key in COMPARED:
        figures = [told["run"]["medians"].get(key) for told in reports]
        table.add_row(key, *(_f(figure, specs[key]) for figure in figures), *_ratio(figures))
    figures = [told["run"].get("tokens_per_s") for told in reports]
    table.add_row("tokens_per_s", *(_f(figure, ",.0f") for figure in figures), *_ratio(figures))
    return table


def _ratio(figures: list[Any]) -> list[str]:
    return [_f(ratio(*figures), ".3f")] if len(figures) == 2 else []


def _pages(runs: Sequence[Path], names: Sequence[str], wanted: Path | None) -> list[Report]:
    """What the page shows of each run, its report among it; nothing where no page is wanted."""
    if wanted is None:
        return []
    if len(runs) > 2:
        raise RunError("--html shows one run, or two side by side")
    if len(runs) == 2 and wanted == Path():
        raise RunError("--html wants a FILE where two runs are compared")
    from rpipe.analysis.page_data import of_report, of_run

    told = [foreign(run, name) for run, name in zip(runs, names)]
    return [of_report(one) if one is not None else of_run(run, name) for one, run, name in zip(told, runs, names)]


def _write_page(target: Path, runs: Sequence[Path], pages: list[Report]) -> None:
    """`target` "." stands for RUN/report.html, or for LOG.report.html beside a log."""
    from rpipe.analysis import page

    if target == Path():
        target = runs[0] / "report.html" if runs[0].is_dir() else runs[0].with_name(f"{runs[0].name}.report.html")
    page.write(target, pages)
    print(f"wrote {target}", file=sys.stderr)


def _write_csv(path: Path, reports: list[Report]) -> None:
    """Of one run a line an iteration, of two a line a figure."""
    told = reports[0]
    rows, names = told["iterations"], ["iteration", *COMPARED]
    if len(reports) == 2:
        rows = [{"metric": name, **values} for name, values in compare(*reports)["metrics"].items()]
        names = ["metric", "a", "b", "ratio"]
    elif rows:
        names = [name for name in rows[0] if name != "raw"]
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, names, extrasaction="ignore")
        out.writeheader()
        out.writerows(rows)
