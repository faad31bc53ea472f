"""What people's reward functions do wrong, one each. Imported by reward workers only."""

import os
import random
import socket
import subprocess
import sys
import time


def length(prompt, response, answer, metadata):
    return len(response)


def sees(prompt, response, answer, metadata):
    return float([prompt, response, answer, metadata["level"], metadata["response_tokens"]] == ["1+1=", "two", "2", 7, 3])


def hang(prompt, response, answer, metadata):
    while True:
        time.sleep(60)


def hang_deaf(prompt, response, answer, metadata):
    import signal

    for number in range(1, 65):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
    while True:
        pass


def hog(prompt, response, answer, metadata):
    held = []
    while True:
        held.append(bytearray(64 << 20))


def recurse(prompt, response, answer, metadata):
    return recurse(prompt, response, answer, metadata)


def leave(prompt, response, answer, metadata):
    os._exit(3)


def quit_politely(prompt, response, answer, metadata):
    sys.exit("no")


def crash(prompt, response, answer, metadata):
    import ctypes

    ctypes.string_at(0)


def fails(prompt, response, answer, metadata):
    raise ValueError("first line\nsecond line")


def nan(prompt, response, answer, metadata):
    return float("nan")


def words(prompt, response, answer, metadata):
    return "good"


def prints(prompt, response, answer, metadata):
    print("noise", flush=True)
    os.write(1, b"[1, 2, 3]\n")
    return 1.0


def dice(prompt, response, answer, metadata):
    return random.random()


def secret(prompt, response, answer, metadata):
    return float(any("SECRET" in name or name.startswith(("OMPI_", "PMIX_", "PMI_")) for name in os.environ))


def heavy(prompt, response, answer, metadata):
    return float(any(name in sys.modules for name in ("torch", "mpi4py", "transformers", "pydantic")))


def telephone(prompt, response, answer, metadata):
    host, port = answer.split(":")
    with socket.create_connection((host, int(port)), timeout=2):
        return 1.0


def leaves_a_child(prompt, response, answer, metadata):
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(300) # {answer}"], start_new_session=True)
    if response == "and hangs":
        time.sleep(300)
    if response == "and dies":
        os._exit(1)
    return float(child.poll() is None)


def forges(prompt, response, answer, metadata):
    """What `response` says, written into the worker's pipe before the worker's own reply."""
    import stat

    for number in range(3, 64):
        try:
            if stat.S_ISFIFO(os.fstat(number).st_mode) or stat.S_ISSOCK(os.fstat(number).st_mode):
                os.write(number, response.encode() + b"\n")
        except OSError:
            pass
    time.sleep(60)
