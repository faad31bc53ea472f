"""What do all tests share? Bounds by folder, and one thread each."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
JOB_TIMEOUT_S = 300  # real engines take up to a minute to start on a loaded machine

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
sys.path[:0] = [str(TESTS.parent), str(TESTS / "job")]  # rpipe without installing it; helpers beside the job tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if TESTS / "job" in item.path.parents:
            item.add_marker(pytest.mark.job)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(JOB_TIMEOUT_S))
