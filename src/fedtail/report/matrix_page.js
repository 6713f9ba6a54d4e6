// The page about a matrix: filters, sorting, and the plane of mean and tail.
const data = JSON.parse(document.getElementById("page-data").textContent);
const byId = id => document.getElementById(id);
const rows = [...document.querySelectorAll(".cells tbody tr")];      // of the tables of all metrics
const state = { metric: data.metric };
const ofMetric = () => data.metrics[state.metric];
const tableInSight = () => document.querySelector(`.of-metric[data-metric="${CSS.escape(state.metric)}"] .cells`);
const SIZE = { left: 50, right: 12, top: 24, bottom: 40, width: 860, height: 430 };      // in pixels, so that text is as large on a phone

function chosenValues() {
  return [...document.querySelectorAll(".filter")].filter(one => one.value).map(one => [one.dataset.axis, one.value]);
}

function isShown(row) {
  const cell = data.cells[row.dataset.cell];
  return (cell.state === "done" || byId("refused").checked) && chosenValues().every(([axis, value]) => cell.values[axis] === value);
}

function showRows() {
  rows.forEach(row => { row.hidden = !isShown(row); });
  const own = [...tableInSight().tBodies[0].rows];
  byId("found").textContent = `${own.filter(row => !row.hidden).length} of ${own.length}`;
  drawPlane();
}

function showMetric() {               // tables, names and captions of the metric in focus, and the end that is better
  document.querySelectorAll(".of-metric").forEach(panel => { panel.hidden = panel.dataset.metric !== state.metric; });
  document.querySelectorAll(".metric-name").forEach(name => { name.textContent = state.metric; });
  document.querySelectorAll("[data-better]").forEach(text => { text.hidden = ofMetric() && text.dataset.better !== ofMetric().better; });
  showRows();
  dispatchEvent(new Event("resize"));      // a table that was hidden has no width before
}

function sortRows(head) {
  const table = head.closest("table"), rising = head.getAttribute("aria-sort") !== "ascending";
  table.querySelectorAll("thead [data-key]").forEach(one => one.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", rising ? "ascending" : "descending");
  const value = row => {
    const cell = row.querySelector(`[data-statistic="${head.dataset.key}"]`);
    return cell && cell.dataset.value !== "" ? Number(cell.dataset.value) : Infinity;      // those without a number come last
  };
  const order = (a, b) => value(a) === value(b) ? 0 : value(a) === Infinity ? 1 : value(b) === Infinity ? -1
    : rising ? value(a) - value(b) : value(b) - value(a);
  table.tBodies[0].append(...[...table.tBodies[0].rows].sort(order));
}

function pointsShown() {
  const found = ofMetric();
  return !found ? [] : [...tableInSight().tBodies[0].rows].filter(row => !row.hidden).flatMap(row => ["shared", "personal"].map(model => ({
    x: found.cells[row.dataset.cell][`${model}-mean`], y: found.cells[row.dataset.cell][`${model}-${found.tail}`],
    own: model === "personal", values: data.cells[row.dataset.cell].values }))).filter(p => Number.isFinite(p.x) && Number.isFinite(p.y));
}

function ticks(low, high) {
  const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(k => k * power).find(k => k >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step / 1e6; at += step) found.push(Number(at.toPrecision(6)));
  return found;
}

function element(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function scale(values, from, to) {
  const low = Math.min(...values), high = Math.max(...values), room = (high - low || Math.abs(high) || 1) * 0.06;
  const place = value => from + (value - low + room) / (high - low + 2 * room) * (to - from);
  return Object.assign(place, { ticks: ticks(low - room, high + room), hasZero: low - room <= 0 && high + room >= 0 });
}

function drawPlane() {
  const svg = byId("scatter"), points = pointsShown(), axis = byId("colour").value;
  svg.replaceChildren();
  byId("legend").replaceChildren();
  SIZE.width = Math.max(280, svg.clientWidth);
  SIZE.height = Math.round(Math.min(430, Math.max(280, SIZE.width / 2)));
  svg.setAttribute("viewBox", `0 0 ${SIZE.width} ${SIZE.height}`);
  if (!points.length) {
    svg.append(element("text", { x: SIZE.width / 2, y: SIZE.height / 2, "text-anchor": "middle" }, "No combination with numbers is shown."));
    return;
  }
  const x = scale(points.map(p => p.x), SIZE.left, SIZE.width - SIZE.right), y = scale(points.map(p => p.y), SIZE.height - SIZE.bottom, SIZE.top);
  for (const tick of x.ticks) svg.append(element("line", { class: "grid", x1: x(tick), x2: x(tick), y1: SIZE.top, y2: SIZE.height - SIZE.bottom }),
    element("text", { x: x(tick), y: SIZE.height - SIZE.bottom + 16, "text-anchor": "middle" }, tick));
  for (const tick of y.ticks) svg.append(element("line", { class: "grid", x1: SIZE.left, x2: SIZE.width - SIZE.right, y1: y(tick), y2: y(tick) }),
    element("text", { x: SIZE.left - 8, y: y(tick) + 4, "text-anchor": "end" }, tick));
  const { unit, titles, decimals } = ofMetric(), named = unit ? `${state.metric}, ${unit}` : state.metric;
  svg.append(element("text", { x: SIZE.width - SIZE.right, y: SIZE.height - 6, "text-anchor": "end", "data-axis": "x" }, `mean ${named} →`),
    element("text", { x: 2, y: 12, "data-axis": "y" }, `↑ ${titles[1]}: ${named}`));
  byId("zero").textContent = x.hasZero && y.hasZero ? "" : "The axes do not begin at zero: they show differences.";
  const colours = Object.fromEntries(data.axes[axis].map((value, k) => [value, data.colours[k % data.colours.length]]));
  for (const p of points) {
    const fill = { fill: colours[p.values[axis]], "data-point": p.own ? "personal" : "shared" };
    const mark = p.own ? element("rect", { ...fill, x: x(p.x) - 5, y: y(p.y) - 5, width: 10, height: 10 })
      : element("circle", { ...fill, cx: x(p.x), cy: y(p.y), r: 5.5 });
    mark.append(element("title", {}, `${Object.values(p.values).join(", ")}${p.own ? ", own models" : ""}: mean ${p.x.toFixed(decimals[0])}, ${titles[1]} ${p.y.toFixed(decimals[1])}`));
    svg.append(mark);
  }
  for (const [value, colour] of Object.entries(colours)) {
    const item = document.createElement("li"), dot = document.createElement("i");
    dot.style.background = colour;
    item.append(dot, value);
    byId("legend").append(item);
  }
}

document.querySelectorAll(".filter, #refused").forEach(one => one.addEventListener("change", showRows));
document.querySelectorAll(".cells thead [data-key]").forEach(head => head.addEventListener("click", () => sortRows(head)));
byId("colour").addEventListener("change", drawPlane);
if (byId("metric")) byId("metric").addEventListener("change", event => { state.metric = event.target.value; showMetric(); });
window.addEventListener("resize", drawPlane);
showRows();
