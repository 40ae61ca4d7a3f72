// Charts of the last minutes: latencies, KV in use and queue, throughput. A row of the history is
// [start, ttft p50, ttft p99, tbt p50, tbt p99, kv share, waiting, running, prefill rate, decode rate, met, missed].
import { count, make, seconds, share, theme, tick } from "./format.js";

const KINDS = [
  { title: "Time to first token", unit: seconds, series: [["median", 1, "accent"], ["P99", 2, "bad"]] },
  { title: "Time between tokens", unit: seconds, series: [["median", 3, "accent"], ["P99", 4, "bad"]] },
  { title: "Requests and KV in use", unit: count, series: [["waiting", 6, "bad"], ["running", 7, "accent"], ["KV", 5, "short", share]] },
  { title: "Tokens a second", unit: count, series: [["prompt", 8, "warn"], ["output", 9, "accent"]] },
];

// The values of a column: null where there was none for a while, which ends the line, undefined in shorter pauses.
const column = (rows, place) => {
  let last = -Infinity;
  return rows.map((row) => {
    if (row[place] === null) return row[0] - last > 10 ? null : undefined;
    last = row[0];
    return row[place];
  });
};

const decades = (_, __, low, high) => [-4, -3, -2, -1, 0, 1, 2, 3, 4].flatMap((n) => [10 ** n, 3 * 10 ** n]).filter((v) => v >= low && v <= high);

export class Charts {
  constructor(box) { this.box = box; this.rows = new Map(); this.made = []; this.now = 0; }

  reset() { this.rows.clear(); }

  add(rows, now) {
    this.now = now;
    for (const row of rows) this.rows.set(row[0], row);
    for (const start of this.rows.keys()) if (start < now - 900) this.rows.delete(start);
  }

  recent(span) { return [...this.rows.values()].filter((row) => row[0] > this.now - span); }

  draw() {
    if (!this.made.length) this.build();
    const rows = [...this.rows.values()].sort((a, b) => a[0] - b[0]);
    for (const { kind, plot } of this.made) {
      // Rates of the newest row are not known before it ends.
      const columns = kind.series.map(([, place]) => column(rows, place).map((value, i) => (place >= 8 && i === rows.length - 1 ? undefined : value)));
      plot.setData([rows.map((row) => row[0] - this.now), ...columns]);
      // Values of now, unless the pointer asks for others.
      if (plot.cursor.idx === null || plot.cursor.idx === undefined) plot.setLegend({ idx: columns[0].findLastIndex((value) => value !== null && value !== undefined) });
    }
  }

  build() {
    for (const kind of KINDS) {
      const card = make("div", { class: "card" }, make("h2", {}, kind.title));
      this.box.append(card);
      const axis = { stroke: () => theme("quiet"), grid: { stroke: () => theme("line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
      const back = (t) => { const ago = -t; return ago < 90 ? `−${Math.round(ago)} s` : `−${(ago / 60).toFixed(ago < 600 ? 1 : 0)} m`; };
      const options = {
        width: card.clientWidth - 30, height: 190, cursor: { y: false, drag: { x: false, y: false } },
        scales: { x: { time: false }, y: kind.unit === seconds ? { distr: 3 } : { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] }, part: { range: [0, 1] } },
        axes: [
          { ...axis, values: (_, ticks) => ticks.map(back), space: 56, size: 30 },
          { ...axis, values: (_, ticks) => ticks.map(kind.unit === seconds ? tick : kind.unit), size: 58, ...(kind.unit === seconds ? { splits: decades, filter: (_, ticks) => ticks } : {}) },
          ...(kind.series.some((one) => one[3]) ? [{ ...axis, scale: "part", side: 1, grid: { show: false }, values: (_, ticks) => ticks.map(share), splits: () => [0, 0.5, 1], size: 44 }] : []),
        ],
        legend: { markers: { fill: (_, i) => (i > 0 ? theme(kind.series[i - 1][2]) : "") } },
        series: [{ label: "time", value: (_, t) => (t === null ? "" : back(t)) }, ...kind.series.map(([label, , colour, unit]) => ({
          label, stroke: () => theme(colour), width: 1.8, scale: unit ? "part" : "y", points: { show: false },
          value: (_, v) => (v === null || v === undefined ? "–" : (unit || kind.unit)(v)),
        }))],
      };
      const plot = new uPlot(options, [[], ...kind.series.map(() => [])], card);
      this.made.push({ kind, plot, card });
    }
    new ResizeObserver(() => { for (const { plot, card } of this.made) plot.setSize({ width: card.clientWidth - 30, height: 190 }); }).observe(this.box);
  }
}
