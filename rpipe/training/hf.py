"""What does a Hugging Face model folder hold?

Its shape from config.json, as far as the trainer knows how to build it, and its tensors, read one at a time and only
when asked for. What the trainer would get wrong is refused here, in one line.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

if TYPE_CHECKING:  # imported where tensors are: the launcher reads shapes without it
    import torch

ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
}
INDEX = "model.safetensors.index.json"
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3.1's stretched rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder: Qwen3 (normed q and k; dense or with experts in every layer), Qwen2 (q, k, v with bias) or Llama (neither)."""

    architecture: str  # a key of ARCHITECTURES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_epsilon: float
    max_positions: int
    rope_theta: float
    tied: bool
    rope: Llama3Rope | None = None
    experts: int = 0  # 0: dense
    experts_per_token: int = 0
    expert_size: int = 0  # an expert's intermediate size
    norm_topk: bool = False  # whether the chosen experts' weights are made to add up to one

    @property
    def qk_norm(self) -> bool:
        return self.architecture.startswith("qwen3")

    @property
    def qkv_bias(self) -> bool:
        return self.architecture == "qwen2"


def read_shape(folder: Path) -> Shape:
    """Raises ValueError, naming the file and the key, for what cannot be trained."""
    path = folder / "config.json"
    try:
        c: Any = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}; model.path wants a Hugging Face folder") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}; model.path wants a Hugging Face folder") from None
    if not isinstance(c, dict):
        raise ValueError(f"{path}: not a JSON object; model.path wants a Hugging Face folder")
    kind = c.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"{path}: model_type = {kind!r} is not known; wanted: {', '.join(ARCHITECTURES)}")
    wrong: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",), "use_sliding_window": (False,), "mlp_bias": (False,)}
    if kind == "qwen3_moe":  # layers without experts among those with
        wrong.update(decoder_sparse_step=(1,), mlp_only_layers=([],))
    if kind != "qwen2":  # Qwen2 always has the bias, whatever the key says
        wrong["attention_bias"] = (False,)
    for key, allowed in wrong.items():
        if key in c and c[key] is not None and c[key] not in allowed:
            raise ValueError(f"{path}: {key} = {c[key]!r} cannot be trained; wanted: {allowed[0]!r}")
    try:
        heads = c["num_attention_heads"]
        return Shape(
            architecture=kind,
            vocab_size=c["vocab_size"],
            hidden_size=c["hidden_size"],
            intermediate_size=c["intermediate_size"],
            layers=c["num_hidden_layers"],
            heads=heads,
            kv_heads=c.get("num_key_value_heads") or heads,
            head_dim=c.get("head_dim") or (128 if kind.startswith("qwen3") else c["hidden_size"] // heads),
            norm_epsilon=c.get("rms_norm_eps", 1e-6),
            max_positions=c.get("max_position_embeddings", 32768),
            tied=c.get("tie_word_embeddings", False),
            **_rope(path, c),
            **_experts(kind, c),
        )
    except KeyError as error:
        raise ValueError(f"{path}: {error.args[0]} is missing") from None


def _experts(kind: str, c: Mapping[str, Any]) -> dict[str, Any]:
    if kind != "qwen3_moe":
        return {}
    return {
        "experts": c["num_experts"] if "num_experts" in c else c["num_local_experts"],  # the latter: transformers 5
        "experts_per_token": c["num_experts_per_tok"],
        "expert_size": c["moe_intermediate_size"],
        "norm_topk": c.get("norm_topk_prob", False),
    }


def _rope(path: Path, c: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 5 keeps everything in rope_parameters, 4 in rope_theta and rope_scaling."""
    settings = c.get("rope_parameters") or c.get("rope_scaling") or {}
    theta = settings.get("rope_theta", c.get("rope_theta", 10000.0))
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta}
    if kind != "llama3":
        raise ValueError(f"{path}: rope_type = {kind!r} cannot be trained; wanted: default or llama3")
    rope = Llama3Rope(
        settings["factor"],
        settings["low_freq_factor"],
        settings["high_freq_factor"],
        settings["original_max_position_embeddings"],
    )
    return {"rope_theta": theta, "rope": rope}


class Tensors(Mapping[str, "torch.Tensor"]):
    """A folder's safetensors, by name; a tensor is read each time it is asked for and not kept."""

    def __init__(self, folder: Path) -> None:
        index = folder / INDEX
        if index.exists():
            self._file = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
            missing = sorted({str(f) for f in self._file.values() if not f.exists()})
            if missing:
                raise ValueError(f"{index}: {missing[0]} is missing ({len(missing)} of its files are)")
        else:
            path = folder / "model.safetensors"
            if not path.exists():
                raise ValueError(f"{folder}: neither model.safetensors nor {INDEX} is there")
            with safe_open(str(path), framework="pt") as f:
                self._file = dict.fromkeys(f.keys(), path)
        self._open: dict[Path, Any] = {}
        self.folder = folder

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._file:
            raise ValueError(f"{self.folder}: {name} is in none of its safetensors")
        path = self._file[name]
        if path not in self._open:  # a mapped file costs no memory until it is read
            self._open[path] = safe_open(str(path), framework="pt")
        tensor: torch.Tensor = self._open[path].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)


def write_folder(folder: Path, source: Path, buckets: Iterable[list[tuple[str, torch.Tensor]]], dtype: str) -> None:
    """A folder that transformers loads: the weights (a file a bucket), `source`'s config and tokenizer. Complete or absent."""
    new = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        _fill(new, source, buckets, dtype)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)  # on a full disk it is a model's room that the next checkpoint wants
        raise
    if folder.exists():
        shutil.rmtree(folder)
    new.rename(folder)


def _fill(new: Path, source: Path, buckets: Iterable[list[tuple[str, torch.Tensor]]], dtype: str) -> None:
    from safetensors.torch import save_file

    names: list[list[str]] = []
    size = 0
    for bucket in buckets:
        # what the views of one parameter share would be refused by save_file
        tensors = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in bucket}
        save_file(tensors, str(new / f"part-{len(names)}"), metadata={"format": "pt"})
        names.append(list(tensors))
        size += sum(t.nbytes for t in tensors.values())
    if len(names) == 1:
        (new / "part-0").rename(new / "model.safetensors")
    else:
        file = [f"model-{i + 1:05d}-of-{len(names):05d}.safetensors" for i in range(len(names))]
        for i, name in enumerate(file):
            (new / f"part-{i}").rename(new / name)
        where = {name: file[i] for i, part in enumerate(names) for name in part}
        (new / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=2))
    for path in source.iterdir():
        if path.is_file() and path.suffix not in _NOT_COPIED and path.name not in ("config.json", INDEX):
            shutil.copy2(path, new / path.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    (new / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2))
