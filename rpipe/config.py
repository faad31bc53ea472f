"""What was asked for, checked before anything starts?

A run file is YAML. `include: [fragment.yaml, ...]` (relative to the file) merges fragments below it; `a.b=c` on the
command line goes on top. Unknown keys, wrong types and impossible arithmetic are refused in one line that names the file
and the key. Keys say their unit.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from rpipe.config_section import Count, Fraction, Seconds
from rpipe.config_section import Section as Section
from rpipe.config_simulation import Hardware, ModelShape, Workload

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}  # of an accelerator's own collectives


class ConfigError(ValueError):
    """One line for the person who wrote the config."""


class Run(Section):
    name: str = "run"
    dir: str | None = None  # default runs/NAME-TIMESTAMP
    seed: int = 0
    iterations: Count = 10
    resume: Literal["auto", "never"] = "auto"  # auto: go on from the newest checkpoint in run.dir, if there is one
    checkpoint_every_iterations: Annotated[int, Field(ge=0)] = 10  # 0: only at the end
    keep_checkpoints: Count = 2


class Cluster(Section):
    accelerator: Literal["cpu", "cuda", "npu"] = "cpu"
    rollout_ranks: Count = 1
    training_ranks: Count = 1
    devices_per_node: Count | None = None  # ranks a node takes; default: what Slurm says, on cpu as few as fit
    share_device: bool = False  # every rank uses its node's first device: to try all of it on one GPU
    interface: str | None = None  # of sockets, gloo, NCCL, HCCL: eth0, or 10.1.0.0/16 where names differ; default: found
    threads_per_rank: Count = 1
    bind: Literal["none", "numa"] = "none"  # numa: a rank and its engine keep to the cores beside their devices
    device_memory_bytes: Count | None = None  # to plan for; default: the device's, on cpu the host's for all ranks


class MakeModel(Section):
    """A small random model with a character-level tokenizer, made on the spot."""

    architecture: Literal["qwen3", "qwen3_moe", "qwen2", "llama"] = "qwen3"
    hidden_size: Count = 128
    intermediate_size: Count = 384  # qwen3_moe: of each expert
    experts: Count = 8  # qwen3_moe
    experts_per_token: Count = 2  # qwen3_moe
    layers: Count = 4
    heads: Count = 4
    kv_heads: Count = 2
    head_dim: Count = 32
    max_positions: Count = 1024
    tied: bool = True


class WarmUp(Section):
    """Supervised steps on the training data's own solutions, before iteration 0."""

    steps: Count
    sequences_per_step: Count = 128
    learning_rate: float = 1e-3


class Model(Section):
    path: str | None = None  # a Hugging Face folder
    make: MakeModel | None = None  # or: make one
    gguf: str | None = None  # or: a GGUF file, or PACKAGE/FILE of an installed Python package, converted once
    cache_dir: str | None = None  # where converted models are kept; default: ~/.cache/rpipe/models
    warm_up: WarmUp | None = None
    dtype: Literal["float32", "bfloat16"] | None = None  # default: float32 on cpu, bfloat16 elsewhere
    shape: ModelShape | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if sum(source is not None for source in (self.path, self.make, self.gguf)) != 1:
            raise ValueError("wants exactly one of path, make and gguf")
        return self


class Source(Section):
    """Where prompts come from."""

    kind: Literal["jsonl", "sums", "reasoning_gym"]
    path: str | None = None  # jsonl: lines of {prompt | messages, answer, [reward], [solution: for model.warm_up], ...}
    name: str | None = None  # reasoning_gym: the generator
    options: dict[str, Any] = Field(default_factory=dict)  # of the generator
    size: Count = 1000  # generators: how many prompts
    seed: int = 0  # generators
    reward: str = "exact_match"  # exact_match | last_integer | math_verify | reasoning_gym | package.module:function
    template: str = "{prompt}"  # python format over the entry's fields
    chat: bool = False  # wrap in the tokenizer's chat template

    @model_validator(mode="after")
    def _complete(self) -> Source:
        if self.kind == "jsonl" and not self.path:
            raise ValueError("kind jsonl wants path")
        if self.kind == "reasoning_gym" and not self.name:
            raise ValueError("kind reasoning_gym wants name")
        return self


class Data(Section):
    train: Source
    held_out: Source | None = None
    shuffle: bool = True
    max_prompt_tokens: Count = 512


class Reward(Section):
    workers: Count = 1  # for the reward, filter and environment functions together
    deadline_s: Seconds = 10.0  # a function that takes longer is killed; a reward is then 0, an environment's trajectory ends
    memory_bytes: Count = 2 << 30  # address space of one worker
    shuffle: bool = False  # a control: advantages follow rewards permuted within each group; nothing can be learned


class Rollout(Section):
    groups_per_iteration: Count = 16  # R
    trajectories_per_group: Count = 8  # K
    max_new_tokens: Count = 256  # of a trajectory: all its turns and what the environment answers
    environment: str = ""  # calculator | package.module:function that answers a turn, in a reward worker (docs/environments.md)
    max_turns: Count = 1  # of a trajectory; more want environment
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: int = -1
    trajectory_deadline_s: Seconds = 600.0  # of generating, from its first tokens; then it is cut and scored as it is
    filter: str = "none"  # none | zero_variance (drops groups whose rewards are all equal) | package.module:function
    over_sampling: Annotated[float, Field(ge=1)] = 1.0  # draw this times R at once; the first R kept, as submitted, train
    refill_groups: Annotated[int, Field(ge=0)] = 0  # that an iteration may draw later, in place of dropped ones


class Engine(Section):
    kind: Literal["sglang", "scripted"] = "sglang"
    python: str | None = None  # interpreter with SGLang in it; default: the job's own
    tp: Count = 1
    max_running: Count = 32  # trajectories decoded at once in one engine
    kv_tokens: Count | None = None  # KV-cache size; default: what the engine finds
    context_tokens: Count | None = None  # default: the model's
    stream_interval_tokens: Count = 16
    start_deadline_s: Seconds = 300.0
    stall_deadline_s: Seconds = 120.0  # no token of any running request for so long: the engine is dead
    restarts: Annotated[int, Field(ge=0)] = 3  # of one engine between two publishes; 0: a lost engine ends the job
    options: dict[str, Any] = Field(default_factory=dict)  # further sglang server arguments


class Admission(Section):
    policy: Literal["fifo", "frontier", "soft_frontier"] = "frontier"  # docs/policies.md
    frontier_groups: Count | Literal["auto"] = "auto"  # F_w; auto: U, or what soft_frontier finds quicker
    budget_tokens: Count | None = None  # soft_frontier: KV tokens that may be in flight; default: what the engines hold


class Placement(Section):
    policy: Literal["least_loaded", "group_affine"] = "least_loaded"


class Pipeline(Section):
    mode: Literal["serial", "fifo", "exact"] = "fifo"
    old_logprob: Literal["engine", "pinned"] = "engine"
    max_staleness: Annotated[int, Field(ge=0)] = 0


class Loss(Section):
    # rloo: against the others' mean; dr_grpo: no division by the group's deviation; reinforce_pp: REINFORCE++, in serial mode
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp"] = "grpo"
    objective: Literal["ppo_clip", "gspo", "cispo"] = "ppo_clip"  # docs/training.md says what each is
    aggregation: Literal["token_mean", "sequence_mean", "fixed"] = "token_mean"  # fixed: Dr.GRPO's constant length
    clip_low: Fraction = 0.2
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    # truncated importance sampling: at most so much of p_trainer / p_engine; wants pipeline.old_logprob = pinned
    importance_cap: Annotated[float, Field(gt=0)] | None = None
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0  # of the divergence to the reference, in the loss; 0 keeps no reference
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"


class Optimizer(Section):
    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    minimum_learning_rate: Annotated[float, Field(ge=0)] = 0.0
    schedule: Literal["constant", "cosine"] = "constant"
    warm_up_steps: Annotated[int, Field(ge=0)] = 0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    epsilon: float = 1e-8
    clip_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    stop_after_skipped_steps: Count = 3  # in a row, for gradients that are not finite
    offload: bool = False  # moments and float32 weights wait in host memory between steps


class Training(Section):
    trajectories_per_step: Count = 32  # B
    tp: Count = 1
    pp: Count = 1
    cp: Count = 1
    ep: Count = 1  # experts are cut over so many data-parallel ranks, which then run in lockstep
    recompute: Literal["none", "full"] = "none"  # full: a layer's activations are computed again in backward
    packing: Literal["group", "global"] = "group"  # group: micro-batches never span groups
    micro_batch_tokens: Count = 8192
    logprob_chunk_tokens: Count = 1024
    loss: Loss = Loss()
    optimizer: Optimizer = Optimizer()

    @property
    def lockstep_ranks(self) -> int:
        """Ranks that must run equal counts of micro-batches."""
        return self.tp * self.pp * self.cp * self.ep


class Channel(Section):
    backend: Literal["gloo", "nccl", "hccl"] | None = None  # default: gloo on cpu, nccl on cuda, hccl on npu
    queue_bytes: Count = 1 << 30  # groups on their way; then rollout waits to send
    weight_bucket_bytes: Count = 512 << 20


class Evaluation(Section):
    prompts: Annotated[int, Field(ge=0)] = 0  # held-out; 0: no evaluation
    every_iterations: Annotated[int, Field(ge=0)] = 0  # 0: before the first and after the last only
    temperature: Annotated[float, Field(ge=0)] = 1.0


class Limits(Section):
    """How long anything may be waited for."""

    start_s: Seconds = 600.0
    message_s: Seconds = 600.0  # a peer's silence; more than the longest micro-batch, step, checkpoint takes
    collective_s: Seconds = 600.0
    heartbeat_s: Seconds = 10.0
    stop_s: Seconds = 20.0  # for a stop at a safe point; then the job is ended as it is
    notice_s: Seconds | None = None  # a batch system's, before its time limit; a job that needs longer to stop says so


class Config(Section):
    run: Run = Run()
    cluster: Cluster = Cluster()
    model: Model
    data: Data
    reward: Reward = Reward()
    rollout: Rollout = Rollout()
    engine: Engine = Engine()
    admission: Admission = Admission()
    placement: Placement = Placement()
    pipeline: Pipeline = Pipeline()
    training: Training = Training()
    channel: Channel = Channel()
    evaluation: Evaluation = Evaluation()
    limits: Limits = Limits()
    hardware: Hardware | None = None
    workload: Workload | None = None

    @property
    def engines(self) -> int:
        return self.cluster.rollout_ranks // self.engine.tp

    @property
    def replicas(self) -> int:
        """Lockstep domains of the trainer: data-parallel replicas, `training.ep` of them together where experts are cut."""
        return self.cluster.training_ranks // self.training.lockstep_ranks

    @property
    def groups_per_step(self) -> int:
        """U"""
        return self.training.trajectories_per_step // self.rollout.trajectories_per_group

    @property
    def frontier_groups(self) -> int:
        """F_w"""
        width = self.admission.frontier_groups
        return self.groups_per_step if width == "auto" else width

    @property
    def over_sampling_groups(self) -> int:
        """Drawn with the R that are wanted."""
        r = self.rollout.groups_per_iteration
        return math.ceil(r * self.rollout.over_sampling - 1e-9) - r

    @property
    def most_groups(self) -> int:
        """That one iteration may draw; group ids of an iteration start at its number times this."""
        return self.rollout.groups_per_iteration + self.over_sampling_groups + self.rollout.refill_groups

    @property
    def filter_function(self) -> str:
        return self.rollout.filter if ":" in self.rollout.filter else ""

    @property
    def environment_function(self) -> str:
        """Where it is imported from; "" where trajectories have one turn."""
        name = self.rollout.environment
        return name if ":" in name or not name else f"rpipe.rollout.environments:{name}"

    @property
    def steps_per_iteration(self) -> int:
        """S"""
        return self.rollout.groups_per_iteration // self.groups_per_step

    @property
    def backend(self) -> str:
        return self.channel.backend or BACKENDS[self.cluster.accelerator]

    @property
    def dtype(self) -> str:
        return self.model.dtype or ("float32" if self.cluster.accelerator == "cpu" else "bfloat16")

    def arithmetic(self) -> str:
        """The line every run starts with."""
        r, k = self.rollout.groups_per_iteration, self.rollout.trajectories_per_group
        return (
            f"R {r} groups x K {k} trajectories = N {r * k} an iteration = S {self.steps_per_iteration} steps"
            f" x B {self.training.trajectories_per_step} trajectories (U {self.groups_per_step} groups a step)"
        )

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        from rpipe.config_rules import problems

        for problem in problems(self):
            raise ValueError(problem)
        return self


def load(path: str | Path, overrides: tuple[str, ...] | list[str] = ()) -> Config:
    """Read, merge, check. Raises ConfigError with one line."""
    tree = _read(Path(path), ())
    for text in overrides:
        _override(tree, text)
    return parse(tree, str(path))


def parse(tree: dict[str, Any], source: str) -> Config:
    """Check a merged tree; `source` is what messages name."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{source}: {_sentence(first)}") from None


def dump(config: Config) -> str:
    """The resolved config as YAML; `load` reads it back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _sentence(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        import difflib

        section: Any = Config
        for part in error["loc"][:-1]:
            section = _section(section, str(part))
        names = list(section.model_fields) if section is not None else []
        close = difflib.get_close_matches(str(error["loc"][-1]), names, 1)
        return f"{key}: unknown key" + (
            f"; did you mean {close[0]}?" if close else f"; known here: {', '.join(names)}" if names else ""
        )
    if error["type"] == "missing":
        return f"{key}: missing"
    message = error["msg"].removeprefix("Value error, ")
    if not key:
        return str(message)
    if error["type"] == "value_error":
        return f"{key} {message}"
    message = message[0].lower() + message[1:]
    return f"{key} = {error['input']!r}: {message}"


def _section(owner: Any, name: str) -> Any:
    """The Section class behind a key, or None."""
    if owner is None or name not in owner.model_fields:
        return None
    annotation = owner.model_fields[name].annotation
    options = [annotation, *getattr(annotation, "__args__", ())]
    return next((o for o in options if isinstance(o, type) and issubclass(o, Section)), None)


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice: the last would win, and a pasted second section would drop the first whole."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in above:
        raise ConfigError(f"{path}: includes itself")
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: byte {error.start} is {error.object[error.start]:#x}") from None
    try:
        tree = yaml.load(text, _Loader) or {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{at}: not YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: wants a mapping of sections, found {type(tree).__name__}")
    includes = tree.pop("include", [])
    if isinstance(includes, str):
        includes = [includes]
    if not isinstance(includes, list) or not all(isinstance(name, str) for name in includes):
        raise ConfigError(f"{path}: include = {includes!r}: wanted: a file name or a list of them")
    merged: dict[str, Any] = {}
    for name in includes:
        _merge(merged, _read(path.parent / name, (*above, path.resolve())))
    _merge(merged, tree)
    return merged


def _merge(below: dict[str, Any], above: dict[str, Any]) -> None:
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            _merge(below[key], value)
        else:
            below[key] = value


def _override(tree: dict[str, Any], text: str) -> None:
    key, found, value = text.partition("=")
    if not found or not key:
        raise ConfigError(f"{text!r}: wanted key=value, such as run.seed=1")
    at = tree
    *sections, last = key.split(".")
    for name in sections:
        inner = at.setdefault(name, {})
        if inner is None:
            inner = at[name] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{text!r}: {name} is not a section")
        at = inner
    try:
        at[last] = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"{text!r}: the value is not YAML") from None
