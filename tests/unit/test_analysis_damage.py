"""A log that lost lines (a full disk, a rank's file gone, a job that still runs) is reported as far as it goes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rpipe.analysis import page, page_data, trace
from rpipe.analysis.run import RunError
from rpipe.analysis.story import Target, story
from rpipe.analysis.summary import report
from rpipe.policy.admission import Frontier
from tests.timed_job import TimedJob


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    where = tmp_path_factory.mktemp("whole")
    world = {"rollout": {"admission": Frontier(2), "evaluate": True, "drop_zero_variance": True, "refill_groups": 2}}
    rewards = {"reward": lambda t: float(t.group % 3 > 0 and t.sample % 2)}
    TimedJob(where / "attempt-1", **world, **rewards, training={"replicas": 2}, loses=((3.0, 1),), samples=2, groups=4).run()
    return {log.name: log.read_text().splitlines(keepends=True) for log in (where / "attempt-1" / "events").iterdir()}


def look_at_everything(run: Path, out: Path) -> None:
    told = report(run, "x")
    assert set(told) == {"iterations", "evaluations", "attempts", "run"}
    page.write(out / "x.html", [page_data.of_run(run, "x")])
    trace.write(run, out / "x.json")
    for what in ("5.1", "7", "s1"):
        try:
            story(run, Target.parse(what))
        except RunError as error:
            assert "nothing in the log touches it" in str(error)


def write(run: Path, logs: dict[str, list[str]]) -> None:
    events = run / "attempt-1" / "events"
    events.mkdir(parents=True)
    for name, lines in logs.items():
        (events / name).write_text("".join(lines))


@pytest.mark.parametrize("seed", range(12))
def test_lines_that_are_missing_here_and_there(whole: dict[str, list[str]], tmp_path: Path, seed: int):
    chance = random.Random(seed)
    share = (0.02, 0.2, 0.6)[seed % 3]
    write(tmp_path / "run", {name: [line for line in lines if chance.random() > share] for name, lines in whole.items()})
    look_at_everything(tmp_path / "run", tmp_path)


@pytest.mark.parametrize("seed", range(6))
def test_a_log_that_ends_anywhere_even_inside_a_line(whole: dict[str, list[str]], tmp_path: Path, seed: int):
    chance = random.Random(seed)
    cut = {name: lines[: chance.randrange(20, len(lines))] for name, lines in whole.items()}
    for lines in cut.values():
        lines[-1] = lines[-1][: chance.randrange(1, len(lines[-1]) - 1)]
    write(tmp_path / "run", cut)
    look_at_everything(tmp_path / "run", tmp_path)


def test_every_kind_missing_in_turn(whole: dict[str, list[str]], tmp_path: Path):
    kinds = {line.split('"kind":"')[1].split('"')[0] for lines in whole.values() for line in lines}
    assert len(kinds) > 25
    for kind in sorted(kinds):
        kept = {name: [line for line in lines if f'"kind":"{kind}"' not in line] for name, lines in whole.items()}
        write(tmp_path / kind, kept)
        report(tmp_path / kind, "x")
        page_data.of_run(tmp_path / kind, "x")


def test_one_coordinator_s_file_alone(whole: dict[str, list[str]], tmp_path: Path):
    for name, lines in whole.items():
        write(tmp_path / name, {name: lines})
        look_at_everything(tmp_path / name, tmp_path)
