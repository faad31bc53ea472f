"""What runs inside one reward worker?

`python -m rpipe.rollout.reward_worker`, started by `rewards.RewardPool`. Lines of JSON on stdin and stdout: a hello with
limits and function names, answered by what could not be loaded; then one line a call, answered in order. What functions
print goes to the log. Only the standard library is imported before a function asks for more: start-up is 0.05 s.

Where the kernel allows it without root, the worker lives in its own user, network and process namespaces: it reaches no
network, and when it ends so does everything it started.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from rpipe.rollout import reward_functions

_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_PR_SET_PDEATHSIG = 1
_MOST_CHARACTERS = 300  # of an error
_MOST_FILES = 256
_MOST_FILE_BYTES = 64 << 20


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):  # srun brings them to all: a score would be lost
        signal.signal(number, signal.SIG_IGN)
    inbox, outbox = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    parent = os.getppid()
    isolation = _isolate(inbox, outbox)
    _die_with_parent(parent)
    with os.fdopen(inbox, "rb") as requests, os.fdopen(outbox, "wb", buffering=0) as replies:
        _serve(requests, replies, isolation)
    os._exit(0)  # a function's threads are not waited for


def _serve(requests: BinaryIO, replies: Any, isolation: str) -> None:
    hello = json.loads(requests.readline() or b"null")
    if hello is None:
        return
    _limit(hello["memory_bytes"])
    functions: dict[str, Callable[..., Any]] = {}
    problems = {}
    for name in hello["functions"]:
        try:
            functions[name] = reward_functions.load(name)
        except ValueError as refused:
            problems[name] = _line(str(refused))
    _send(replies, {"isolation": isolation, "problems": problems})
    for line in requests:
        call, name, arguments, wants_text = json.loads(line)
        started = time.monotonic()
        value, error, last = _call(functions, name, arguments, hello["seed"], wants_text)
        reward, text = (0.0, value) if wants_text else (value, None)
        _send(replies, [call, reward or 0.0, started, time.monotonic(), error, last, text])
        if last:
            return


def _call(
    functions: dict[str, Callable[..., Any]], name: str, arguments: list[Any], seed: int, wants_text: bool
) -> tuple[float | str | None, str, bool]:
    """(value, error, whether this worker must go). A reward that is no finite number is an error, an answer that is no text."""
    try:
        if name not in functions:
            functions[name] = reward_functions.load(name)
        if name not in reward_functions.CHEAP:
            random.seed(f"{seed} {arguments[0]}{arguments[1]}")  # the same score whichever worker, whatever came before
        value = functions[name](*arguments)
        reward = 0.0 if wants_text else float(value)
    except MemoryError:
        return None, f"reward {name}: MemoryError: over reward.memory_bytes", True
    except BaseException as error:  # SystemExit and KeyboardInterrupt are a function's fault too
        return None, _line(f"reward {name}: {type(error).__name__}: {error}"), False
    if wants_text:
        if value is None or (isinstance(value, str) and value):
            return value, "", False
        return None, _line(f"reward {name} returned {value!r}; wanted: a text, or None where the trajectory is done"), False
    if not abs(reward) < reward_functions.LARGEST:  # NaN, too
        return None, f"reward {name} returned {reward}; wanted: a finite number", False
    return reward, "", False


def _line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:_MOST_CHARACTERS]


def _send(replies: Any, tree: Any) -> None:
    data = json.dumps(tree).encode() + b"\n"
    while data:
        data = data[replies.write(data) :]


def _limit(memory_bytes: int) -> None:
    for what, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_NOFILE, _MOST_FILES),
        (resource.RLIMIT_FSIZE, _MOST_FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def _isolate(inbox: int, outbox: int) -> str:
    """Go on in new namespaces where that is allowed; says what was reached. The old process stays to reap the new one."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_NEWUSER | _NEWNET | _NEWPID):
        reason = os.strerror(ctypes.get_errno())
        return f"none: functions can use the network, and what they start may outlive them (unshare: {reason})"
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        try:
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        except OSError:  # then our own files still open: the kernel compares the outer ids
            pass
    child = os.fork()  # the first process of the new process namespace: what it starts ends with it
    if child:
        _die_with_parent(os.getppid())
        os.write(outbox, b"%d\n" % child)
        os.close(inbox)
        os.close(outbox)
        status = os.waitpid(child, 0)[1]
        if os.WIFSIGNALED(status):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.kill(os.getpid(), os.WTERMSIG(status))
        os._exit(os.WEXITSTATUS(status))
    return "network off; a worker's processes end with it"


def _die_with_parent(parent: int) -> None:
    """SIGKILL when the parent's thread ends. After unshare: changing credentials clears it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getpid() != 1 and os.getppid() != parent:  # process 1 of a namespace sees no parent; its stdin ends instead
        os._exit(1)


if __name__ == "__main__":
    main()
