"""With which command and environment does an SGLang 0.5 server start as an engine?

Run on CPU. The cuda and npu settings follow SGLang's documentation and were not run. `engine.options` adds any server
argument or replaces a default below; what the engine itself must decide is refused there.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rpipe.config import Config
from rpipe.rollout.engine import EngineError

CPU_MODULES = Path(__file__).with_name("sglang_cpu")
RESERVED = ("host", "port", "api_key", "model_path", "config", "tp_size", "weight_version", "incremental_streaming_output")
NEVER_PREEMPT = 1 << 62  # priorities are minus the submission order: no difference may evict a running request


def server_arguments(config: Config, index: int, model_dir: Path, version: int = 0, life: int = 0) -> dict[str, Any]:
    """Arguments of the server by SGLang's own names, without those of the connection. `life` counts its starts: one that
    starts again draws other random numbers. Raises EngineError on a bad option."""
    engine = config.engine
    arguments: dict[str, Any] = {
        "model_path": str(model_dir),
        "tp_size": engine.tp,
        "dtype": config.dtype,
        "random_seed": (config.run.seed * 1009 + index + life * 7919) % (1 << 30),
        "weight_version": str(version),
        "skip_tokenizer_init": names_eos(model_dir),  # ids in, ids out: nothing to detokenize
        "sampling_defaults": "openai",  # not generation_config.json's top_k and penalties: requests say all themselves
        "incremental_streaming_output": True,
        "stream_interval": engine.stream_interval_tokens,
        "enable_priority_scheduling": True,
        "priority_scheduling_preemption_threshold": NEVER_PREEMPT,
        "schedule_policy": "fcfs",
        "max_running_requests": engine.max_running,
        "max_total_tokens": engine.kv_tokens,
        "context_length": engine.context_tokens,
        "sleep_on_idle": True,
        "log_level": "warning",
        **_device_arguments(config),
    }
    for name, value in engine.options.items():
        key = name.replace("-", "_")
        if key in RESERVED:
            raise EngineError(f"engine.options.{name}: set by rpipe itself; wanted: another server argument")
        arguments[key] = value
    return arguments


def _device_arguments(config: Config) -> dict[str, Any]:
    if config.cluster.accelerator == "cpu":
        room = config.data.max_prompt_tokens + config.rollout.max_new_tokens
        return {
            "device": "cpu",
            "attention_backend": "torch_native",
            "mem_fraction_static": 0.2,
            # By itself SGLang takes most of the host's memory; every running trajectory at its longest is enough.
            "max_total_tokens": config.engine.kv_tokens or config.engine.max_running * room + 1024,
        }
    if config.cluster.accelerator == "npu":
        return {"device": "npu", "attention_backend": "ascend"}
    return {"device": "cuda"}


def names_eos(model_dir: Path) -> bool:
    """Whether the model's own files name an end-of-sequence id; otherwise SGLang needs the tokenizer to know one."""
    for name in ("generation_config.json", "config.json"):
        file = model_dir / name
        if file.is_file() and json.loads(file.read_text()).get("eos_token_id") is not None:
            return True
    return False


def command_line(python: str, arguments: Mapping[str, Any]) -> list[str]:
    """True is a bare flag; None, False and [] leave the argument out; a list is several values, a mapping is JSON."""
    words = [python, "-m", "sglang.launch_server"]
    for name, value in arguments.items():
        if value is None or value is False or value == []:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is True:
            continue
        if isinstance(value, (list, tuple)):
            words += [str(item) for item in value]
        else:
            words.append(json.dumps(value) if isinstance(value, Mapping) else str(value))
    return words


def server_environment(config: Config, devices: tuple[int, ...] | None, inherited_pythonpath: str) -> dict[str, str]:
    """What the child's environment gets on top of this process's."""
    extra = {
        "SGLANG_TIMEOUT_KEEP_ALIVE": "3600",  # a rank's event loop may be busy for longer than the usual 5 s
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # /health tells the state at once; /health_generate makes a token
        "SGLANG_HEALTH_CHECK_TIMEOUT": str(math.ceil(config.engine.stall_deadline_s)),  # for that token; by itself 20 s
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if config.cluster.accelerator == "cpu":
        threads = config.cluster.threads_per_rank
        return extra | {
            "PYTHONPATH": ":".join(filter(None, (str(CPU_MODULES), inherited_pythonpath))),
            "SGLANG_USE_CPU_ENGINE": "1",
            # Only compiled kernels read the cores; without an entry for every tp rank SGLang wants a NUMA node for each.
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * config.engine.tp),
            "OMP_NUM_THREADS": str(threads),
            "TORCHDYNAMO_DISABLE": "1",
            # A CUDA build of torch brings NCCL along, and SGLang would talk to it from CPU tensors when tp > 1.
            "SGLANG_NCCL_SO_PATH": "/nonexistent/no-nccl-on-cpu",
        }
    if devices is not None:
        visible = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}[config.cluster.accelerator]
        inherited = [d for d in os.environ.get(visible, "").split(",") if d]  # what the job itself was given, if it says
        extra[visible] = ",".join(inherited[d] if inherited else str(d) for d in devices)
    return extra
