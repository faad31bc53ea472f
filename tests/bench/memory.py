"""Does the plan of memory hold? One training rank's parts as estimated, and what the process held, phase by phase.

python -m tests.bench.memory CONFIG [key=value ...]       one process, one step of full micro-batches, no engine
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import torch.distributed as dist

from rpipe import config as configs
from rpipe.core.types import Sequences
from rpipe.data import gguf_model
from rpipe.runtime import device as devices
from rpipe.training import memory
from rpipe.training.hf import read_shape
from tests.job.mpi import free_port


def main() -> None:
    config = configs.load(sys.argv[1], sys.argv[2:])
    folder = gguf_model.convert(config.model) if config.model.gguf else Path(config.model.path or "")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    devices.prepare(config.cluster.accelerator)
    device = devices.select(config.cluster.accelerator)
    dist.init_process_group(config.backend, rank=0, world_size=1)
    from rpipe.training.megatron import MegatronTrainer

    told = [("imports", resident(device))]
    trainer = MegatronTrainer(config, folder)
    told.append(("weights, gradients", resident(device)))
    shape, tokens = read_shape(folder), config.training.micro_batch_tokens
    for name in ("first step: optimizer, activations", "second step"):
        trainer.begin_step()
        trainer.accumulate([batch(tokens, 64, shape.vocab_size, k) for k in range(2)])
        trainer.finish_step()
        told.append((name, resident(device)))
    need = memory.training(config, shape)
    for part, size in need.parts.items():
        print(f"{'estimated ' + part:40} {size / 2**20:8.0f} MiB")
    print(f"{'estimated':40} {need.total / 2**20:8.0f} MiB")
    for phase, size in told:
        print(f"{'held after ' + phase:40} {size / 2**20:8.0f} MiB")
    peak = devices.peak_bytes(config.cluster.accelerator)
    print(f"{'held at most':40} {peak / 2**20:8.0f} MiB, {peak / need.total:.2f} of the estimate")


def resident(device: object) -> int:
    """Of this process; on an accelerator what its allocator holds is in the peak alone."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def batch(tokens: int, length: int, vocabulary: int, seed: int) -> Sequences:
    """Half of each sequence is trained."""
    r, n = np.random.default_rng(seed), tokens // length
    mask = np.tile(np.arange(length) >= length // 2, n).astype(np.uint8)
    return Sequences(
        lengths=np.full(n, length, np.int32),
        prompt_lengths=np.full(n, length // 2, np.int32),
        token_ids=r.integers(0, vocabulary, n * length).astype(np.int32),
        loss_mask=mask,
        advantages=r.standard_normal(n).astype(np.float32),
        rewards=np.zeros(n, np.float32),
        logprobs=-8 * mask.astype(np.float32),
    )


if __name__ == "__main__":
    main()
