// What a reader takes away: tables as CSV, settings as text; and a hint where a table is wider than the screen.
function csvCell(text) {
  return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function csvOfTable(table) {          // full precision where a cell has it, else what is shown
  const cells = row => [...row.cells].map(cell => cell.dataset.csv ?? cell.dataset.value ?? cell.innerText.replace(/\s+/g, " ").trim());
  return [...table.rows].filter(row => !row.hidden).map(cells);
}

function csvOfClients() {             // every client of the table, not only the rows that are shown
  const rows = clientRows().map(row => [row.name, row.size, row.baseline, row.focus, row.difference].map(String));
  return [["client", "examples", method(data.baseline).label, method(state.focus).label, "difference"], ...rows];
}

function saveText(text, name, type) {
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function offerCsv(frame) {
  const table = frame.querySelector("table"), button = Object.assign(document.createElement("button"), { type: "button", className: "more csv", textContent: "CSV" });
  button.setAttribute("aria-label", "This table as a CSV file");
  button.addEventListener("click", () => {
    const rows = table.id === "client-table" ? csvOfClients() : csvOfTable(table);
    saveText(rows.map(row => row.map(csvCell).join(",")).join("\n") + "\n", `${table.id || "table"}.csv`, "text/csv");
  });
  const hint = Object.assign(document.createElement("span"), { className: "muted hint", textContent: "more columns: scroll sideways →", hidden: true });
  const bar = Object.assign(document.createElement("p"), { className: "bar" });
  bar.append(hint, button);
  frame.before(bar);
  const look = () => { hint.hidden = frame.scrollWidth <= frame.clientWidth + 1 || frame.scrollLeft + frame.clientWidth >= frame.scrollWidth - 1; };
  frame.addEventListener("scroll", look, { passive: true });
  addEventListener("resize", look);
  look();
}

function offerSettings(box) {
  box.querySelector("button").addEventListener("click", async event => {
    const text = box.querySelector("pre").textContent;
    try { await navigator.clipboard.writeText(text); event.target.textContent = "Copied"; }
    catch { saveText(text, "experiment.toml", "application/toml"); event.target.textContent = "Saved"; }      // a page from a file may not copy
  });
}

document.querySelectorAll(".scroll").forEach(offerCsv);
document.querySelectorAll(".settings").forEach(offerSettings);
