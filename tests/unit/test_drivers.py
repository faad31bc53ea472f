"""What the two drivers write down, and when: their log before anything is done, groups for a later attempt. The parts around
them stand in."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rpipe.config import Config, parse
from rpipe.core import events as e
from rpipe.core.eventlog import EventLog
from rpipe.core.types import Prompt, TrajectoryId
from rpipe.rollout.driver import RolloutDriver
from rpipe.rollout.held import HeldGroup, Part
from rpipe.rollout.kept import KeptGroups
from rpipe.training.driver import TrainingDriver

SAMPLES = str(Path(__file__).parents[1] / "data")
RAISES = "tests.unit.test_environments:raises"  # as an environment


class Anything:
    """Takes every call and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    with EventLog(tmp_path / "events", 0) as opened:
        yield opened


def config(**sections: dict[str, Any]) -> Config:
    return parse({"model": {"make": {}}, "data": {"train": {"kind": "sums"}}, **sections}, "test")


def rollout(folder: Path, log: Any, config: Config) -> RolloutDriver:
    world: Any = SimpleNamespace(clock=lambda: 1.0, training_coordinator=1)
    data: Any = SimpleNamespace(decode=str, encode=lambda text: [9, 9])
    rest: Any = Anything()
    kept = KeptGroups(folder / "kept", config, list)
    return RolloutDriver(config, world, log, rest, rest, data, rest, rest, folder / "rewards.log", kept)


def test_what_rollout_was_told_to_do_is_on_the_disk_before_it_is_done(tmp_path, log):
    driver, found = rollout(tmp_path, log, config()), []
    driver._owner = SimpleNamespace(handle=lambda message: found.append(log.path.read_text()))  # type: ignore[assignment]
    driver._step(e.WeightsOffered(t=2.0, version=0))
    assert len(found) == 1 and '"kind":"UpdateEngine"' in found[0]


def test_what_the_trainer_was_told_to_do_is_on_the_disk_before_it_is_done(log):
    found = []
    world = SimpleNamespace(clock=lambda: 1.0, training_coordinator=1, role_size=2)
    worker: Any = SimpleNamespace(world=world)
    mailbox: Any = SimpleNamespace(send=lambda rank, message: found.append(log.path.read_text()))
    driver = TrainingDriver(config(), worker, log, mailbox, Anything(), Anything())  # type: ignore[arg-type]
    driver._step(e.TrainerReady(t=2.0, iteration=0, version=0, replicas=1, stages=1))
    assert len(found) == 1 and '"kind":"PublishWeights"' in found[0]


@pytest.mark.parametrize("fails", ["nothing", "a reward", "a tool"])
def test_a_group_on_which_a_function_failed_is_not_left_to_a_later_attempt(tmp_path, monkeypatch, fails):
    monkeypatch.syspath_prepend(SAMPLES)
    several: dict[str, Any] = {"environment": RAISES, "max_turns": 2}
    wanted = config(rollout=several if fails == "a tool" else {})
    reward = "reward_samples:fails" if fails == "a reward" else "reward_samples:length"

    async def work() -> None:
        driver = rollout(tmp_path, Anything(), wanted)
        await driver._rewards.start()
        try:
            driver._kept.begin(3, 3, "these")
            held = driver._held[24] = HeldGroup(Prompt("test:1", (7, 8), "1+1=", "2", reward), 2)
            for sample in (0, 1):
                trajectory = TrajectoryId(24, sample)
                held.take(sample, Part(np.array([1, 2], np.int32), np.zeros(2, np.float32), ((0, 2, 3),)))
                held.join(trajectory, "stop")
                if sample and fails == "a tool":
                    await driver._answer(e.RunTool(trajectory=trajectory, turn=0))
                await driver._score(trajectory)
        finally:
            await driver._rewards.close()
            driver._kept.close()
        found = KeptGroups(tmp_path / "kept", wanted, list).begin(3, 3, "these")
        assert sorted(found) == ([24] if fails == "nothing" else [])
        said = [event.error for event in driver._inbox if isinstance(event, (e.TrajectoryScored, e.ToolFinished))]
        assert any(said) == (fails != "nothing")

    asyncio.run(asyncio.wait_for(work(), 60))
