// The page: asks for what is new twice a second, and draws it. For a log it has a clock of its own, which can be moved.
import { Charts } from "./charts.js";
import { colourOf, count, make, seconds, share, shortName, theme } from "./format.js";
import { Lanes } from "./lanes.js";
import { showWhy } from "./why.js";

const element = (id) => document.getElementById(id);
const state = { after: 0, bucket: 0, now: 0, read: 0, requests: [], chosen: null, span: null, playing: true, speed: 1, epoch: null, long: 8192 };
const lanes = new Lanes(element("lanes"), element("tip"), (id) => choose(id));
const charts = new Charts(element("charts"));

const time = () => {
  const passed = (performance.now() - state.read) / 1000;
  if (!state.span) return state.now + Math.min(passed, 3);
  return Math.min(state.span[1], state.now + (state.playing ? passed * state.speed : 0));
};

const ask = async (path) => {
  const key = sessionStorage.getItem("headway-key");
  const answer = await fetch(`../${path}`, { headers: key ? { Authorization: `Bearer ${key}` } : {} });
  if (answer.status === 401) { element("login").hidden = false; throw new Error("key"); }
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error ? body.error.message : `${answer.status}`);
  element("login").hidden = true;
  return body;
};

const forget = () => { state.after = 0; state.bucket = 0; lanes.reset(); charts.reset(); };

const update = async () => {
  const at = state.span ? `&at=${time().toFixed(4)}` : "";
  const told = await ask(`v1/live?after=${state.after}&bucket=${state.bucket}${at}`);
  if (state.epoch !== told.epoch) { const first = state.epoch === null; state.epoch = told.epoch; if (!first) { forget(); return; } }
  // A server's time is its own; a log's, once it is known, the page's.
  if (!state.span) { state.now = told.now_s; state.read = performance.now(); }
  if (told.span && !state.span) { state.span = told.span; element("player").hidden = false; }
  state.after = told.cursor; state.bucket = Math.max(0, told.bucket); state.requests = told.requests; state.long = told.long_tokens;
  lanes.long = told.long_tokens;
  lanes.add(told.blocks, told.transfers, told.now_s);
  lanes.arrange(told.instances);
  charts.add(told.history, told.now_s);
  charts.draw();
  header(told); tiles(told); legend(); rows(told);
  document.body.dataset.updates = String(Number(document.body.dataset.updates || 0) + 1);
};

const header = (told) => {
  element("title").textContent = told.title;
  const pill = element("state");
  pill.textContent = told.state; pill.className = `pill ${told.state}`;
  element("policy").textContent = told.policy ? `policy ${told.policy}` : "";
  document.title = `${told.waiting} waiting, ${told.running} running · Headway`;
};

const latest = (values) => { const known = values.filter((v) => v !== null); return known.length ? known.at(-1) : null; };

const tiles = (told) => {
  const minute = charts.recent(60), used = told.instances.reduce((sum, one) => sum + one.kv_used, 0);
  const total = told.instances.reduce((sum, one) => sum + one.kv_total, 0), kv = total ? used / total : null;
  const met = minute.reduce((sum, row) => sum + row[10], 0), missed = minute.reduce((sum, row) => sum + row[11], 0);
  const kept = met + missed ? met / (met + missed) : null;
  const rate = (place) => latest(charts.recent(12).slice(0, -1).map((row) => row[place]));
  const ttft = (kind, cut) => seconds(told.minute[`${kind}_ttft_${cut}_s`]);
  const shown = [
    [count(told.waiting), "wait for a first token", told.waiting > 20 ? "bad" : ""],
    [count(told.running), "decoding"],
    [ttft("short", "p50"), `short prompts' TTFT, P99\u00a0${ttft("short", "p99").replace(" ", "\u00a0")}`],
    [ttft("long", "p50"), `long prompts' TTFT, P99\u00a0${ttft("long", "p99").replace(" ", "\u00a0")}`],
    [seconds(told.minute.tbt_p99_s), "TBT, P99"],
    [share(kept), met + missed ? `of ${count(met + missed)} SLOs kept` : "SLOs: none asked", kept === null ? "" : kept < 0.9 ? "bad" : "good"],
    [`${count(rate(8))} + ${count(rate(9))}`, "tokens/s in + out"],
    [share(kv), total ? `KV: ${count(used)} of ${count(total)}` : "KV: not in the log", "", kv],
  ];
  element("tiles").title = "Latencies and SLOs of the last minute";
  element("tiles").replaceChildren(...shown.map(([value, words, kind, meter]) => {
    const tile = make("div", { class: "tile" }, make("b", { class: kind || "" }, value), make("span", {}, words));
    if (meter !== undefined && meter !== null) tile.append(make("div", { class: "meter" }, make("i", { width: `${100 * Math.min(1, meter)}%` })));
    return tile;
  }));
};

const legend = () => {
  const from = time() - lanes.window, longs = new Map();
  for (const one of lanes.blocks) if (one.end > from) for (const chunk of one.chunks) if (lanes.isLong(chunk)) longs.set(chunk[0], true);
  const chip = (colour, words) => make("span", {}, make("i", { colour }), words);
  element("legend").replaceChildren(
    chip(theme("decode"), "decodes"), chip(theme("short"), "short prompts"),
    ...[...longs.keys()].slice(-6).map((id) => chip(colourOf(id), `prompt of ${shortName(id)}`)),
    ...(lanes.transfers.length ? [chip(theme("transfer"), "KV transfer")] : []),
  );
};

const rows = (told) => {
  const early = told.requests.filter((one) => one.ttft_s === null && one.ended_s === null);
  const late = told.requests.filter((one) => one.ttft_s !== null || one.ended_s !== null);
  element("waiting-count").textContent = early.length ? `${told.waiting}, by arrival` : "";
  element("recent-count").textContent = `${told.running} decoding`;
  refresh(element("waiting"), early.slice(0, 60), waitingRow, "No request waits for its first token.");
  refresh(element("recent"), late.slice(0, 60), recentRow, "No request has a token yet.");
};

// Rows are made anew only where the pointer or the focus is not: a click must find what it was aimed at.
const refresh = (box, requests, row, none) => {
  if (box.matches(":active")) return;
  if (!requests.length) { box.replaceChildren(make("p", { class: "empty" }, none)); return; }
  const at = box.scrollTop, focus = box.contains(document.activeElement) ? document.activeElement.dataset.id : null;
  box.replaceChildren(...requests.map(row));
  box.scrollTop = at;
  if (focus !== null) for (const one of box.children) if (one.dataset.id === focus) one.focus({ preventScroll: true });
};

const named = (one) => make("span", { class: "name", title: one.id }, make("i", { colour: one.prompt > state.long ? colourOf(one.id) : theme("short") }), shortName(one.id));

const button = (one, ...children) => {
  const made = make("button", { type: "button", class: one.id === state.chosen ? "row on" : "row", "data-id": one.id }, ...children);
  made.addEventListener("click", () => choose(one.id));
  return made;
};

const waitingRow = (one) => {
  const now = time(), slack = one.due_s === null ? null : one.due_s - now - (one.work_s || 0);
  const whole = one.due_s === null ? 1 : Math.max(1e-6, one.due_s - one.arrival_s), part = slack === null ? 0 : Math.max(0, Math.min(1, slack / whole));
  const kind = slack === null ? "" : slack < 0 ? "bad" : part < 0.25 ? "warn" : "";
  const progress = one.computed ? `${count(one.computed)} of ${count(one.prompt)}` : `${count(one.prompt)} tokens`;
  const words = slack === null ? `waits ${seconds(now - one.arrival_s)}` : slack < 0 ? `late ${seconds(-slack)}` : `slack ${seconds(slack)}`;
  const bar = make("span", { class: "slack" }, make("i", { class: kind, width: `${100 * (slack !== null && slack < 0 ? 1 : part)}%` }));
  return button(one, named(one), make("span", { class: "num" }, progress), bar, make("span", { class: `num ${kind === "bad" ? "bad" : ""}` }, words));
};

const recentRow = (one) => {
  const end = one.ended_s === null ? "decoding" : one.reason, kept = one.met === null ? "" : one.met ? "good" : "bad";
  return button(
    one, named(one), make("span", { class: "num wide" }, `${count(one.prompt)} + ${count(one.output)}`),
    make("span", { class: `num ${kept}` }, `TTFT ${seconds(one.ttft_s)}`),
    make("span", { class: "num wide" }, one.worst_gap_s === null ? "" : `gap ${seconds(one.worst_gap_s)}`),
    make("span", { class: "num quiet" }, end),
  );
};

const choose = async (id) => {
  state.chosen = id;
  const body = element("why-body");
  element("why").hidden = false;
  body.replaceChildren(make("p", { class: "quiet" }, `Explaining ${shortName(id)} …`));
  try {
    const told = await ask(`v1/requests/${encodeURIComponent(id)}/why`);
    if (state.chosen === id) showWhy(body, told);
  } catch (error) {
    if (state.chosen === id) body.replaceChildren(make("h2", {}, id), make("p", {}, error.message));
  }
};

const seek = (at) => { state.now = at; state.read = performance.now(); };

element("close").addEventListener("click", () => { element("why").hidden = true; state.chosen = null; });
document.addEventListener("keydown", (event) => { if (event.key === "Escape") element("close").click(); });
element("login").addEventListener("submit", (event) => { event.preventDefault(); sessionStorage.setItem("headway-key", element("key").value); });
for (const one of element("windows").children) one.addEventListener("click", () => {
  lanes.window = Number(one.dataset.seconds);
  for (const other of element("windows").children) other.classList.toggle("on", other === one);
});
element("play").addEventListener("click", () => { seek(time()); state.playing = !state.playing; element("play").textContent = state.playing ? "Pause" : "Play"; });
element("speed").addEventListener("change", () => { seek(time()); state.speed = Number(element("speed").value); });
element("seek").addEventListener("input", () => { const [start, end] = state.span; seek(start + (Number(element("seek").value) / 1000) * (end - start)); });

const frame = () => {
  if (document.hidden) return;
  const now = time();
  lanes.draw(now);
  if (state.span) {
    const [start, end] = state.span;
    if (document.activeElement !== element("seek")) element("seek").value = String(Math.round((1000 * (now - start)) / (end - start || 1)));
    element("clock").textContent = `${(now - start).toFixed(1)} / ${(end - start).toFixed(0)} s`;
  }
};

const loop = async () => {
  for (;;) {
    try { if (!document.hidden) await update(); }
    catch (error) { element("state").textContent = error.message === "key" ? "needs a key" : "no answer"; element("state").className = "pill lost"; }
    await new Promise((done) => setTimeout(done, 500));
  }
};

setInterval(frame, 50);
loop();
