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
function table(id, head, rows, none) {
  const line = (cells, tag, scope) => "<tr>" + cells.map(c => "<" + tag + scope + ">" + esc(c) + "</" + tag + ">").join("") + "</tr>";
  $(id).innerHTML = rows.length
    ? (head ? line(head, "th", ' scope="col"') : "") + rows.map(r => line(r, "td", "")).join("")
    : '<tr><td class="none">' + esc(none) + "</td></tr>";
}

// A graph of the last five minutes. Pointer and arrow keys choose a second, whose numbers stand below.
const PAST = 300, W = 600, H = 100, TOP = 6, graphs = {};
function graph(id, series, format, atLeast) {
  const box = $(id);
  box.innerHTML = '<div class="scale"><span></span></div><svg tabindex="0" role="img" preserveAspectRatio="none" viewBox="0 0 ' + W + " " + H +
    '"></svg><div class="scale"><span>5 min ago</span><span>now</span></div><figcaption></figcaption>';
  const g = graphs[id] = { box, svg: box.querySelector("svg"), series, format, atLeast, chosen: null, points: [] };
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
function draw(g) {
  const P = g.points, last = P.at(-1), label = g.box.dataset.label;
  let max = g.atLeast || 0;
  for (const p of P) for (const s of g.series) max = Math.max(max, s.value(p));
  if (!max) max = 1;
  g.box.querySelector(".scale span").textContent = P.length ? "up to " + g.format(max) : "";
  const x = p => (W * (1 - (last.at - p.at) / PAST)).toFixed(1), y = v => (H - (H - TOP) * Math.min(v / max, 1)).toFixed(1);
  let shown = last;
  if (g.chosen != null && last) shown = P.reduce((best, p) => Math.abs(p.at - g.chosen) < Math.abs(best.at - g.chosen) ? p : best, last);
  let out = "";
  if (last) {
    // The first lies on top.
    for (const s of g.series.slice().reverse()) {
      const line = P.map(p => x(p) + "," + y(s.value(p))).join(" ");
      if (s.area) out += '<polygon points="' + x(P[0]) + "," + H + " " + line + " " + W + "," + H + '" fill="' + s.colour + '" opacity=".16"/>';
      out += '<polyline points="' + line + '" fill="none" stroke="' + s.colour + '" stroke-width="1.5" stroke-linejoin="round" vector-effect="non-scaling-stroke"/>';
    }
    if (g.chosen != null) out += '<line x1="' + x(shown) + '" x2="' + x(shown) + '" y1="0" y2="' + H + '" stroke="var(--soft)" vector-effect="non-scaling-stroke"/>';
  }
  g.svg.innerHTML = out;
  const text = shown ? g.series.map(s => s.name + " " + g.format((s.shown || s.value)(shown))).join(", ") : "nothing yet";
  g.svg.setAttribute("aria-label", label + " over five minutes: " + text);
  g.box.querySelector("figcaption").innerHTML = !shown ? "nothing yet"
    : g.series.map(s => key(s.colour) + esc(s.name + " " + g.format((s.shown || s.value)(shown)))).join(" &ensp; ") +
      (g.chosen != null ? " &ensp; " + (last.at - shown.at) + " s ago" : "");
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
