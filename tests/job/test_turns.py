"""Trajectories of two turns in whole jobs: SGLang and Megatron; and a scripted engine that is lost in between."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rpipe.core.types import Sequences
from rpipe.runtime.dump import as_trajectory, read_trajectories
from tests.job.jobs import config, events, real, report, train

ROLLOUT = {
    "groups_per_iteration": 8,
    "trajectories_per_group": 4,
    "max_new_tokens": 96,  # a made model ends a turn after 128 tokens, on average
    "environment": "tests.job.jobs:answers_once",
    "max_turns": 2,
}
ANSWER_TOKENS = len(" so? ")


def turns_of(run_dir: Path) -> Counter[tuple[int, int]]:
    return Counter(tuple(e["trajectory"]) for e in events(run_dir, 0, "TurnFinished") if e["trajectory"][0] >= 0)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("turns") / "run"
    tree = real(
        run={"iterations": 2, "seed": 3},
        data={
            "train": {"kind": "sums", "size": 200, "reward": "tests.job.jobs:random_after_a_while"},
            "held_out": {"kind": "sums", "size": 8, "reward": "last_integer"},
        },
        evaluation={"prompts": 8},
        rollout=ROLLOUT,
    )
    train(path, tree)
    return path


@pytest.mark.timeout(400)
def test_some_trajectories_take_two_turns_and_the_trainer_agrees_on_every_sampled_token(run_dir):
    counts = Counter(turns_of(run_dir).values())
    assert counts[1] > 0 and counts[2] > 0 and set(counts) == {1, 2}, counts
    iterations = report(run_dir)["iterations"]
    assert all(0 < i["logprob_gap_max"] < 1e-4 for i in iterations), [i["logprob_gap_max"] for i in iterations]


def test_what_the_environment_answered_is_in_the_response_and_not_trained(run_dir):
    rows = [r for r in read_trajectories(run_dir / "trajectories") if r["purpose"] == "train"]
    turns = turns_of(run_dir)
    two = [r for r in rows if turns[r["group"], r["index"]] == 2]
    assert len(rows) == 64 and two
    for row in two:
        first, second = row["versions"]
        assert (second[0] - first[1], first[2], second[2]) == (ANSWER_TOKENS, row["iteration"], row["iteration"])
        assert " so? " in row["response_text"] and not row["logprobs"][first[1] : second[0]].any()
    sampled = sum(int(Sequences.of([as_trajectory(r)], [0.0], [0.0]).loss_mask.sum()) for r in rows)
    assert sampled == sum(len(r["output_ids"]) for r in rows) - ANSWER_TOKENS * len(two)
    assert sum(e["trained_tokens"] for e in events(run_dir, 1, "StepDone")) == sampled
    assert sampled == sum(e["output_tokens"] for e in events(run_dir, 0, "TurnFinished") if e["trajectory"][0] >= 0)


def test_the_second_turn_finds_the_first_in_the_prefix_cache(run_dir):
    prompts = {g["group"]: g["prompt_tokens"] for r in events(run_dir, 0, "RolloutRequested") for g in r["groups"]}
    sent = {tuple(c["trajectory"]): c for c in events(run_dir, 0, "SendTurn") if c["turn"] == 1 and c["trajectory"][0] >= 0}
    finished = [e for e in events(run_dir, 0, "TurnFinished") if tuple(e["trajectory"]) in sent]
    second = [e for e in finished if e["started_t"] >= sent[tuple(e["trajectory"])]["t"]]
    assert len(second) == len(sent) > 0
    for event in second:
        whole = prompts[event["trajectory"][0]] + sent[tuple(event["trajectory"])]["history_tokens"]
        assert whole - ANSWER_TOKENS - 8 <= event["cached_tokens"] < whole


def test_held_out_trajectories_take_turns_too(run_dir):
    held_out = [e for e in events(run_dir, 0, "ToolFinished") if e["trajectory"][0] < 0]
    assert held_out and all(e["error"] == "" and e["done"] is False for e in held_out)


@pytest.mark.timeout(200)
def test_engines_lost_between_turns_lose_no_trajectory_and_a_failing_environment_ends_only_its_own(tmp_path):
    tree = config(
        run={"iterations": 2, "seed": 3},
        cluster={"rollout_ranks": 2, "training_ranks": 1},
        rollout={**ROLLOUT, "environment": "tests.job.jobs:fails_sometimes", "max_turns": 4},
        engine={
            "kind": "scripted",
            "options": {"median_tokens": 12, "sigma": 0.7, "tokens_per_s": 200, "fail_after_s": 0.4, "bad_engine": 1},
        },
    )
    text = train(tmp_path / "run", tree)
    assert len(events(tmp_path / "run", 0, "EngineRestarted")) == 1
    answers = events(tmp_path / "run", 0, "ToolFinished")
    failed = [e for e in answers if e["error"]]
    assert failed and all(e["done"] and "ValueError: no luck" in e["error"] for e in failed)
    assert "environment tests.job.jobs:fails_sometimes: ValueError: no luck; it ends there" in text
    rows = read_trajectories(tmp_path / "run" / "trajectories")
    assert sorted((r["group"], r["index"]) for r in rows) == [(g, s) for g in range(16) for s in range(4)]
    turns = turns_of(tmp_path / "run")
    for row in rows:
        assert len(as_trajectory(row).pieces) == 2 * turns[row["group"], row["index"]] - 1
        assert len(row["output_ids"]) <= 96
    assert max(turns.values()) >= 3
