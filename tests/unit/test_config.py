"""Run files: what is merged, what is refused, and with which one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rpipe import config

GOOD = {"model": {"make": {}}, "data": {"train": {"kind": "sums"}}}


def write(folder: Path, tree: object, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
    return path


def test_a_resolved_config_reads_back_as_itself(tmp_path):
    found = config.load(write(tmp_path, GOOD))
    assert config.load(write(tmp_path, config.dump(found), "again.yaml")) == found


def test_the_arithmetic_is_told_in_one_line(tmp_path):
    overrides = ["rollout.groups_per_iteration=32", "rollout.trajectories_per_group=8", "training.trajectories_per_step=64"]
    found = config.load(write(tmp_path, GOOD), overrides)
    assert found.arithmetic() == (
        "R 32 groups x K 8 trajectories = N 256 an iteration = S 4 steps x B 64 trajectories (U 8 groups a step)"
    )


def test_a_file_goes_over_what_it_includes_and_the_command_line_over_both(tmp_path):
    write(tmp_path, {"run": {"seed": 1, "name": "below", "iterations": 7}}, "below.yaml")
    path = write(tmp_path, {**GOOD, "include": "below.yaml", "run": {"seed": 2, "name": "above"}})
    found = config.load(path, ["run.seed=3"])
    assert (found.run.seed, found.run.name, found.run.iterations) == (3, "above", 7)


def test_numbers_in_scientific_notation_are_numbers(tmp_path):
    found = config.load(write(tmp_path, GOOD), ["training.optimizer.learning_rate=1e-6"])
    assert found.training.optimizer.learning_rate == 1e-6


@pytest.mark.parametrize(
    "override, words",
    [
        ("run.sed=1", "run.sed: unknown key; did you mean seed?"),
        ("rum.seed=1", "rum: unknown key; did you mean run?"),
        ("rollout.groups_per_iteration=abc", "rollout.groups_per_iteration = 'abc': input should be a valid integer"),
        ("rollout.groups_per_iteration=0", "rollout.groups_per_iteration = 0: input should be greater than or equal to 1"),
        ("pipeline.mode=seriel", "pipeline.mode = 'seriel': input should be 'serial', 'fifo' or 'exact'"),
        ("training.trajectories_per_step=20", "20 is not a whole number of groups of K = 8; nearest: 16, 24"),
        ("training.trajectories_per_step=4", "4 is not a whole number of groups of K = 8; nearest: 8"),
        ("training.trajectories_per_step=48", "48 does not divide R x K = 16 x 8 = 128; nearest: 32, 64"),
        ("training.tp=2", "cluster.training_ranks = 1 is not tp x pp x cp x dp = 2 x 1 x 1 x dp; wanted: a multiple of 2"),
        ("engine.tp=2", "cluster.rollout_ranks = 1 does not hold whole engines of engine.tp = 2"),
        ("training.pp=2", "wanted: a multiple of 2"),
        ("pipeline.max_staleness=1", "only 0 (on-policy) is built"),
        ("evaluation.prompts=8", "evaluation.prompts = 8 wants data.held_out"),
        ("channel.backend=nccl", "channel.backend = nccl does not run on cluster.accelerator = cpu; wanted: gloo"),
        ("model.path=/x", "model wants exactly one of path, make and gguf"),
        ("data.train.kind=jsonl", "data.train kind jsonl wants path"),
        ("admission.budget_tokens=9", "admission.budget_tokens wants admission.policy = soft_frontier"),
        ("rollout.filter=zero", "rollout.filter = 'zero'; wanted: none, zero_variance or package.module:function"),
        ("rollout.refill_groups=2", "rollout.refill_groups = 2 wants rollout.filter"),
        ("rollout.over_sampling=1.5", "rollout.over_sampling = 1.5 wants rollout.filter"),
        ("rollout.top_k=0", "rollout.top_k = 0; wanted: -1 (all) or at least 1"),
        ("training.optimizer.minimum_learning_rate=1", "is above learning_rate"),
        ("nonsense", "'nonsense': wanted key=value"),
        ("run.seed.x=1", "seed is not a section"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(tmp_path, override, words):
    path = write(tmp_path, {**GOOD, "run": {"seed": 0}})
    with pytest.raises(config.ConfigError) as error:
        config.load(path, [override])
    assert words in str(error.value) and "\n" not in str(error.value), str(error.value)


@pytest.mark.parametrize(
    "text, words",
    [
        ("run: [1", "run.yaml:1: not YAML"),
        ("- 1", "wants a mapping of sections, found list"),
        ("include: 5", "include = 5: wanted: a file name or a list of them"),
        ("include: [1]", "include = [1]: wanted: a file name or a list of them"),
        ("include: run.yaml", "includes itself"),
        ("include: gone.yaml", "gone.yaml: cannot be read: No such file or directory"),
        ("{}", "model: missing"),
    ],
)
def test_a_file_that_is_no_run_file_is_refused_in_one_line(tmp_path, text, words):
    with pytest.raises(config.ConfigError) as error:
        config.load(write(tmp_path, text))
    assert words in str(error.value) and "\n" not in str(error.value), str(error.value)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"run: \xff")
    with pytest.raises(config.ConfigError, match="not UTF-8 text: byte 5 is 0xff"):
        config.load(path)


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["training.loss.advantage=reinforce_pp", "pipeline.mode=fifo"], "reinforce_pp is whitened over a step's trajectories"),
        (["training.loss.importance_cap=2"], "importance_cap = 2 wants pipeline.old_logprob = pinned"),
        (["training.loss.objective=gspo", "training.loss.aggregation=token_mean"], "gspo counts sequences"),
        (["training.optimizer.offload=true"], "offload: on a CPU the optimizer is in host memory already"),
        (
            ["training.optimizer.schedule=cosine", "training.optimizer.warm_up_steps=1000000"],
            "warm_up_steps = 1000000 leaves nothing of the run's",
        ),
        (["training.ep=2", "training.cp=2", "cluster.training_ranks=4"], "ep = 2 and cp = 2"),
        (["training.ep=2", "cluster.training_ranks=3"], "is not tp x pp x cp x ep x dp = 1 x 1 x 1 x 2 x dp"),
        (
            ["training.cp=2", "cluster.training_ranks=2", "training.loss.objective=gspo", "training.loss.aggregation=fixed"],
            "gspo wants whole sequences on a rank, not training.cp = 2",
        ),
    ],
)
def test_what_cannot_train_is_refused(tmp_path, overrides, words):
    with pytest.raises(config.ConfigError) as error:
        config.load(write(tmp_path, GOOD), overrides)
    assert words in str(error.value) and "\n" not in str(error.value), str(error.value)


def test_exact_mode_refuses_micro_batches_that_span_groups(tmp_path):
    with pytest.raises(config.ConfigError, match=r"exact wants training\.packing = group"):
        config.load(write(tmp_path, GOOD), ["pipeline.mode=exact", "training.packing=global"])


def test_one_device_for_all_ranks_wants_gloo_between_them(tmp_path):
    shared = {**GOOD, "cluster": {"accelerator": "cuda", "share_device": True}}
    with pytest.raises(config.ConfigError, match=r"cluster\.share_device wants .* channel\.backend = gloo"):
        config.load(write(tmp_path, shared))
    assert config.load(write(tmp_path, {**shared, "channel": {"backend": "gloo"}})).cluster.share_device
