"""What do the Slurm tests share? One cluster for the session; where it cannot be started they are skipped, except in CI."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, lacking

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = lacking()
    for item in items:
        if HERE not in item.path.parents:
            continue
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
        if reason and os.environ.get("CI") != "true":
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """Three hosts. In CI=true a cluster that cannot be started is an error."""
    for left in Path("/tmp").glob("rpipe-slurm-*"):  # of a pytest that was killed
        if not Path("/proc", left.name.rpartition("-")[2]).exists():
            Cluster(left).stop()
    cluster = Cluster(Path(f"/tmp/rpipe-slurm-{os.getpid()}"))  # short: unix sockets live below it
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def cluster(slurm: Cluster) -> Iterator[Cluster]:
    """The session's cluster, all hosts idle; jobs that a test leaves are ended."""
    yield slurm
    slurm.cancel_all()
