"""Where does a run keep its things?

RUN_DIR/config.yaml          resolved             RUN_DIR/environment.json   versions, git, Slurm
RUN_DIR/attempt-N/events/    the event log        RUN_DIR/attempt-N/logs/    engines
RUN_DIR/attempt-N/snapshots/ published weights, the newest two
RUN_DIR/trajectories/        parquet              RUN_DIR/tensorboard/
RUN_DIR/model/               made on the spot     RUN_DIR/checkpoints/       iteration-NNNNNN
RUN_DIR/hf/                  final weights        RUN_DIR/report.json
RUN_DIR/iteration-groups/    finished groups of iterations that are not in every checkpoint yet
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from rpipe.config import Config
from rpipe.data import gguf_model

HANG_FILE = "hang"
REPLACED = ".replaced"


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
    def iteration_groups(self) -> Path:
        """What an attempt that comes after this one need not generate again."""
        return self.path / "iteration-groups"

    @property
    def trajectories(self) -> Path:
        return self.path / "trajectories"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def hf(self) -> Path:
        return self.path / "hf"

    @property
    def snapshots(self) -> Path:
        return self.attempt_path / "snapshots"

    def snapshot(self, version: int) -> Path:
        """A published version's weights as an engine starts from them: there and whole, or not there."""
        return self.snapshots / f"version-{version:06d}"

    def failure(self, rank: int) -> Path:
        """One line: why this rank ended the job."""
        return self.attempt_path / f"failure-rank{rank:05d}.txt"

    @property
    def hang(self) -> Path:
        """Left by a rank whose wait ended: the supervisor asks all for their stacks."""
        return self.attempt_path / HANG_FILE

    def stacks(self, rank: int) -> Path:
        return self.attempt_path / f"stacks-rank{rank:05d}.txt"

    def checkpoint(self, iteration: int) -> Path:
        return self.checkpoints / f"iteration-{iteration:06d}"

    def checkpoints_found(self) -> list[Path]:
        """Complete or not, newest first; half-written ones have another name."""
        found = self.checkpoints.glob("iteration-*") if self.checkpoints.is_dir() else []
        return sorted((p for p in found if re.fullmatch(r"iteration-\d{6}", p.name)), reverse=True)

    def put_back(self) -> None:
        """A checkpoint that was moved aside for a newer one of its iteration, where death came before that one's rename."""
        for aside in self.checkpoints.glob(f"iteration-*{REPLACED}") if self.checkpoints.is_dir() else ():
            place = aside.with_suffix("")
            if not place.exists():
                aside.rename(place)


def settle(place: Path, data: bytes, attempt: int) -> None:
    """Old or new, but never half: on the disk before it takes its name. Raises OSError."""
    draft = place.with_name(f".{place.stem}-{attempt}")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, place)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
