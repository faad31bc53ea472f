"""Do the coordinators keep up at scale?

    python -m tests.bench.control_plane            the coordinators alone: 1,024 engines, 100,000 trajectories, in one process
    python -m tests.bench.control_plane --job      a real MPI job of 64 ranks on scripted engines: 10,000 groups complete

Alone, both coordinators live in one process with a world of given lengths and speeds on a virtual clock; what is timed is
`on(event)`, in CPU time, so that nothing else on the machine counts (a decision waits for nothing). Wanted: a decision takes
p50 < 1 ms and p99.9 < 10 ms; else the exit code is 1. In the job every message, tensor and log line is real; only tokens are
drawn instead of computed (and a very small model is trained).
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import subprocess
import sys
import tempfile
import time
import tracemalloc
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rpipe.control.rollout import RolloutCoordinator
from rpipe.control.rollout_settings import RolloutSettings
from rpipe.control.training import TrainingCoordinator, TrainingSettings
from rpipe.core import events as e
from rpipe.core.eventlog import records
from rpipe.core.types import TrajectoryId
from rpipe.policy.admission import Fifo, Frontier
from rpipe.policy.advantage import grpo
from rpipe.policy.placement import LeastLoaded
from tests.job.jobs import command, config, environment

P50_MS, P999_MS = 1.0, 10.0
PROMPT_TOKENS = 200
MEDIAN_TOKENS, SIGMA = 870, 0.97  # reasoning lengths: DeepSeek-R1 serving
TOKENS_PER_S = 50.0
TRAIN_TOKENS_PER_S = 20_000.0  # of one replica


@dataclass
class World:
    """What engines, rewards, trainer and channel answer, and when. `took_ms`: of every decision, by coordinator."""

    rollout: RolloutCoordinator
    training: TrainingCoordinator
    groups: int  # R
    samples: int  # K
    seed: int = 0
    now: float = 0.0
    took_ms: dict[str, array[float]] = field(default_factory=lambda: {"rollout": array("d"), "training": array("d")})
    commands: Counter[str] = field(default_factory=Counter)
    largest: int = 0  # commands of one decision

    def __post_init__(self) -> None:
        self._due: list[tuple[float, int, str, Any]] = []
        self._serial = itertools.count()
        self._random = random.Random(self.seed)
        self._tokens: dict[TrajectoryId, int] = {}
        self._free_t = [0.0] * self.training.settings.replicas
        self._after("training", 0.0, e.TrainerReady(t=0.0, iteration=0, version=0, replicas=len(self._free_t)))

    def run(self, until_sent: int | None = None) -> None:
        while self._due and (until_sent is None or self.commands["SendGroup"] < until_sent):
            self.now, _, who, event = heapq.heappop(self._due)
            coordinator: Any = self.rollout if who == "rollout" else self.training
            began = time.thread_time_ns()
            commands = coordinator.on(event)
            self.took_ms[who].append((time.thread_time_ns() - began) / 1e6)
            self.largest = max(self.largest, len(commands))
            for c in commands:
                self.commands[type(c).__name__] += 1
                self._perform(c)
        assert until_sent is not None or (self.rollout.done and self.training.done), self.rollout.waiting_for()

    def _after(self, who: str, delay_s: float, event: Any) -> None:
        heapq.heappush(self._due, (self.now + delay_s, next(self._serial), who, event))

    def _perform(self, c: Any) -> None:
        t = self.now
        match c:
            case e.PublishWeights():
                self._after("rollout", 0.01, e.WeightsOffered(t=t, version=c.version))
            case e.UpdateEngine():
                self._after("rollout", 1.0, e.EngineUpdated(t=t + 1.0, engine=c.engine, version=c.version, started_t=t))
            case e.ConfirmWeights():
                done = e.WeightsPublished(t=t, version=c.version, started_t=t, nbytes=0)
                self._after("training", 0.01, done)
            case e.RequestRollout():
                first = c.iteration * self.groups
                specs = tuple(e.GroupSpec(first + i, PROMPT_TOKENS) for i in range(self.groups))
                asked = e.RolloutRequested(
                    t=t, iteration=c.iteration, version=c.version, purpose=c.purpose, trajectories_per_group=self.samples,
                    groups=specs,
                )  # fmt: skip
                self._after("rollout", 0.0, asked)
            case e.SendTurn():
                self._turn(c)
            case e.ScoreTrajectory():
                scored = e.TrajectoryScored(
                    t=t + 0.05, trajectory=c.trajectory, reward=float(self._random.random() < 0.5), started_t=t
                )
                self._after("rollout", 0.05, scored)
            case e.SendGroup():
                tokens = tuple(PROMPT_TOKENS + self._tokens.pop(TrajectoryId(c.group, s)) for s in range(self.samples))
                arrived = e.GroupArrived(
                    t=t + 0.01, group=c.group, order=c.order, iteration=c.iteration, version=c.version, tokens=tokens, nbytes=0
                )
                self._after("training", 0.01, arrived)
                self._after("rollout", 0.02, e.GroupReceived(t=t + 0.02, group=c.group))
            case e.EndRollout():
                ended = e.RolloutEnded(
                    t=t, iteration=c.iteration, version=c.version, groups_sent=c.groups_sent, groups_dropped=c.groups_dropped
                )
                self._after("training", 0.02, ended)
            case e.TrainMicroBatch():
                self._micro_batch(c)
            case e.FinishStep():
                self._after("training", 0.5, _step_done(t, c.step))
            case e.SaveCheckpoint():
                self._after("training", 1.0, e.CheckpointSaved(t=t, iteration=c.iteration, started_t=t, path=""))
            case _:
                pass

    def _turn(self, c: e.SendTurn) -> None:
        t, tokens = self.now, min(32_768, max(1, round(MEDIAN_TOKENS * math.exp(SIGMA * self._random.gauss(0.0, 1.0)))))
        self._tokens[c.trajectory] = tokens
        self._after("rollout", 0.5, e.TurnStarted(t=t + 0.5, trajectory=c.trajectory, engine=c.engine))
        took_s = 0.5 + tokens / TOKENS_PER_S
        finished = e.TurnFinished(
            t=t + took_s, trajectory=c.trajectory, engine=c.engine, output_tokens=tokens, cached_tokens=0, finish="stop",
            started_t=t, first_token_t=t + 0.5, version=c.version,
        )  # fmt: skip
        self._after("rollout", took_s, finished)

    def _micro_batch(self, c: e.TrainMicroBatch) -> None:
        began = max(self.now, self._free_t[c.replica])
        ended = self._free_t[c.replica] = began + c.tokens / TRAIN_TOKENS_PER_S
        done = e.MicroBatchDone(
            t=ended, replica=c.replica, micro_batch=c.micro_batch, started_t=began, ended_t=ended,
            trajectories=sum(len(s.samples) for s in c.slices), tokens=c.tokens,
        )  # fmt: skip
        self._after("training", ended - self.now, done)


def _step_done(t: float, step: int) -> e.StepDone:
    return e.StepDone(
        t=t, step=step, started_t=t, skipped=False, loss=0.0, grad_norm=1.0, learning_rate=1e-6, entropy=1.0,
        clip_fraction=0.0, kl=0.0, logprob_gap_mean=0.0, logprob_gap_max=0.0, trained_tokens=1,
    )  # fmt: skip


def world(admission: str, mode: Any, span: bool, engines: int, trajectories: int, samples: int, replicas: int) -> World:
    groups = trajectories // samples
    step = next(u for u in range(64, 0, -1) if groups % u == 0)
    rollout = RolloutSettings(
        engines=engines, iterations=1, max_new_tokens=32_768, trajectory_deadline_s=1e6, queue_bytes=1 << 40,
        admission=Fifo() if admission == "fifo" else Frontier(16 * engines // samples), placement=LeastLoaded(), advantage=grpo,
    )  # fmt: skip
    training = TrainingSettings(
        mode=mode, span_groups=span, groups_per_step=step, replicas=replicas, micro_batch_tokens=32_768, iterations=1
    )
    return World(RolloutCoordinator(rollout), TrainingCoordinator(training), groups, samples)


CASES = {  # admission, mode, micro-batches may span groups
    "fifo, streamed": ("fifo", "fifo", True),
    "frontier, streamed": ("frontier", "fifo", True),
    "frontier, exact": ("frontier", "exact", False),
    "fifo, serial": ("fifo", "serial", True),
}


def alone(engines: int, trajectories: int, samples: int, replicas: int) -> bool:
    """Prints the table; whether every case kept the bounds."""
    print(f"{engines:,} engines, {trajectories:,} trajectories in groups of {samples}, {replicas} training replicas")
    print(
        f"{'admission, mode':20} {'coordinator':11} {'decisions':>9} {'p50 ms':>8} {'p99 ms':>8} {'p99.9 ms':>8} {'max ms':>8}"
        f" {'events/s':>9} {'MB':>6}"
    )
    good = True
    for name, (admission, mode, span) in CASES.items():
        made = world(admission, mode, span, engines, trajectories, samples, replicas)
        made.run()
        assert made.commands["SendTurn"] == trajectories and made.commands["SendGroup"] == trajectories // samples
        memory = held_mb(world(admission, mode, span, engines, trajectories, samples, replicas))
        for who, took in made.took_ms.items():
            ranked = sorted(took)
            p50, p99, p999 = (ranked[int(q * (len(ranked) - 1))] for q in (0.5, 0.99, 0.999))
            good &= p50 < P50_MS and p999 < P999_MS
            print(
                f"{name:20} {who:11} {len(took):>9,} {p50:>8.4f} {p99:>8.4f} {p999:>8.3f} {ranked[-1]:>8.1f}"
                f" {len(took) / (sum(took) / 1e3):>9,.0f} {memory[who]:>6.1f}",
                flush=True,
            )
    print(f"wanted: p50 < {P50_MS:g} ms, p99.9 < {P999_MS:g} ms: {'yes' if good else 'NO'}")
    print("max: the decision that begins a rollout (it makes all records; fifo admits all at once), or a garbage collection")
    return good


def held_mb(made: World) -> dict[str, float]:
    """What either coordinator and its policies hold when half of the groups were sent."""
    tracemalloc.start()
    try:
        made.run(until_sent=made.groups // 2)
        found = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    held = {"rollout": 0.0, "training": 0.0}
    for statistic in found.statistics("filename"):
        file = statistic.traceback[0].filename
        if "rpipe/control/" in file or "rpipe/policy/" in file:
            who = "training" if file.endswith(("training.py", "batching.py")) else "rollout"
            held[who] += statistic.size / 1e6
    return held


# ---- the whole job


def job(ranks: int, groups: int, keep: Path | None) -> bool:
    """`ranks` MPI ranks, two of them training; prints what the log says. Whether all groups were trained."""
    iterations = 10
    tree = config(
        run={"name": "control-plane", "iterations": iterations, "seed": 3, "checkpoint_every_iterations": 0},
        cluster={"rollout_ranks": ranks - 2, "training_ranks": 2},
        data={"train": {"kind": "sums", "size": 1000, "reward": "last_integer"}},
        rollout={"groups_per_iteration": groups // iterations, "trajectories_per_group": 2, "max_new_tokens": 32},
        training={"trajectories_per_step": groups // iterations // 5 * 2, "packing": "global"},
        engine={"kind": "scripted", "max_running": 8, "options": {"median_tokens": 8, "sigma": 0.7, "tokens_per_s": 100}},
        admission={"policy": "frontier", "frontier_groups": 4 * (ranks - 2)},
        limits={"message_s": 300, "collective_s": 300, "start_s": 900},
    )
    with tempfile.TemporaryDirectory() as folder:
        run_dir = keep or Path(folder) / "run"
        path = Path(folder) / "run.yaml"
        path.write_text(yaml.safe_dump(tree))
        began = time.monotonic()
        done = subprocess.run(command(path, run_dir), env=environment(), capture_output=True, text=True)
        wall_s = time.monotonic() - began
        if done.returncode:
            print(done.stdout[-2000:], done.stderr[-2000:])
            return False
        report = json.loads((run_dir / "report.json").read_text())
        trained = sum(i["groups_trained"] for i in report["iterations"])
        spent = sum(i["rollout_to_train_end_s"] for i in report["iterations"])
        events = run_dir / "attempt-1" / "events"
        logs = {"rollout": events / "rank00000.jsonl", "training": events / f"rank{ranks - 2:05d}.jsonl"}
        print(f"{ranks} ranks ({ranks - 2} scripted engines, 2 training): {trained:,} of {groups:,} groups trained")
        print(f"{'wall, with start':22} {wall_s:8.1f} s")
        print(
            f"{'in iterations':22} {spent:8.1f} s   {trained / spent:8.0f} groups/s   {2 * trained / spent:8.0f} trajectories/s"
        )
        for who, log in logs.items():
            count = sum(1 for r in records(log) if r["io"] == "event")
            print(f"{who + ' events':22} {count:8,}     {count / spent:8.0f} events/s")
        return trained == groups


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1024)
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--job", action="store_true", help="the MPI job instead")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--run-dir", type=Path, help="keep the job's run directory here")
    a = parser.parse_args()
    good = job(a.ranks, a.groups, a.run_dir) if a.job else alone(a.engines, a.trajectories, a.samples, a.replicas)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
