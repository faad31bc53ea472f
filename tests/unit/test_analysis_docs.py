"""docs/event-log.md must tell every kind and every field that a log can hold, and figures by their names."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest

from rpipe.analysis.run import read
from rpipe.analysis.summary import report
from rpipe.core import events
from rpipe.core.eventlog import EventLog
from rpipe.core.types import TrajectoryId

PAGE = Path(__file__).parents[2] / "docs" / "event-log.md"
UNIONS = {
    "rollout, event": events.RolloutEvent,
    "rollout, command": events.RolloutCommand,
    "training, event": events.TrainingEvent,
    "training, command": events.TrainingCommand,
}
STATS = ("loss", "grad_norm", "learning_rate", "entropy", "clip_fraction", "kl", "logprob_gap_mean", "logprob_gap_max")


def type_text(hint: Any) -> str:
    """As JSON shows it: int, [int], {group int, ...}, "a" or "b"."""
    if hint is TrajectoryId:
        return "[" + ", ".join(TrajectoryId._fields) + "]"
    if get_origin(hint) is Literal:
        return " or ".join(f'"{value}"' for value in get_args(hint))
    if get_origin(hint) is tuple:
        return f"[{type_text(get_args(hint)[0])}, ...]"
    if get_origin(hint) in (types.UnionType, types.GenericAlias):
        return " or ".join(map(type_text, get_args(hint)))
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return "{" + ", ".join(fields(hint)) + "}"
    return "null" if hint is type(None) else str(hint.__name__)


def fields(struct: type) -> Iterator[str]:
    hints = get_type_hints(struct)
    for field in msgspec.structs.fields(struct):
        if field.name != "t" or not issubclass(struct, events.Event):
            yield f"{field.name} {type_text(hints[field.name])}"


def rows() -> Iterator[tuple[str, str]]:
    """The first three columns of the page's table, for every kind."""
    where: dict[type, str] = {}
    for place, union in UNIONS.items():
        for struct in get_args(union):
            where[struct] = "both, event" if struct in where else place
    for struct, place in where.items():
        yield struct.__name__, f"| `{struct.__name__}` | {place} | {', '.join(fields(struct)) or '-'} |"


@pytest.mark.parametrize(("kind", "row"), rows(), ids=lambda value: value if "|" not in value else "row")
def test_the_page_tells_every_kind_with_its_fields(kind: str, row: str):
    text = PAGE.read_text()
    assert row in text, f"docs/event-log.md lacks or has another form of {kind}; wanted a row that begins\n{row}"


def test_the_page_tells_no_kind_that_is_gone():
    known = {kind for kind, _ in rows()}
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    told = [line.split("`")[1] for line in lines if line.split("|")[2].strip().endswith(("event", "command"))]
    assert sorted(told) == sorted(known)


def test_the_page_defines_every_figure_of_the_report(tmp_path: Path):
    with EventLog(tmp_path / "attempt-1" / "events", 0) as log:
        request = {"version": 0, "trajectories_per_group": 1, "groups": (events.GroupSpec(0, 1),)}
        log.event(events.RolloutRequested(t=0.0, iteration=0, purpose="train", **request))
        log.command(1.0, events.DropGroup(group=0, order=0, iteration=0, rewards=(0.0,), reason="x"))
        log.command(1.0, events.EndRollout(iteration=0, version=0, groups_sent=0, groups_dropped=1))
    told = report(tmp_path, "x")
    text = PAGE.read_text()
    missing = [name for name in [*told["iterations"][0], *told["run"]] if f"`{name}`" not in text]
    assert not missing


def test_the_pages_polars_example_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("polars")
    events_dir = tmp_path / "runs" / "mine" / "attempt-1" / "events"
    with EventLog(events_dir, 0) as log:
        for sample, tokens in ((0, 7), (1, 9)):
            turn = {"cached_tokens": 0, "finish": "stop", "started_t": 1.0, "first_token_t": 1.5, "version": 0, "engine": 0}
            log.event(events.TurnFinished(t=3.0, trajectory=TrajectoryId(0, sample), output_tokens=tokens, **turn))
        log.event(events.StepDone(t=5.0, step=0, started_t=4.0, skipped=False, **dict.fromkeys(STATS, 0.0), trained_tokens=16))
        log.note(6.0, "JobEnded", reason="")
    assert len(list(read(tmp_path / "runs" / "mine" / "attempt-1"))) == 4
    monkeypatch.chdir(tmp_path)
    code = PAGE.read_text().split("```python\n")[1].split("```")[0]
    exec(compile(code, str(PAGE), "exec"), {})
    assert "16" in capsys.readouterr().out
