"""What is left of a console line when colours, progress bars and other processes' prefixes are off?

Console logs are written by many processes at once: lines are torn, joined, coloured. A reader takes what it can be sure of; the
rest is counted with its first examples, and shown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rpipe.analysis.run import RunError

ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")
NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf|Infinity|NaN)"
WRAPPED = re.compile(
    r"(?:np|numpy|torch)\.\w+\(\s*(" + NUMBER + r")\s*(?:,[^()]*)?\)|tensor\(\s*(" + NUMBER + r")\s*(?:,[^()]*)?\)"
)
EXAMPLES = 5
CHUNK = 1 << 20


@dataclass(slots=True)
class Unread:
    """What looked like figures and was none, by reason; `others` are lines that never claimed to be any."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)
    others: int = 0

    def add(self, line: int, why: str, text: str) -> None:
        self.counts[why] = self.counts.get(why, 0) + 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(f"line {line}: {why}: {text.strip()[:100]}")

    def sentences(self) -> list[str]:
        counted = ", ".join(f"{count} {why}" for why, count in sorted(self.counts.items()))
        told = [f"could not be read: {counted}"] if counted else []
        told += self.examples
        return told + ([f"{self.others:,} other lines hold no figures"] if self.others else [])


@dataclass(frozen=True, slots=True)
class Line:
    number: int
    text: str
    whole: bool  # False: the file ends in it, so its last word may be cut


def lines(path: Path) -> Iterator[Line]:
    """Lines without colours, however long the file is; a carriage return (a progress bar's) ends a line, too."""
    number, rest = 0, ""
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            while chunk := file.read(CHUNK):
                *done, rest = re.split(r"\r\n|\n|\r", rest + chunk)
                for text in done:
                    number += 1
                    yield Line(number, ANSI.sub("", text), True)
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from None
    if rest:
        yield Line(number + 1, ANSI.sub("", rest), False)


def unwrapped(text: str) -> str:
    """np.float64(0.5) and tensor(0.5, device='cuda:0') as plain numbers."""
    return WRAPPED.sub(lambda found: found[1] or found[2], text)


def number(text: str) -> float | None:
    """None where it is not finite."""
    value = float(text)
    return value if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class Part:
    """What stands behind one `head` of a line, up to the next, as plain text. `cut`: the file ends in it."""

    number: int
    head: re.Match[str]
    text: str
    cut: bool


def parts(found: Iterable[Line], head: re.Pattern[str], fragment: re.Pattern[str], torn: str, unread: Unread) -> Iterator[Part]:
    """One a head, for lines may be joined. A line without any is `torn` where it holds a `fragment` of figures."""
    for line in found:
        heads = list(head.finditer(line.text))
        if not heads and fragment.search(line.text):
            unread.add(line.number, torn, line.text)
        elif not heads:
            unread.others += 1
        ends = [*(following.start() for following in heads[1:]), len(line.text)]
        for at, (begin, end) in enumerate(zip(heads, ends), 1):
            yield Part(line.number, begin, unwrapped(line.text[begin.end() : end]), cut=at == len(heads) and not line.whole)
