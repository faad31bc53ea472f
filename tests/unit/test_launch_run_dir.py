"""Claiming a run directory: whose it is, which attempt, and what is written there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rpipe import config as configs
from rpipe.config import Config
from rpipe.runtime import environment
from rpipe.runtime.checkpoints import seal
from rpipe.runtime.claim import attempts, claim
from rpipe.runtime.mpirun import LaunchError


def config(path: str | None, resume: str = "auto", **rollout: object) -> Config:
    tree = {
        "model": {"path": "m"},
        "data": {"train": {"kind": "sums"}},
        "run": {"dir": path, "resume": resume, "name": "n"},
        "rollout": rollout,
    }
    return configs.parse(tree, "test")


def test_the_written_config_is_the_resolved_one_with_its_run_dir(tmp_path: Path) -> None:
    with claim(config(str(tmp_path / "a" / "run"))) as (run, resolved):
        assert resolved.run.dir == str(tmp_path / "a" / "run")
        assert configs.load(run.path / "config.yaml") == resolved
        assert configs.load(run.path / "attempt-1" / "config.yaml") == resolved


def test_attempts_count_up_and_never_reuse_a_number(tmp_path: Path) -> None:
    for wanted in (1, 2, 3):
        with claim(config(str(tmp_path))) as (run, _):
            assert run.attempt == wanted
    assert attempts(tmp_path) == [1, 2, 3]
    (tmp_path / "attempt-1").joinpath("config.yaml").unlink()
    (tmp_path / "attempt-1").rmdir()
    with claim(config(str(tmp_path))) as (run, _):
        assert run.attempt == 4


def test_resume_never_refuses_a_directory_with_attempts_and_leaves_it_free(tmp_path: Path) -> None:
    with claim(config(str(tmp_path), resume="never")):
        pass
    with pytest.raises(LaunchError, match=r"run\.resume = never, but .* holds 1 attempt; wanted: another run\.dir"):
        with claim(config(str(tmp_path), resume="never")):
            pass
    with claim(config(str(tmp_path))) as (run, _):  # the refusal gave the lock back
        assert run.attempt == 2


def test_a_second_claim_names_who_holds_the_directory(tmp_path: Path) -> None:
    with claim(config(str(tmp_path))):
        with pytest.raises(LaunchError, match=rf"is in use by process {os.getpid()} on "):
            with claim(config(str(tmp_path))):
                pass
    with claim(config(str(tmp_path))) as (run, _):
        assert run.attempt == 2


def test_without_a_run_dir_two_starts_in_one_second_get_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with claim(config(None)) as (first, _), claim(config(None)) as (second, _):
        assert first.path != second.path
        assert first.path.parent == tmp_path / "runs" and first.path.name.startswith("n-")


def test_a_place_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(LaunchError, match=r"run\.dir = .*file.*: cannot be written: Not a directory"):
        with claim(config(str(file / "run"))):
            pass


def test_the_environment_record_holds_versions_and_slurms_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    environment.write(1, tmp_path / "a.json", tmp_path / "b.json")
    told = json.loads((tmp_path / "a.json").read_text())
    assert told == json.loads((tmp_path / "b.json").read_text())
    assert told["slurm"]["SLURM_JOB_ID"] == "4711"
    assert told["packages"]["msgspec"].count(".") == 2
    assert set(told["source"]) == {"revision", "dirty"}


def test_a_full_disk_costs_no_older_record_and_leaves_no_half_of_a_new_one(tmp_path: Path) -> None:
    environment.write(1, tmp_path / "a.json")
    before = (tmp_path / "a.json").read_text()
    (tmp_path / ".a-2").symlink_to("/dev/full")  # where the second attempt writes
    with pytest.raises(OSError, match="No space left on device"):
        environment.write(2, tmp_path / "a.json")
    assert (tmp_path / "a.json").read_text() == before and [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_source_that_is_no_checkout_has_no_revision(tmp_path: Path) -> None:
    assert environment.source_revision(tmp_path) == {"revision": None, "dirty": None}


def test_a_run_with_a_checkpoint_does_not_go_on_as_another_run(tmp_path: Path) -> None:
    begun = config(str(tmp_path))
    with claim(begun) as (run, _):
        run.checkpoint(2).mkdir(parents=True)
        seal(run.checkpoint(2), {})
    kept = (tmp_path / "config.yaml").read_text()
    other = begun.model_copy(update={"run": begun.run.model_copy(update={"seed": 7})})
    with pytest.raises(LaunchError, match=r"run\.seed = 7, begun with 0; wanted: the same, or another run\.dir"), claim(other):
        pass
    assert (tmp_path / "config.yaml").read_text() == kept and attempts(tmp_path) == [1]
    with claim(begun) as (run, _):
        assert run.attempt == 2


def test_a_run_with_a_checkpoint_keeps_how_its_groups_are_numbered(tmp_path: Path) -> None:
    def drawing(**rollout: object) -> Config:
        return config(str(tmp_path), groups_per_iteration=16, filter="zero_variance", **rollout)

    with claim(drawing(refill_groups=8)) as (run, _):
        run.checkpoint(2).mkdir(parents=True)
        seal(run.checkpoint(2), {})
    told = "over_sampling = 1 and refill_groups = 0 an iteration may draw 16 groups, begun with 24; wanted: the same"
    with pytest.raises(LaunchError, match=told), claim(drawing()):
        pass
    assert attempts(tmp_path) == [1]
    with claim(drawing(over_sampling=1.25, refill_groups=4)) as (run, _):  # 24, too
        assert run.attempt == 2
