"""How does a benchmark run a job? Through `rpipe train`, in a folder of its own; figures come from its report.json."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def run(config: str, run_dir: Path, *overrides: str) -> dict[str, Any]:
    """The finished run's report, with "wall_s" of the whole command. A failed job ends the benchmark with its own words."""
    began = time.monotonic()
    command = [sys.executable, "-m", "rpipe.cli", "train", config, f"run.dir={run_dir}", *overrides]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    report: dict[str, Any] = json.loads((run_dir / "report.json").read_text())
    return {**report, "wall_s": time.monotonic() - began}
