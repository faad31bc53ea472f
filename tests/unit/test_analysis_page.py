"""What the page carries, told without a browser (tests/browser looks at it)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rpipe.analysis import page, page_data
from rpipe.analysis.summary import summarize
from rpipe.policy.admission import Fifo
from rpipe.report import main
from tests.timed_job import TimedJob


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten iterations of 32 trajectories; the sixth is the slowest, and the one that waits most."""
    where = tmp_path_factory.mktemp("page")
    world = {"rollout": {"admission": Fifo(), "iterations": 10}, "training": {"iterations": 10}}
    TimedJob(where / "attempt-1", **world, tokens=lambda t: 900 if tuple(t) == (43, 1) else 60 + (37 * t.group) % 50).run()
    return where


def test_of_a_small_run_the_page_carries_everything(run: Path):
    data = page_data.of_run(run, "x")
    assert [d["iteration"] for d in data["details"]] == list(range(10))
    assert all(len(d["turns"]) == 32 and len(d["rewards"]) == 32 and len(d["groups"]) == 8 for d in data["details"])
    assert sum(data["spread"]["length"]["counts"]) == 320
    for name in ("queue_s", "generate_s", "reward_s"):
        assert sum(count for _, count in data["spread"][name]) == 320
    assert sum(count for _, count in data["spread"]["group_s"]) == 80
    assert data["spread"]["staleness"] == [(step, 80) for step in range(4)] and data["spread"]["versions"] == [(0, 320)]


def test_of_a_large_run_it_carries_the_first_the_last_the_slowest_and_no_more_than_fits(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(page_data, "CARRIED_TRAJECTORIES", 4 * 32)
    data = page_data.of_run(run, "x")
    carried = [d["iteration"] for d in data["details"]]
    assert {0, 5, 9} <= set(carried) and len(carried) <= 4
    assert len(data["report"]["iterations"]) == 10 and len(data["attempts"][0]["iterations"]) == 10
    monkeypatch.setattr(page_data, "CARRIED_TRAJECTORIES", 1)
    assert page_data.choose(summarize(run)) == {(0, 9)}  # at least one


def test_a_slot_of_an_engine_holds_one_turn_at_a_time(run: Path):
    for detail in page_data.of_run(run, "x")["details"]:
        slots: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for turn in detail["turns"]:
            slots.setdefault((turn[2], turn[3]), []).append((turn[5], turn[7]))
        for spans in slots.values():
            spans.sort()
            assert all(spans[i][1] <= spans[i + 1][0] + 1e-3 for i in range(len(spans) - 1))


def test_the_page_names_nothing_outside_itself(run: Path, tmp_path: Path):
    assert main([str(run), "--html", str(tmp_path / "x.html")]) == 0
    text = (tmp_path / "x.html").read_text()
    assert "default-src 'none'" in text and "@@" not in text
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#)""", text) and "import(" not in text and "fetch(" not in text
    assert set(re.findall(r"https?://[^\s\"'<>]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert list(tmp_path.iterdir()) == [tmp_path / "x.html"]


def test_text_of_a_run_cannot_end_the_data_and_what_is_no_number_reads_null(tmp_path: Path):
    told = {"name": "</script><!--@@SCRIPT@@", "report": {"a": [float("nan"), float("inf"), 1.5]}}
    page.write(tmp_path / "x.html", [told])
    text = (tmp_path / "x.html").read_text()
    body = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert body is not None
    assert json.loads(body[1])["runs"] == [{"name": told["name"], "report": {"a": [None, None, 1.5]}}]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "a", "a", "--html", "x.html"], "--html shows one run, or two side by side"),
        (["a", "a", "--html"], "--html wants a FILE where two runs are compared"),
        (["a", "--html", "no/where.html"], "no/.where.html."),
    ],
)
def test_pages_that_cannot_be_made_are_refused_in_one_line(
    words: list[str],
    message: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    assert main([str(run) if word == "a" else word for word in words]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
