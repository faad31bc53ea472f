"""The pipeline benchmark's arithmetic; its jobs run in `make bench-pipeline`."""

from __future__ import annotations

import pytest

from rpipe import config
from rpipe.data.sums import sums_entries
from tests.bench import pipeline


@pytest.mark.parametrize("setting", list(pipeline.SETTINGS))
@pytest.mark.parametrize("arm", list(pipeline.ARMS))
def test_every_job_of_the_benchmark_has_a_valid_config(setting, arm):
    found = config.load(pipeline.CONFIG, [*pipeline.SETTINGS[setting], *pipeline.ARMS[arm]])
    assert found.groups_per_step == 2 and found.rollout.trajectories_per_group == 8 and found.frontier_groups == 2
    train = found.data.train
    assert len(sums_entries(train.options, train.size, train.seed, "data.train")) == train.size, "that many sums there are"


def row(end, first=2.0, rollout=10.0, busy=8.0, tokens=100):
    times = {"rollout_to_train_end_s": end, "first_dispatch_s": first, "rollout_s": rollout, "train_busy_s": busy}
    waits = {"waiting_ratio_start": 0.5, "waiting_ratio_busy": 0.5}
    return {**times, **waits, "generated_tokens": tokens, "trajectories": 8, "steps": 4}


def test_the_bound_is_the_longer_of_the_two_stages_with_what_cannot_overlap():
    rows = {"serial": [row(18.0)], "cgp": [row(13.0, busy=9.0)], "hard frontier": [row(13.0, first=1.5)]}
    assert pipeline.bound({**rows, "soft frontier": [row(12.5)]})["bound"] == max(9.0 + 1.5, 10.0 + 9.0 / 4)


def test_times_are_told_for_the_same_number_of_tokens():
    found = pipeline.scaled({"serial": [row(18.0)], "cgp": [row(10.0, tokens=50)], "soft frontier": [row(12.0)]})
    assert found["cgp"][0]["rollout_to_train_end_s"] == 20.0 and found["serial"][0]["rollout_to_train_end_s"] == 18.0


def test_a_round_that_an_arm_lacks_does_not_count():
    assert pipeline.whole_rounds({"serial": [row(1.0)], "cgp": []}) == {}
    text = pipeline.table("equal-32", {arm: [row(1.0), row(2.0)] for arm in pipeline.ARMS})
    assert "2 rounds" in text and "soft frontier" in text


def test_a_goal_that_is_missed_is_called_so():
    rows = {arm: [row(10.0)] * 3 for arm in pipeline.ARMS}
    rows["soft frontier"] = [row(6.0), row(7.0), row(8.0)]
    of_bound, of_serial = pipeline.verdicts("equal-32", rows, bound_s=7.0)
    assert of_bound.endswith("1.000 [0.857 .. 1.143], met")
    assert of_serial.endswith("0.700 [0.600 .. 0.800], missed, inside the interval")


def test_a_run_that_was_broken_off_goes_on_and_every_round_begins_with_another_arm(tmp_path, monkeypatch, capsys):
    asked: list[tuple[str, str]] = []

    def job(config_path, run_dir, *overrides):
        if len(asked) == 3:
            raise KeyboardInterrupt
        asked.append((next(o for o in overrides if "run.seed" in o), overrides[-1]))
        return {"iterations": [row(99.0), row(9.0)], "wall_s": 1.0}

    monkeypatch.setattr(pipeline, "run", job)
    command = ["pipeline", "--settings", "equal-32", "--rounds", "2", "--out", str(tmp_path / "kept.json")]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(KeyboardInterrupt):
        pipeline.main()
    asked.append(("broken", "off"))
    assert pipeline.main() == 0
    policies = [policy.removeprefix("admission.policy=") for _, policy in asked]
    arms = ["fifo", "fifo", "frontier", "soft_frontier"]
    assert policies == [*arms[:3], "off", arms[3], *arms[1:], arms[0]]
    told = capsys.readouterr().out
    assert "equal-32: 2 rounds" in told and "9.000 [9.000 .. 9.000]" in told, "the second iteration counts"
