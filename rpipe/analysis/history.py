"""When did each attempt of a run work, what lay between them, and what was done twice?

Each attempt's clock begins at 0; JobStarted's `unix_s` places them on one calendar (in logs without it: what the launcher
wrote, or the files' last change). An iteration begun in several attempts is kept from the last one that completed it; the
others' work was repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rpipe.analysis.run import files, launcher_said
from rpipe.analysis.spans import Detail, Track


@dataclass(frozen=True, slots=True)
class Work:
    """What an attempt put into one iteration."""

    trajectories: int  # that finished generating
    tokens: int
    restored_trajectories: int  # taken over from an earlier attempt
    restored_tokens: int
    seconds: float  # from the request to the last thing known of it

    @classmethod
    def of(cls, at: Detail, ended_t: float) -> Work:
        finished = [t for t in at.trajectories() if t.generated_t is not None]
        end = at.ended_t if at.rollout_ended_t is not None and at.ended_t is not None else ended_t
        return cls(
            trajectories=len(finished),
            tokens=sum(t.tokens for t in finished),
            restored_trajectories=sum(len(group.restored_tokens) for group in at.groups.values()),
            restored_tokens=sum(sum(group.restored_tokens) for group in at.groups.values()),
            seconds=max(0.0, end - at.requested_t) if at.requested_t is not None else 0.0,
        )

    def less(self, later: Work) -> Work:
        """Without what `later` took over instead of doing it again."""
        return replace(
            self,
            trajectories=max(0, self.trajectories - later.restored_trajectories),
            tokens=max(0, self.tokens - later.restored_tokens),
        )


@dataclass(slots=True)
class AttemptSpan:
    """One attempt on the run's calendar: seconds since the first attempt began."""

    number: int
    start_s: float
    seconds: float
    gap_s: float  # since the attempt before it wrote its last record
    ended: str | None = None
    nodes: str = ""
    job: str = ""  # Slurm's number
    repeated: dict[int, Work] = field(default_factory=dict)  # iterations that a later attempt did again, less what it took over

    def row(self) -> dict[str, Any]:
        lost = self.repeated.values()
        return {
            "attempt": self.number,
            "start_s": self.start_s,
            "seconds": self.seconds,
            "gap_s": self.gap_s,
            "ended": self.ended,
            "nodes": self.nodes,
            "job": self.job,
            "repeated_iterations": sorted(self.repeated),
            "repeated_trajectories": sum(work.trajectories for work in lost),
            "repeated_tokens": sum(work.tokens for work in lost),
            "repeated_s": sum(work.seconds for work in lost),
        }


def history(
    directories: Sequence[Path],
    tracks: Sequence[Track],
    ends: Sequence[str | None],
    work: Sequence[dict[int, Work]],
    kept: dict[int, int],
) -> list[AttemptSpan]:
    """One span an attempt, in order. `work`: what each put into which iteration; `kept`: iteration -> index of its attempt."""
    begins = [_begin_unix_s(directory, track) for directory, track in zip(directories, tracks)]
    spans: list[AttemptSpan] = []
    for index, (directory, track) in enumerate(zip(directories, tracks)):
        start = begins[index] - begins[0]
        before = spans[-1] if spans else None
        free = before.start_s + before.seconds if before else 0.0
        start = max(start, free)  # clocks of two hosts may disagree: attempts never overlap
        span = AttemptSpan(int(directory.name[8:]), start, track.ended_t, start - free, ends[index])
        said = launcher_said(directory)
        span.nodes, span.job = str(said.get("nodes", "")), str(said.get("job", ""))
        for iteration, done in work[index].items():
            again = next((later[iteration] for later in work[index + 1 :] if iteration in later), None)
            if again is not None and kept.get(iteration) != index:
                span.repeated[iteration] = done.less(again)
        spans.append(span)
    return spans


def outages(tracks: Sequence[Track]) -> list[str]:
    """What was lost, when, and how it went on."""
    told: list[str] = []
    for number, track in enumerate(tracks, 1):
        for outage in track.outages:
            back = (
                "not started again" if outage.restarted_t is None else f"back after {outage.restarted_t - outage.lost_t:.1f} s"
            )
            where = f" of attempt {number}" if len(tracks) > 1 else ""
            told.append(
                f"engine {outage.engine} was lost at {outage.lost_t:.1f} s{where} ({outage.reason}), {back};"
                f" {outage.turns} trajectories went on elsewhere, with {outage.kept_tokens:,} tokens that they had"
            )
    return told


def _begin_unix_s(directory: Path, track: Track) -> float:
    if track.unix_s is not None:
        return track.unix_s
    started = launcher_said(directory).get("started_unix_s")
    if isinstance(started, (int, float)):
        return float(started)
    changed = [path.stat().st_mtime for path in files(directory)]
    return max(changed, default=directory.stat().st_mtime) - track.ended_t


def sentences(spans: Sequence[AttemptSpan]) -> list[str]:
    """What interruptions cost; nothing where there was one attempt."""
    if len(spans) < 2:
        return []
    gap_s = sum(span.gap_s for span in spans)
    whole_s = spans[-1].start_s + spans[-1].seconds
    told = [f"{len(spans)} attempts in {whole_s:.0f} s, {gap_s:.0f} s of it between them ({gap_s / max(whole_s, 1e-9):.0%})"]
    for span in spans:
        if span.repeated:
            row = span.row()
            which = row["repeated_iterations"]
            names = f"iteration {which[0]}" if len(which) == 1 else f"iterations {which[0]} to {which[-1]}"
            told.append(
                f"attempt {span.number}'s work on {names} was done again:"
                f" {row['repeated_trajectories']:,} trajectories, {row['repeated_tokens']:,} tokens, {row['repeated_s']:.1f} s"
            )
    return told
