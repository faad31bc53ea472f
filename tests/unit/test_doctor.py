"""The doctor's verdicts, on packages and programs laid out for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rpipe import doctor
from rpipe.doctor import Check


def test_nvidias_apex_is_told_from_the_other_package_of_that_name(tmp_path: Path) -> None:
    nvidia, other = tmp_path / "nvidia" / "apex", tmp_path / "other" / "apex"
    (nvidia / "optimizers").mkdir(parents=True)
    (nvidia / "multi_tensor_apply").mkdir()
    (other / "lib").mkdir(parents=True)
    assert doctor.apex_at(nvidia).state == "ok"
    wrong = doctor.apex_at(other)
    assert wrong.state == "wrong" and "not NVIDIA's" in wrong.found and "pip uninstall apex" in wrong.todo
    absent = doctor.apex_at(None)
    assert absent.state == "missing" and not absent.needed


def test_a_probe_that_breaks_or_hangs_is_a_row_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    found, words = doctor.probe([sys.executable, "-c", "import nothing_of_that_name"], {})
    assert found is None and words == "ModuleNotFoundError: No module named 'nothing_of_that_name'"
    assert doctor.probe(["/nonexistent/python"], {})[0] is None
    monkeypatch.setattr(doctor, "PROBE_S", 0.5)
    assert doctor.probe([sys.executable, "-c", "import time; time.sleep(60)"], {}) == (None, "no answer in 0 s")


def test_a_probe_reads_the_answer_among_warnings() -> None:
    program = "import sys; print('warning: x'); print('{\"a\": 1}'); print('y', file=sys.stderr)"
    assert doctor.probe([sys.executable, "-c", program], {"X": "1"}) == ({"a": 1}, "")


def test_only_what_a_cpu_run_needs_decides_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, lacking = Check("MPI", "ok", "2 ranks met"), Check("NCCL", "missing", "", "cuda", needed=False)
    monkeypatch.setattr(doctor, "examine", lambda engine: [good, lacking])
    assert doctor.main([]) == 0
    assert "missing (optional)" in " ".join(capsys.readouterr().out.split())
    bad = Check("torch", "wrong", "ImportError", "./launch.sh setup")
    monkeypatch.setattr(doctor, "examine", lambda engine: [good, bad, lacking])
    assert doctor.main(["--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [row["state"] for row in rows] == ["ok", "wrong", "missing"] and rows[1]["todo"] == "./launch.sh setup"


def test_a_slurm_without_pmix_is_wrong_and_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, says in (("sinfo", "slurm 22.05.8"), ("srun", "none pmi2")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{says}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    slurm, plugins = doctor.check_slurm()
    assert (slurm.state, slurm.found) == ("ok", "slurm 22.05.8")
    assert plugins.state == "wrong" and plugins.found == "none, pmi2" and "PMIx" in plugins.todo


def test_an_engine_interpreter_that_does_not_start_is_wrong() -> None:
    assert doctor.check_engine("/nonexistent/python")[0].state == "wrong"
