"""Which groups did an interrupted attempt finish, so that they need not be generated again?

`RUN_DIR/iteration-groups/iteration-000003`: a head that says under which weights and settings, then each group of iteration 3
when all its trajectories are scored, if no function failed on it: its 0 would outlive the mistake. An attempt that rolls the
iteration out again takes over those that were sampled under the very weights it holds (the head has their fingerprint) and
appends the rest. What has another fingerprint, other settings or another prompt is not taken. Files go once no checkpoint is
left from which their iteration would be trained.

Record: length and CRC-32 of the body, 4 bytes each, little-endian; then the body in msgpack. A torn or damaged tail is cut
off. Nothing waits for the disk: a killed job loses nothing that was written, a host that loses power may lose the last
groups, which are then generated again. What cannot be written is said once; the run goes on.
"""

from __future__ import annotations

import os
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from rpipe.config import Config
from rpipe.core.types import GroupId, Trajectory, TrajectoryId, Version, VersionSpan

FORMAT = 1
_FRAME = struct.Struct("<II")
_encoder = msgspec.msgpack.Encoder()


class Head(msgspec.Struct, frozen=True):
    """All of it must agree."""

    format: int
    iteration: int
    version: Version
    fingerprint: str  # of the weights
    settings: str  # JSON of what gives prompts and responses their meaning


class KeptTrajectory(msgspec.Struct, frozen=True):
    output_ids: bytes  # int32
    logprobs: bytes  # float32
    versions: tuple[tuple[int, int, int], ...]  # start, end, version
    finish: str
    engine: int
    reward: float


class KeptGroup(msgspec.Struct, frozen=True):
    group: GroupId
    prompt_ids: bytes  # int32
    trajectories: tuple[KeptTrajectory, ...]

    def belongs(self, prompt_ids: Sequence[int], count: int) -> bool:
        """Whether it is a group of `count` responses to this prompt."""
        return len(self.trajectories) == count and _int32(self.prompt_ids).tolist() == list(prompt_ids)

    def trajectory(self, sample: int) -> Trajectory:
        """As the engine gave it."""
        kept = self.trajectories[sample]
        return Trajectory(
            id=TrajectoryId(self.group, sample),
            prompt_ids=_int32(self.prompt_ids),
            output_ids=_int32(kept.output_ids),
            logprobs=np.frombuffer(kept.logprobs, np.float32),
            versions=tuple(VersionSpan(*span) for span in kept.versions),
            finish=kept.finish,
        )


_heads: msgspec.msgpack.Decoder[Head] = msgspec.msgpack.Decoder(Head)
_groups: msgspec.msgpack.Decoder[KeptGroup] = msgspec.msgpack.Decoder(KeptGroup)


class KeptGroups:
    """`begin` an iteration, `add` its groups as they finish. One writer a file: what an earlier attempt finished is copied to a
    file of its own, which takes the other's name, so that one which lost the run unknowingly writes between nothing."""

    def __init__(self, folder: Path, config: Config, checkpoints: Callable[[], list[Path]]) -> None:
        self._folder, self._checkpoints = folder, checkpoints
        sections = {
            "seed": config.run.seed,
            "data": config.data.model_dump(mode="json"),
            "rollout": config.rollout.model_dump(mode="json"),
            "reward": config.reward.model_dump(mode="json", exclude={"workers", "shuffle"}),  # these change no score
        }
        self._settings = msgspec.json.encode(sections).decode()
        self._file: BinaryIO | None = None
        self._off = False

    def begin(self, iteration: int, version: Version, fingerprint: str) -> dict[GroupId, KeptGroup]:
        """What an earlier attempt finished of it under these weights."""
        self.close()
        self._forget()
        head = Head(FORMAT, iteration, version, fingerprint, self._settings)
        path = self._folder / f"iteration-{iteration:06d}"
        try:
            found, whole_bytes = read(path, head) if path.exists() else ({}, 0)
            self._folder.mkdir(parents=True, exist_ok=True)
            whole = path.read_bytes()[:whole_bytes] if whole_bytes else b""
            draft = path.with_name(f".{path.name}.{os.getpid()}")
            self._file = draft.open("wb")
            self._file.write(whole)
            if not whole:
                self._write(_encoder.encode(head))
            self._file.flush()
            os.replace(draft, path)
        except OSError as error:
            self._give_up(error)
            return {}
        return found

    def add(self, group: KeptGroup) -> None:
        """A group whose trajectories are all scored."""
        if self._file is None:
            return
        try:
            self._write(_encoder.encode(group))
        except OSError as error:
            self._give_up(error)

    def _forget(self) -> None:
        """Remove what no checkpoint leads to any more: files and checkpoints are named alike, by iterations trained."""
        oldest = min((checkpoint.name for checkpoint in self._checkpoints()), default="")
        for path in self._folder.glob("iteration-*"):
            if path.name < oldest:
                path.unlink(missing_ok=True)
        for draft in self._folder.glob(".iteration-*"):  # of an attempt that was killed just then
            draft.unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, body: bytes) -> None:
        assert self._file is not None
        self._file.write(_FRAME.pack(len(body), zlib.crc32(body)) + body)
        self._file.flush()

    def _give_up(self, error: OSError) -> None:
        self._file = None
        if not self._off:
            print(f"warning: {self._folder}: finished groups are not kept any more: {error}", file=sys.stderr, flush=True)
        self._off = True


def read(path: Path, head: Head) -> tuple[dict[GroupId, KeptGroup], int]:
    """Its groups, and how many bytes of the file are whole: nothing and 0 where it was written under another head."""
    data = path.read_bytes()
    bodies = _bodies(data)
    try:
        first, at = next(bodies, (b"", 0))
        if not at or _heads.decode(first) != head:
            return {}, 0
        found: dict[GroupId, KeptGroup] = {}
        for body, end in bodies:
            group = _groups.decode(body)
            found[group.group], at = group, end
    except msgspec.DecodeError:  # of another release
        return {}, 0
    return found, at


def _bodies(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Each whole record's body and where it ends; ends before the first that is torn or damaged."""
    at = 0
    while at + _FRAME.size <= len(data):
        length, check = _FRAME.unpack_from(data, at)
        end = at + _FRAME.size + length
        body = data[at + _FRAME.size : end]
        if len(body) < length or zlib.crc32(body) != check:
            return
        yield body, end
        at = end


def _int32(data: bytes) -> NDArray[np.int32]:
    return np.frombuffer(data, np.int32)
