"""How near does each way of overlapping rollout and training come to the bound?

    python -m tests.bench.pipeline [--settings NAME ...] [--rounds 5] [--out runs/bench-pipeline.json]
    python -m tests.bench.pipeline --table                    what --out holds, nothing is run

Four arms, one job each, in turn (every round begins with another arm), SGLang and Megatron for real:

    serial         the rollout ends, then training begins, packed as well as it can be
    cgp            complete groups are trained as they come; every request is in the engine at once (fifo admission)
    hard frontier  the same with the paper's frontier-group dispatch, F_w = U
    soft frontier  the same with ours (policy/admission.py)

A job runs two iterations; the second counts: caches are warm, and the soft frontier knows both stages' rates. Iterations of
all arms are of the same size by expectation only, since a live engine's samples depend on its batches: every time is told for
the setting's median number of tokens. What is done is kept in --out, so that a run that was broken off goes on.

The bound, per setting: an iteration cannot be shorter than
    max(T_train + t_first, T_rollout + T_train / steps)
where T_train and T_rollout are the stages' own times while both run (cgp's trainer-busy and rollout seconds: two stages on two
cores slow each other down), and t_first the earliest first dispatch of any arm. Alone: serial's.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.bench.jobs import run

CONFIG = "tests/bench/pipeline.yaml"
# Samples so hot that a response ends by chance alone: lengths are alike in every round (mean 50; a quarter reach the limit),
# and prompts of 46 tokens make the stages equally long.
EQUAL = [
    "rollout.temperature=8",
    "rollout.max_new_tokens=96",
    "engine.options={json_model_override_args: {eos_token_id: [1, 20]}}",
    "engine.stream_interval_tokens=128",
    "data.train.options={min_terms: 15, max_terms: 17, max_number: 99}",
]
SETTINGS: dict[str, list[str]] = {
    "equal-32": [*EQUAL, "rollout.groups_per_iteration=32"],
    "equal-64": [*EQUAL, "rollout.groups_per_iteration=64"],
    "equal-96": [*EQUAL, "rollout.groups_per_iteration=96"],
    # a forward pass more for the reference, and one for the pinned weights
    "trainer-bound-32": [
        "rollout.groups_per_iteration=32",
        "training.loss.kl_coefficient=0.01",
        "pipeline.old_logprob=pinned",
    ],
    # short prompts: the trainer reads each K times, the engine almost never
    "rollout-bound-32": [
        "rollout.groups_per_iteration=32",
        "data.train.options={min_terms: 2, max_terms: 2, max_number: 99}",
    ],
}
ARMS: dict[str, list[str]] = {
    "serial": ["pipeline.mode=serial", "admission.policy=fifo"],
    "cgp": ["pipeline.mode=fifo", "admission.policy=fifo"],
    "hard frontier": ["pipeline.mode=fifo", "admission.policy=frontier"],
    "soft frontier": ["pipeline.mode=fifo", "admission.policy=soft_frontier"],
}
BEST = "soft frontier"
WITHIN = 1.15  # of the bound, in every setting
OF_SERIAL = {"equal-32": 0.69, "equal-96": 0.62}
WAIT_OF_SERIAL = {"trainer-bound-32": 0.4}
NOT_SLOWER_THAN_CGP = ("rollout-bound-32",)
STREAMED = ("cgp", "hard frontier", "soft frontier")
TIMES = ("rollout_s", "train_busy_s", "rollout_to_train_end_s", "first_dispatch_s")
KEPT = (*TIMES, "waiting_ratio_start", "waiting_ratio_busy", "generated_tokens", "trajectories", "steps")
RESAMPLES = 2_000

Rows = dict[str, list[dict[str, float]]]  # arm -> one row a round


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/bench-pipeline.json"))
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    kept: dict[str, Rows] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    if not arguments.table:
        for name in arguments.settings:
            measure(name, arguments.rounds, kept, arguments.out)
    for name in arguments.settings:
        if complete := whole_rounds(kept.get(name, {})):
            print(table(name, complete), flush=True)
    return 0


def measure(setting: str, rounds: int, kept: dict[str, Rows], out: Path) -> None:
    rows = kept.setdefault(setting, {arm: [] for arm in ARMS})
    for number in range(rounds):
        turn = number % len(ARMS)
        for arm in [*list(ARMS)[turn:], *list(ARMS)[:turn]]:
            if len(rows[arm]) > number:
                continue
            rows[arm].append(one(setting, arm, number))
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(kept, indent=1))
            took_s = rows[arm][-1]["rollout_to_train_end_s"]
            print(f"{setting}, round {number + 1}, {arm}: {took_s:.2f} s", file=sys.stderr, flush=True)


def one(setting: str, arm: str, number: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        report = run(CONFIG, Path(folder) / "run", f"run.seed={number}", *SETTINGS[setting], *ARMS[arm])
    iteration = report["iterations"][-1]
    return {**{key: iteration[key] for key in KEPT}, "wall_s": report["wall_s"]}


def whole_rounds(rows: Rows) -> Rows:
    count = min((len(found) for found in rows.values()), default=0)
    return {arm: found[:count] for arm, found in rows.items()} if count else {}


@dataclass(frozen=True)
class Told:
    """A median and the 95 % interval of it, by resampling rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Told:
        draw = random.Random(0)
        medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
        at = round(0.025 * RESAMPLES)
        return cls(statistics.median(values), medians[at], medians[-1 - at])

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f} .. {self.high:.3f}]"


def scaled(rows: Rows) -> Rows:
    """Times for the setting's median number of generated tokens."""
    typical = statistics.median(row["generated_tokens"] for found in rows.values() for row in found)
    return {
        arm: [{**row, **{k: row[k] * typical / row["generated_tokens"] for k in TIMES}} for row in found]
        for arm, found in rows.items()
    }


def bound(rows: Rows) -> dict[str, float]:
    """Seconds, from scaled rows; see the module's text."""
    middle = {arm: {key: statistics.median(row[key] for row in found) for key in KEPT} for arm, found in rows.items()}
    train_s, rollout_s = middle["cgp"]["train_busy_s"], middle["cgp"]["rollout_s"]
    first_s = min(middle[arm]["first_dispatch_s"] for arm in STREAMED)
    last_s = train_s / middle["cgp"]["steps"]
    return {
        "train alone": middle["serial"]["train_busy_s"],
        "train together": train_s,
        "rollout alone": middle["serial"]["rollout_s"],
        "rollout together": rollout_s,
        "earliest first dispatch": first_s,
        "last step": last_s,
        "bound": max(train_s + first_s, rollout_s + last_s),
    }


def table(setting: str, rows: Rows) -> str:
    count = len(rows["serial"])
    rows = scaled(rows)
    limits = bound(rows)
    tokens = statistics.median(row["generated_tokens"] for found in rows.values() for row in found)
    lines = [
        f"\n{setting}: {count} rounds, {rows['serial'][0]['trajectories']:.0f} trajectories, {tokens:.0f} generated tokens",
        "; ".join(f"{name} {value:.3f} s" for name, value in limits.items()),
        f"{'':14} {'rollout to train end, s':>26} {'of serial':>26} {'of the bound':>26} {'of cgp':>26}",
    ]
    ends = {arm: [row["rollout_to_train_end_s"] for row in found] for arm, found in rows.items()}
    for arm in ARMS:
        of = [Told.of([a / b for a, b in zip(ends[arm], ends[other])]) for other in ("serial", "cgp")]
        of_bound = Told.of([value / limits["bound"] for value in ends[arm]])
        lines.append(f"{arm:14} {Told.of(ends[arm])!s:>26} {of[0]!s:>26} {of_bound!s:>26} {of[1]!s:>26}")
    titles = {
        "first_dispatch_s": "first dispatch, s",
        "rollout_s": "rollout, s",
        "train_busy_s": "trainer busy, s",
        "waiting_ratio_busy": "wait / (wait + compute)",
    }
    lines.append(f"{'':14} " + " ".join(f"{title:>26}" for title in titles.values()))
    for arm in ARMS:
        lines.append(f"{arm:14} " + " ".join(f"{Told.of([row[key] for row in rows[arm]])!s:>26}" for key in titles))
    return "\n".join([*lines, *verdicts(setting, rows, limits["bound"])])


def verdicts(setting: str, rows: Rows, bound_s: float) -> list[str]:
    """Our arm against what was asked of it; a median that misses a goal inside its interval says so."""
    ends = {arm: [row["rollout_to_train_end_s"] for row in found] for arm, found in rows.items()}
    waits = {arm: [row["waiting_ratio_busy"] for row in found] for arm, found in rows.items()}

    def judged(what: str, found: Told, most: float) -> str:
        missed = "missed, inside the interval" if found.low <= most else "missed"
        return f"goal: {BEST} {what} at most {most:.2f}: {found}, {'met' if found.median <= most else missed}"

    lines = [judged("of the bound", Told.of([value / bound_s for value in ends[BEST]]), WITHIN)]
    if setting in OF_SERIAL:
        lines.append(judged("of serial", Told.of([a / b for a, b in zip(ends[BEST], ends["serial"])]), OF_SERIAL[setting]))
    if setting in WAIT_OF_SERIAL:
        part = Told.of([a / b for a, b in zip(waits[BEST], waits["serial"])])
        lines.append(judged("wait ratio, of serial's,", part, WAIT_OF_SERIAL[setting]))
    if setting in NOT_SLOWER_THAN_CGP:
        part = Told.of([a / b for a, b in zip(ends[BEST], ends["cgp"])])
        slower = "slower" if part.low > 1 else "not slower"
        lines.append(f"goal: {BEST} not slower than cgp (95 %): {part}, {slower}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
