"""Which checkpoints does a run hold, which are whole, and who may add to them?

    checkpoints/iteration-000004             whole: its manifest was written last, then it was renamed to this
    checkpoints/iteration-000006.attempt-2   attempt 2 writes it, or died writing it
    checkpoints/iteration-000006.damaged     set aside because it was not what its manifest says
    checkpoints/iteration-000006.replaced    moved aside for a newer one of its iteration; the next attempt finds it again
                                             where that one did not get its place (RunDir.put_back)

The manifest (`complete.json`) holds every file's size and CRC-32. An attempt writes under a name of its own and gives the
checkpoint its place only while the run directory is still its own: an orphan of an older attempt can neither
damage nor complete what a newer one writes. No torch here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rpipe.runtime.claim import require
from rpipe.runtime.rundir import REPLACED, RunDir

MANIFEST = "complete.json"
READ_BYTES = 8 << 20

Sum = tuple[int, str]  # a file's bytes, its CRC-32 in hexadecimal


class Damaged(ValueError):
    """A checkpoint that is not whole; the message names the file."""


class NotWritten(RuntimeError):
    """A checkpoint could not be written; what stood there before still stands."""


# ---- whose, and where


def begin(run: RunDir, iteration: int) -> Path:
    """The folder that this attempt writes to; what it or older ones left half-written is removed. Raises ClaimLost."""
    require(run)
    for entry in run.checkpoints.glob("iteration-*.*") if run.checkpoints.is_dir() else ():
        found = re.fullmatch(r"iteration-\d{6}\.(?:attempt-(\d+).*|old|replaced)", entry.name)
        if found and int(found.group(1) or 0) <= run.attempt:
            shutil.rmtree(entry, ignore_errors=True)
    return part(run, iteration)


def part(run: RunDir, iteration: int) -> Path:
    return run.checkpoint(iteration).with_name(f"{run.checkpoint(iteration).name}.attempt-{run.attempt}")


def publish(run: RunDir, iteration: int, keep: int) -> Path:
    """Give what `begin` named its place, then keep the newest `keep` only. Raises ClaimLost."""
    require(run)
    place = run.checkpoint(iteration)
    replaced = place.with_name(place.name + REPLACED)
    if place.exists():  # an attempt that fell back trained this iteration again
        os.rename(place, replaced)
    os.rename(part(run, iteration), place)
    sync(run.checkpoints)
    shutil.rmtree(replaced, ignore_errors=True)
    for entry in [*run.checkpoints_found()[keep:], *run.checkpoints.glob("iteration-*.damaged")]:
        if entry.name[: len(place.name)] <= place.name:
            _remove(entry)
    return place


def set_aside(directory: Path) -> Path:
    """Out of the list of checkpoints, still there to look at until a newer one is whole."""
    aside = directory.with_name(directory.name + ".damaged")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(directory, aside)
    return aside


def _remove(directory: Path) -> None:
    """First by name, so that half of it is never taken for a checkpoint."""
    if not directory.suffix:
        old = directory.with_name(directory.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        with contextlib.suppress(OSError):
            directory = directory.rename(old)
    shutil.rmtree(directory, ignore_errors=True)


# ---- whole or not


def measure(path: Path) -> Sum:
    """A file's sum, once it is on the disk."""
    crc, count = 0, 0
    with path.open("rb") as file:
        os.fsync(file.fileno())
        while block := file.read(READ_BYTES):
            crc, count = zlib.crc32(block, crc), count + len(block)
    return count, f"{crc:08x}"


def seal(directory: Path, sums: Mapping[str, Sum]) -> None:
    """Write the manifest, the last file of a checkpoint."""
    with (directory / MANIFEST).open("w") as file:
        json.dump({"files": sums}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync(directory)


def manifest(directory: Path) -> dict[str, Sum]:
    """name -> its sum. Raises Damaged where there is none, and where a file is missing or has another size."""
    path = directory / MANIFEST
    try:
        files = {str(name): (int(nbytes), str(crc)) for name, (nbytes, crc) in json.loads(path.read_text())["files"].items()}
    except FileNotFoundError:
        raise Damaged(f"{directory}: no complete checkpoint ({MANIFEST} is missing)") from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise Damaged(f"{path}: damaged: {type(error).__name__}: {error}") from None
    for name, (nbytes, _) in files.items():
        found = (directory / name).stat().st_size if (directory / name).exists() else None
        if found != nbytes:
            what = "missing" if found is None else f"{found} bytes"
            raise Damaged(f"{directory / name}: {what}, wanted {nbytes}: the checkpoint is damaged")
    return files


def require_one(found: Sequence[Path]) -> None:
    """Raises Damaged unless one of these has all its files, in their sizes; what is in them the ranks read."""
    told: list[str] = []
    for directory in found:
        try:
            manifest(directory)
        except Damaged as error:
            told.append(str(error))
        else:
            return
    raise Damaged(none_whole(found[0].parent, told))


def none_whole(folder: Path, told: Sequence[str]) -> str:
    """The line that ends a run whose checkpoints are all damaged."""
    return (
        f"no checkpoint in {folder} can be read: {'; '.join(told)};"
        " wanted: one of them whole, or that folder removed to begin anew"
    )


def verify(directory: Path, names: Iterable[str], files: Mapping[str, Sum]) -> str:
    """Read these files whole; returns what is wrong with the first that differs, "" where none does."""
    for name in names:
        try:
            found = measure(directory / name)
        except OSError as error:
            return f"{directory / name}: cannot be read: {error.strerror}: the checkpoint is damaged"
        if found != tuple(files[name]):
            return f"{directory / name}: its sum is {found[1]}, wanted {files[name][1]}: the checkpoint is damaged"
    return ""


def sync(directory: Path) -> None:
    """A folder's names onto the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
