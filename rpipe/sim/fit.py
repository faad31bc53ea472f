"""Which hardware profile explains what real jobs took?

    engine       decoding rates, prefill, its speed beside a trainer                                  fit_engine
    trainer      a micro-batch, an optimizer step, its speed beside engines                           fit_trainer
    the cores    what both leave of them is who hands tokens on from engine to owner                  fit_shared

Everything else is a median of what was seen, or a line through medians. Responses and micro-batches that a first fit misses by
far are left out of a second: another process had the core.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from rpipe.sim.costs import FURTHER_ENGINE
from rpipe.sim.fit_engine import EngineFit, fit_engine
from rpipe.sim.fit_shared import shared_rate
from rpipe.sim.fit_trainer import fit_trainer, nonnegative
from rpipe.sim.observe import Seen, SeenTurn, Timeline, joined, trained

BURST_S = 0.005  # requests sent at one moment are logged at most so far apart


def profile(
    attempts: Sequence[Seen], name: str, source: str, cores: float | None, parameters: int | None
) -> tuple[dict[str, Any], dict[str, float], list[str]]:
    """`hardware` as a config has it, how well it fits, and in a line each what is assumed because these runs do not tell it.
    `cores`: what engines and trainer share, or None; `parameters`: of the model, where something says it.

    Raises FitError."""
    trainer = fit_trainer(attempts, cores is not None)
    engine = fit_engine(attempts, trainer.shared_speed)
    idle_groups = [_arrival_s(seen) for seen in attempts]
    message_s = _median([s for seen in attempts for s in seen.confirm_s])
    base_s, each_s = burst_line([pair for seen in attempts for pair in bursts(seen)])
    request_s = max(base_s - message_s - engine.prefill_s - engine.step_s[-1] / 2, 0.0)
    tree: dict[str, Any] = {
        "name": name,
        "source": source,
        "calibrated": not any(seen.simulated for seen in attempts),
        **({} if parameters is None else {"fitted_parameters": parameters}),
        "engine": {
            "decode_step_s": [[n, _short(s)] for n, s in zip(engine.knots, engine.step_s)],
            "prefill_s": _short(engine.prefill_s),
            "prefill_token_s": _short(engine.prefill_token_s),
        },
        "trainer": {
            "micro_batch_s": _short(trainer.micro_batch_s),
            "trajectory_s": _short(trainer.trajectory_s),
            "token_s": _short(trainer.token_s),
            "step_s": _short(trainer.step_s),
        },
        "message_s": _short(message_s),
        "request_s": _short(request_s),
        "request_each_s": _short(each_s),
        "reward_s": _short(_median([s for seen in attempts for s in seen.reward_s])),
        "group_s": _short(max(statistics.mean([s for waits in idle_groups for s in waits] or [0.0]) - message_s, 0.0)),
        **publish_line([pair for seen in attempts for pair in seen.publishes], message_s),
        "draw_s": _short(_median([s for seen in attempts for s in seen.draw_s])),
        "checkpoint_s": _short(_median([s for seen in attempts for s in seen.checkpoint_s])),
    }
    if cores is not None:
        # A training rank is a thread, an engine's scheduler too; what hands tokens on is more: engines have what it leaves.
        tokens_per_s, engines = shared_rate(attempts, engine)
        left = max((cores - trainer.shared_speed) / engine.shared_speed, engines)
        tree["host"] = {
            "cores": cores,
            "engine_cores": 1.0,
            "engine_token_s": _short((left - engines) / tokens_per_s) if tokens_per_s and trainer.shared_speed < 1.0 else 0.0,
            "engine_weight": _short(engine.shared_speed / trainer.shared_speed),
            "trainer_cores": 1.0,
        }
    speeds = {"shared speed": trainer.shared_speed, "engine speed": engine.shared_speed}
    errors = {"engine": engine.error, "trainer": trainer.error, **speeds}
    return tree, errors, _assumed(engine, [engines for seen in attempts for engines, _ in seen.publishes])


def _assumed(engine: EngineFit, published: Sequence[int]) -> list[str]:
    """One line for each figure that nothing in these runs tells."""
    assumed: list[str] = []
    if not engine.tells_prefill_tokens:
        low, high = engine.prompt_tokens
        assumed.append(
            f"prefill_token_s = 0 is assumed: most prompts have {low:.0f} to {high:.0f} tokens, too much alike to tell what a"
            " token costs; prefill_s is the whole prefill of such prompts"
        )
    if len(set(published)) == 1:
        assumed.append(f"publish_engine_s = publish_s / 3 is assumed: each publish was to as many engines ({published[0]})")
    return assumed


def bursts(seen: Seen) -> list[tuple[int, float]]:
    """(requests sent to an engine at one moment, from the sending to the first of their first tokens), where places were free:
    fewer ran than the most that ever did."""
    found: list[tuple[int, float]] = []
    for index in sorted({t.engine for t in seen.turns}):
        turns = sorted((t for t in seen.turns if t.engine == index), key=lambda t: t.started_t)
        running = Timeline([(t.first_t, t.end_t) for t in turns])
        places = max(running.counts, default=0)
        burst: list[SeenTurn] = []
        for turn, following in zip(turns, [*turns[1:], None]):
            burst.append(turn)
            if following is None or following.started_t - turn.started_t > BURST_S:
                if running.at(burst[0].started_t) < places:
                    found.append((len(burst), min(t.first_t for t in burst) - burst[0].started_t))
                burst = []
    return found


def burst_line(pairs: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Seconds of any burst, and more a request in it; never negative. Medians by size, weighted by how many there were."""
    if not pairs:
        return 0.0, 0.0
    sizes = sorted({n for n, _ in pairs})
    medians = np.array([statistics.median(s for n, s in pairs if n == size) for size in sizes])
    weights = np.sqrt([float(sum(n == size for n, _ in pairs)) for size in sizes])
    matrix = np.stack([np.ones(len(sizes)), np.array(sizes, np.float64)], axis=1)
    if len(sizes) == 1:  # one size cannot tell the two apart
        return 0.0, float(medians[0]) / sizes[0]
    base, each = nonnegative(matrix * weights[:, None], medians * weights)
    return float(base), float(each)


def publish_line(pairs: Sequence[tuple[int, float]], message_s: float) -> dict[str, float]:
    """`publish_s`, of one engine, and `publish_engine_s` where different numbers of engines were seen."""
    pairs = [(engines, max(taken_s - message_s, 0.0)) for engines, taken_s in pairs]
    numbers = {engines for engines, _ in pairs}
    if len(numbers) > 1:
        base_s, each_s = burst_line(pairs)
        return {"publish_s": _short(base_s + each_s), "publish_engine_s": _short(each_s)}
    further = max(numbers, default=1) - 1
    return {"publish_s": _short(_median([taken_s for _, taken_s in pairs]) / (1 + further * FURTHER_ENGINE))}


def _arrival_s(seen: Seen) -> list[float]:
    """Of groups that found the trainer listening."""
    training = Timeline(joined(trained(seen)))
    free = [end - start for start, end in seen.groups if not training.at(start) and not training.at(end)]
    return free or [end - start for start, end in seen.groups]


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


def _short(value: float) -> float:
    return float(f"{value:.4g}")
