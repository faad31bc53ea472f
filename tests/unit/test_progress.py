from __future__ import annotations

import io
import time
from dataclasses import replace

import pytest

from rpipe.runtime.progress import Progress, ProgressState, clock_text, finished_line, pack, status_parts, time_left_s

ROLLOUT = ProgressState(
    iteration=3,
    iterations=20,
    phase="rollout",
    groups_total=16,
    groups_sent=5,
    groups_in_service=2,
    groups_deferred=9,
    groups_trained=4,
    trajectories_done=44,
    trajectories_total=128,
    tokens_per_s=1234.5,
    trainer="waiting for group 12",
    reward_mean=0.53125,
    held_out=0.48,
    elapsed_s=83.0,
)


class Clock:
    t = 0.0

    def __call__(self) -> float:
        return self.t


def plain() -> tuple[Progress, io.StringIO, Clock]:
    out, clock = io.StringIO(), Clock()
    return Progress(terminal=False, columns=None, file=out, clock=clock), out, clock


@pytest.fixture
def capable_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")


def test_plain_lines_are_one_an_iteration_however_many_updates():
    progress, out, _ = plain()
    for trained in range(17):
        progress.update(replace(ROLLOUT, groups_trained=trained))
    progress.update(replace(ROLLOUT, phase="publishing"))
    progress.update(replace(ROLLOUT, iteration=4, groups_trained=0, elapsed_s=99.0))
    assert out.getvalue() == ("iteration 3 done (4 of 20), reward 0.531, held-out 0.480, 1,234 tokens/s, 1:23\n")


def test_a_long_iteration_says_something_every_thirty_seconds():
    progress, out, clock = plain()
    for second in range(95):
        clock.t = float(second)
        progress.update(ROLLOUT)
    lines = out.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0] == (
        "iteration 3 of 20, rollout; groups 5/16 sent, 2 in service, 9 deferred, 4 trained; trajectories 44/128;"
        " 1,234 tokens/s; trainer waiting for group 12; reward 0.531; held-out 0.480"
    )


def test_a_finished_iteration_shows_its_own_reward_and_the_newest_held_out_one():
    progress, out, _ = plain()
    progress.update(replace(ROLLOUT, reward_mean=0.1, held_out=None))  # of the iteration before: this one is not over
    progress.update(replace(ROLLOUT, phase="publishing", reward_mean=0.2, held_out=None))
    progress.update(replace(ROLLOUT, phase="evaluating", iteration=4, reward_mean=0.3, held_out=0.9))
    assert "reward 0.200, held-out 0.900, 1,234 tokens/s" in out.getvalue()


def test_close_names_the_last_iteration_finished_or_not():
    progress, out, _ = plain()
    progress.update(replace(ROLLOUT, iteration=19, phase="training", groups_trained=14))
    progress.update(replace(ROLLOUT, iteration=19, phase="saving"))
    progress.close()
    progress.close()
    assert out.getvalue().count("\n") == 1 and out.getvalue().startswith("iteration 19 done (20 of 20)")
    progress, out, _ = plain()
    progress.update(ROLLOUT)
    progress.close()
    assert out.getvalue().startswith("iteration 3 of 20 not finished: rollout; groups 5/16 sent")


def test_before_the_first_rollout_only_the_phase_is_told():
    assert status_parts(replace(ROLLOUT, phase="starting", reward_mean=None, held_out=None)) == ["starting"]
    evaluating = replace(ROLLOUT, phase="evaluating", trajectories_done=3, trajectories_total=64, reward_mean=None)
    assert status_parts(evaluating) == ["evaluating", "trajectories 3/64", "1,234 tokens/s", "held-out 0.480"]


def test_lines_pass_through_on_a_plain_stream():
    progress, out, _ = plain()
    progress.line("rank 3: engine 0 was started again [1]")
    assert out.getvalue() == "rank 3: engine 0 was started again [1]\n"


def test_a_terminal_is_redrawn_at_most_five_times_a_second(capable_terminal: None):
    out, clock = io.StringIO(), Clock()
    progress = Progress(terminal=True, columns=100, file=out, clock=clock)
    for tick in range(1000):  # one second, an update a millisecond
        clock.t = tick / 1000
        progress.update(replace(ROLLOUT, trajectories_done=tick))
    drawn = out.getvalue().count("trajectories ")
    progress.close()
    assert drawn == 5


def test_the_live_display_fits_its_columns_and_shows_the_state(capable_terminal: None):
    out = io.StringIO()
    progress = Progress(terminal=True, columns=80, file=out, clock=Clock())
    progress.update(ROLLOUT)
    progress.line("a message that stays [not markup]")
    progress.close()
    text = out.getvalue()
    for part in ("3/20", "1:23", "groups 5/16 sent", "trainer waiting for group 12", "held-out 0.480"):
        assert part in text
    assert "a message that stays [not markup]" in text
    assert "iteration 3 of 20 not finished" in text


def test_a_killed_job_leaves_a_terminal_with_its_cursor(capable_terminal: None):
    out = io.StringIO()
    progress = Progress(terminal=True, columns=80, file=out)
    progress.update(ROLLOUT)
    shown, hidden = out.getvalue().rfind("\x1b[?25h"), out.getvalue().rfind("\x1b[?25l")
    progress.close()
    assert shown > hidden


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "dumb")
    out = io.StringIO()
    progress = Progress(terminal=True, columns=80, file=out, clock=Clock())
    progress.update(ROLLOUT)
    progress.update(replace(ROLLOUT, iteration=4))
    assert out.getvalue().startswith("iteration 3 done") and "\x1b" not in out.getvalue()


@pytest.mark.timeout(30)
def test_an_update_that_draws_nothing_costs_under_a_millisecond(capable_terminal: None):
    progress = Progress(terminal=True, columns=80, file=io.StringIO(), clock=Clock())
    progress.update(ROLLOUT)
    began = time.process_time()
    for _ in range(2000):
        progress.update(ROLLOUT)
    spent = time.process_time() - began
    progress.close()
    assert spent / 2000 < 1e-3


def test_time_left_goes_by_the_pace_since_this_job_began_to_work():
    began = replace(ROLLOUT, iteration=10, groups_trained=0, elapsed_s=50.0)  # resumed at iteration 10
    assert time_left_s(None, began) is None and time_left_s(began, began) is None
    now = replace(ROLLOUT, iteration=12, groups_trained=8, elapsed_s=100.0)
    assert time_left_s(began, now) == 20.0 * 7.5  # 2.5 iterations in 50 s; 7.5 to go
    assert time_left_s(began, replace(now, iteration=20, groups_trained=0)) == 0.0


def test_words_and_packing():
    assert clock_text(75.9) == "1:15" and clock_text(3675) == "1:01:15"
    assert pack(["abc", "def", "ghi"], 8) == ["abc  def", "ghi"]
    assert pack(["longer than the line"], 5) == ["longer than the line"]
    assert finished_line(replace(ROLLOUT, reward_mean=None), None).startswith("iteration 3 done (4 of 20), 1,234 tokens/s")
