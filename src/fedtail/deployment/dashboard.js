// The page of a deployment: asks for the state every two seconds and shows it. All that nodes said is set as text, never as markup.
"use strict";

const EVERY = 2000;                   // milliseconds between two requests
const SVG = "http://www.w3.org/2000/svg";
const NAMES = { mean: "mean", p90: "90th percentile", worst10: "worst tenth" };
let chosen = "";                      // the run that is shown; "" is the newest
let shown = "";                       // the state on the page, as text

const byId = id => document.getElementById(id);

function element(kind, text = "", name = "", children = []) {
  const made = document.createElement(kind);
  if (text !== "") made.textContent = text;
  if (name) made.className = name;
  made.append(...children);
  return made;
}

function drawn(kind, attributes, text = "") {
  const made = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== "") made.textContent = text;
  return made;
}

function put(id, ...children) {
  byId(id).replaceChildren(...children);
}

function known(value) {
  return value !== null && value !== undefined;
}

function seconds(value) {
  if (!known(value)) return "–";
  if (value < 1) return `${Math.round(1000 * value)} ms`;
  return value < 120 ? `${value.toFixed(value < 10 ? 1 : 0)} s` : `${Math.round(value / 60)} min`;
}

function short(value) {
  return String(Number(value.toPrecision(3)));
}

function rate(value, percent) {
  if (!known(value)) return "–";
  return percent ? `${(100 * value).toFixed(1)}%` : short(value);
}

function row(cells, head = "th") {
  return element("tr", "", "", cells.map((cell, at) => {
    const [text, name] = Array.isArray(cell) ? cell : [cell, ""];
    const made = element(at === 0 ? head : "td", text instanceof Node ? "" : String(text), name);
    if (text instanceof Node) made.append(text);
    if (at === 0) made.scope = "row";
    return made;
  }));
}

function table(id, heads, rows, nothing) {
  const head = element("tr", "", "", heads.map(([text, name]) => element("th", text, name)));
  const body = rows.length ? rows : [element("tr", "", "", [element("td", nothing, "text")])];
  if (!rows.length) body[0].firstChild.colSpan = heads.length;
  put(id, element("thead", "", "", [head]), element("tbody", "", "", body));
}

function showHead(state) {
  const run = state.run;
  byId("deployment").textContent = state.deployment;
  byId("transport").textContent = state.transport;
  document.title = `${state.deployment}${run ? `: ${run.done} of ${run.rounds ?? "?"}` : ""}`;
  const word = run ? run.state : "no run yet";
  byId("state").textContent = word;
  byId("state").className = `state ${word.split(" ")[0]}`;
  byId("about").textContent = run ? `${run.experiment || run.name}, fedtail ${state.fedtail}` : "The server has not been started.";
  const part = run && run.rounds ? Math.min(1, run.done / run.rounds) : 0;
  byId("bar").style.width = `${100 * part}%`;
  byId("track").setAttribute("aria-valuenow", run ? run.done : 0);
  byId("track").setAttribute("aria-valuemax", run && run.rounds ? run.rounds : 1);
  byId("choice").hidden = state.runs.length < 2;
  put("runs", ...state.runs.map(name => {
    const option = element("option", name);
    option.value = name;
    option.selected = Boolean(run) && name === run.name;
    return option;
  }));
}

function showNotes(state) {
  const run = state.run, notes = [];
  if (run && run.paused && run.state === "paused") notes.push(["Paused: " + run.paused, "note"]);
  if (run && run.stopped) notes.push([`Stopped early: ${run.stopped}.`, "note"]);
  for (const [node, why] of Object.entries(run && run.state !== "finished" ? run.left_out : {})) notes.push([`Node ${node} is left out: ${why}`, "note"]);
  for (const one of state.certificates) if (one.warning) notes.push([one.warning, one.days < 0 ? "note alarm" : "note"]);
  put("notes", ...notes.map(([text, name]) => element("p", text, name)));
}

function tile(name, value, small = "") {
  const value_ = element("dd", value);
  if (small) value_.append(element("small", small));
  return element("div", "", "", [element("dt", name), value_]);
}

function showTiles(state) {
  const run = state.run;
  if (!run) return put("tiles", tile("Nodes admitted", state.admitted.length));
  const members = run.nodes.filter(one => one.state !== "removed"), here = members.filter(one => one.state === "here");
  const last = run.series.at(-1), epsilon = run.privacy.epsilon;
  const over = run.state === "finished" || run.state === "not running";
  put("tiles",
    tile("Rounds", `${run.done} of ${run.rounds ?? "?"}`, run.seconds.count ? `${seconds(run.seconds.median)} each` : ""),
    tile(over ? "Nodes at the end" : "Nodes connected", `${here.length} of ${members.length}`,
      `${members.reduce((sum, one) => sum + (one.clients || 0), 0)} clients`),
    tile("Clients that answered", last && known(last.answered) ? `${last.answered} of ${last.asked}` : "–", "in the last round"),
    tile("Exchange", seconds(run.exchanges.median), run.exchanges.count ? `${run.exchanges.count} so far, 90% within ${seconds(run.exchanges.p90)}` : ""),
    tile("Privacy", epsilon === "infinity" ? "ε = ∞" : known(epsilon) ? `ε ${typeof epsilon === "number" ? short(epsilon) : epsilon}` : "–",
      epsilon === "infinity" ? "something is released without noise" : known(run.privacy.delta) ? `at δ = ${run.privacy.delta}` : ""));
}

function showNodes(run) {
  const told = run.nodes.some(one => one.budget);
  const heads = [["Node"], ["State", "text"], ["Clients"], ["Missed"], ["Sums over at least"], ["fedtail"]];
  if (told) heads.push(["Budget", "text"]);
  table("nodes", heads, run.nodes.map(one => {
    const gone = one.state === "removed";
    const cells = [one.name, [element("span", one.state, `dot ${one.state}`), "state-cell"], one.clients ?? "–",
      gone ? "–" : [`${one.missed} of ${one.questions}`, one.missed ? "warned" : ""], gone ? "–" : `${one.minimum} nodes`, one.fedtail ?? "–"];
    return row(told ? [...cells, [one.budget || "not told", "text"]] : cells);
  }), "No node has joined yet.");
}

function nice(most) {                 // the end of an axis, and its step
  const rough = most / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map(one => one * power).find(one => one >= rough);
  return { step, end: step * Math.ceil(most / step - 1e-9) };
}

// A chart of lines over x: lines are {name, points: [[x, y]], look}; the last value is in the legend.
function chart(title, lines, text, xTitle) {
  const points = lines.flatMap(one => one.points).filter(point => known(point[1]));
  const figure = element("figure", "", "chart", [element("h3", title)]);
  if (points.length < 2) {
    figure.append(element("p", "Nothing to show yet.", "empty-line"));
    return figure;
  }
  const width = innerWidth < 560 ? 340 : 520, height = 230, left = 46, right = 10, top = 10, bottom = 34;
  const xs = points.map(point => point[0]), low = Math.min(...xs), high = Math.max(...xs, low + 1);
  const { step, end } = nice(Math.max(...points.map(point => point[1]), 1e-9));
  const x = value => left + (width - left - right) * (value - low) / (high - low);
  const y = value => height - bottom - (height - top - bottom) * value / end;
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  for (let at = 0; at <= end + step / 2; at += step) {
    svg.append(drawn("line", { x1: left, x2: width - right, y1: y(at), y2: y(at), class: at ? "grid" : "axis" }),
      drawn("text", { x: left - 7, y: y(at) + 4, "text-anchor": "end" }, text(at)));
  }
  const marks = [...new Set([0, 1, 2, 3, 4].map(part => Math.round(low + (high - low) * part / 4)))];
  for (const at of marks) svg.append(drawn("text", { x: x(at), y: height - bottom + 16, "text-anchor": at === high ? "end" : at === low ? "start" : "middle" }, String(at)));
  svg.append(drawn("text", { x: (left + width - right) / 2, y: height - 2, "text-anchor": "middle" }, xTitle));
  const legend = element("ul", "", "legend");
  lines.forEach((one, k) => {
    const there = one.points.filter(point => known(point[1])), last = there.at(-1);
    if (!last) return;
    const path = there.map((point, at) => `${at ? "L" : "M"}${x(point[0]).toFixed(1)} ${y(point[1]).toFixed(1)}`).join("");
    const look = `line-${one.look ?? k % 3}`, group = drawn("g", { class: look });
    group.append(drawn("path", { d: path }), drawn("circle", { cx: x(last[0]), cy: y(last[1]), r: 3 }));
    svg.append(group);
    legend.append(element("li", "", "", [element("span", "", look), `${one.name} `, element("b", text(last[1]))]));
  });
  figure.append(legend, svg);
  return figure;
}

function showEvaluations(run) {
  const found = run.evaluations, several = new Set(found.map(one => one.model)).size > 1;
  byId("evaluation-section").hidden = !found.length;
  put("evaluations", ...found.map(one => {
    const title = `${one.metric}${several ? `, ${one.model}` : ""}`, percent = run.rates && one.metric === "error";
    return chart(title, ["worst10", "mean", "p90"].map(name => ({ name: NAMES[name], points: one.series.map(line => [line.round, line[name]]) })),
      value => rate(value, percent), "round");
  }));
  const clients = found.map(one => one.clients).find(known);
  byId("evaluation-caption").textContent = known(clients) ?
    `Over the clients of each cohort (${Math.round(clients)} in the last), on their nodes; the server got sums and a histogram. The worst tenth are the clients with the largest values.` : "";
}

function showRounds(run) {
  const series = run.series, spread = run.exchanges, first = spread.count - spread.last.length;
  put("rounds",
    chart("Clients a round", [{ name: "answered", look: 1, points: series.map(one => [one.round + 1, one.answered]) },
      { name: "sampled", look: 2, points: series.map(one => [one.round + 1, one.asked]) }].reverse(), short, "round"),
    chart("Seconds a round", [{ name: "last", look: 1, points: series.map(one => [one.round + 1, one.seconds]) }], seconds, "round"),
    chart("Seconds an exchange", [{ name: "last", look: 1, points: spread.last.map((value, at) => [first + at + 1, value]) }], seconds, "exchange"));
}

function showProblems(run) {
  const { count, rows } = run.problems;
  byId("problem-count").textContent = count ? `${count} in ${run.done} rounds` : "";
  table("problems", [["Node"], ["What", "text"], ["Times"], ["Last in round"]],
    rows.map(one => row([one.node, [one.why, "text"], one.times, one.last + 1])), "None: every node answered every question.");
}

function showCertificates(state) {
  table("certificates", [["Of"], ["Valid until"], ["Days left"]], state.certificates.map(one =>
    row([one.what, one.until.slice(0, 10), [Math.floor(one.days), one.warning ? "warned" : ""]])), "No certificates.");
}

function showLog(run) {
  const place = byId("log"), atEnd = place.scrollTop + place.clientHeight >= place.scrollHeight - 20;
  place.textContent = run.log.join("\n");
  if (atEnd) place.scrollTop = place.scrollHeight;
}

function show(state) {
  showHead(state);
  showNotes(state);
  showTiles(state);
  showCertificates(state);
  const run = state.run;
  for (const section of ["rounds-title", "problems-title", "nodes-title", "log-title"]) byId(section).parentElement.hidden = !run;
  if (!run) {
    byId("evaluation-section").hidden = true;
    return;
  }
  showNodes(run);
  showEvaluations(run);
  showRounds(run);
  showProblems(run);
  showLog(run);
}

async function ask() {
  try {
    const reply = await fetch(`/state.json?run=${encodeURIComponent(chosen)}`, { cache: "no-store" });
    if (!reply.ok) throw new Error(String(reply.status));
    const state = await reply.json(), { time, ...rest } = state, text = JSON.stringify([rest, innerWidth < 560]);
    if (text !== shown) show(state);              // what the reader selects or scrolls stays while nothing changes
    shown = text;
    byId("updated").textContent = `Read ${new Date(1000 * time).toLocaleTimeString()}.`;
    document.body.dataset.read = String(Number(document.body.dataset.read || 0) + 1);
  } catch (reason) {
    shown = "";
    byId("state").textContent = "dashboard ended";
    byId("state").className = "state lost";
  }
  setTimeout(ask, EVERY);
}

byId("runs").addEventListener("change", event => { chosen = event.target.value; shown = ""; });
ask();
