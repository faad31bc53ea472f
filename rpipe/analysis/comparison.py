"""How do two runs compare, figure by figure?"""

from __future__ import annotations

from typing import Any

Report = dict[str, Any]


def compare(first: Report, second: Report) -> Report:
    """JSON-ready: both reports as "a" and "b", and "metrics": figure -> {"a", "b", "ratio"}, of medians over iterations.

    A figure that one of them lacks (another system's log) is None there.
    """
    a, b = _figures(first), _figures(second)
    names = dict.fromkeys([*a, *b])
    metrics = {name: {"a": a.get(name), "b": b.get(name), "ratio": ratio(a.get(name), b.get(name))} for name in names}
    return {"a": first, "b": second, "metrics": metrics}


def ratio(first: float | None, second: float | None) -> float | None:
    """The second in terms of the first; None where one is unknown, or the first is 0."""
    return second / first if first and second is not None else None


def _figures(told: Report) -> dict[str, float | None]:
    return {**told["run"]["medians"], "tokens_per_s": told["run"].get("tokens_per_s")}
