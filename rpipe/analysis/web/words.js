// What lies under the pointer on a timeline, and what is said of it.
"use strict";

// {text, group, iteration} or null; `line` is a Timeline, x and y are pixels on its canvas.
function under(line, x, y) {
  const row = line.rows.find((r) => y >= r.y - GAP / 2 && y < r.y + r.height + GAP / 2);
  if (!row || x < GUTTER) return null;
  const t = line.t(x);
  const near = line.t(GUTTER + 3) - line.t(GUTTER);
  const inside = (from, to) => t >= from - near && t <= to + near;
  for (const attempt of line.run.attempts) {
    const hit = underAttempt[row.kind]?.(attempt, inside, line.run);
    if (hit) return hit;
  }
  for (const detail of line.run.details) {
    const hit = line.visible(detail) ? underDetail[row.kind]?.(detail, inside, row, line, y) : null;
    if (hit) return hit;
  }
  return null;
}

const underAttempt = {
  iterations(attempt, inside, run) {
    const hit = attempt.iterations.find((i) => i[1] !== null && inside(i[1], Math.max(i[2] || i[1], i[3] || i[1])));
    if (!hit) return null;
    const again = hit[4] ? "" : " (done again later, or not complete)";
    return { text: `iteration ${hit[0]}${again}\n${run.sentences[hit[0]] || ""}`, group: null, iteration: hit[0] };
  },
  between(attempt, inside) {
    const publish = attempt.publishes.find((p) => inside(p[0], p[1]));
    if (publish)
      return { text: `weights of version ${publish[2]} published in ${seconds(publish[1] - publish[0])}`, group: null };
    const save = attempt.checkpoints.find((s) => inside(s[0], s[1]));
    return save ? { text: `checkpoint after ${save[2]} iterations, ${seconds(save[1] - save[0])}`, group: null } : null;
  },
  marks(attempt, inside) {
    const lost = attempt.outages.find((o) => inside(o[1], o[2] === null ? attempt.start_s + attempt.seconds : o[2]));
    if (lost) {
      const [engine, at, back, reason, turns, tokens] = lost;
      const after = back === null ? "not started again" : `back after ${seconds(back - at)}`;
      const moved = `${turns} trajectories went on elsewhere with ${whole(tokens)} tokens`;
      return { text: `engine ${engine} lost: ${reason}\n${moved}\n${after}`, group: null };
    }
    const mark = attempt.marks.find((m) => inside(m[0], m[0]));
    return mark ? { text: `${mark[2]} (rank ${mark[1]})\n${mark[3]}`, group: null } : null;
  },
};

const underDetail = {
  engine(detail, inside, row, line, y) {
    const slot = Math.floor((y - row.y) / line.lane);
    const at = (turn) => (missing(turn[5]) ? turn[4] : turn[5]);
    const turn = detail.turns.find((u) => u[2] === row.engine && u[3] === slot && inside(at(u), u[7]));
    return turn ? { text: turnText(turn, detail), group: turn[0] } : null;
  },
  tools(detail, inside, row, line, y) {
    const lane = Math.floor((y - row.y) / line.toolLane);
    const t = detail.tools.find((one) => one[2] === lane && inside(one[3], one[4]));
    if (!t) return null;
    const said = t[6] || (t[5] ? `answered ${whole(t[5])} tokens` : "the trajectory is done");
    return { text: `the environment of trajectory ${t[0]}.${t[1]}\n${seconds(t[4] - t[3])}: ${said}`, group: t[0] };
  },
  rewards(detail, inside, row, line, y) {
    const lane = Math.floor((y - row.y) / line.rewardLane);
    const r = detail.rewards.find((one) => one[2] === lane && inside(missing(one[3]) ? one[4] : one[3], one[5]));
    if (!r) return null;
    const queue = seconds(Math.max(0, r[4] - r[3]));
    const error = r[7] ? `\n${r[7]}` : "";
    const text = `reward of trajectory ${r[0]}.${r[1]}: ${short(r[6])}\n${seconds(r[5] - r[4])}, after ${queue} in the queue${error}`;
    return { text, group: r[0] };
  },
  groups(detail, inside) {
    const at = (g) => (missing(g[4]) ? g[3] : g[4]);
    const g = detail.groups.find((one) => !missing(at(one)) && inside(at(one), at(one)));
    return g ? { text: groupText(g, detail), group: g[0] } : null;
  },
  replica(detail, inside, row) {
    const m = detail.micro_batches.find((one) => one[0] === row.replica && inside(one[1], one[2]));
    if (!m) return null;
    const pace = `${whole(m[4])} tokens in ${seconds(m[2] - m[1])} (${whole(m[4] / (m[2] - m[1]))} tokens/s)`;
    return {
      text: `micro-batch of step ${m[3]} in iteration ${detail.iteration}\ngroups ${m[5].join(", ")}\n${pace}`,
      group: m[5][0],
    };
  },
  steps(detail, inside) {
    const s = detail.steps.find((one) => inside(one[2], one[3]));
    if (!s) return null;
    const head = `step ${s[1]} (${s[0]} of iteration ${detail.iteration})${s[4] ? ", skipped: not finite" : ""}`;
    return { text: `${head}\n${seconds(s[3] - s[2])}, loss ${short(s[5])}\ngroups ${s[6].join(", ")}`, group: null };
  },
};

function turnText(turn, detail) {
  const [group, sample, engine, slot, sent, started, first, end, tokens, finish, reward] = turn;
  const took = end - (missing(first) ? started : first);
  const pace = tokens > 1 ? ` (${short((took / tokens) * 1000)} ms each)` : "";
  return [
    `trajectory ${group}.${sample} on engine ${engine}, slot ${slot} (iteration ${detail.iteration})`,
    `${whole(tokens)} tokens in ${seconds(took)}${pace}, ${finish}`,
    missing(first) ? "" : `first token ${seconds(first - sent)} after it was sent`,
    missing(reward) ? "" : `reward ${short(reward)}`,
  ]
    .filter(Boolean)
    .join("\n");
}

function groupText(g, detail) {
  const [group, admitted, generated, complete, arrived, dispatched, trained, step, dropped, restored] = g;
  const since = (t) => (missing(t) ? "–" : `${seconds(t - detail.start)}`);
  const rewards = detail.turns.filter((turn) => turn[0] === group && !missing(turn[10])).map((turn) => turn[10]);
  const mean = rewards.length ? `, mean reward ${short(rewards.reduce((a, b) => a + b, 0) / rewards.length)}` : "";
  const trainedIn = missing(step) ? "not trained" : `step ${step} of iteration ${detail.iteration}`;
  return [
    `group ${group}: ${dropped ? `dropped (${dropped})` : trainedIn}${mean}`,
    restored ? "taken over from an interrupted attempt" : `admitted after ${since(admitted)}, generated by ${since(generated)}`,
    `complete at ${since(complete)}, at the trainer ${since(arrived)}`,
    missing(dispatched)
      ? ""
      : `waited ${seconds(dispatched - arrived)} for its first micro-batch, trained by ${since(trained)}`,
  ]
    .filter(Boolean)
    .join("\n");
}
