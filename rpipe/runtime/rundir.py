"""Where does a run keep its things?

RUN_DIR/config.yaml          resolved             RUN_DIR/environment.json   versions, git, Slurm
RUN_DIR/attempt-N/events/    the event log        RUN_DIR/attempt-N/logs/    engines
RUN_DIR/trajectories/        parquet              RUN_DIR/tensorboard/
RUN_DIR/model/               made on the spot     RUN_DIR/checkpoints/       iteration-NNNNNN
RUN_DIR/hf/                  final weights        RUN_DIR/report.json
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rpipe.config import Config
from rpipe.data import gguf_model


@dataclass(frozen=True, slots=True)
class RunDir:
    path: Path
    attempt: int

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def attempt_path(self) -> Path:
        return self.path / f"attempt-{self.attempt}"

    @property
    def events(self) -> Path:
        return self.attempt_path / "events"

    @property
    def logs(self) -> Path:
        return self.attempt_path / "logs"

    @property
    def seats(self) -> Path:
        """Which rank was to sit where; inside a Slurm allocation only."""
        return self.attempt_path / "seats.json"

    @property
    def model(self) -> Path:
        return self.path / "model"

    def model_of(self, config: Config) -> Path:
        """The Hugging Face folder that the run starts from."""
        if config.model.gguf is not None:
            return gguf_model.folder(config.model)
        return self.model if config.model.path is None else Path(config.model.path).expanduser()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def trajectories(self) -> Path:
        return self.path / "trajectories"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def hf(self) -> Path:
        return self.path / "hf"

    def failure(self, rank: int) -> Path:
        """One line: why this rank ended the job."""
        return self.attempt_path / f"failure-rank{rank:05d}.txt"

    def checkpoint(self, iteration: int) -> Path:
        return self.checkpoints / f"iteration-{iteration:06d}"

    def checkpoints_found(self) -> list[Path]:
        """Complete or not, newest first; half-written ones have another name."""
        found = self.checkpoints.glob("iteration-*") if self.checkpoints.is_dir() else []
        return sorted((p for p in found if re.fullmatch(r"iteration-\d{6}", p.name)), reverse=True)
