"""How does a test get a Slurm cluster of several hosts on one machine?

Real munge, slurmctld and slurmd; every host is a set of Linux namespaces (network, processes, host name, IPC, mounts) with a
process 1 of its own, joined to the others by a bridge in the controller's network namespace. Nothing is made outside of these
namespaces but the folder ROOT: once the hosts' first processes are killed, the kernel takes back the rest. Needs root and
Debian's packages (PACKAGES). Several clusters may run at once.

    with Cluster(Path("/tmp/c1")) as cluster:
        job = cluster.submit("-N3", "script.sh")
        cluster.wait(job, 60)

By hand: python -m tests.slurm.cluster start; ... run ctl sinfo; ... run n2 hostname; ... cut n2; ... stop
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rpipe.runtime.processes import end_with_parent
from tests.slurm.slurm_conf import CONTROLLER, NETWORK, slurm_conf

# as .ci/run installs them; libpmix-dev as Slurm's plug-in opens the unversioned libpmix.so
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "iproute2", "libpmix-dev")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "munged", "ip", "nsenter", "unshare", "mknod")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "PREEMPTED")
START_S = 60.0
FAKE_GPU_MAJOR = 195  # NVIDIA's, without a driver here: Slurm wants character devices, nobody can open these


class ClusterError(RuntimeError):
    """The cluster does not do what the test needs; the message has the logs' ends."""


def lacking() -> str:
    """Why this machine cannot run a cluster, or an empty string."""
    if os.geteuid() != 0:
        return "the test cluster needs root (network namespaces)"
    absent = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    if absent:
        return f"the test cluster needs {', '.join(absent)}: apt-get install --no-install-recommends {' '.join(PACKAGES)}"
    return ""


_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"])


def _die_with_us() -> None:
    end_with_parent(signal.SIGKILL)  # unshare ignores TERM; its own child dies with it


@dataclass
class Cluster:
    """Hosts n1 .. nN with fake GPUs, a controller host "ctl", and partitions "paper" (GPUs) and "ascend" (NPUs) of hosts that
    exist on paper only.

    `root` should be short: unix sockets live below it. `dies_with_us`: the hosts end with this process, however that ends.
    """

    root: Path
    hosts: int = 3
    cpus: int = 16
    memory_mb: int = 64_000
    gpus: int = 8
    paper_hosts: int = 64
    silent_s: int = 30  # a host that says nothing for so long counts as down
    dies_with_us: bool = True
    _inits: dict[str, int] = field(default_factory=dict)  # host -> its process 1, as seen from here

    # ---- life ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def names(self) -> list[str]:
        return [f"n{number}" for number in range(1, self.hosts + 1)]

    def start(self) -> None:
        """From nothing, or from what an earlier start left in `root`. Raises ClusterError with the logs' ends."""
        reason = lacking()
        if reason:
            raise ClusterError(reason)
        self.stop()
        for name in ("etc", "run", "state", "log", "dev", "init", "spool", "tmp"):
            (self.root / name).mkdir(parents=True)
        self._write_files()
        try:
            self._boot_namespace(CONTROLLER)
            for words in ("link add br0 type bridge", f"addr add {NETWORK}.254/24 dev br0", "link set br0 up"):
                self.run(CONTROLLER, ["ip", *words.split()])
            munge = [f"--{k}={self.root}/{v}" for k, v in _MUNGE.items()]
            self.run(CONTROLLER, ["munged", *munge])
            self.run(CONTROLLER, ["slurmctld", "-c"])
            for name in self.names:
                self.boot(name, wait=False)
            self._wait_idle(self.names)
        except (ClusterError, subprocess.SubprocessError) as error:
            logs = self.logs()
            self.stop()
            raise ClusterError(f"the cluster did not come up: {error}\n{logs}") from None

    def stop(self) -> None:
        """End everything and remove `root`; safe at any time, twice, or with nothing there."""
        for file in (self.root / "init").glob("*"):
            pid, _, began = file.read_text().partition(" ")
            if pid and _began(int(pid)) == began:  # else the number is another process's by now
                _end(int(pid))
            file.unlink()
        self._inits.clear()
        shutil.rmtree(self.root, ignore_errors=True)

    def boot(self, host: str, wait: bool = True) -> None:
        """Start a host that is off, and its slurmd."""
        number = int(host[1:])
        self._boot_namespace(host)
        for name in ("spool", "tmp"):
            (self.root / name / host).mkdir(exist_ok=True)
        (self.root / "tmp" / host).chmod(0o1777)
        bridge, here = self._inits[CONTROLLER], self._inits[host]
        _call(["ip", "link", "add", "eth0", "netns", str(here), "type", "veth", "peer", "name", host, "netns", str(bridge)])
        self.run(CONTROLLER, ["ip", "link", "set", host, "master", "br0", "up"])
        for words in (f"addr add {NETWORK}.{number}/24 dev eth0", "link set eth0 up"):
            self.run(host, ["ip", *words.split()])
        self.run(host, ["slurmd", "-N", host])
        if wait:
            self._wait_idle([host])

    # ---- faults ----------------------------------------------------------------------------------------------------

    def cut(self, host: str) -> None:
        """Nothing reaches the host any more, and it reaches nobody; its processes run on."""
        self.run(CONTROLLER, ["ip", "link", "set", host, "down"])

    def restore(self, host: str) -> None:
        self.run(CONTROLLER, ["ip", "link", "set", host, "up"])

    def slow_down(self, host: str, rate: str) -> None:
        """What the host sends is held to `rate`, as tc writes it: 100mbit."""
        self.run(host, ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "256kb", "latency", "400ms"])

    def full_speed(self, host: str) -> None:
        self.run(host, ["tc", "qdisc", "del", "dev", "eth0", "root"])

    def crash(self, host: str) -> None:
        """The host's power fails: its processes end behind a cut link, so its peers get no word. `boot` starts it again."""
        self.cut(host)
        _end(self._inits.pop(host))
        (self.root / "init" / host).unlink()
        subprocess.run(self._enter(CONTROLLER, ["ip", "link", "del", host]), capture_output=True)  # may be gone with its peer
        shutil.rmtree(self.root / "tmp" / host)  # stale PMIx folders would fail new steps

    def restart_controller(self, down_s: float = 0.0) -> None:
        """slurmctld is killed, and started again `down_s` later with its saved state."""
        pid = (self.root / "run/slurmctld.pid").read_text().strip()
        self.run(CONTROLLER, ["kill", "-KILL", pid])
        time.sleep(down_s)
        self.run(CONTROLLER, ["slurmctld"])

    # ---- commands --------------------------------------------------------------------------------------------------

    def run(
        self,
        host: str,
        command: Sequence[str] | str,
        timeout_s: float = 60.0,
        check: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """As if logged in there, in this directory; a string is for sh. Raises ClusterError unless it exits with 0."""
        words = ["sh", "-c", command] if isinstance(command, str) else list(command)
        try:
            done = subprocess.run(
                self._enter(host, words), env=self.environment(env), stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=timeout_s,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise ClusterError(f"{host}: {shlex.join(words)}: no end within {timeout_s:g} s") from None
        if check and done.returncode:
            raise ClusterError(f"{host}: {shlex.join(words)}: exit {done.returncode}: {(done.stderr or done.stdout).strip()}")
        return done

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """This process's own without what would confuse Slurm or MPI."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "OMPI_", "PMIX_", "PRTE_"))}
        return {**kept, "PATH": _PATH, "SLURM_CONF": f"{self.root}/etc/slurm.conf", **(extra or {})}

    def submit(self, *arguments: str, env: Mapping[str, str] | None = None) -> int:
        """sbatch on the controller; the job's number."""
        return int(self.run(CONTROLLER, ["sbatch", "--parsable", *arguments], env=env).stdout.strip().split(";")[0])

    def job(self, number: int) -> dict[str, str]:
        """What `scontrol show job` says of it (of a heterogeneous job: of its first component)."""
        text = self.run(CONTROLLER, ["scontrol", "show", "job", "-o", str(number)]).stdout.splitlines()[0]
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def wait(self, number: int, timeout_s: float, states: Sequence[str] = ENDED) -> str:
        """Until the job is in one of `states`; which. Raises ClusterError, naming the state it was in, after `timeout_s`."""
        end, state, asked = time.monotonic() + timeout_s, "?", None
        while time.monotonic() < end:
            try:
                state = self.job(number)["JobState"]
            except ClusterError as error:
                asked = error  # a controller that is being restarted does not answer
            if state in states:
                return state
            time.sleep(0.2)
        raise ClusterError(f"job {number}: {state} after {timeout_s:g} s, wanted {' or '.join(states)} {asked or ''}")

    def cancel_all(self) -> None:
        """No job, cut link or crashed host may be left for the next test. Raises ClusterError, naming what stays."""
        for name in self.names:
            if name in self._inits:
                self.restore(name)
            else:
                self.boot(name, wait=False)
        end = time.monotonic() + START_S
        while left := self.jobs_left():
            if time.monotonic() > end:
                raise ClusterError(f"{' '.join(left)} after {START_S:g} s, wanted no jobs")
            self.run(CONTROLLER, ["scancel", "--user=root"], check=False)  # again: one that was being requeued is pending now
            time.sleep(0.2)
        for name in self.names:
            self.run(CONTROLLER, ["scontrol", "update", f"nodename={name}", "state=resume"], check=False)
        self._wait_idle(self.names)

    def jobs_left(self) -> list[str]:
        """Every job that is not over, as NUMBER:STATE."""
        return self.run(CONTROLLER, ["squeue", "--noheader", "--format=%i:%T"]).stdout.split()

    def received_bytes(self, host: str) -> int:
        """What came in over the host's interface since it was booted."""
        return self._counter(host, 0)

    def sent_bytes(self, host: str) -> int:
        return self._counter(host, 8)

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        files = sorted((self.root / "log").glob("*.log"))
        return "\n".join(f"--- {f.name}\n" + "\n".join(f.read_text(errors="replace").splitlines()[-15:]) for f in files)

    # ---- how -------------------------------------------------------------------------------------------------------

    def _enter(self, host: str, words: Sequence[str]) -> list[str]:
        if host not in self._inits:
            self._read_inits()
        pid = self._inits.get(host)
        if pid is None:
            raise ClusterError(f"{host} is not running")
        # --wd: entering a mount namespace goes to its root
        spaces = ["--pid", "--net", "--uts", "--ipc", "--mount", f"--wd={os.getcwd()}"]
        return ["nsenter", "--target", str(pid), *spaces, "--", *words]

    def _read_inits(self) -> None:
        for file in (self.root / "init").glob("*"):
            self._inits[file.name] = int(file.read_text().split()[0])

    def _boot_namespace(self, host: str) -> None:
        spaces = ["--pid", "--fork", "--kill-child", "--net", "--uts", "--ipc", "--mount", "--mount-proc"]
        init = [sys.executable, "-IS", str(Path(__file__).with_name("host_init.py")), host, f"{self.root}/etc/hosts"]
        with (self.root / "log" / f"init-{host}.log").open("wb") as log:
            process = subprocess.Popen(
                ["unshare", *spaces, *init], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
                env=self.environment(), start_new_session=True,
                preexec_fn=_die_with_us if self.dies_with_us else None,
            )  # fmt: skip
        assert process.stdout is not None
        if process.stdout.readline() != b"up\n":
            raise ClusterError(f"{host} did not boot: {(self.root / 'log' / f'init-{host}.log').read_text()}")
        pid = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
        (self.root / "init" / host).write_text(f"{pid} {_began(pid)}")
        self._inits[host] = pid

    def _wait_idle(self, hosts: Sequence[str]) -> None:
        end, states = time.monotonic() + START_S, ""
        while time.monotonic() < end:
            ask = ["sinfo", "-h", "-N", "-o", "%t", "-n", ",".join(hosts), "-p", "all"]
            states = self.run(CONTROLLER, ask, check=False).stdout
            if states.split() == ["idle"] * len(hosts):
                return
            time.sleep(0.1)
        raise ClusterError(f"{' '.join(hosts)}: {' '.join(states.split())} after {START_S:g} s, wanted idle")

    def _counter(self, host: str, column: int) -> int:
        line = re.search(r"eth0:(.*)", Path(f"/proc/{self._inits[host]}/net/dev").read_text())
        assert line is not None
        return int(line.group(1).split()[column])

    def _write_files(self) -> None:
        for number in range(self.gpus):
            _call(["mknod", f"{self.root}/dev/gpu{number}", "c", str(FAKE_GPU_MAJOR), str(number)])
        lines = ["127.0.0.1 localhost", f"{NETWORK}.254 {CONTROLLER}"]
        lines += [f"{NETWORK}.{number} {name}" for number, name in enumerate(self.names, 1)]
        etc = self.root / "etc"
        (etc / "hosts").write_text("\n".join(lines) + "\n")
        (etc / "munge.key").write_bytes(os.urandom(1024))
        (etc / "munge.key").chmod(0o600)
        (etc / "slurm.conf").write_text(slurm_conf(self))
        (etc / "gres.conf").write_text(f"Name=gpu File={self.root}/dev/gpu[0-{self.gpus - 1}]\n")


_MUNGE = {
    "key-file": "etc/munge.key", "socket": "run/munge.socket", "pid-file": "run/munged.pid",
    "log-file": "log/munged.log", "seed-file": "run/munged.seed",
}  # fmt: skip


def _began(pid: int) -> str:
    """When a process began, in the kernel's ticks; empty where there is none: with it a pid names one process for good."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if words[0] in "ZX" else words[19]


def _end(pid: int) -> None:
    """SIGKILL to a namespace's process 1: the kernel ends everything in it; returns when that is done."""
    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + 20
    while _began(pid):
        if time.monotonic() > end:
            raise ClusterError(f"process {pid} does not end")
        time.sleep(0.01)


def _call(command: Sequence[str]) -> None:
    done = subprocess.run(list(command), capture_output=True, text=True, env={**os.environ, "PATH": _PATH})
    if done.returncode:
        raise ClusterError(f"{shlex.join(command)}: {done.stderr.strip()}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.slurm.cluster", description="a Slurm cluster on this machine")
    parser.add_argument("--root", type=Path, default=Path("/tmp/rpipe-slurm"), help="its folder (%(default)s)")
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("what", choices=["start", "stop", "run", "cut", "restore", "crash", "boot", "logs"])
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="run HOST COMMAND...; cut, restore, crash, boot HOST")
    asked = parser.parse_args()
    cluster = Cluster(asked.root, hosts=asked.hosts, dies_with_us=False)
    if asked.what in ("start", "stop"):
        getattr(cluster, asked.what)()
    elif asked.what == "run":
        os.execvpe("nsenter", cluster._enter(asked.rest[0], asked.rest[1:]), cluster.environment())
    elif asked.what == "logs":
        print(cluster.logs())
    else:
        cluster._read_inits()
        getattr(cluster, asked.what)(asked.rest[0])
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ClusterError as error:
        sys.exit(str(error))
