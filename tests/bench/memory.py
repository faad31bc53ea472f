"""Does the plan of memory hold? One training rank's parts as estimated, and what the process held, phase by phase.

python -m tests.bench.memory CONFIG [key=value ...]       one process, one step of full micro-batches, no engine
"""

from __future__ import annotations

import argparse
import os
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    config = configs.load(arguments.config, arguments.overrides)
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
    print(table(memory.training(config, shape), told, devices.peak_bytes(config.cluster.accelerator)))


def table(need: memory.Need, held: list[tuple[str, int]], peak_bytes: int) -> str:
    """`held`: bytes after each phase."""
    rows = [(f"estimated {part}", size) for part, size in need.parts.items()]
    rows += [("estimated", need.total), *((f"held after {phase}", size) for phase, size in held), ("held at most", peak_bytes)]
    lines = [f"{name:40} {size / 2**20:8.0f} MiB" for name, size in rows]
    return "\n".join(lines) + f", {peak_bytes / need.total:.2f} of the estimate"


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
