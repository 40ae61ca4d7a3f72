// Charts of a report: data from the page, helpers of format.js, drawn by uPlot.
const page = JSON.parse(document.getElementById("data").textContent);
const plain = (value) => (Math.abs(value) >= 1e4 ? count(value) : `${Number(value.toPrecision(3))}`);
const percent = (value) => `${Number((100 * value).toFixed(1))}%`;
const UNITS = { seconds: [seconds, tick], share: [percent, percent], number: [plain, plain] };

// 1, 3, 10, 30, … of a logarithmic axis; of many decades only each tenfold.
const decades = (_, __, low, high) => {
  const all = [];
  for (let n = Math.floor(Math.log10(low)); n <= Math.ceil(Math.log10(high)); n++) all.push(10 ** n, 3 * 10 ** n);
  const inside = all.filter((value) => value >= low * 0.999 && value <= high * 1.001);
  return inside.length > 7 ? inside.filter((value) => Number.isInteger(Math.round(1e6 * Math.log10(value)) / 1e6)) : inside;
};

// One row an x, or several where a line has it several times.
const columns = (lines) => {
  const rows = [];
  const points = lines.flatMap((line, place) => line.map(([x, y]) => [x, place + 1, y])).sort((a, b) => a[0] - b[0]);
  for (const [x, place, y] of points) {
    const last = rows.at(-1);
    if (last && last[0] === x && last[place] === null) { last[place] = y; continue; }
    const row = [x, ...lines.map(() => null)];
    row[place] = y;
    rows.push(row);
  }
  return Array.from({ length: lines.length + 1 }, (_, place) => rows.map((row) => row[place]));
};

// All cards first: a card's width depends on how many there are.
const cards = page.charts.map((chart) => make("div", { class: "card" }, make("h2", {}, chart.title)));
document.getElementById("charts").append(...cards);
for (const [at, chart] of page.charts.entries()) {
  const card = cards[at];
  const [exact, rough] = UNITS[chart.unit];
  const words = chart.words;
  const along = words.length ? (x) => words[x] ?? "" : plain;
  const axis = { stroke: () => theme("quiet"), grid: { stroke: () => theme("line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif", labelSize: 20 };
  const colour = (place) => page.colours[place % page.colours.length];
  const tight = 8 * words.join("").length + 12 * words.length > card.clientWidth - 100;
  const inWords = { splits: () => words.map((_, at) => at), values: (_, ticks) => ticks.map(along), rotate: tight ? -40 : 0, size: tight ? 70 : 30 };
  const high = chart.unit === "share" ? [0, 1.02] : null;
  const options = {
    width: card.clientWidth - 30, height: tight ? 320 : 280, cursor: { y: false, drag: { x: false, y: false } },
    scales: {
      x: { time: false, distr: chart.log_x ? 3 : 1, ...(words.length ? { range: [-0.5, words.length - 0.5] } : {}) },
      y: { distr: chart.log_y ? 3 : 1, ...(chart.log_y ? {} : { range: (_, low, top) => high || [Math.min(0, low), top > 0 ? top * 1.08 : 1] }) },
    },
    axes: [
      { ...axis, label: chart.x, space: 60, size: 30, ...(words.length ? inWords : { values: (_, ticks) => ticks.map(plain) }), ...(chart.log_x ? { splits: decades, filter: (_, ticks) => ticks } : {}) },
      { ...axis, ...(chart.y ? { label: chart.y } : {}), size: 58, values: (_, ticks) => ticks.map(rough), ...(chart.log_y ? { splits: decades, filter: (_, ticks) => ticks } : {}) },
    ],
    legend: { markers: { fill: (_, place) => (place > 0 ? colour(place - 1) : "") } },
    series: [{ label: chart.x.split(",")[0], value: (_, x) => (x === null || x === undefined ? "" : along(x)) }, ...Object.keys(chart.lines).map((label, place) => ({
      label, stroke: colour(place), width: chart.dots ? 0 : 1.8, paths: chart.dots ? () => null : undefined, spanGaps: true,
      points: { show: true, size: chart.dots && !words.length ? 5 : 8, fill: colour(place), width: 0 }, value: (_, y) => (y === null || y === undefined ? "" : exact(y)),
    }))],
  };
  const plot = new uPlot(options, columns(Object.values(chart.lines)), card);
  if (chart.note) card.append(make("p", { class: "quiet" }, chart.note));
  new ResizeObserver(() => plot.setSize({ width: card.clientWidth - 30, height: options.height })).observe(card);
}
