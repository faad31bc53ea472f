"""What does the machinery cost beside generating and training? Read and replayed from one finished run's log.

    python -m tests.bench.overheads RUN_DIR
    python -m tests.bench.overheads                  runs the quickstart for --iterations first

CPU seconds are this process's (`time.process_time`), over the run's own events: both coordinators decide again on every one of
them, and every record is written again through the same EventLog. Seconds of the channel and of publishing are the run's own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from rpipe import config as configs
from rpipe.control.rollout import RolloutCoordinator
from rpipe.control.settings import rollout_settings, training_settings
from rpipe.control.training import TrainingCoordinator
from rpipe.core.eventlog import EventLog, records, steps
from rpipe.core.events import (
    AnyCommand,
    AnyEvent,
    GroupArrived,
    GroupReceived,
    GroupsDrawn,
    RolloutRequested,
    SendGroup,
    StepDone,
    TurnFinished,
    WeightsPublished,
)
from tests.bench.jobs import run

History = list[tuple[AnyEvent, list[AnyCommand]]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--iterations", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.run is not None:
        print(told(arguments.run))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        run(arguments.config, Path(folder) / "run", f"run.iterations={arguments.iterations}", "evaluation.prompts=0")
        print(told(Path(folder) / "run"))
    return 0


def told(run_dir: Path) -> str:
    config = configs.load(run_dir / "config.yaml")
    attempt = run_dir / "attempt-1" / "events"
    paths = [attempt / "rank00000.jsonl", attempt / f"rank{config.cluster.rollout_ranks:05d}.jsonl"]
    rollout, training = (list(steps(path)) for path in paths)
    turns = sum(isinstance(event, TurnFinished) for event, _ in rollout)
    seconds = max(record["t"] for record in records(paths[0]))
    deciding_s = replay_s(RolloutCoordinator(rollout_settings(config)), rollout)
    deciding_s += replay_s(TrainingCoordinator(training_settings(config)), training)
    writing_s = write_s([rollout, training])
    log_bytes = sum(path.stat().st_size for path in attempt.glob("*.jsonl"))
    arrived = [event for event, _ in training if isinstance(event, GroupArrived)]
    way_s = on_the_way_s(rollout)
    published = [event.t - event.started_t for event, _ in training if isinstance(event, WeightsPublished)]
    stepped = sum(isinstance(event, StepDone) for event, _ in training)
    rows = [
        ("run", f"{run_dir.name}: {turns} trajectories, {len(arrived)} groups, {stepped} steps, {seconds:.1f} s"),
        ("coordinators' CPU, a trajectory", f"{1e6 * deciding_s / turns:.0f} us ({deciding_s / seconds:.2%} of the job)"),
        ("writing the log, a trajectory", f"{1e6 * writing_s / turns:.0f} us ({writing_s / seconds:.2%} of the job)"),
        ("log, a trajectory", f"{log_bytes / turns:.0f} bytes"),
        ("channel, a group", f"{statistics.median(event.nbytes for event in arrived):.0f} bytes"),
        ("channel, a group", f"{statistics.median(way_s):.4f} s from SendGroup to its receipt, median;"
         f" {min(way_s):.4f} s where the trainer was free"),
        ("prompt tokens found cached", f"{cached_share(rollout):.0%}"),
        ("publish", f"{statistics.median(published):.3f} s, median ({sum(published) / seconds:.1%} of the job)"),
    ]  # fmt: skip
    return "\n".join(f"{name:34} {value}" for name, value in rows)


def replay_s(coordinator: RolloutCoordinator | TrainingCoordinator, history: History) -> float:
    """CPU seconds of all its decisions."""
    began = time.process_time()
    for event, _ in history:
        coordinator.on(event)  # type: ignore[arg-type]
    return time.process_time() - began


def write_s(histories: list[History]) -> float:
    """CPU seconds of writing every event and command again."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        for rank, history in enumerate(histories):
            with EventLog(Path(folder), rank) as log:
                for event, commands in history:
                    log.event(event)
                    for command in commands:
                        log.command(event.t, msgspec.structs.replace(command))
                    if commands:
                        log.flush()
        return time.process_time() - began


def cached_share(history: History) -> float:
    """Of the prompt tokens of all trajectories: those that an engine's prefix cache held when the request began."""
    prompt: dict[int, int] = {}
    asked = cached = 0
    for event, _ in history:
        if isinstance(event, (RolloutRequested, GroupsDrawn)):
            prompt.update({spec.group: spec.prompt_tokens for spec in event.groups})
        elif isinstance(event, TurnFinished):
            asked += prompt[event.trajectory.group]
            cached += min(event.cached_tokens, prompt[event.trajectory.group])
    return cached / asked if asked else 0.0


def on_the_way_s(history: History) -> list[float]:
    sent: dict[int, float] = {}
    found = []
    for event, commands in history:
        if isinstance(event, GroupReceived):
            found.append(event.t - sent.pop(event.group))
        sent.update({command.group: event.t for command in commands if isinstance(command, SendGroup)})
    return found


if __name__ == "__main__":
    sys.exit(main())
