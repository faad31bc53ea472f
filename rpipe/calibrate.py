"""`rpipe calibrate RUN...`: which hardware profile explains these runs?

Reads the event logs of real jobs and writes the section `hardware` for `rpipe simulate` and `rpipe plan`: cost of a decode step
by batch size, of prefill, of a micro-batch, of an optimizer step, of a publish, and the latencies between. One run with the
stages apart (pipeline.mode = serial) and one with the stages side by side show best how much these slow one another.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rpipe import config as configs
from rpipe.analysis.run import RunError
from rpipe.config import ConfigError
from rpipe.sim.fit import profile
from rpipe.sim.observe import FitError, observe
from rpipe.sim.refine import refine
from rpipe.sim.shape import shape_of


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rpipe calibrate",
        description="Fits a hardware profile for rpipe simulate and rpipe plan to real runs of one machine.",
        epilog="Use it: rpipe simulate CONFIG with `include: [FILE]`. Exit code: 0 written, 2 nothing to fit.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run dirs; of one model, engine.tp and training.tp")
    parser.add_argument("--out", type=Path, metavar="FILE.yaml", help="where to write it (default: print it)")
    parser.add_argument("--name", default="calibrated", help="what the profile is called")
    asked = parser.parse_args(list(argv))
    try:
        made = [_config(run) for run in asked.runs]
        _alike(asked.runs, made)
        seen = [attempt for run in asked.runs for attempt in observe(run)]
        parameters, unsized = _parameters(asked.runs)
        source = f"rpipe calibrate {' '.join(run.name for run in asked.runs)}"
        tree, errors, assumed = profile(seen, asked.name, source, _shared_cores(asked.runs, made), parameters)
    except (ConfigError, RunError, FitError) as error:
        print(error, file=sys.stderr)
        return 2
    try:
        tree, left = refine(tree, asked.runs)
        again = f"simulated again, rollouts are off by {left['rollout_s']:.1%} at most, training by {left['train_busy_s']:.1%}"
    except ConfigError as error:
        again = f"not put right by simulating them again: {error}"
    text = yaml.safe_dump({"hardware": tree}, sort_keys=False, default_flow_style=None, width=120)
    if asked.out is None:
        print(text, end="")
    else:
        try:
            asked.out.write_text(text)
        except OSError as error:
            print(f"{asked.out}: cannot be written: {error.strerror}", file=sys.stderr)
            return 2
    turns, batches = sum(len(s.turns) for s in seen), sum(len(s.batches) for s in seen)
    print(
        f"{turns} responses explained to {errors['engine']:.1%} of their tokens, {batches} micro-batches to"
        f" {errors['trainer']:.1%} of their time; side by side training runs at {errors['shared speed']:.0%} of its speed,"
        f" engines at {errors['engine speed']:.0%}; {again}",
        file=sys.stderr,
    )
    if unsized:
        left_out = "hardware.fitted_parameters is left out, and without it no run counts as calibrated"
        assumed.append(f"how large the model is was not found ({unsized}): {left_out}")
    for line in assumed:
        print(line, file=sys.stderr)
    return 0


def _config(run: Path) -> dict[str, Any]:
    """As it was written, unchecked: a run of an older release counts, too. Raises ConfigError."""
    path = run / "config.yaml"
    try:
        tree = yaml.safe_load(path.read_text())
        return {name: dict(tree[name]) for name in ("cluster", "engine", "training")}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; wanted: a run dir") from None
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: not a run's config: {error}") from None


def _alike(runs: Sequence[Path], made: Sequence[dict[str, Any]]) -> None:
    """Raises ConfigError where one profile cannot stand for all."""
    for run, tree in zip(runs[1:], made[1:]):
        for section, key in (("engine", "tp"), ("training", "tp"), ("training", "pp"), ("training", "cp")):
            was, now = (t[section].get(key, 1) for t in (made[0], tree))
            if was != now:
                raise ConfigError(f"{run}: {section}.{key} = {now}, {runs[0]} has {was}; wanted: runs that agree in it")


def _parameters(runs: Sequence[Path]) -> tuple[int | None, str]:
    """Of the model of all runs; or why nothing says it. Raises ConfigError where they are of several models."""
    sizes: list[int] = []
    for run in runs:
        try:
            sizes.append(shape_of(configs.load(run / "config.yaml")).parameters)
        except ConfigError as error:
            return None, str(error)
        if sizes[-1] != sizes[0]:
            found = f"a model of {sizes[-1]:,} parameters, {runs[0]} has one of {sizes[0]:,}"
            raise ConfigError(f"{run}: {found}; wanted: runs of one model")
    return sizes[0], ""


def _shared_cores(runs: Sequence[Path], made: Sequence[dict[str, Any]]) -> float | None:
    """Cores of the machine, where engines and trainer compute on them."""
    if any(tree["cluster"].get("accelerator", "cpu") != "cpu" for tree in made):
        return None
    try:
        return float(json.loads((runs[0] / "environment.json").read_text())["cores"])
    except (OSError, ValueError, KeyError):
        return None
