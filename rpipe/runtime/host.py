"""How much memory has this host for the processes of a job? Without torch: the launcher asks, too."""

from __future__ import annotations

import os

LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of this cgroup: version 2, version 1


def memory_bytes() -> int:
    """The lesser of the host's memory and its cgroup's limit."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in LIMITS:
        try:
            with open(name) as file:
                return min(found, int(file.read()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return found
