"""Does a rank get the cores beside its device, and an engine's owner those of its whole engine?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rpipe.runtime import binding

TWO = [frozenset(range(0, 32)), frozenset(range(32, 64))]
EIGHT = [frozenset({i}) for i in range(8)]


@pytest.mark.parametrize("place, width, wanted", [(0, 1, TWO[0]), (3, 1, TWO[0]), (4, 1, TWO[1]), (2, 4, TWO[0] | TWO[1])])
def test_eight_devices_on_two_numa_nodes(place, width, wanted):
    assert binding.cores_of(place, 8, width, TWO) == wanted


def test_a_node_of_its_own_for_every_device():
    assert [binding.cores_of(i, 8, 1, EIGHT) for i in range(8)] == EIGHT
    assert binding.cores_of(6, 8, 4, EIGHT) == {6, 7}  # an engine does not reach past its host


def test_the_kernels_list_is_read_and_memory_without_cores_left_out(tmp_path: Path):
    for number, cores in enumerate(["0-1,4", "2-3", ""]):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}/cpulist").write_text(cores + "\n")
    assert binding.numa_nodes(tmp_path) == [{0, 1, 4}, {2, 3}]
    assert binding.numa_nodes(tmp_path / "absent") == []


def test_cores_that_the_job_does_not_have_are_not_asked_for(monkeypatch: pytest.MonkeyPatch):
    set_to: list[object] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {33, 34})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: set_to.append(cores))
    monkeypatch.setattr(binding, "numa_nodes", lambda: TWO)
    hosts = ["n1"] * 4 + ["n2"] * 2
    assert binding.bind(3, hosts, 1) == {33, 34} and set_to == [{33, 34}]
    assert binding.bind(0, hosts, 1) == {33, 34} and len(set_to) == 1  # node 0 is not ours: nothing is changed
