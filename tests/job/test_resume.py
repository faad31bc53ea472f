"""A job that is killed or stopped at random events and started again: does it end as if nothing had happened?

Scripted trajectories in exact mode, so that the final weights say it to the bit.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from rpipe.runtime.dump import read_trajectories
from tests.job.jobs import ROOT, command, config, environment, events, members, report, train, weights

INTERRUPTIONS, ITERATIONS = 10, 16
LINES = ((60, 300), (5, 52))  # by rank: of the log, at which an attempt ends; 250 and 40 are an iteration's


@pytest.mark.timeout(900)
def test_interrupted_ten_times_at_random_events_it_ends_as_an_uninterrupted_run(tmp_path):
    tree = config(
        run={"iterations": ITERATIONS, "seed": 3, "checkpoint_every_iterations": 2},
        pipeline={"mode": "exact"},
        admission={"policy": "frontier"},
    )
    train(tmp_path / "whole", tree)
    seed = int.from_bytes(os.urandom(4), "big")
    draw = random.Random(seed)
    run_dir, path = tmp_path / "run", tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    for attempt in range(1, INTERRUPTIONS + 1):
        rank = attempt % 2  # events of rollout's coordinator, or of the trainer's
        lines = draw.randrange(*LINES[rank])
        ended = f"seed {seed}: it ended before {lines} lines of rank {rank}"
        assert _interrupted(path, run_dir, attempt, rank, lines, kill=attempt % 5 != 0), ended
    train(run_dir, tree)
    assert weights(run_dir) == weights(tmp_path / "whole"), f"seed {seed}"
    found, whole = report(run_dir), report(tmp_path / "whole")
    assert found["attempts"] == INTERRUPTIONS + 1
    for key in ("iteration", "groups_trained", "steps", "trajectories", "reward_mean"):
        assert [i[key] for i in found["iterations"]] == [i[key] for i in whole["iterations"]], (seed, key)
    rows = [_by_id(folder) for folder in (run_dir, tmp_path / "whole")]
    assert rows[0].keys() == rows[1].keys(), "the cursor gave the same groups"
    for key, row in rows[0].items():
        assert row == rows[1][key], (seed, key)
    _nothing_was_generated_twice_within_an_attempt(run_dir, seed)


def _interrupted(path: Path, run_dir: Path, attempt: int, rank: int, lines: int, kill: bool) -> bool:
    """Start an attempt and end it once the rank's log has so many lines; False if it ended by itself."""
    job = subprocess.Popen(
        command(path, run_dir), cwd=ROOT, env=environment(), text=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    log = run_dir / f"attempt-{attempt}" / "events" / f"rank{rank:05d}.jsonl"
    end = time.monotonic() + 150
    while not log.exists() or log.read_bytes().count(b"\n") < lines:
        if job.poll() is not None:
            return False
        assert time.monotonic() < end, f"attempt {attempt} did not reach {lines} lines of rank {rank}"
        time.sleep(0.005)
    processes = members(job)
    if kill:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # its parent was the one before
                process.kill()
        job.kill()
    else:
        os.kill(job.pid, signal.SIGUSR2)
    job.wait(60)
    psutil.wait_procs(processes, timeout=30)
    return True


def _by_id(run_dir: Path) -> dict[tuple[int, int], Any]:
    return {
        (row["group"], row["index"]): (
            row["iteration"], row["prompt_id"], row["output_ids"].tolist(), row["logprobs"].tolist(), row["reward"],
            row["advantage"], row["finish"], row["versions"], row["response_text"],
        )
        for row in read_trajectories(run_dir / "trajectories")
    }  # fmt: skip


def _nothing_was_generated_twice_within_an_attempt(run_dir: Path, seed: int) -> None:
    taken_over = 0
    for attempt in range(1, INTERRUPTIONS + 2):
        kept = {
            (e["iteration"], g["group"])
            for e in events(run_dir, 0, "RolloutRequested", attempt)
            for g in e["groups"]
            if g["rewards"]
        }
        sent = Counter(tuple(e["trajectory"]) for e in events(run_dir, 0, "SendTurn", attempt))
        assert not sent or max(sent.values()) == 1, seed
        assert not {group for _, group in kept} & {group for group, _ in sent}, seed
        taken_over += len(kept)
    assert taken_over > 0, f"seed {seed}: no group was ever taken over"
