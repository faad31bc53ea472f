"""Figures that a person sees while the job runs, of a rollout that is told event by event."""

from __future__ import annotations

import io
from collections.abc import Mapping

import pytest

from rpipe.config import parse
from rpipe.core import events as e
from rpipe.core.types import TrajectoryId
from rpipe.rollout.watch import Watch
from rpipe.runtime.messages import StepReport
from rpipe.runtime.progress import Progress
from rpipe.runtime.scalars import Scalars
from tests.pure_job import step_done


class Written(Scalars):
    """Keeps what would go to TensorBoard."""

    def __init__(self) -> None:
        self.values: dict[int, dict[str, float]] = {}

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.values[step] = dict(values)

    def close(self) -> None:
        pass


@pytest.fixture
def watched() -> tuple[Watch, Written]:
    scalars = Written()
    config = parse({"model": {"make": {}}, "data": {"train": {"kind": "sums"}}}, "test")
    return Watch(config, Progress(terminal=False, columns=None, file=io.StringIO()), scalars), scalars


def turn(group: int, sample: int, tokens: int, finish: e.Finish) -> e.TurnFinished:
    return e.TurnFinished(
        t=1.0, trajectory=TrajectoryId(group, sample), engine=0, output_tokens=tokens, cached_tokens=0,
        finish=finish, started_t=0.0, first_token_t=0.0, version=0,
    )  # fmt: skip


def iteration(watch: Watch, specs: tuple[e.GroupSpec, ...], told: list[e.TurnFinished | e.ScoreTrajectory]) -> None:
    """The first one: what was told of its two trajectories a group, rewards, one step, and the next weights."""
    watch.saw(
        0.0,
        e.RolloutRequested(t=0.0, iteration=0, version=0, purpose="train", trajectories_per_group=2, groups=specs),
    )
    for what in told:
        watch.saw(1.0, what)
    for order in (0, 1):
        send = e.SendGroup(group=order, order=order, iteration=0, version=0, rewards=(1.0, 0.0), advantages=(1.0, -1.0))
        watch.saw(2.0, send)
    watch.saw(3.0, e.EndRollout(iteration=0, version=0, groups_sent=2, groups_dropped=0))
    watch.step(StepReport(0, step_done(4.0, 0), groups=2, busy_s=0.5))
    watch.saw(5.0, e.WeightsOffered(t=5.0, version=1))


def score(group: int, sample: int) -> e.ScoreTrajectory:
    return e.ScoreTrajectory(trajectory=TrajectoryId(group, sample))


def test_responses_cut_because_others_sufficed_are_in_no_rate_and_each_trajectory_counts_once(watched):
    """Two groups train, a third and a fourth were surplus. Of four trajectories one took two turns, two were cut."""
    watch, scalars = watched
    told = [
        turn(0, 0, 10, "stop"), score(0, 0), turn(0, 1, 30, "length"), score(0, 1),
        turn(1, 0, 5, "stop"), turn(1, 0, 7, "stop"), score(1, 0), turn(1, 1, 8, "abort"), score(1, 1),
        *(turn(group, sample, 3, "abort") for group in (2, 3) for sample in (0, 1)),
    ]  # fmt: skip
    iteration(watch, tuple(e.GroupSpec(group, 4) for group in range(4)), told)
    values = scalars.values[0]
    assert values["response/truncation_rate"] == 2 / 4
    assert values["response/turns_mean"] == 5 / 4
    assert (values["response/tokens_mean"], values["response/tokens_max"]) == ((10 + 30 + 12 + 8) / 4, 30)


def test_what_an_interrupted_attempt_had_finished_is_in_the_rates(watched):
    watch, scalars = watched
    left = e.GroupSpec(0, 4, output_tokens=(9, 9), rewards=(1.0, 0.0), finishes=("length", "deadline"), turns=(2, 1))
    told = [turn(1, 0, 5, "stop"), score(1, 0), turn(1, 1, 8, "stop"), score(1, 1)]
    iteration(watch, (left, e.GroupSpec(1, 4)), told)
    assert scalars.values[0]["response/truncation_rate"] == 2 / 4
    assert scalars.values[0]["response/turns_mean"] == 5 / 4
