"""The trainer on one CUDA device, without the CPU shim: measures, prints one line of JSON; test_trainer.py judges.

usage: trainer_worker.py SCENARIO FOLDER ACCELERATOR
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from rpipe.config import BACKENDS, Config
from rpipe.core.types import Sequences
from rpipe.runtime import device as devices
from tests.job import trainer_reference as plain
from tests.job.mpi import free_port

LARGE: dict[str, Any] = {  # Qwen3-1.7B's shape
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "tie_word_embeddings": True,
}  # fmt: skip
TOKENS, STEPS = 16384, 3


def settings(folder: Path, accelerator: str, dtype: str, **training: Any) -> Config:
    tree = plain.settings(folder).model_dump()
    tree["cluster"]["accelerator"], tree["model"]["dtype"] = accelerator, dtype
    tree["training"].update(training)
    return Config.model_validate(tree)


def trainer_of(config: Config, folder: Path) -> Any:
    from rpipe.training.megatron import MegatronTrainer

    return MegatronTrainer(config, folder)


def stepped(folder: Path, accelerator: str, to: Path) -> dict[str, Any]:
    """Two steps in each dtype: gradients of the whole batch streamed in three parts and at once; weights; checkpoint."""
    whole = dist.distributed_c10d._get_default_group()  # one backend for each kind of device: ask for the accelerator's
    out: dict[str, Any] = {"backend": whole._get_backend(devices.current(accelerator)).name()}  # type: ignore[arg-type]
    for dtype in ("float32", "bfloat16"):
        config = settings(folder, accelerator, dtype)
        trainer, data = trainer_of(config, folder), [plain.sequences(9, 50 + k) for k in range(3)]
        trainer.begin_step()
        trainer.accumulate([data[0]])
        once = trainer.export_grads()
        trainer.begin_step()
        for i in range(3):
            trainer.accumulate([data[0].select(list(range(i, 9, 3)))])
        streamed = trainer.export_grads()
        norms = [trainer.finish_step().grad_norm]
        trainer.save(to / f"{accelerator}-{dtype}", {"at": 1})
        again = trainer_of(config, folder)
        again.load(to / f"{accelerator}-{dtype}")
        for one in (trainer, again):
            one.begin_step()
            one.accumulate([data[1]])
            norms.append(one.finish_step().grad_norm)
        ends = [{n: t.float().cpu() for b in one.weight_buckets(1 << 20) for n, t in b} for one in (trainer, again)]
        largest = max(float(g.abs().max()) for g in once.values())
        out[dtype] = {
            "streamed": max(float((streamed[n] - once[n]).abs().max()) for n in once) / largest,
            "norms": norms[:2],
            "resumed": max(float((ends[0][n] - ends[1][n]).abs().max()) for n in ends[0]),
            "logprobs": np.asarray(trainer.logprobs(data[2])).tolist(),
        }
    return out


def offloaded(folder: Path, accelerator: str, to: Path) -> dict[str, list[str]]:
    """Kinds of devices where float32 weights and moments lie at the moments when a step's activations may come."""
    trainer = trainer_of(settings(folder, accelerator, "bfloat16", optimizer={"offload": True}), folder)

    def places() -> list[str]:
        groups = [group for part in trainer.optimizer._parts for group in part.shard_fp32_from_float16_groups]
        kept = [param for group in groups for param in group if param is not None]
        return sorted({t.device.type for t in [*kept, *trainer.optimizer.moments()]})

    found = {"made": places()}
    for name in ("stepped", "stepped after a save"):
        trainer.begin_step()
        trainer.accumulate([plain.sequences(9, 50)])
        trainer.finish_step()
        found[name] = places()
        trainer.save(to / "offloaded", {})
        found[f"{name}, saved"] = places()
    return found


def large(folder: Path, accelerator: str, **training: Any) -> dict[str, Any]:
    """Seconds and memory of steps of TOKENS tokens at 1.7 B parameters, against the preflight estimate."""
    from rpipe.training import hf, memory

    config = settings(folder, accelerator, "bfloat16", micro_batch_tokens=TOKENS // 4, logprob_chunk_tokens=1024, **training)
    trainer, device = trainer_of(config, folder), devices.current(config.cluster.accelerator)
    parts = [sequences(TOKENS // 4, 1024, k) for k in range(4)]
    seconds = []
    for _ in range(STEPS):
        devices.synchronize(device)
        started = time.monotonic()
        trainer.begin_step()
        trainer.accumulate(parts)
        trainer.finish_step()
        devices.synchronize(device)
        seconds.append(time.monotonic() - started)
    estimate = memory.training(config, hf.read_shape(folder))
    return {
        "tokens_per_s": TOKENS / min(seconds[1:]),
        "peak_bytes": devices.peak_bytes(config.cluster.accelerator),
        "estimated_bytes": estimate.total - estimate.parts["process"],  # what torch's allocator does not see
    }


def sequences(tokens: int, length: int, seed: int) -> Sequences:
    r, n = np.random.default_rng(seed), tokens // length
    mask = np.tile(np.arange(length) >= length // 4, n).astype(np.uint8)
    return Sequences(
        lengths=np.full(n, length, np.int32),
        prompt_lengths=np.full(n, length // 4, np.int32),
        token_ids=r.integers(0, LARGE["vocab_size"], tokens).astype(np.int32),
        loss_mask=mask,
        advantages=r.standard_normal(n).astype(np.float32),
        rewards=np.zeros(n, np.float32),
        logprobs=-12 * mask.astype(np.float32),
    )


def make_large(folder: Path) -> Path:
    if not folder.exists():
        from transformers import Qwen3Config, Qwen3ForCausalLM

        Qwen3ForCausalLM(Qwen3Config(**LARGE, dtype="bfloat16")).bfloat16().save_pretrained(folder)
    return folder


def main() -> None:
    scenario, folder, accelerator = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    devices.prepare(accelerator)  # type: ignore[arg-type]
    devices.select(accelerator)  # type: ignore[arg-type]
    backend = f"cpu:gloo,{accelerator}:{BACKENDS[accelerator]}" if accelerator != "cpu" else "gloo"
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    dist.init_process_group(backend, rank=0, world_size=1)
    small = plain.make_model(folder / "small", "qwen3", True)
    found = {
        "stepped": lambda: stepped(small, accelerator, folder),
        "offloaded": lambda: offloaded(small, accelerator, folder),
        "large": lambda: large(make_large(folder / "large"), accelerator),
        "recompute": lambda: large(make_large(folder / "large"), accelerator, recompute="full"),
        "offload": lambda: large(make_large(folder / "large"), accelerator, optimizer={"offload": True}),
    }[scenario]()
    print("MEASURED " + json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
