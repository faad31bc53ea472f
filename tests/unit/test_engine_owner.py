"""What does the rank that owns an engine say when the engine is lost, and what does it do when told to start it again?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rpipe.config import parse
from rpipe.core.events import SendTurn
from rpipe.core.types import TrajectoryId
from rpipe.rollout.engine import Chunk, EngineError, EngineLoad, TurnRequest
from rpipe.rollout.scripted_engine import ScriptedEngine
from rpipe.rollout.worker import EngineOwner
from rpipe.runtime import messages as m

MAX_NEW_TOKENS = 400


def owner(tmp_path: Path, engine: Any, stall_s: float = 3.0, clock: Any = None) -> tuple[EngineOwner, list[Any]]:
    tree = {
        "model": {"make": {}},
        "data": {"train": {"kind": "sums"}},
        "engine": {"kind": "scripted", "stall_deadline_s": stall_s, "start_deadline_s": 2.0},
    }
    made = EngineOwner(engine, 0, parse(tree, "test"), clock or asyncio.get_running_loop().time, tmp_path)
    said: list[Any] = []
    made.reply = said.append  # type: ignore[method-assign]
    made.start()
    return made, said


async def until(said: list[Any], kind: type, count: int = 1, bound_s: float = 20.0) -> Any:
    """The `count`th message of that kind."""
    loop = asyncio.get_running_loop()
    end = loop.time() + bound_s
    while len(found := [x for x in said if isinstance(x, kind)]) < count:
        assert loop.time() < end, f"no {kind.__name__}: {said}"
        await asyncio.sleep(0.01)
    return found[count - 1]


def turn(sample: int, life: int = 0, prefix: tuple[int, ...] = (), version: int = 0) -> m.StartTurn:
    command = SendTurn(trajectory=TrajectoryId(0, sample), engine=0, priority=0, version=version, prefix_tokens=len(prefix))
    ids = np.array([5, 6, *prefix], np.int32).tobytes()
    return m.StartTurn(life, command, ids, 1.0, MAX_NEW_TOKENS - len(prefix))


def scripted(**how: Any) -> ScriptedEngine:
    return ScriptedEngine(lambda request: 300, lambda running: 200.0, stream_interval_tokens=4, **how)


@pytest.mark.parametrize(
    "how, words", [({"fail_after_s": 0.5}, "as its script said"), ({"hang_after_s": 0.5}, "no token of any of 2")]
)
def test_a_lost_engine_is_told_once_with_what_it_had_made_and_goes_on_from_there(tmp_path, how, words):
    async def work() -> None:
        made, said = owner(tmp_path, scripted(**how))
        await until(said, m.EngineUp)
        for sample in (0, 1):
            made.handle(turn(sample))
        down = await until(said, m.EngineDown)
        assert words in down.event.reason and down.life == 0
        partials = {p.trajectory: np.frombuffer(p.output_ids, np.int32) for p in down.partials}
        assert {p.trajectory: p.output_tokens for p in down.event.prefixes} == {t: len(ids) for t, ids in partials.items()}
        assert set(partials) == {TrajectoryId(0, 0), TrajectoryId(0, 1)} and min(map(len, partials.values())) > 0
        assert all(p.versions == ((0, len(partials[p.trajectory]), 0),) for p in down.partials)
        made.handle(turn(2))  # on its way when the engine was lost
        made.handle(m.CancelTurn(TrajectoryId(0, 0)))
        made.handle(m.LoadWeights(0, 1))
        (tmp_path / "version-000003").mkdir()
        made.handle(m.Restart(1, 3))
        back = await until(said, m.EngineBack)
        assert (back.life, back.event.version) == (1, 3) and back.event.t > back.event.started_t
        made.handle(turn(1, life=0))  # for the life before
        prefix = partials[TrajectoryId(0, 0)]
        made.handle(turn(0, life=1, prefix=tuple(prefix.tolist()), version=3))
        done = await until(said, m.TurnDone)
        assert done.event.trajectory == TrajectoryId(0, 0) and done.versions == ((0, 300 - len(prefix), 3),)
        undisturbed = [c async for c in _whole()]
        assert [*prefix.tolist(), *np.frombuffer(done.output_ids, np.int32).tolist()] == undisturbed
        await asyncio.sleep(0.3)
        await made.close()
        assert [type(x).__name__ for x in said] == [
            "EngineUp",
            "TurnBegan",
            "TurnBegan",
            "EngineDown",
            "EngineBack",
            "TurnBegan",
            "TurnDone",
        ]

    asyncio.run(work())


async def _whole() -> AsyncIterator[int]:
    """The same response by an engine that nothing happens to."""
    engine = ScriptedEngine(lambda request: 300, lambda running: 1e6)
    await engine.start()
    from rpipe.rollout.engine import Sampling

    async for chunk in engine.generate(TurnRequest("0.0", [5, 6], Sampling(MAX_NEW_TOKENS))):
        for token in chunk.token_ids:
            yield token
    await engine.stop()


def test_an_idle_engine_that_falls_silent_is_lost_too(tmp_path):
    async def work() -> None:
        engine = ScriptedEngine(lambda request: 1, lambda running: 200.0, hang_after_s=1.0)
        made, said = owner(tmp_path, engine)
        await until(said, m.EngineUp)
        made.handle(turn(0))
        await until(said, m.TurnDone)
        down = await until(said, m.EngineDown)
        assert "not healthy" in down.event.reason and down.partials == ()
        await made.close()

    asyncio.run(work())


def test_a_start_without_its_snapshot_and_a_trainer_that_could_not_reach_it_are_losses_of_that_life(tmp_path):
    async def work() -> None:
        made, said = owner(tmp_path, scripted(), stall_s=60.0)
        await until(said, m.EngineUp)
        made.handle(m.Condemn(7, "another life"))
        made.handle(m.Condemn(0, "engine 0 did not take the weights"))
        assert (await until(said, m.EngineDown)).event.reason == "engine 0 did not take the weights"
        made.handle(m.Restart(1, 5))
        down = await until(said, m.EngineDown, 2)
        assert down.life == 1
        assert f"no snapshot of version 5 came to {tmp_path} within 2 s (engine.start_deadline_s)" in down.event.reason
        made.handle(m.Restart(2, -1))  # what the run began from
        assert (await until(said, m.EngineBack)).life == 2
        await made.close()

    asyncio.run(work())


def test_a_newer_restart_replaces_one_that_still_waits(tmp_path):
    async def work() -> None:
        made, said = owner(tmp_path, scripted(), stall_s=60.0)
        await until(said, m.EngineUp)
        made.handle(m.Restart(1, 5))
        await asyncio.sleep(0.1)
        made.handle(m.Restart(2, -1))
        assert (await until(said, m.EngineBack)).life == 2
        await asyncio.sleep(2.5)  # the first one's bound
        assert [type(x).__name__ for x in said] == ["EngineUp", "EngineBack"]
        await made.close()

    asyncio.run(work())


class Stands:
    """Is up, and that is all."""

    log_path = "x.log"
    death = staticmethod(lambda: None)

    async def start(self, folder: Any = None, version: int = 0) -> None:
        pass

    async def stop(self) -> None:
        pass

    async def load(self) -> EngineLoad:
        return EngineLoad(0, 0, 0, 1000)


def test_an_idle_engine_has_until_the_stall_deadline_to_answer(tmp_path):
    """Seconds of a clock that stands still between the looks."""
    clock = SimpleNamespace(t=0.0)
    bounds = []

    class Asked(Stands):
        async def healthy(self, bound_s: float) -> bool:
            bounds.append(bound_s)
            return len(bounds) == 1

    async def work() -> None:
        made, said = owner(tmp_path, Asked(), stall_s=120.0, clock=lambda: clock.t)
        await until(said, m.EngineUp)
        clock.t = 40.0
        while not bounds:
            await asyncio.sleep(0.01)
        clock.t = 1000.0  # the owner was held up: it has asked nothing since the last sign
        down = await until(said, m.EngineDown)
        assert bounds == [80.0, 30.0]
        assert "idle, silent for 960 s and not healthy (engine.stall_deadline_s = 120)" in down.event.reason
        await made.close()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_question_without_answer_loses_no_engine_that_has_a_turn_by_then(tmp_path):
    clock = SimpleNamespace(t=0.0)
    asked, answers = asyncio.Event(), asyncio.Event()

    class Busy(Stands):
        async def healthy(self, bound_s: float) -> bool:
            asked.set()
            await answers.wait()
            return False

        async def generate(self, request: TurnRequest) -> AsyncIterator[Any]:
            answers.set()
            await asyncio.sleep(1.0)  # several looks
            yield Chunk((7,), (-0.5,), 0, "stop")

    async def work() -> None:
        made, said = owner(tmp_path, Busy(), stall_s=120.0, clock=lambda: clock.t)
        await until(said, m.EngineUp)
        clock.t = 40.0
        await asyncio.wait_for(asked.wait(), 20)
        made.handle(turn(0))
        await until(said, m.TurnDone)
        assert not [x for x in said if isinstance(x, m.EngineDown)]
        await made.close()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_what_no_restart_mends_ends_the_run(tmp_path):
    class Refuses(Stands):
        async def generate(self, request: TurnRequest) -> AsyncIterator[Any]:
            raise EngineError("the logits were NaN")
            yield

    async def work() -> None:
        made, said = owner(tmp_path, Refuses())
        await until(said, m.EngineUp)
        made.handle(turn(0))
        assert "NaN" in (await until(said, m.EngineFailed)).reason
        await made.close()

    asyncio.run(work())


def test_a_turn_that_is_cancelled_in_the_moment_it_is_asked_for_ends_with_what_it_has(tmp_path):
    async def work() -> None:
        made, said = owner(tmp_path, scripted(), stall_s=60.0)
        await until(said, m.EngineUp)
        made.handle(turn(0))
        made.handle(m.CancelTurn(TrajectoryId(0, 0)))  # both are handled before any task runs
        done = await until(said, m.TurnDone)
        assert done.event.trajectory == TrajectoryId(0, 0)
        assert done.event.finish == "abort" and done.event.output_tokens < 300
        made.handle(m.CancelTurn(TrajectoryId(0, 0)))  # it crossed the answer: nothing is left to cut
        made.handle(turn(1))
        assert (await until(said, m.TurnDone, 2)).event.finish == "stop"
        await made.close()

    asyncio.run(work())
