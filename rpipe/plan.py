"""`rpipe plan CONFIG [key=value ...]`: which split and layout of N accelerators should be asked of Slurm?

Simulates the job (docs/plan.md): the ten best plans, why the rest was not chosen, and a run file of the best.
Needs no torch and no accelerator.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rpipe import config as configs
from rpipe.config import Config, ConfigError
from rpipe.sim.calibration import calibrated, described, objection
from rpipe.sim.costs import hardware_of
from rpipe.sim.judge import Figures, Judge
from rpipe.sim.layouts import Plan, keys_of, plan_of, with_plan
from rpipe.sim.plan_space import Space
from rpipe.sim.planner import Found, plan

SHOWN = 10
SHOW_EVERY_S = 0.5
COLUMNS = (
    f"{'':>3} {'iteration':>10} {'rollout':>9} {'train':>9} {'waiting':>9} {'first':>9}  {'engines':>12}  {'trainer':<38}"
    f" {'F_w':>5}  {'engine':>9} {'KV':>10} {'trainer':>9}"
)
UNITS = f"{'':>3} {'s':>10} {'s':>9} {'s':>9} {'s':>9} {'s':>9}  {'':>12}  {'':<38} {'':>5}  {'GB':>9} {'tokens':>10} {'GB':>9}"


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="rpipe plan",
        description="Which split of N accelerators into rollout and training ranks, which tp of an engine, which trainer layout"
        " and which F_w give the shortest iteration? By simulation, on the config's hardware and workload sections.",
        epilog="Exit code: 0 planned, 2 the config cannot be planned, 130 Ctrl-C."
        " Example: rpipe plan configs/sim/reasoning-14b-a800.yaml --accelerators 32 --out mine.yaml",
    )
    top.add_argument("config", metavar="CONFIG", help="a run file with the sections hardware and workload")
    top.add_argument("overrides", nargs="*", metavar="key=value", help="changes one key: training.micro_batch_tokens=16384")
    top.add_argument("--accelerators", type=int, metavar="N", help="default: the config's rollout and training ranks")
    top.add_argument("--iterations", type=int, default=3, metavar="N", help="that the best are simulated for (3)")
    top.add_argument("--out", metavar="FILE", help="write a run file of the best plan")
    top.add_argument("--json", action="store_true", help="print JSON")
    return top


def main(argv: Sequence[str]) -> int:
    asked = parser().parse_intermixed_args(list(argv))
    began = time.monotonic()
    try:
        config = configs.load(asked.config, asked.overrides)
        _check(asked, config)
        accelerators = asked.accelerators or config.cluster.rollout_ranks + config.cluster.training_ranks
        show = _Show()
        found = plan(config, accelerators, asked.iterations, watch=show)
        show.end()
        chosen = chosen_config(config, found.best[0][0], asked.config)
    except ConfigError as error:
        message = str(error)
        print(message if message.startswith((asked.config, "--")) else f"{asked.config}: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return 130
    if asked.out:
        try:
            Path(asked.out).write_text(run_file(asked, chosen, found))
        except OSError as error:
            print(f"--out {asked.out}: cannot be written: {error.strerror}", file=sys.stderr)
            return 2
    wall_s = time.monotonic() - began
    print(json.dumps(as_json(config, found), indent=1) if asked.json else told(config, found, wall_s))
    if asked.out and not asked.json:
        print(f"run file: {asked.out}")
    return 0


def _check(asked: argparse.Namespace, config: Config) -> None:
    """What can be known before the search. Raises ConfigError."""
    if asked.accelerators is not None and asked.accelerators < 2:
        raise ConfigError(f"--accelerators {asked.accelerators}: one must roll out and one train; wanted: at least 2")
    if asked.iterations < 1:
        raise ConfigError(f"--iterations {asked.iterations}; wanted: at least 1")
    hardware_of(config)
    if asked.out:
        out = Path(asked.out)
        if out.resolve() == Path(asked.config).resolve():
            raise ConfigError(f"--out {asked.out}: is the config that is planned; wanted: another file")
        if out.is_dir() or not out.parent.is_dir():
            raise ConfigError(f"--out {asked.out}: wanted: a file in a directory that exists")


def chosen_config(config: Config, best: Plan, source: str) -> Config:
    """Checked as a run file is. Raises ConfigError."""
    return configs.parse(yaml.safe_load(configs.dump(with_plan(config, best))), source)


def run_file(asked: argparse.Namespace, chosen: Config, found: Found) -> str:
    best, figures = found.best[0]
    words = " ".join([asked.config, *asked.overrides])
    return (
        f"# rpipe plan {words} --accelerators {found.space.accelerators}\n"
        f"# Simulated on {described(chosen)}: {seconds(figures.iteration_s)} s an iteration.\n"
        f"# {' '.join(f'{key}={value}' for key, value in keys_of(best).items())}\n" + configs.dump(chosen)
    )


# ---- told -----------------------------------------------------------------------------------------------------------


def told(config: Config, found: Found, wall_s: float) -> str:
    space, (best, figures) = found.space, found.best[0]
    nodes = -(-space.accelerators // space.node)
    lines = [
        f"simulated on {described(config)}",
        *filter(None, [objection(config)]),
        config.arithmetic(),
        f"{space.accelerators} accelerators on {nodes} node{'s' if nodes > 1 else ''} of {space.node};"
        f" figures are means over {found.iterations} simulated iteration{'s' if found.iterations > 1 else ''}",
        "",
        COLUMNS,
        UNITS,
        *(row(str(n), space, *one) for n, one in enumerate(found.best[:SHOWN], 1)),
    ]
    if found.own is not None:
        lines.append(row("own", space, *found.own) + "  (the config's own)")
    else:
        lines.append(own_refusal(config, space))
    lines += ["", "not chosen:", *(f"{n:>9,}  {reason}" for reason, n in sorted(found.pruned.items()) if n), ""]
    lines.append(
        f"no plan can take less than {seconds(found.bound_s)} s in the first iteration (by bounds);"
        f" {found.rollouts} rollouts and {found.wholes} whole iterations were simulated in {wall_s:.1f} s"
    )
    if found.cut > 0:
        lines.append(
            f"rollout.trajectory_deadline_s = {config.rollout.trajectory_deadline_s:g} would cut {found.cut:.1%} of the tokens"
            " under the best plan; it was planned without"
        )
    lines.append("best: " + " ".join(f"{key}={value}" for key, value in keys_of(best).items()))
    if found.own is not None and found.own[0] != best:
        gain = 1 - figures.iteration_s / found.own[1].iteration_s
        lines.append(f"{gain:.1%} shorter than the config's own {seconds(found.own[1].iteration_s)} s")
    return "\n".join(lines)


def own_refusal(config: Config, space: Space) -> str:
    own = plan_of(config)
    n = own.engines.ranks + own.trainer.ranks
    if n != space.accelerators:
        return f"the config's own layout is of {n} accelerators"
    return f"the config's own layout cannot run: {space.refusal(own)}"


def row(name: str, space: Space, one: Plan, figures: Figures) -> str:
    engines, trainer = one.engines, one.trainer
    in_engine, in_trainer = space.engine_memory(engines), space.memory.get(trainer)
    cuts = [
        f"{key} {n}" for key, n in (("tp", trainer.tp), ("pp", trainer.pp), ("cp", trainer.cp), ("ep", trainer.ep)) if n > 1
    ]
    layout = f"{trainer.ranks} = {trainer.replicas} x {trainer.lockstep}"
    if cuts or trainer.recompute:
        layout += f" ({', '.join(cuts + ['recompute'] * trainer.recompute)})"
    return (
        f"{name:>3} {seconds(figures.iteration_s):>10} {seconds(figures.rollout_s):>9} {seconds(figures.train_busy_s):>9}"
        f" {seconds(figures.waiting_s):>9} {seconds(figures.first_dispatch_s):>9}"
        f"  {f'{engines.ranks} = {engines.count} x {engines.tp}':>12}  {layout:<38}"
        f" {one.frontier_groups if one.frontier_groups is not None else '-':>5}"
        f"  {f'{in_engine.total / 1e9:.1f}' if in_engine else '-':>9} {space.kv_tokens[engines.tp]:>10,}"
        f" {f'{in_trainer.total / 1e9:.1f}' if in_trainer else '-':>9}"
    )


def seconds(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.3f}"


def as_json(config: Config, found: Found) -> dict[str, Any]:
    hardware = hardware_of(config)
    return {
        "accelerators": found.space.accelerators,
        "hardware": {"name": hardware.name, "source": hardware.source, "calibrated": calibrated(config)},
        "iterations": found.iterations,
        "plans": [_plan_json(found.space, *one) for one in found.best[:SHOWN]],
        "own": _plan_json(found.space, *found.own) if found.own is not None else None,
        "pruned": {reason: n for reason, n in sorted(found.pruned.items()) if n},
        "bound_s": found.bound_s,
        "cut_by_deadline": found.cut,
        "simulated": {"rollouts": found.rollouts, "iterations": found.wholes},
    }


def _plan_json(space: Space, one: Plan, figures: Figures) -> dict[str, Any]:
    in_engine, in_trainer = space.engine_memory(one.engines), space.memory.get(one.trainer)
    return {
        "keys": keys_of(one),
        "iteration_s": figures.iteration_s,
        "rollout_s": figures.rollout_s,
        "train_busy_s": figures.train_busy_s,
        "waiting_s": figures.waiting_s,
        "first_dispatch_s": figures.first_dispatch_s,
        "publish_s": figures.publish_s,
        "engine_bytes": in_engine.total if in_engine else None,
        "kv_tokens": space.kv_tokens[one.engines.tp],
        "trainer_bytes": in_trainer.total if in_trainer else None,
    }


class _Show:
    """One line on a terminal, redrawn; nothing elsewhere."""

    def __init__(self) -> None:
        self._shown = time.monotonic()
        self._drawn = False

    def __call__(self, judge: Judge) -> None:
        now = time.monotonic()
        if not sys.stderr.isatty() or now - self._shown < SHOW_EVERY_S:
            return
        self._shown, self._drawn = now, True
        sys.stderr.write(f"\r\x1b[K{judge.rollouts} rollouts and {judge.wholes} whole iterations simulated")
        sys.stderr.flush()

    def end(self) -> None:
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
