"""Weights to engines of which some are dead, silent or new; the trainer's side is a process of its own, as in a job."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from rpipe.rollout.engine import TensorSpec
from rpipe.rollout.scripted_engine import ScriptedEngine
from rpipe.training.snapshot import claim

ROOT = Path(__file__).resolve().parents[2]
STALL_S = 10.0
TRAINER = """
import json, sys
from pathlib import Path
import msgspec, torch
from rpipe.config import parse
from rpipe.training.publish import Publisher
from rpipe.training.snapshot import Snapshots

folder = Path(sys.argv[1])
config = parse({"model": {"make": {}}, "data": {"train": {"kind": "sums"}}, "channel": {"weight_bucket_bytes": 64},
    "engine": {"kind": "scripted", "stall_deadline_s": float(sys.argv[2])}, "limits": {"collective_s": 30}}, "test")
snapshots = Snapshots(lambda version: folder / f"version-{version}", folder / "model", "float32", 30.0)
publisher = Publisher(config, "127.0.0.1", [("a", "float32", (12,)), ("b", "float32", (3, 4))], snapshots)
def tell(message):
    print(type(message).__name__, json.dumps(msgspec.to_builtins(message)), flush=True)
for line in sys.stdin:
    version, takers = json.loads(line)
    tensors = {"a": torch.full((12,), float(version)), "b": torch.arange(12.0).reshape(3, 4) + version}
    publisher.meet(tuple(tuple(t) for t in takers), tell)
    told, nbytes = publisher.publish(version, iter([[(name, t)] for name, t in tensors.items()]))
    assert nbytes == 96
    tell(told)
publisher.close()
"""


class Trainer:
    def __init__(self, folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(folder), str(STALL_S)], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    async def publish(self, version: int, engines: dict[int, tuple[int, ScriptedEngine | None]]) -> dict[str, Any]:
        """`engines`: number -> (life, the engine; None answers nobody)."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([version, [(e, life) for e, (life, _) in engines.items()]]) + "\n")
        self.process.stdin.flush()
        joined = {e: asyncio.Event() for e in engines}
        for event, (_, engine) in zip(joined.values(), engines.values()):
            if engine is not None and getattr(engine, "met", False):
                event.set()
        takers = [asyncio.create_task(_take(engine, joined[e])) for e, (_, engine) in engines.items() if engine is not None]
        while True:
            line = await asyncio.to_thread(self.process.stdout.readline)
            assert line, "the trainer ended"
            kind, _, body = line.partition(" ")
            told = json.loads(body)
            if kind == "Published":
                break
            engine = engines[told["engine"]][1]
            if engine is not None:
                await engine.join_update_group(
                    told["address"], told["port"], told["world_size"], told["backend"], told["group"]
                )
                engine.met = True  # type: ignore[attr-defined]
                joined[told["engine"]].set()
        await asyncio.gather(*takers)
        return told  # type: ignore[no-any-return]


async def _take(engine: ScriptedEngine, joined: asyncio.Event) -> None:
    await joined.wait()
    await engine.receive_bucket([TensorSpec("a", "float32", (12,))])
    await engine.receive_bucket([TensorSpec("b", "float32", (3, 4))])


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    made = Trainer(tmp_path)
    yield made
    made.process.kill()
    made.process.wait()


async def up(number: int) -> ScriptedEngine:
    engine = ScriptedEngine(lambda request: 5, index=number)
    await engine.start()
    return engine


def test_a_dead_engine_holds_up_nobody_and_its_group_is_made_anew(trainer, tmp_path):
    async def work() -> None:
        first, second = await up(0), await up(1)
        told = await trainer.publish(0, {0: (0, first), 1: (0, second)})
        assert told["failed"] == [] and (first.weights.nbytes, second.weights.nbytes) == (96, 96)
        await second.weights.leave()  # it dies: its sockets close, and the trainer is not told in time
        told = await trainer.publish(1, {0: (0, first), 1: (0, None)})
        assert [(e, life) for e, life, _ in told["failed"]] == [(1, 0)] and "did not take the weights" in told["failed"][0][2]
        assert first.weights.nbytes == 192
        third = await up(1)  # its next life
        told = await trainer.publish(2, {0: (0, first), 1: (1, third)})
        assert told["failed"] == [] and (first.weights.nbytes, third.weights.nbytes) == (288, 96)
        told = await trainer.publish(3, {0: (0, first)})  # lost meanwhile, and known to be
        assert told["failed"] == [] and first.weights.nbytes == 384
        for engine in (first, second, third):
            await engine.stop()

    asyncio.run(asyncio.wait_for(work(), 55))


def test_engines_that_never_join_are_waited_for_together_and_left_out(trainer):
    absent = list(range(6))

    async def work() -> None:
        last = await up(6)
        await trainer.publish(0, {})  # it is up
        began = time.monotonic()
        told = await trainer.publish(1, {**dict.fromkeys(absent, (0, None)), 6: (0, last)})
        assert STALL_S - 1 < time.monotonic() - began < len(absent) * STALL_S / 2  # one after another would take twice that
        assert [(e, life) for e, life, _ in told["failed"]] == [(e, 0) for e in absent]
        for engine, _, reason in told["failed"]:
            told_first = f"engine {engine} did not join the broadcast of weights (engines 0, 1, 2, 3, 4, 5, 6 were waited for)"
            assert reason.startswith(told_first)
        assert last.weights.nbytes == 96, "behind the dead ones"
        await last.stop()

    asyncio.run(asyncio.wait_for(work(), 55))


def test_the_newest_two_versions_are_on_disk_whole_and_fingerprints_tell_them_apart(trainer, tmp_path):
    async def work() -> None:
        prints = [(await trainer.publish(version, {}))["fingerprint"] for version in (3, 4, 5, 3)]
        assert prints[0] == prints[3] and len(set(prints)) == 3
        for _ in range(300):  # a thread writes them
            if sorted(p.name for p in tmp_path.glob("version-*")) == ["version-3", "version-5"]:
                break
            await asyncio.sleep(0.1)
        tensors = load_file(tmp_path / "version-5" / "model-00001-of-00002.safetensors")
        assert tensors["a"].tolist() == [5.0] * 12

    asyncio.run(asyncio.wait_for(work(), 55))
    assert trainer.process.stdin is not None
    trainer.process.stdin.close()
    assert trainer.process.wait(30) == 0
    assert not list(tmp_path.glob("version-*")), "a run that is over needs none"


def test_a_snapshot_that_cannot_be_written_leaves_nothing_and_the_next_is(tmp_path, capfd):
    import torch

    from rpipe.training.snapshot import Snapshots

    model = tmp_path / "model"  # its config is written last, behind all weights
    snapshots = Snapshots(lambda version: tmp_path / f"version-{version}", model, "float32", 30.0)
    for version in (3, 4):
        snapshots.begin(version)
        snapshots.add([("a", torch.ones(3))])
        snapshots.end()
        snapshots.wait()
        if version == 3:
            assert list(tmp_path.iterdir()) == [], "no half of it"
            assert "version-3: not written" in capfd.readouterr().err
            model.mkdir()
            (model / "config.json").write_text("{}")
    assert load_file(tmp_path / "version-4" / "model.safetensors")["a"].tolist() == [1.0] * 3


def test_what_an_engine_starts_from_stays_though_the_trainer_moves_on(tmp_path):
    for version in (2, 3):
        (tmp_path / f"version-00000{version}").mkdir()
        (tmp_path / f"version-00000{version}" / "model.safetensors").write_text(str(version))
    (tmp_path / "version-000004.tmp").mkdir()
    own = tmp_path / "engine-001"
    assert claim(tmp_path, 4, own) is None
    assert claim(tmp_path, 2, own) == (own, 3)
    shutil.rmtree(tmp_path / "version-000003")
    assert (own / "model.safetensors").read_text() == "3"
    assert claim(tmp_path, 2, own) == (own, 2) and (own / "model.safetensors").read_text() == "2"


def test_a_broadcast_that_cannot_even_begin_is_that_engines_affair(tmp_path, monkeypatch):
    """As with NCCL, whose calls on an aborted communicator raise at once."""
    import torch
    import torch.distributed as dist

    from rpipe.config import parse
    from rpipe.training.publish import Member, Publisher
    from rpipe.training.snapshot import Snapshots

    sent = []

    class Handle:
        def wait(self) -> None:
            pass

    def broadcast(tensor: torch.Tensor, group: str, **how: Any) -> Handle:
        if group == "broken":
            raise RuntimeError("communicator was aborted")
        sent.append(tensor)
        return Handle()

    monkeypatch.setattr(dist, "broadcast", broadcast)
    monkeypatch.setattr("rpipe.training.publish.leave", lambda group: None)
    tree = {"model": {"make": {}}, "data": {"train": {"kind": "sums"}}, "engine": {"kind": "scripted"}}
    made = Publisher(parse(tree, "test"), "127.0.0.1", [("a", "float32", (3,))], Snapshots(None, tmp_path, "float32", 5.0))
    made._members = {0: Member(0, "broken"), 1: Member(2, "whole")}  # type: ignore[arg-type]
    told, nbytes = made.publish(4, iter([[("a", torch.ones(3))], [("b", torch.ones(5))]]))
    assert told.failed == ((0, 0, "engine 0 did not take the weights: communicator was aborted"),)
    assert len(sent) == 2 and nbytes == 32 and list(made._members) == [1]
