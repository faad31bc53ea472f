"""Can what the config names be used here? The launcher asks, before a rank is started and before any device is touched.

    read    is the model's folder there? Every line of JSONL files
    fits    the model's config.json: does the trainer's layout cut it, and has every host the memory for its ranks?
    tried   reward, filter and environment functions load, in a reward worker and never in here; engine.python imports SGLang

What cannot is one line: the key, what was found, what is wanted. Inside a Slurm allocation "here" is its first node, where an
engine will run; each rank still looks where it is itself. No torch.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rpipe.config import Config, MakeModel
from rpipe.data import gguf_model, make_model
from rpipe.data.entry import DataError
from rpipe.data.jsonl import jsonl_entries
from rpipe.rollout.reward_functions import CHEAP
from rpipe.rollout.rewards import RewardError, RewardPool
from rpipe.rollout.sglang_launch import server_environment
from rpipe.rollout.sglang_server import last_word
from rpipe.runtime import child, host
from rpipe.runtime.mpirun import LaunchError, job_environment
from rpipe.training import convert, memory
from rpipe.training.hf import Shape, read_shape

IMPORTED = "sglang was imported"
LOOK_S = 0.02


def read(config: Config) -> dict[str, str]:
    """Which functions the run will load: name -> the key or line that asks for it. Raises DataError for folders and files that
    are not there, and for a line that cannot be read."""
    model = config.model
    if model.path is not None and not Path(model.path).expanduser().is_dir():
        raise DataError(f"model.path = {model.path}: no such folder; wanted: a Hugging Face model folder")
    if model.gguf is not None:
        gguf_model.source(model)
    if model.make is not None:
        make_model.check(model.make)
    found: dict[str, str] = {}
    for key, source in (("data.train", config.data.train), ("data.held_out", config.data.held_out)):
        if source is None:
            continue
        if source.kind != "jsonl" or source.path is None:
            found.setdefault(source.reward, f"{key}.reward")
            continue
        for entry in jsonl_entries(Path.cwd() / source.path, source.path):
            found.setdefault(entry.reward or source.reward, entry.origin if entry.reward else f"{key}.reward")
    if config.filter_function:
        found[config.filter_function] = "rollout.filter"
    if config.environment_function:
        found[config.environment_function] = "rollout.environment"
    return found


def fits(config: Config, hosts: Sequence[str]) -> None:
    """`hosts`: of every rank, rollout first. Raises LaunchError.

    An accelerator's memory is known here only where cluster.device_memory_bytes says it; else its rank looks, at its start.
    """
    try:
        shape = shape_of(config)
        if shape is not None:
            convert.check_layout(shape, config.training)
    except ValueError as error:
        raise LaunchError(str(error)) from None
    there = config.cluster.device_memory_bytes
    if there is None and config.cluster.accelerator == "cpu":
        there = host.memory_bytes()
    if shape is None or there is None:
        return
    why = memory.problem(config, memory.needs(config, shape), there, hosts)
    if why:
        raise LaunchError(why)


def shape_of(config: Config) -> Shape | None:
    """The model's, from its config or its folder. None: a GGUF file that was not converted yet. Raises ValueError."""
    model = config.model
    if model.make is not None:
        return _made(model.make)
    if model.path is not None:
        return read_shape(Path(model.path).expanduser())
    folder = gguf_model.folder(model)
    return read_shape(folder) if folder.is_dir() else None


def _made(make: MakeModel) -> Shape:
    moe = make.architecture == "qwen3_moe"
    return Shape(
        architecture=make.architecture,
        vocab_size=make_model.VOCABULARY,
        hidden_size=make.hidden_size,
        intermediate_size=make.intermediate_size,
        layers=make.layers,
        heads=make.heads,
        kv_heads=make.kv_heads,
        head_dim=make.head_dim,
        norm_epsilon=1e-6,
        max_positions=make.max_positions,
        rope_theta=10000.0,
        tied=make.tied,
        experts=make.experts if moe else 0,
        experts_per_token=make.experts_per_token if moe else 0,
        expert_size=make.intermediate_size if moe else 0,
        norm_topk=moe,
    )


def tried(config: Config, functions: Mapping[str, str]) -> None:
    """Load `functions` (as `read` gives them) and import SGLang, both at once. Raises LaunchError, of the functions first."""
    asyncio.run(_tried(config, functions))


async def _tried(config: Config, functions: Mapping[str, str]) -> None:
    imports = asyncio.create_task(_sglang_imports(config))
    try:
        await _functions_load(config, functions)  # never cancelled: asyncio hangs where a child's start is
        await imports
    finally:
        imports.cancel()
        await asyncio.gather(imports, return_exceptions=True)


async def _functions_load(config: Config, functions: Mapping[str, str]) -> None:
    """In one worker as the run will have them: with its limits, without the network, ended afterwards."""
    if not set(functions) - set(CHEAP):
        return  # our own, of the standard library alone
    pool = RewardPool(config.reward.model_copy(update={"workers": 1}), config.run.seed)
    try:
        await pool.start(functions)
    except RewardError as error:
        named = [f"{key} = {name}" for name, key in functions.items() if name not in CHEAP]
        known = str(error).startswith(tuple(named))
        raise LaunchError(str(error) if known else f"{', '.join(named)}: {error}") from None
    finally:
        await pool.close()


async def _sglang_imports(config: Config) -> None:
    """In a child with the engine's environment. This interpreter's own packages are looked up instead: that takes no time, and
    launch.sh made them."""
    if config.engine.kind != "sglang":
        return
    asked = config.engine.python
    python = asked or sys.executable
    said = f"engine.python = {python}:" if asked else f"engine.python is not given, and this interpreter, {python}:"
    wanted = f"wanted: engine.python = an interpreter with SGLang in it (rpipe doctor --engine-python {python} says more)"
    found = shutil.which(python)
    if found is None:
        there = Path(python).exists()
        raise LaunchError(f"{said} {'not an executable file' if there else 'no such program'}; {wanted.partition(' (')[0]}")
    own = os.path.abspath(found) == os.path.abspath(sys.executable)
    if own and importlib.util.find_spec("sglang") is not None:
        return
    limit_s = config.engine.start_deadline_s
    problem = await _imports(config, found, limit_s)
    if problem:
        raise LaunchError(f"{said} cannot import sglang: {problem}; {wanted}")


async def _imports(config: Config, python: str, limit_s: float) -> str:
    """Why `python` cannot import SGLang; "" where it can."""
    env = {**job_environment(config.cluster, "", None), **server_environment(config, None, os.environ.get("PYTHONPATH", ""))}
    loop = asyncio.get_running_loop()
    end = loop.time() + limit_s
    with tempfile.TemporaryFile() as output:
        process = child.spawn([python, "-c", f"import sglang; print({IMPORTED!r})"], env, output)
        try:
            while process.poll() is None:
                if loop.time() > end:
                    return f"not done after {limit_s:g} s (engine.start_deadline_s)"
                await asyncio.sleep(LOOK_S)
        finally:
            child.end(process, 0.0)
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    if process.returncode == 0 and IMPORTED in lines:
        return ""
    return last_word(lines) if lines else f"it ended with exit code {process.returncode} and said nothing"
