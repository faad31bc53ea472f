"""Which chained sums, and what does a worked solution look like?

    17+5+48=   ->   22+48=70          every partial sum is written, so the length varies with the number of terms
    17+5=      ->   22
    1+2+3+4=   ->   3+3=6+4=10

The space of sums is cut by a hash of the prompt: four fifths are for training and a fifth is held out, whatever the seeds,
so the two never share a prompt. Prompts of one set are distinct.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from rpipe.data.entry import DataError, Entry

_DEFAULTS = {"min_terms": 2, "max_terms": 3, "max_number": 20, "split": "train"}
_TRIES_PER_PROMPT = 200


def sums_entries(options: dict[str, Any], size: int, seed: int, key: str) -> list[Entry]:
    """`size` distinct sums of min_terms..max_terms numbers in 1..max_number. Raises DataError naming `key`."""
    low, high, largest, split = _checked(options, key)
    bits = np.random.Philox(np.random.SeedSequence([seed & 0xFFFFFFFFFFFFFFFF, 0x73756D73]))
    entries: dict[str, Entry] = {}
    for _ in range(size * _TRIES_PER_PROMPT):
        if len(entries) == size:
            break
        terms = [1 + _below(bits, largest) for _ in range(low + _below(bits, high - low + 1))]
        prompt = "+".join(map(str, terms)) + "="
        if prompt in entries or (split != "all" and held_out(prompt) != (split == "held_out")):
            continue
        answer = str(sum(terms))
        fields = {"prompt": prompt, "answer": answer, "terms": terms}
        entries[prompt] = Entry(
            f"sums[{len(entries)}]", prompt, answer, fields, {"solution": solution(terms), "terms": len(terms)}
        )
    if len(entries) < size:
        raise DataError(
            f"{key}.size = {size}: these options give only about {len(entries)} distinct sums for split {split};"
            f" wanted: a smaller size, more terms or a larger max_number"
        )
    return list(entries.values())


def solution(terms: list[int]) -> str:
    """The worked solution of a sum; its last integer is the answer."""
    total = sum(terms[:2])
    text = str(total)
    for term in terms[2:]:
        total += term
        text += f"+{term}={total}"
    return text


def held_out(prompt: str) -> bool:
    """True for the fifth of all sums that training never sees."""
    return hashlib.sha256(prompt.encode()).digest()[0] % 5 == 0


def _below(bits: np.random.Philox, n: int) -> int:
    return int(bits.random_raw()) % n  # raw: numpy promises this stream; the bias of a 64-bit modulus is nil


def _checked(options: dict[str, Any], key: str) -> tuple[int, int, int, str]:
    unknown = sorted(set(options) - set(_DEFAULTS))
    if unknown:
        raise DataError(f"{key}.options.{unknown[0]}: unknown; known for sums: {', '.join(_DEFAULTS)}")
    merged = {**_DEFAULTS, **options}
    for name, least in (("min_terms", 2), ("max_terms", merged["min_terms"]), ("max_number", 1)):
        value = merged[name]
        if type(value) is not int or value < least:
            raise DataError(f"{key}.options.{name} = {value!r}; wanted: a whole number of at least {least}")
    if merged["split"] not in ("train", "held_out", "all"):
        raise DataError(f"{key}.options.split = {merged['split']!r}; wanted: train, held_out or all")
    return merged["min_terms"], merged["max_terms"], merged["max_number"], merged["split"]
