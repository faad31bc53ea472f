"""How far is the simulator from real jobs on this machine?

    python -m tests.bench.twin [--folder DIR] [--rounds 2] [--only NAME ...]

One job warms a model up. Then real jobs of every kind below start from it, in `rounds` rounds, with the same seed. `rpipe
calibrate` fits a hardware profile to the jobs of the two calibration kinds. Every other job is simulated with that
profile and with the lengths and rewards that its real run had; none of its times. Errors are of medians over a job's
iterations but the first, beside the spread of the real rounds: how far two runs of the very same job are from one another.

A folder that holds some of the runs already goes on with the rest. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from rpipe import config as configs
from rpipe.analysis.metrics import Attempt
from rpipe.analysis.run import read
from rpipe.sim.run import medians, simulate

ROOT = Path(__file__).resolve().parents[2]
ITERATIONS = 12
LEFT_OUT = 1  # iterations in which caches and pages are still cold
LENGTHS = {"min_terms": 2, "max_terms": 8, "max_number": 9}
BASE: dict[str, Any] = {
    "run": {"name": "twin", "iterations": ITERATIONS, "seed": 0, "checkpoint_every_iterations": 0},
    "cluster": {"accelerator": "cpu", "rollout_ranks": 1, "training_ranks": 1},
    "data": {"train": {"kind": "sums", "size": 4000, "seed": 0, "reward": "last_integer", "options": LENGTHS}},
    "rollout": {"groups_per_iteration": 16, "trajectories_per_group": 16, "max_new_tokens": 128},
    "engine": {"kv_tokens": 16384, "max_running": 64},
    "pipeline": {"mode": "fifo"},
    "admission": {"policy": "frontier", "frontier_groups": 4},
    "training": {
        "packing": "global",
        "trajectories_per_step": 128,
        "micro_batch_tokens": 2048,
        "optimizer": {"learning_rate": 2.0e-5},
    },
}
SERIAL = {"pipeline": {"mode": "serial"}, "admission": {"policy": "fifo"}}
CALIBRATION: dict[str, dict[str, Any]] = {
    "serial": SERIAL,
    "streamed": {},
}
TARGETS: dict[str, dict[str, Any]] = {
    "serial, small groups": {
        **SERIAL,
        "rollout": {"groups_per_iteration": 24, "trajectories_per_group": 8},
        "training": {"trajectories_per_step": 64},
    },
    "CGP": {"admission": {"policy": "fifo"}},
    "CGP+FGD": {
        "rollout": {"groups_per_iteration": 32, "trajectories_per_group": 8},
        "admission": {"frontier_groups": 6},
        "training": {"trajectories_per_step": 32},
    },
    "rollout-bound": {"engine": {"max_running": 12}, "admission": {"frontier_groups": 2}},
    "exact": {"pipeline": {"mode": "exact"}, "training": {"packing": "group"}},
    "two engines": {"cluster": {"rollout_ranks": 2}, "engine": {"max_running": 32}},
    "soft frontier": {
        "rollout": {"groups_per_iteration": 24, "trajectories_per_group": 8},
        "admission": {"policy": "soft_frontier", "frontier_groups": "auto"},
        "training": {"trajectories_per_step": 64},
    },
}
FIGURES = {
    "iteration, s": "rollout_to_train_end_s",
    "first dispatch, s": "first_dispatch_s",
    "waiting ratio": "waiting_ratio_start",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], help="make these real runs and stop")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        at = asked.folder or Path(folder)
        at.mkdir(parents=True, exist_ok=True)
        for number in range(asked.rounds):
            for name in asked.only or (*CALIBRATION, *TARGETS):
                make(at, name, number)
        return 0 if asked.only else compare(at, asked.rounds)


# ---- real runs ------------------------------------------------------------------------------------------------------


def merged(*trees: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for tree in trees:
        for key, value in tree.items():
            out[key] = merged(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def path_of(folder: Path, name: str, number: int) -> Path:
    return folder / f"{name.replace(',', '').replace(' ', '-')}-{number}"


def make(folder: Path, name: str, number: int) -> None:
    """One real run, if it is missing."""
    model = folder / "warm" / "hf"
    if not model.is_dir():
        warm = {
            "run": {"iterations": 1},
            "model": {
                "make": {"hidden_size": 128, "intermediate_size": 384, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 32},
                "warm_up": {"steps": 240, "sequences_per_step": 64, "learning_rate": 2.0e-3},
            },
        }
        real(folder / "warm", merged(BASE, warm))
    if name == "warm":
        return
    run_dir = path_of(folder, name, number)
    if not (run_dir / "report.json").exists():
        before = os.getloadavg()[0]
        real(run_dir, merged(BASE, {"model": {"path": str(model)}}, {**CALIBRATION, **TARGETS}[name]))
        print(f"{run_dir.name}: done; load average {before:.1f} before, {os.getloadavg()[0]:.1f} after", flush=True)


def real(run_dir: Path, tree: dict[str, Any]) -> None:
    path = run_dir.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-m", "rpipe.cli", "train", str(path), f"run.dir={run_dir}", "run.resume=never"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    found = sorted(Attempt.of(read(run_dir / "attempt-1")).iterations.items())
    return [at.figures() for _, at in found if at.complete][LEFT_OUT:]


def unrest(run_dir: Path) -> float:
    """Range of the iterations' times in one run over their median: lengths, and whatever else the machine did."""
    times = [row["rollout_to_train_end_s"] for row in rows_of(run_dir)]
    return (max(times) - min(times)) / statistics.median(times)


# ---- the twin -------------------------------------------------------------------------------------------------------


def twin(run_dir: Path, profile: Path) -> dict[str, float | None]:
    """The run's own config, simulated: hardware from `profile`, lengths from the run."""
    own = configs.load(run_dir / "config.yaml").model_dump(mode="json")
    hardware = yaml.safe_load(profile.read_text())["hardware"]
    workload = {"lengths": "run", "path": str(run_dir)}
    config = configs.parse({**own, "hardware": hardware, "workload": workload}, run_dir.name)
    return medians(simulate(config).iterations[LEFT_OUT:])


def compare(folder: Path, rounds: int) -> int:
    profile = folder / "profile.yaml"
    runs = [str(path_of(folder, name, number)) for name in CALIBRATION for number in range(rounds)]
    subprocess.run([sys.executable, "-m", "rpipe.cli", "calibrate", *runs, "--out", str(profile)], check=True)
    errors: dict[str, list[float]] = {title: [] for title in FIGURES}
    spreads: dict[str, list[float]] = {title: [] for title in FIGURES}
    print(f"\n{'':24}{'':20}{'real':>20}{'simulated':>20}{'error':>9}{'spread of the real':>20}")
    for name in (*CALIBRATION, *TARGETS):
        dirs = [path_of(folder, name, number) for number in range(rounds)]
        reals, twins = [medians(rows_of(d)) for d in dirs], [twin(d, profile) for d in dirs]
        for title, key in FIGURES.items():
            a, b = [r[key] or 0.0 for r in reals], [t[key] or 0.0 for t in twins]
            error, spread = statistics.mean(y / x - 1 for x, y in zip(a, b)), (max(a) - min(a)) / statistics.mean(a)
            if name in TARGETS:
                errors[title] += [abs(y / x - 1) for x, y in zip(a, b)]
                spreads[title].append(spread)
            fitted = " (calibration)" if name in CALIBRATION else ""
            label = (name + fitted) if title == next(iter(FIGURES)) else ""
            apart = f"{spread:.1%}" if rounds > 1 else "one round"
            print(f"{label:24}{title:20}{several(a):>20}{several(b):>20}{error:>+9.1%}{apart:>20}")
    print(f"\nabsolute errors of the {len(TARGETS)} kinds not calibrated on, {rounds} rounds each")
    for title in FIGURES:
        e, s = errors[title], spreads[title]
        apart = f"median {statistics.median(s):.1%}, worst {max(s):.1%}" if rounds > 1 else "unknown (one round)"
        print(f"  {title:20} median {statistics.median(e):.1%}, worst {max(e):.1%}; real runs among themselves: {apart}")
    every = [e for title in FIGURES for e in errors[title]]
    print(f"  all together         median {statistics.median(every):.1%}, worst {max(every):.1%}")
    ranges = [unrest(path_of(folder, name, number)) for name in (*CALIBRATION, *TARGETS) for number in range(rounds)]
    told = f"median {statistics.median(ranges):.0%}, worst {max(ranges):.0%}"
    print(f"range of a real run's own iterations, over their median: {told}")
    return 0


def several(values: list[float]) -> str:
    return " ".join(f"{v:.3f}" for v in values)


if __name__ == "__main__":
    sys.exit(main())
