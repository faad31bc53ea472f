"""What ends a wait, and what a rank says of itself when all are asked."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from rpipe.runtime.channel import ChannelError
from rpipe.runtime.hangs import ended_a_wait
from tests.job.jobs import config, environment

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from rpipe.runtime.hangs import HangDump
from rpipe.runtime.rundir import RunDir
said = ["waits for Godot", "channel: empty"]
world = SimpleNamespace(rank=0, role="rollout", comm=SimpleNamespace(size=1), waits=lambda: said)
dump = HangDump(RunDir(Path(sys.argv[1]), 1), world)
def hangs():
    print("ready", flush=True)
    time.sleep(60)
def gives_up():
    raise TimeoutError("nobody came")
try:
    (hangs if sys.argv[2] == "asked" else gives_up)()
except TimeoutError as error:
    dump.ask(error)
"""
STARTS = """
import sys
from mpi4py import MPI
from rpipe import train
train.worlds.join = lambda *_: MPI.COMM_WORLD.recv(source=0, tag=9)  # nobody sends that
train.main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "error, wait",
    [
        (TimeoutError("heard nothing from rank 1"), True),
        (ChannelError("8 bytes did not come"), True),
        (RuntimeError("[gloo] Timed out waiting 1000ms for recv"), True),
        (RuntimeError("Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("CUDA out of memory"), False),
        (ValueError("data.jsonl:17: not JSON"), False),
    ],
)
def test_only_waits_that_ended_ask_for_stacks(error, wait):
    assert ended_a_wait(error) is wait


@pytest.mark.parametrize("how", ["asked", "gives up"])
def test_stacks_come_with_what_the_rank_waits_for(tmp_path, how):
    rank = subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path), how], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    path = tmp_path / "attempt-1" / "stacks-rank00000.txt"
    try:
        if how == "asked":
            assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
            rank.send_signal(signal.SIGUSR1)
            end = time.monotonic() + 20
            while "Godot" not in path.read_text() and time.monotonic() < end:
                time.sleep(0.02)
            assert "in hangs" in path.read_text()
        else:
            assert rank.wait(30) == 0
            assert (tmp_path / "attempt-1" / "hang").read_text() == "rank 0: nobody came\n"
            assert "waits no longer: nobody came" in path.read_text() and "in gives_up" in path.read_text()
        assert "rank 0 (rollout):\n    waits for Godot\n    channel: empty" in path.read_text()
    finally:
        rank.kill()
        rank.wait()


def test_a_rank_whose_peer_stops_while_the_world_is_made_ends_itself_and_leaves_its_stacks(tmp_path):
    tree = config(limits={"start_s": 1, "message_s": 1, "heartbeat_s": 0.2, "collective_s": 1})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    done = subprocess.run(
        [sys.executable, "-c", STARTS, str(tmp_path), "--attempt", "1"], env=environment(), cwd=ROOT, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "Timeout (0:00:02)!" in done.stderr and " in main\n" in done.stderr
