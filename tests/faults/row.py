"""What does a fault cost? One row of the table in docs/faults.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    fault: str
    detected_s: float | None  # from the fault to the job's saying so; None: it went on by itself
    recovered_s: float | None  # from the fault to the first optimizer step after it; None: there was nothing to recover
    lost: str
    told: str  # the line that a person reads

    def __post_init__(self) -> None:
        print(f"{self.fault}: detected {_s(self.detected_s)}, recovered {_s(self.recovered_s)}, {self.lost}", flush=True)


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    head = ["| fault | detected after | recovered after | work lost | what it says |", "|---|---|---|---|---|"]
    body = [f"| {r.fault} | {_s(r.detected_s)} | {_s(r.recovered_s)} | {r.lost} | {r.told} |" for r in rows]
    return "\n".join([*head, *body])
