"""How loaded are the engines, how full is the trainer's queue, and how fast is each stage?

What the admission policy looks at, kept from events alone. Rates: rollout's is the seconds from one serving-complete group to
the next, over the last training rollout that was generated whole (in a run's first one: so far); training's the seconds of
computing that a group takes (its micro-batches and its part of the step), and the length of a response its mean, both
forgetting slowly. What a frontier's width would do is worked out once a rollout, from those before (pace.py).
"""

from __future__ import annotations

from rpipe.control.pace import Pace
from rpipe.policy.admission import RolloutLoad
from rpipe.policy.width import Width

FORGET = 0.2  # of what is known of the trainer's rate, at each of its steps
RESPONSES = 256  # that the mean length remembers, about


class Meter:
    def __init__(self, engines: int, slots_per_engine: int, max_new_tokens: int) -> None:
        self._slots, self._max_new_tokens = engines * slots_per_engine, max_new_tokens
        self._pace = Pace(engines, slots_per_engine)
        self._widths: tuple[Width, ...] = ()
        self._kv_tokens: dict[int, int] = {}  # engine -> what its cache holds
        self._requested_t = 0.0
        self._wanted = 0  # groups of this rollout
        self._measures = False  # its time tells of the next one's
        self._first = False  # nothing is known yet: what is measured counts before its end
        self._served = self._trained = 0  # of them; dropped ones do not count
        self._in_flight = self._prompt_tokens = 0  # trajectories sent and not finished, and their prompts
        self._rollout_group_s: float | None = None
        self._busy_s = self._busy_groups = 0.0
        self._tokens = self._responses = 0.0

    @property
    def response_tokens(self) -> float:
        """What one more response is expected to take: the most it may, before anything is known."""
        return min(self._tokens / self._responses, self._max_new_tokens) if self._responses else self._max_new_tokens

    def load(self, groups_in_service: int) -> RolloutLoad:
        return RolloutLoad(
            groups_in_service=groups_in_service,
            trajectories_in_flight=self._in_flight,
            slots=self._slots,
            kv_tokens_expected=round(self._prompt_tokens + self._in_flight * self.response_tokens),
            kv_tokens_capacity=sum(self._kv_tokens.values()) or None,
            groups_ready=self._served - self._trained,
            groups_unserved=max(0, self._wanted - self._served),
            groups_untrained=self._wanted - self._trained,
            groups_served=self._served,
            rollout_group_s=self._rollout_group_s,
            train_group_s=self._busy_s / self._busy_groups if self._busy_groups else None,
            widths=self._widths,
        )

    def engine_ready(self, engine: int, kv_tokens: int) -> None:
        self._kv_tokens[engine] = kv_tokens

    def requested(self, t: float, wanted: int, training: bool, trajectories_per_group: int) -> None:
        self._requested_t, self._wanted, self._measures = t, wanted, training
        self._served = self._trained = 0
        self._first = self._rollout_group_s is None
        if training:
            self._widths = self._pace.widths(trajectories_per_group)
            self._pace.forget()

    def sent(self, prompt_tokens: int) -> None:
        self._in_flight += 1
        self._prompt_tokens += prompt_tokens

    def finished(self, prompt_tokens: int) -> None:
        self._in_flight -= 1
        self._prompt_tokens -= prompt_tokens

    def responded(self, output_tokens: int) -> None:
        keep = 1 - 1 / RESPONSES
        self._tokens = keep * self._tokens + output_tokens
        self._responses = keep * self._responses + 1

    def generated(self, tokens: int, seconds: float, began_beside: int, ended_beside: int) -> None:
        """A turn; see Pace.turn."""
        self._pace.turn(tokens, seconds, began_beside, ended_beside)

    def served(self, t: float, longest_tokens: int) -> None:
        """A group is serving-complete."""
        self._served += 1
        if self._measures:
            self._pace.group(longest_tokens)
        if self._measures and (self._served == self._wanted or self._first):
            self._rollout_group_s = (t - self._requested_t) / self._served

    def restored(self) -> None:
        """A group that an interrupted attempt had finished."""
        self._served += 1
        self._measures = False

    def dropped(self) -> None:
        """A served group will not be trained."""
        self._served -= 1

    def trained(self, groups: int, busy_s: float, this_rollout: bool) -> None:
        self._busy_s = (1 - FORGET) * self._busy_s + busy_s
        self._busy_groups = (1 - FORGET) * self._busy_groups + groups
        if this_rollout:
            self._trained += groups
