"""Which prompts does a run train on and evaluate, as token ids?

A source (`data.train`, `data.held_out`) is a JSONL file or a generator; its entries pass through the template, perhaps the
tokenizer's chat template, and are tokenized once. Messages name the file and line, or the config key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rpipe import config
from rpipe.core.types import Prompt
from rpipe.data.entry import DataError, Entry
from rpipe.data.jsonl import jsonl_entries
from rpipe.data.reasoning_gym_source import reasoning_gym_entries
from rpipe.data.sums import sums_entries

__all__ = ["DataError", "PromptSet", "load_data", "load_prompts"]


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts in the source's order, and where each reward function they name is asked for."""

    prompts: tuple[Prompt, ...]
    rewards: Mapping[str, str]  # function name -> "data.train.reward" or "train.jsonl:17"
    note: str = ""  # what a person should know: prompts left out

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)


def load_data(data: config.Data, tokenizer: Any, base_dir: Path) -> tuple[PromptSet, PromptSet | None]:
    """(train, held_out). Held-out prompts that training has too are left out, and `note` says how many.

    Raises DataError.
    """
    train = load_prompts(data.train, tokenizer, data.max_prompt_tokens, base_dir, "data.train")
    if data.held_out is None:
        return train, None
    source = data.held_out
    if source.kind == "sums":
        source = source.model_copy(update={"options": {"split": "held_out", **source.options}})
    held_out = load_prompts(source, tokenizer, data.max_prompt_tokens, base_dir, "data.held_out")
    return train, _apart(held_out, train)


def _apart(held_out: PromptSet, train: PromptSet) -> PromptSet:
    seen = {p.token_ids for p in train}
    kept = tuple(p for p in held_out if p.token_ids not in seen)
    lost = len(held_out) - len(kept)
    if not kept:
        raise DataError(f"data.held_out: every one of its {lost} prompts is in data.train too; wanted: prompts not trained on")
    note = f"data.held_out: {lost} of {len(held_out)} prompts are in data.train too and are left out" if lost else ""
    return replace(held_out, prompts=kept, note=note)


def load_prompts(
    source: config.Source, tokenizer: Any, max_prompt_tokens: int, base_dir: Path, key: str = "data.train"
) -> PromptSet:
    """Every prompt of a source; relative paths start at `base_dir`. Raises DataError, naming file and line or `key`."""
    entries = list(_entries(source, base_dir, key))
    texts = [_text(entry, source, tokenizer, key) for entry in entries]
    prompts: list[Prompt] = []
    rewards: dict[str, str] = {}
    for entry, text, ids in zip(entries, texts, _tokenize(texts, tokenizer)):
        if not ids:
            raise DataError(f"{entry.origin}: the prompt has no tokens; wanted: at least 1")
        if len(ids) > max_prompt_tokens:
            raise DataError(
                f"{entry.origin}: the prompt has {len(ids)} tokens;"
                f" wanted: at most data.max_prompt_tokens = {max_prompt_tokens}"
            )
        reward = entry.reward or source.reward
        rewards.setdefault(reward, entry.origin if entry.reward else f"{key}.reward")
        if reward == "reasoning_gym" and source.kind != "reasoning_gym":
            raise DataError(f"{rewards[reward]} = reasoning_gym: only prompts of kind reasoning_gym have its scorer")
        prompts.append(Prompt(entry.origin, tuple(ids), text, entry.answer, reward, entry.metadata))
    return PromptSet(tuple(prompts), rewards)


def _entries(source: config.Source, base_dir: Path, key: str) -> Iterable[Entry]:
    if source.kind == "jsonl":
        assert source.path is not None
        return jsonl_entries(base_dir / source.path, source.path)
    if source.kind == "sums":
        return sums_entries(source.options, source.size, source.seed, key)
    assert source.name is not None
    return reasoning_gym_entries(source.name, source.options, source.size, source.seed, key)


def _text(entry: Entry, source: config.Source, tokenizer: Any, key: str) -> str:
    """What the model reads: the template filled, in the chat template where asked for."""
    if isinstance(entry.prompt, list):
        return _chat(entry.prompt, tokenizer, f'{entry.origin}: "messages"', entry.origin)
    try:
        text = source.template.format(**entry.fields)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        known = ", ".join(entry.fields)
        raise DataError(
            f"{entry.origin}: {key}.template = {source.template!r}: {type(error).__name__}: {error}; fields here: {known}"
        ) from None
    if not source.chat:
        return text
    return _chat([{"role": "user", "content": text}], tokenizer, f"{key}.chat", entry.origin)


def _chat(messages: list[dict[str, Any]], tokenizer: Any, what: str, origin: str) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"{what} wants a chat template, and this model's tokenizer has none; wanted: a prompt, or another model"
        )
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs and raise what they like
        raise DataError(
            f"{origin}: the chat template refuses it: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from None
    return str(text)


def _tokenize(texts: list[str], tokenizer: Any) -> list[list[int]]:
    # No special tokens: a chat template has written its own, and a plain prompt has none.
    return tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []  # type: ignore[no-any-return]
