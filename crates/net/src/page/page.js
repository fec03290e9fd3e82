// What every live page has: numbers for people, tables, graphs, and the loop that asks for samples. A page adds its graphs
// and show(sample), and calls poll().
"use strict";
const $ = id => document.getElementById(id);
const esc = s => String(s).replace(/[&<>"']/g, c => "&#" + c.charCodeAt(0) + ";");
const num = x => x == null ? "–" : x >= 1e9 ? (x / 1e9).toFixed(2) + " G" : x >= 1e6 ? (x / 1e6).toFixed(2) + " M"
  : x >= 1e4 ? (x / 1e3).toFixed(1) + " k" : x >= 100 ? x.toFixed(0) : x.toFixed(x % 1 ? 1 : 0);
const bytes = x => {
  if (x == null) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let i = 0;
  while (x >= 1024 && i < 5) { x /= 1024; i++; }
  return x.toFixed(i && x < 100 ? 1 : 0) + " " + units[i];
};
const pct = x => x == null ? "–" : (100 * x).toFixed(1) + " %";
const us = x => !x ? "–" : x >= 1e6 ? (x / 1e6).toFixed(2) + " s" : x >= 1e3 ? (x / 1e3).toFixed(x < 1e4 ? 1 : 0) + " ms" : x.toFixed(0) + " µs";
const span = s => s < 120 ? s + " s" : s < 7200 ? Math.floor(s / 60) + " min" : s < 172800 ? Math.floor(s / 3600) + " h" : Math.floor(s / 86400) + " d";
const key = colour => '<i class="key" style="background:' + colour + '"></i>';
const fill = (share, colour) => '<i style="width:' + 100 * Math.min(1, Math.max(0, share)) + "%;background:" + colour + '"></i>';
const words = s => s.replace(/_/g, " ");
// Words that need an explanation have one: a page adds its own.
const TERMS = {
  "p50": "half of the requests took at most this long",
  "p90": "90 % of the requests took at most this long",
  "p99": "99 % of the requests took at most this long",
  "p99.9": "999 of 1,000 requests took at most this long",
};
const term = text => TERMS[text] ? '<abbr tabindex="0" title="' + esc(TERMS[text]) + '">' + esc(text) + "</abbr>" : esc(text);
function table(id, head, rows, none) {
  const line = (cells, tag, scope) => "<tr>" + cells.map(c => "<" + tag + scope + ">" + term(c) + "</" + tag + ">").join("") + "</tr>";
  $(id).innerHTML = rows.length
    ? (head ? line(head, "th", ' scope="col"') : "") + rows.map(r => line(r, "td", "")).join("")
    : '<tr><td class="none">' + esc(none) + "</td></tr>";
}

// A graph of the last five minutes. Pointer and arrow keys choose a second, whose numbers stand below; otherwise those of the
// last five seconds do, as in the headline. A series has value(point), null where a second has nothing to show; shown(point)
// where the legend says another number than the line; now(sample) for the legend. axis.log: a logarithmic axis, by decades.
const PAST = 300, W = 600, H = 100, graphs = {};
function graph(id, series, format, axis = {}) {
  const box = $(id), minutes = ["−5 min", "−4", "−3", "−2", "−1", "now"];
  box.innerHTML = '<div class="plot"><div class="y" aria-hidden="true"></div><svg tabindex="0" role="img" preserveAspectRatio="none" viewBox="0 0 ' + W + " " + H +
    '"></svg></div><div class="x" aria-hidden="true">' + minutes.map(m => "<span>" + m + "</span>").join("") + "</div><figcaption></figcaption>";
  const g = graphs[id] = { box, svg: box.querySelector("svg"), series, format, axis, chosen: null, points: [], sample: null };
  const choose = at => { g.chosen = at; draw(g); };
  g.svg.addEventListener("pointermove", e => {
    const r = g.svg.getBoundingClientRect(), last = g.points.at(-1);
    if (last) choose(Math.round(last.at - PAST * (1 - (e.clientX - r.left) / r.width)));
  });
  g.svg.addEventListener("pointerleave", () => choose(null));
  g.svg.addEventListener("blur", () => choose(null));
  g.svg.addEventListener("keydown", e => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -30, PageDown: 30 }[e.key], last = g.points.at(-1);
    if (e.key === "Escape") choose(null);
    else if (step && last) { e.preventDefault(); choose(Math.min(last.at, Math.max(g.points[0].at, (g.chosen ?? last.at) + step))); }
  });
}
// The numbers at the axis, lowest first, and where a value lies between the first (0) and the last (1).
function scaleOf(values, axis) {
  if (axis.log) {
    const some = values.filter(v => v > 0);
    const from = some.length ? Math.floor(Math.log10(Math.min(...some))) : 1;
    const to = Math.max(from + 1, some.length ? Math.ceil(Math.log10(Math.max(...some))) : 4);
    const ticks = [];
    for (let e = from; e <= to; e++) if (to - from < 4 || (e - from) % 2 === 0) ticks.push(10 ** e);
    return { ticks, at: v => (Math.log10(Math.max(v, 10 ** from)) - from) / (to - from) };
  }
  const most = Math.max(axis.atLeast || 0, ...values, 0) || 1, base = axis.binary ? 1024 ** Math.floor(Math.log(most) / Math.log(1024)) : 1;
  const power = 10 ** Math.floor(Math.log10(most / base)), top = axis.atLeast && most <= axis.atLeast ? axis.atLeast
    : base * power * [1, 2, 4, 10].find(m => m * power * base >= most * 0.9999);
  return { ticks: [0, top / 2, top], at: v => v / top };
}
// Runs of neighbouring seconds that have something to show.
function runs(points, value) {
  const all = [];
  let run = null, before = null;
  for (const p of points) {
    if (value(p) == null) { run = null; continue; }
    if (!run || p.at - before > 5) all.push(run = []);
    run.push(p);
    before = p.at;
  }
  return all;
}
function draw(g) {
  const P = g.points, last = P.at(-1), label = g.box.dataset.label;
  const scale = scaleOf(P.flatMap(p => g.series.map(s => s.value(p))).filter(v => v != null), g.axis);
  const x = p => (W * (1 - (last.at - p.at) / PAST)).toFixed(1), height = v => H * (1 - Math.min(Math.max(scale.at(v), 0), 1)), y = v => height(v).toFixed(1);
  g.box.querySelector(".y").innerHTML = last ? scale.ticks.map(t => '<span style="top:' + y(t) + '%">' + esc(g.format(t)) + "</span>").join("") : "";
  let shown = null;
  if (g.chosen != null && last) shown = P.reduce((best, p) => Math.abs(p.at - g.chosen) < Math.abs(best.at - g.chosen) ? p : best, last);
  let out = "";
  if (last) {
    const still = ' stroke="var(--line)" vector-effect="non-scaling-stroke"/>';
    for (const t of scale.ticks) out += '<line x1="0" x2="' + W + '" y1="' + y(t) + '" y2="' + y(t) + '"' + still;
    for (let m = 1; m < 5; m++) out += '<line y1="0" y2="' + H + '" x1="' + W * m / 5 + '" x2="' + W * m / 5 + '"' + still;
    // The first lies on top.
    for (const s of g.series.slice().reverse()) for (const run of runs(P, s.value)) {
      // A second alone would be a line without length.
      const line = run.map(p => x(p) + "," + y(s.value(p))).join(" ") + (run.length > 1 ? "" : " " + (+x(run[0]) + .7) + "," + y(s.value(run[0])));
      if (s.area) out += '<polygon points="' + x(run[0]) + "," + H + " " + line + " " + x(run.at(-1)) + "," + H + '" fill="' + s.colour + '" opacity=".16"/>';
      out += '<polyline points="' + line + '" fill="none" stroke="' + s.colour + '" stroke-width="' + (run.length > 1 ? 1.5 : 3) + '" stroke-linejoin="round" stroke-linecap="round" vector-effect="non-scaling-stroke"/>';
    }
    if (shown) out += '<line x1="' + x(shown) + '" x2="' + x(shown) + '" y1="0" y2="' + H + '" stroke="var(--soft)" vector-effect="non-scaling-stroke"/>';
  }
  g.svg.innerHTML = out;
  const said = s => s.name + " " + g.format(shown ? (s.shown || s.value)(shown) : s.now(g.sample));
  const when = shown ? last.at - shown.at + " s ago" : "last 5 s";
  g.svg.setAttribute("aria-label", label + " over five minutes" + (last ? ", " + when + ": " + g.series.map(said).join(", ") : ": nothing yet"));
  g.box.querySelector("figcaption").innerHTML = !last ? "nothing yet"
    : g.series.map(s => "<span>" + key(s.colour) + esc(said(s)) + "</span>").join(" &ensp; ") + " &ensp; <span>" + when + "</span>";
}
function drawAll(sample) {
  for (const g of Object.values(graphs)) { g.points = sample.history; g.sample = sample; draw(g); }
}
async function poll() {
  try {
    const r = await fetch("api/live.json", { cache: "no-store" });
    if (!r.ok) throw new Error("status " + r.status);
    show(await r.json());
  } catch (e) {
    $("head").textContent = "the server does not answer (" + e.message + "); trying again";
  }
  setTimeout(poll, 1000);
}
