"""How does a run without a model get one?

A small random Qwen3 (dense or with experts), Qwen2 or Llama with a tokenizer of 128 characters, in a folder as transformers
writes it. The same settings and seed give the same bytes. It is written aside and renamed: a folder that exists is complete.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from rpipe import config
from rpipe.data.entry import DataError

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
# Three special tokens, ASCII, and enough of mathematics to fill 128, a multiple of 64: every id that a model can draw is
# a character, and the vocabulary divides by any tensor-parallel size up to 64.
_CHARACTERS = [chr(c) for c in range(32, 127)] + list("\n\t") + list("×÷±·°²³√π∞∑∏∫∂∆≈≠≤≥∈∪∩→αβθλµ")
VOCABULARY = 3 + len(_CHARACTERS)
_CHAT = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_RECORD = "made_by_rpipe.json"


def make_model(make: config.MakeModel, directory: Path, seed: int) -> Path:
    """The folder, made unless this very model is already there. Raises DataError where something else is."""
    record = {"make": make.model_dump(), "seed": seed}
    if directory.exists():
        if _is(directory, record):
            return directory
        raise DataError(
            f"{directory}: holds something else than model.make with seed {seed}; wanted: another folder, or remove it"
        )
    check(make)
    directory.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        tokenizer = _tokenizer(make)
        tokenizer.save_pretrained(aside)
        _random_weights(make, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, seed).save_pretrained(aside)
        (aside / _RECORD).write_text(json.dumps(record))
        for file in aside.iterdir():
            _to_disk(file)
        aside.chmod(0o755)
        os.rename(aside, directory)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if not (isinstance(error, OSError) and _is(directory, record)):  # another process was first with the same
            raise
    return directory


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_tokenizer(directory: Path) -> Any:
    """The folder's tokenizer, without the network. Raises DataError."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    if not directory.is_dir():
        raise DataError(f"model.path = {directory}: no such folder; wanted: a Hugging Face model folder")
    if not any((directory / name).exists() for name in _TOKENIZER_FILES):
        raise DataError(f"model.path = {directory}: no tokenizer in it; wanted: one of {', '.join(_TOKENIZER_FILES)}")
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # a dozen kinds, by what is broken
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"model.path = {directory}: no tokenizer can be read: {line}") from None


def _is(directory: Path, record: dict[str, Any]) -> bool:
    found = directory / _RECORD
    return found.exists() and bool(json.loads(found.read_text()) == record)


def check(make: config.MakeModel) -> None:
    """Raises DataError where its sizes do not go together."""
    if make.heads % make.kv_heads:
        raise DataError(f"model.make.heads = {make.heads} is not a multiple of model.make.kv_heads = {make.kv_heads}")
    if make.head_dim % 2:
        raise DataError(f"model.make.head_dim = {make.head_dim}; wanted: an even number (rotary positions)")
    if make.architecture == "qwen3_moe" and not 1 < make.experts_per_token <= make.experts:
        raise DataError(
            f"model.make.experts_per_token = {make.experts_per_token}; wanted: 2 to model.make.experts = {make.experts}"
        )
    if make.architecture == "qwen2" and make.heads * make.head_dim != make.hidden_size:
        raise DataError(
            f"model.make: qwen2 has no head_dim of its own: heads x head_dim = {make.heads} x {make.head_dim};"
            f" wanted: hidden_size = {make.hidden_size}"
        )


def _tokenizer(make: config.MakeModel) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {c: i for i, c in enumerate([PAD, EOS, UNK, *_CHARACTERS])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        model_max_length=make.max_positions,
        clean_up_tokenization_spaces=False,
        chat_template=_CHAT,
    )


def _random_weights(make: config.MakeModel, vocabulary: int, eos_id: int, pad_id: int, seed: int) -> Any:
    import torch
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )
    from transformers.utils import logging

    logging.disable_progress_bar()
    shapes: dict[str, Any] = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }
    settings, model = shapes[make.architecture]
    own: dict[str, Any] = {} if make.architecture == "qwen2" else {"head_dim": make.head_dim}
    if make.architecture == "qwen3_moe":
        own.update(
            num_experts=make.experts,
            num_experts_per_tok=make.experts_per_token,
            moe_intermediate_size=make.intermediate_size,
            norm_topk_prob=True,
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = model(
            settings(
                vocab_size=vocabulary,
                hidden_size=make.hidden_size,
                intermediate_size=make.intermediate_size,
                num_hidden_layers=make.layers,
                num_attention_heads=make.heads,
                num_key_value_heads=make.kv_heads,
                max_position_embeddings=make.max_positions,
                tie_word_embeddings=make.tied,
                # 0.053 at 128 wide: 150 warm-up steps on sums reach a loss of 0.61 there, 0.78 with the usual 0.02
                initializer_range=0.6 / make.hidden_size**0.5,
                bos_token_id=None,
                eos_token_id=eos_id,
                pad_token_id=pad_id,
                dtype="float32",
                **own,
            )
        )
    made.generation_config.eos_token_id = eos_id
    made.generation_config.pad_token_id = pad_id
    return made


def _to_disk(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
