"""Every line of docs/errors.md is what the program says, and nothing more than one line."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from rpipe import config as configs
from rpipe.core.eventlog import EventLog
from rpipe.core.types import Prompt
from rpipe.rollout import sglang_server
from rpipe.rollout.setup import check
from rpipe.rollout.sglang_engine import SglangEngine
from rpipe.runtime import checkpoints
from rpipe.runtime.allocation import Component, plan
from rpipe.training.hf import read_shape
from tests.job.jobs import ROOT, command, config, environment

PAGE = (ROOT / "docs" / "errors.md").read_text()
TOLD = {row.split("|")[1].strip(): row for row in PAGE.splitlines() if row.startswith("| a") or row.startswith("| r")}
TOLD |= {row.split("|")[1].strip(): row for row in PAGE.splitlines() if row.startswith("| R")}

SGLANG = "engine={kind: sglang}"
LARGE = "{hidden_size: 8192, intermediate_size: 24576, layers: 80, heads: 64, kv_heads: 8, head_dim: 128}"
SERVER = """
import argparse, uvicorn
parser = argparse.ArgumentParser()
parser.add_argument("--host")
parser.add_argument("--port", type=int)
asked = parser.parse_known_args()[0]
uvicorn.run(lambda scope, receive, send: None, host=asked.host, port=asked.port, log_level="warning", lifespan="off")
"""


def load(folder: Path, *overrides: str) -> configs.Config:
    (folder / "run.yaml").write_text(yaml.safe_dump(config()))
    return configs.load(folder / "run.yaml", overrides)


def refused(folder: Path, *overrides: str) -> None:
    """`rpipe train`, as a person runs it: raises the one line that it says. It ends with 2 and leaves no attempt."""
    (folder / "run.yaml").write_text(yaml.safe_dump(config()))
    done = subprocess.run(
        command(folder / "run.yaml", folder / "run", *overrides), env=environment(), cwd=ROOT, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == "", done
    assert not list((folder / "run").glob("attempt-*"))
    raise RuntimeError(done.stderr.strip())


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
    refused(folder, "model.make=null", f"model.path={folder}/absent")


def no_model_in_it(folder: Path) -> None:
    refused(folder, "model.make=null", f"model.path={folder}")


def too_large_a_model(folder: Path) -> None:
    refused(folder, f"model.make={LARGE}", f"cluster.device_memory_bytes={64 << 30}")


def data_of(folder: Path) -> str:
    return f"data.train={{kind: jsonl, path: {folder}/train.jsonl}}"


def malformed_line(folder: Path) -> None:
    lines = [json.dumps({"prompt": "1+1=", "answer": "2"})] * 20
    lines[16] = '{"prompt":}'
    (folder / "train.jsonl").write_text("\n".join(lines))
    refused(folder, data_of(folder))


def unknown_reward(folder: Path) -> None:
    lines = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3", "reward": "exactmatch"}]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    refused(folder, data_of(folder))


def no_reward_module(folder: Path) -> None:
    refused(folder, "data.train.reward=nowhere:score")


def no_filter_function(folder: Path) -> None:
    refused(folder, "rollout.filter=tests.job.jobs:TINY")


def no_environment_function(folder: Path) -> None:
    refused(folder, "rollout.environment=tests.job.jobs:nobody", "rollout.max_turns=2")


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


def no_interpreter(folder: Path) -> None:
    refused(folder, SGLANG, f"engine.python={folder}/absent")


def no_program(folder: Path) -> None:
    (folder / "python").write_text("")
    refused(folder, SGLANG, f"engine.python={folder}/python")


def no_sglang(folder: Path) -> None:
    """A real interpreter, without the packages around it."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    program.chmod(0o755)
    refused(folder, SGLANG, f"engine.python={program}")


def port_taken(folder: Path) -> None:
    """Somebody else has the port that was free a moment ago. In SGLang's place its own HTTP server, uvicorn: SGLang
    takes 10 s until it binds (tests/job/test_sglang_engine.py waits for it, once)."""
    (folder / "site" / "sglang").mkdir(parents=True)
    (folder / "site" / "sglang" / "__init__.py").touch()
    (folder / "site" / "sglang" / "launch_server.py").write_text(SERVER)
    (folder / "config.json").write_text('{"eos_token_id": 1}')
    with socket.socket() as taken, pytest.MonkeyPatch.context() as patch:
        taken.bind((sglang_server.HOST, 0))
        patch.setattr(sglang_server, "free_port", lambda: taken.getsockname()[1])
        patch.setenv("PYTHONPATH", str(folder / "site"))
        asyncio.run(SglangEngine(load(folder, SGLANG), 0, folder, folder).start())


def full_disk(folder: Path) -> None:
    os.symlink("/dev/full", folder / "rank00000.jsonl")
    with EventLog(folder, 0) as log:
        log.note(0.0, "JobStarted")


def full_run_dir(folder: Path) -> None:
    """There is room for a claim and no more."""
    (folder / "run").mkdir()
    os.symlink("/dev/full", folder / "run" / ".environment-1")  # where the first attempt writes
    (folder / "run.yaml").write_text(yaml.safe_dump(config()))
    done = subprocess.run(
        command(folder / "run.yaml", folder / "run"), env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and done.stdout == "", done
    assert not (folder / "run" / "attempt-1" / "job.log").exists(), "no rank was started"
    raise RuntimeError(done.stderr.strip())


def torn_checkpoint(folder: Path) -> None:
    """The only one lost half of a file. tests/job/test_job.py tears real ones."""
    place = folder / "run" / "checkpoints" / "iteration-000003"
    place.mkdir(parents=True)
    (place / "__0_0.distcp").write_bytes(bytes(1 << 16))
    checkpoints.seal(place, {"__0_0.distcp": checkpoints.measure(place / "__0_0.distcp")})
    os.truncate(place / "__0_0.distcp", 1 << 15)
    refused(folder)


CASES: list[tuple[str, Callable[[Path], None]]] = [
    ("an unknown key", unknown_key),
    ("a wrong type", wrong_type),
    ("R x K is no whole number of steps", not_divisible),
    ("ranks that do not make replicas", no_whole_replicas),
    ("ranks that do not fit the allocation", too_many_ranks),
    ("a missing model", no_model),
    ("a folder without a model", no_model_in_it),
    ("a model that does not fit the memory", too_large_a_model),
    ("a malformed line of prompts", malformed_line),
    ("a reward that there is not, in a line of prompts", unknown_reward),
    ("a reward function that cannot be imported", no_reward_module),
    ("a filter that is no function", no_filter_function),
    ("an environment that its module does not have", no_environment_function),
    ("a prompt longer than the context", long_prompt),
    ("an MPI world of the wrong size", lonely_rank),
    ("an engine interpreter that is not there", no_interpreter),
    ("an engine interpreter that is no program", no_program),
    ("an engine interpreter without SGLang", no_sglang),
    ("an engine's port taken, three times", port_taken),
    ("a full disk under the run directory", full_run_dir),
    ("a full disk under the event log", full_disk),
    ("an unreadable checkpoint", torn_checkpoint),
]


@pytest.mark.parametrize("what, make", CASES, ids=[what for what, _ in CASES])
def test_a_bad_input_is_refused_in_the_one_line_that_the_page_tells(what, make, tmp_path):
    with pytest.raises(Exception) as caught:
        make(tmp_path)
    line = str(caught.value).replace(str(tmp_path), "DIR").replace(f" on {socket.gethostname()} ", " on HOST ")
    assert "\n" not in line
    line = re.sub(r"', \d+\)", "', PORT)", line)
    assert f"`{line}`" in TOLD[what], line


def test_the_page_tells_no_line_that_nothing_says():
    assert sorted(TOLD) == sorted(what for what, _ in CASES)


def test_the_launcher_exits_with_2_and_that_line_alone(tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config()))
    command = [sys.executable, "-m", "rpipe.cli", "train", str(tmp_path / "run.yaml"), "rollout.group_per_iteration=8"]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert re.search("unknown key; did you mean groups_per_iteration", done.stderr)
