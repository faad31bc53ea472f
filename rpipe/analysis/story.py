"""What touched one trajectory, one group or one optimizer step?

`12.5` is trajectory 5 of group 12, `12` the group, `s7` the step. The log is read twice: once to learn which micro-batches and
groups belong together, once to tell every record that names one of them, also of kinds that this version does not know.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rpipe.analysis.collect import fields
from rpipe.analysis.run import Record, RunError, attempts, read


@dataclass(frozen=True, slots=True)
class Target:
    """Exactly one of: a step; a group, with a sample for one of its trajectories."""

    step: int | None = None
    group: int | None = None
    sample: int | None = None

    @classmethod
    def parse(cls, text: str) -> Target:
        found = re.fullmatch(r"s(\d+)|(-?\d+)(?:\.(\d+))?", text)
        if found is None:
            raise RunError(f'"{text}": not an id (wanted: 12.5 for a trajectory, 12 for a group, s7 for a step)')
        step, group, sample = (None if part is None else int(part) for part in found.groups())
        return cls(step, group, sample)


@dataclass(slots=True)
class Related:
    """What belongs to the target in one attempt."""

    groups: set[int] = field(default_factory=set)
    steps: set[int] = field(default_factory=set)
    batches: set[tuple[int, int]] = field(default_factory=set)  # (replica, micro-batch)
    versions: set[int] = field(default_factory=set)  # that came of it


@dataclass(frozen=True, slots=True)
class Line:
    attempt: int
    record: Record
    text: str


def story(run: Path, target: Target) -> list[Line]:
    """Every record that touched `target`, in order. Raises RunError where there is none."""
    told: list[Line] = []
    for directory in attempts(run):
        related = _related(directory, target)
        for record in read(directory):
            if _touches(record, target, related):
                told.append(Line(int(directory.name[8:]), record, describe(record, target)))
    if not any(line.record["kind"] not in ("WeightsPublished", "BeginStep") for line in told):
        raise RunError(f"{run}: nothing in the log touches it")
    return told


def _in_slices(record: Record, target: Target) -> bool:
    for part in record["slices"]:
        if part["group"] == target.group and (target.sample is None or target.sample in part["samples"]):
            return True
    return False


def _related(directory: Path, target: Target) -> Related:
    found = Related(
        groups=set() if target.group is None else {target.group}, steps=set() if target.step is None else {target.step}
    )
    iterations: dict[int, int] = {}  # step -> iteration
    for r in read(directory):
        kind = r["kind"]
        if kind == "BeginStep":
            iterations[r["step"]] = r["iteration"]
        elif kind == "TrainMicroBatch" and (r["step"] == target.step or _in_slices(r, target)):
            found.steps.add(r["step"])
            found.batches.add((r["replica"], r["micro_batch"]))
            if target.step is not None:
                found.groups.update(part["group"] for part in r["slices"])
    found.versions = {iterations[step] + 1 for step in found.steps if step in iterations}
    return found


def _touches(r: Record, target: Target, related: Related) -> bool:
    kind = r["kind"]
    if kind in ("TrainMicroBatch", "MicroBatchDone"):
        return (r["replica"], r["micro_batch"]) in related.batches
    if "step" in r:
        return r["step"] in related.steps
    if kind == "WeightsPublished":
        return r["version"] in related.versions
    trajectories = [tuple(r["trajectory"])] if "trajectory" in r else [tuple(p["trajectory"]) for p in r.get("prefixes", ())]
    if trajectories:
        if target.step is not None:
            return False  # its groups are told, not each of their turns
        return any(group in related.groups and target.sample in (None, sample) for group, sample in trajectories)
    if "groups" in r and isinstance(r["groups"], list):
        named = {g["group"] if isinstance(g, dict) else g for g in r["groups"]}
        return target.step is None and bool(named & related.groups)
    if target.step is not None and kind in ("ServingComplete", "GroupReceived"):
        return False
    return r.get("group") in related.groups


# ---- one record in words


def describe(record: Record, target: Target) -> str:
    """What a record says of the target; the fields of a kind that is not known here."""
    tell = _WORDS.get(record["kind"])
    try:
        return tell(record, target) if tell is not None else fields(record)
    except (KeyError, TypeError, ValueError):  # a later version's form of a kind
        return fields(record)


def _requested(r: Record, target: Target) -> str:
    order = next((i for i, g in enumerate(r["groups"]) if g["group"] == target.group), None)
    kept = next((g.get("rewards") for g in r["groups"] if g["group"] == target.group), None)
    text = f"asked for in {'iteration' if r['purpose'] == 'train' else 'evaluation'} {r['iteration']}, order {order}"
    return (
        text
        + f" of {len(r['groups'])}, under weights of version {r['version']}"
        + (", finished by an attempt before" if kept else "")
    )


def _turn(r: Record, _: Target) -> str:
    took, queue_s = r["t"] - r["first_token_t"], r["first_token_t"] - r["started_t"]
    pace = f", {took / r['output_tokens'] * 1000:.3g} ms each" if r["output_tokens"] else ""
    return (
        f"{r['output_tokens']:,} tokens in {took:.3f} s{pace} on engine {r['engine']}, after {queue_s:.3f} s for the first;"
        f" {r['finish']}; {r['cached_tokens']:,} prompt tokens were cached"
    )


def _scored(r: Record, _: Target) -> str:
    return f"reward {r['reward']:g} in {r['t'] - r['started_t']:.3f} s" + (f": {r['error']}" if r["error"] else "")


def _sent(r: Record, target: Target) -> str:
    if target.sample is not None and target.sample < len(r["rewards"]):
        return f"complete: advantage {r['advantages'][target.sample]:.3g} of this trajectory; sent to the trainer"
    mean = sum(r["rewards"]) / max(1, len(r["rewards"]))
    return f"complete: {len(r['rewards'])} rewards, mean {mean:.3g}; sent to the trainer"


def _micro_batch(r: Record, target: Target) -> str:
    count = sum(len(part["samples"]) for part in r["slices"])
    where = f"micro-batch {r['micro_batch']} of step {r['step']} to replica {r['replica']}"
    return f"{where}: {count} trajectories, {r['tokens']:,} tokens"


def _step_done(r: Record, _: Target) -> str:
    said = f"step {r['step']} done in {r['t'] - r['started_t']:.3f} s"
    if r["skipped"]:
        said += "; SKIPPED: a gradient was not finite"
    figures = [f"{name} {r[key]:.4g}" for key, name in (("loss", "loss"), ("grad_norm", "gradient norm")) if r[key] is not None]
    return "; ".join([said, *([", ".join(figures)] if figures else [])])  # a simulated step has none


def _lost(r: Record, target: Target) -> str:
    kept = sum(
        p["output_tokens"]
        for p in r["prefixes"]
        if p["trajectory"][0] == target.group and target.sample in (None, p["trajectory"][1])
    )
    return f"engine {r['engine']} was lost ({r['reason']}); {kept:,} tokens are kept"


def _published(r: Record, _: Target) -> str:
    return f"the weights that came of it, version {r['version']}, were on all engines after {r['t'] - r['started_t']:.3f} s"


def _send_turn(r: Record, _: Target) -> str:
    prefix = f", going on from {r['prefix_tokens']:,} tokens" if r.get("prefix_tokens") else ""
    turn = f"turn {r['turn']}, after {r['history_tokens']:,} tokens, " if r.get("turn") else ""
    return f"{turn}to engine {r['engine']}, priority {r['priority']}{prefix}"


def _tool(r: Record, _: Target) -> str:
    said = "the trajectory is done" if r["done"] else f"{r['observation_tokens']:,} tokens"
    return f"the environment answered turn {r['turn']} in {r['t'] - r['started_t']:.3f} s: {r['error'] or said}"


_WORDS: dict[str, Callable[[Record, Target], str]] = {
    "RolloutRequested": _requested,
    "SendTurn": _send_turn,
    "TurnStarted": lambda r, _: f"first tokens from engine {r['engine']}",
    "TurnFinished": _turn,
    "RunTool": lambda r, _: f"turn {r['turn']} to the environment",
    "ToolFinished": _tool,
    "AbortTurn": lambda r, _: f"cut on engine {r['engine']}: its deadline passed",
    "ScoreTrajectory": lambda r, _: "to the reward function",
    "TrajectoryScored": _scored,
    "ServingComplete": lambda r, _: "all its trajectories are generated: it leaves the frontier",
    "SendGroup": _sent,
    "GroupsDrawn": lambda r, _: f"drawn later, for iteration {r['iteration']}, in place of dropped groups",
    "FilterGroup": lambda r, _: "all its rewards are in: to the filter function",
    "GroupFiltered": lambda r, _: f"the filter function {'keeps' if r['keep'] else 'refuses'} it {r['error']}".strip(),
    "DropGroup": lambda r, _: f"dropped: {r['reason']}",
    "GroupArrived": lambda r, _: f"group {r['group']} at the trainer: {sum(r['tokens']):,} tokens, {r['nbytes']:,} bytes",
    "GroupReceived": lambda r, _: "the trainer holds it",
    "GroupDropped": lambda r, _: "the trainer knows that it will not come",
    "BeginStep": lambda r, _: f"step {r['step']} of iteration {r['iteration']} begins",
    "TrainMicroBatch": _micro_batch,
    "MicroBatchDone": lambda r, _: (
        f"replica {r['replica']} worked {r['ended_t'] - r['started_t']:.3f} s on {r['tokens']:,} tokens"
    ),
    "FinishStep": lambda r, _: f"step {r['step']} is full: groups {', '.join(map(str, r['groups']))}",
    "StepDone": _step_done,
    "EngineLost": _lost,
    "WeightsPublished": _published,
}


def as_rows(lines: list[Line]) -> list[dict[str, Any]]:
    """The records as they are in the log, each with its attempt."""
    return [{"attempt": line.attempt, **line.record} for line in lines]
