"""How does a test run a whole job? As a person does: `rpipe train CONFIG key=value ...`, then it reads the run's folder."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

from rpipe.core.eventlog import records

ROOT = Path(__file__).resolve().parents[2]
TINY: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}


def config(**sections: dict[str, Any]) -> dict[str, Any]:
    """A small scripted job; sections are merged into it."""
    base: dict[str, Any] = {
        "run": {"name": "test", "iterations": 3, "seed": 3},
        "cluster": {"rollout_ranks": 1, "training_ranks": 1},
        "model": {"make": TINY},
        "data": {"train": {"kind": "sums", "size": 200, "reward": "tests.job.jobs:random_after_a_while"}},
        "rollout": {"groups_per_iteration": 8, "trajectories_per_group": 4, "max_new_tokens": 48},
        "training": {"trajectories_per_step": 8, "optimizer": {"learning_rate": 1.0e-3}},
        "engine": {"kind": "scripted", "options": {"median_tokens": 12, "sigma": 0.7, "tokens_per_s": 400}},
        "reward": {"workers": 4},
        "limits": {"message_s": 60, "collective_s": 60, "start_s": 120},
    }
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    return base


def real(**sections: Any) -> dict[str, Any]:
    """A job on SGLang instead of the scripted engine."""
    tree = config(**sections)
    tree["engine"] = {"kv_tokens": 8192, "max_running": 8, "stream_interval_tokens": 4, **sections.get("engine", {})}
    return tree


def random_after_a_while(prompt: str, response: str, answer: str, metadata: dict[str, Any]) -> float:
    """Decided by the text alone, known after a time that nothing decides: groups complete in another order each run."""
    time.sleep(int.from_bytes(os.urandom(1), "big") / 255 * 0.08)
    return float(random.Random(prompt + response).random() < 0.5)


def answers_once(prompt: str, texts: list[str], metadata: dict[str, Any]) -> str | None:
    """An environment."""
    return " so? " if len(texts) == 1 else None


def fails_sometimes(prompt: str, texts: list[str], metadata: dict[str, Any]) -> str | None:
    """An environment that asks for more, and raises one time in six."""
    if random.Random(prompt + "".join(texts)).random() < 1 / 6:
        raise ValueError("no luck")
    return "more!"


def train(run_dir: Path, tree: dict[str, Any], *overrides: str, timeout_s: float = 240.0, code: int = 0) -> str:
    """Run the job in `run_dir`; returns what it printed."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    path = run_dir.parent / f"{run_dir.name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    done = subprocess.run(
        command(path, run_dir, *overrides), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout_s
    )
    logs = [p.read_text(errors="replace")[-4000:] for p in sorted(run_dir.glob("attempt-*/job.log"))[-1:]]
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}\n{logs}"
    return done.stdout + done.stderr


def command(config_path: Path, run_dir: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "rpipe.cli", "train", str(config_path), f"run.dir={run_dir}", *overrides]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


def events(run_dir: Path, rank: int, kind: str, attempt: int = 1) -> list[dict[str, Any]]:
    path = run_dir / f"attempt-{attempt}" / "events" / f"rank{rank:05d}.jsonl"
    return [r for r in records(path) if r["kind"] == kind]


def report(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "report.json").read_text())  # type: ignore[no-any-return]


def weights(run_dir: Path) -> bytes:
    """The final ones, to the bit."""
    return (run_dir / "hf" / "model.safetensors").read_bytes()


# ---- jobs that run while the test acts


def started(tmp_path: Path, *overrides: str, tree: Any = None, training_rank: int = 1) -> tuple[subprocess.Popen[str], Path]:
    """A job in its first iterations, by default one that will not end by itself soon."""
    tree = tree or real(run={"iterations": 500, "seed": 1})
    path, run_dir = tmp_path / "run.yaml", tmp_path / "run"
    path.write_text(yaml.safe_dump(tree))
    job = subprocess.Popen(
        command(path, run_dir, *overrides), cwd=ROOT, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    log = run_dir / "attempt-1" / "events" / f"rank{training_rank:05d}.jsonl"
    end = time.monotonic() + 150
    while not (log.exists() and log.read_text().count('"StepDone"') >= 2):
        assert job.poll() is None, job.stdout.read() if job.stdout else ""
        assert time.monotonic() < end, "the job did not reach its second step"
        time.sleep(0.1)
    return job, run_dir


def ends(job: subprocess.Popen[str], members: list[psutil.Process], within_s: float = 90.0) -> str:
    """What it printed; nothing of it may be left."""
    text, _ = job.communicate(timeout=within_s)
    end = time.monotonic() + 10  # what was killed may take the kernel a moment
    while left := [p for p in members if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < end, left
        time.sleep(0.05)
    return text


def members(job: subprocess.Popen[str]) -> list[psutil.Process]:
    found = psutil.Process(job.pid).children(recursive=True)
    assert len(found) >= 3, found  # mpirun, two ranks; the engine's processes
    return found


def rank(processes: list[psutil.Process], number: int) -> psutil.Process:
    return next(
        p
        for p in processes
        if p.environ().get("OMPI_COMM_WORLD_RANK") == str(number) and "rpipe.train" in " ".join(p.cmdline())
    )
