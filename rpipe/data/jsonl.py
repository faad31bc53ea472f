"""What does a JSONL file of prompts hold?

One object a line: `prompt` (text) or `messages` (for the chat template), `answer` (text or number), perhaps `reward`;
whatever else it has is metadata. Blank lines are skipped. Everything wrong is a DataError "file:line: found; wanted".
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from rpipe.data.entry import DataError, Entry

_WANTED = "wanted: prompt or messages, answer"
_LONGEST_NUMBER = 400  # digits; no float is longer, and Python's int() of more is slow or refused


def jsonl_entries(path: Path, shown: str) -> Iterator[Entry]:
    """Entries of a file in its order; `shown` is what messages call it. Raises DataError."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(f"{shown}: cannot be read: {error.strerror}") from None
    with file:
        count = 0
        try:
            for number, line in enumerate(file, 1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    count += 1
                    yield _entry(line.rstrip(b"\r\n"), f"{shown}:{number}")
        except OSError as error:  # a folder opens and fails on read
            raise DataError(f"{shown}: cannot be read: {error.strerror}") from None
        if not count:
            raise DataError(f"{shown}: holds no prompts; wanted: one JSON object a line")


def _entry(line: bytes, origin: str) -> Entry:
    tree = _parse(line, origin)
    prompt: str | list[dict[str, Any]]
    if ("prompt" in tree) == ("messages" in tree):
        found = "both" if "prompt" in tree else "neither"
        raise DataError(f'{origin}: {found} of "prompt" and "messages" given; {_WANTED}')
    if "prompt" in tree:
        prompt = _text(tree["prompt"], '"prompt"', origin)
    else:
        prompt = _messages(tree["messages"], origin)
    if "answer" not in tree:
        raise DataError(f'{origin}: "answer" is missing; {_WANTED}')
    answer = tree["answer"]
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        answer = str(answer)
    answer = _text(answer, '"answer"', origin, "text or a number", empty=True)
    reward = tree.get("reward")
    if reward is not None:
        reward = _text(reward, '"reward"', origin)
    metadata = {k: v for k, v in tree.items() if k not in ("prompt", "messages", "answer", "reward")}
    return Entry(origin, prompt, answer, {**tree, "answer": answer}, metadata, reward)


def _parse(line: bytes, origin: str) -> dict[str, Any]:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{origin}: not UTF-8 at byte {error.start + 1} of the line; wanted: a JSON object in UTF-8") from None
    try:
        tree = json.loads(text, parse_constant=_no_constant, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise DataError(f"{origin}: not JSON at column {error.colno}: {error.msg}; wanted: one JSON object a line") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{origin}: not JSON: {error}; wanted: one JSON object a line") from None
    if not isinstance(tree, dict):
        raise DataError(f"{origin}: a JSON {_kind(tree)}; wanted: a JSON object with prompt or messages, answer")
    return tree


def _messages(value: Any, origin: str) -> list[dict[str, Any]]:
    wanted = 'wanted: a list of {"role": text, "content": text}'
    if not isinstance(value, list) or not value:
        raise DataError(f'{origin}: "messages" is {_kind(value)}; {wanted}')
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise DataError(f'{origin}: "messages"[{i}] is {_kind(message)}; {wanted}')
        for key in ("role", "content"):
            _text(message.get(key), f'"messages"[{i}].{key}', origin, empty=key == "content")
    return value


def _text(value: Any, name: str, origin: str, wanted: str = "text", empty: bool = False) -> str:
    if not isinstance(value, str):
        raise DataError(f"{origin}: {name} is {_kind(value)}; wanted: {wanted}")
    if not value and not empty:
        raise DataError(f"{origin}: {name} is empty; wanted: {wanted}")
    if any("\ud800" <= c <= "\udfff" for c in value):
        raise DataError(f"{origin}: {name} holds half a surrogate pair, which no tokenizer reads; wanted: {wanted}")
    return value


def _kind(value: Any) -> str:
    if value is None:
        return "null or missing"
    names = {bool: "true or false", int: "number", float: "number", str: "text", list: "list", dict: "object"}
    empty = "empty " if value in ("", [], {}) else ""
    return empty + names[type(value)]


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _integer(digits: str) -> int:
    if len(digits) > _LONGEST_NUMBER:
        raise ValueError(f"a number of {len(digits)} digits; give it as text")
    return int(digits)
