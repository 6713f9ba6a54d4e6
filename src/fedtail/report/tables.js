// The tables: which row is in focus, and the clients, sorted and searched.
function markRows() {
  document.querySelectorAll("tr[data-method]").forEach(row => {
    const k = Number(row.dataset.method);
    row.style.setProperty("--own", colour(k));
    row.classList.toggle("focus", k === state.focus);
  });
}

function readOut() {
  const row = view().table[state.focus], cells = row.statistics;
  byId("focus-label").textContent = method(state.focus).label;
  view().statistics.slice(0, 3).forEach(([name, title], place) => {
    const cell = byId(`focus-${place}`);
    byId(`focus-title-${place}`).textContent = title;
    cell.textContent = row.diverged.length ? "diverged" : number(cells[name].mean, view().decimals.values[name]);
    cell.dataset.value = cells[name].mean;
    cell.dataset.statistic = name;
  });
  if (byId("focus-picked")) readPicked();
  byId("readout").dataset.method = state.focus;
}

function readPicked() {
  const family = isFamily(state.focus) ? data.families[method(state.focus).family] : null;
  const choice = family && choiceOf(family);
  byId("focus-picked-line").hidden = !choice;
  if (!choice) return;
  const count = choice.counts[family.methods.indexOf(state.focus)];
  byId("focus-picked").textContent = `${(100 * count / choice.clients).toFixed(1)}% of clients`;
  byId("focus-picked").dataset.value = count;
}

function tally() {
  if (!byId("tally")) return;
  for (const name of ["improved", "same", "worse"]) byId(name).textContent = view().clients.changes[state.focus][name];
}

function showMetric() {               // tables, names and captions of the metric in focus, and the end that is bad
  document.querySelectorAll(".of-metric").forEach(panel => { panel.hidden = panel.dataset.metric !== state.metric; });
  document.querySelectorAll("[data-better]").forEach(text => { text.hidden = text.dataset.better !== view().better; });
  document.querySelectorAll(".metric-name").forEach(name => { name.textContent = data.names[state.metric]; });
  document.querySelectorAll(".curve-name").forEach(name => { name.textContent = data.names[curveMetric()]; });
  dispatchEvent(new Event("resize"));      // a table that was hidden has no width before
}

function clientRows() {
  const c = { ...data.clients, ...view().clients }, wanted = state.search.trim().toLowerCase();
  return c.names.map((name, k) => ({ name, size: c.sizes[k], baseline: c.errors[data.baseline][k], focus: c.errors[state.focus][k], difference: c.differences[state.focus][k] }))
    .filter(row => row.difference !== null && row.name.toLowerCase().includes(wanted)).sort(order);
}

function order(a, b) {
  const { key, rising } = state.sort;
  if (rising === null) return Math.abs(b.difference) - Math.abs(a.difference);
  const way = rising ? 1 : -1;
  return way * (key === "name" ? a.name.localeCompare(b.name, undefined, { numeric: true }) : a[key] - b[key]);
}

function clientTable() {
  const body = document.querySelector("#client-table tbody");
  if (!body) return;
  const rows = clientRows();
  byId("client-focus").textContent = method(state.focus).label;
  body.replaceChildren(...rows.slice(0, state.rows).map(clientRow));
  byId("found").textContent = `${rows.length} client${rows.length === 1 ? "" : "s"}`;
  byId("more").hidden = rows.length <= state.rows;
  document.querySelectorAll("#client-table th").forEach(head => {
    if (state.sort.rising === null || head.dataset.key !== state.sort.key) head.removeAttribute("aria-sort");
    else head.setAttribute("aria-sort", state.sort.rising ? "ascending" : "descending");
  });
}

function clientRow(row) {
  const line = document.createElement("tr");
  const texts = [row.name, row.size.toLocaleString("en-GB"), number(row.baseline), number(row.focus), signed(row.difference)];
  line.replaceChildren(...texts.map(text => Object.assign(document.createElement("td"), { textContent: text })));
  line.lastChild.className = Math.abs(row.difference) < 1e-9 ? "" : sign() * row.difference < 0 ? "improved" : "worse";
  return line;
}

function listenToTables() {
  document.querySelectorAll(".methods tr[data-method]").forEach(row => row.addEventListener("click", () => focusOn(Number(row.dataset.method))));
  if (!byId("client-table")) return;
  byId("search").addEventListener("input", event => { state.search = event.target.value; clientTable(); });
  byId("more").addEventListener("click", () => { state.rows += 50; clientTable(); });
  document.querySelectorAll("#client-table th").forEach(head => head.addEventListener("click", () => {
    state.sort = { key: head.dataset.key, rising: state.sort.key === head.dataset.key ? !state.sort.rising : head.dataset.key === "name" };
    clientTable();
  }));
}
