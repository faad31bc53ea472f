"""Which part of the model and of each micro-batch is this rank's?

Megatron's groups over the default world, in its own rank order: tp fastest, then cp, dp, pp; expert parallelism takes ep
consecutive data-parallel ranks. A *lockstep domain* is what must run equal counts: tp x pp x cp ranks, times ep.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state as mpu

from rpipe.config import Training


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes, and this rank's place in each."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    tp_rank: int = 0
    stage: int = 0
    cp_rank: int = 0
    dp_rank: int = 0

    @property
    def ep_rank(self) -> int:
        return self.dp_rank % self.ep

    @property
    def domain(self) -> int:
        return self.dp_rank // self.ep

    @property
    def domains(self) -> int:
        return self.dp // self.ep

    @property
    def last(self) -> bool:
        """Whether the loss is computed here."""
        return self.stage == self.pp - 1

    @property
    def counts(self) -> bool:
        """Whether this rank adds what a micro-batch holds to the step's denominator: once for each domain, and on all its
        tensor-parallel ranks and stages, as megatron sums over dp and cp alone."""
        return self.cp_rank == 0 and self.ep_rank == 0

    def rank(self, stage: int = 0, ep_rank: int = 0) -> int:
        """In the default world: the one of this domain that has the first place in tp and cp."""
        return self.tp * self.cp * (self.domain * self.ep + ep_rank + self.dp * stage)

    def speaking(self, world: int) -> list[int]:
        """The ranks whose sums of losses make the step's: the last stage's, the first of each tensor-parallel group."""
        return [rank for rank in range(world - world // self.pp, world) if rank % self.tp == 0]


def meet(training: Training) -> Layout:
    """Build megatron's groups; one layout a process. Collective over the default world. Raises ValueError."""
    wanted = (training.tp, training.pp, training.cp, training.ep)
    if not mpu.model_parallel_is_initialized():
        mpu.initialize_model_parallel(
            training.tp, training.pp, context_parallel_size=training.cp, expert_model_parallel_size=training.ep
        )
    found = (
        mpu.get_tensor_model_parallel_world_size(),
        mpu.get_pipeline_model_parallel_world_size(),
        mpu.get_context_parallel_world_size(),
        mpu.get_expert_model_parallel_world_size(),
    )
    if found != wanted:
        raise ValueError(f"training.tp, pp, cp, ep = {wanted}, but this process already trains with {found}")
    layout = Layout(
        *wanted,
        dp=mpu.get_data_parallel_world_size(),
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        stage=mpu.get_pipeline_model_parallel_rank(),
        cp_rank=mpu.get_context_parallel_rank(),
        dp_rank=mpu.get_data_parallel_rank(),
    )
    if layout.tp_rank + layout.tp * layout.cp_rank + layout.rank(layout.stage, layout.ep_rank) != dist.get_rank():
        raise AssertionError("megatron orders ranks otherwise than tp, cp, dp, pp")
    return layout
