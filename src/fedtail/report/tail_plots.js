// The plots of who contributed: to a round, and over all of them.
function withRounds(name) {
  return k => data.contributors[k] && data.contributors[k][name].some(v => v !== null);
}

function contributors() {
  const strong = shown().filter(withRounds("contributed"));
  if (!strong.length) return method(state.focus).personal ? "A client trains its personal model alone." : "No rounds were recorded for this model.";
  const cohort = data.contributors[strong.includes(state.focus) ? state.focus : strong[0]];
  const ceiling = { type: "scatter", mode: "lines", name: "sampled", x: cohort.rounds, y: cohort.sampled, line: { color: css("--muted"), width: 1 },
    fill: "tozeroy", fillcolor: css("--grid"), hovertemplate: "round %{x}: %{y:.3g} sampled<extra></extra>" };
  const hover = { hovertemplate: "round %{x}: %{y:.3g} contributed<extra>%{fullData.name}</extra>" };
  const traces = strong.map(k => line(k, data.contributors[k].rounds, data.contributors[k].contributed, hover));
  return { traces: [ceiling, ...traces], layout: layout(axis("round"), axis("clients", { rangemode: "tozero" })) };
}

function tookPart() {
  const of = data.participation[state.focus];
  if (!of) return "How often clients took part was not recorded for this model.";
  const width = of.edges[1] - of.edges[0];
  const traces = [line(state.focus, [of.edges[0] - width / 2, ...of.edges.map(e => e + width / 2)], [0, ...percent(of.shares), 0], {
    fill: "tozeroy", fillcolor: colour(state.focus, 0.28), line: { shape: "hvh" },
    hovertemplate: "%{y:.1f}% of clients took part in about %{x:.3g} rounds<extra>%{fullData.name}</extra>",
  })];
  return { traces, layout: layout(axis("rounds in which a client took part", { rangemode: "tozero" }), axis("share of clients, %", { rangemode: "tozero" })) };
}

function threshold() {
  const has = withRounds("threshold");
  const strong = shown().filter(has), weak = faint().filter(has);
  if (!strong.length) return "This model has no threshold: every sampled client contributes.";
  const hover = { hovertemplate: "round %{x}: %{y:.4g}<extra>%{fullData.name}</extra>" };
  const traces = [...weak.map(k => background(k, data.contributors[k].rounds, data.contributors[k].threshold)),
    ...strong.map(k => line(k, data.contributors[k].rounds, data.contributors[k].threshold, hover))];
  return { traces, layout: layout(axis("round"), axis("loss")) };
}

function inTail() {                   // of the method in focus, or a sentence
  const of = data.tail.methods[state.focus];
  if (!of && method(state.focus).personal) return "Every sampled client trains its personal model: the tail is that of the shared one.";
  if (!of) return "Tail membership was not recorded for this model.";
  return of.everybody ? `Under ${method(state.focus).label} every sampled client contributes.` : of;
}

function often() {
  if (typeof inTail() === "string") return inTail();
  const strong = shown().filter(k => data.tail.methods[k] && !data.tail.methods[k].everybody);
  const traces = strong.map(k => {
    const of = data.tail.methods[k], edges = percent(of.edges), width = edges[1] - edges[0];
    return line(k, [edges[0] - width / 2, ...edges.map(e => e + width / 2)], [0, ...percent(of.shares), 0], {
      fill: "tozeroy", fillcolor: colour(k, k === state.focus ? 0.28 : 0.1), line: { shape: "hvh" },
      hovertemplate: "%{y:.1f}% of clients contribute about %{x:.0f}% of the time<extra>%{fullData.name}</extra>",
    });
  });
  return { traces, layout: layout(axis("rounds in the tail, % of those sampled for", { range: [0, 100] }), axis("share of clients, %", { rangemode: "tozero" })) };
}

function oftenSize() {
  const of = inTail();
  if (typeof of === "string") return of;
  const { sizes, names, log } = data.tail;
  if (equalSizes(sizes)) return equalSizes(sizes);
  const text = names.map((name, k) => `${plain(name)}<br>${sizes[k]} examples, in the tail ${Math.round(100 * of.points[k])}% of the time`);
  const through = trend(sizes, percent(of.points));
  const traces = [cloud(state.focus, sizes, percent(of.points), text), line(state.focus, through.x, through.y, { showlegend: false, hoverinfo: "skip" })];
  return { traces, layout: layout(sizeAxis(log), axis("rounds in the tail, %", { range: [-2, 102] })) };
}

function composition() {
  const of = inTail();
  if (typeof of === "string") return of;
  const kinds = Object.keys(of.composition);
  if (!kinds.length) return "These clients do not differ in size and have no groups.";
  const kind = kinds.includes(state.kind) ? state.kind : kinds[0];
  const labels = data.tail.classes[kind], { contributed: parts, sampled } = of.composition[kind];
  const traces = labels.map((label, c) => ({
    type: "scatter", mode: "lines", name: plain(kind === "size" ? `${label} examples` : label), x: of.ends, y: percent(parts[c]), stackgroup: "tail",
    fillcolor: tint(state.focus, 0.9 - 0.75 * c / Math.max(labels.length - 1, 1)), line: { width: 1, color: css("--ground") },
    hovertemplate: "%{y:.0f}%<extra>%{fullData.name}</extra>",
  }));
  let below = 0;
  const fair = sampled.slice(0, -1).map(share => 100 * (below += share)).map(y => (
    { type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { color: css("--text"), width: 1, dash: DASH } }));
  const x = axis("round", { range: [of.ends[0], of.ends[of.ends.length - 1]] });
  return { traces, layout: layout(x, axis("share of the contributors, %", { range: [0, 100] }), { shapes: fair, hovermode: "x unified" }) };
}

function frequent() {
  const of = inTail();
  if (typeof of === "string") return of;
  const { names, sizes, share, contributed: times, sampled } = of.frequent;
  const most = isNarrow() ? 12 : 24;
  const text = names.map((name, r) => of.ends.map(() => `${plain(name)} (${sizes[r]} examples)<br>contributed to ${times[r]} of the ${sampled[r]} rounds it was sampled for`));
  const map = { type: "heatmap", x: of.ends.map(String), y: names.map((_, r) => r), z: share.map(percent), text, xgap: 1, ygap: 1, zmin: 0, zmax: 100,
    colorscale: [[0, css("--raised")], [1, colour(state.focus)]], hoverongaps: false,
    hovertemplate: "%{text}<br>up to round %{x}: %{z:.0f}% of its rounds<extra></extra>",
    showscale: !isNarrow(), colorbar: { title: { text: "rounds in the tail, %", side: "right", font: { size: 11 } }, thickness: 10, outlinewidth: 0, tickfont: { size: 10 }, len: 0.6 } };
  const y = axis("", { tickvals: names.map((_, r) => r), ticktext: names.map(name => plain(short(name, most))), autorange: "reversed", showgrid: false });
  return { traces: [map], layout: layout(axis("round", { type: "category", showgrid: false, nticks: isNarrow() ? 5 : 12 }), y, { showlegend: false }) };
}
