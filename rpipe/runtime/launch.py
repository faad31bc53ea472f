"""What does `rpipe train CONFIG` do around the job itself?

config -> can it work here (preflight.py) -> run directory (claimed) -> its records -> the ranks, under watch -> report -> one
line on how it ended. Nothing here imports torch or MPI; the ranks run `rpipe.train`.
"""

from __future__ import annotations

import shutil
import socket
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from rpipe import config as configs
from rpipe.config import Config, ConfigError
from rpipe.data.entry import DataError
from rpipe.runtime import allocation, cause, environment, mpirun, preflight
from rpipe.runtime import attempt as attempt_record
from rpipe.runtime.allocation import Plan
from rpipe.runtime.claim import attempts, claim
from rpipe.runtime.mpirun import LaunchError
from rpipe.runtime.rundir import RunDir
from rpipe.runtime.supervise import Outcome, supervise

AGAIN_S, LAUNCH_WITHIN_S = 10.0, 180.0  # between tries to launch a step, and for all of them

Report = Callable[[Path], str]  # writes RUN_DIR/report.json, returns what a person reads


def train(config_path: str, overrides: Sequence[str], report: Report | None = None, module: str = "rpipe.train") -> int:
    """Run one attempt of a job; returns the exit code: 0 ended, 1 failed, 2 not started, 130 Ctrl-C, 143 SIGTERM, 75 USR2.

    `module` is what every rank runs, as `python -m mpi4py -m MODULE RUN_DIR --attempt N`.
    """
    try:
        config = configs.load(config_path, tuple(overrides))
        functions = preflight.read(config)
        starter = mpirun.find()
        plan = allocation.plan(config, allocation.components()) if starter.kind == "srun" else None
        ranks = config.cluster.rollout_ranks + config.cluster.training_ranks
        preflight.fits(config, [socket.gethostname()] * ranks if plan is None else [seat.node for seat in plan.seats])
        preflight.tried(config, functions)
        with claim(config) as (run, resolved):
            return _attempt(resolved, starter, plan, run, report, module)
    except (ConfigError, DataError, LaunchError) as error:
        print(error, file=sys.stderr)
        return 2


def _attempt(
    config: Config, starter: mpirun.Starter, plan: Plan | None, run: RunDir, report: Report | None, module: str
) -> int:
    try:
        environment.write(run.attempt, run.path / "environment.json", run.attempt_path / "environment.json")
        if plan is not None:
            plan.write(run.attempt, run.seats)
    except OSError as error:
        raise LaunchError(f"run.dir = {run.path}: cannot be written: {error.strerror}") from None
    _say(f"run dir: {run.path}" + (f" (attempt {run.attempt})" if run.attempt > 1 else ""))
    _say(config.arithmetic())
    if plan is not None:
        _say(plan.table())
    began = time.monotonic()
    begun = attempt_record.begin(run)
    outcome = _launched(config, starter, plan, run, module)
    attempt_record.end(run, begun, outcome.code, outcome.cause)
    log = run.attempt_path / "job.log"
    if outcome.code == 1:
        _complain(f"run ended: {outcome.cause}; see {log}")
    elif outcome.code:
        _complain(f"run ended: {outcome.cause} after {time.monotonic() - began:.0f} s; see {log}")
    if report is not None:
        _report(report, run.path, outcome)
    _say(f"run dir: {run.path}")
    return outcome.code


def _launched(config: Config, starter: mpirun.Starter, plan: Plan | None, run: RunDir, module: str) -> Outcome:
    """Run the job; again where Slurm could not launch it: a job that it started again has the step numbers of its last start,
    and what still ends of that on some host (a minute, behind a dead peer) is in the way."""
    log, end = run.attempt_path / "job.log", time.monotonic() + LAUNCH_WITHIN_S
    while True:
        before = log.stat().st_size if log.exists() else 0
        outcome = _job(config, starter, plan, run, module)
        if outcome.code != 1 or plan is None or run.events.exists() or time.monotonic() > end:
            return outcome
        if not cause.not_launched(log.read_bytes()[before:].decode(errors="replace")):
            return outcome
        _complain(
            f"Slurm could not launch the ranks, an earlier step of this job may still be ending: again in {AGAIN_S:.0f} s"
        )
        time.sleep(AGAIN_S)


def _job(config: Config, starter: mpirun.Starter, plan: Plan | None, run: RunDir, module: str) -> Outcome:
    rollout, training = config.cluster.rollout_ranks, config.cluster.training_ranks
    program = [sys.executable, "-u", "-m", "mpi4py", "-m", module, str(run.path), "--attempt", str(run.attempt)]
    command = starter.command(rollout + training, program)
    if plan is not None:
        command = [*starter.srun, *plan.srun_words(program)]
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    env = mpirun.job_environment(config.cluster, uuid.uuid4().hex, columns)
    with starter.environment() as told:
        return supervise(
            command,
            {**env, **told},
            run.attempt_path / "job.log",
            config.limits.stop_s,
            role=lambda rank: "rollout" if rank < rollout else "training",
        )


def _report(report: Report, path: Path, outcome: Outcome) -> None:
    """The summary, where there is anything to sum up."""
    if not any((path / f"attempt-{number}" / "events").is_dir() for number in attempts(path)):
        return
    try:
        _say(report(path).rstrip())
    except Exception as error:  # a report must not hide how the job ended
        if outcome.code and type(error).__name__ == "RunError":
            return  # it ended before there was anything to report; the cause has been told
        _complain(f"no report: {type(error).__name__}: {error}")


def _complain(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _say(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError:  # the reader went (`| head`)
        pass
