"""The command line: fast, without torch, one clear line for what a person typed wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rpipe import cli, config
from rpipe.simulate import EXAMPLE

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "mpi4py", "transformers", "pydantic", "numpy", "rich", "yaml")


def test_the_command_line_imports_nothing_heavy_and_answers_fast() -> None:
    program = f"import sys; from rpipe import cli; cli.main(['version']); print([m for m in {HEAVY!r} if m in sys.modules])"
    quickest_s = 10.0  # of processor time: how busy the machine is does not count
    for _ in range(3):
        before = os.times()
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=30)
        after = os.times()
        spent_s = after.children_user + after.children_system - before.children_user - before.children_system
        quickest_s = min(quickest_s, spent_s)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert quickest_s < 0.3


def test_training_starts_without_torch_in_the_supervisor() -> None:
    program = "import sys, rpipe.runtime.launch, rpipe.report; print([m for m in ('torch', 'mpi4py') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_version_is_the_one_of_setup_cfg(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    printed = capsys.readouterr().out.strip()
    assert f"version = {printed}\n" in (ROOT / "setup.cfg").read_text()


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert all(f"    {name} " in printed for name in ("train", "report", "doctor", "version"))


def test_an_unknown_command_is_refused_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["trian"])
    assert end.value.code == 2
    assert "invalid choice: 'trian'" in capsys.readouterr().err


def test_a_config_mistake_is_one_line_and_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("model: {path: m}\ndata: {train: {kind: sums}}\nrollout: {groups: 3}\n")
    assert cli.main(["train", str(file)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert printed.err.startswith(f"{file}: rollout.groups: unknown key")
    assert cli.main(["train", str(tmp_path / "none.yaml")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error() -> None:
    """As `rpipe story RUN 12 --json | head` does."""
    reader, writer = os.pipe()
    os.close(reader)
    program = "import sys; from rpipe import cli; sys.exit(cli.main(['version']))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_example_that_help_names_can_be_simulated() -> None:
    _, _, file, *overrides = EXAMPLE.split()
    assert config.load(ROOT / file, overrides).workload
