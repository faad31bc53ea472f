"""Admission: may the next deferred group's requests enter the engines now?

Groups are asked about in submission order, one at a time, until one is refused. Frontier-group dispatch (RolloutPipe,
section 3.3): at most `frontier_groups` groups are in service, those of lowest submission order, so that the groups which
form the next optimizer step finish first. With backfill, later groups may also enter while the KV tokens that all groups
in service could need stay within a budget; engine priority (minus the submission order) keeps the frontier ahead of them.

Invariants (tests/unit/test_policies.py and tests/property/test_coordinators.py assert them):
- groups enter in submission order, each once;
- without backfill, groups in service never exceed `frontier_groups`;
- with nothing in service the next group is never refused.

Cost: O(1) a decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RolloutLoad:
    groups_in_service: int  # admitted and not serving-complete
    kv_tokens_reserved: int  # what they may need at most, prompt and response


class Admission(Protocol):
    def admits(self, demand_tokens: int, load: RolloutLoad) -> bool:
        """May the next group, which may need `demand_tokens` of KV cache, enter now?"""
        ...


@dataclass(frozen=True, slots=True)
class Fifo:
    """Every group at once; the engines queue (RolloutPipe's CGP alone, and the serial baseline)."""

    def admits(self, demand_tokens: int, load: RolloutLoad) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Frontier:
    frontier_groups: int  # F_w
    backfill_tokens: int = 0  # 0 is the paper's hard frontier

    def admits(self, demand_tokens: int, load: RolloutLoad) -> bool:
        if load.groups_in_service < self.frontier_groups:
            return True
        return load.kv_tokens_reserved + demand_tokens <= self.backfill_tokens
