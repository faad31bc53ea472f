"""On what did this run run?

Written to RUN_DIR/environment.json before the ranks start: a run that cannot be repeated can at least be explained.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from rpipe.runtime.rundir import settle


def record() -> dict[str, Any]:
    """Python, versions of every installed distribution, source revision, host, Slurm's facts. JSON-ready."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "source": source_revision(Path(__file__).resolve().parents[2]),
        "slurm": {k: v for k, v in sorted(os.environ.items()) if k.startswith("SLURM_")},
        "packages": packages(),
    }


def packages() -> dict[str, str]:
    """Name -> version of what this interpreter can import."""
    found = {str(dist.metadata["Name"]): dist.version for dist in metadata.distributions() if dist.metadata["Name"]}
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def source_revision(root: Path) -> dict[str, Any]:
    """{"revision": hex or None, "dirty": bool or None}; None where `root` is no git checkout or git is absent."""
    revision = _git(root, "rev-parse", "HEAD")
    status = None if revision is None else _git(root, "status", "--porcelain", "--untracked-files=no")
    return {"revision": revision, "dirty": None if status is None else bool(status)}


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def write(attempt: int, *paths: Path) -> None:
    """One record, to each of `paths`. Raises OSError."""
    text = json.dumps(record(), indent=1) + "\n"
    for path in paths:
        settle(path, text.encode(), attempt)
