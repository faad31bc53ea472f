"""Faults on one machine, scripted engines: what is lost, and does the run go on? `make faults` does the same with SGLang."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults.local import chain


@pytest.mark.timeout(900)
@pytest.mark.skipif(os.geteuid() != 0, reason="a filesystem that can be filled needs root")
def test_a_run_survives_killed_ranks_a_second_job_a_full_disk_and_a_damaged_checkpoint(tmp_path: Path) -> None:
    rows = chain(tmp_path / "faults", real=False)
    assert [row.fault for row in rows] == [
        "SIGKILL of a training rank",
        "SIGKILL of a rollout rank",
        "a second job in the same run dir",
        "full disk at a checkpoint",
        "a checkpoint truncated by hand",
    ]
