"""What does every source of prompts yield, and how does it say that its input is wrong?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class DataError(ValueError):
    """One line for the person who wrote the data or the config: where, what was found, what is wanted."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One prompt before it meets a tokenizer."""

    origin: str  # "train.jsonl:17", "sums[3]"
    prompt: str | list[dict[str, Any]]  # text, or messages for the chat template
    answer: str
    fields: Mapping[str, Any] = field(default_factory=dict)  # what a template may name
    metadata: Mapping[str, Any] = field(default_factory=dict)  # travels with the prompt to its reward
    reward: str | None = None  # overrides the source's
