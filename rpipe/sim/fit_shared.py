"""What do engines hand on while a trainer computes beside them? What both leave of the cores pays for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rpipe.sim.fit_engine import EngineFit
from rpipe.sim.observe import Seen, Timeline, joined, trained


def shared_rate(attempts: Sequence[Seen], fit: EngineFit) -> tuple[float, float]:
    """While a trainer computes beside engines: tokens a second that they would make alone, and how many are busy."""
    tokens = busy_s = engine_s = 0.0
    for seen in attempts:
        training = Timeline(joined(trained(seen)))
        lines = [[(t.first_t, t.end_t) for t in seen.turns if t.engine == e] for e in sorted({t.engine for t in seen.turns})]
        for spans in lines:
            running = Timeline(spans)
            for start, end in joined(spans):
                for a, b, count in running.pieces(start, end):
                    shared_s = sum(d - c for c, d, active in training.pieces(a, b) if active)
                    tokens += shared_s * count / float(np.interp(count, fit.knots, fit.step_s))
                    engine_s += shared_s
        whole = joined([span for spans in lines for span in spans])
        busy_s += sum(d - c for start, end in whole for c, d, active in training.pieces(start, end) if active)
    return (tokens / busy_s, engine_s / busy_s) if busy_s else (0.0, 0.0)
