"""How good is a response?

Every function is `(prompt_text, response_text, answer, metadata) -> float`, runs in a reward worker, and may be slow, hang
or raise: the pool bounds it. `load` finds one by name; `package.module:function` is a user's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Function = Callable[[str, str, str, Mapping[str, Any]], float]

CHEAP = ("exact_match", "last_integer")  # microseconds: many may wait in one worker's pipe
LARGEST = 1e30  # beyond it means and deviations overflow
MOST_WORDS = 150  # characters of what an import raised: what is wanted is told behind it

# A number as people write it; "-" is a sign unless it follows something that it could be subtracted from.
_NUMBER = re.compile(r"(?:(?<![\w)\]}])[-−])?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")
_BOXED_OR_DOLLAR = re.compile(r"\\boxed|\$|\\\(|\\\[")


def exact_match(prompt: str, response: str, answer: str, metadata: Mapping[str, Any]) -> float:
    """1 where response and answer are the same text, white space at the ends apart."""
    return float(response.strip() == answer.strip())


def last_integer(prompt: str, response: str, answer: str, metadata: Mapping[str, Any]) -> float:
    """1 where the response's last number is the answer. "1,234" and "1234.0" are 1234; "12.5" is no integer."""
    wanted = _integer(answer.strip())
    if wanted is None:
        raise ValueError(f"the prompt's answer {answer[:40]!r} is not an integer")
    numbers = _NUMBER.findall(response)
    return float(bool(numbers) and _integer(numbers[-1]) == wanted)


def _integer(text: str) -> str | None:
    """Canonical digits, or None. Text, not int(): a model can write a million digits, and int() is quadratic."""
    if not _NUMBER.fullmatch(text.removeprefix("+")):
        return None
    whole, _, fraction = text.removeprefix("+").replace(",", "").replace("−", "-").partition(".")
    if fraction.strip("0"):
        return None
    digits = whole.removeprefix("-").lstrip("0") or "0"
    return "-" + digits if whole.startswith("-") and digits != "0" else digits


def math_verify(prompt: str, response: str, answer: str, metadata: Mapping[str, Any]) -> float:
    """1 where math-verify finds the response's answer equal to the prompt's, as mathematics (LaTeX or plain)."""
    from math_verify import parse, verify

    gold = parse(answer if _BOXED_OR_DOLLAR.search(answer) else f"${answer}$")
    if not gold:
        raise ValueError(f"math-verify reads nothing in the prompt's answer {answer[:40]!r}")
    return float(verify(gold, parse(response)))


def reasoning_gym(prompt: str, response: str, answer: str, metadata: Mapping[str, Any]) -> float:
    """1 where the generator's own scorer gives full marks to the text in the last <answer> tag, or to all of it.

    Below full marks is 0: its default scorer gives partial credit to any text that contains the answer.
    """
    from rpipe.data.reasoning_gym_source import entry_again

    dataset, entry = entry_again(metadata["recipe"])
    if entry["question"] != metadata["question"]:
        raise ValueError("the generator made another question this time; its versions or options differ from the prompt's")
    tagged = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)
    try:
        return float(dataset.score_answer((tagged[-1] if tagged else response).strip(), entry) >= 1.0)
    except Exception:  # some scorers raise on what they cannot read (int("twelve")): that is a wrong answer, not a fault
        return 0.0


_BUILT_IN: dict[str, Function] = {f.__name__: f for f in (exact_match, last_integer, math_verify, reasoning_gym)}
_NEEDS = {"math_verify": ("math_verify", "math-verify"), "reasoning_gym": ("reasoning_gym", "reasoning-gym")}


def load(name: str) -> Function:
    """The function of that name, with what it needs imported. Raises ValueError with one line."""
    import importlib

    known = ", ".join(_BUILT_IN)
    if name in _BUILT_IN:
        module, package = _NEEDS.get(name, ("", ""))
        try:
            if module:
                importlib.import_module(module)
        except ImportError as error:
            raise ValueError(f"{error}; wanted: pip install {package}") from None
        return _BUILT_IN[name]
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ValueError(f"unknown; wanted: {known} or package.module:function")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except BaseException as error:  # a user's module may raise anything, SystemExit too
        line = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise ValueError(
            f"cannot be imported: {line[:MOST_WORDS]};"
            " wanted: package.module:function, on PYTHONPATH or below the working directory"
        ) from None
    if not callable(found):
        raise ValueError(f"is a {type(found).__name__}; wanted: a function")
    return found  # type: ignore[no-any-return]
