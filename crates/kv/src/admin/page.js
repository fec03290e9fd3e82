Object.assign(TERMS, {
  "CLWA: written to flash per byte stored": "cache-level write amplification: bytes that the cache writes to flash for each byte that clients store",
  "DLWA: NAND bytes per byte written": "device-level write amplification: bytes that the drive writes to its NAND for each byte that it is sent",
  "WA: both together": "write amplification: NAND bytes for each byte that clients store",
  "ghosts on flash": "objects on flash that are dropped with their segment unless they are read before",
  "left with their segment": "objects that were dropped when their segment of flash was written anew",
  "reads per hit on flash": "1 is best; more where a read met another key's record",
  "of another key": "reads of flash that met another key's record",
  "forced out of the index": "objects on flash that the index had no room for",
  "model": "how often the application's classifier has been trained",
  "precision": "of the objects that the model called worth writing, the share that was read again",
  "recall": "of the objects that were read again, the share that the model had called worth writing",
  "unread writes": "share of what was written to flash that was never read there",
});
// Rates and shares without a request behind them are not zero: there is nothing to show.
const some = (x, of) => of ? x : null;
graph("g-hit", [
  { name: "DRAM", colour: "var(--a)", value: p => p.dram, now: d => some(d.hit_ratio.dram, d.hit_ratio.reads), area: 1 },
  { name: "flash", colour: "var(--b)", value: p => p.dram == null ? null : p.dram + p.flash, shown: p => p.flash,
    now: d => some(d.hit_ratio.flash, d.hit_ratio.reads), area: 1 }], pct, { atLeast: 1 });
graph("g-req", [{ name: "requests", colour: "var(--a)", value: p => p.requests, now: d => d.requests_per_second, area: 1 }], x => num(x) + "/s");
graph("g-lat", [
  { name: "p99 DRAM", colour: "var(--a)", value: p => p.p99_dram, now: d => d.latency_dram.p99 },
  { name: "p99 flash", colour: "var(--b)", value: p => p.p99_flash, now: d => d.latency_flash.p99 }], us, { log: true });
graph("g-wr", [{ name: "written", colour: "var(--b)", value: p => p.flash_writes, now: d => d.flash_write_bytes_per_second, area: 1 }],
  x => bytes(x) + "/s", { binary: true });

function show(d) {
  const s = d.store, f = s.flash, h = d.hit_ratio, t = d.hit_ratio_total;
  $("head").textContent = d.version + " · up " + span(d.uptime_seconds) + " · " + d.connections[0] + " of " + d.connections[1] +
    " connections · " + d.cpu_cores.toFixed(2) + " cores";
  const alarms = $("alarms");
  alarms.style.display = d.alarms.length ? "block" : "none";
  const list = d.alarms.map(a => "<li>" + esc(a) + "</li>").join("");
  // Written only when it changes: a screen reader would say it again.
  if (alarms.dataset.shown !== list) { alarms.dataset.shown = list; alarms.querySelector("ul").innerHTML = list; }

  $("hit").textContent = h.reads ? pct(h.dram + h.flash) : "no reads";
  $("hitbar").innerHTML = fill(h.dram, "var(--a)") + fill(h.flash, "var(--b)");
  $("hitsub").innerHTML = key("var(--a)") + "DRAM " + (h.reads ? pct(h.dram) : "–") + " &ensp; " + key("var(--b)") + "flash " +
    (h.reads ? pct(h.flash) : "–") + " &ensp; since start " + (t.reads ? pct(t.dram + t.flash) : "–");
  $("req").innerHTML = num(d.requests_per_second) + " <small>requests/s</small>";
  $("reqsub").textContent = num(d.gets_per_second) + " gets/s · " + num(d.sets_per_second) + " sets/s";
  $("netsub").textContent = bytes(d.network_bytes_per_second[0]) + "/s in · " + bytes(d.network_bytes_per_second[1]) + "/s out";
  const row = (name, p) => [name, us(p.p50), us(p.p90), us(p.p99), us(p.p999), us(p.max)];
  table("lat", ["", "p50", "p90", "p99", "p99.9", "max"], [row("DRAM", d.latency_dram), row("flash", d.latency_flash)]);

  $("wr").innerHTML = f ? bytes(d.flash_write_bytes_per_second) + "<small>/s</small>" : "no flash";
  $("wrsub").textContent = f ? bytes(f.bytes_written) + " since start, for " + bytes(s.client_bytes) + " that clients stored" : "started with --flash none: DRAM alone";
  $("budget").textContent = !f ? "" : f.budget_bytes_per_second == null ? "no write budget"
    : "write budget " + bytes(f.budget_bytes_per_second) + "/s · " + bytes(f.budget_available_bytes) + " may be written now";

  const used = f && f.drive_used_percent;
  let life = "–", lifesub = "no flash";
  if (f) {
    // Filling an empty flash says nothing of what follows.
    const early = d.uptime_seconds < 3600;
    if (f.expected_life_years != null && !early) life = (f.expected_life_years > 99 ? "> 99" : f.expected_life_years < .1 ? "< 0.1" : f.expected_life_years.toFixed(1)) + " <small>years at the rate since start</small>";
    else if (used != null) life = Math.max(0, 100 - used) + " % <small>left</small>";
    lifesub = used != null ? Math.max(0, 100 - used) + " % of the rated life left, as the drive reports"
      : f.expected_life_years != null && early ? "shown after an hour: filling an empty flash is no measure of what follows"
      : f.expected_life_years != null ? "the drive itself reports nothing"
      : f.budget_bytes_per_second != null ? "nothing written yet"
      : "unknown: --endurance-tbw or --endurance-dwpd tells what the drive endures, and sets a write budget";
  }
  $("life").innerHTML = life;
  $("lifesub").textContent = lifesub;
  $("lifebar").style.display = used != null ? "" : "none";
  if (used != null) $("lifebar").innerHTML = fill(1 - used / 100, used > 80 ? "var(--bad)" : "var(--ok)");
  const ratio = x => x == null ? "–" : x.toFixed(3);
  table("amp", null, f ? [
    ["CLWA: written to flash per byte stored", ratio(d.clwa)],
    ["DLWA: NAND bytes per byte written", d.dlwa == null ? "not reported" : ratio(d.dlwa)],
    ["WA: both together", d.clwa == null || d.dlwa == null ? "–" : ratio(d.clwa * d.dlwa)]] : [], "no flash");

  const rows = [["in DRAM", num(s.dram_items), bytes(s.dram_bytes)]];
  if (f) rows.push(["on flash", num(f.items), bytes(f.used_bytes)],
    ["ghosts on flash", num(f.ghosts), ""],
    ["left with their segment", num(f.objects_dropped), ""],
    ["of these never read", num(f.objects_dropped_unread), f.objects_dropped ? pct(f.objects_dropped_unread / f.objects_dropped) : ""]);
  rows.push(["evicted from DRAM", num(s.evictions), ""]);
  if (f) rows.push(["of these unjudged, or wanted on flash", num(s.evicted_unjudged), s.evictions ? pct(s.evicted_unjudged / s.evictions) : ""]);
  rows.push(["expired", num(s.reclaimed), ""]);
  table("obj", null, rows);
  const hits = d.counters.find(c => c[0] === "get_flash_hits");
  table("work", null, (f ? [
    ["segments used", num(f.segments_used) + " of " + num(f.segments)],
    ["capacity", bytes(f.capacity_bytes)],
    ["reads for requests", num(f.reads)],
    ["reads per hit on flash", hits && hits[1] ? (f.reads / hits[1]).toFixed(3) : "–"],
    ["of another key", num(f.false_reads)],
    ["forced out of the index", num(f.forced_evictions)],
    ["errors: read, write, checksum", num(f.read_errors) + ", " + num(f.write_errors) + ", " + num(f.checksum_errors)]] : [])
    .concat([["waits for a shard's lock", num(s.lock_waits)]]));

  const drives = f ? f.drives : [];
  $("several").hidden = !drives.length;
  table("drives", ["drive", "state", "capacity", "used", "written", "write budget", "may be written now", "life", "errors: read, write"],
    drives.map(v => [v.path, v.degraded ? "writes fail" : "in use", bytes(v.capacity_bytes), bytes(v.used_bytes), bytes(v.bytes_written),
      v.budget_bytes_per_second == null ? "none" : bytes(v.budget_bytes_per_second) + "/s",
      v.budget_available_bytes == null ? "–" : bytes(v.budget_available_bytes),
      v.used_percent != null ? Math.max(0, 100 - v.used_percent) + " % left" : v.expected_life_years != null && d.uptime_seconds >= 3600 ? v.expected_life_years.toFixed(1) + " years" : "–",
      num(v.read_errors) + ", " + num(v.write_errors)]), "one drive");

  const counted = s.memory.reduce((sum, m) => sum + m[1], 0);
  $("rss").innerHTML = bytes(counted) + " <small>of " + bytes(s.memory_limit) + "</small>";
  $("memsub").textContent = bytes(d.resident_bytes) + " resident with the program, buffers and threads";
  table("mem", null, d.memory.map(m => [words(m[0]), bytes(m[1])]), "nothing yet");
  const learns = f && f.admission.startsWith("flashiness");
  const tuned = f && f.tuning;
  $("policy").textContent = !f ? "" : "admission: " + f.admission + (!tuned ? "" : "; asks " + tuned.thrift.toFixed(2) + " times its settings (" +
    words(tuned.reason) + (tuned.gain > 0 ? ", another would miss " + pct(tuned.gain) + " less" : "") + ")");
  table("rej", null, f ? f.rejected.filter(r => r[1]).map(r => [words(r[0]), num(r[1])]) : [], f ? "nothing yet" : "no flash");
  table("apps", ["application", "hit ratio", "gets", "sets", "DRAM", "flash", "model", "precision", "recall", "unread writes"],
    d.applications.map(a => [a.name, a.gets ? pct(a.hit_ratio) : "–", num(a.gets), num(a.sets), bytes(a.dram_bytes), bytes(a.flash_bytes),
      a.model || (learns ? "none yet" : "not used"), pct(a.precision), pct(a.recall), pct(a.unread_writes)]), "no requests yet");

  const P = d.history;
  drawAll(d);
  table("past", ["second", "requests/s", "hits DRAM", "hits flash", "p99 DRAM", "p99 flash", "flash writes"],
    P.slice().reverse().map(p => [p.at, num(p.requests), pct(p.dram), pct(p.flash), us(p.p99_dram), us(p.p99_flash), bytes(p.flash_writes) + "/s"]), "nothing yet");
  const all = d.counters.slice();
  for (const [name, value] of Object.entries(s)) if (typeof value === "number") all.push(["store " + name, value]);
  if (f) for (const [name, value] of Object.entries(f)) if (typeof value === "number") all.push(["flash " + name, value]);
  table("counters", ["counter", "value"], all.map(c => [c[0], c[1]]));
}
poll();
