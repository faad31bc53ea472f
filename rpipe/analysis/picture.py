"""How does one iteration look: engines (and tools, if it used any) above, trainer below, then its groups, on one clock?

Colour is the optimizer step that a group ends up in, so a frontier shows as one colour finishing before the next. A group's row
is grey while it is deferred, then has a line for each trajectory, then its rewards, its way, its wait and its training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rpipe.analysis.run import RunError
from rpipe.analysis.timeline import Bar, Timeline, timeline, width

# Okabe and Ito's colours: told apart by all eyes, and in print
STEP_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#882255")
DROPPED = "#BBBBBB"
STEP, PUBLISH, SAVE = "#222222", "#8A63D2", "#C9B18A"
DEFERRED, REWARD, WAITS = "#E4E8ED", "#C9971A", "#A9B4C2"
SLOTS_INCHES, TOOLS_INCHES, GROUPS_INCHES = (0.9, 3.6), (0.4, 1.2), (0.7, 2.8)
WIDTH_INCHES = 8.6
FAINT = "#E9ECF0"


def draw(run: Path, iteration: int | None, file: Path) -> None:
    """Write a picture of `iteration` (default: the last complete one); `file`'s suffix names the format. Raises RunError."""
    try:
        import matplotlib
    except ImportError:
        raise RunError("--timeline wants matplotlib: pip install 'rpipe[analysis]'") from None
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    told = timeline(run, iteration)
    if not told.turns:
        raise RunError(f"{run}: iteration {told.iteration} has no finished turn to draw")
    known = Figure().canvas.get_supported_filetypes()
    if file.suffix.lstrip(".").lower() not in known:
        raise RunError(f"{file}: not a picture's name (wanted: FILE.png, .svg or .pdf)")
    figure(told).savefig(file, dpi=200)


def figure(told: Timeline) -> Any:
    """A matplotlib Figure."""
    from matplotlib.figure import Figure

    lanes = _trainer_lanes(told)
    inches = {"engines": _within(SLOTS_INCHES, 0.04 * sum(told.slots.values()))}
    if told.tools:
        inches["tools"] = _within(TOOLS_INCHES, 0.04 * width(told.tools))
    inches |= {"trainer": 0.21 * len(lanes), "groups": _within(GROUPS_INCHES, 0.09 * len(told.groups))}
    heights = list(inches.values())
    whole = Figure(figsize=(WIDTH_INCHES, sum(heights) + 1.5), layout="constrained")
    parts = dict(zip(inches, whole.subplots(len(heights), 1, sharex=True, height_ratios=heights)))
    _slots(parts["engines"], told, {f"engine {e}\n{told.slots[e]} slots": bars for e, bars in told.turns.items()})
    if told.tools:
        _slots(parts["tools"], told, {f"tools\n{width(told.tools)} at once": told.tools})
    _trainer(parts["trainer"], told, lanes)
    _groups(parts["groups"], told)
    for axes in parts.values():
        axes.tick_params(labelsize=8, length=0, colors="#444444")
        axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
        axes.grid(axis="x", color=FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
        for t, style in _moments(told):
            if t is not None:
                axes.axvline(t, color="black", linewidth=0.8, linestyle=style)
    parts["groups"].set_xlabel("seconds since the rollout was requested", fontsize=9)
    parts["groups"].set_xlim(left=0)
    parts["engines"].set_title(_title(told), fontsize=9, loc="left")
    whole.legend(handles=_legend(told), loc="outside lower center", ncols=6, fontsize=8, frameon=False, handlelength=1.2)
    return whole


def _within(limits: tuple[float, float], inches: float) -> float:
    return min(limits[1], max(limits[0], inches))


def _groups(axes: Any, told: Timeline) -> None:
    """A row a group, in submission order."""
    steps = _steps(told)
    for row, g in enumerate(told.groups):
        colour = DROPPED if g.dropped else _colour(g.step, steps)
        _span(axes, row, 0.0, g.admitted, DEFERRED)
        each = 0.86 / max(1, len(g.ends))
        begun = g.admitted if g.admitted is not None else 0.0
        for index, end in enumerate(g.ends):
            axes.broken_barh([(begun, max(0.0, end - begun))], (row + 0.07 + index * each, each), facecolors=colour, alpha=0.75)
        _span(axes, row, g.generated, g.complete, DROPPED if g.dropped else REWARD)
        _span(axes, row, g.complete, g.arrived, PUBLISH)
        _span(axes, row, g.arrived, g.dispatched, WAITS)
        _span(axes, row, g.dispatched, g.trained, colour)
    axes.set_ylim(max(1, len(told.groups)), 0)
    count = len(told.groups)
    every = max(1, -(-count // 12))
    shown = list(range(0, count, every))
    axes.set_yticks([row + 0.5 for row in shown], [f"group {told.groups[row].group}" for row in shown])


def _span(axes: Any, row: int, start: float | None, end: float | None, colour: Any) -> None:
    if start is not None and end is not None and end > start:
        axes.broken_barh([(start, end - start)], (row + 0.07, 0.86), facecolors=colour, linewidth=0)


def _title(told: Timeline) -> str:
    parts = [f"iteration {told.iteration}{' (simulated)' if told.simulated else ''}"]
    for name, t in (("first dispatch", told.first_dispatch), ("rollout", told.rollout_end), ("train end", told.train_end)):
        if t is not None:
            parts.append(f"{name} {t:.3g} s")
    return "   ".join(parts)


def _colour(step: int | None, steps: int) -> Any:
    if step is None:
        return DROPPED
    if steps <= len(STEP_COLOURS):
        return STEP_COLOURS[step % len(STEP_COLOURS)]
    from matplotlib import colormaps

    return colormaps["viridis"](step / max(1, steps - 1))


def _steps(told: Timeline) -> int:
    bars = [bar for bars in told.turns.values() for bar in bars] + told.micro_batches + told.steps
    return 1 + max((bar.step for bar in bars if bar.step is not None), default=0)


def _bars(axes: Any, bars: list[Bar], y: float, height: float, colour: Any, edge: float = 0.3) -> None:
    spans = [(bar.start, bar.end - bar.start) for bar in bars]
    axes.broken_barh(spans, (y, height), facecolors=colour, edgecolors="white", linewidth=edge)


def _slots(axes: Any, told: Timeline, rows: dict[str, list[Bar]]) -> None:
    """One lane a slot; rows (each an engine's, under its label) from the top, a line between two."""
    steps, top, ticks = _steps(told), 0, []
    edge = 0.3 if sum(map(width, rows.values())) <= 80 else 0.0
    for name, bars in rows.items():
        lanes: dict[tuple[int, int | None], list[Bar]] = {}
        for bar in bars:
            lanes.setdefault((bar.lane, bar.step), []).append(bar)
        for (lane, step), members in lanes.items():
            _bars(axes, members, top + lane + 0.05, 0.9, _colour(step, steps), edge)
        ticks.append((top + width(bars) / 2, name))
        top += width(bars)
        axes.axhline(top, color="#888888", linewidth=0.4)
    axes.set_ylim(top, 0)
    axes.set_yticks([y for y, _ in ticks], [name for _, name in ticks])


def _trainer_lanes(told: Timeline) -> list[str]:
    replicas = 1 + max((bar.lane for bar in told.micro_batches), default=0)
    names = ["groups complete", *(f"replica {r}" if replicas > 1 else "trainer" for r in range(replicas)), "optimizer step"]
    after = [*(["publish"] if told.publishes else []), *(["checkpoint"] if told.saves else [])]
    return [*names, *after]


def _trainer(axes: Any, told: Timeline, lanes: list[str]) -> None:
    steps = _steps(told)
    times, colours = [t for t, _ in told.completions], [_colour(step, steps) for _, step in told.completions]
    axes.scatter(times, [0.5] * len(times), s=16, marker="v", c=colours, linewidths=0)
    for bar in told.micro_batches:
        _bars(axes, [bar], 1 + bar.lane + 0.1, 0.8, _colour(bar.step, steps))
    once = (("optimizer step", told.steps, STEP), ("publish", told.publishes, PUBLISH), ("checkpoint", told.saves, SAVE))
    for name, bars, colour in once:
        if bars:
            _bars(axes, bars, lanes.index(name) + 0.1, 0.8, colour, 0.0)
    axes.set_ylim(len(lanes), 0)
    axes.set_yticks([i + 0.5 for i in range(len(lanes))], lanes)


def _moments(told: Timeline) -> tuple[tuple[float | None, str], ...]:
    return (told.first_dispatch, "--"), (told.rollout_end, "-"), (told.train_end, ":")


def _legend(told: Timeline) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    steps = _steps(told)
    shown = range(steps) if steps <= len(STEP_COLOURS) else (0, steps // 2, steps - 1)
    handles: list[Any] = [Patch(color=_colour(step, steps), label=f"step {step}") for step in shown]
    if any(bar.step is None for bars in told.turns.values() for bar in bars):
        handles.append(Patch(color=DROPPED, label="dropped"))
    shades = (("deferred", DEFERRED), ("rewards", REWARD), ("to the trainer", PUBLISH), ("waits for training", WAITS))
    handles += [Patch(color=shade, label=name) for name, shade in shades]
    for name, (t, style) in zip(("first dispatch", "rollout ends", "training ends"), _moments(told)):
        if t is not None:
            handles.append(Line2D([], [], color="black", linewidth=0.8, linestyle=style, label=name))
    return handles
