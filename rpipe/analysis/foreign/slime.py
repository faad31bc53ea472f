"""What does a slime console log say?

Python dicts behind a name: `perf 3: {...}` twice a rollout (the rollout side's, then the trainer's: merged), `rollout 3:
{...}`, `eval 3: {...}`, `step 12: {...}`; perhaps behind Ray's prefix and colours.

Two traps. The update_weights and save times printed for rollout k happened after the training of k - 1, so they are k - 1's.
And slime's wait_time_ratio counts them (and evaluation) as waiting; the paper's ratio does not, so they are taken off here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from typing import Any

from rpipe.analysis.foreign.lines import NUMBER, Line, Part, Unread, number, parts

HEAD = re.compile(r"(?<![\w/])(perf|rollout|eval|step) (\d+): (?=\{)")
PAIR = re.compile(rf"""['"]([\w./@\-]+)['"]:\s*({NUMBER}|None)\s*(?=[,}}])""")
FRAGMENT = re.compile(r"""['"](?:perf|rollout|train|eval)/[\w./@\-]+['"]:\s*[-\d]""")
BETWEEN = ("update_weights", "save_model", "eval")  # in the trainer's wait, and not waiting for the rollout
Row = dict[str, Any]


def console(found: Iterable[Line], unread: Unread) -> tuple[dict[int, Row], dict[int, Row]]:
    """Rollout -> figures (perf, rollout and eval dicts merged), and optimizer step -> figures."""
    rollouts: dict[int, Row] = {}
    steps: dict[int, Row] = {}
    for part in parts(found, HEAD, FRAGMENT, "parts of figures without their number", unread):
        of = steps if part.head[1] == "step" else rollouts
        of.setdefault(int(part.head[2]), {}).update(_dict(part, unread))
    return rollouts, steps


def _dict(part: Part, unread: Unread) -> Row:
    """The dict that the part begins with; of a torn one the pairs that are whole."""
    closed = part.text.find("}")
    if closed >= 0:
        try:
            body = re.sub(r"(?<![\w'\"])[-+]?(?:nan|inf)(?![\w'\"])", "None", part.text[: closed + 1])
            return {str(key): value for key, value in ast.literal_eval(body).items()}
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            pass
    unread.add(part.number, "torn figures", part.text)
    return {key: None if value == "None" else number(value) for key, value in PAIR.findall(part.text)}


def rows(rollouts: dict[int, Row], steps: dict[int, Row]) -> list[Row]:
    """One row a rollout, under this project's names where they mean the same; `raw` has all."""
    told = [_row(k, raw, rollouts.get(k + 1, {})) for k, raw in sorted(rollouts.items())]
    if told and steps:
        share = len(steps) / len(told)
        for row in told:
            row["steps"] = share if share == int(share) else None
    return told


def _row(k: int, raw: Row, after: Row) -> Row:
    wait = _s(raw, "train_wait")
    train = _s(raw, "train")
    if wait is not None:
        wait = max(0.0, wait - sum(_s(raw, name) or 0.0 for name in BETWEEN))
    whole = wait + train if wait is not None and train is not None else None
    return {
        "iteration": k,
        "rollout_s": _s(raw, "rollout"),
        "train_busy_s": train,
        "rollout_to_train_end_s": whole,
        "waiting_ratio_busy": wait / whole if wait is not None and whole else None,
        "publish_s": _s(after, "update_weights"),
        "checkpoint_s": _s(after, "save_model"),
        "reward_mean": _first(raw, "rollout/raw_reward", "rollout/rewards", "rollout/reward/mean"),
        "response_tokens_mean": _first(raw, "rollout/response_len/mean", "rollout/response_lengths"),
        "tokens_per_gpu_per_s": _first(raw, "perf/tokens_per_gpu_per_sec"),
        "flat_groups": sum(
            v for key, v in raw.items() if key.startswith("rollout/zero_std/count") and isinstance(v, (int, float))
        ),
        "raw": raw,
    }


def evaluations(rollouts: dict[int, Row]) -> list[Row]:
    """The first figure of each eval dict: slime names it after the data set."""
    told: list[Row] = []
    for k, raw in sorted(rollouts.items()):
        scores = [
            v for key, v in raw.items() if key.startswith("eval/") and key.count("/") == 1 and isinstance(v, (int, float))
        ]
        if scores:
            told.append({"iteration": k, "reward_mean": sum(scores) / len(scores), "count": None})
    return told


def _s(raw: Row, name: str) -> float | None:
    return _first(raw, f"perf/{name}_time")


def _first(raw: Row, *keys: str) -> float | None:
    return next((float(raw[key]) for key in keys if isinstance(raw.get(key), (int, float))), None)
