Object.assign(TERMS, {
  "CLWA: written to flash per byte written to the cache": "cache-level write amplification: bytes written to flash for each byte of lines that are filled or updated",
  "DLWA: NAND bytes per byte written": "device-level write amplification: bytes that the drive writes to its NAND for each byte that it is sent",
  "regions marked as written to": "regions of volumes whose lines are not believed after a power cut, since they were written to",
  "lines that did not match their checksum": "they were read from the volume instead",
  "floor": "lines of the volume up to this sum are not displaced by other volumes",
  "ceiling": "the volume takes no more of the cache than this",
  "dirty": "bytes of the volume that its store lacks: they are in the write log on the cache device",
  "of the log": "bytes of the write log that the volume holds, headers and overwritten bytes among them, and how many it may hold; from half of them on writes are slowed down",
  "mark in store": "name of the last consistency point that the store has, with all that was written before it",
  "oldest": "how long ago the oldest write was answered that the store lacks",
  "time left": "until the store has everything, at the rate of now",
  "generation": "it rises with each attach; the marker beside the store has it too",
  "metadata hits": "share of the reads of file-system metadata that hit",
});
graph("g-hit", [{ name: "hits", colour: "var(--a)", value: p => p.hits, now: d => d.hit_ratio, area: 1 }], pct, { atLeast: 1 });
graph("g-ops", [
  { name: "reads", colour: "var(--a)", value: p => p.reads, now: d => d.operations_per_second.reads, area: 1 },
  { name: "writes", colour: "var(--b)", value: p => p.writes, now: d => d.operations_per_second.writes }], x => num(x) + "/s");
graph("g-lat", [
  { name: "p99 hit", colour: "var(--a)", value: p => p.p99_hit, now: d => d.latency.hit.p99 },
  { name: "p99 miss", colour: "var(--b)", value: p => p.p99_miss, now: d => d.latency.miss.p99 },
  { name: "p99 write", colour: "var(--soft)", value: p => p.p99_write, now: d => d.latency.write.p99 }], us, { log: true });
graph("g-wr", [{ name: "written", colour: "var(--b)", value: p => p.flash_writes, now: d => d.flash_write_bytes_per_second, area: 1 }],
  x => bytes(x) + "/s", { binary: true });

function show(d) {
  const s = d.status, c = s.cache, f = s.flash;
  $("head").textContent = s.version + " · up " + span(s.uptime_seconds) + " · " + c.path + " · " + s.volumes.length +
    (s.volumes.length == 1 ? " volume · " : " volumes · ") + s.connections.open + " connections · " + d.cpu_cores.toFixed(2) + " cores";
  const alarms = $("alarms");
  alarms.style.display = s.alarms.length ? "block" : "none";
  const list = s.alarms.map(a => "<li>" + esc(a) + "</li>").join("");
  // Written only when it changes: a screen reader would say it again.
  if (alarms.dataset.shown !== list) { alarms.dataset.shown = list; alarms.querySelector("ul").innerHTML = list; }

  $("hit").textContent = pct(d.hit_ratio);
  $("hitbar").innerHTML = fill(d.hit_ratio || 0, "var(--a)");
  $("hitsub").textContent = "since start " + (s.hit_ratio == null ? "–" : pct(s.hit_ratio)) + " of reads answered without asking the store or waiting for it";
  const ops = d.operations_per_second;
  $("ops").innerHTML = num(ops.reads + ops.writes) + " <small>requests/s</small>";
  $("opssub").textContent = num(ops.reads) + " reads/s · " + num(ops.writes) + " writes/s";
  $("netsub").textContent = bytes(d.bytes_per_second.read) + "/s read · " + bytes(d.bytes_per_second.written) + "/s written";
  const row = (name, p) => [name, us(p.p50), us(p.p90), us(p.p99), us(p.p999), us(p.max)];
  table("lat", ["", "p50", "p90", "p99", "p99.9", "max"],
    [row("hit", d.latency.hit), row("miss", d.latency.miss), row("write", d.latency.write)]);

  $("wr").innerHTML = bytes(d.flash_write_bytes_per_second) + "<small>/s</small>";
  $("wrsub").textContent = bytes(f.bytes_written) + " since start, for " + bytes(f.client_bytes) + " written by clients and " +
    bytes(f.read_fill_bytes) + " brought by reads";
  $("budget").textContent = f.budget_bytes_per_second == null ? "no write budget"
    : "write budget " + bytes(f.budget_bytes_per_second) + "/s · " + bytes(f.budget_available_bytes) + " may be written now";
  const used = f.drive_used_percent, early = s.uptime_seconds < 3600, years = f.expected_life_years;
  // Filling an empty cache says nothing of what follows.
  $("life").innerHTML = years != null && !early ? (years > 99 ? "> 99" : years < .1 ? "< 0.1" : years.toFixed(1)) + " <small>years at the rate since start</small>"
    : used != null ? Math.max(0, 100 - used) + " % <small>left</small>" : "–";
  $("lifesub").textContent = used != null ? Math.max(0, 100 - used) + " % of the rated life left, as the drive reports"
    : years != null && early ? "shown after an hour: filling an empty cache is no measure of what follows"
    : years != null ? "the drive itself reports nothing"
    : f.budget_bytes_per_second != null ? "nothing written yet"
    : "unknown: --endurance-tbw or --endurance-dwpd tells what the drive endures, and sets a write budget";
  const ratio = x => x == null ? "–" : x.toFixed(3);
  const dlwa = f.drive_host_bytes && f.drive_nand_bytes ? f.drive_nand_bytes / f.drive_host_bytes : null;
  table("amp", null, [
    ["CLWA: written to flash per byte written to the cache", ratio(f.clwa)],
    ["DLWA: NAND bytes per byte written", dlwa == null ? "not reported" : ratio(dlwa)],
    ["errors of the cache device", num(f.errors)],
    ["lines that did not match their checksum", num(f.corrupt)]]);

  const backs = s.volumes.filter(v => v.write_back).length;
  $("full").innerHTML = c.given_up ? "out of use" : pct(c.slots ? c.lines / c.slots : 0) + " <small>full</small>";
  $("fullbar").innerHTML = fill(c.slots ? c.lines / c.slots : 0, "var(--a)");
  table("cache", null, [
    ["lines", num(c.lines) + " of " + num(c.slots)],
    ["capacity", bytes(c.slots * c.line_bytes) + " in lines of " + bytes(c.line_bytes)],
    ["placement", c.placement],
    ["replacement", c.replacement],
    ["writes", backs === 0 ? c.write : backs === s.volumes.length ? "writes back" : c.write + ", " + backs + " of " + s.volumes.length + " volumes write back"],
    ["at the start", c.warmth],
    ["regions marked as written to", num(c.regions_marked)],
    ["map in DRAM", bytes(c.map_bytes)]]);
  $("policy").textContent = "admission: " + c.admission;
  table("rej", null, Object.entries(s.verdicts).filter(r => r[1]).map(r => [words(r[0]), num(r[1])]), "no requests yet");

  table("vols", ["volume", "size", "cached", "floor", "ceiling", "hit ratio", "reads", "writes", "read", "written", "metadata hits", "clients", "rule", "store"],
    s.volumes.map(v => [v.name + (v.pass_through ? " (pass-through)" : ""), bytes(v.bytes), bytes(v.lines * c.line_bytes),
      v.floor ? bytes(v.floor * c.line_bytes) : "–", v.ceiling == null ? "–" : bytes(v.ceiling * c.line_bytes),
      v.reads ? pct(v.read_hits / v.reads) : "–", num(v.reads), num(v.writes), bytes(v.read_bytes), bytes(v.write_bytes),
      v.metadata_reads ? pct(v.metadata_hits / v.metadata_reads) : "–", v.clients,
      v.rule + (v.selected ? " + " + v.selected + " selected" : ""),
      v.store.state + (v.store.since_seconds == null ? "" : " for " + span(v.store.since_seconds))]), "no volumes");

  const back = s.volumes.filter(v => v.write_back);
  $("back").closest("section").hidden = !back.length;
  table("back", ["volume", "write-back", "dirty", "of the log", "oldest", "destaged/s", "time left", "mark in store", "stored up to write", "epoch", "generation", "state"],
    back.map(v => { const b = v.write_back; return [v.name, b.mode, bytes(b.dirty_bytes), bytes(b.held_bytes) + " of " + bytes(b.bound_bytes) + (b.stated_bytes != null && b.stated_bytes !== b.bound_bytes ? " (" + bytes(b.stated_bytes) + " stated)" : ""),
      b.oldest_seconds == null ? "–" : span(Math.round(b.oldest_seconds)), bytes(b.destage_bytes_per_second), b.seconds_left == null ? "–" : span(Math.round(b.seconds_left)), b.stored_mark ?? "–",
      b.frontier + " of " + b.acknowledged, b.epoch ?? "–", b.generation, (b.closed != null ? "closed: " + b.closed : b.shrunk ? "store shrunk, read-only"
      : ["lost", "shrunk", "moved"].includes(v.store.state) ? "store " + v.store.state : b.failures ? b.failures + " failures in a row" : b.slowed_for_budget ? "slowed" : v.store.state === "failing" ? "store failing" : "ok") + (b.fenced ? "" : ", unfenced")]; }), "no volumes");

  $("faces").closest("section").hidden = !s.faces.length;
  table("faces", ["address", "volume", "disk", "there", "size", "queues", "requests", "failed", "refused", "done again", "agreed on"],
    s.faces.map(f => [f.address, f.volume, f.device || f.face, f.connected ? "yes" : "no", f.connected ? bytes(f.bytes) : "–",
      f.connected ? f.queues + " of " + f.queue_size : "–", num(f.requests), num(f.failed), num(f.refused), num(f.resumed), f.features.join(" ")]), "no disks");

  const P = d.history;
  drawAll(d);
  table("past", ["second", "reads/s", "writes/s", "hits", "p99 hit", "p99 miss", "p99 write", "flash writes"],
    P.slice().reverse().map(p => [p.at, num(p.reads), num(p.writes), pct(p.hits), us(p.p99_hit), us(p.p99_miss), us(p.p99_write),
      bytes(p.flash_writes) + "/s"]), "nothing yet");
  table("counters", ["counter", "value"], Object.entries(s.counters));
}
poll();
