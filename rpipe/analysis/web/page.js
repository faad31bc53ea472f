// Puts the page together and listens to keys.
"use strict";
const COLUMNS = [
  ["iteration", "iteration", whole],
  ["rollout_s", "rollout", seconds],
  ["train_busy_s", "train busy", seconds],
  ["rollout_to_train_end_s", "to train end", seconds],
  ["first_dispatch_s", "first dispatch", seconds],
  ["waiting_ratio_start", "waits, start", percent],
  ["waiting_ratio_busy", "waits, all", percent],
  ["steps", "steps", whole],
  ["groups_trained", "groups", whole],
  ["groups_dropped", "dropped", whole],
  ["trajectories", "trajectories", whole],
  ["generated_tokens", "tokens", whole],
  ["pipeline_bubble", "bubble", (v) => (v ? percent(v) : "–")],
  ["reward_mean", "reward", (v) => fixed(v, 3)],
  ["logprob_gap_mean", "log-prob gap", short],
];
const runColour = (index) => (TWO ? colour(index ? "b" : "a") : colour("a"));
const rowsOf = (run) => run.report.iterations;

function simulated() {
  for (const run of RUNS) {
    const on = run.report.run.simulated;
    if (on) byId("simulated").append(element("p", {}, `${run.name} is simulated, on ${on}: no machine took these seconds.`));
  }
}

function tiles() {
  const edge = (rows, key) => (rows.length ? [rows[0][key], rows[rows.length - 1][key]] : [null, null]);
  const rise = ([first, last]) => (missing(first) ? "–" : `${fixed(first, 3)} → ${fixed(last, 3)}`);
  const facts = [
    [
      "iterations",
      (run) => whole(rowsOf(run).length),
      (run) => `in ${seconds(run.report.run.seconds)}${run.report.attempts > 1 ? `, ${run.report.attempts} attempts` : ""}`,
    ],
    ["rollout to train end", (run) => seconds(run.report.run.medians.rollout_to_train_end_s), () => "median iteration"],
    ["the trainer waits", (run) => percent(run.report.run.medians.waiting_ratio_busy), () => "of it, median"],
    ["first dispatch", (run) => seconds(run.report.run.medians.first_dispatch_s), () => "median"],
    ["rollout speed", (run) => short(run.report.run.tokens_per_s), () => "tokens/s"],
    [
      "held-out reward",
      (run) => rise(edge(run.report.evaluations, "reward_mean")),
      (run) =>
        run.report.evaluations[0]?.count ? `${run.report.evaluations[0].count} trajectories` : "first, last evaluation",
    ],
    ["training reward", (run) => rise(edge(rowsOf(run), "reward_mean")), () => "first, last iteration"],
    [
      "response",
      (run) => `${whole(run.report.run.response_tokens_p50)} tokens`,
      (run) => `p95 ${whole(run.report.run.response_tokens_p95)}, ${percent(run.report.run.truncation_rate)} cut`,
    ],
    [
      "a tool call",
      (run) => (run.report.run.tools ? seconds(run.report.run.tools.seconds_p50) : "–"),
      (run) => (run.report.run.tools ? `p95 ${seconds(run.report.run.tools.seconds_p95)}, ${fixed(run.report.run.tools.turns_mean, 1)} turns` : ""),
    ],
  ];
  for (const [name, value, more] of facts) {
    if (RUNS.every((run) => value(run).startsWith("–"))) continue;
    const values = RUNS.map((run, i) => element("span", TWO ? { class: i ? "run-b" : "run-a" } : {}, value(run)));
    const said = TWO ? RUNS.map(more) : [more(RUNS[0])];
    byId("tiles").append(
      element(
        "div",
        { class: TWO ? "tile two" : "tile" },
        element("div", { class: "name" }, name),
        element("div", { class: "value" }, ...values),
        element("div", { class: "more" }, [...new Set(said)].join(" | ")),
      ),
    );
  }
}

// Medians of two runs, and what the second is of the first.
function against() {
  if (!TWO) return;
  byId("against").hidden = false;
  const [a, b] = RUNS.map((run) => run.report.run);
  const heads = ["median", RUNS[0].name, RUNS[1].name, "second / first"];
  const body = element("tbody");
  const line = (title, first, second, format) => {
    if (missing(first) && missing(second)) return;
    const ratio = missing(first) || missing(second) || !first ? "–" : (second / first).toFixed(3);
    body.append(element("tr", {}, ...[title, format(first), format(second), ratio].map((text) => element("td", {}, text))));
  };
  for (const [key, title, format] of COLUMNS.slice(1)) line(title, a.medians[key], b.medians[key], format);
  line("tokens/s of rollout", a.tokens_per_s, b.tokens_per_s, whole);
  line("publish", a.publish_s, b.publish_s, seconds);
  line("the whole job", a.seconds, b.seconds, seconds);
  const head = element("tr", {}, ...heads.map((text, i) => element("th", { class: ["", "run-a", "run-b", ""][i] }, text)));
  byId("against").lastElementChild.append(element("table", {}, element("thead", {}, head), body));
}

function why() {
  const bars = byId("bars");
  const time = RUNS.map((run, i) => {
    const told = run.report.run;
    const gaps = told.history.reduce((sum, attempt) => sum + attempt.gap_s, 0);
    const parts = { ...told.time_s, "between attempts": gaps };
    const total = told.seconds + gaps || 1;
    const entries = Object.entries(parts).filter(([, s]) => s > 0);
    return {
      name: run.name,
      class: i ? "run-b" : "run-a",
      parts: Object.fromEntries(entries.map(([name, s]) => [name, s / total])),
      text: Object.fromEntries(entries.map(([name, s]) => [name, seconds(s)])),
    };
  });
  stackedBars(bars, TWO ? "the job's time" : `the job's time: ${seconds(RUNS[0].report.run.seconds)}`, time, PARTS);
  const waits = RUNS.map((run, i) => {
    const shares = run.report.run.waiting || {};
    const waited = Object.values(shares).reduce((sum, share) => sum + share, 0);
    return {
      name: run.name,
      class: i ? "run-b" : "run-a",
      parts: Object.keys(shares).length ? { working: 1 - waited, ...shares } : {},
      text: {},
    };
  });
  if (waits.some((row) => Object.keys(row.parts).length))
    stackedBars(bars, "the trainer between the rollout's request and its last step", waits, {
      ...CAUSE_COLOURS,
      working: PARTS.working,
    });
  const columns = element("div", { class: TWO ? "two-columns" : "" });
  RUNS.forEach((run, i) => {
    const list = element("ul", { class: "said" });
    for (const line of run.report.run.diagnosis || []) list.append(element("li", {}, line));
    for (const line of run.report.run.problems) list.append(element("li", { class: "note" }, line));
    columns.append(element("div", {}, TWO ? element("h3", { class: i ? "run-b" : "run-a" }, run.name) : null, list));
  });
  byId("sentences").append(columns);
}

function attempts() {
  const into = byId("history");
  RUNS.forEach((run, i) => {
    if (TWO) into.append(element("h3", { class: i ? "run-b" : "run-a" }, run.name));
    for (const line of run.unread || []) into.append(element("p", {}, line));
    if (!run.attempts.length) return;
    const table = element(
      "table",
      {},
      element(
        "thead",
        {},
        element(
          "tr",
          {},
          ...["attempt", "began", "lasted", "gap before", "done again later", "where", "ended"].map((text, at) =>
            element("th", at > 4 ? { class: "words" } : {}, text),
          ),
        ),
      ),
    );
    const body = element("tbody");
    for (const a of run.attempts) {
      const again = a.repeated_iterations.length
        ? `${a.repeated_iterations.join(", ")} (${whole(a.repeated_tokens)} tokens, ${seconds(a.repeated_s)})`
        : "–";
      const where = [a.nodes, a.job && `job ${a.job}`].filter(Boolean).join(", ") || "–";
      const ended = a.ended === null ? "still running, or killed" : a.ended || "normally";
      body.append(
        element(
          "tr",
          {},
          ...[a.attempt, seconds(a.start_s), seconds(a.seconds), seconds(a.gap_s), again].map((text) =>
            element("td", {}, String(text)),
          ),
          ...[where, ended].map((text) => element("td", { class: "words" }, text)),
        ),
      );
    }
    table.append(body);
    into.append(table);
    const counted = Object.entries(run.report.run.other_events || {});
    if (counted.length) into.append(element("p", {}, `Other events: ${counted.map(([kind, n]) => `${kind} ${n}`).join(", ")}`));
  });
}

function table() {
  const into = byId("table");
  RUNS.forEach((run, i) => {
    if (TWO) into.append(element("h3", { class: i ? "run-b" : "run-a" }, run.name));
    const columns = COLUMNS.filter(([key, , format]) => rowsOf(run).some((row) => format(row[key] ?? null) !== "–"));
    const head = element("tr", {}, ...columns.map(([, title]) => element("th", {}, title)));
    const body = element("tbody");
    for (const row of rowsOf(run)) {
      const line = element("tr", {
        class: "pick",
        "data-iteration": row.iteration,
        onclick: () => show({ iteration: row.iteration, group: null }),
      });
      for (const [key, , format] of columns) line.append(element("td", {}, format(row[key])));
      body.append(line);
    }
    into.append(element("table", {}, element("thead", {}, head), body));
  });
}

// ---- choosing

const ITERATIONS = [...new Set(RUNS.flatMap((run) => run.attempts.flatMap((a) => a.iterations.map((one) => one[0]))))].sort(
  (a, b) => a - b,
);

function neighbour(by) {
  const at = shown.iteration === null ? (by > 0 ? -1 : ITERATIONS.length) : ITERATIONS.indexOf(shown.iteration);
  const next = ITERATIONS[Math.min(ITERATIONS.length - 1, Math.max(0, at + by))];
  if (next !== undefined) show({ iteration: next, group: null });
}

function onShow(change) {
  if ("iteration" in change) {
    byId("which").value = shown.iteration === null ? "" : String(shown.iteration);
    const spans = Timeline.all.map((timeline) => (shown.iteration === null ? null : timeline.span(shown.iteration)));
    const longest = Math.max(...spans.map((span) => (span ? span[1] - span[0] : 0)));
    Timeline.all.forEach((timeline, i) => {
      if (spans[i]) timeline.view = { from: spans[i][0] - longest * 0.015, to: spans[i][0] + longest * 1.03 };
      else if (shown.iteration === null) timeline.view = { from: 0, to: timeline.end };
    });
    const told = RUNS.map((run) => shown.iteration !== null && run.sentences[shown.iteration]).filter(Boolean);
    byId("sentence").textContent =
      shown.iteration === null
        ? ""
        : told.map((text, i) => (TWO ? `${RUNS[i].name}: ${text}` : text)).join(" · ") ||
          `iteration ${shown.iteration} trained nothing, or is not complete`;
    byId("gantt-of").textContent = shown.iteration === null ? "an iteration" : `iteration ${shown.iteration}`;
    for (const row of document.querySelectorAll("tr.pick"))
      row.classList.toggle("chosen", Number(row.dataset.iteration) === shown.iteration);
  }
  const run = RUNS[shown.run];
  const detail = shown.group === null ? null : run.details.find((d) => d.groups.some((g) => g[0] === shown.group));
  byId("focus").textContent = detail
    ? groupText(
        detail.groups.find((g) => g[0] === shown.group),
        detail,
      ).replaceAll("\n", " · ")
    : "";
  legend();
  redraw();
}

function legend() {
  const detail = shown.iteration === null ? null : detailOf(RUNS[0], shown.iteration);
  const into = byId("legend");
  into.replaceChildren();
  if (shown.colouring === "step" && detail && detail.steps.length <= STEP_COLOURS.length)
    for (const step of detail.steps)
      into.append(
        element(
          "span",
          {},
          element("i", { style: `background:${STEP_COLOURS[step[0] % STEP_COLOURS.length]}` }),
          `step ${step[0]}`,
        ),
      );
  into.append(
    element("span", {}, element("i", { style: `background:${colour("deferred")}` }), "queue"),
    ...(detail?.tools.length ? [element("span", {}, element("i", { style: `background:${colour("tool")}` }), "tools")] : []),
    element("span", {}, "▼ a group is complete"),
    element("span", {}, "│ rollout ends ┆ training ends"),
  );
}

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(SELECT|INPUT)$/.test(event.target.tagName)) return;
  const first = Timeline.all[0];
  const acts = {
    n: () => neighbour(1),
    p: () => neighbour(-1),
    0: () => show({ iteration: null, group: null }),
    t: nextTheme,
    "?": () => byId("help").showModal(),
    Escape: () => show({ group: null }),
    "+": () => first?.zoom(0.7),
    "=": () => first?.zoom(0.7),
    "-": () => first?.zoom(1.4),
    ArrowLeft: () => first?.pan(-0.2),
    ArrowRight: () => first?.pan(0.2),
    c: () => {
      const options = [...byId("colour").options].map((option) => option.value);
      byId("colour").value = options[(options.indexOf(shown.colouring) + 1) % options.length];
      show({ colouring: byId("colour").value });
    },
  };
  if (!acts[event.key] || byId("help").open) return;
  acts[event.key]();
  event.preventDefault();
}

function start() {
  simulated();
  tiles();
  against();
  why();
  RUNS.forEach((run, i) => {
    if (!run.details.length) return;
    Timeline.all.push(new Timeline(byId("timelines"), run, i));
    new Gantt(byId("gantts"), run, i);
  });
  if (!Timeline.all.length) for (const id of ["timeline", "gantt"]) byId(id).hidden = true;
  for (const run of RUNS) {
    const all = run.attempts.reduce((sum, attempt) => sum + attempt.iterations.length, 0);
    if (!run.details.length || run.details.length === all) continue;
    byId("carried").hidden = false;
    byId("carried").append(`${run.name}: the page carries ${run.details.length} of ${all} iterations turn by turn. `);
  }
  ganttLegend(byId("gantt-legend"));
  curves();
  histograms();
  attempts();
  table();
  byId("which").append(
    element("option", { value: "" }, "whole run"),
    ...ITERATIONS.map((n) => element("option", { value: n }, `iteration ${n}`)),
  );
  byId("which").addEventListener("change", (event) =>
    show({ iteration: event.target.value === "" ? null : Number(event.target.value), group: null }),
  );
  byId("colour").addEventListener("change", (event) => show({ colouring: event.target.value }));
  byId("earlier").addEventListener("click", () => neighbour(-1));
  byId("later").addEventListener("click", () => neighbour(1));
  byId("whole").addEventListener("click", () => show({ iteration: null, group: null }));
  byId("theme").addEventListener("click", nextTheme);
  byId("keys").addEventListener("click", () => byId("help").showModal());
  byId("close").addEventListener("click", () => byId("help").close());
  addEventListener("keydown", keys);
  listeners.push(onShow);
  const carried = RUNS[0].details.filter((d) => d.kept && ITERATIONS.includes(d.iteration)).map((d) => d.iteration);
  show({ iteration: carried.length ? carried[carried.length - 1] : null });
  document.documentElement.dataset.ready = "yes";
}

start();
