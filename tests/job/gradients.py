"""Compares the first moments of two checkpoints after one step: they are (1 - beta1) times the step's gradient.

mpirun -n 1 python -m mpi4py tests/job/gradients.py OUT.json CHECKPOINT CHECKPOINT   the largest difference, the largest entry
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from rpipe.runtime import device


def moments(checkpoint: str) -> dict[str, object]:
    import rpipe.training.megatron  # noqa: F401  (first: it makes megatron work on a CPU)

    from megatron.core import dist_checkpointing  # isort: skip

    tensors = dist_checkpointing.load_plain_tensors(checkpoint)
    return {key: value for key, value in tensors.items() if key.endswith("exp_avg") or ".exp_avg." in key}


if __name__ == "__main__":
    device.prepare("cpu")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}", rank=0, world_size=1)
    left, right = (moments(path) for path in sys.argv[2:])
    assert left.keys() == right.keys() and left, sorted(left)
    difference = max(float((left[key] - right[key]).abs().max()) for key in left)
    largest = max(float(value.abs().max()) for value in left.values())
    Path(sys.argv[1]).write_text(json.dumps({"difference": difference, "largest": largest, "tensors": len(left)}))
    dist.destroy_process_group()
