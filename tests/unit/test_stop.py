"""Signals to ranks whose checkpoint is under way; real processes, one group, as a batch system signals them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rpipe.runtime import child

ROOT = Path(__file__).resolve().parents[2]
BOUND_S = 60
RANKS = 2
# The group's first process stands for the starter. A rank writes its checkpoint until it may end.
STARTER = """
import signal, subprocess, sys
for number in (signal.SIGUSR2, signal.SIGTERM):
    signal.signal(number, lambda *_: None)
ranks = [subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1], str(rank)]) for rank in range(int(sys.argv[3]))]
print([rank.wait() for rank in ranks], flush=True)
"""
RANK = """
import sys, time
from pathlib import Path
from rpipe.runtime.stop import STOPPED, listen

stop = listen()
folder, rank = Path(sys.argv[1]), sys.argv[2]
(folder / f"up{rank}").touch()
while not stop.reason:
    time.sleep(0.01)
(folder / f"saving{rank}").touch()
while not (folder / "written").exists():
    time.sleep(0.01)
assert stop.reason == STOPPED
(folder / f"saved{rank}").touch()
"""


class Ranks:
    def __init__(self, folder: Path, **variables: str) -> None:
        without = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_"))}
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", STARTER, str(folder), RANK, str(RANKS)], text=True, stdout=subprocess.PIPE,
            env={**without, "PYTHONPATH": str(ROOT), **variables}, start_new_session=True,
        )  # fmt: skip

    def until(self, what: str) -> None:
        end = time.monotonic() + BOUND_S
        while not all((self.folder / f"{what}{rank}").exists() for rank in range(RANKS)):
            assert self.process.poll() is None and time.monotonic() < end, f"not {what}"
            time.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)

    def codes(self) -> list[int]:
        output, _ = self.process.communicate(timeout=BOUND_S)
        return [int(word) for word in output.strip(" []\n").split(",")]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def start(**variables: str) -> Ranks:
        made.append(Ranks(tmp_path, **variables))
        made[-1].until("up")
        return made[-1]

    yield start
    for ranks in made:
        if ranks.process.poll() is None:
            os.killpg(ranks.process.pid, signal.SIGKILL)
            ranks.process.wait()


@pytest.mark.parametrize("first", [signal.SIGUSR2, signal.SIGTERM])
def test_slurms_terms_do_not_end_a_rank_that_is_on_its_way_to_the_safe_point(started, tmp_path, first):
    ranks = started(SLURM_STEP_ID="0")
    ranks.signal(first)
    ranks.until("saving")
    ranks.signal(signal.SIGTERM)
    ranks.signal(signal.SIGTERM)  # at the time limit two come at once
    (tmp_path / "written").touch()
    assert ranks.codes() == [0] * RANKS
    assert all((tmp_path / f"saved{rank}").exists() for rank in range(RANKS))


def test_elsewhere_term_ends_a_rank_at_once(started, tmp_path):
    ranks = started(OMPI_COMM_WORLD_RANK="0", SLURM_STEP_ID="0")
    ranks.signal(signal.SIGUSR2)
    ranks.until("saving")
    ranks.signal(signal.SIGTERM)
    assert ranks.codes() == [-signal.SIGTERM] * RANKS
    assert not list(tmp_path.glob("saved*"))


def test_a_childs_program_does_not_see_what_is_meant_for_its_rank(tmp_path):
    """srun brings a signal to every process of a step."""
    with (tmp_path / "log").open("wb") as log:
        tell = "print([line.split()[1] for line in open('/proc/self/status') if line.startswith('SigBlk')][0])"
        assert child.spawn([sys.executable, "-c", tell], dict(os.environ), log).wait(BOUND_S) == 0
    blocked = int((tmp_path / "log").read_text(), 16)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        assert blocked >> (number - 1) & 1, number
