"""A reward that takes its time until the test has seen enough."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

SLOW_S = 0.2  # of 32 in an iteration


def slow_while_asked(prompt: str, response: str, answer: str, metadata: dict[str, Any]) -> float:
    """Decided by the text alone. Slow while the file that the prompt's entry names is there."""
    if Path(metadata["slow_while"]).exists():
        time.sleep(SLOW_S)
    return float(random.Random(prompt + response).random() < 0.5)
