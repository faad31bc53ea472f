"""What ends a wait, and what a rank says of itself when all are asked."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rpipe.runtime.channel import ChannelError
from rpipe.runtime.hangs import ended_a_wait

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
