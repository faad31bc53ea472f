"""How long and how much memory does `rpipe report` take on a large log?

    python -m tests.bench.report [--events 1000000] [--html]

Writes a log of both real coordinators on a virtual clock (tests/timed_job.py), then reads it in a process of its own. Prints a
line of JSON: events, megabytes, CPU seconds, peak memory over an empty interpreter's, with the page where --html asks for it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rpipe.policy.admission import Frontier
from tests.timed_job import TimedJob

GROUPS, SAMPLES = 128, 16
EVENTS_PER_TRAJECTORY = 5.3  # SendTurn, TurnStarted, TurnFinished, ScoreTrajectory, TrajectoryScored; a group's are few

READ = """
import json, sys, time

def peak():  # getrusage's would be the parent's
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

empty = peak()
began = time.process_time()
from rpipe.report import main
main(sys.argv[1:])
took = time.process_time() - began
print(json.dumps({"cpu_s": round(took, 2), "peak_megabytes": round((peak() - empty) / 1024, 1)}), file=sys.stderr)
"""


def write(run: Path, events: int) -> tuple[int, float]:
    """At least `events` records in `run`; returns how many, and their megabytes."""
    iterations = max(1, round(events / (GROUPS * SAMPLES * EVENTS_PER_TRAJECTORY)))
    TimedJob(
        run / "attempt-1",
        groups=GROUPS,
        samples=SAMPLES,
        rollout={"admission": Frontier(16), "engines": 8, "iterations": iterations},
        training={"groups_per_step": 16, "replicas": 4, "iterations": iterations},
        tokens=lambda t: 50 + (97 * t.group + 31 * t.sample) % 400,
        train_token_s=0.0002,
    ).run()
    logs = list((run / "attempt-1" / "events").glob("*.jsonl"))
    return sum(log.read_bytes().count(b"\n") for log in logs), sum(log.stat().st_size for log in logs) / 1e6


def measure(run: Path, *options: str) -> dict[str, float]:
    """CPU seconds and peak megabytes of `rpipe report RUN ...` in a fresh process."""
    done = subprocess.run([sys.executable, "-c", READ, str(run), *options], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stderr.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--html", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        events, megabytes = write(run, asked.events)
        options = ["--html", f"{directory}/report.html"] if asked.html else []
        print(json.dumps({"events": events, "log_megabytes": round(megabytes), **measure(run, *options)}))


if __name__ == "__main__":
    main()
