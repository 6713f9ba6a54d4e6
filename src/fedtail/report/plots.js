// The plots of the metric in focus. Each function gives { traces, layout }, or a sentence where there is nothing to draw.
function histogram() {
  const of = view().distributions;
  if (!of) return noValues();
  const edges = scaled(of.edges), width = edges[1] - edges[0];
  const centres = [edges[0] - width / 2, ...edges.map(e => e + width / 2)];
  const traces = shown().filter(k => !hasDiverged(k)).map(k => line(k, centres, [0, ...percent(of.shares[k]), 0], {
    fill: "tozeroy", fillcolor: colour(k, k === state.focus ? 0.28 : 0.1), line: { shape: "hvh" },
    hovertemplate: `%{y:.1f}% of clients near %{x:.3g}${unit()}<extra>%{fullData.name}</extra>`,
  }));
  return { traces, layout: layout(errorAxis(inWords(), { range: [edges[0], edges[edges.length - 1]] }), axis("share of clients, %", { rangemode: "tozero" })) };
}

function ecdf() {
  if (!view().distributions) return noValues();
  const of = view().distributions.functions, bad = badPercent(view().better);
  const step = { line: { shape: "hv" } };
  const hover = { ...step, hovertemplate: `%{y:.1f}% of clients have at most %{x:.3g}${unit()}<extra>%{fullData.name}</extra>` };
  const traces = [...faint().map(k => background(k, scaled(of[k].x), percent(of[k].y), step)),
    ...shown().map(k => line(k, scaled(of[k].x), percent(of[k].y), hover))];
  if (data.few) return { traces, layout: layout(errorAxis(inWords()), axis("share of clients, %", { range: [0, 101] })) };
  const dotted = { type: "line", xref: "paper", x0: 0, x1: 1, y0: bad, y1: bad, line: { color: css("--muted"), width: 1, dash: DOT } };
  return { traces, layout: layout(errorAxis(inWords()), axis("share of clients, %", { range: [0, 101] }), { shapes: [dotted] }) };
}

function noValues() {
  return "This metric was not recorded for these clients.";
}

function cloud(k, x, y, text, more = {}) {
  return { type: "scatter", mode: "markers", name: legendName(k), x, y, text,
    marker: { color: colour(k, k === state.focus ? 0.6 : 0.35), size: x.length > 400 ? 4 : 7, line: { width: 0 } },
    hovertemplate: "%{text}<extra>%{fullData.name}</extra>", ...more };
}

function equalSizes(sizes) {          // a plot against one size is a column of dots
  return unique(sizes).length === 1 && `All of these clients have ${sizes[0].toLocaleString("en-GB")} examples.`;
}

function size() {
  const c = { ...data.clients, ...view().clients }, x = c.points.map(p => c.sizes[p]);
  if (equalSizes(x)) return equalSizes(x);
  const traces = compared().flatMap(k => {
    const y = c.points.map(p => c.errors[k][p]);
    const text = c.points.map((p, at) => `${plain(c.names[p])}<br>${x[at]} examples, ${inWords()} ${number(y[at])}`);
    const through = trend(x, scaled(y));
    return [cloud(k, x, scaled(y), text), line(k, through.x, through.y, { showlegend: false, hoverinfo: "skip" })];
  });
  return { traces, layout: layout(sizeAxis(c.log), errorAxis(inWords(), fromZero())) };
}

function sizeAxis(log) {
  return axis("examples of the client" + (log ? " (log scale)" : ""), log ? { type: "log", dtick: 1, minor: { showgrid: false } } : {});
}

function curveMetric() {              // beside the loss, which has a plot of its own
  return state.metric === "loss" ? (data.metric === "loss" ? "error" : data.metric) : state.metric;
}

function rounds(metric) {
  const of_metric = metric === data.metric ? data : data.further[metric];
  const factor = of_metric.percent ? percent : values => values;
  const has = k => data.curves[k][state.split] && data.curves[k][state.split][metric] && data.curves[k][state.split][metric].rounds.length;
  const of = k => data.curves[k][state.split][metric];
  const recorded = shown().filter(has), sound = recorded.filter(k => !hasDiverged(k));
  const strong = sound.length ? sound : recorded;      // a model that has diverged would make all others one line
  if (!strong.length) return "Nothing was recorded for these clients.";
  const one = (k, name, more) => line(k, of(k).rounds, factor(of(k)[name]), { ...named(k, name), ...more });
  const traces = [
    ...band(strong.includes(state.focus) ? of(state.focus) : null, factor),
    ...faint().filter(k => has(k) && (!sound.length || !hasDiverged(k))).map(k => background(k, of(k).rounds, factor(of(k).mean))),
    ...strong.map(k => one(k, badEnd(of_metric.better), { showlegend: false, line: { dash: DOT, width: 1.4 } })),
    ...strong.filter(k => k === state.focus).map(k => one(k, "p50", { showlegend: false, line: { dash: DASH, width: 1.4 } })),
    ...strong.map(k => one(k, "mean", {})),
  ];
  return { traces, layout: layout(axis("round"), axis(inWords(metric) + (of_metric.percent ? ", %" : ""))) };
}

// The statistics at both ends of the band: percentiles or, of few clients, the single ones.
function ends() {
  return data.few ? ["p0", "p100"] : ["p10", "p90"];
}

function badEnd(better) {
  return ends()[better === "lower" ? 1 : 0];
}

function named(k, statistic) {
  const names = { mean: "mean", p50: "median", p90: "90th percentile", p10: "10th percentile", p100: "worst client", p0: "worst client" };
  return { hovertemplate: `round %{x}: ${names[statistic]} %{y:.4g}<extra>%{fullData.name}</extra>` };
}

function band(of, factor) {           // between the 10th and the 90th percentile, or the best and the worst of few clients
  if (!of) return [];
  const [low, high] = ends();
  const edge = { type: "scatter", mode: "lines", x: of.rounds, line: { width: 0 }, showlegend: false, hoverinfo: "skip" };
  return [{ ...edge, y: factor(of[low]) }, { ...edge, y: factor(of[high]), fill: "tonexty", fillcolor: colour(state.focus, 0.12) }];
}

function isBaseline() {
  return state.focus === data.baseline && "This is the baseline itself. Choose another model above to compare with it.";
}

function gainColour(value) {
  return Math.abs(value) < 1e-9 ? css("--muted") : sign() * value < 0 ? css("--better") : css("--worse");
}

function sorted() {
  const of = view().clients.changes[state.focus];
  if (isBaseline() || !of.x.length) return isBaseline() || "No seed has both this method and the baseline.";
  const bars = { type: "bar", x: percent(of.x), y: scaled(of.y), marker: { color: of.y.map(gainColour), line: { width: 0 } }, showlegend: false,
    width: 100 / of.x.length, hovertemplate: `%{y:+.3g}${unit() ? " points" : ""}, at %{x:.0f}% of the clients<extra></extra>` };
  const y = axis(`difference in ${inWords()}` + (unit() ? ", percentage points" : ""), { zeroline: true });
  return { traces: [bars], layout: layout(axis("clients, in order, %", { range: [0, 100] }), y, { bargap: 0 }) };
}

function pairs() {
  const c = { ...data.clients, ...view().clients };
  const both = c.points.filter(p => c.differences[state.focus][p] !== null);
  if (isBaseline() || !both.length) return isBaseline() || "No seed has both this method and the baseline.";
  const before = both.map(p => c.errors[data.baseline][p]), after = before.map((e, at) => e + c.differences[state.focus][both[at]]);
  const text = both.map((p, at) => `${plain(c.names[p])} (${c.sizes[p]} examples)<br>${number(before[at])} → ${number(after[at])}`);
  const dots = { ...cloud(state.focus, scaled(before), scaled(after), text), showlegend: false, hovertemplate: "%{text}<extra></extra>" };
  dots.marker = { ...dots.marker, opacity: 0.75, color: both.map(p => gainColour(c.differences[state.focus][p])) };
  const least = view().better === "lower" ? [0] : [];
  const ends = [Math.min(...least, ...before, ...after), Math.max(...before, ...after)].map(v => scale() * v);
  const diagonal = { type: "line", x0: ends[0], y0: ends[0], x1: ends[1], y1: ends[1], line: { color: css("--muted"), width: 1, dash: DOT } };
  const under = k => `${inWords()} under ${legendName(k)}`;
  return { traces: [dots], layout: layout(errorAxis(under(data.baseline)), errorAxis(under(state.focus)), { shapes: [diagonal] }) };
}

// The family: what each of its models gives, and who picks which.
const choiceOf = family => view().choices[data.families.indexOf(family)];
const NOT_PICKED = "Clients did not pick by this metric.";

function tradeoff(family) {
  const choice = choiceOf(family);
  if (!choice) return NOT_PICKED;
  const titles = Object.fromEntries(view().statistics.slice(0, 3));
  const traces = Object.keys(titles).flatMap(name => tradeoffLines(family, choice, name, titles[name]));
  const labels = Object.keys(titles).map(name => ({
    text: titles[name], x: 0, y: scale() * choice.judged[0][name].mean, xanchor: "left", yanchor: "bottom", yshift: 8, xshift: -8, showarrow: false,
    font: { size: 11.5, color: css("--muted") },
  }));
  return { traces, layout: layout(axis(plain(family.symbol || "model"), { type: "category" }), errorAxis(inWords(), fromZero()), { annotations: labels }) };
}

function tradeoffLines(family, choice, name, title) {
  const { methods, ticks } = family, of = choice.judged.map(judged => judged[name]), ink = css("--muted");
  const spread = { type: "data", array: of.map(s => scale() * (s.std || 0)), visible: of.some(s => s.std), thickness: 1, width: 3, color: ink };
  const marks = { color: methods.map(k => tint(k, 1)), size: methods.map(k => k === state.focus ? 14 : 7), opacity: 1, line: { width: 0 } };
  const own = scale() * choice.own[name].mean;
  return [
    { type: "scatter", mode: "lines+markers", x: ticks, y: of.map(s => scale() * s.mean), error_y: spread, line: { color: ink, width: 1.5 }, marker: marks, showlegend: false,
      hovertemplate: `%{x}: ${title} %{y:.4g}${unit()}<extra></extra>` },
    { type: "scatter", mode: "lines", name: "each client's own pick", x: ticks, y: ticks.map(() => own), showlegend: name === "mean",
      line: { dash: DOT, color: css("--text"), width: 1.5 }, hovertemplate: `own pick: ${title} %{y:.4g}${unit()}<extra></extra>` },
  ];
}

function strength(k) {
  return tint(k, k === state.focus ? 1 : 0.28);
}

function picks(family) {
  const { methods, ticks, symbol } = family, choice = choiceOf(family);
  if (!choice) return NOT_PICKED;
  const bar = { type: "bar", x: ticks, y: choice.counts.map(n => 100 * n / choice.clients), customdata: choice.counts, marker: { color: methods.map(strength) },
    showlegend: false, text: choice.counts.map(n => `${Math.round(100 * n / choice.clients)}%`), textposition: "outside", cliponaxis: false,
    hovertemplate: `%{customdata} of ${choice.clients} clients<extra></extra>` };
  return { traces: [bar], layout: layout(axis(plain(symbol || "model"), { type: "category" }), axis("share of clients, %", { rangemode: "tozero" }), { bargap: 0.35, margin: { l: 46, r: 18, t: 22, b: 42 } }) };
}

function picksBy(family, kind, title) {
  const { methods } = family, choice = choiceOf(family);
  if (!choice) return NOT_PICKED;
  const of = choice[kind];
  if (of.labels.length < 2) return "All these clients are alike in this respect.";
  const traces = methods.map((k, place) => ({ type: "bar", name: legendName(k), x: of.labels, y: percent(of.shares[place]), marker: { color: strength(k) },
    customdata: of.clients, hovertemplate: "%{y:.0f}% of %{customdata} clients<extra>%{fullData.name}</extra>" }));
  return { traces, layout: layout(axis(title, { type: "category" }), axis("share of clients, %", { range: [0, 100] }), { barmode: "stack", bargap: 0.15 }) };
}
