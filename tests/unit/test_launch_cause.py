"""Which line names why a job ended? Samples are what the starters print."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rpipe.runtime.cause import explain, first_failure

OMPI5_KILLED = """
--------------------------------------------------------------------------
prterun noticed that process rank 3 with PID 12616 on node n2 exited on
signal 11 (Segmentation fault).
--------------------------------------------------------------------------
"""
OMPI4_KILLED = "mpirun noticed that process rank 1 with PID 0 on node n1 exited on signal 9 (Killed).\n"
OMPI5_EXIT = """
Traceback (most recent call last):
  File "<string>", line 1, in <module>
torch.OutOfMemoryError: no memory
--------------------------------------------------------------------------
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-17239@1,2]
   Exit code:    1
--------------------------------------------------------------------------
"""
SRUN_KILLED = "srun: error: n1: task 0: Terminated\nsrun: error: n2: task 1: Killed\n"
SRUN_EXIT = "srun: error: n2: tasks 1-2: Exited with exit code 3\n"


def role(rank: int) -> str:
    return "rollout" if rank < 1 else "training"


def test_open_mpi_names_the_rank_that_a_signal_killed(tmp_path: Path) -> None:
    assert explain(OMPI5_KILLED, tmp_path, 139, role) == "rank 3 was killed by signal 11 (training, host n2)"
    told = explain(OMPI4_KILLED, tmp_path, 137, role)
    assert told.startswith("rank 1 was killed by signal 9 (training, host n1)") and "out of memory" in told


def test_slurm_names_the_killed_task_and_not_those_it_ended_itself(tmp_path: Path) -> None:
    assert explain(SRUN_KILLED, tmp_path, 137, role).startswith("rank 1 was killed by signal 9 (training, host n2)")
    assert explain(SRUN_EXIT, tmp_path, 3, role) == "rank 1 (training) exited with code 3"


def test_a_killed_rank_outweighs_the_complaints_of_the_others(tmp_path: Path) -> None:
    (tmp_path / "failure-rank00000.txt").write_text("rank 0 (rollout, node n1): connection reset by rank 3\n")
    assert explain(OMPI5_KILLED, tmp_path, 139, role).startswith("rank 3 was killed by signal 11")


def test_a_rank_that_said_why_outweighs_how_it_was_ended(tmp_path: Path) -> None:
    (tmp_path / "failure-rank00003.txt").write_text("no group for 120 s;\nwaiting for group 41\n")
    assert explain(OMPI5_KILLED, tmp_path, 139, role) == "rank 3 (training): no group for 120 s; waiting for group 41"


@pytest.mark.parametrize("number, name", [(15, "Terminated"), (14, "Alarm clock"), (10, "User defined signal 1")])
def test_how_the_others_of_a_failed_rank_are_ended_is_no_cause(tmp_path: Path, number: int, name: str) -> None:
    log = OMPI4_KILLED.replace("signal 9 (Killed)", f"signal {number} ({name})")
    assert explain(log, tmp_path, 1, role) == f"rank 1 was killed by signal {number} (training, host n1)", "nobody said more"
    (tmp_path / "failure-rank00000.txt").write_text("engine 0: SGLang's server ended (exit code -9)\n")
    assert explain(log, tmp_path, 1, role) == "rank 0 (rollout): engine 0: SGLang's server ended (exit code -9)"


def test_a_rank_that_failed_after_another_and_was_then_killed_is_no_cause(tmp_path: Path) -> None:
    for at, (rank, text) in enumerate([(0, "engine 0: SGLang's server ended"), (1, "connection closed by peer")]):
        file = tmp_path / f"failure-rank{rank:05d}.txt"
        file.write_text(text)
        os.utime(file, (100 + at, 100 + at))
    assert explain(OMPI4_KILLED, tmp_path, 1, role) == "rank 0 (rollout): engine 0: SGLang's server ended"


def test_the_earliest_failure_file_is_the_cause_whatever_its_rank(tmp_path: Path) -> None:
    for rank, at in ((0, 200), (2, 100), (1, 300)):
        file = tmp_path / f"failure-rank{rank:05d}.txt"
        file.write_text(f"reason of {rank}")
        os.utime(file, (at, at))
    assert first_failure(tmp_path) == (2, "reason of 2")


def test_an_empty_failure_file_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "failure-rank00000.txt").write_text("")
    assert first_failure(tmp_path) is None


def test_an_exception_is_named_with_the_rank_that_exited_first(tmp_path: Path) -> None:
    assert explain(OMPI5_EXIT, tmp_path, 1, role) == "rank 2 (training) failed: torch.OutOfMemoryError: no memory"


def test_with_nothing_to_go_by_the_starters_end_is_named(tmp_path: Path) -> None:
    assert explain("", tmp_path, 7, role) == "the job's starter exited with code 7"
    assert explain("", tmp_path, -9, role) == "the job's starter was killed by SIGKILL"
