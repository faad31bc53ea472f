"""Every benchmark says how it is used and prints its table, of made-up figures or of a very small run.

(pipeline's table: test_bench_pipeline.py.)
"""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rpipe import config as configs
from rpipe.sim.workload import GroupWork, TurnWork
from rpipe.training.memory import Need
from tests.bench import (
    admission,
    control_plane,
    curve,
    learning,
    memory,
    modes,
    overheads,
    plan,
    report,
    rolloutpipe_settings,
    sim_scale,
    sweeps,
    twin,
)
from tests.replay.test_golden import GOLDEN

BENCH = Path(__file__).resolve().parents[1] / "bench"
NAMES = sorted(path.stem for path in BENCH.glob("*.py") if path.stem not in ("__init__", "jobs"))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch):
    """Call a benchmark's main as `python -m` does."""

    def call(bench: Any, *arguments: object) -> Any:
        monkeypatch.setattr("sys.argv", ["bench", *map(str, arguments)])
        return bench.main()

    return call


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_says_how_it_is_used(name, command, capsys):
    bench = importlib.import_module(f"tests.bench.{name}")
    with pytest.raises(SystemExit) as ended:
        command(bench, "--help")
    assert ended.value.code == 0
    told = " ".join(capsys.readouterr().out.split())
    assert told.startswith("usage: ") and bench.__doc__.splitlines()[0] in told
    with pytest.raises(SystemExit) as ended:
        command(bench, "--no-such-option")
    assert ended.value.code == 2 and "usage: " in capsys.readouterr().err, "and it never begins to measure by mistake"


def test_admission_has_a_line_for_each_setting_of_both_tables(command, monkeypatch, capsys):
    rows = [{"rollout_to_train_end_s": end, "first_dispatch_s": end / 4} for end in (99.0, 5.0, 6.0, 7.0)]
    monkeypatch.setattr(admission, "simulate", lambda config: SimpleNamespace(iterations=rows))
    assert command(admission) == 0
    light, heavy = capsys.readouterr().out.split("\nheavy tails\n")
    lines = [*light.splitlines()[1:], *heavy.splitlines()[1:]]
    assert [line.split(",")[0].strip() for line in lines] == ["R 32"] * 3 + ["R 96"] * 3 + ["R 64"] * 4
    assert all(line.count("6.00 / 1.50") == len(admission.POLICIES) for line in lines), "the first iteration is left out"


def test_control_plane_has_a_line_for_each_case_and_coordinator(capsys):
    control_plane.alone(engines=4, trajectories=64, samples=8, replicas=2)
    lines = capsys.readouterr().out.splitlines()[2:-2]
    assert [(line[:20].strip(), line[20:].split()[0]) for line in lines] == [
        (name, who) for name in control_plane.CASES for who in ("rollout", "training")
    ]


def test_curve_draws_what_a_report_holds(command, tmp_path):
    pytest.importorskip("matplotlib")
    told = {
        "iterations": [{"iteration": i, "reward_mean": i / 10} for i in range(3)],
        "evaluations": [{"iteration": i, "reward_mean": i / 10, "count": 8} for i in (0, 3)],
        "run": {"name": "x", "seconds": 60.0},
    }
    (tmp_path / "report.json").write_text(json.dumps(told))
    command(curve, tmp_path, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "rise", "code"), [([], 0.2, 0), ([], 0.1, 1), (["--shuffled"], 0.1, 0), (["--shuffled"], 0.2, 1)]
)
def test_learning_has_a_line_for_each_seed_and_a_verdict(options, rise, code, command, monkeypatch, capsys):
    told = {"evaluations": [{"reward_mean": 0.3, "count": 8}, {"reward_mean": 0.3 + rise, "count": 8}], "wall_s": 1.0}
    monkeypatch.setattr(learning, "run", lambda config, run_dir, *overrides: told)
    assert command(learning, "--seeds", 5, 6, *options) == code
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:-1]] == ["5", "6"] and all(f"{rise:+.3f}" in line for line in lines[2:-1])
    assert lines[-1].endswith(": yes" if code == 0 else ": NO")


def test_memory_has_a_line_for_each_part_and_phase():
    told = memory.table(Need("training", {"weights": 1 << 20, "states": 3 << 20}), [("imports", 2 << 20)], 8 << 20)
    assert [" ".join(line.split()) for line in told.splitlines()] == [
        "estimated weights 1 MiB",
        "estimated states 3 MiB",
        "estimated 4 MiB",
        "held after imports 2 MiB",
        "held at most 8 MiB, 2.00 of the estimate",
    ]


def test_modes_has_a_line_for_each_figure(command, monkeypatch, capsys):
    def run(config, run_dir, *overrides):
        value = 4.0 if "pipeline.mode=serial" in overrides else 3.0
        cold = dict.fromkeys(modes.FIGURES.values(), 99.0)
        return {"iterations": [cold, cold, *[dict.fromkeys(modes.FIGURES.values(), value)] * 3]}

    monkeypatch.setattr(modes, "run", run)
    assert command(modes, "--rounds", 2) == 0
    lines = capsys.readouterr().out.splitlines()[-len(modes.FIGURES) :]
    assert [line[:26].strip() for line in lines] == list(modes.FIGURES)
    assert all(line.endswith(" 0.750 [0.750 .. 0.750]") for line in lines)


def test_overheads_are_told_of_a_recorded_run(command, tmp_path, capsys):
    events = tmp_path / "attempt-1" / "events"
    events.mkdir(parents=True)
    shutil.copy(GOLDEN / "fifo" / "config.yaml", tmp_path)
    shutil.copy(GOLDEN / "fifo" / "rank00000.jsonl", events)
    shutil.copy(GOLDEN / "fifo" / "rank00001.jsonl", events / "rank00002.jsonl")  # the job had two rollout ranks
    assert command(overheads, tmp_path) == 0
    names = [line[:34].strip() for line in capsys.readouterr().out.splitlines()]
    assert len(names) == 8 and names[0] == "run" and names[-1] == "publish"


def test_plan_has_a_line_for_each_setting_and_each_large_model(command, monkeypatch, capsys):
    def figures(seconds: float) -> tuple[None, SimpleNamespace]:
        return None, SimpleNamespace(iteration_s=seconds)

    space = SimpleNamespace(plans=lambda: range(7))
    chosen = SimpleNamespace(best=[figures(10.5)], rollouts=2, wholes=1, bound_s=9.0, space=space)
    monkeypatch.setattr(plan, "exhaustive", lambda config, accelerators, iterations: (None, [figures(10.0), figures(12.0)]))
    monkeypatch.setattr(plan, "plan", lambda config, accelerators, iterations=2: chosen)
    assert command(plan, "--accelerators", 8, 16) == 0
    lines = capsys.readouterr().out.splitlines()
    settings = lines[1 : 1 + 2 * len(plan.SETTINGS)]
    assert [line[:40].strip() for line in settings] == [name for name in plan.SETTINGS for _ in (8, 16)]
    assert all("5.00%" in line for line in settings) and lines[len(settings) + 1] == "worst: 5.00%"
    assert [line.split(",")[0] for line in lines[-len(plan.LARGE) :]] == list(plan.LARGE)


def test_report_is_measured_on_a_log_of_at_least_so_many_events(command, capsys):
    command(report, "--events", 1000)
    told = json.loads(capsys.readouterr().out)
    assert told["events"] >= 1000 and set(told) == {"events", "log_megabytes", "cpu_s", "peak_megabytes"}


def test_rolloutpipe_settings_have_a_line_each_in_both_tables(capsys):
    bench = rolloutpipe_settings
    one = bench.Prediction(residual_s=50.0, residual_cgp_s=60.0, first_s=20.0, first_cgp_s=30.0, best_s=220.0, bound_s=200.0)
    found = {(w, groups, cell): one for w in bench.PUBLISHED for groups in bench.GROUPS for cell in bench.CELLS}
    bench.residuals(found)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(tuple(bench.PUBLISHED)) for line in lines) == 12 and len(lines) == 2 + 12 + 4 + 2 + 2
    bench.best(found)
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len(lines) == 12 and all(line.endswith("+10.0% above the bound") for line in lines)


def test_no_schedule_is_faster_than_rolloutpipe_s_bound():
    """One response is long, and its siblings are short: most of it is generated alone."""
    bench = rolloutpipe_settings
    config = bench.made(32, bench.CELLS[0], 0, {"micro_batch_s": 0.0, "token_s": 1e-9}, 1.0, bench.SERIAL)
    group = GroupWork(250, [(TurnWork(tokens),) for tokens in (1000, *[10] * 7)], [0.0] * 8, [0.0] * 8)
    costs, slowdown, compute_s = bench.engine_costs(config), 1.5, 400.0
    generated_s = slowdown * (10 * costs.decode_s(8, 0.0) + 990 * costs.decode_s(1, 0.0))
    assert bench.bound_s(config, [group], slowdown, compute_s) <= generated_s + compute_s
    assert bench.bound_s(config, [group], slowdown, compute_s) > 0.99 * generated_s + compute_s


def test_sim_scale_has_a_line_for_each_size_and_tells_the_growth(command, monkeypatch, capsys):
    result = SimpleNamespace(attempt=SimpleNamespace(events=1000), seconds=10.0, wall_s=0.5)
    monkeypatch.setattr(sim_scale, "size", lambda engines, folder: (98 * engines, 0.01 * engines, result))
    assert command(sim_scale, "--largest", 128) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ["16", "32", "64", "128"]
    assert lines[-1].startswith("growth exponent 1.00;")


def test_sweeps_have_a_line_for_each_policy_in_each_picture(command, monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")

    def whole_s(overrides: tuple[str, ...]) -> float:
        return 4.0 if configs.load(sweeps.BASE, list(overrides)).pipeline.mode == "serial" else 3.0

    monkeypatch.setattr(sweeps, "whole_s", whole_s)
    assert command(sweeps, "--out", tmp_path, "--seeds", 1) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert [line[:36].strip() for line in lines] == list(sweeps.POLICIES) * len(sweeps.sweeps())
    assert all(set(line[36:].split()) == {"0.75"} for line in lines)
    assert (tmp_path / "sweeps.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", [*twin.CALIBRATION, *twin.TARGETS])
def test_every_job_of_the_twin_has_a_valid_config(kind):
    tree = twin.merged(twin.BASE, {"model": {"make": {}}}, {**twin.CALIBRATION, **twin.TARGETS}[kind])
    assert configs.parse(tree, kind).run.iterations == twin.ITERATIONS


def test_the_twin_has_a_line_for_each_kind_and_figure(monkeypatch, tmp_path, capsys):
    row = dict.fromkeys(twin.FIGURES.values(), 2.0)
    monkeypatch.setattr(twin, "subprocess", SimpleNamespace(run=lambda *arguments, **options: None))
    monkeypatch.setattr(twin, "rows_of", lambda run_dir: [row, row])
    monkeypatch.setattr(twin, "twin", lambda run_dir, profile: dict.fromkeys(twin.FIGURES.values(), 2.2))
    assert twin.compare(tmp_path, rounds=2) == 0
    table, errors = capsys.readouterr().out.strip().split("\n\n")
    lines = table.splitlines()[1:]
    assert [line[24:44].strip() for line in lines] == list(twin.FIGURES) * (len(twin.CALIBRATION) + len(twin.TARGETS))
    assert [line[:24].strip() for line in lines[6::3]] == list(twin.TARGETS) and all("+10.0%" in line for line in lines)
    assert [line[2:22].strip() for line in errors.splitlines()[1:4]] == list(twin.FIGURES)
