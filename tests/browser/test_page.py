"""The page that `rpipe report --html` writes, opened from file:// in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from rpipe.analysis import page_data
from rpipe.policy.admission import Frontier
from rpipe.report import main
from rpipe.sim.run import simulate
from tests.browser.chrome import Page
from tests.sim.test_agents import agents
from tests.timed_job import TimedJob

pytestmark = [pytest.mark.job, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a: two attempts, an engine lost, a straggler; b: another pace."""
    where = tmp_path_factory.mktemp("runs")
    world = {"rollout": {"iterations": 4, "admission": Frontier(4), "evaluate": True}}
    world["training"] = {"iterations": 4, "checkpoint_every_iterations": 2}
    lengths = {"tokens": lambda t: 1000 if tuple(t) == (19, 3) else 40 + (37 * t.group + 53 * t.sample) % 90}
    (where / "a" / "attempt-1").mkdir(parents=True)
    (where / "a" / "config.yaml").write_text("run: {name: '</script><b id=bad>a</b>'}\n")
    TimedJob(where / "a" / "attempt-1", **world, **lengths, unix_s=1000.0, ends_at_s=9.0).run()
    TimedJob(where / "a" / "attempt-2", **world, **lengths, starts_at=(1, 1), unix_s=1030.0, loses=((3.0, 1),)).run()
    TimedJob(where / "b" / "attempt-1", **world, token_s=lambda engine: 0.02).run()
    assert main([str(where / "a"), "--html"]) == 0
    assert main([str(where / "a"), str(where / "b"), "--html", str(where / "both.html")]) == 0
    return where


VIEW = "[Timeline.all[0].view.from, Timeline.all[0].view.to]"
INK = """[...document.querySelectorAll("canvas")].map((canvas) => {
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const colours = new Set();
  for (let i = 0; i < pixels.length; i += 4)
    if (pixels[i + 3] > 250) colours.add((pixels[i] << 16) | (pixels[i + 1] << 8) | pixels[i + 2]);
  return colours.size;
})"""


async def test_it_is_drawn_whole_and_asks_for_nothing_but_itself(runs: Path, page: Page):
    path = runs / "a" / "report.html"
    await page.go(path)
    assert page.complaints == []
    assert page.requested == [path.resolve().as_uri()]
    assert await page.evaluate("document.title") == "</script><b id=bad>a</b> · rpipe"
    assert await page.evaluate("document.getElementById('bad')") is None
    assert await page.evaluate("document.querySelectorAll('#table tbody tr').length") == 4
    assert all(colours > 5 for colours in await page.evaluate(INK)), "a canvas is empty"
    assert await page.evaluate("document.querySelectorAll('#histograms svg rect').length") > 40
    assert await page.evaluate("document.querySelectorAll('#curves svg path').length") >= 7
    text = await page.evaluate("document.body.innerText")
    assert (
        "attempt 1's work on iterations 1 to 2 was done again" in text
        or "attempt 1's work on iteration 1 was done again" in text
    )
    assert "engine 1 was lost at 3.0 s of attempt 2 (silent for 30 s), back after 1.0 s" in text
    assert "the trainer waited" in text and "iteration 3" in await page.evaluate("byId('gantt-of').textContent")
    widths = await page.evaluate(
        "[...document.querySelectorAll('.stack')].map((bar) => "
        "[...bar.children].reduce((sum, part) => sum + part.getBoundingClientRect().width, 0) / bar.clientWidth)"
    )
    assert len(widths) == 2 and all(width == pytest.approx(1, abs=0.02) for width in widths), "the bars do not add up"


async def test_keys_choose_zoom_and_move(runs: Path, page: Page):
    await page.go(runs / "a" / "report.html")
    assert await page.evaluate("shown.iteration") == 3
    await page.press("p")
    assert await page.evaluate("shown.iteration") == 2
    sentence = await page.evaluate("byId('sentence').textContent")
    assert "of iteration 2; " in sentence and "group 19, whose trajectory 3 ran" in sentence
    low, high = await page.evaluate(VIEW)
    await page.press("+")
    nearer = await page.evaluate(VIEW)
    assert nearer[1] - nearer[0] == pytest.approx(0.7 * (high - low))
    await page.press("ArrowRight")
    moved = await page.evaluate(VIEW)
    assert moved[0] > nearer[0] and moved[1] - moved[0] == pytest.approx(nearer[1] - nearer[0])
    await page.press("0")
    assert await page.evaluate("shown.iteration") is None and (await page.evaluate(VIEW))[0] == 0
    await page.press("n")
    assert await page.evaluate("shown.iteration") == 0
    await page.press("c")
    assert await page.evaluate("byId('colour').value") == "group"
    assert page.complaints == []


async def test_a_click_follows_a_group_and_escape_lets_it_go(runs: Path, page: Page):
    await page.go(runs / "a" / "report.html")
    await page.evaluate("byId('timeline').scrollIntoView()")
    where = """(() => {
      const line = Timeline.all[0], turn = line.run.details.find((d) => d.iteration === 3 && d.kept).turns[5];
      const box = line.canvas.getBoundingClientRect(), row = line.rows.find((r) => r.engine === turn[2]);
      return [box.left + line.x((turn[6] + turn[7]) / 2), box.top + row.y + (turn[3] + 0.4) * line.lane, turn[0], turn[1]];
    })()"""
    x, y, group, sample = await page.evaluate(where)
    await page.move(x, y)
    assert f"trajectory {group}.{sample} on engine" in await page.evaluate("byId('tip').textContent")
    await page.click(x, y)
    assert await page.evaluate("shown.group") == group
    assert f"group {group}: step" in await page.evaluate("byId('focus').textContent")
    await page.press("Escape")
    assert await page.evaluate("shown.group") is None and await page.evaluate("byId('focus').textContent") == ""


async def test_tools_have_a_row_of_their_own_and_say_what_was_answered(tmp_path: Path, page: Page):
    simulate(agents(), tmp_path / "run")
    assert main([str(tmp_path / "run"), "--html"]) == 0
    await page.go(tmp_path / "run" / "report.html")
    await page.evaluate("byId('timeline').scrollIntoView()")
    where = """(() => {
      const line = Timeline.all[0], tool = line.run.details.find((d) => d.iteration === 1).tools[7];
      const box = line.canvas.getBoundingClientRect(), row = line.row("tools");
      return [box.left + line.x((tool[3] + tool[4]) / 2), box.top + row.y + (tool[2] + 0.5) * line.toolLane, tool[0], tool[1]];
    })()"""
    x, y, group, sample = await page.evaluate(where)
    await page.move(x, y)
    assert f"the environment of trajectory {group}.{sample}" in await page.evaluate("byId('tip').textContent")
    text = await page.evaluate("document.body.innerText")
    assert "a tool call" in text.lower() and "An environment's answer" in text and "in a tool" in text
    assert all(colours > 5 for colours in await page.evaluate(INK)) and page.complaints == []


async def test_it_is_dark_where_the_system_is_and_turns_by_key(runs: Path, page: Page):
    background = "getComputedStyle(document.body).backgroundColor"
    await page.go(runs / "a" / "report.html", dark=True)
    assert await page.evaluate(background) == "rgb(18, 21, 26)"
    await page.press("t")
    assert await page.evaluate(background) == "rgb(244, 245, 247)"
    await page.press("t")
    assert await page.evaluate(background) == "rgb(18, 21, 26)"
    assert page.complaints == []


async def test_two_runs_stand_side_by_side_on_one_scale(runs: Path, page: Page):
    await page.go(runs / "both.html")
    assert await page.evaluate("Timeline.all.length") == 2
    spans = await page.evaluate("Timeline.all.map((line) => line.view.to - line.view.from)")
    assert spans[0] == pytest.approx(spans[1])
    await page.press("+")
    starts = await page.evaluate("Timeline.all.map((line) => line.view.from - line.anchor())")
    assert starts[0] == pytest.approx(starts[1])
    assert await page.evaluate("document.querySelectorAll('.stack').length") == 4
    assert await page.evaluate("document.querySelectorAll('#table tbody tr').length") == 8
    assert all(colours > 5 for colours in await page.evaluate(INK))
    assert page.complaints == []


async def test_it_fits_a_narrow_window(runs: Path, page: Page):
    await page.go(runs / "a" / "report.html", width=420)
    assert await page.evaluate("document.documentElement.scrollWidth") <= 420


async def test_of_a_large_run_the_page_says_how_much_it_carries(
    runs: Path, tmp_path: Path, page: Page, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(page_data, "CARRIED_TRAJECTORIES", 2 * 32)
    assert main([str(runs / "b"), "--html", str(tmp_path / "part.html")]) == 0
    await page.go(tmp_path / "part.html")
    assert "the page carries 2 of 4 iterations turn by turn" in await page.evaluate("byId('carried').innerText")
    await page.press("p")
    await page.press("p")
    assert await page.evaluate("byId('sentence').textContent") != "" and page.complaints == []
