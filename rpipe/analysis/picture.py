"""How does one iteration look: engines above, trainer below, one clock?

Colour is the optimizer step that a group ends up in, so a frontier shows as one colour finishing before the next.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rpipe.analysis.run import RunError
from rpipe.analysis.timeline import Bar, Timeline, timeline

# Okabe and Ito's colours: told apart by all eyes, and in print
STEP_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#882255")
DROPPED = "#BBBBBB"
STEP, PUBLISH, SAVE = "#222222", "#7F7F7F", "#C9B18A"
LANE_INCHES, SLOTS_INCHES = 0.16, (0.9, 4.2)


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
    """A matplotlib Figure, 7.2 inches wide."""
    from matplotlib.figure import Figure

    lanes = _trainer_lanes(told)
    low, high = SLOTS_INCHES
    slots = min(high, max(low, 0.05 * sum(told.slots.values())))
    trainer = 0.2 * len(lanes)
    whole = Figure(figsize=(7.2, slots + trainer + 1.35), layout="constrained")
    above, below = whole.subplots(2, 1, sharex=True, height_ratios=[slots, trainer])
    _engines(above, told)
    _trainer(below, told, lanes)
    for axes in (above, below):
        axes.tick_params(labelsize=8, length=2)
        axes.spines[["top", "right"]].set_visible(False)
        for t, style in _moments(told):
            if t is not None:
                axes.axvline(t, color="black", linewidth=0.8, linestyle=style)
    below.set_xlabel("seconds since the rollout was requested", fontsize=9)
    below.set_xlim(left=0)
    above.set_title(_title(told), fontsize=9, loc="left")
    whole.legend(handles=_legend(told), loc="outside lower center", ncols=5, fontsize=8, frameon=False, handlelength=1.4)
    return whole


def _title(told: Timeline) -> str:
    parts = [f"iteration {told.iteration}"]
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


def _engines(axes: Any, told: Timeline) -> None:
    """One lane a slot; engines from the top, a line between two."""
    steps, top, ticks = _steps(told), 0, []
    edge = 0.3 if sum(told.slots.values()) <= 80 else 0.0
    for engine, bars in told.turns.items():
        lanes: dict[tuple[int, int | None], list[Bar]] = {}
        for bar in bars:
            lanes.setdefault((bar.lane, bar.step), []).append(bar)
        for (lane, step), members in lanes.items():
            _bars(axes, members, top + lane + 0.05, 0.9, _colour(step, steps), edge)
        ticks.append((top + told.slots[engine] / 2, f"engine {engine}\n{told.slots[engine]} slots"))
        top += told.slots[engine]
        axes.axhline(top, color="black", linewidth=0.4)
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
    for name, (t, style) in zip(("first dispatch", "rollout ends", "training ends"), _moments(told)):
        if t is not None:
            handles.append(Line2D([], [], color="black", linewidth=0.8, linestyle=style, label=name))
    return handles
