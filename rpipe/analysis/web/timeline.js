// One run's timeline on a canvas: engines slot by slot, tools, rewards, trainer replicas, steps, publishing; zoom, move, follow a group.
"use strict";
const GUTTER = 118;
const MAP = 16; // height of the overview strip
const GAP = 7;

class Timeline {
  constructor(into, run, index) {
    this.run = run;
    this.index = index;
    this.box = element("div", { class: "timeline" });
    if (TWO) this.box.append(element("h3", { class: index ? "run-b" : "run-a" }, run.name));
    this.canvas = element("canvas", {
      tabindex: "0",
      role: "img",
      "aria-label": `timeline of ${run.name}: arrows move it, plus and minus zoom`,
    });
    this.box.append(this.canvas);
    into.append(this.box);
    const last = run.attempts[run.attempts.length - 1];
    this.end = Math.max(last.start_s + last.seconds, 1e-3);
    this.view = { from: 0, to: this.end };
    this.layout();
    this.listen();
    redraws.push(() => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.box);
  }

  // Rows from the top: name, y, height, and what it holds.
  layout() {
    const { details, attempts } = this.run;
    const slots = new Map();
    let rewards = 0,
      tools = 0,
      replicas = 1;
    for (const detail of details) {
      for (const turn of detail.turns) slots.set(turn[2], Math.max(slots.get(turn[2]) || 0, turn[3] + 1));
      for (const tool of detail.tools) tools = Math.max(tools, tool[2] + 1);
      for (const reward of detail.rewards) rewards = Math.max(rewards, reward[2] + 1);
      replicas = Math.max(replicas, detail.replicas);
    }
    const engines = [...slots.keys()].sort((a, b) => a - b);
    const all = [...slots.values()].reduce((sum, count) => sum + count, 0) || 1;
    this.lane = Math.min(11, Math.max(0.5, 360 / all));
    this.toolLane = Math.min(6, Math.max(0.5, 80 / (tools || 1)));
    this.rewardLane = Math.min(6, Math.max(1, 60 / (rewards || 1)));
    this.rows = [];
    let y = MAP + 10;
    const add = (kind, name, height, more = {}) => {
      this.rows.push({ kind, name, y, height, ...more });
      y += height + GAP;
    };
    add("iterations", "iteration", 17);
    for (const engine of engines)
      add("engine", `engine ${engine}`, Math.max(10, this.lane * slots.get(engine)), { engine, slots: slots.get(engine) });
    if (tools) add("tools", "tools", Math.max(8, this.toolLane * tools));
    if (rewards) add("rewards", "rewards", Math.max(8, this.rewardLane * rewards));
    add("groups", "groups complete", 11);
    for (let replica = 0; replica < replicas; replica++)
      add("replica", replicas > 1 ? `replica ${replica}` : "trainer", 17, { replica });
    add("steps", "optimizer step", 12);
    add("between", "publish, save", 12);
    if (attempts.some((a) => a.marks.length || a.outages.length)) add("marks", "events", 12);
    this.height = y + 20;
    this.canvas.style.height = `${this.height}px`;
  }

  row(kind) {
    return this.rows.find((row) => row.kind === kind);
  }

  x(t) {
    return GUTTER + ((t - this.view.from) / (this.view.to - this.view.from)) * (this.width - GUTTER);
  }

  t(x) {
    return this.view.from + ((x - GUTTER) / (this.width - GUTTER)) * (this.view.to - this.view.from);
  }

  // ---- drawing

  draw() {
    const ratio = window.devicePixelRatio || 1;
    this.width = this.box.clientWidth || 900;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    const c = (this.c = this.canvas.getContext("2d"));
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.clearRect(0, 0, this.width, this.height);
    c.font = "11px system-ui, sans-serif";
    c.textBaseline = "middle";
    this.drawGrid();
    c.save();
    c.beginPath();
    c.rect(GUTTER, MAP + 4, this.width - GUTTER, this.height);
    c.clip();
    this.drawAttempts();
    for (const detail of this.run.details) if (this.visible(detail)) this.drawDetail(detail);
    this.drawBetween();
    c.restore();
    this.drawNames();
    this.drawMap();
  }

  visible(detail) {
    const ends = detail.turns.length ? detail.turns[detail.turns.length - 1][7] : detail.start;
    return (
      detail.start !== null &&
      detail.start <= this.view.to &&
      Math.max(detail.train_end || 0, detail.rollout_end || 0, ends) >= this.view.from
    );
  }

  drawGrid() {
    const c = this.c;
    const origin = this.anchor();
    const bottom = this.height - 20;
    c.textAlign = "center";
    for (const at of ticks(this.view.from - origin, this.view.to - origin, Math.max(3, Math.floor(this.width / 110)))) {
      const x = this.x(at + origin);
      if (x < GUTTER) continue;
      c.fillStyle = colour("faint");
      c.fillRect(x, MAP + 6, 1, bottom - MAP - 6);
      c.fillStyle = colour("soft");
      c.fillText(`${+at.toPrecision(9)} s`, Math.min(x, this.width - 22), this.height - 8);
    }
  }

  drawNames() {
    const c = this.c;
    c.textAlign = "right";
    for (const row of this.rows) {
      c.fillStyle = colour("soft");
      c.fillText(row.name, GUTTER - 10, row.y + row.height / 2);
      if (row.kind !== "iterations") {
        c.fillStyle = colour("line");
        c.fillRect(GUTTER, row.y + row.height + GAP / 2, this.width - GUTTER, 0.5);
      }
    }
  }

  // Starting, warming up, evaluations, what lies between two attempts.
  drawAttempts() {
    const c = this.c;
    const band = this.row("iterations");
    const bottom = this.height - 22;
    for (const attempt of this.run.attempts) {
      if (attempt.gap_s > 0)
        this.hatch(
          attempt.start_s - attempt.gap_s,
          attempt.start_s,
          band.y,
          bottom,
          colour("lost"),
          `gap ${seconds(attempt.gap_s)}`,
        );
      const begin = attempt.ready === null ? attempt.start_s + attempt.seconds : attempt.ready;
      this.block(
        attempt.start_s,
        begin,
        band.y,
        band.height,
        PARTS.starting,
        attempt.attempt > 1 ? `attempt ${attempt.attempt} starts` : "starting",
      );
      if (attempt.warm_up) this.block(...attempt.warm_up, band.y, band.height, PARTS["warming up"], "warming up");
      for (const [from, to, n] of attempt.evaluations)
        if (from !== null && to !== null) this.block(from, to, band.y, band.height, PARTS.evaluating, `evaluation ${n}`);
      for (const [n, from, rollout, train, kept] of attempt.iterations) {
        if (from === null) continue;
        const to = Math.max(rollout || from, train || from);
        const chosen = n === shown.iteration && kept;
        this.block(
          from,
          to,
          band.y,
          band.height,
          kept ? colour(chosen ? "mark" : "fifo") : colour("dropped"),
          kept ? String(n) : `${n} again later`,
          kept ? 1 : 0.6,
        );
      }
      c.fillStyle = colour("line");
      c.fillRect(this.x(attempt.start_s), band.y - 3, 1, bottom - band.y);
    }
  }

  block(from, to, y, height, fill, text = "", alpha = 1) {
    const c = this.c;
    const x = this.x(from);
    const width = Math.max(0.7, this.x(to) - x - (this.x(to) - x > 3 ? 0.6 : 0));
    if (x > this.width || x + width < GUTTER) return;
    c.globalAlpha = alpha;
    c.fillStyle = fill;
    c.fillRect(x, y, width, height);
    c.globalAlpha = 1;
    if (text && width > c.measureText(text).width + 6) {
      c.fillStyle = "#fff";
      c.textAlign = "center";
      const left = Math.max(x, GUTTER),
        right = Math.min(x + width, this.width);
      if (right - left > c.measureText(text).width + 4) c.fillText(text, (left + right) / 2, y + height / 2 + 0.5);
    }
  }

  hatch(from, to, top, bottom, stroke, text) {
    const c = this.c;
    const left = Math.max(this.x(from), GUTTER),
      right = Math.min(this.x(to), this.width);
    if (right <= left) return;
    c.save();
    c.beginPath();
    c.rect(left, top, right - left, bottom - top);
    c.clip();
    c.globalAlpha = 0.35;
    c.strokeStyle = stroke;
    c.beginPath();
    for (let x = left - (bottom - top); x < right; x += 9) (c.moveTo(x, bottom), c.lineTo(x + (bottom - top), top));
    c.stroke();
    c.globalAlpha = 1;
    c.fillStyle = colour("ink");
    c.textAlign = "center";
    if (right - left > c.measureText(text).width) c.fillText(text, (left + right) / 2, top + 60);
    c.restore();
  }

  drawDetail(detail) {
    const c = this.c;
    const paint = painter(detail);
    const base = detail.kept ? 1 : 0.45;
    const alpha = (group) => base * (shown.group === null || (shown.group === group && shown.run === this.index) ? 1 : 0.13);
    const rows = new Map(this.rows.filter((row) => row.kind === "engine").map((row) => [row.engine, row]));
    const edge = this.lane > 4 ? 1 : this.lane > 2 ? 0.4 : 0;
    for (const turn of detail.turns) {
      const row = rows.get(turn[2]);
      const from = missing(turn[5]) ? turn[4] : turn[5];
      const y = row.y + turn[3] * this.lane;
      if (!missing(turn[6]) && turn[6] > from)
        this.block(from, turn[6], y, this.lane - edge, colour("deferred"), "", alpha(turn[0]));
      this.block(
        missing(turn[6]) ? from : turn[6],
        turn[7],
        y,
        this.lane - edge,
        turn[9] === "lost" ? colour("lost") : paint.turn(turn),
        "",
        alpha(turn[0]),
      );
    }
    const tools = this.row("tools");
    for (const t of detail.tools) {
      const height = Math.max(0.5, this.toolLane - (this.toolLane > 2 ? 0.4 : 0));
      this.block(t[3], t[4], tools.y + t[2] * this.toolLane, height, colour(t[6] ? "lost" : "tool"), "", alpha(t[0]));
    }
    const scoring = this.row("rewards");
    for (const r of detail.rewards) {
      const y = scoring.y + r[2] * this.rewardLane;
      const asked = missing(r[3]) ? r[4] : r[3];
      if (r[4] > asked) this.block(asked, r[4], y, Math.max(0.8, this.rewardLane - 0.4), colour("deferred"), "", alpha(r[0]));
      this.block(
        Math.max(r[4], asked),
        r[5],
        y,
        Math.max(0.8, this.rewardLane - 0.4),
        r[7] ? colour("lost") : colour("reward"),
        "",
        alpha(r[0]),
      );
    }
    const complete = this.row("groups");
    for (const g of detail.groups) {
      const at = missing(g[4]) ? g[3] : g[4];
      if (missing(at)) continue;
      c.globalAlpha = alpha(g[0]);
      c.fillStyle = g[8] ? colour("dropped") : paint.ofGroup(g[0]);
      const x = this.x(at);
      c.beginPath();
      (c.moveTo(x - 4, complete.y), c.lineTo(x + 4, complete.y), c.lineTo(x, complete.y + complete.height));
      c.fill();
      c.globalAlpha = 1;
    }
    const replicas = this.rows.filter((row) => row.kind === "replica");
    for (const m of detail.micro_batches) {
      const lit = shown.group === null || (shown.run === this.index && m[5].includes(shown.group));
      const fill = shown.colouring === "group" && m[5].length === 1 ? paint.ofGroup(m[5][0]) : paint.ofStep(m[3]);
      this.block(m[1], m[2], replicas[m[0]].y, replicas[m[0]].height, fill, "", base * (lit ? 1 : 0.13));
    }
    const steps = this.row("steps");
    for (const s of detail.steps)
      this.block(s[2], s[3], steps.y, steps.height, s[4] ? colour("lost") : colour("stepbar"), "", base);
    for (const [t, dash] of [
      [detail.rollout_end, []],
      [detail.train_end, [2, 3]],
    ]) {
      if (missing(t)) continue;
      c.setLineDash(dash);
      c.strokeStyle = colour("soft");
      (c.beginPath(), c.moveTo(this.x(t), this.row("iterations").y), c.lineTo(this.x(t), this.height - 22), c.stroke());
      c.setLineDash([]);
    }
  }

  drawBetween() {
    const row = this.row("between");
    const marks = this.row("marks");
    for (const attempt of this.run.attempts) {
      for (const [from, to] of attempt.publishes) this.block(from, to, row.y, row.height, colour("publish"), "publish");
      for (const [from, to] of attempt.checkpoints) this.block(from, to, row.y, row.height, colour("save"), "save");
      for (const [engine, lost, back] of attempt.outages) {
        const lane = this.rows.find((r) => r.engine === engine);
        const until = back === null ? attempt.start_s + attempt.seconds : back;
        if (lane) this.hatch(lost, until, lane.y, lane.y + lane.height, colour("lost"), "");
        this.block(lost, until, marks.y, marks.height, colour("lost"), `engine ${engine} lost`);
      }
      for (const [t] of attempt.marks) {
        this.c.fillStyle = colour("mark");
        this.c.fillRect(this.x(t) - 1, marks.y, 2.5, marks.height);
      }
    }
  }

  drawMap() {
    const c = this.c;
    const x = (t) => GUTTER + (t / this.end) * (this.width - GUTTER);
    c.fillStyle = colour("faint");
    c.fillRect(GUTTER, 0, this.width - GUTTER, MAP);
    for (const attempt of this.run.attempts)
      for (const [n, from, rollout, train, kept] of attempt.iterations) {
        if (from === null) continue;
        c.fillStyle = n === shown.iteration && kept ? colour("mark") : colour(kept ? "fifo" : "dropped");
        c.fillRect(x(from), 3, Math.max(1, x(Math.max(rollout || from, train || from)) - x(from) - 0.5), MAP - 6);
      }
    c.strokeStyle = colour("mark");
    c.lineWidth = 1.5;
    c.strokeRect(
      x(Math.max(0, this.view.from)),
      1,
      Math.max(3, x(Math.min(this.end, this.view.to)) - x(Math.max(0, this.view.from))),
      MAP - 2,
    );
    c.lineWidth = 1;
  }

  // ---- moving

  // Seconds on the axis count from here.
  anchor() {
    const detail = shown.iteration === null ? null : this.span(shown.iteration);
    return detail ? detail[0] : 0;
  }

  // From the request to the end of publishing, of the attempt that is kept.
  span(iteration) {
    let found = null;
    for (const attempt of this.run.attempts)
      for (const [n, from, rollout, train, kept] of attempt.iterations)
        if (n === iteration && from !== null && (kept || !found)) {
          const published = attempt.publishes.find((p) => p[2] === n + 1);
          found = [from, Math.max(rollout || from, train || from, published ? published[1] : 0)];
        }
    return found;
  }

  go(from, to) {
    const least = 1e-4;
    const width = Math.min(this.end * 1.1, Math.max(least, to - from));
    from = Math.min(Math.max(from, -this.end * 0.05), this.end * 1.05 - width);
    this.view = { from, to: from + width };
    this.draw();
  }

  move(from, to) {
    const before = this.anchor();
    this.go(from, to);
    for (const other of Timeline.all)
      if (other !== this) {
        const shift = other.anchor() - before;
        other.go(this.view.from + shift, this.view.to + shift);
      }
  }

  zoom(factor, around = (this.view.from + this.view.to) / 2) {
    this.move(around - (around - this.view.from) * factor, around + (this.view.to - around) * factor);
  }

  pan(share) {
    const by = (this.view.to - this.view.from) * share;
    this.move(this.view.from + by, this.view.to + by);
  }

  listen() {
    const canvas = this.canvas;
    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    let drag = null;
    canvas.addEventListener("pointerdown", (event) => {
      const [x, y] = at(event);
      drag = { x, view: { ...this.view }, map: y < MAP, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const [x, y] = at(event);
      if (!drag) {
        const hit = under(this, x, y);
        canvas.style.cursor = hit ? "pointer" : "grab";
        return tip(event, hit && hit.text);
      }
      if (Math.abs(x - drag.x) > 3) drag.moved = true;
      if (!drag.moved) return undefined;
      tip(null, "");
      const width = drag.view.to - drag.view.from;
      const by = drag.map ? ((x - drag.x) / (this.width - GUTTER)) * this.end : (-(x - drag.x) / (this.width - GUTTER)) * width;
      return this.move(drag.view.from + by, drag.view.to + by);
    });
    canvas.addEventListener("pointerup", (event) => {
      const [x, y] = at(event);
      const still = drag && !drag.moved;
      drag = null;
      if (!still) return;
      if (y < MAP) {
        const centre = ((x - GUTTER) / (this.width - GUTTER)) * this.end;
        const half = (this.view.to - this.view.from) / 2;
        this.move(centre - half, centre + half);
        return;
      }
      const hit = under(this, x, y);
      if (hit && !missing(hit.iteration)) show({ iteration: hit.iteration, group: null });
      else show({ group: hit ? hit.group : null, run: this.index });
    });
    canvas.addEventListener("pointerleave", () => tip(null, ""));
    canvas.addEventListener("dblclick", (event) => this.zoom(0.4, this.t(at(event)[0])));
    canvas.addEventListener(
      "wheel",
      (event) => {
        if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX / (this.width - GUTTER));
        else if (event.ctrlKey || event.metaKey || document.activeElement === canvas)
          this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.t(at(event)[0]));
        else return;
        event.preventDefault();
      },
      { passive: false },
    );
  }
}
Timeline.all = [];
