// Draw everything, and draw it again when the state, the theme or the paper changes.
const PLOTS = {
  histogram, ecdf, size, "loss-rounds": () => rounds("loss"), "error-rounds": () => rounds(curveMetric()), contributors, threshold,
  "took-part": tookPart,
  sorted, pairs, often, "often-size": oftenSize, composition, frequent,
};
data.families.forEach((family, f) => Object.assign(PLOTS, {
  [`tradeoff-${f}`]: () => tradeoff(family), [`picks-${f}`]: () => picks(family),
  [`picks-error-${f}`]: () => picksBy(family, "by_error", `${inWords()} of the client`),
  [`picks-size-${f}`]: () => picksBy(family, "by_size", "examples of the client"),
}));
const CONFIG = { displayModeBar: false, responsive: true };
const canvases = [...document.querySelectorAll("[data-plot]")];
let waiting = [];                     // plots out of sight, drawn one at a time when the browser is idle

function draw(canvas) {
  const made = PLOTS[canvas.dataset.plot]();
  if (typeof made === "string") say(canvas, made);
  else {
    if (canvas.classList.contains("empty")) canvas.replaceChildren();
    canvas.classList.remove("empty");
    Plotly.react(canvas, made.traces, made.layout, CONFIG);
  }
  canvas.dataset.focus = state.focus;
}

function say(canvas, sentence) {
  Plotly.purge(canvas);
  canvas.classList.add("empty");
  canvas.replaceChildren(Object.assign(document.createElement("p"), { className: "nothing", textContent: sentence }));
}

function inSight(canvas) {
  const box = canvas.getBoundingClientRect();
  return box.bottom > -200 && box.top < innerHeight + 200;
}

function drawAll() {
  const near = canvases.filter(inSight);
  near.forEach(draw);
  const busy = waiting.length > 0;
  waiting = canvases.filter(canvas => !near.includes(canvas));
  waiting.forEach(canvas => delete canvas.dataset.focus);
  if (!busy) setTimeout(drawNext);
}

function drawNext() {
  const canvas = waiting.shift();
  if (canvas) draw(canvas);
  if (waiting.length) setTimeout(drawNext);
}

function focusOn(k) {
  state.focus = k;
  document.documentElement.style.setProperty("--focus", colour(k));
  showControls();
  markRows();
  readOut();
  tally();
  clientTable();
  drawAll();
}

function showControls() {
  document.querySelectorAll(".chip").forEach(chip => {
    chip.style.setProperty("--own", colour(Number(chip.dataset.method)));
    chip.setAttribute("aria-pressed", Number(chip.dataset.method) === state.focus);
  });
  data.families.forEach((family, f) => {
    const at = family.methods.indexOf(state.focus), slider = byId(`slider-${f}`);
    if (at >= 0) slider.value = at;
    slider.setAttribute("aria-valuetext", method(family.methods[slider.value]).label);
    slider.parentElement.querySelectorAll(".ticks span").forEach((tick, k) => tick.classList.toggle("current", k === at));
  });
}

function listen() {
  document.querySelectorAll(".theta").forEach(slider => slider.addEventListener("input", () => (
    focusOn(data.families[slider.dataset.family].methods[slider.value]))));
  document.querySelectorAll(".chip").forEach(chip => chip.addEventListener("click", () => focusOn(Number(chip.dataset.method))));
  if (byId("metric")) byId("metric").addEventListener("change", event => {
    state.metric = event.target.value;
    showMetric();
    focusOn(state.focus);
  });
  for (const name of ["split", "kind"]) {
    if (byId(name)) byId(name).addEventListener("change", event => { state[name] = event.target.value; drawAll(); });
  }
  listenToTables();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => focusOn(state.focus));
  addEventListener("beforeprint", () => paper(true));
  addEventListener("afterprint", () => paper(false));
}

function paper(printing) {            // paper is light and narrow whatever the screen is
  document.documentElement.classList.toggle("printing", printing);
  document.documentElement.style.setProperty("--focus", colour(state.focus));
  markRows();
  canvases.forEach(canvas => { draw(canvas); if (canvas.layout) Plotly.Plots.resize(canvas); });
}

listen();
focusOn(state.focus);
