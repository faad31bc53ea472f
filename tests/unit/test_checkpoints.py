"""Checkpoints on the disk: whole or damaged, kept, and whose. No torch."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rpipe import config
from rpipe.runtime import checkpoints, claim
from rpipe.runtime.claim import Claim, ClaimLost
from rpipe.runtime.mpirun import LaunchError
from rpipe.runtime.rundir import RunDir

ROOT = Path(__file__).resolve().parents[2]


def owned(path: Path, attempt: int) -> RunDir:
    """A run directory that `attempt` owns."""
    claim._write(path, Claim(attempt, os.getpid(), "here", "kernel"))
    return RunDir(path, attempt)


def saved(run: RunDir, iteration: int, keep: int = 2, text: str = "weights") -> Path:
    folder = checkpoints.begin(run, iteration)
    write(folder, text)
    return checkpoints.publish(run, iteration, keep)


def write(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_text(text)
    checkpoints.seal(folder, {"__0_0.distcp": checkpoints.measure(folder / "__0_0.distcp")})


def names(run: RunDir) -> list[str]:
    return sorted(entry.name for entry in run.checkpoints.iterdir())


def whole(folder: Path) -> str:
    files = checkpoints.manifest(folder)
    return checkpoints.verify(folder, files, files)


def test_the_newest_are_kept_and_nothing_else_is_left(tmp_path):
    run = owned(tmp_path, 1)
    for iteration in (1, 2, 3):
        saved(run, iteration)
    assert names(run) == ["iteration-000002", "iteration-000003"]
    assert [whole(folder) for folder in run.checkpoints_found()] == ["", ""]


def test_a_missing_a_short_and_a_changed_file_are_each_told(tmp_path):
    folder = saved(owned(tmp_path, 1), 1)
    file = folder / "__0_0.distcp"
    file.write_text("weighty")
    assert "__0_0.distcp: its sum is" in whole(folder)
    file.write_text("weig")
    with pytest.raises(checkpoints.Damaged, match=r"__0_0\.distcp: 4 bytes, wanted 7: the checkpoint is damaged"):
        whole(folder)
    file.unlink()
    with pytest.raises(checkpoints.Damaged, match=r"__0_0\.distcp: missing, wanted 7"):
        whole(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": 3}', '{"files": {"a": 7}}'])
def test_a_damaged_manifest_is_told_as_such(tmp_path, text):
    folder = saved(owned(tmp_path, 1), 1)
    (folder / "complete.json").write_text(text)
    with pytest.raises(checkpoints.Damaged, match=r"complete\.json: damaged"):
        checkpoints.manifest(folder)


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path):
    folder = saved(owned(tmp_path, 1), 1)
    (folder / "complete.json").unlink()
    with pytest.raises(checkpoints.Damaged, match="no complete checkpoint"):
        checkpoints.manifest(folder)


def test_an_orphan_of_an_older_attempt_cannot_complete_a_checkpoint_nor_touch_a_newer_ones(tmp_path):
    orphan = owned(tmp_path, 1)
    saved(orphan, 1)
    write(checkpoints.begin(orphan, 2), "the orphan's")
    newer = owned(tmp_path, 2)  # Slurm started the job again elsewhere
    write(checkpoints.begin(newer, 2), "the newer one's")
    with pytest.raises(ClaimLost, match=r"attempt 1 lost .* to attempt 2 \(process \d+ on here\): it writes nothing more"):
        checkpoints.publish(orphan, 2, 2)
    with pytest.raises(ClaimLost):
        checkpoints.begin(orphan, 3)
    assert (checkpoints.publish(newer, 2, 2) / "__0_0.distcp").read_text() == "the newer one's"
    assert names(newer) == ["iteration-000001", "iteration-000002"]


def test_the_orphans_files_do_not_mix_with_the_newer_attempts(tmp_path):
    orphan = owned(tmp_path, 1)
    folder = checkpoints.begin(orphan, 2)
    newer = owned(tmp_path, 2)
    write(checkpoints.begin(newer, 2), "the newer one's")
    write(folder, "the orphan's, late")  # its rank writes on
    place = checkpoints.publish(newer, 2, 2)
    assert (place / "__0_0.distcp").read_text() == "the newer one's" and whole(place) == ""
    checkpoints.begin(newer, 3)
    assert names(newer) == ["iteration-000002"]


def test_what_an_interrupted_attempt_left_is_removed_when_the_next_one_saves(tmp_path):
    first = owned(tmp_path, 1)
    checkpoints.begin(first, 2).mkdir(parents=True)
    checkpoints.part(first, 2).with_name("iteration-000002.attempt-1.tmp").mkdir()
    saved(owned(tmp_path, 2), 2)
    assert names(first) == ["iteration-000002"]


def test_a_damaged_one_is_set_aside_and_gone_once_its_iteration_was_trained_again(tmp_path):
    run = owned(tmp_path, 1)
    saved(run, 1)
    checkpoints.set_aside(saved(run, 2))
    assert names(run) == ["iteration-000001", "iteration-000002.damaged"]
    assert [folder.name for folder in run.checkpoints_found()] == ["iteration-000001"]
    saved(run, 2)
    assert names(run) == ["iteration-000001", "iteration-000002"]


def test_a_checkpoint_of_the_same_iteration_is_replaced(tmp_path):
    run = owned(tmp_path, 1)
    saved(run, 1, text="old")
    assert (saved(run, 1, text="new") / "__0_0.distcp").read_text() == "new"
    assert names(run) == ["iteration-000001"]


DIES = """
import os, sys
from pathlib import Path
from rpipe.runtime import checkpoints
from rpipe.runtime.rundir import RunDir

rename = os.rename
def die(here, there):
    if ".attempt-" in str(here):
        os._exit(9)
    rename(here, there)
os.rename = die
checkpoints.publish(RunDir(Path(sys.argv[1]), 1), 1, 2)
"""


def test_death_between_a_replacements_two_renames_leaves_the_older_to_the_next_attempt(tmp_path):
    run = owned(tmp_path, 1)
    saved(run, 1, text="old")
    write(checkpoints.begin(run, 1), "new")
    assert subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], cwd=ROOT, timeout=60).returncode == 9
    assert run.checkpoints_found() == []
    (tmp_path / "attempt-1").mkdir()
    (tmp_path / "claim.json").unlink()  # its holder has died
    settings = {"model": {"make": {}}, "data": {"train": {"kind": "sums"}}, "run": {"dir": str(tmp_path)}}
    with claim.claim(config.parse(settings, "test")) as (second, _):
        (found,) = second.checkpoints_found()
        assert whole(found) == "" and (found / "__0_0.distcp").read_text() == "old"
        assert (saved(second, 1, text="again") / "__0_0.distcp").read_text() == "again"
    assert names(run) == ["iteration-000001"]


def test_a_full_disk_leaves_the_resolved_config_as_it_was(tmp_path, monkeypatch):
    settings = config.parse({"model": {"make": {}}, "data": {"train": {"kind": "sums"}}, "run": {"dir": str(tmp_path)}}, "test")
    with claim.claim(settings):
        pass
    before = (tmp_path / "config.yaml").read_bytes()

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LaunchError, match="cannot be written: No space left on device"), claim.claim(settings):
        pass
    assert (tmp_path / "config.yaml").read_bytes() == before
