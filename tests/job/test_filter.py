"""Dynamic filtering in a whole job: groups are dropped, more are drawn, and the run goes on when nothing is left to train."""

from __future__ import annotations

from typing import Any

from tests.bench.overheads import told
from tests.job.jobs import config, events, report, train


def not_short(prompt: str, responses: list[str], rewards: list[float], metadata: dict[str, Any]) -> bool:
    """A filter function: drops two groups of five, by their prompts alone."""
    assert len(responses) == len(rewards) == 4 and metadata["prompt_id"] and metadata["answer"]
    return sum(prompt.encode()) % 5 > 1


def never(prompt: str, response: str, answer: str, metadata: dict[str, Any]) -> float:
    return 0.0


def test_a_filter_function_drops_groups_and_others_are_drawn_in_their_place(tmp_path):
    tree = config(
        rollout={"filter": "tests.job.test_filter:not_short", "over_sampling": 1.25, "refill_groups": 20},
        admission={"policy": "soft_frontier"},
        run={"iterations": 2, "seed": 3},
    )
    train(tmp_path / "run", tree)
    found = report(tmp_path / "run")["iterations"]
    assert [i["groups_trained"] for i in found] == [8, 8] and all(i["steps"] == 4 for i in found)
    dropped = events(tmp_path / "run", 0, "DropGroup")
    refused = [d for d in dropped if d["reason"] == "refused by tests.job.test_filter:not_short"]
    assert refused and {d["reason"] for d in dropped} <= {refused[0]["reason"], "surplus"}
    answers = {f["group"]: f["keep"] for f in events(tmp_path / "run", 0, "GroupFiltered")}
    for iteration in (0, 1):
        sent = [s["group"] for s in events(tmp_path / "run", 0, "SendGroup") if s["iteration"] == iteration]
        kept = sorted(group for group, keep in answers.items() if keep and group // 30 == iteration)
        assert sorted(sent) == kept[:8], "the first eight kept, as submitted"
    assert events(tmp_path / "run", 0, "EngineReady")[0]["kv_tokens"] > 0
    assert "bytes" in told(tmp_path / "run")  # the committed benchmark reads any run


def test_an_iteration_of_which_nothing_is_kept_goes_on_with_one_line(tmp_path):
    tree = config(
        rollout={"filter": "zero_variance", "refill_groups": 3},
        data={"train": {"kind": "sums", "size": 200, "reward": "tests.job.test_filter:never"}},
        run={"iterations": 2, "seed": 3},
    )
    text = train(tmp_path / "run", tree)
    lines = [line for line in text.splitlines() if "rollout.filter dropped all 11 groups; every reward was 0" in line]
    assert len(lines) == 2, text
    assert [i["groups_trained"] for i in report(tmp_path / "run")["iterations"]] == [0, 0]
    assert [e["version"] for e in events(tmp_path / "run", 1, "WeightsPublished")] == [0, 1, 2]
