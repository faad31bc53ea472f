"""How large is the model? From model.shape, model.make or the config.json in model.path, never its weights."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpipe.config import Config, ConfigError

BYTES = {"float32": 4, "bfloat16": 2}
CHARACTERS = 104  # vocabulary of a made model, about


@dataclass(frozen=True, slots=True)
class Shape:
    parameters: int
    active_parameters: int  # of one token
    layers: int
    hidden_size: int
    kv_heads: int
    head_dim: int
    experts: int
    experts_per_token: int
    bytes_per_value: int
    vocabulary: int = 0  # rows of the embedding; 0: nothing says it
    tied: bool = False  # the output layer is the embedding

    @property
    def dense_parameters(self) -> float:
        """All but the experts; what every token meets."""
        if self.experts == 1:
            return self.parameters
        share = self.experts_per_token / self.experts
        return (self.active_parameters - share * self.parameters) / (1 - share)

    @property
    def active_layer_parameters(self) -> float:
        """Of one layer, those that one token meets; embedding and output layer apart."""
        return (self.active_parameters - self.end_parameters) / self.layers

    @property
    def end_parameters(self) -> float:
        """Of embedding and output layer."""
        return min((1 if self.tied else 2) * self.vocabulary * self.hidden_size, self.active_parameters / 2)

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.bytes_per_value

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_value

    def weight_bytes_read(self, tokens: float) -> float:
        """By a forward pass of `tokens`: an expert that no token chose is not read."""
        if self.experts == 1:
            return self.weight_bytes
        share = self.experts_per_token / self.experts
        dense = self.dense_parameters
        touched = 1 - math.pow(1 - share, tokens)
        return (dense + (self.parameters - dense) * touched) * self.bytes_per_value


def shape_of(config: Config) -> Shape:
    """Raises ConfigError with one line where nothing says it."""
    model, value = config.model, BYTES[config.dtype]
    if model.shape is not None:
        s = model.shape
        active = s.active_parameters or s.parameters
        return Shape(
            s.parameters,
            active,
            s.layers,
            s.hidden_size,
            s.kv_heads,
            s.head_dim,
            s.experts,
            s.experts_per_token,
            value,
            s.vocabulary,
            s.tied,
        )
    if model.make is not None and model.make.architecture == "qwen3_moe":
        raise ConfigError("model.make.architecture = qwen3_moe: nothing says how large it is; wanted: model.shape")
    if model.make is not None:
        m = model.make
        return _dense(m.hidden_size, m.intermediate_size, m.layers, m.heads, m.kv_heads, m.head_dim, CHARACTERS, m.tied, value)
    if model.path is None:
        raise ConfigError("model.gguf: it is not read for its size; wanted: model.shape")
    return _read(Path(model.path).expanduser() / "config.json", value)


def _dense(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int, words: int, tied: bool, value: int
) -> Shape:
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    parameters = layers * (attention + 3 * hidden * intermediate + 2 * hidden) + words * hidden * (1 if tied else 2)
    return Shape(parameters, parameters, layers, hidden, kv_heads, head_dim, 1, 1, value, words, tied)


def _read(path: Path, value: int) -> Shape:
    try:
        tree: dict[str, Any] = json.loads(path.read_text())
        heads, hidden = tree["num_attention_heads"], tree["hidden_size"]
        if tree.get("num_experts", 1) > 1:
            raise ConfigError(f"{path}: a mixture of experts; wanted: model.shape, which says its active parameters")
        return _dense(
            hidden,
            tree["intermediate_size"],
            tree["num_hidden_layers"],
            heads,
            tree.get("num_key_value_heads", heads),
            tree.get("head_dim") or hidden // heads,
            tree["vocab_size"],
            bool(tree.get("tie_word_embeddings")),
            value,
        )
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; wanted: that file, or model.shape") from None
    except (json.JSONDecodeError, KeyError) as error:
        raise ConfigError(f"{path}: not a model's config: {error}; wanted: that file, or model.shape") from None
