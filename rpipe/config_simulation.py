"""What does the simulator need to know beyond the job's own config: how fast is the hardware, how long is a response?

A job ignores both sections. configs/cluster/*.yaml hold `hardware`; `rpipe calibrate` writes one from real logs.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rpipe.config_section import Count, Fraction, NotNegative, Positive, Section


class Accelerator(Section):
    """One accelerator, by its data sheet and the shares of it that are reached."""

    memory_bytes: Count
    memory_bytes_per_s: Positive
    flops: Positive  # dense, of the dtype that computes
    memory_efficiency: Positive = 0.86  # share of memory_bytes_per_s that a decode step reaches
    matmul_efficiency: Positive = 0.65  # share of flops that prefill, and decoding at large batches, reach
    training_efficiency: Positive = 0.5  # share of flops that forward and backward reach
    layer_overhead_s: NotNegative = 1.2e-4  # of a decode step, a layer
    sequence_overhead_s: NotNegative = 3e-5  # of a decode step, a running sequence: sampling and bookkeeping
    micro_batch_overhead_s: NotNegative = 0.02  # launching forward and backward once
    step_overhead_s: NotNegative = 0.05  # of an optimizer step, beside reduction and memory traffic
    link_bytes_per_s: Positive  # bus bandwidth of a collective inside a node
    link_latency_s: NotNegative = 3e-5  # of one collective inside a node
    network_bytes_per_s: Positive = 2.5e10  # between nodes, an accelerator
    accelerators_per_node: Count = 8


class MeasuredEngine(Section):
    """An engine as it was seen to run; goes before what `accelerator` would say."""

    decode_step_s: Annotated[list[tuple[Positive, Positive]], Field(min_length=1)]  # [running sequences, seconds], ascending
    context_token_s: NotNegative = 0.0  # more, a token of context that a step reads
    prefill_s: NotNegative = 0.0  # of a prefill batch, whatever it holds
    prefill_token_s: NotNegative = 0.0  # more, a token that was not cached

    @model_validator(mode="after")
    def _ascending(self) -> MeasuredEngine:
        if sorted({n for n, _ in self.decode_step_s}) != [n for n, _ in self.decode_step_s]:
            raise ValueError("decode_step_s: running sequences must ascend")
        return self


class MeasuredTrainer(Section):
    """One training replica as it was seen to run; goes before what `training_accelerator` would say."""

    micro_batch_s: NotNegative  # of any micro-batch
    trajectory_s: NotNegative = 0.0  # more, a trajectory in it
    token_s: NotNegative = 0.0  # more, a token in it
    token_pair_s: NotNegative = 0.0  # more, a token's square summed over its trajectories (attention)
    step_s: NotNegative = 0.0  # reduction, clipping, optimizer


class Host(Section):
    """Cores that engines and training ranks share, where they do (a CPU machine): who computes gets its share of them."""

    cores: Positive
    engine_cores: Positive = 1.0  # what a busy engine keeps busy
    engine_token_s: NotNegative = 0.0  # more, of a core for each token: who hands it on, from the engine to its owner
    engine_weight: Positive = 1.0  # its speed over a trainer's where cores are short: who sleeps and wakes waits for a core
    trainer_cores: Positive = 1.0


class Hardware(Section):
    """For `rpipe simulate`, `plan`: how fast is what the job runs on? A job ignores it."""

    name: str
    source: str  # where the figures come from, or that nobody measured them
    calibrated: bool = False  # fitted to logs of the hardware itself
    fitted_parameters: Count | None = None  # of the model in those logs: for one of another size nothing counts as calibrated
    accelerator: Accelerator | None = None
    training_accelerator: Accelerator | None = None  # default: accelerator
    engine: MeasuredEngine | None = None
    trainer: MeasuredTrainer | None = None
    host: Host | None = None
    slow_engines: dict[int, Positive] = Field(default_factory=dict)  # engine: how many times as long its work takes
    lost_engines: dict[int, NotNegative] = Field(default_factory=dict)  # engine: when it dies, once, s since the job began
    engine_start_s: NotNegative = 60.0  # until an engine that was lost stands again
    memory_share: Fraction = 0.88  # of an engine's accelerator, for weights and KV cache
    prefill_batch_tokens: Count = 8192
    message_s: NotNegative = 0.001  # of one message between processes; an engine's answers are such
    request_s: NotNegative = 0.002  # until a request reaches the engine
    request_each_s: NotNegative = 0.0  # more, a request sent to the engine at the same moment: they are taken in together
    reward_s: NotNegative = 0.001  # until a score is there, beside the function's own time
    group_s: NotNegative = 0.003  # of a group's way into the trainer, beside message_s; the trainer waits meanwhile
    channel_bytes_per_s: Positive = 1e9  # of a group's tensors
    publish_s: NotNegative = 0.05  # of a weight publish to one engine, whatever its size
    publish_bytes_per_s: Positive = 1e10  # of the weights: gathered, sent to one engine, loaded; not where all is measured
    publish_engine_s: NotNegative | None = None  # more, a further engine; default: weights / network_bytes_per_s, publish_s / 3
    draw_s: NotNegative = 0.0  # between confirmed weights and the rollout's first request
    checkpoint_s: NotNegative = 0.0

    @model_validator(mode="after")
    def _known(self) -> Hardware:
        if self.engine is None and self.accelerator is None:
            raise ValueError("wants engine (measured) or accelerator")
        if self.trainer is None and self.accelerator is None and self.training_accelerator is None:
            raise ValueError("wants trainer (measured), training_accelerator or accelerator")
        return self


class Speculation(Section):
    """Drafts that are verified: an engine commits several tokens a step."""

    accepted_tokens: Annotated[float, Field(ge=1)] = 2.8  # committed a step and sequence
    step_cost: Annotated[float, Field(ge=1)] = 1.25  # of a verifying step, in plain steps
    max_running: Count = 16  # beyond it decoding is plain


class Agents(Section):
    """Trajectories of several turns, at most rollout.max_turns; the workload's lengths are then those of one turn. All are
    log-normal: a median, and the standard deviation of the logarithm; siblings are alike as `correlation` says."""

    turns: Positive = 8.0
    turns_sigma: NotNegative = 0.5
    answer_tokens: Positive = 200.0  # what the environment answers to a turn
    answer_sigma: NotNegative = 1.0
    tool_s: NotNegative = 1.0  # how long that takes it; reward.workers run at once
    tool_sigma: NotNegative = 1.0


class Workload(Section):
    """For `rpipe simulate`, `plan`: how long are prompts and responses, how long does a reward take? A job ignores it."""

    lengths: Literal["lognormal", "quantiles", "trace", "run"] = "lognormal"
    median_tokens: Positive = 256.0  # lognormal
    sigma: NotNegative = 1.0  # lognormal: standard deviation of the logarithm
    quantiles: list[tuple[Fraction, Positive]] = Field(default_factory=list)  # quantiles: [share, tokens], ascending
    correlation: Fraction = 0.3  # of siblings' lengths, as normal scores: 0 none, 1 all the same
    path: str | None = None  # trace: lines of group, sample, output_tokens, ... (docs/simulator.md); run: a run dir
    prompt_tokens: Count = 128  # where the lengths do not say
    reward_mean: Fraction = 0.5  # share of rewards that are 1, where nothing says them
    reward_s: NotNegative = 0.0  # median time of the reward function; reward.workers run at once
    reward_sigma: NotNegative = 0.0  # standard deviation of its logarithm
    agents: Agents | None = None
    speculation: Speculation | None = None

    @model_validator(mode="after")
    def _complete(self) -> Workload:
        if self.lengths in ("trace", "run") and not self.path:
            raise ValueError(f"lengths {self.lengths} wants path")
        if self.lengths == "quantiles":
            shares, tokens = [s for s, _ in self.quantiles], [t for _, t in self.quantiles]
            if len(shares) < 2 or shares != sorted(set(shares)) or tokens != sorted(tokens):
                raise ValueError("lengths quantiles wants quantiles: at least two [share, tokens], ascending")
        return self


class ModelShape(Section):
    """The model's size, for `rpipe simulate` and `plan` where model.path is not on this machine."""

    parameters: Count
    layers: Count
    hidden_size: Count
    kv_heads: Count
    head_dim: Count
    active_parameters: Count | None = None  # mixture of experts: a token's; default: all
    experts: Count = 1
    experts_per_token: Count = 1
    vocabulary: Annotated[int, Field(ge=0)] = 0  # rows of the embedding, for estimates of memory; 0: left out of them
    tied: bool = False  # the output layer is the embedding
