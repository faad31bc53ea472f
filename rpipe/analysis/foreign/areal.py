"""What do AReaL's session records say?

`sessions-r{rank}.jsonl`, a trajectory a line: submit_ts, finalized_ts, total_s, generate_s, reward_s, toolcall_s. AReaL trains
asynchronously and its sessions name no step: what they tell is where a trajectory's time went, not an iteration's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rpipe.analysis.foreign.lines import Unread

PHASES = {"generate_s": "generating", "reward_s": "rewards", "toolcall_s": "tools"}
BIN_S = 60.0
Row = dict[str, Any]


def sessions(paths: Iterable[Path], read: Any, unread: Unread) -> tuple[list[Row], dict[str, float]]:
    """One row a minute of submission, and seconds by phase over all sessions."""
    bins: dict[int, list[Row]] = {}
    spent = dict.fromkeys([*PHASES.values(), "between"], 0.0)
    for path in paths:
        for line in read(path):
            if not line.text.strip():
                continue
            try:
                record = json.loads(line.text)
                submitted, total_s = float(record["submit_ts"]), float(record["total_s"])
                phases = {name: float(record.get(key) or 0.0) for key, name in PHASES.items()}
            except (ValueError, KeyError, TypeError, AttributeError):
                unread.add(line.number, f"damaged records of {path.name}", line.text)
                continue
            bins.setdefault(int(submitted // BIN_S), []).append({"total_s": total_s, **phases})
            for name, taken in phases.items():
                spent[name] += taken
            spent["between"] += max(0.0, total_s - sum(phases.values()))
    begin = min(bins, default=0)
    told = [
        {
            "iteration": minute - begin,
            "trajectories": len(found),
            "trajectory_s_mean": sum(row["total_s"] for row in found) / len(found),
            "generating_s_mean": sum(row["generating"] for row in found) / len(found),
            "reward_s": sum(row["rewards"] for row in found) / len(found),
            "tool_s": sum(row["tools"] for row in found) / len(found),
        }
        for minute, found in sorted(bins.items())
    ]
    return told, {name: taken for name, taken in spent.items() if taken}
