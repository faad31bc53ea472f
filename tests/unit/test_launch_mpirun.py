"""Which starter, with which words and which environment? Stand-ins for srun on PATH; nothing is started but they."""

from __future__ import annotations

from pathlib import Path

import pytest

from rpipe import config, doctor
from rpipe.config import Cluster
from rpipe.runtime import launch, mpirun
from rpipe.runtime.mpirun import LaunchError, Starter
from rpipe.runtime.rundir import RunDir
from rpipe.runtime.supervise import Outcome


def program(folder: Path, name: str, says: str) -> Path:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{says}\n")
    file.chmod(0o755)
    return file


def test_inside_an_allocation_srun_with_pmix_starts_the_ranks(tmp_path: Path) -> None:
    srun = program(tmp_path, "srun", "printf 'MPI plugin types are...\\n\\tnone\\n\\tpmi2\\n\\tpmix\\n'")
    starter = mpirun.find({"PATH": str(tmp_path), "SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2"})
    assert starter == Starter("srun", str(srun))
    assert starter.command(4, ["python", "x"]) == [
        str(srun), "--mpi=pmix", "--kill-on-bad-exit=1", "--cpu-bind=none", "--ntasks=4", "python", "x",
    ]  # fmt: skip


def test_a_slurm_without_pmix_is_refused(tmp_path: Path) -> None:
    program(tmp_path, "srun", "echo 'srun: MPI types are...' >&2; echo 'srun: pmi2' >&2")
    with pytest.raises(LaunchError, match="has no pmix"):
        mpirun.find({"PATH": str(tmp_path), "SLURM_JOB_ID": "1"})


def test_srun_outside_an_allocation_is_not_used(tmp_path: Path) -> None:
    program(tmp_path, "srun", "exit 1")
    program(tmp_path, "mpirun", "exit 0")
    assert mpirun.find({"PATH": str(tmp_path)}).kind == "mpirun"


def test_this_environments_own_mpirun_comes_before_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "site").mkdir()
    own, site = program(tmp_path / "venv", "mpirun", ""), program(tmp_path / "site", "mpirun", "")
    monkeypatch.setattr("sys.executable", str(tmp_path / "venv" / "python"))
    assert mpirun.find({"PATH": str(site.parent)}).path == str(own)
    own.unlink()
    assert mpirun.find({"PATH": str(site.parent)}).path == str(site)
    site.unlink()
    with pytest.raises(LaunchError, match="no mpirun found"):
        mpirun.find({"PATH": str(site.parent)})


def test_srun_is_not_told_twice_how_many_tasks_a_node_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    env = mpirun.job_environment(Cluster(interface="10.1.0.0/16"), "j", None)
    assert "SLURM_NTASKS_PER_NODE" not in env and env["SLURM_JOB_ID"] == "7"
    assert env["OMPI_MCA_btl_tcp_if_include"] == "10.1.0.0/16"


def test_the_environment_marks_the_job_and_says_whether_there_is_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPIPE_TERMINAL", "1")
    env = mpirun.job_environment(Cluster(threads_per_rank=3), "j", None)
    assert (env["RPIPE_JOB"], env["OMP_NUM_THREADS"], env["TORCHDYNAMO_DISABLE"]) == ("j", "3", "1")
    assert "RPIPE_TERMINAL" not in env
    shown = mpirun.job_environment(Cluster(accelerator="cuda"), "j", 99)
    assert (shown["RPIPE_TERMINAL"], shown["COLUMNS"]) == ("1", "99")


def test_mpirun_keeps_its_sockets_in_a_folder_of_the_jobs_own(tmp_path, monkeypatch):
    seen: list[Path] = []

    def supervised(command, env, log, stop_s, role):
        seen.extend(Path(env[key]) for key in ("PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_orte_tmpdir_base"))
        assert all(path.is_dir() for path in seen[-2:])
        return Outcome(0, "")

    monkeypatch.setattr(launch, "supervise", supervised)
    settings = config.parse({"model": {"make": {}}, "data": {"train": {"kind": "sums"}}}, "test")
    for _ in range(2):
        launch._job(settings, Starter("mpirun", "/mpirun"), None, RunDir(tmp_path, 1), "rpipe.train")
    assert len(set(seen)) == 2 and not any(path.exists() for path in seen)


def test_doctors_two_ranks_meet_in_a_folder_of_their_own_and_srun_is_told_of_none(tmp_path, monkeypatch):
    seen: list[str] = []

    def probed(command, extra):
        seen.append(extra["PRTE_MCA_prte_tmpdir_base"])
        assert extra["OMPI_ALLOW_RUN_AS_ROOT"] == "1" and Path(seen[0]).is_dir()
        return {"size": 2, "sum": 3, "library": "x"}, ""

    monkeypatch.setattr(doctor, "probe", probed)
    monkeypatch.setattr(mpirun, "find", lambda: Starter("mpirun", "/mpirun"))
    assert [check.state for check in doctor.check_mpi()] == ["ok"]
    assert seen and not Path(seen[0]).exists()
    with Starter("srun", "/srun").environment() as told:
        assert "PRTE_MCA_prte_tmpdir_base" not in told and told["OMPI_MCA_mpi_yield_when_idle"] == "0"
