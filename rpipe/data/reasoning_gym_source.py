"""How are reasoning-gym's entries made the same every time, and found again by their scorer?

Some generators iterate over sets of strings, so their output follows PYTHONHASHSEED: entries are made in a helper process
with the seed fixed. Entries hold tuples and the like that no message carries faithfully, so a prompt carries its
`Recipe`; the reward worker, under the same hash seed, makes the entry again and checks that the question is the same.

Entry i of seed s is entry i - 1 of seed s + 1 there: seeds are hashed first, else a held-out set of the next seed would
be the training set shifted by one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
from functools import lru_cache
from types import ModuleType
from typing import Any

from rpipe.data.child import child_environment
from rpipe.data.entry import DataError, Entry

_DEADLINE_S = 300.0
_GARBAGE = "~ no answer ~"
_PROBED = 8  # entries whose scorer is tried on garbage


def reasoning_gym_entries(name: str, options: dict[str, Any], size: int, seed: int, key: str) -> list[Entry]:
    """`size` entries of one generator. Raises DataError naming `key`."""
    recipe = {"name": name, "options": options, "size": size, "seed": _spread(seed)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "rpipe.data.reasoning_gym_source"],
            input=json.dumps(recipe),
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            env=child_environment(),
        )
    except subprocess.TimeoutExpired:
        raise DataError(f"{key}: reasoning_gym {name} made no {size} entries in {_DEADLINE_S:.0f} s") from None
    last = (done.stdout.strip().splitlines() or ["null"])[-1]
    reply = json.loads(last) if done.returncode == 0 else None
    if not isinstance(reply, dict):
        trace = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise DataError(f"{key}: reasoning_gym {name} failed: {trace}")
    if "error" in reply:
        raise DataError(f"{key}: {reply['error']}")
    return [_entry(recipe, i, made) for i, made in enumerate(reply["entries"])]


def _entry(recipe: dict[str, Any], index: int, made: dict[str, Any]) -> Entry:
    fields = {"prompt": made["question"], **made}
    metadata = {"recipe": {**recipe, "index": index}, "question": made["question"], "entry": made["metadata"]}
    return Entry(f"{recipe['name']}[{index}]", made["question"], made["answer"], fields, metadata)


def _spread(seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"reasoning_gym {seed}".encode()).digest()[:4], "big") >> 1


# ---- in the helper process and in the reward worker: reasoning_gym is imported here only ------------------------------


def entry_again(recipe: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """(data set, entry) of a prompt's recipe."""
    dataset = _dataset(recipe["name"], json.dumps(recipe["options"], sort_keys=True), recipe["size"], recipe["seed"])
    return dataset, dataset[recipe["index"]]


class _NoPycosat(ModuleType):
    """Stands in for the SAT solver that has no wheel: only the zebra puzzles call it, and they then say why they cannot."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(f"pycosat.{name}: pycosat is not installed (it has no wheel and wants a C compiler)")


def _import_reasoning_gym() -> Any:
    """reasoning_gym imports every generator's needs at once, pycosat among them."""
    if "pycosat" not in sys.modules and importlib.util.find_spec("pycosat") is None:
        sys.modules["pycosat"] = _NoPycosat("pycosat")
    return importlib.import_module("reasoning_gym")


@lru_cache(maxsize=16)
def _dataset(name: str, options: str, size: int, seed: int) -> Any:
    return _import_reasoning_gym().create_dataset(name, size=size, seed=seed, **json.loads(options))


def _make(recipe: dict[str, Any]) -> dict[str, Any]:
    try:
        _import_reasoning_gym()
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        return {"error": f"kind = reasoning_gym: {error}; wanted: pip install reasoning-gym"}
    name = recipe["name"]
    if name not in DATASETS:
        import difflib

        close = difflib.get_close_matches(name, DATASETS, 3) or sorted(DATASETS)[:5]
        return {"error": f"name = {name}: no such reasoning_gym generator; close: {', '.join(close)}"}
    try:
        dataset = _dataset(name, json.dumps(recipe["options"], sort_keys=True), recipe["size"], recipe["seed"])
        entries = [dataset[i] for i in range(recipe["size"])]
    except Exception as error:  # a generator's own checks of its options are asserts, TypeErrors, anything
        return {"error": f"reasoning_gym {name} refuses options = {recipe['options']}: {type(error).__name__}: {error}"}
    if any(_accepts_garbage(dataset, entry) for entry in entries[:_PROBED]):
        return {
            "error": f"name = {name}: this generator's scorer gives full marks to {_GARBAGE!r}; nothing can be learned from it"
        }
    return {
        "entries": [{"question": e["question"], "answer": str(e["answer"]), "metadata": e.get("metadata", {})} for e in entries]
    }


def _accepts_garbage(dataset: Any, entry: dict[str, Any]) -> bool:
    try:
        return bool(dataset.score_answer(_GARBAGE, entry) >= 1.0)
    except Exception:  # a scorer that raises scores 0
        return False


def _plain(value: Any) -> Any:
    return sorted(value, key=str) if isinstance(value, (set, frozenset)) else str(value)


if __name__ == "__main__":
    reply = _make(json.loads(sys.stdin.read()))
    print("\n" + json.dumps(reply, default=_plain, skipkeys=True))
