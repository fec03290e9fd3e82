"use strict";
// Draws each figure of the data as SVG. Hovering or arrow keys choose a point; dragging a frame or the buttons zoom;
// the legend hides and shows series.
const NS = "http://www.w3.org/2000/svg";
const LEFT = 76, RIGHT = 16, TOP = 12, BOTTOM = 46;
const el = (name, attributes, parent) => {
  const e = document.createElementNS(NS, name);
  for (const k in attributes) e.setAttribute(k, attributes[k]);
  if (parent) parent.append(e);
  return e;
};
const html = (name, properties, parent) => {
  const e = Object.assign(document.createElement(name), properties);
  if (parent) parent.append(e);
  return e;
};
const trim = (x, digits) => String(Number(x.toPrecision(digits)));
const scaled = (x, base, units) => {
  let i = 0, size = Math.abs(x);
  while (size >= base && i < units.length - 1) { x /= base; size /= base; i++; }
  return trim(x, 4) + units[i];
};
const write = {
  plain: x => Math.abs(x) >= 1e6 ? scaled(x, 1000, ["", " k", " M", " G", " T"]) : trim(x, 5),
  count: x => scaled(x, 1000, ["", " k", " M", " G", " T"]),
  ratio: x => trim(100 * x, 5) + " %",
  bytes: x => scaled(x, 1024, [" B", " KiB", " MiB", " GiB", " TiB", " PiB"]),
  seconds: x => x && Math.abs(x) < 1 ? scaled(x * 1e9, 1000, [" ns", " µs", " ms"]) : x < 3600 ? trim(x, 4) + " s"
    : x < 172800 ? trim(x / 3600, 4) + " h" : trim(x / 86400, 4) + " d",
};
const show = (axis, x) => write[axis.unit](x);

// The units in which a linear axis counts, each with its size, from small to large.
const POWERS = (base, names) => names.map((name, i) => [base ** i, name]);
const UNITS = {
  plain: [[1, ""], [1e6, " M"], [1e9, " G"], [1e12, " T"]],
  count: POWERS(1000, ["", " k", " M", " G", " T"]),
  ratio: [[.01, " %"]],
  bytes: POWERS(1024, [" B", " KiB", " MiB", " GiB", " TiB", " PiB"]),
  seconds: [[1e-9, " ns"], [1e-6, " µs"], [1e-3, " ms"], [1, " s"], [120, " min", 60], [7200, " h", 3600], [172800, " d", 86400]],
};
// The unit of an axis up to `most`: one for all of its numbers. The third of an entry is the size where the first only says
// from when it serves.
function unitOf(axis, most) {
  const all = UNITS[axis.unit], at = all.findLast(u => u[0] <= most) || all[0];
  return [at[2] || at[0], at[1]];
}
// Steps between a minute and a day, in seconds; others are 1, 2 or 5 times a power of ten. Quarters of the axis's unit at
// least: a third of an hour has no end of digits.
const CLOCK = [60, 120, 300, 600, 900, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

// The numbers that an axis names, about `count` of them, each with its text.
function ticks(axis, low, high, count) {
  if (axis.log) {
    const power = axis.unit === "bytes" ? 2 : 10, out = [];
    const a = Math.log(low) / Math.log(power), b = Math.log(high) / Math.log(power);
    if (b - a >= 1.5) {
      const step = Math.max(1, Math.ceil((b - a) / (1.5 * count)));
      for (let k = Math.ceil(a - 1e-9); k <= b + 1e-9; k += step) out.push(power ** k);
      if (power === 10 && b - a < 3)
        for (let k = Math.floor(a); k <= b; k++) for (const m of [2, 5]) out.push(m * 10 ** k);
      return out.filter(t => t >= low * (1 - 1e-9) && t <= high * (1 + 1e-9)).map(t => [t, show(axis, t)]);
    }
  }
  const [unit, name] = unitOf(axis, Math.max(Math.abs(low), Math.abs(high))), rough = (high - low) / count / unit;
  const ten = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].map(m => m * ten).find(s => s >= rough * (1 - 1e-9)) * unit;
  if (axis.unit === "seconds" && rough * unit > 30 && rough * unit <= 86400)
    step = CLOCK.find(s => s >= rough * unit && s % (unit / 4) === 0);
  const text = t => String(Number((t / unit).toPrecision(10))) + name;
  if (!(step > 0)) return [[low, show(axis, low)]];
  const out = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) out.push([k * step, text(k * step)]);
  return out;
}

// Marks differ in form too, not in colour alone.
const FORMS = [
  r => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`,
  r => `M${-r},${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
  r => `M0,${-1.3 * r}L${1.2 * r},${r}H${-1.2 * r}z`,
  r => `M0,${-1.4 * r}L${1.4 * r},0L0,${1.4 * r}L${-1.4 * r},0z`,
];
// One cache has one colour and one mark in every figure of the report; what differs in more has other forms and dashes.
const colour = s => `var(--c${s.mark % 16})`;
const round = s => Math.floor(s.mark / 16);
const form = (s, r) => FORMS[(s.mark + round(s) + 2 * s.variant) % FORMS.length](r);
const DASHES = ["none", "7 3", "2 3", "9 3 2 3"];
// Lines of one colour differ in their dashes: 32 of them, with their marks.
const dash = s => DASHES[(s.variant + round(s)) % DASHES.length];

function figure(box, plot) {
  // One unit is one pixel, so that text has its size on a narrow screen too.
  let W = 960, H = 420;
  const measure = () => {
    W = Math.max(300, Math.min(1440, Math.round(box.clientWidth) || 960));
    H = W < 600 ? 300 : 420;
    svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
  };
  const visible = plot.series.map(() => true);
  const usable = p => !(plot.x.log && p.x <= 0 || plot.y.log && p.y <= 0);
  let view = null, marks = [], chosen = -1;
  box.textContent = "";
  const svg = el("svg", { role: "img", tabindex: 0, "aria-label": plot.title }, box);
  const tip = html("div", { className: "tip", hidden: true }, box);
  const caption = html("figcaption", { textContent: "" }, box);
  const legend = html("div", { className: "legend" }, box);
  const tools = html("div", { className: "tools" }, box);
  const fwd = (axis, v) => axis.log ? Math.log(v) : v, back = (axis, v) => axis.log ? Math.exp(v) : v;

  function whole() {
    const xs = [], ys = [];
    plot.series.forEach((s, i) => visible[i] && s.points.filter(usable).forEach(p => {
      xs.push(fwd(plot.x, p.x));
      for (const y of p.range ? [p.y, ...p.range] : [p.y]) if (!(plot.y.log && y <= 0)) ys.push(fwd(plot.y, y));
    }));
    const span = values => {
      if (!values.length) return [0, 1];
      let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
      const pad = (high - low || Math.abs(high) || 1) * .06;
      return [low - pad, high + pad];
    };
    return { x: span(xs), y: span(ys) };
  }
  let now = null;
  const px = v => LEFT + (fwd(plot.x, v) - now.x[0]) / (now.x[1] - now.x[0]) * (W - LEFT - RIGHT);
  const py = v => H - BOTTOM - (fwd(plot.y, v) - now.y[0]) / (now.y[1] - now.y[0]) * (H - TOP - BOTTOM);

  function draw() {
    now = view || whole();
    svg.textContent = "";
    marks = [];
    choose(-1);
    const clip = "clip-" + box.id, defs = el("defs", {}, svg);
    el("rect", { x: LEFT, y: TOP, width: W - LEFT - RIGHT, height: H - TOP - BOTTOM }, el("clipPath", { id: clip }, defs));
    const across = Math.max(4, Math.min(8, (W - LEFT - RIGHT) / 110)), upward = H < 400 ? 5 : 6;
    for (const [t, text] of ticks(plot.x, back(plot.x, now.x[0]), back(plot.x, now.x[1]), across)) {
      el("line", { class: "grid", x1: px(t), x2: px(t), y1: TOP, y2: H - BOTTOM, "data-x": t }, svg);
      el("text", { x: px(t), y: H - BOTTOM + 17, "text-anchor": "middle", class: "tick-x" }, svg).textContent = text;
    }
    for (const [t, text] of ticks(plot.y, back(plot.y, now.y[0]), back(plot.y, now.y[1]), upward)) {
      el("line", { class: "grid", x1: LEFT, x2: W - RIGHT, y1: py(t), y2: py(t), "data-y": t }, svg);
      el("text", { x: LEFT - 6, y: py(t) + 4, "text-anchor": "end", class: "tick-y" }, svg).textContent = text;
    }
    el("text", { x: (LEFT + W - RIGHT) / 2, y: H - 6, "text-anchor": "middle" }, svg).textContent = plot.x.label;
    el("text", { x: 14, y: (TOP + H - BOTTOM) / 2, "text-anchor": "middle", transform: `rotate(-90 14 ${(TOP + H - BOTTOM) / 2})` }, svg)
      .textContent = plot.y.label;
    const inside = el("g", { "clip-path": `url(#${clip})` }, svg);
    plot.series.forEach((s, i) => {
      if (!visible[i]) return;
      const points = s.points.filter(usable);
      if (s.shape === "front") {
        let d = "";
        points.forEach((p, k) => d += k ? `H${px(p.x)}V${py(p.y)}` : `M${px(p.x)},${py(p.y)}`);
        if (d) el("path", { d: d + `H${W - RIGHT}`, fill: "none", stroke: "var(--soft)", "stroke-dasharray": "5 4" }, inside);
        return;
      }
      if (s.shape === "line" && points.length > 1)
        el("path", { d: "M" + points.map(p => px(p.x) + "," + py(p.y)).join("L"), fill: "none", stroke: colour(s), "stroke-width": 1.8,
          "stroke-dasharray": dash(s) }, inside);
      const r = points.length > 80 ? 1.6 : 4;
      for (const p of points) {
        if (p.range && p.range[1] > p.range[0])
          el("path", { d: `M${px(p.x)},${py(p.range[0])}V${py(p.range[1])}`, stroke: colour(s), "stroke-opacity": .6 }, inside);
        const at = [px(p.x), py(p.y)];
        const mark = el("path", { class: "mark", d: form(s, r), fill: colour(s), transform: `translate(${at[0]},${at[1]})`,
          "data-series": s.name, "data-x": p.x, "data-y": p.y }, inside);
        if (at[0] >= LEFT - 1 && at[0] <= W - RIGHT + 1 && at[1] >= TOP - 1 && at[1] <= H - BOTTOM + 1) marks.push({ mark, p, s, at });
      }
    });
  }

  function choose(k) {
    if (marks[chosen]) marks[chosen].mark.classList.remove("chosen");
    chosen = k;
    const m = marks[k];
    tip.hidden = !m;
    if (!m) { caption.textContent = ""; return; }
    m.mark.classList.add("chosen");
    const range = m.p.range && m.p.range[1] > m.p.range[0] ? ` (${show(plot.y, m.p.range[0])} to ${show(plot.y, m.p.range[1])})` : "";
    const lines = [m.s.name, m.p.label, `${plot.x.label}: ${show(plot.x, m.p.x)}`, `${plot.y.label}: ${show(plot.y, m.p.y)}${range}`];
    tip.textContent = lines.filter(l => l).join("\n");
    caption.textContent = lines.filter(l => l).join(" · ");
    const scale = svg.clientWidth / W || 1;
    tip.style.left = Math.min(m.at[0] * scale + 12, Math.max(0, svg.clientWidth - tip.offsetWidth - 4)) + "px";
    tip.style.top = Math.max(0, m.at[1] * scale - tip.offsetHeight - 10) + "px";
  }

  function place(event) {
    const r = svg.getBoundingClientRect();
    return [(event.clientX - r.left) * W / r.width, (event.clientY - r.top) * H / r.height];
  }
  function nearest([x, y]) {
    let best = -1, least = 60 ** 2;
    marks.forEach((m, k) => {
      const d = (m.at[0] - x) ** 2 + (m.at[1] - y) ** 2;
      if (d < least) { least = d; best = k; }
    });
    return best;
  }
  const within = ([x, y]) => [Math.min(W - RIGHT, Math.max(LEFT, x)), Math.min(H - BOTTOM, Math.max(TOP, y))];
  const value = ([x, y]) => [
    now.x[0] + (x - LEFT) / (W - LEFT - RIGHT) * (now.x[1] - now.x[0]),
    now.y[0] + (H - BOTTOM - y) / (H - TOP - BOTTOM) * (now.y[1] - now.y[0]),
  ];
  let from = null, frame = null;
  svg.addEventListener("pointerdown", e => { if (e.button === 0) { from = within(place(e)); svg.setPointerCapture(e.pointerId); } });
  svg.addEventListener("pointermove", e => {
    if (!from) { choose(nearest(place(e))); return; }
    const to = within(place(e));
    if (!frame) { choose(-1); frame = el("rect", { class: "select" }, svg); }
    for (const [k, v] of Object.entries({ x: Math.min(from[0], to[0]), y: Math.min(from[1], to[1]),
      width: Math.abs(to[0] - from[0]), height: Math.abs(to[1] - from[1]) })) frame.setAttribute(k, v);
  });
  svg.addEventListener("pointerup", e => {
    const start = from, to = within(place(e));
    if (frame) frame.remove();
    from = frame = null;
    if (start && Math.abs(start[0] - to[0]) > 8 && Math.abs(start[1] - to[1]) > 8) {
      const a = value(start), b = value(to);
      view = { x: [Math.min(a[0], b[0]), Math.max(a[0], b[0])], y: [Math.min(a[1], b[1]), Math.max(a[1], b[1])] };
      draw();
    } else choose(nearest(to));
  });
  svg.addEventListener("pointercancel", () => { if (frame) frame.remove(); from = frame = null; });
  svg.addEventListener("pointerleave", () => { if (!from) choose(-1); });
  svg.addEventListener("dblclick", () => { view = null; draw(); });
  svg.addEventListener("keydown", e => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
    if (step && marks.length) { e.preventDefault(); choose(((chosen < 0 ? (step > 0 ? -1 : 0) : chosen) + step + marks.length) % marks.length); }
    else if (e.key === "+") zoom(.7);
    else if (e.key === "-") zoom(1 / .7);
    else if (e.key === "Escape") { view = null; draw(); }
  });
  function zoom(by) {
    const around = ([a, b]) => { const m = (a + b) / 2, h = (b - a) / 2 * by; return [m - h, m + h]; };
    view = { x: around(now.x), y: around(now.y) };
    draw();
  }
  const button = (text, title, run) => html("button", { type: "button", textContent: text, title, onclick: run }, tools);
  button("+", "Zoom in (or drag a frame)", () => zoom(.7));
  button("−", "Zoom out", () => zoom(1 / .7));
  button("whole", "Show everything (or double-click)", () => { view = null; draw(); });
  button("log x", "Logarithmic or linear axis across", () => { plot.x.log = !plot.x.log; view = null; draw(); });
  button("log y", "Logarithmic or linear axis upward", () => { plot.y.log = !plot.y.log; view = null; draw(); });
  plot.series.forEach((s, i) => {
    const b = html("button", { type: "button" }, legend);
    b.setAttribute("aria-pressed", "true");
    const line = s.shape === "line";
    const key = el("svg", line ? { viewBox: "-16 -7 32 14", class: "wide" } : { viewBox: "-7 -7 14 14" }, b);
    if (line) el("path", { d: "M-16,0H16", stroke: colour(s), "stroke-width": 1.8, "stroke-dasharray": dash(s), "data-series": s.name }, key);
    if (s.shape === "front") el("path", { d: "M-7,0H7", stroke: "var(--soft)", "stroke-dasharray": "3 2" }, key);
    else el("path", { d: form(s, 4.5), fill: colour(s) }, key);
    b.append(s.name);
    b.onclick = () => { visible[i] = !visible[i]; b.setAttribute("aria-pressed", visible[i]); draw(); };
  });
  measure();
  draw();
  new ResizeObserver(() => { const w = W; measure(); if (W !== w) draw(); }).observe(box);
}

JSON.parse(document.getElementById("data").textContent).forEach((plot, i) => figure(document.getElementById("plot-" + i), plot));

// A click on a column's name sorts by it; another turns the order round.
for (const th of document.querySelectorAll(".data th")) {
  th.onclick = () => {
    const body = th.closest("table").tBodies[0], at = [...th.parentNode.children].indexOf(th);
    const up = th.getAttribute("aria-sort") !== "ascending";
    for (const other of th.parentNode.children) other.removeAttribute("aria-sort");
    th.setAttribute("aria-sort", up ? "ascending" : "descending");
    // A number is written short; its title has all digits.
    const key = tr => tr.children[at].title || tr.children[at].textContent;
    const order = (a, b) => { const x = key(a), y = key(b); return x !== "" && y !== "" && !isNaN(x) && !isNaN(y) ? x - y : x.localeCompare(y); };
    body.append(...[...body.rows].sort((a, b) => up ? order(a, b) : order(b, a)));
  };
}
