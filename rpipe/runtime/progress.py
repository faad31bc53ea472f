"""What does the job do right now, in the eyes of whoever started it?

On a terminal two or three live lines; elsewhere one plain line a finished iteration and one every 30 s within a long one.
Nothing is drawn between `update` calls: no thread, no timer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

Phase = Literal["starting", "warming up", "publishing", "evaluating", "rollout", "training", "saving"]

REDRAW_S = 0.2
PLAIN_LINE_S = 30.0
WORKING = ("rollout", "training")


@dataclass(frozen=True)
class ProgressState:
    """A snapshot of the run. Counts are of the current iteration; `groups_total` is R, `trajectories_total` R x K."""

    iteration: int  # the current one, from 0
    iterations: int
    phase: Phase
    groups_total: int
    groups_sent: int
    groups_in_service: int
    groups_deferred: int
    groups_trained: int
    trajectories_done: int
    trajectories_total: int
    tokens_per_s: float
    trainer: str  # "busy", or what it waits for
    reward_mean: float | None
    held_out: float | None
    elapsed_s: float

    @property
    def done(self) -> float:
        """Iterations done, the current one by the share of its groups that are trained."""
        share = self.groups_trained / self.groups_total if self.groups_total and self.phase in WORKING else 0.0
        return min(float(self.iterations), self.iteration + share)


class Progress:
    """`update` with every new state, `line` for a message that stays, `close` at the end. Use from one thread."""

    def __init__(
        self,
        terminal: bool,
        columns: int | None = None,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._file = file or sys.stdout
        self._state: ProgressState | None = None
        self._worked: ProgressState | None = None  # the last state of an iteration at work, until its line is out
        self._began: ProgressState | None = None  # the first state at work: what the time left is reckoned from
        self._drawn_t = -float("inf")
        self._live: Live | None = None
        console = Console(force_terminal=True, width=columns, file=file, highlight=False)
        if terminal and not console.is_dumb_terminal:  # TERM=dumb cannot move its cursor
            self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stderr=False)
            self._live.start()
            console.show_cursor(True)  # a killed job must not leave a terminal without one
        else:
            self._drawn_t = clock()

    def update(self, state: ProgressState) -> None:
        """Show `state` soon: at most five times a second on a terminal, on a line of its own every 30 s elsewhere."""
        worked, now = self._worked, self._clock()
        if worked is not None and state.iteration > worked.iteration:
            self.line(finished_line(worked, state.held_out))
            self._worked, self._drawn_t = None, now if self._live is None else self._drawn_t
        self._state = state
        if self._worked is not None and state.iteration == self._worked.iteration and state.phase in ("publishing", "saving"):
            self._worked = state  # it may know the reward that the last state at work did not
        if state.phase in WORKING:
            self._worked = state
            self._began = self._began or state
        if self._live is not None:
            if now - self._drawn_t >= REDRAW_S:
                self._draw(now)
        elif now - self._drawn_t >= PLAIN_LINE_S:
            self._drawn_t = now
            self.line(f"iteration {state.iteration} of {state.iterations}, {'; '.join(status_parts(state))}")

    def line(self, text: str) -> None:
        """A message that stays, above the display."""
        if self._live is not None:
            self._live.console.print(Text(text), soft_wrap=True)
        else:
            print(text, file=self._file, flush=True)

    def close(self) -> None:
        """Say how the last iteration ended and take the display away. More than once does no harm."""
        state, worked = self._state, self._worked
        self._state = self._worked = None
        if worked is not None and state is not None:
            if state.phase not in WORKING or worked.groups_trained >= worked.groups_total:
                self.line(finished_line(worked, state.held_out))
            else:
                self.line(f"iteration {state.iteration} of {state.iterations} not finished: {'; '.join(status_parts(state))}")
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self, now: float) -> None:
        assert self._live is not None and self._state is not None
        self._drawn_t = now
        width = self._live.console.width
        state = self._state
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True)
        left = time_left_s(self._began, state)
        words = f"{state.iteration}/{state.iterations}  {clock_text(state.elapsed_s)}"
        words += f"  {clock_text(left)} left" if left is not None else ""
        head.add_row(ProgressBar(total=max(1, state.iterations), completed=state.done), Text(words))
        rows = [Text(row, no_wrap=True, overflow="ellipsis", style="dim") for row in pack(status_parts(state), width)]
        self._live.update(Group(head, *rows), refresh=True)


def status_parts(s: ProgressState) -> list[str]:
    """The status line in pieces that belong together."""
    if s.phase not in WORKING:
        parts: list[str] = [s.phase]
        if s.phase == "evaluating" and s.trajectories_total:
            parts.append(f"trajectories {s.trajectories_done}/{s.trajectories_total}")
            parts.append(f"{s.tokens_per_s:,.0f} tokens/s")
    else:
        parts = [
            s.phase,
            f"groups {s.groups_sent}/{s.groups_total} sent, {s.groups_in_service} in service,"
            f" {s.groups_deferred} deferred, {s.groups_trained} trained",
            f"trajectories {s.trajectories_done}/{s.trajectories_total}",
            f"{s.tokens_per_s:,.0f} tokens/s",
            f"trainer {s.trainer}",
        ]
    if s.reward_mean is not None:
        parts.append(f"reward {s.reward_mean:.3f}")
    if s.held_out is not None:
        parts.append(f"held-out {s.held_out:.3f}")
    return parts


def finished_line(s: ProgressState, held_out: float | None) -> str:
    """What stays of an iteration. `held_out` is the newest known."""
    parts = [f"iteration {s.iteration} done ({s.iteration + 1} of {s.iterations})"]
    if s.reward_mean is not None:
        parts.append(f"reward {s.reward_mean:.3f}")
    if held_out is not None:
        parts.append(f"held-out {held_out:.3f}")
    return ", ".join([*parts, f"{s.tokens_per_s:,.0f} tokens/s", clock_text(s.elapsed_s)])


def time_left_s(began: ProgressState | None, now: ProgressState) -> float | None:
    """At the pace since `began`; None before a fifth of an iteration has shown it."""
    if began is None or now.done - began.done < 0.2:
        return None
    return (now.elapsed_s - began.elapsed_s) / (now.done - began.done) * (now.iterations - now.done)


def clock_text(seconds: float) -> str:
    """75 -> "1:15", 3675 -> "1:01:15"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def pack(parts: list[str], width: int) -> list[str]:
    """Parts joined by two spaces on as few lines of `width` columns as hold them whole."""
    rows: list[str] = []
    for part in parts:
        if rows and len(rows[-1]) + 2 + len(part) <= width:
            rows[-1] += "  " + part
        else:
            rows.append(part)
    return rows
