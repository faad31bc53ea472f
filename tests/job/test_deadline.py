"""Responses that do not end, in a whole job: their engines' owners cut them at the deadline, and what there is is trained."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rpipe.runtime.dump import read_trajectories
from tests.job.jobs import config, events, report, train

DEADLINE_S = 1.0
TOKENS_PER_S = 10
LIMIT_TOKENS = 900  # far behind the deadline, on however busy a machine: 90 s


def test_what_runs_past_its_deadline_is_cut_scored_and_trained_as_it_is(tmp_path: Path) -> None:
    """Two engines: the owner of one is told directly, that of the other over MPI."""
    tree = config(
        run={"iterations": 2, "seed": 3},
        cluster={"rollout_ranks": 2, "training_ranks": 1},
        rollout={
            "groups_per_iteration": 8,
            "trajectories_per_group": 4,
            "max_new_tokens": LIMIT_TOKENS,
            "trajectory_deadline_s": DEADLINE_S,
        },
        admission={"policy": "fifo"},
        engine={
            "kind": "scripted",
            "options": {"lengths": "constant", "median_tokens": 2 * LIMIT_TOKENS, "tokens_per_s": TOKENS_PER_S},
        },
    )
    run_dir = tmp_path / "run"
    train(run_dir, tree)
    every = Counter((group, sample) for group in range(16) for sample in range(4))

    began_t = {tuple(e["trajectory"]): e["t"] for e in events(run_dir, 0, "TurnStarted")}
    cut = events(run_dir, 0, "AbortTurn")
    assert Counter(tuple(c["trajectory"]) for c in cut) == every and {c["engine"] for c in cut} == {0, 1}
    assert all(c["t"] >= began_t[tuple(c["trajectory"])] + DEADLINE_S for c in cut)
    answers = events(run_dir, 0, "TurnFinished")
    assert Counter(tuple(a["trajectory"]) for a in answers) == every and {a["finish"] for a in answers} == {"abort"}
    scored = events(run_dir, 0, "TrajectoryScored")
    assert Counter(tuple(s["trajectory"]) for s in scored) == every and not any(s["error"] for s in scored)

    rows = read_trajectories(run_dir / "trajectories")
    assert Counter((r["group"], r["index"]) for r in rows) == every and {r["finish"] for r in rows} == {"deadline"}
    for row in rows:
        tokens = len(row["output_ids"])
        assert 0 < tokens == len(row["logprobs"]) < LIMIT_TOKENS and row["versions"] == [(0, tokens, row["iteration"])], row

    assert Counter(g for step in events(run_dir, 2, "FinishStep") for g in step["groups"]) == Counter(range(16))
    sampled = sum(len(row["output_ids"]) for row in rows)
    assert sum(step["trained_tokens"] for step in events(run_dir, 2, "StepDone")) == sampled
    assert sum(answer["output_tokens"] for answer in answers) == sampled
    told = report(run_dir)
    assert [i["groups_trained"] for i in told["iterations"]] == [8, 8] and told["run"]["truncation_rate"] == 1.0
