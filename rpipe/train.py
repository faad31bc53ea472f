"""START HERE: one rank of the job. `rpipe train CONFIG` (or launch.sh) starts N of them under MPI.

    launch            runtime/launch.py    config checked, what it names looked at (runtime/preflight.py), run dir made, mpirun
                                           or srun started
    split             runtime/world.py     COMM_WORLD -> rollout ranks | training ranks; rank 0 of each coordinates
    assemble          rollout/setup.py, training/setup.py: data, model, engines, trainer, the channel between the roles
    rollout           rollout/driver.py    asks control/rollout.py what to do; engines (rollout/worker.py) generate,
                                           rewards score, complete groups leave over runtime/channel.py
    training          training/driver.py   asks control/training.py what to do; training/worker.py accumulates groups as
                                           they come, steps every U, publishes weights after all R
    end               a quiet barrier; runtime/launch.py writes report.json from the event log

The loop itself is in control/: two state machines without IO, events in, commands out. A role returns why it ended:
"" normally, STOPPED when asked to stop, else what went wrong.

One iteration: weights of version v on all engines -> R groups sampled under v -> trained in S steps -> version v + 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

from rpipe import config as configuration
from rpipe.config import Config, Limits
from rpipe.core.eventlog import EventLog
from rpipe.runtime import allocation, binding, network
from rpipe.runtime import device as devices
from rpipe.runtime import world as worlds
from rpipe.runtime.hangs import HangDump
from rpipe.runtime.mailbox import Mailbox
from rpipe.runtime.rundir import RunDir
from rpipe.runtime.stop import STOPPED, listen
from rpipe.runtime.supervise import STOPPED_FILE
from rpipe.runtime.world import World

ABORT_S = 10  # for MPI to end all ranks once one has failed; then this one ends by itself


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="one rank of a training job; started by `rpipe train CONFIG`")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    arguments = parser.parse_args(argv)
    stop = listen()
    run_dir = RunDir(arguments.run_dir.resolve(), arguments.attempt)
    rank, dump = -1, None
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until there is something to tell
    try:
        config = configuration.load(run_dir.config)
        # A peer that stops from now on would be waited for inside MPI. Wound up again by the mailbox.
        faulthandler.dump_traceback_later(stuck_s(config.limits), exit=True)
        world = worlds.join(config.cluster.rollout_ranks, config.cluster.training_ranks, config.limits.start_s, stop)
        rank, dump = world.rank, HangDump(run_dir, world)
        network.settle(network.choose(config.cluster.interface, world.host, world.hosts))
        allocation.check(run_dir.seats, world.hosts)
        if config.cluster.bind == "numa":
            binding.bind(rank, world.hosts, config.engine.tp if world.role == "rollout" else 1)
        return run(config, world, run_dir)
    except BaseException as error:  # torch's CheckpointException is none of Exception's
        fail(run_dir, rank, error)
        if dump is not None:
            dump.ask(error)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(ABORT_S)  # where the starter is cut off, too, to abort would wait for it
        raise  # mpi4py's runner aborts the whole job


def stuck_s(limits: Limits) -> float:
    """How long a rank may be in one call: more than any wait that ends by itself."""
    return max(limits.message_s, limits.start_s) + limits.collective_s


def run(config: Config, world: World, run_dir: RunDir) -> int:
    """This rank's role, from the first message to the last barrier."""
    from rpipe.rollout import setup as rollout
    from rpipe.training import setup as training

    limits = config.limits
    mailbox = Mailbox(world.comm, heartbeat_peers(config, world), limits.heartbeat_s, limits.start_s, stuck_s(limits))
    with EventLog(run_dir.events, world.rank) as log:
        about = {"role": world.role, "host": world.host, "attempt": run_dir.attempt, "pid": os.getpid()}
        log.note(world.clock(), "JobStarted", **about, unix_s=time.time())  # places attempts on one calendar
        log.note(world.clock(), "ClockOffset", offset_s=world.clock.offset_s)
        if world.role == "training":
            reason = training.run(config, world, run_dir, log, mailbox)
        else:
            reason = asyncio.run(rollout.run(config, world, run_dir, log, mailbox))
        log.note(world.clock(), "JobEnded", reason=reason, peak_bytes=devices.peak_bytes(config.cluster.accelerator))
    worlds.quiet_barrier(world.comm, config.limits.message_s, "all ranks to end", mailbox)
    reason = next(filter(None, world.comm.allgather(reason)), "")
    if reason == STOPPED and world.rank == 0:
        (run_dir.attempt_path / STOPPED_FILE).touch()
    elif reason and reason != STOPPED:
        raise RuntimeError(reason)
    return 0


def heartbeat_peers(config: Config, world: World) -> tuple[int, ...]:
    """Whom this rank tells that it lives, and who must tell it: a coordinator the other one and its ranks, these theirs."""
    if not world.is_coordinator:
        return (0 if world.role == "rollout" else world.training_coordinator,)
    if world.role == "rollout":
        return (*range(1, config.cluster.rollout_ranks), world.training_coordinator)
    return (0, *range(world.training_coordinator + 1, world.training_coordinator + config.cluster.training_ranks))


def fail(run_dir: RunDir, rank: int, error: BaseException) -> None:
    """Leave one line for whoever started the job."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if not isinstance(error, (RuntimeError, ValueError, OSError)):
        reason = f"{type(error).__name__}: {reason}"
    print(f"rank {rank}: {reason}", file=sys.stderr, flush=True)
    path = run_dir.failure(max(rank, 0))
    with contextlib.suppress(OSError):  # a full disk: the launcher has read the line above
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(reason + "\n")


if __name__ == "__main__":
    worlds.end(main())
