"""The model made on the spot: what transformers reads back."""

import os

import pytest

from rpipe import config
from rpipe.data.entry import DataError
from rpipe.data.make_model import load_tokenizer, make_model

SMALL = config.MakeModel(hidden_size=32, intermediate_size=64, layers=2, heads=4, kv_heads=2, head_dim=8, max_positions=64)


def sized(**keys):
    return SMALL.model_copy(update=keys)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_the_model_back(tmp_path, architecture, tied):
    import torch
    from transformers import AutoModelForCausalLM

    folder = make_model(sized(architecture=architecture, tied=tied), tmp_path / "model", 0)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(folder)
    assert model.config.model_type == architecture
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer) == 128
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    assert torch.isfinite(model(torch.arange(10)[None]).logits).all()


def test_every_id_is_a_character_and_text_comes_back_as_it_was(tmp_path):
    tokenizer = load_tokenizer(make_model(SMALL, tmp_path / "model", 0))
    text = " 17+5  = 22 ,\n don't <b> 3 ≤ √π !"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    characters = [tokenizer.decode([i]) for i in range(128)]
    assert len(set(characters)) == 128 and all(characters)
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_messages_work(tmp_path):
    tokenizer = load_tokenizer(make_model(SMALL, tmp_path / "model", 0))
    text = tokenizer.apply_chat_template([{"role": "user", "content": "1+1?"}], tokenize=False, add_generation_prompt=True)
    assert text == "user: 1+1?\nassistant: "


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(tmp_path):
    import torch

    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    first, again, other = (make_model(SMALL, tmp_path / name, seed) for name, seed in (("a", 3), ("b", 3), ("c", 4)))
    weights = [(folder / "model.safetensors").read_bytes() for folder in (first, again, other)]
    assert weights[0] == weights[1] != weights[2]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_model_that_is_there_is_kept_and_another_is_refused(tmp_path):
    folder = make_model(SMALL, tmp_path / "model", 0)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    make_model(SMALL, folder, 0)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(DataError, match=r"holds something else than model.make with seed 1"):
        make_model(SMALL, folder, 1)


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_model(SMALL, tmp_path / "model", 0)
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_was_first_with_the_same_model_is_no_error(tmp_path, monkeypatch):
    rename = os.rename

    def late(aside, directory):
        monkeypatch.setattr(os, "rename", rename)
        make_model(SMALL, directory, 0)
        rename(aside, directory)

    monkeypatch.setattr(os, "rename", late)
    make_model(SMALL, tmp_path / "model", 0)
    assert [f.name for f in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kv_heads": 3}, "model.make.heads = 4 is not a multiple of model.make.kv_heads = 3"),
        ({"head_dim": 7}, "model.make.head_dim = 7; wanted: an even number"),
        (
            {"architecture": "qwen2", "head_dim": 16},
            "qwen2 has no head_dim of its own: heads x head_dim = 4 x 16; wanted: hidden_size = 32",
        ),
    ],
)
def test_shapes_that_cannot_be_are_refused(tmp_path, keys, message):
    with pytest.raises(DataError, match=message):
        make_model(sized(**keys), tmp_path / "model", 0)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_tokenizer_is_one_line(tmp_path):
    with pytest.raises(DataError, match="no such folder; wanted: a Hugging Face model folder"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(DataError, match=r"no tokenizer in it; wanted: one of tokenizer\.json, .+") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"no tokenizer can be read: .+") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
