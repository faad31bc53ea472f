// The groups of one iteration, a row each in submission order: deferred, generating, scored, waiting, training.
"use strict";
const PHASES = [
  ["deferred", "deferred", "deferred"],
  ["generating", null, "generating, a line a trajectory"],
  ["tool", "tool", "in a tool"],
  ["reward", "reward", "rewards"],
  ["channel", "publish", "to the trainer"],
  ["fifo", "fifo", "waits for a micro-batch"],
  ["train", null, "training"],
  ["dropped", "dropped", "dropped"],
];

class Gantt {
  constructor(into, run, index) {
    this.run = run;
    this.index = index;
    const box = element("div", { class: "gantt-scroll" });
    if (TWO) into.append(element("h3", { class: index ? "run-b" : "run-a" }, run.name));
    this.canvas = element("canvas", { class: "plain", role: "img", "aria-label": `groups of one iteration of ${run.name}` });
    box.append(this.canvas);
    into.append(box);
    this.box = box;
    this.canvas.addEventListener("mousemove", (event) => {
      const group = this.at(event);
      tip(event, group ? groupText(group, this.detail) : "");
    });
    this.canvas.addEventListener("mouseleave", () => tip(null, ""));
    this.canvas.addEventListener("click", (event) => {
      const group = this.at(event);
      show({ group: group ? group[0] : null, run: index });
    });
    redraws.push(() => this.draw());
    new ResizeObserver(() => this.draw()).observe(box);
  }

  at(event) {
    if (!this.detail) return null;
    const index = Math.floor((event.clientY - this.canvas.getBoundingClientRect().top - 4) / this.rowHeight);
    return this.detail.groups[index] || null;
  }

  draw() {
    const detail = (this.detail = shown.iteration === null ? null : detailOf(this.run, shown.iteration));
    const count = detail ? detail.groups.length : 0;
    this.rowHeight = count > 120 ? 6 : count > 48 ? 9 : 15;
    const width = this.box.clientWidth || 900;
    const height = count ? count * this.rowHeight + 30 : 34;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    const c = this.canvas.getContext("2d");
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.clearRect(0, 0, width, height);
    c.font = "11px system-ui, sans-serif";
    c.textBaseline = "middle";
    c.fillStyle = colour("soft");
    if (!detail) {
      c.fillText(
        shown.iteration === null
          ? "choose an iteration above"
          : `the page does not carry iteration ${shown.iteration} in detail`,
        4,
        16,
      );
      return;
    }
    this.rows(c, detail, width, height);
  }

  rows(c, detail, width, height) {
    const start = detail.start;
    const end = start + Math.max(...RUNS.map((run) => lasted(detailOf(run, shown.iteration)))); // two runs on one scale
    const left = 56;
    const x = (t) => left + ((t - start) / (end - start || 1)) * (width - left - 12);
    for (const at of ticks(0, end - start, Math.max(3, Math.floor(width / 120)))) {
      c.fillStyle = colour("faint");
      c.fillRect(x(at + start), 2, 1, height - 26);
      c.fillStyle = colour("soft");
      c.textAlign = "center";
      c.fillText(`${+at.toPrecision(6)} s`, x(at + start), height - 10);
    }
    const paint = painter(detail);
    const turns = new Map();
    for (const turn of detail.turns) turns.set(turn[0], [...(turns.get(turn[0]) || []), turn]);
    const tools = new Map();
    for (const tool of detail.tools) tools.set(tool[0], [...(tools.get(tool[0]) || []), tool]);
    const every = this.rowHeight >= 12 ? 1 : Math.ceil(14 / this.rowHeight);
    detail.groups.forEach((g, index) => {
      const y = 4 + index * this.rowHeight;
      const lit = shown.group === null || (shown.group === g[0] && shown.run === this.index);
      c.globalAlpha = lit ? 1 : 0.2;
      if (index % every === 0) {
        c.fillStyle = colour("soft");
        c.textAlign = "right";
        c.fillText(g[0], left - 8, y + this.rowHeight / 2);
      }
      this.row(c, g, turns.get(g[0]) || [], tools.get(g[0]) || [], { x, y, h: this.rowHeight - (this.rowHeight > 7 ? 2 : 1), start, paint });
    });
    c.globalAlpha = 1;
    for (const [t, dash] of [
      [detail.rollout_end, []],
      [detail.train_end, [2, 3]],
    ]) {
      if (t === null) continue;
      c.setLineDash(dash);
      c.strokeStyle = colour("soft");
      (c.beginPath(), c.moveTo(x(t), 2), c.lineTo(x(t), height - 24), c.stroke());
      c.setLineDash([]);
    }
  }

  row(c, g, turns, tools, { x, y, h, start, paint }) {
    const [group, admitted, generated, complete, arrived, dispatched, trained, , dropped] = g;
    const bar = (from, to, fill) => {
      if (from === null || to === null || to < from) return;
      c.fillStyle = fill;
      c.fillRect(x(from), y, Math.max(0.6, x(to) - x(from)), h);
    };
    bar(start, admitted, colour("deferred"));
    bar(admitted, generated, colour("idle"));
    const lines = new Map(); // of each sample, the one that ends first on top
    for (const turn of turns.sort((a, b) => a[7] - b[7])) (lines.delete(turn[1]), lines.set(turn[1], 0));
    [...lines.keys()].forEach((sample, index) => lines.set(sample, index));
    const each = h / Math.max(1, lines.size);
    const piece = (sample, from, to, fill) => {
      c.fillStyle = fill;
      const top = y + (lines.get(sample) || 0) * each;
      c.fillRect(x(from), top, Math.max(0.6, x(to) - x(from)), Math.max(0.5, each - (each > 2 ? 0.5 : 0)));
    };
    for (const tool of tools) piece(tool[1], tool[3], tool[4], colour(tool[6] ? "lost" : "tool"));
    for (const turn of turns)
      piece(
        turn[1],
        turn[6] === null ? turn[5] : turn[6],
        turn[7],
        turn[9] === "lost" ? colour("lost") : paint.turn(turn),
      );
    bar(generated, complete, dropped ? colour("dropped") : colour("reward"));
    if (dropped) return;
    bar(complete, arrived, colour("publish"));
    bar(arrived, dispatched, colour("fifo"));
    bar(dispatched, trained, paint.ofGroup(group));
  }
}

function lasted(detail) {
  if (!detail) return 0;
  const ends = detail.groups.flatMap((g) => g.slice(1, 7).filter((t) => t !== null));
  return Math.max(detail.train_end || 0, detail.rollout_end || 0, ...ends, detail.start) - detail.start;
}

function ganttLegend(into) {
  const rebuild = () => {
    into.replaceChildren();
    for (const [, name, text] of PHASES)
      into.append(element("span", {}, element("i", { style: `background:${name ? colour(name) : STEP_COLOURS[0]}` }), text));
    into.append(element("span", {}, "│ rollout ends"), element("span", {}, "┆ training ends"));
  };
  rebuild();
  redraws.push(rebuild);
}
