"""Finished groups on the disk: what is taken over, and what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rpipe.config import Config, parse
from rpipe.rollout.kept import KeptGroup, KeptGroups, KeptTrajectory


def config(**sections: dict[str, Any]) -> Config:
    return parse({"model": {"make": {}}, "data": {"train": {"kind": "sums"}}, **sections}, "test")


def group(number: int) -> KeptGroup:
    def trajectory(n: int) -> KeptTrajectory:
        ids, logprobs = np.arange(n, dtype=np.int32), np.linspace(-1, 0, n, dtype=np.float32)
        return KeptTrajectory(ids.tobytes(), logprobs.tobytes(), ((0, n, 3),), "stop", 1, 0.5)

    return KeptGroup(number, np.array([7, 8], np.int32).tobytes(), tuple(trajectory(n) for n in (3, 5)))


def kept(folder: Path, checkpoints: tuple[str, ...] = (), **sections: dict[str, Any]) -> KeptGroups:
    return KeptGroups(folder, config(**sections), lambda: [Path(name) for name in checkpoints])


def written(folder: Path, *numbers: int, iteration: int = 3) -> Path:
    store = kept(folder)
    store.begin(iteration, iteration, "these")
    for number in numbers:
        store.add(group(number))
    store.close()
    return folder / f"iteration-{iteration:06d}"


def test_a_later_attempt_takes_them_over_and_adds_its_own(tmp_path):
    written(tmp_path, 24, 26)
    store = kept(tmp_path)
    found = store.begin(3, 3, "these")
    assert sorted(found) == [24, 26] and found[24] == group(24)
    assert found[24].trajectory(1).output_ids.tolist() == [0, 1, 2, 3, 4] and found[24].trajectory(0).versions[0].version == 3
    assert found[24].belongs((7, 8), 2) and not found[24].belongs((7, 9), 2) and not found[24].belongs((7, 8), 3)
    store.add(group(25))
    store.close()
    assert sorted(kept(tmp_path).begin(3, 3, "these")) == [24, 25, 26]


def test_an_attempt_that_lost_the_run_and_writes_on_spoils_nothing(tmp_path):
    older = kept(tmp_path)
    older.begin(3, 3, "these")
    older.add(group(24))
    newer = kept(tmp_path)
    assert sorted(newer.begin(3, 3, "these")) == [24]
    for number in (25, 26):
        older.add(group(number + 2))
        newer.add(group(number))
    assert sorted(kept(tmp_path).begin(3, 3, "these")) == [24, 25, 26]
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-000003"]


OTHER: dict[str, dict[str, Any]] = {"rollout": {"temperature": 0.5}, "reward": {"deadline_s": 60.0}}


@pytest.mark.parametrize("stale", ["fingerprint", "version", *OTHER])
def test_what_was_sampled_otherwise_is_not_taken_and_goes(tmp_path, stale):
    written(tmp_path, 24)
    store = kept(tmp_path, **({stale: OTHER[stale]} if stale in OTHER else {}))
    found = store.begin(3, 2 if stale == "version" else 3, "others" if stale == "fingerprint" else "these")
    assert found == {}
    store.add(group(25))
    store.close()
    assert kept(tmp_path).begin(3, 3, "these") == {}


def test_what_is_scored_alike_by_more_workers_is_taken(tmp_path):
    written(tmp_path, 24)
    assert sorted(kept(tmp_path, reward={"workers": 7}).begin(3, 3, "these")) == [24]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_tail_costs_the_last_group_only(tmp_path, cut):
    path = written(tmp_path, 24, 25)
    path.write_bytes(path.read_bytes()[:-cut])
    store = kept(tmp_path)
    assert sorted(store.begin(3, 3, "these")) == [24]
    store.add(group(26))
    store.close()
    assert sorted(kept(tmp_path).begin(3, 3, "these")) == [24, 26]


def test_a_damaged_record_ends_what_is_believed(tmp_path):
    path = written(tmp_path, 24, 25, 26)
    data = bytearray(path.read_bytes())
    data[len(data) - 20] ^= 1
    path.write_bytes(data)
    assert sorted(kept(tmp_path).begin(3, 3, "these")) == [24, 25]


def test_an_empty_or_foreign_file_is_no_obstacle(tmp_path):
    for content in (b"", b"\0" * 100, b"not a record"):
        (tmp_path / "iteration-000003").write_bytes(content)
        assert kept(tmp_path).begin(3, 3, "these") == {}


def test_files_go_when_no_checkpoint_leads_to_them(tmp_path):
    for iteration in (3, 4, 5):
        written(tmp_path, 8 * iteration, iteration=iteration)
    kept(tmp_path, ("iteration-000006", "iteration-000004")).begin(6, 6, "those")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iteration-000004", "iteration-000005", "iteration-000006"]


def test_a_full_disk_is_said_once_and_the_run_goes_on(tmp_path, capsys):
    (tmp_path / "no").write_text("a file where the folder should be")
    store = kept(tmp_path / "no")
    for iteration in (3, 4):
        assert store.begin(iteration, iteration, "these") == {}
        store.add(group(24))
    assert capsys.readouterr().err.count("not kept any more") == 1
