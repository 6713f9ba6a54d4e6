// The page's one state, and how numbers, colours and axes look.
const data = JSON.parse(document.getElementById("page-data").textContent);
const state = {
  focus: data.focus,                  // the method every plot is about
  split: data.tested, metric: data.metric, kind: "size",   // what the controls say
  sort: { key: "difference", rising: null },          // null: largest change first, either way
  search: "", rows: 15,
};
const inWords = (metric = state.metric) => plain(data.names[metric]);      // "squared error" for the error of numbers
const view = () => state.metric === data.metric ? data : data.further[state.metric];      // of the metric in focus
const unit = () => view().percent ? "%" : "";
const scale = () => view().percent ? 100 : 1;
const sign = () => view().better === "lower" ? 1 : -1;      // times a difference: below zero is better
const badPercent = better => better === "lower" ? 90 : 10;      // the percentile at the bad end
const DOT = "dot", DASH = "dash";

const byId = id => document.getElementById(id);
const method = k => data.methods[k];
const isFamily = k => method(k).family !== null;
const isNarrow = () => innerWidth < 560;
const unique = list => [...new Set(list)];
const scaled = values => values.map(v => v === null ? null : scale() * v);
const percent = values => values.map(v => v === null ? null : 100 * v);
const short = (text, most) => text.length > most ? text.slice(0, most - 1) + "…" : text;

function shown() {                    // what is drawn strongly: every method, of a family the baseline and the one in focus
  return data.methods.map((_, k) => k).filter(k => !isFamily(k) || k === data.baseline || k === state.focus);
}

function faint() {
  return data.methods.map((_, k) => k).filter(k => !shown().includes(k));
}

function hasDiverged(k) {             // its numbers mean nothing, so that plots leave it out
  return data.table[k].diverged.length > 0;
}

function compared() {                 // the baseline first, so that the focus is drawn on top
  return unique([data.baseline, state.focus]);
}

function rounded(value, decimals) {
  if (Math.abs(value) >= 1e6) return value.toPrecision(4);
  const text = value.toFixed(decimals);
  return Number(text) === 0 ? text.replace("-", "") : text;           // no negative zero
}

function number(value, decimals = view().decimals.clients) {      // by default as a client's value is shown
  if (value === null || value === undefined) return "–";
  return rounded(scale() * value, decimals) + unit();
}

function signed(value) {
  if (value === null || value === undefined) return "–";
  const text = rounded(scale() * value, view().decimals.clients);
  return (Number(text) > 0 ? "+" : "") + text.replace("-", "−");
}

// Plotly reads a little HTML in its texts, and names are whatever users called things.
function plain(text) {
  return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function isDark() {
  return !document.documentElement.classList.contains("printing") && matchMedia("(prefers-color-scheme: dark)").matches;
}

function rgb(hex) {
  return [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16));
}

function colour(k, alpha = 1) {       // of a method: the same in every plot, lighter on a dark ground
  const lift = isDark() ? 0.3 : 0;
  const parts = rgb(method(k).colour).map(part => Math.round(part + lift * (255 - part)));
  return `rgba(${parts.join(",")},${alpha})`;
}

function tint(k, strength) {          // opaque, so that no grid shines through
  const ground = rgb(css("--ground")), ink = colour(k).match(/\d+/g).slice(0, 3).map(Number);
  return `rgb(${ink.map((part, at) => Math.round(ground[at] + strength * (part - ground[at]))).join(",")})`;
}

function axis(title, more = {}) {
  return {
    title: { text: title, font: { size: 12, color: css("--muted") }, standoff: 8 }, fixedrange: true, automargin: true,
    gridcolor: css("--grid"), linecolor: css("--line"), zerolinecolor: css("--line"), tickfont: { size: 11, color: css("--muted") },
    ticks: "", ...more,
  };
}

function fromZero() {                 // an error is read from zero, an AUC is not
  return view().better === "lower" ? { rangemode: "tozero" } : {};
}

function errorAxis(title, more = {}) {
  return axis(title + (unit() ? `, ${unit()}` : ""), more);
}

function layout(xaxis, yaxis, more = {}) {
  return {
    xaxis, yaxis, autosize: true, dragmode: false, hovermode: "closest", showlegend: true,
    margin: { l: 46, r: 18, t: 8, b: 42 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: css("--text") },
    legend: { orientation: "h", traceorder: "normal", x: 0, y: 1.02, xanchor: "left", yanchor: "bottom", font: { size: 11.5 }, itemclick: false, itemdoubleclick: false },
    hoverlabel: { bgcolor: css("--raised"), bordercolor: css("--line"), font: { color: css("--text"), size: 12 }, align: "left" },
    ...more,
  };
}

function legendName(k) {
  return plain(short(method(k).label, 32));
}

function line(k, x, y, more = {}) {
  const strong = k === state.focus;
  const look = { color: colour(k), width: strong ? 2.4 : 1.6, ...(more.line || {}) };
  return { type: "scatter", mode: "lines", name: legendName(k), x, y, ...more, line: look };
}

function background(k, x, y, more = {}) {             // other members of the family: there for the eye, not for reading
  return line(k, x, y, { opacity: 0.35, hoverinfo: "skip", showlegend: false, ...more, line: { width: 1, ...(more.line || {}) } });
}

// Medians of equally many points in order of x: the trend in a cloud.
function trend(x, y, parts = 8) {
  const points = x.map((v, k) => [v, y[k]]).filter(p => p[1] !== null).sort((a, b) => a[0] - b[0]);
  const count = Math.min(parts, Math.floor(points.length / 4));
  const middle = list => list.sort((a, b) => a - b)[Math.floor(list.length / 2)];
  const chunks = [...Array(count).keys()].map(k => points.slice(k * points.length / count, (k + 1) * points.length / count));
  return { x: chunks.map(c => middle(c.map(p => p[0]))), y: chunks.map(c => middle(c.map(p => p[1]))) };
}
