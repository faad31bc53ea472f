"""What does a piece of work cost, in seconds of free hardware? Pure functions of sizes.

Measured figures go before data sheets. By data sheet:

    decode step   layers x overhead + max(weights and KV read / bandwidth, 2 x parameters x batch / FLOPs) + collectives
                  + batch x overhead
    prefill       max(weights read / bandwidth, 2 x parameters x tokens / FLOPs) + collectives
    micro-batch   overhead + (6 x parameters x tokens + 6 x layers x hidden x sum of squared lengths) / FLOPs + collectives,
                  over the tp x cp x ep ranks of each of pp stages, and to the next stage and back; a third more where
                  activations are recomputed
    call          what a replica runs in one go: of m micro-batches through pp stages, (sum + (pp - 1) x the longest) / pp.
                  Equal ones take m + pp - 1 turns of a stage, so that (pp - 1) / (m + pp - 1) of the time is bubble
    step          overhead + gradients reduced between replicas (ring) + optimizer state through memory

A tensor-parallel layer is two collectives forward, and two more backward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from rpipe.config import Config, ConfigError
from rpipe.config_simulation import Accelerator, Hardware, MeasuredEngine, MeasuredTrainer
from rpipe.sim.shape import Shape, shape_of

OPTIMIZER_BYTES = 16  # a parameter: fp32 master weight, gradient, two moments; each read and written once
# A further engine's part of a publish, where one was measured and nothing says more: the quickstart's model took 32 ms to one
# engine and 44 ms to two (tests.bench.twin's kinds "streamed" and "two engines", medians of three jobs each).
FURTHER_ENGINE = 1 / 3


class EngineCosts(Protocol):
    @property
    def kv_tokens(self) -> int: ...

    def decode_s(self, running: int, context_tokens: float) -> float:
        """One step of `running` sequences that hold `context_tokens` together."""
        ...

    def prefill_s(self, tokens: int) -> float:
        """A batch of `tokens` that were not cached."""
        ...


class TrainerCosts(Protocol):
    @property
    def pp(self) -> int: ...

    def micro_batch_s(self, lengths: list[int]) -> float:
        """Forward and backward of sequences of these lengths alone, on one replica, stage after stage."""
        ...

    def step_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Measured:
    """Interpolated between the batch sizes that were seen, extrapolated by the last two."""

    measured: MeasuredEngine
    kv_tokens: int

    def decode_s(self, running: int, context_tokens: float) -> float:
        points = self.measured.decode_step_s
        at = min(max(bisect_right(points, (running, float("inf"))), 1), len(points) - 1)
        step_s = points[0][1]
        if len(points) > 1 and running > points[0][0]:
            (n0, s0), (n1, s1) = points[at - 1], points[at]
            slope = (s1 - s0) / (n1 - n0)
            step_s = s0 + slope * (running - n0) if running <= n1 else s1 + max(slope, 0.0) * (running - n1)
        return step_s + self.measured.context_token_s * context_tokens

    def prefill_s(self, tokens: int) -> float:
        return self.measured.prefill_s + self.measured.prefill_token_s * tokens


@dataclass(frozen=True, slots=True)
class Roofline:
    accelerator: Accelerator
    shape: Shape
    tp: int
    kv_tokens: int

    def decode_s(self, running: int, context_tokens: float) -> float:
        a, s = self.accelerator, self.shape
        kv_bytes = s.kv_bytes_per_token * context_tokens / min(self.tp, s.kv_heads)
        read_s = (s.weight_bytes_read(running) / self.tp + kv_bytes) / (a.memory_bytes_per_s * a.memory_efficiency)
        compute_s = 2 * s.active_parameters * running / (self.tp * a.flops * a.matmul_efficiency)
        return (
            s.layers * a.layer_overhead_s
            + max(read_s, compute_s)
            + 2 * s.layers * collective_s(a, self.tp, running * s.hidden_size * s.bytes_per_value)
            + running * a.sequence_overhead_s
        )

    def prefill_s(self, tokens: int) -> float:
        a, s = self.accelerator, self.shape
        read_s = s.weight_bytes_read(tokens) / self.tp / (a.memory_bytes_per_s * a.memory_efficiency)
        compute_s = 2 * s.active_parameters * tokens / (self.tp * a.flops * a.matmul_efficiency)
        collectives_s = 2 * s.layers * collective_s(a, self.tp, tokens * s.hidden_size * s.bytes_per_value)
        return s.layers * a.layer_overhead_s + max(read_s, compute_s) + collectives_s


@dataclass(frozen=True, slots=True)
class MeasuredReplica:
    measured: MeasuredTrainer
    pp: int = 1

    def micro_batch_s(self, lengths: list[int]) -> float:
        m = self.measured
        pairs = sum(n * n for n in lengths) if m.token_pair_s else 0
        return m.micro_batch_s + m.trajectory_s * len(lengths) + m.token_s * sum(lengths) + m.token_pair_s * pairs

    def step_s(self) -> float:
        return self.measured.step_s


@dataclass(frozen=True, slots=True)
class RooflineReplica:
    accelerator: Accelerator
    shape: Shape
    tp: int
    pp: int
    cp: int
    replicas: int
    ep: int = 1
    recompute: bool = False  # a layer's forward again in its backward

    def micro_batch_s(self, lengths: list[int]) -> float:
        a, s, tokens, again = self.accelerator, self.shape, sum(lengths), 1 if self.recompute else 0
        flops = 6 * s.active_parameters * tokens + 6 * s.layers * s.hidden_size * sum(n * n for n in lengths)
        compute_s = (3 + again) / 3 * flops / (self.tp * self.cp * self.ep * a.flops * a.training_efficiency)
        return (
            a.micro_batch_overhead_s
            + compute_s
            + 2 * (self.pp - 1) * self._hop_s(tokens)
            + (4 + 2 * again)
            * s.layers
            * collective_s(a, self.tp, tokens / self.cp / self.ep * s.hidden_size * s.bytes_per_value)
            + (3 + again) * s.layers * self._ring_s(tokens)
            + (4 + 2 * again) * s.layers * self._all_to_all_s(tokens)
        )

    def _hop_s(self, tokens: float) -> float:
        """Pipeline: activations of a micro-batch to the next stage, or gradients to the one before."""
        nbytes = tokens / self.cp / self.ep / self.tp * self.shape.hidden_size * self.shape.bytes_per_value
        return self.accelerator.link_latency_s + nbytes / self._bytes_per_s(self.tp * self.cp * self.ep * self.pp)

    def _ring_s(self, tokens: float) -> float:
        """Context parallelism: the others' keys and values come by, of one layer, forward (backward takes twice as long)."""
        s, others = self.shape, self.cp - 1
        nbytes = others * tokens / self.cp * 2 * s.kv_heads * s.head_dim * s.bytes_per_value / min(self.tp, s.kv_heads)
        return others * self.accelerator.link_latency_s + nbytes / self._bytes_per_s(self.tp * self.cp)

    def _all_to_all_s(self, tokens: float) -> float:
        """Expert parallelism: each token to its experts, or back, in one layer."""
        if self.ep == 1:
            return 0.0
        s = self.shape
        nbytes = tokens / self.ep * s.experts_per_token * s.hidden_size * s.bytes_per_value * (self.ep - 1) / self.ep
        return self.accelerator.link_latency_s + nbytes / self._bytes_per_s(self.tp * self.cp * self.ep)

    def _bytes_per_s(self, ranks: int) -> float:
        """Of neighbours in so many consecutive ranks."""
        a = self.accelerator
        return a.link_bytes_per_s if ranks <= a.accelerators_per_node else a.network_bytes_per_s

    def step_s(self) -> float:
        a, s = self.accelerator, self.shape
        dense = s.dense_parameters / (self.tp * self.pp)  # on each rank; all replicas hold them
        experts = (s.parameters - s.dense_parameters) / (self.tp * self.pp * self.ep)
        peers = self.replicas * self.ep  # data-parallel ranks; of one expert: the replicas
        reduced = 2 * (peers - 1) / peers * dense + 2 * (self.replicas - 1) / self.replicas * experts
        reduce_s = 4 * reduced / self._bytes_per_s(self.tp * self.pp * self.cp * peers)
        stepped = dense / peers + experts / self.replicas
        state_s = 2 * OPTIMIZER_BYTES * stepped / (a.memory_bytes_per_s * a.memory_efficiency)
        return a.step_overhead_s + reduce_s + state_s


def call_s(costs: TrainerCosts, micro_batches: list[list[int]]) -> float:
    """One TrainMicroBatch: lengths of each micro-batch of its schedule (1F1B). Stages are equal parts of a micro-batch."""
    each_s = [costs.micro_batch_s(lengths) for lengths in micro_batches]
    return (sum(each_s) + (costs.pp - 1) * max(each_s)) / costs.pp


def cut(lengths: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    """By micro-batch, as TrainMicroBatch's `cuts` say; one where they are empty."""
    rest = iter(lengths)
    return [list(islice(rest, count)) for count in cuts] if cuts else [list(lengths)]


def collective_s(accelerator: Accelerator, ranks: int, nbytes: float) -> float:
    """One all-reduce inside a node; nothing for one rank."""
    if ranks == 1:
        return 0.0
    return accelerator.link_latency_s + 2 * (ranks - 1) / ranks * nbytes / accelerator.link_bytes_per_s


def hardware_of(config: Config) -> Hardware:
    """Raises ConfigError where the config names none."""
    if config.hardware is None:
        raise ConfigError("hardware: missing; wanted: include one of configs/cluster/*.yaml, or what `rpipe calibrate` wrote")
    return config.hardware


def engine_costs(config: Config) -> EngineCosts:
    """Raises ConfigError where the model does not fit."""
    hardware = hardware_of(config)
    if hardware.engine is not None:
        longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
        return Measured(hardware.engine, config.engine.kv_tokens or config.engine.max_running * longest)
    assert hardware.accelerator is not None
    shape = shape_of(config)
    return Roofline(hardware.accelerator, shape, config.engine.tp, config.engine.kv_tokens or kv_tokens(config, shape))


def kv_tokens(config: Config, shape: Shape) -> int:
    """Tokens of KV cache that fit beside the weights on one engine's accelerators."""
    hardware = hardware_of(config)
    assert hardware.accelerator is not None
    tp = config.engine.tp
    free = hardware.accelerator.memory_bytes * hardware.memory_share * tp - shape.weight_bytes
    tokens = int(free / (shape.kv_bytes_per_token * tp / min(tp, shape.kv_heads)))
    wanted = config.workload.prompt_tokens + 1 if config.workload else 1
    if tokens < wanted:
        raise ConfigError(
            f"engine.tp = {tp}: weights of {shape.weight_bytes / 1e9:.1f} GB leave no room for KV cache on"
            f" {tp} x {hardware.accelerator.memory_bytes / 1e9:.0f} GB; wanted: a larger tp"
        )
    return tokens


def trainer_costs(config: Config) -> TrainerCosts:
    hardware = hardware_of(config)
    if hardware.trainer is not None:
        return MeasuredReplica(hardware.trainer, config.training.pp)
    accelerator = hardware.training_accelerator or hardware.accelerator
    assert accelerator is not None
    t = config.training
    ep, recompute = t.ep, t.recompute == "full"
    return RooflineReplica(accelerator, shape_of(config), t.tp, t.pp, t.cp, config.replicas, ep, recompute)


def publish_s(config: Config, engines: int) -> float:
    """A version's way to so many engines. Each gets a copy of its own: the copies share what one rank can send, and the
    engines load side by side."""
    hardware = hardware_of(config)
    if hardware.accelerator is None:
        one_s, further_s = hardware.publish_s, FURTHER_ENGINE * hardware.publish_s
    else:
        nbytes = shape_of(config).weight_bytes
        sender = hardware.training_accelerator or hardware.accelerator
        one_s, further_s = hardware.publish_s + nbytes / hardware.publish_bytes_per_s, nbytes / sender.network_bytes_per_s
    if hardware.publish_engine_s is not None:
        further_s = hardware.publish_engine_s
    return one_s + (engines - 1) * further_s
