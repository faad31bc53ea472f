"""What the launcher finds out before a rank starts: without user code, SGLang or torch in its own process.

docs/errors.md has the common refusals, and tests/unit/test_bad_inputs.py makes them through `rpipe train`; here is the rest.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from rpipe import config as configs
from rpipe.config import Config, MakeModel
from rpipe.data.entry import DataError
from rpipe.data.make_model import make_model
from rpipe.rollout import rewards
from rpipe.runtime import host, preflight
from rpipe.runtime.mpirun import LaunchError
from rpipe.training.hf import read_shape
from tests.job.jobs import ROOT, command, config, environment

LARGE = {"hidden_size": 8192, "intermediate_size": 24576, "layers": 80, "heads": 64, "kv_heads": 8, "head_dim": 128}


def made(**sections: Any) -> Config:
    return configs.parse(config(**sections), "test")


def with_engine(python: Path | str, **engine: Any) -> Config:
    return made(engine={"kind": "sglang", "options": {}, "python": str(python), **engine})


def interpreter(folder: Path, script: str) -> Path:
    folder.mkdir(exist_ok=True)
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def module(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)


def refused(config: Config, functions: dict[str, str] | None = None) -> str:
    before = psutil.Process().children()
    with pytest.raises(LaunchError) as caught:
        preflight.tried(config, functions or {})
    line = str(caught.value)
    assert "\n" not in line
    assert set(psutil.Process().children()) <= set(before), "what was tried has ended"
    return line


# ---- functions


def test_functions_are_found_where_the_run_will_ask_for_them_the_first_that_names_one_is_told(tmp_path):
    lines = '{"prompt": "a", "answer": "1", "reward": "mine:one"}\n' * 2 + '{"prompt": "b", "answer": "1"}\n'
    (tmp_path / "train.jsonl").write_text(lines)
    found = made(
        data={
            "train": {"kind": "jsonl", "path": f"{tmp_path}/train.jsonl", "reward": "mine:two"},
            "held_out": {"kind": "sums", "reward": "mine:two"},
        },
        rollout={"filter": "mine:keep", "environment": "mine:answer", "max_turns": 2},
    )
    assert preflight.read(found) == {
        "mine:one": f"{tmp_path}/train.jsonl:1",
        "mine:two": "data.train.reward",
        "mine:keep": "rollout.filter",
        "mine:answer": "rollout.environment",
    }


def test_a_function_is_loaded_in_a_process_that_ends_and_never_in_this_one(tmp_path, monkeypatch):
    text = f"open({str(tmp_path / 'word')!r}, 'w').write('loaded')\nscore = len\n"
    module(tmp_path, monkeypatch, "rpipe_test_loads", text)
    preflight.tried(made(), {"rpipe_test_loads:score": "data.train.reward"})
    assert (tmp_path / "word").read_text() == "loaded"
    assert "rpipe_test_loads" not in sys.modules


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("raise SystemExit('no licence')", "data.train.reward = {}: cannot be imported: SystemExit: no licence; wanted: "),
        ("import os; os._exit(3)", "data.train.reward = {}: a reward worker ended at its start (exit status 3)"),
        ("score = 3", "data.train.reward = {}: is a int; wanted: a function"),
        ("import time; time.sleep(60)", "data.train.reward = {}: a reward worker loaded no functions ({}) in 1 s"),
    ],
)
def test_a_module_may_do_what_it_likes_and_the_key_is_told(tmp_path, monkeypatch, text, told):
    name = "rpipe_test_odd:score"
    module(tmp_path, monkeypatch, "rpipe_test_odd", text)
    if "sleep" in text:
        monkeypatch.setattr(rewards, "START_S", 1.0)
    assert refused(made(), {name: "data.train.reward"}).startswith(told.format(name, name))


def test_of_a_function_and_an_interpreter_that_are_both_wrong_the_function_is_told(tmp_path):
    both = with_engine(tmp_path / "absent", start_deadline_s=1.0)
    assert refused(both, {"nowhere:score": "data.train.reward"}).startswith("data.train.reward = nowhere:score: cannot be")


# ---- engine.python


def test_an_interpreter_that_has_sglang_is_taken_and_one_that_is_broken_is_told_with_its_own_words(tmp_path):
    for name, text in (("whole", ""), ("broken", "raise ImportError('libnuma.so.1: cannot open shared object file')")):
        (tmp_path / name / "sglang").mkdir(parents=True)
        (tmp_path / name / "sglang" / "__init__.py").write_text(text)
        interpreter(tmp_path / name, f'PYTHONPATH={tmp_path}/{name} exec {sys.executable} -S "$@"')
    preflight.tried(with_engine(tmp_path / "whole" / "python"), {})
    line = refused(with_engine(tmp_path / "broken" / "python"))
    assert line.startswith(
        f"engine.python = {tmp_path}/broken/python: cannot import sglang: ImportError: libnuma.so.1: cannot open shared object"
        " file; wanted: engine.python = an interpreter with SGLang in it"
    )


def test_the_installed_sglang_imports_as_an_engine_will_import_it(tmp_path):
    """Through another name, so that it is tried and not looked up: with the engine's environment, which a CPU needs."""
    preflight.tried(with_engine(interpreter(tmp_path / "other", f'exec {sys.executable} "$@"')), {})


def test_an_interpreter_that_says_nothing_is_not_waited_for_longer_than_an_engine(tmp_path):
    program = interpreter(tmp_path / "deaf", "exec sleep 300")
    began = time.monotonic()
    line = refused(with_engine(program, start_deadline_s=1.0))
    assert time.monotonic() - began < 60
    assert f"engine.python = {program}: cannot import sglang: not done after 1 s (engine.start_deadline_s); wanted: " in line


def test_a_program_that_is_no_python_is_told_as_such():
    assert "cannot import sglang: it ended with exit code 0 and said nothing; wanted: " in refused(with_engine("true"))


def test_scripted_engines_want_no_interpreter():
    preflight.tried(made(engine={"python": "/nonexistent/python"}), {})


# ---- the model and the memory


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "qwen2", "llama"])
def test_a_made_model_is_known_before_it_is_made(tmp_path, architecture):
    make = MakeModel(architecture=architecture, hidden_size=32, intermediate_size=64, layers=2, heads=4, kv_heads=2, head_dim=8)
    assert preflight.shape_of(made(model={"make": make.model_dump()})) == read_shape(make_model(make, tmp_path / "m", 0))


def test_sizes_of_a_made_model_that_do_not_go_together_are_refused():
    with pytest.raises(DataError, match=r"model\.make\.heads = 4 is not a multiple of model\.make\.kv_heads = 3"):
        preflight.read(made(model={"make": {"heads": 4, "kv_heads": 3}}))


def test_a_layout_that_does_not_cut_the_model_is_refused():
    odd = made(model={"make": {"layers": 3}}, cluster={"training_ranks": 2}, training={"pp": 2})
    with pytest.raises(LaunchError, match=r"training\.pp = 2 does not divide the model's 3 layers"):
        preflight.fits(odd, ["here"] * 3)


@pytest.mark.parametrize(("text", "told"), [("{", "not JSON: "), ("[]", "not a JSON object"), ("{}", "model_type = None")])
def test_a_model_folder_with_another_config_is_refused(tmp_path, text, told):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(LaunchError, match=rf"config\.json: {told}"):
        preflight.fits(made(model={"make": None, "path": str(tmp_path)}), ["here"] * 2)


def test_hosts_share_their_memory_among_their_own_ranks_alone():
    small = made(cluster={"training_ranks": 3, "device_memory_bytes": 1_600_000_000})
    preflight.fits(small, ["a", "a", "b", "b"])
    with pytest.raises(LaunchError, match="3 training ranks and 1 engines on a want"):
        preflight.fits(small, ["a"] * 4)


def test_an_accelerators_memory_counts_where_the_config_says_it_and_is_its_ranks_to_find_out_where_not():
    preflight.fits(made(model={"make": LARGE}, cluster={"accelerator": "cuda"}), ["a"] * 2)
    said = made(model={"make": LARGE}, cluster={"accelerator": "cuda", "device_memory_bytes": 80 << 30})
    with pytest.raises(LaunchError, match=r"training: .* does not fit a device of 80\.0 GiB; try more training ranks"):
        preflight.fits(said, ["a"] * 2)


def test_a_model_too_large_for_this_very_host_is_refused_on_the_command_line_before_it_is_made(tmp_path):
    """Nobody says what the host has: it is asked, and no host has room for 1.5 trillion parameters."""
    tree = config(model={"make": {**LARGE, "layers": 2_000}})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    words = command(tmp_path / "run.yaml", tmp_path / "run")
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "run").exists()
    assert f" of its {host.memory_bytes() / (1 << 30):.1f} GiB: training: " in done.stderr


def test_a_control_groups_limit_is_less_than_the_host(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "LIMITS", ())
    whole = host.memory_bytes()
    (tmp_path / "limit").write_text("123456789\n")
    (tmp_path / "none").write_text("max\n")
    for names, wanted in ((["limit"], 123456789), (["absent", "none"], whole), (["none", "limit"], 123456789)):
        monkeypatch.setattr(host, "LIMITS", tuple(str(tmp_path / name) for name in names))
        assert host.memory_bytes() == min(wanted, whole)
