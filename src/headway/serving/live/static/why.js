// A request's explanation: its intervals as a strip, the causes with their shares, and its life line by line.
import { colourOf, count, make, seconds, shortName, theme } from "./format.js";

const COLOURS = {
  "own chunk": () => theme("short"), "own token": () => theme("accent"), "KV transfer": () => theme("transfer"),
  "under way": () => "#8d99a6", "no KV": () => "#CC79A7", relegated: () => "#8a6d1f", "computed again": () => "#7a5cc4", engine: () => theme("line"),
};
const WORDS = {
  "own chunk": "its own prefill", "own token": "its own decode", "KV transfer": "its KV on the way to another instance",
  "under way": "the iteration under way when it came", "no KV": "no free KV blocks",
  relegated: "given up for the time, so that others are in time", "computed again": "its KV was freed; others ran", engine: "no iteration ran",
};

const biggest = (one) => one.beside.reduce((most, each) => (each.tokens > most.tokens ? each : most), { request: "", tokens: 0 });
const cause = (one) => {
  if (one.cause === "own token" && one.beside.length) return `iterations with chunks of ${shortName(biggest(one).request)}`;
  if (one.cause !== "queued") return WORDS[one.cause] || one.cause;
  return one.beside.length ? `queued behind ${shortName(biggest(one).request)}` : "queued while only decodes ran";
};
const colour = (one) => (one.cause === "queued" || (one.cause === "own token" && one.beside.length) ? (one.beside.length ? colourOf(biggest(one).request) : theme("decode")) : COLOURS[one.cause]());

const words = (one) => {
  const beside = one.beside.slice(0, 3).map((each) => `${shortName(each.request)} (${count(each.tokens)})`);
  if (one.beside.length > 3) beside.push(`${one.beside.length - 3} more`);
  if (one.decodes) beside.push(`${one.decodes} decodes`);
  const others = beside.length ? `; beside ${beside.join(", ")}` : "";
  if (one.chunk) return `${count(one.chunk.tokens)} tokens from ${count(one.chunk.start)}, ${count(one.chunk.remaining)} left; bound by: ${one.chunk.limit}${others}`;
  return `${cause(one)}${others}${one.rule ? ` (${one.rule})` : ""}`;
};

const section = (title, intervals) => {
  const whole = intervals.reduce((sum, one) => sum + one.seconds, 0) || 1;
  const causes = new Map();
  for (const one of intervals) {
    const entry = causes.get(cause(one)) || { seconds: 0, colour: colour(one) };
    entry.seconds += one.seconds;
    causes.set(cause(one), entry);
  }
  const strip = make("div", { class: "strip", role: "img", "aria-label": title });
  for (const one of intervals) strip.append(make("i", { colour: colour(one), width: `${(100 * one.seconds) / whole}%`, title: `${seconds(one.seconds)}: ${words(one)}` }));
  const table = make("div", { class: "causes" });
  for (const [name, entry] of [...causes].sort((a, b) => b[1].seconds - a[1].seconds))
    table.append(make("i", { colour: entry.colour }), make("span", {}, name), make("span", {}, seconds(entry.seconds)), make("span", { class: "quiet" }, `${Math.round((100 * entry.seconds) / whole)}%`));
  return [make("h3", {}, title), strip, table];
};

const life = (intervals) => {
  const table = make("table", { class: "life" });
  for (const one of intervals.slice(0, 200))
    table.append(make("tr", {}, make("td", {}, `+${seconds(one.after_s)}`), make("td", {}, seconds(one.seconds)), make("td", {}, words(one))));
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
