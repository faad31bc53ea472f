"""What in this run should a person look at?

Each finding is one sentence that says what was seen and, where it is known, what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

from rpipe.analysis.metrics import Attempt, Iteration

TRUNCATION_RATE = 0.2  # above: the limit, not the model, decides many responses
LOGPROB_GAP_NEPERS = 0.05  # mean; fp32 shows 1e-6, bf16 engines about 0.01: above, two different models are at work


def problems(attempts: Sequence[Attempt], iterations: Sequence[Iteration], interrupted: Sequence[int]) -> list[str]:
    """Findings in the order a person would want them: what stops learning first."""
    return [
        *_rewards(iterations),
        *_training(iterations),
        *_responses(iterations),
        *_job(attempts, interrupted),
    ]


def spans(numbers: Sequence[int]) -> str:
    """[3] -> "iteration 3"; [1, 3, 4, 5] -> "iterations 1, 3-5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
    return f"iteration{'s' if len(numbers) > 1 else ''} {text}"


def _rewards(iterations: Sequence[Iteration]) -> list[str]:
    found: list[str] = []
    scored = [at for at in iterations if at.trajectories]
    same = [at for at in scored if at.reward_min == at.reward_max]
    for value in sorted({at.reward_min for at in same}):
        which = spans([at.iteration for at in same if at.reward_min == value])
        found.append(f"every reward of {which} was the same ({value:g}): nothing to learn from")
    flat = [at.iteration for at in scored if not at.mixed_groups and at.reward_min != at.reward_max]
    if flat:
        found.append(f"no group of {spans(flat)} had two different rewards: every advantage is 0, nothing to learn from")
    refused = [at.iteration for at in scored if at.groups_dropped and not at.groups_sent]
    if refused:
        found.append(f"the filter dropped every group of {spans(refused)}: no step was made")
    calls, rewards = sum(at.tool_calls for at in iterations), sum(at.trajectories for at in scored)
    tools = [(at.iteration, at.tool_errors, at.tool_error) for at in iterations]
    found += _failed(f"{calls} calls of the environment failed and ended their trajectory", tools)
    scores = [(at.iteration, at.reward_errors, at.reward_error) for at in iterations]
    return found + _failed(f"{rewards} rewards could not be computed and count as 0", scores)


def _failed(what: str, by_iteration: Sequence[tuple[int, int, str]]) -> list[str]:
    """`by_iteration`: iteration, how many failed in it, the first one's words."""
    for iteration, count, words in by_iteration:
        if count:
            total = sum(count for _, count, _ in by_iteration)
            return [f"{total} of {what}; the first, in iteration {iteration}: {words}"]
    return []


def _training(iterations: Sequence[Iteration]) -> list[str]:
    found: list[str] = []
    skipped = [at for at in iterations if at.skipped_steps]
    if skipped:
        count = sum(at.skipped_steps for at in skipped)
        which = spans([at.iteration for at in skipped])
        found.append(f"{count} step{'s' if count > 1 else ''} skipped in {which}: a gradient was not finite")
    apart = [at for at in iterations if (at.logprob_gap_mean or 0.0) > LOGPROB_GAP_NEPERS]
    if apart:
        worst = max(apart, key=lambda at: at.logprob_gap_mean or 0.0)
        found.append(
            f"engine and trainer disagree on log-probs by {worst.logprob_gap_mean:.3g} in the mean"
            f" ({spans([at.iteration for at in apart])}): the weights, the dtype or the temperature differ"
        )
    return found


def _responses(iterations: Sequence[Iteration]) -> list[str]:
    total = sum(at.trajectories for at in iterations)
    cut = sum(at.truncated for at in iterations)
    if not total or cut / total <= TRUNCATION_RATE:
        return []
    return [f"{cut / total:.0%} of responses were cut before they ended: raise rollout.max_new_tokens or the deadline"]


def _job(attempts: Sequence[Attempt], interrupted: Sequence[int]) -> list[str]:
    found = [f"attempt {number} ended: {attempt.end}" for number, attempt in enumerate(attempts, 1) if attempt.end]
    for number, attempt in enumerate(attempts[:-1], 1):  # the last one may still be running
        if attempt.end is None:
            found.append(f"attempt {number} was killed: its log stops without a JobEnded")
    if interrupted:
        found.append(f"not complete, and left out of every figure: {spans(interrupted)}")
    return found
