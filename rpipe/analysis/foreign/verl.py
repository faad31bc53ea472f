"""What does a verl console log, or its rollout dump, say?

Console: `step:N - key:value - key:value ...`, perhaps behind `(TaskRunner pid=1)` and colours; values may be np.float64(x).
Older versions write timing/x where newer ones write timing_s/x. Dump: a folder of {step}.jsonl, or one file, a response a line
with `input, output, gts, score, step, uid`.

verl runs generation and training one after the other on the same devices: its step is rollout-to-train-end, and what is
not training counts as waiting, as in the paper's second definition.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rpipe.analysis.foreign.lines import NUMBER, Line, Part, Unread, number, parts

STEP = re.compile(r"(?<![A-Za-z_/])step:(\d+)(?= - )")
PAIR = re.compile(rf"^([A-Za-z_][\w./@ \-]*):({NUMBER})(.*)$")
FRAGMENT = re.compile(rf" - [A-Za-z_]+/[\w./@\-]+:{NUMBER}")
TRAINING = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
Row = dict[str, Any]


def console(found: Iterable[Line], unread: Unread) -> dict[int, Row]:
    """Step -> every figure that was read, under verl's own names. A step printed again (after a resume) replaces the first."""
    steps: dict[int, Row] = {}
    for part in parts(found, STEP, FRAGMENT, "parts of a step without its number", unread):
        row = _pairs(part, unread)
        if row:
            steps[int(part.head[1])] = row
    return steps


def _pairs(part: Part, unread: Unread) -> Row:
    row: Row = {}
    pairs = part.text.split(" - ")[1:]
    for index, pair in enumerate(pairs, 1):
        found = PAIR.match(pair)
        torn = part.cut and index == len(pairs)
        if found is None or torn:
            unread.add(part.number, "torn figures", pair)
        elif found[3].strip():
            unread.add(part.number, "figures run into other text", pair)
        else:
            row[found[1]] = number(found[2])
    return row


def rows(steps: dict[int, Row]) -> list[Row]:
    """Under this project's names, where they mean the same; `raw` has all."""
    return [_row(step, raw) for step, raw in sorted(steps.items())]


def _row(step: int, raw: Row) -> Row:
    def timing(name: str) -> float | None:
        return _first(raw, f"timing_s/{name}", f"timing/{name}")

    training = [s for name in TRAINING if (s := timing(name)) is not None]
    whole = timing("step") if timing("step") is not None else raw.get("perf/time_per_step")
    busy = sum(training) if training else None
    return {
        "iteration": step,
        "rollout_s": timing("gen"),
        "train_busy_s": busy,
        "rollout_to_train_end_s": whole,
        "waiting_ratio_busy": 1 - busy / whole if busy is not None and whole else None,
        "reward_s": timing("reward"),
        "tool_s": raw.get("timing_s/agent_loop/tool_calls/mean"),
        "reward_mean": _first(raw, "critic/rewards/mean", "critic/score/mean", "reward/mean"),
        "response_tokens_mean": raw.get("response_length/mean"),
        "turns_mean": raw.get("num_turns/mean"),
        "tokens": raw.get("perf/total_num_tokens"),
        "raw": raw,
    }


def evaluations(steps: dict[int, Row]) -> list[Row]:
    """Steps with validation scores: val-core/..., else val/...; their mean where there are several."""
    told: list[Row] = []
    for step, raw in sorted(steps.items()):
        for prefix in ("val-core/", "val/"):
            scores = [value for key, value in raw.items() if key.startswith(prefix) and value is not None]
            if scores:
                told.append({"iteration": step, "reward_mean": sum(scores) / len(scores), "count": None})
                break
    return told


def _first(raw: Row, *keys: str) -> float | None:
    return next((raw[key] for key in keys if raw.get(key) is not None), None)


# ---- rollout dumps


def dump(paths: Iterable[Path], read: Any, unread: Unread) -> list[Row]:
    """One row a step. `read` gives a file's lines; a file named 12.jsonl is of step 12 where its records do not say."""
    scores: dict[int, list[float]] = {}
    groups: dict[int, dict[str, list[float]]] = {}
    characters: dict[int, int] = {}
    for path in paths:
        named = int(path.stem) if path.stem.isdigit() else 0
        for line in read(path):
            if not line.text.strip():
                continue
            try:
                record = json.loads(line.text)
                step, score, output = int(record.get("step", named)), float(record["score"]), str(record["output"])
            except (ValueError, KeyError, TypeError, AttributeError):
                unread.add(line.number, f"damaged records of {path.name}", line.text)
                continue
            scores.setdefault(step, []).append(score)
            characters[step] = characters.get(step, 0) + len(output)
            prompt = str(record.get("uid") or record.get("input", ""))
            groups.setdefault(step, {}).setdefault(prompt, []).append(score)
    return [
        {
            "iteration": step,
            "trajectories": len(found),
            "reward_mean": sum(found) / len(found),
            "groups_trained": len(groups[step]),
            "mixed_groups": sum(min(group) != max(group) for group in groups[step].values()),
            "response_characters_mean": characters[step] / len(found),
        }
        for step, found in sorted(scores.items())
    ]
