// Curves over iterations and distributions over the run.
"use strict";

function curves() {
  const into = byId("curves");
  const draw = () => {
    into.replaceChildren();
    const name = (run, what) => (TWO ? `${run.name}: ${what}` : what);
    const reward = RUNS.flatMap((run, i) => [
      {
        name: name(run, "training reward"),
        colour: runColour(i),
        points: rowsOf(run).map((row) => [row.iteration, row.reward_mean]),
      },
      {
        name: name(run, "held-out reward"),
        colour: TWO ? runColour(i) : colour("b"),
        dots: true,
        dash: true,
        points: run.report.evaluations.map((row) => [row.iteration, row.reward_mean]),
      },
    ]).filter((one) => one.points.length);
    into.append(lines("Reward", reward, "iteration", (v) => fixed(v, 3)));
    const paces = TWO
      ? RUNS.map((run, i) => ({
          name: run.name,
          colour: runColour(i),
          points: rowsOf(run).map((row) => [row.iteration, row.rollout_to_train_end_s]),
        }))
      : [
          ["rollout to train end", "rollout_to_train_end_s", colour("ink")],
          ["rollout", "rollout_s", PARTS.rollout],
          ["trainer busy", "train_busy_s", PARTS["training after rollout"]],
          ["first dispatch", "first_dispatch_s", "#009e73"],
        ].map(([text, key, fill]) => ({
          name: text,
          colour: fill,
          points: rowsOf(RUNS[0]).map((row) => [row.iteration, row[key]]),
        }));
    into.append(lines(TWO ? "Rollout to train end" : "Seconds an iteration", paces, "iteration", seconds, 0));
    const single = (title, key, format) =>
      lines(
        title,
        RUNS.map((run, i) => ({
          name: TWO ? run.name : title.toLowerCase(),
          colour: runColour(i),
          points: rowsOf(run).map((row) => [row.iteration, row[key]]),
        })),
        "iteration",
        format,
        0,
      );
    into.append(
      single("The trainer's waiting ratio", "waiting_ratio_busy", percent),
      single("Generated tokens", "generated_tokens", short),
    );
  };
  draw();
  redraws.push(draw);
}

function histograms() {
  if (!RUNS.some((run) => run.spread.length)) {
    byId("spread").hidden = true;
    return;
  }
  const into = byId("histograms");
  const series = (make) =>
    RUNS.map((run, i) => ({ name: run.name, colour: runColour(i), bins: new Map(make(run.spread || {})) }));
  const draw = () => {
    into.replaceChildren();
    const width = Math.max(...RUNS.map((run) => (run.spread.length ? run.spread.length.width : 1)));
    const lengths = series((s) => {
      const bins = new Map();
      if (s.length)
        s.length.counts.forEach((n, i) =>
          bins.set(
            Math.floor((i * s.length.width) / width) * width,
            (bins.get(Math.floor((i * s.length.width) / width) * width) || 0) + n,
          ),
        );
      return bins;
    });
    const most = Math.max(0, ...lengths.flatMap((one) => [...one.bins.keys()]));
    const order = lengths.some((one) => one.bins.size) ? Array.from({ length: most / width + 1 }, (_, i) => i * width) : [];
    into.append(
      histogram(
        "Response length",
        lengths,
        order,
        (key, long) => (long && width > 1 ? `${key} to ${key + width - 1} tokens` : `${key}`),
        "tokens",
      ),
    );
    const titles = RUNS.find((run) => run.spread_names)?.spread_names || {};
    for (const [key, text] of Object.entries(titles)) {
      const waits = series((s) => s[key] || []);
      if (key === "tool_s" && waits.every((one) => !one.bins.size)) continue; // most runs have no tools
      const edges = [...new Set(waits.flatMap((one) => [...one.bins.keys()]))].sort((a, b) => a - b);
      into.append(
        histogram(
          text[0].toUpperCase() + text.slice(1),
          waits,
          fill(edges),
          (low, long) =>
            low <= 0.0001
              ? long
                ? "under 0.13 ms"
                : "< 0.1 ms"
              : long
                ? `${seconds(low)} to ${seconds(low * 1.2589)}`
                : seconds(low),
          "logarithmic",
        ),
      );
    }
    const stale = series((s) => s.staleness || []);
    const steps = [...new Set(stale.flatMap((one) => [...one.bins.keys()]))].sort((a, b) => a - b);
    const versions = RUNS.map((run) => ((run.spread || {}).versions || []).filter(([lag]) => lag > 0).length);
    const shownStale = histogram(
      "Staleness of trained trajectories",
      stale,
      steps,
      (key, long) => (long ? `${key} optimizer steps` : `${key}`),
      "optimizer steps since they were sampled",
    );
    shownStale.append(
      element(
        "figcaption",
        {},
        versions.some(Boolean) ? "some were of an older weight version" : "all of the iteration's own weight version",
      ),
    );
    into.append(shownStale);
  };
  draw();
  redraws.push(draw);
}

// Bins between the first and the last that hold nothing.
function fill(edges) {
  const all = [];
  for (let i = 0; i < edges.length; i++) {
    all.push(edges[i]);
    for (let next = edges[i] * 10 ** 0.1; i + 1 < edges.length && next < edges[i + 1] * 0.95; next *= 10 ** 0.1)
      all.push(+next.toPrecision(3));
  }
  return all;
}
