// Stacked bars, lines over iterations, histograms: small SVG charts with a tooltip.
"use strict";
const PARTS = {
  rollout: "#0072b2",
  "training after rollout": "#e69f00",
  publishing: "#8a63d2",
  saving: "#b08968",
  evaluating: "#009e73",
  starting: "#7a8694",
  "warming up": "#56b4e9",
  other: "#a9b4c2",
  "between attempts": "#c62828",
  working: "#3d4854",
};
const CAUSE_COLOURS = {
  straggler: "#d55e00",
  "slow engine": "#c62828",
  "slow decoding": "#e06c75",
  "slow reward": "#c9971a",
  "narrow frontier": "#cc79a7",
  "full engines": "#882255",
  environment: "#b8a800",
  "slow filter": "#7a5c00",
  "lost engine": "#ff6b6b",
  serial: "#0072b2",
  "first groups": "#56b4e9",
  rollout: "#5b8fc7",
  channel: "#8a63d2",
  dispatch: "#a98ae8",
  "uneven replicas": "#b08968",
};

// rows: [{name, class, parts: {name: share}, text: {name: tooltip}}]
function stackedBars(into, title, rows, colours) {
  into.append(element("div", { class: "bars-title" }, title));
  const names = [];
  for (const row of rows) {
    const bar = element("div", { class: "stack", role: "img", "aria-label": `${title}: ${row.name}` });
    for (const [name, share] of Object.entries(row.parts)) {
      if (share < 0.0005) continue;
      if (!names.includes(name)) names.push(name);
      const text = `${name}: ${percent(share)}${row.text[name] ? `, ${row.text[name]}` : ""}`;
      const part = element("span", { style: `width:${share * 100}%;background:${colours[name] || "#888"}`, "data-part": name });
      part.textContent = share > 0.07 ? percent(share) : "";
      part.addEventListener("mousemove", (event) => tip(event, text));
      part.addEventListener("mouseleave", () => tip(null, ""));
      bar.append(part);
    }
    const who = TWO ? element("span", { class: `who ${row.class}`, title: row.name }, row.name) : null;
    into.append(TWO ? element("div", { class: "bar-row" }, who, bar) : bar);
  }
  const legend = element("div", { class: "legend" });
  for (const name of names) {
    const all = rows.map((row) => percent(row.parts[name] || 0)).join(" | ");
    legend.append(element("span", {}, element("i", { style: `background:${colours[name] || "#888"}` }), `${name} ${all}`));
  }
  into.append(legend);
}

const CHART = { width: 310, height: 170, left: 46, right: 10, top: 8, bottom: 36 };

function frame(yLow, yHigh, xText, yFormat) {
  const { width, height, left, right, top, bottom } = CHART;
  const made = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  const y = (value) => top + (height - top - bottom) * (1 - (value - yLow) / (yHigh - yLow || 1));
  for (const at of ticks(yLow, yHigh, 5)) {
    made.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: y(at), y2: y(at) }));
    const label = svg("text", { x: left - 6, y: y(at) + 4, "text-anchor": "end" });
    label.textContent = yFormat(at);
    made.append(label);
  }
  const name = svg("text", { x: width - right, y: height - 2, "text-anchor": "end" });
  name.textContent = xText;
  made.append(name);
  return { made, y };
}

// series: [{name, colour, points: [[x, y]], dots: bool, dash: bool}]
function lines(title, series, xText, format, low = null) {
  const { width, height, left, right, bottom } = CHART;
  const points = series.flatMap((one) => one.points.filter((point) => !missing(point[1])));
  const figure = element("figure", {}, element("h3", {}, title));
  if (!points.length) return (figure.append(element("figcaption", {}, "nothing to show")), figure);
  const xs = points.map((point) => point[0]);
  const ys = points.map((point) => point[1]);
  const [xLow, xHigh] = [Math.min(...xs), Math.max(...xs)];
  const pad = (Math.max(...ys) - Math.min(...ys)) * 0.08 || Math.abs(ys[0]) * 0.1 || 1;
  const yLow = low === null ? Math.min(...ys) - pad : Math.min(low, ...ys);
  const { made, y } = frame(yLow, Math.max(...ys) + pad, xText, format);
  const x = (value) => left + (width - left - right) * (xHigh === xLow ? 0.5 : (value - xLow) / (xHigh - xLow));
  for (const at of ticks(xLow, xHigh, 6).filter(Number.isInteger)) {
    const label = svg("text", { x: x(at), y: height - bottom + 15, "text-anchor": "middle" });
    label.textContent = at;
    made.append(label);
  }
  for (const one of series) {
    const real = one.points.filter((point) => !missing(point[1]));
    const path = real.map((point, i) => `${i ? "L" : "M"}${x(point[0]).toFixed(1)} ${y(point[1]).toFixed(1)}`).join("");
    made.append(
      svg("path", {
        d: path,
        fill: "none",
        stroke: one.colour,
        "stroke-width": 1.8,
        "stroke-dasharray": one.dash ? "5 4" : "none",
      }),
    );
    if (one.dots || real.length < 40)
      for (const point of real)
        made.append(svg("circle", { cx: x(point[0]), cy: y(point[1]), r: one.dots ? 3.4 : 2, fill: one.colour }));
  }
  const hair = svg("line", { class: "hair", y1: CHART.top, y2: height - bottom, visibility: "hidden" });
  made.append(hair);
  made.addEventListener("mousemove", (event) => {
    const box = made.getBoundingClientRect();
    const at = xLow + ((((event.clientX - box.left) / box.width) * width - left) / (width - left - right)) * (xHigh - xLow);
    const nearest = xs.reduce((best, one) => (Math.abs(one - at) < Math.abs(best - at) ? one : best), xs[0]);
    for (const side of ["x1", "x2"]) hair.setAttribute(side, x(nearest));
    hair.setAttribute("visibility", "visible");
    const said = series
      .map((one) => [one.name, one.points.find((point) => point[0] === nearest)])
      .filter(([, point]) => point && !missing(point[1]));
    tip(event, `${xText} ${nearest}\n${said.map(([name, point]) => `${name} ${format(point[1])}`).join("\n")}`);
  });
  made.addEventListener("mouseleave", () => (hair.setAttribute("visibility", "hidden"), tip(null, "")));
  figure.append(made);
  const names = element("figcaption", { class: "legend" });
  for (const one of series) names.append(element("span", {}, element("i", { style: `background:${one.colour}` }), one.name));
  figure.append(names);
  return figure;
}

// series: [{name, colour, bins: Map(key -> count)}]; bins of all series share their keys; shares of each series' sum are drawn
function histogram(title, series, order, label, xText) {
  const { width, height, left, right, top, bottom } = CHART;
  const figure = element("figure", {}, element("h3", {}, title));
  if (!order.length) return (figure.append(element("figcaption", {}, "nothing to show")), figure);
  const sums = series.map((one) => [...one.bins.values()].reduce((sum, count) => sum + count, 0) || 1);
  const share = (one, key, i) => (one.bins.get(key) || 0) / sums[i];
  const highest = Math.max(...series.flatMap((one, i) => order.map((key) => share(one, key, i))));
  const { made, y } = frame(0, highest || 1, xText, percent);
  const each = Math.min(46, (width - left - right) / order.length);
  const every = Math.ceil(order.length / 5);
  order.forEach((key, at) => {
    series.forEach((one, i) => {
      const part = Math.max(1, (each - (each > 4 ? 1.5 : 0)) / series.length);
      const up = share(one, key, i);
      if (up)
        made.append(
          svg("rect", {
            x: left + at * each + i * part,
            width: part,
            y: y(up),
            height: Math.max(0.8, height - bottom - y(up)),
            fill: one.colour,
            rx: 1,
          }),
        );
    });
    if (at % every === 0) {
      const text = svg("text", { x: left + (at + 0.5) * each, y: height - bottom + 15, "text-anchor": "middle" });
      text.textContent = label(key);
      made.append(text);
    }
    const over = svg("rect", { x: left + at * each, width: each, y: top, height: height - top - bottom, fill: "transparent" });
    const said = series
      .map((one, i) => `${TWO ? `${one.name}: ` : ""}${whole(one.bins.get(key) || 0)} (${percent(share(one, key, i))})`)
      .join("\n");
    over.addEventListener("mousemove", (event) => tip(event, `${label(key, true)}\n${said}`));
    over.addEventListener("mouseleave", () => tip(null, ""));
    made.append(over);
  });
  figure.append(made);
  return figure;
}
