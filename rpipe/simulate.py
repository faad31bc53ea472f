"""`rpipe simulate CONFIG [key=value ...]`: the job's config on a virtual clock. What would it take?

Runs the job's own coordinators and policies; `hardware` says how fast everything else is, `workload` how long responses are.
Writes a run directory like a job's, which `rpipe report` reads. Needs no torch.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rpipe import config as configs
from rpipe.config import Config, ConfigError
from rpipe.sim.calibration import described, objection
from rpipe.sim.job import SimulatedJob
from rpipe.sim.run import Result, simulate

EXAMPLE = "rpipe simulate configs/sim/sweep-base.yaml admission.frontier_groups=4"
SHOW_EVERY_S = 0.5


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="rpipe simulate",
        description="Runs a job's config on a virtual clock: the job's own coordinators, models of engines and trainer.",
        epilog=f"Exit code: 0 simulated, 2 the config cannot be simulated, 130 Ctrl-C. Example: {EXAMPLE}",
    )
    top.add_argument("config", metavar="CONFIG", help="a run file with the sections hardware and workload")
    top.add_argument("overrides", nargs="*", metavar="key=value", help="changes one key: run.seed=1 pipeline.mode=serial")
    return top


def main(argv: Sequence[str], report: Callable[[Path], str]) -> int:
    """`report` writes a run directory's report and returns the lines to end with."""
    asked = parser().parse_args(list(argv))
    try:
        config = configs.load(asked.config, asked.overrides)
        run_dir = _fresh(config)
        show = _Show(config)
        lines = (f"simulated on {described(config)}", objection(config), config.arithmetic())
        print("\n".join(filter(None, lines)), flush=True)
        result = simulate(config, run_dir, watch=show)
        show.end()
    except ConfigError as error:
        message = str(error)
        print(message if message.startswith(asked.config) else f"{asked.config}: {message}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"run.dir = {error.filename}: cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return 130
    print(report(run_dir))
    print(told(result))
    print(f"run dir: {run_dir}   (rpipe report {run_dir})")
    return 0


def told(result: Result) -> str:
    retracted = f", {result.retractions} requests taken back for want of KV cache" if result.retractions else ""
    return (
        f"simulated {result.seconds:,.1f} s in {result.wall_s:.1f} s"
        f" ({result.attempt.events:,} events, {result.actions:,} actions{retracted})"
    )


def _fresh(config: Config) -> Path:
    """run.dir, or runs/NAME-simulated-TIMESTAMP; never one that holds a run."""
    if config.run.dir:
        path = Path(config.run.dir)
        if any(path.glob("attempt-*")):
            raise ConfigError(f"run.dir = {path} holds a run; wanted: another run.dir")
        return path
    base = Path("runs") / f"{config.run.name}-simulated-{time.strftime('%Y%m%d-%H%M%S')}"
    return next(p for n in range(1, 1000) if not (p := base if n == 1 else base.with_name(f"{base.name}-{n}")).exists())


class _Show:
    """One line on a terminal, redrawn; nothing elsewhere."""

    def __init__(self, config: Config) -> None:
        self._iterations = config.run.iterations
        self._began = self._shown = time.monotonic()
        self._drawn = False

    def __call__(self, job: SimulatedJob) -> None:
        now = time.monotonic()
        if not sys.stderr.isatty() or now - self._shown < SHOW_EVERY_S:
            return
        self._shown, self._drawn = now, True
        rollout = job.rollout.coordinator
        sys.stderr.write(
            f"\r\x1b[Kiteration {max(rollout.iteration, 0) + 1}/{self._iterations}, {job.kernel.now:,.0f} s simulated"
            f" in {now - self._began:.0f} s, {rollout.groups_deferred} groups deferred"
        )
        sys.stderr.flush()

    def end(self) -> None:
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
