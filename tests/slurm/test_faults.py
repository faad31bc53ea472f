"""Faults of a cluster, scripted engines: does the job go on, elsewhere if it must? `make faults` does the same with SGLang."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.on_cluster import chain
from tests.slurm.cluster import Cluster


@pytest.fixture
def impatient() -> Iterator[Cluster]:
    """A cluster that gives a silent host up after ten seconds."""
    with Cluster(Path(f"/tmp/rpipe-impatient-{os.getpid()}"), silent_s=10) as cluster:
        yield cluster


@pytest.mark.timeout(900)
def test_a_job_survives_its_controller_cut_links_a_host_taken_down_and_one_that_crashes(
    impatient: Cluster, tmp_path: Path
) -> None:
    rows = chain(impatient, tmp_path / "faults", real=False)
    assert [row.fault for row in rows] == [
        "slurmctld killed, back after 5 s",
        "link cut for 5 s",
        "scontrol update state=down",
        "link cut for 60 s",
        "host crash",
    ]
