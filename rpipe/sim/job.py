"""Who performs what the coordinators command, on a virtual clock?

A job of two drivers (rollout_side.py, training_side.py): the very RolloutCoordinator and TrainingCoordinator, events in,
commands out, each to the log. Engines, trainer, rewards and channels are models; ids, counts and times are all there is.
"""

from __future__ import annotations

from collections.abc import Callable

from rpipe.config import Config
from rpipe.core import events as e
from rpipe.sim.costs import hardware_of
from rpipe.sim.driver import Log
from rpipe.sim.kernel import Host, Kernel
from rpipe.sim.rollout_side import RolloutSide
from rpipe.sim.training_side import TrainingSide
from rpipe.sim.workload import Source, source_of


class SimulatedJob:
    """`run` once. Raises ConfigError where the config cannot be simulated."""

    def __init__(self, config: Config, rollout_log: Log, training_log: Log, source: Source | None = None) -> None:
        self.config, self.hardware = config, hardware_of(config)
        self.source = source or source_of(config)
        self.kernel = Kernel()
        shared = self.hardware.host
        self.host = Host(self.kernel, shared.cores if shared else None)
        self.rollout = RolloutSide(self, rollout_log)
        self.training = TrainingSide(self, training_log)

    def run(self, watch: Callable[[], None] | None = None) -> float:
        """Returns the virtual seconds that the job took."""
        for index, engine in enumerate(self.rollout.engines):
            self.rollout.on(e.EngineReady(t=self.kernel.now, engine=index, kv_tokens=engine.costs.kv_tokens))
        self.training.start()
        self.kernel.run(watch)
        if not self.kernel.stopped:
            raise RuntimeError(
                f"the simulated job ran dry after {self.kernel.now:.3f} s: rollout waits for"
                f" {self.rollout.coordinator.waiting_for()}; training for {self.training.coordinator.waiting_for()}"
            )
        return self.kernel.now

    def to_training(self, then: Callable[[], None], taking_s: float = 0.0) -> None:
        self.kernel.after(self.hardware.message_s, lambda: self.training.rank.receive(then, taking_s))

    def to_rollout(self, then: Callable[[], None]) -> None:
        self.kernel.after(self.hardware.message_s, then)
