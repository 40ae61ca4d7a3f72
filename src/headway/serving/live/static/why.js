// A request's explanation: its intervals as a strip, the causes with their shares, and its life line by line.
import { colourOf, count, make, seconds, shortName, theme } from "./format.js";

const COLOURS = {
  "own chunk": () => theme("short"), "own token": () => theme("accent"), "KV transfer": () => theme("transfer"),
  "under way": () => "#8d99a6", "no KV": () => "#CC79A7", "computed again": () => "#7a5cc4", engine: () => theme("line"),
};
const WORDS = {
  "own chunk": "its own prefill", "own token": "its own decode", "KV transfer": "its KV on the way to another instance",
  "under way": "the iteration under way when it came", "no KV": "no free KV blocks",
  "computed again": "its KV was freed; others ran", engine: "no iteration ran",
};

const biggest = (one) => one.beside.reduce((most, each) => (each.tokens > most.tokens ? each : most), { request: "", tokens: 0 });
const cause = (one) => {
  if (one.cause === "own token" && one.beside.length) return `iterations with chunks of ${shortName(biggest(one).request)}`;
  if (one.cause !== "queued") return WORDS[one.cause] || one.cause;
  return one.beside.length ? `queued behind ${shortName(biggest(one).request)}` : "queued while only decodes ran";
};
const colour = (one) => (one.cause === "queued" || (one.cause === "own token" && one.beside.length) ? (one.beside.length ? colourOf(biggest(one).request) : theme("decode")) : COLOURS[one.cause]());

const decodes = (n) => `${n} decode${n === 1 ? "" : "s"}`;
const words = (one, chunks = one.chunk ? [one.chunk] : []) => {
  const name = one.chunk ? "" : biggest(one).request;
  const others = one.beside.filter((each) => each.request !== name);
  const beside = others.slice(0, 3).map((each) => `${shortName(each.request)} (${count(each.tokens)})`);
  if (others.length > 3) beside.push(`${others.length - 3} more`);
  if (one.decodes) beside.push(decodes(one.decodes));
  const tail = beside.length ? `; beside ${beside.join(", ")}` : "";
  if (!chunks.length) return `${cause(one)}${tail}${one.rule ? ` (${one.rule})` : ""}`;
  const tokens = chunks.reduce((sum, chunk) => sum + chunk.tokens, 0), many = chunks.length > 1 ? `${chunks.length} chunks, ` : "";
  return `${many}${count(tokens)} tokens from ${count(chunks[0].start)}, ${count(chunks[0].remaining)} left; bound by: ${one.chunk.limit}${chunks.length > 1 ? "" : tail}`;
};

// Causes with their seconds, the longest first. Of many that are under a hundredth of the whole, one line is made.
const LEAST = 0.01, FEW = 3;
const summed = (intervals, whole) => {
  const causes = new Map();
  for (const one of intervals) {
    const entry = causes.get(cause(one)) || { name: cause(one), queued: one.cause === "queued", seconds: 0, colour: colour(one) };
    entry.seconds += one.seconds;
    causes.set(entry.name, entry);
  }
  const all = [...causes.values()].sort((a, b) => b.seconds - a.seconds);
  const small = all.filter((one) => one.queued && one.seconds < LEAST * whole);
  if (small.length <= FEW) return all;
  const seconds = small.reduce((sum, one) => sum + one.seconds, 0);
  const rest = { name: `queued behind ${small.length} other requests`, seconds, colour: theme("quiet") };
  return [...all.filter((one) => !small.includes(one)), rest].sort((a, b) => b.seconds - a.seconds);
};

const percent = (part) => (part > 0 && part < 0.005 ? "<1%" : `${Math.round(100 * part)}%`);

const section = (title, intervals) => {
  const whole = intervals.reduce((sum, one) => sum + one.seconds, 0) || 1;
  const strip = make("div", { class: "strip", role: "img", "aria-label": title });
  for (const one of intervals) strip.append(make("i", { colour: colour(one), width: `${(100 * one.seconds) / whole}%`, title: `${seconds(one.seconds)}: ${words(one)}` }));
  const table = make("div", { class: "causes" });
  for (const one of summed(intervals, whole))
    table.append(make("i", { colour: one.colour }), make("span", {}, one.name), make("span", { class: "num" }, seconds(one.seconds)), make("span", { class: "num quiet" }, percent(one.seconds / whole)));
  return [make("h3", {}, title), strip, table];
};

// One line for intervals in a row of the same kind.
const runs = (intervals) => {
  const made = [];
  for (const one of intervals) {
    const key = one.chunk ? `chunk ${one.chunk.limit}` : `${cause(one)} ${one.rule || ""}`, last = made.at(-1);
    if (last && last.key === key) { last.seconds += one.seconds; last.count += 1; if (one.chunk) last.chunks.push(one.chunk); }
    else made.push({ key, one, seconds: one.seconds, count: 1, chunks: one.chunk ? [one.chunk] : [] });
  }
  return made;
};

const life = (intervals) => {
  const table = make("table", { class: "life" }), all = runs(intervals);
  for (const { one, seconds: whole, count: many, chunks } of all.slice(0, 200)) {
    const times = many > 1 && !chunks.length ? `${many} iterations: ` : "";
    table.append(make("tr", {}, make("td", {}, `+${seconds(one.after_s)}`), make("td", {}, seconds(whole)), make("td", {}, times + words(one, chunks))));
  }
  if (all.length > 200) table.append(make("tr", {}, make("td", { colspan: "3" }, `${all.length - 200} more`)));
  return table;
};

export const showWhy = (body, told) => {
  const first = told.ttft_s === null ? `No first token yet: ${told.error}` : `First token after ${seconds(told.ttft_s)}`;
  body.replaceChildren(
    make("h2", {}, told.request),
    make("p", { class: "quiet" }, `${count(told.prompt_tokens)} prompt tokens, ${count(told.output_tokens)} of output, policy ${told.policy}`),
    ...section(first, told.intervals),
    ...(told.worst_gap.length ? section(`Worst gap between tokens: ${seconds(told.worst_gap_s)}`, told.worst_gap) : []),
    make("h3", {}, "From its arrival"),
    life(told.intervals),
  );
};
