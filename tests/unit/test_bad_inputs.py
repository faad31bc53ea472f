"""Every line of docs/errors.md is what the program says, and nothing more than one line."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from rpipe import config as configs
from rpipe.core.eventlog import EventLog
from rpipe.core.types import Prompt
from rpipe.data.jsonl import jsonl_entries
from rpipe.rollout.setup import check
from rpipe.rollout.sglang_engine import SglangEngine
from rpipe.runtime import checkpoints, launch
from rpipe.runtime.allocation import Component, plan
from rpipe.training.hf import read_shape
from tests.job.jobs import ROOT, config, environment

PAGE = (ROOT / "docs" / "errors.md").read_text()
TOLD = {row.split("|")[1].strip(): row for row in PAGE.splitlines() if row.startswith("| a") or row.startswith("| r")}
TOLD |= {row.split("|")[1].strip(): row for row in PAGE.splitlines() if row.startswith("| R")}


def load(folder: Path, *overrides: str) -> configs.Config:
    (folder / "run.yaml").write_text(yaml.safe_dump(config()))
    return configs.load(folder / "run.yaml", overrides)


def unknown_key(folder: Path) -> None:
    load(folder, "rollout.group_per_iteration=8")


def wrong_type(folder: Path) -> None:
    load(folder, "run.iterations=many")


def not_divisible(folder: Path) -> None:
    load(folder, "training.trajectories_per_step=24")


def no_whole_replicas(folder: Path) -> None:
    load(folder, "cluster.training_ranks=3", "training.tp=2")


def too_many_ranks(folder: Path) -> None:
    wanted = load(folder, "cluster.rollout_ranks=2", "cluster.training_ranks=2", "cluster.devices_per_node=1")
    plan(wanted, (Component(("n1", "n2", "n3"), 8),))


def no_model(folder: Path) -> None:
    launch._look_at_data(load(folder, "model.make=null", f"model.path={folder}/absent"))


def malformed_line(folder: Path) -> None:
    lines = [json.dumps({"prompt": "1+1=", "answer": "2"})] * 20
    lines[16] = '{"prompt":}'
    (folder / "train.jsonl").write_text("\n".join(lines))
    list(jsonl_entries(folder / "train.jsonl", str(folder / "train.jsonl")))


def long_prompt(folder: Path) -> None:
    shape = {
        "model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 99,
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "max_position_embeddings": 64, "rope_theta": 1e4,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape))
    prompt = Prompt(f"{folder}/train.jsonl:1", tuple(range(60)), "", "", "exact_match")
    check(load(folder), read_shape(folder), [prompt])


def lonely_rank(folder: Path) -> None:
    """MPI in a process of its own: a singleton, as a foreign launcher makes it."""
    (folder / "config.yaml").write_text(configs.dump(load(folder)))
    command = [sys.executable, "-m", "rpipe.train", str(folder), "--attempt", "1"]
    subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, timeout=60)
    raise RuntimeError((folder / "attempt-1" / "failure-rank00000.txt").read_text().strip())


def engine(folder: Path, python: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"eos_token_id": 1}')
    asyncio.run(
        SglangEngine(load(folder, f"engine.python={python}", "engine.kind=sglang"), 0, folder / "model", folder).start()
    )


def no_interpreter(folder: Path) -> None:
    engine(folder, folder / "absent")


def interpreter(folder: Path, says: str) -> Path:
    """Stands for a python that ends with these words."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\necho "{says}" >&2\nexit 1\n')
    program.chmod(0o755)
    return program


def no_sglang(folder: Path) -> None:
    engine(folder, interpreter(folder, "ModuleNotFoundError: No module named 'sglang'"))


def port_taken(folder: Path) -> None:
    engine(folder, interpreter(folder, "OSError: [Errno 98] error while attempting to bind: address already in use"))


def full_disk(folder: Path) -> None:
    os.symlink("/dev/full", folder / "rank00000.jsonl")
    with EventLog(folder, 0) as log:
        log.note(0.0, "JobStarted")


def no_checkpoint(folder: Path) -> None:
    (folder / "iteration-000003").mkdir()
    checkpoints.manifest(folder / "iteration-000003")


CASES: list[tuple[str, Callable[[Path], None]]] = [
    ("an unknown key", unknown_key),
    ("a wrong type", wrong_type),
    ("R x K is no whole number of steps", not_divisible),
    ("ranks that do not make replicas", no_whole_replicas),
    ("ranks that do not fit the allocation", too_many_ranks),
    ("a missing model", no_model),
    ("a malformed line of prompts", malformed_line),
    ("a prompt longer than the context", long_prompt),
    ("an MPI world of the wrong size", lonely_rank),
    ("an engine interpreter that is not there", no_interpreter),
    ("an engine interpreter without SGLang", no_sglang),
    ("an engine's port taken, three times", port_taken),
    ("a full disk under the event log", full_disk),
    ("an unreadable checkpoint", no_checkpoint),
]


@pytest.mark.parametrize("what, make", CASES, ids=[what for what, _ in CASES])
def test_a_bad_input_is_refused_in_the_one_line_that_the_page_tells(what, make, tmp_path):
    with pytest.raises(Exception) as caught:
        make(tmp_path)
    line = str(caught.value)
    assert "\n" not in line
    assert f"`{line.replace(str(tmp_path), 'DIR')}`" in TOLD[what], line


def test_the_page_tells_no_line_that_nothing_says():
    assert sorted(TOLD) == sorted(what for what, _ in CASES)


def test_the_launcher_exits_with_2_and_that_line_alone(tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config()))
    command = [sys.executable, "-m", "rpipe.cli", "train", str(tmp_path / "run.yaml"), "rollout.group_per_iteration=8"]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert re.search("unknown key; did you mean groups_per_iteration", done.stderr)
