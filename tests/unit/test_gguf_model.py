"""Does a GGUF file become a folder that trains, once, and is what is missing told in one line?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rpipe import config
from rpipe.data.entry import DataError
from rpipe.data.gguf_model import convert, folder

HIDDEN, FFN, HEADS, KEYS, VOCABULARY = 32, 64, 4, 2, 40


def tiny(path: Path) -> dict[str, Any]:
    """A one-layer Llama with a byte-level tokenizer, unquantized; its tensors as Hugging Face lays them out."""
    import gguf

    r, kv = np.random.default_rng(0), HIDDEN // HEADS * KEYS
    shapes = {
        "token_embd": (VOCABULARY, HIDDEN), "output_norm": (HIDDEN,), "blk.0.attn_norm": (HIDDEN,), "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.attn_q": (HIDDEN, HIDDEN), "blk.0.attn_k": (kv, HIDDEN), "blk.0.attn_v": (kv, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN), "blk.0.ffn_gate": (FFN, HIDDEN), "blk.0.ffn_up": (FFN, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FFN),
    }  # fmt: skip
    tensors = {name: r.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEYS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["<s>", "</s>", "<unk>", "ab", *(chr(ord("A") + i) for i in range(VOCABULARY - 6)), "a", "b"])
    writer.add_token_types([3, 3, 3, *[1] * (VOCABULARY - 3)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def model(gguf: str, cache: Path) -> config.Model:
    return config.Model(gguf=gguf, cache_dir=str(cache))


def test_a_gguf_file_becomes_a_folder_that_the_trainer_reads(tmp_path: Path) -> None:
    import torch

    from rpipe.data.make_model import load_tokenizer
    from rpipe.training.hf import Tensors, read_shape

    tensors = tiny(tmp_path / "tiny.gguf")
    made = convert(model(str(tmp_path / "tiny.gguf"), tmp_path / "cache"))
    shape = read_shape(made)
    assert (shape.architecture, shape.layers, shape.heads, shape.kv_heads, shape.tied) == ("llama", 1, HEADS, KEYS, True)
    found = Tensors(made)
    assert torch.equal(found["model.layers.0.mlp.down_proj.weight"], torch.from_numpy(tensors["blk.0.ffn_down"]))
    # llama.cpp keeps the rows of q and k for interleaved rotation: the reader must put them back
    wanted = torch.from_numpy(tensors["blk.0.attn_q"]).view(HEADS, -1, 2, HIDDEN).transpose(1, 2).reshape(HIDDEN, HIDDEN)
    assert torch.equal(found["model.layers.0.self_attn.q_proj.weight"], wanted)
    assert load_tokenizer(made).eos_token_id == 1
    before = (made / "config.json").stat().st_mtime_ns
    assert convert(model(str(tmp_path / "tiny.gguf"), tmp_path / "cache")) == made
    assert (made / "config.json").stat().st_mtime_ns == before
    assert [p.name for p in made.parent.iterdir()] == [made.name]  # nothing half-made is left


def test_what_is_missing_is_told_with_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no package no_such_package is installed; wanted: a GGUF file, or PACKAGE/FILE"):
        folder(model("no_such_package/x.gguf", tmp_path))
    with pytest.raises(DataError, match=r"package pytest is installed, but .*x\.gguf is not there"):
        folder(model("pytest/x.gguf", tmp_path))


def test_a_file_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF nonsense")
    with pytest.raises(DataError, match=r"bad\.gguf cannot be read") as error:
        convert(model(str(tmp_path / "bad.gguf"), tmp_path / "cache"))
    assert "\n" not in str(error.value)
    assert list((tmp_path / "cache").iterdir()) == []
