"""Which checkpoint does a run go on from, and what does it say of those that it cannot read?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rpipe.runtime.checkpoints import Damaged
from rpipe.runtime.claim import ClaimLost
from rpipe.training.setup import load


class Trainer:
    """Reads what is not among `damaged`."""

    def __init__(self, *damaged: str) -> None:
        self.damaged = damaged

    def load(self, path: Path) -> dict[str, Any]:
        if path.name in self.damaged:
            raise Damaged(f"{path.name}/__0_0.distcp: 3 bytes, wanted 7: the checkpoint is damaged")
        return {"iteration": int(path.name[-6:])}


def checkpoints(folder: Path) -> list[Path]:
    """Three, newest first."""
    found = [folder / f"iteration-{number:06d}" for number in (6, 4, 2)]
    for path in found:
        path.mkdir()
    return found


def free() -> None:
    """The run is this attempt's."""


def test_an_attempt_that_lost_the_run_sets_nothing_aside(tmp_path):
    """What it found damaged may be what the newer one is just giving its place."""

    def lost() -> None:
        raise ClaimLost("attempt 1 lost it to attempt 2")

    found = checkpoints(tmp_path)
    with pytest.raises(ClaimLost):
        load(Trainer("iteration-000006"), found, True, lost)
    assert all(path.is_dir() for path in found)


def test_the_newest_is_taken(tmp_path, capfd):
    assert load(Trainer(), checkpoints(tmp_path), True, free) == (tmp_path / "iteration-000006", {"iteration": 6})
    assert capfd.readouterr().out == ""


def test_damaged_ones_are_set_aside_with_a_line_each(tmp_path, capfd):
    trainer = Trainer("iteration-000006", "iteration-000004")
    assert load(trainer, checkpoints(tmp_path), True, free) == (tmp_path / "iteration-000002", {"iteration": 2})
    assert capfd.readouterr().out.splitlines() == [
        "iteration-000006/__0_0.distcp: 3 bytes, wanted 7: the checkpoint is damaged; going on from iteration-000004",
        "iteration-000004/__0_0.distcp: 3 bytes, wanted 7: the checkpoint is damaged; going on from iteration-000002",
    ]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["iteration-000002", "iteration-000004.damaged", "iteration-000006.damaged"]


def test_ranks_that_do_not_speak_come_to_the_same_one_and_touch_nothing(tmp_path, capfd):
    found = checkpoints(tmp_path)
    assert load(Trainer("iteration-000006"), found, False, free)[0].name == "iteration-000004"
    assert capfd.readouterr().out == "" and all(path.is_dir() for path in found)


def test_none_that_can_be_read_is_one_error_that_names_each(tmp_path):
    found = checkpoints(tmp_path)
    with pytest.raises(
        ValueError, match=r"^no checkpoint in .* can be read: iteration-000006/.*; iteration-000004/.*; iteration-0"
    ):
        load(Trainer(*(path.name for path in found)), found, True, free)
    assert all(path.is_dir() for path in found), "a person may still mend them"


def test_an_error_that_is_no_damage_does_not_fall_back(tmp_path):
    class Other(Trainer):
        def load(self, path: Path) -> dict[str, Any]:
            raise ValueError("it holds no reference weights")

    with pytest.raises(ValueError, match="reference weights"):
        load(Other(), checkpoints(tmp_path), True, free)
