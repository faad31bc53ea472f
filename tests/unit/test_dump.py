from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from rpipe.core.types import Sequences, VersionSpan
from rpipe.runtime import dump as dump_module
from rpipe.runtime.dump import TrajectoryDump, as_trajectory, read_trajectories
from rpipe.runtime.scalars import Scalars


def add(dump: TrajectoryDump, iteration: int, group: int, index: int, purpose: str = "train", error: str = "") -> None:
    dump.add(
        iteration=iteration,
        purpose=purpose,
        group=group,
        index=index,
        prompt_id="sums[3]",
        prompt_text="12+7=",
        response_text="19",
        prompt_ids=(5, 6, 7),
        output_ids=np.array([8, 9 + index], np.int32),
        logprobs=np.array([-0.1, -1 / 3], np.float32),
        reward=0.25,
        advantage=None if purpose == "eval" else -1.5,
        finish="stop",
        versions=[(0, 1, 4), (1, 2, 5)],
        engine=1,
        error=error,
    )


def test_what_was_added_is_read_back_bit_for_bit(tmp_path: Path):
    dump = TrajectoryDump(tmp_path / "trajectories")
    add(dump, 3, 48, 0)
    add(dump, 3, 48, 1, error="no answer in 10 s")
    add(dump, 3, -1, 0, purpose="eval")
    dump.flush(3)
    dump.close()
    assert sorted(p.name for p in (tmp_path / "trajectories").iterdir()) == [
        "iteration-000003.eval.parquet",
        "iteration-000003.parquet",
    ]
    held_out, first, second = read_trajectories(tmp_path / "trajectories")
    assert (held_out["purpose"], held_out["group"], held_out["advantage"]) == ("eval", -1, None)
    assert first["logprobs"].dtype == np.float32
    assert first["logprobs"].tobytes() == np.array([-0.1, -1 / 3], np.float32).tobytes()
    assert first["output_ids"].dtype == np.int32 and first["prompt_ids"].tolist() == [5, 6, 7]
    assert (first["reward"], first["advantage"], first["engine"], first["finish"]) == (0.25, -1.5, 1, "stop")
    assert first["versions"] == [(0, 1, 4), (1, 2, 5)] and second["error"] == "no answer in 10 s"
    assert (first["prompt_id"], first["prompt_text"], first["response_text"]) == ("sums[3]", "12+7=", "19")


def test_recorded_rows_become_the_sequences_that_the_trainer_takes(tmp_path: Path):
    dump = TrajectoryDump(tmp_path)
    add(dump, 0, 0, 0)
    add(dump, 0, 0, 1)
    dump.close()
    rows = read_trajectories(tmp_path)
    trajectories = [as_trajectory(row) for row in rows]
    assert trajectories[1].id == (0, 1) and trajectories[0].versions == (VersionSpan(0, 1, 4), VersionSpan(1, 2, 5))
    sequences = Sequences.of(trajectories, [row["reward"] for row in rows], [row["advantage"] for row in rows])
    assert sequences.token_ids.tolist() == [5, 6, 7, 8, 9, 5, 6, 7, 8, 10] and sequences.advantages.tolist() == [-1.5, -1.5]


def test_a_second_flush_of_an_iteration_adds_and_a_resumed_attempt_replaces(tmp_path: Path):
    first = TrajectoryDump(tmp_path)
    for group in (0, 1):
        add(first, 0, group, 0)
        first.flush(0)
    first.close()
    assert [row["group"] for row in read_trajectories(tmp_path)] == [0, 1]
    resumed = TrajectoryDump(tmp_path)
    add(resumed, 0, 7, 0)
    resumed.flush(0)
    resumed.close()
    assert [row["group"] for row in read_trajectories(tmp_path)] == [7]


def test_an_attempt_that_lost_the_run_leaves_the_newer_ones_parts_alone(tmp_path: Path):
    newer = TrajectoryDump(tmp_path)
    add(newer, 0, 7, 0)
    newer.close()

    def lost() -> None:
        raise RuntimeError("attempt 1 lost the run to attempt 2")

    said: list[str] = []
    older = TrajectoryDump(tmp_path, warn=said.append, require=lost)
    add(older, 0, 1, 0)
    older.close()
    assert [row["group"] for row in read_trajectories(tmp_path)] == [7]
    assert len(said) == 1 and "no more trajectories are written: attempt 1 lost the run to attempt 2" in said[0]


def test_flush_writes_its_own_iteration_only_and_close_the_rest(tmp_path: Path):
    dump = TrajectoryDump(tmp_path)
    add(dump, 0, 0, 0)
    add(dump, 1, 16, 0)
    dump.flush(0)
    dump.flush(5)
    until = time.monotonic() + 20
    while not list(tmp_path.glob("iteration-*.parquet")) and time.monotonic() < until:
        time.sleep(0.01)
    assert [p.name for p in tmp_path.glob("iteration-*.parquet")] == ["iteration-000000.parquet"]
    dump.close()
    assert [row["iteration"] for row in read_trajectories(tmp_path)] == [0, 1]


def test_a_part_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def half(table: object, where: Path, **options: object) -> None:
        Path(where).write_bytes(b"PAR1 and no more")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dump_module.pq, "write_table", half)
    said: list[str] = []
    dump = TrajectoryDump(tmp_path, warn=said.append)
    for iteration in range(3):
        add(dump, iteration, iteration, 0)
        dump.flush(iteration)
    dump.close()
    assert list(tmp_path.iterdir()) == []
    assert len(said) == 1 and "no more trajectories are written: [Errno 28] No space left on device" in said[0]
    add(dump, 9, 9, 0)  # off: costs no memory, says nothing
    dump.flush(9)
    dump.close()
    assert len(said) == 1


@pytest.mark.timeout(60)
def test_a_disk_that_hangs_costs_parts_and_a_bounded_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    release = threading.Event()
    monkeypatch.setattr(dump_module, "write_part", lambda *a, **k: release.wait(30))
    said: list[str] = []
    dump = TrajectoryDump(tmp_path, warn=said.append)
    began = time.monotonic()
    for iteration in range(dump_module.QUEUED_PARTS + 3):
        add(dump, iteration, iteration, 0)
        dump.flush(iteration)
    dump.close(timeout_s=0.5)
    assert time.monotonic() - began < 5
    release.set()
    assert any("parts behind" in line for line in said) and "the disk took over 0.5 s" in said[-1]


def test_no_recording_is_said_so(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no recorded trajectories"):
        read_trajectories(tmp_path)


def test_parts_are_plain_parquet_with_named_columns(tmp_path: Path):
    dump = TrajectoryDump(tmp_path)
    add(dump, 0, 0, 0)
    dump.close()
    assert pq.read_schema(tmp_path / "iteration-000000.parquet").names == dump_module.SCHEMA.names


# ---- TensorBoard scalars: the other thing that a full disk must not turn into a dead job


def test_scalars_are_what_tensorboard_reads(tmp_path: Path):
    from tensorboardX.proto.event_pb2 import Event

    scalars = Scalars(tmp_path / "tb")
    scalars.write(7, {"train/reward": 0.5, "train/entropy": 1.25})
    [file] = (tmp_path / "tb").iterdir()
    raw, at, events = file.read_bytes(), 0, []
    while at < len(raw):  # TFRecord: length (8), its checksum (4), payload, its checksum (4); readable before close
        size = int.from_bytes(raw[at : at + 8], "little")
        events.append(Event.FromString(raw[at + 12 : at + 12 + size]))
        at += 16 + size
    scalars.close()
    assert events[0].file_version == "brain.Event:2" and events[1].step == 7
    assert {value.tag: value.simple_value for value in events[1].summary.value} == {"train/reward": 0.5, "train/entropy": 1.25}


def test_scalars_on_a_bad_disk_warn_once_and_fall_silent(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    said: list[str] = []
    scalars = Scalars(tmp_path / "file" / "tb", warn=said.append)
    scalars.write(1, {"a": 1.0})
    scalars.close()
    assert len(said) == 1 and "no more TensorBoard scalars" in said[0]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.timeout(30)
def test_scalars_on_a_full_disk_warn_once_and_never_block(tmp_path: Path):
    said: list[str] = []
    scalars = Scalars(tmp_path, warn=said.append)
    with Path("/dev/full").open("wb", buffering=0) as full:
        scalars._writer._py_recordio_writer._writer = full
        for step in range(100):
            scalars.write(step, {"a": 1.0})
        scalars.close()
    assert len(said) == 1 and "No space left on device" in said[0]
