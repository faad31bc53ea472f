"""Is the test cluster what the other tests take it for?"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.slurm.cluster import Cluster

HELLO = """
from mpi4py import MPI
import os, socket
world = MPI.COMM_WORLD
assert world.allreduce(1) == world.size == int(os.environ["SLURM_NTASKS"])
rows = world.gather((world.rank, socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES")))
if world.rank == 0: print(*rows, sep=chr(10))
"""


def batch(folder: Path, body: str) -> str:
    path = folder / "script.sh"
    path.write_text(f"#!/bin/bash\n{body}\n")
    return str(path)


def test_mpi_ranks_meet_across_hosts_over_the_bridge(cluster: Cluster, tmp_path: Path) -> None:
    before = [cluster.received_bytes(name) for name in cluster.names]
    command = f"srun --mpi=pmix {sys.executable} -m mpi4py -c '{HELLO}'"
    script = batch(tmp_path, f"export OMPI_ALLOW_RUN_AS_ROOT=1\n{command}")
    job = cluster.submit("-N3", "--ntasks-per-node=2", "--gpus-per-node=8", "-o", f"{tmp_path}/out", script)
    assert cluster.wait(job, 90) == "COMPLETED", (tmp_path / "out").read_text()
    rows = (tmp_path / "out").read_text().splitlines()
    every = "0,1,2,3,4,5,6,7"
    assert rows == [str((rank, f"n{rank // 2 + 1}", every)) for rank in range(6)]
    assert all(cluster.received_bytes(name) > was + 1000 for name, was in zip(cluster.names, before))


def test_a_full_size_job_is_checked_on_paper(cluster: Cluster, tmp_path: Path) -> None:
    script = batch(tmp_path, "true")
    ask = ["sbatch", "--test-only", "-p", "paper", "--gpus-per-node=8"]
    assert cluster.run("ctl", [*ask, "-N64", script]).returncode == 0
    assert cluster.run("ctl", [*ask, "-N65", script], check=False).returncode == 1


def test_a_cut_host_is_out_of_reach_until_its_link_is_restored(cluster: Cluster) -> None:
    ping = ["bash", "-c", "exec 3<>/dev/tcp/n2/6818"]  # slurmd's port

    def reached() -> bool:
        return cluster.run("n1", ["timeout", "2", *ping], check=False).returncode == 0

    assert reached()
    cluster.cut("n2")
    assert not reached()
    cluster.restore("n2")
    end = time.monotonic() + 30  # the neighbour has to be found anew
    while not reached():
        assert time.monotonic() < end


def test_a_crashed_host_takes_all_its_processes_along_and_boots_again(cluster: Cluster) -> None:
    cluster.run("n3", "sleep 1234567 >/dev/null 2>&1 &")
    found = ["pgrep", "-f", "sleep 1234567"]
    assert subprocess.run(found, capture_output=True).returncode == 0
    cluster.crash("n3")
    assert subprocess.run(found, capture_output=True).returncode == 1
    cluster.boot("n3")
    assert cluster.run("n3", "hostname").stdout == "n3\n"


def test_what_a_failed_test_leaves_is_gone_before_the_next(cluster: Cluster, tmp_path: Path) -> None:
    """A job that ignores TERM, one that is being requeued, one that waits, and a cut link."""
    stubborn = batch(tmp_path, "trap '' TERM\nwhile :; do sleep 0.2; done")
    ask = ["--requeue", "-o", "/dev/null"]
    runs, requeued = (cluster.submit(*ask, "-N1", "--exclusive", stubborn) for _ in range(2))
    for job in (runs, requeued):
        cluster.wait(job, 30, ["RUNNING"])
    waits = cluster.submit(*ask, "-N3", "--exclusive", stubborn)
    cluster.run("ctl", ["scontrol", "requeue", str(requeued)])
    cluster.cut("n3")
    cluster.cancel_all()
    assert not cluster.jobs_left()
    assert {cluster.job(job)["JobState"] for job in (runs, requeued, waits)} == {"CANCELLED"}


def test_start_begins_anew_and_stop_leaves_nothing() -> None:
    root = Path(f"/tmp/rpipe-again-{os.getpid()}")
    cluster = Cluster(root, hosts=1, paper_hosts=1)
    cluster.start()
    first = cluster._inits["n1"]
    again = Cluster(root, hosts=1, paper_hosts=1)  # as another process would
    again.start()
    assert not Path(f"/proc/{first}").exists()
    again.stop()
    again.stop()
    assert not root.exists()
    assert subprocess.run(["pgrep", "-f", str(root)], capture_output=True).returncode == 1
