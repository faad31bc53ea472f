// What every part of the page uses: the data, numbers as text, elements, the tooltip, light and dark.
"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const TWO = RUNS.length > 1;
const STEP_COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#882255"];
const byId = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") made.style.cssText = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// ---- numbers

const missing = (value) => value === null || value === undefined;

function seconds(value) {
  if (missing(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size >= 7200) return `${(value / 3600).toFixed(1)} h`;
  if (size >= 600) return `${(value / 60).toFixed(1)} min`;
  if (size >= 100) return `${value.toFixed(0)} s`;
  if (size >= 1) return `${value.toFixed(2)} s`;
  return size >= 0.001 ? `${(value * 1000).toFixed(size < 0.01 ? 1 : 0)} ms` : `${(value * 1e6).toFixed(0)} µs`;
}

const percent = (value) => (missing(value) ? "–" : `${(value * 100).toFixed(0)} %`);
const whole = (value) => (missing(value) ? "–" : Math.round(value).toLocaleString("en"));
const short = (value) => (missing(value) ? "–" : Math.abs(value) >= 1000 ? whole(value) : String(+value.toPrecision(3)));
const fixed = (value, digits) => (missing(value) ? "–" : value.toFixed(digits));

// Round numbers between low and high, at most `count` of them.
function ticks(low, high, count) {
  const span = high - low || 1;
  let step = 10 ** Math.floor(Math.log10(span / count));
  for (const factor of [2, 2.5, 2]) if (span / step > count) step *= factor;
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(+at.toPrecision(12));
  return found;
}

// ---- light and dark

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

const redraws = [];
function redraw() {
  for (const draw of redraws) draw();
}

// As chosen by the reader, else as the system has it.
const systemDark = matchMedia("(prefers-color-scheme: dark)");
function applyTheme() {
  const root = document.documentElement;
  root.dataset.shade = root.dataset.theme || (systemDark.matches ? "dark" : "light");
  redraw();
}
applyTheme();
systemDark.addEventListener("change", applyTheme);

function nextTheme() {
  const order = ["", "light", "dark"];
  const root = document.documentElement;
  const next = order[(order.indexOf(root.dataset.theme || "") + 1) % order.length];
  root.dataset.theme = next;
  byId("theme").textContent = { "": "◐", light: "☀", dark: "☾" }[next];
  applyTheme();
}

// ---- the tooltip

function tip(event, text) {
  const box = byId("tip");
  if (!text) {
    box.hidden = true;
    return;
  }
  box.textContent = text;
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  const left = event.clientX + 14 + width > innerWidth ? event.clientX - width - 12 : event.clientX + 14;
  const top = event.clientY + 16 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 16;
  box.style.left = `${Math.max(4, left)}px`;
  box.style.top = `${Math.max(4, top)}px`;
}

// ---- what is shown: one iteration, one followed group, one colouring; parts listen

const shown = { iteration: null, group: null, run: 0, colouring: "step" };
const listeners = [];
function show(change) {
  Object.assign(shown, change);
  for (const listener of listeners) listener(change);
}

const detailOf = (run, iteration) =>
  run.details
    .filter((d) => d.iteration === iteration)
    .sort((a, b) => a.kept - b.kept)
    .pop();

// Colours for the chosen colouring, of one detail.
function painter(detail) {
  const rewards = detail.turns.map((turn) => turn[10]).filter((reward) => !missing(reward));
  const low = Math.min(...rewards, 0);
  const high = Math.max(...rewards, 1e-9);
  const longest = Math.max(...detail.turns.map((turn) => turn[8]), 1);
  const stepOf = new Map(detail.groups.map((group) => [group[0], group[7]]));
  const grey = colour("dropped");
  const steps = Math.max(1, detail.steps.length);
  const ofStep = (step) =>
    missing(step)
      ? grey
      : steps <= STEP_COLOURS.length
        ? STEP_COLOURS[step % STEP_COLOURS.length]
        : `hsl(${250 - (230 * step) / steps} 62% 48%)`;
  const turn = {
    step: (t) => ofStep(stepOf.get(t[0])),
    group: (t) => `hsl(${(t[0] * 137.508) % 360} 52% 52%)`,
    reward: (t) => (missing(t[10]) ? grey : `hsl(${8 + (130 * (t[10] - low)) / (high - low)} 55% 47%)`),
    length: (t) => `hsl(${215 - (190 * t[8]) / longest} 65% 50%)`,
  };
  return {
    ofStep,
    stepOf,
    turn: (t) => turn[shown.colouring](t),
    ofGroup: (g) => (shown.colouring === "group" ? turn.group([g]) : ofStep(stepOf.get(g))),
  };
}
