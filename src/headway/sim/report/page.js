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

// The name of a line at its end, in its colour, apart from the others' names.
const SIZE = 12;
const nameLines = (names, colour) => (plot) => {
  const context = plot.ctx, ratio = devicePixelRatio || 1, { left, top, width, height } = plot.bbox;
  const ends = names.map((name, place) => {
    const values = plot.data[place + 1], at = values.findLastIndex((value) => value !== null && value !== undefined);
    return at < 0 ? null : { name, colour: colour(place), y: plot.valToPos(values[at], "y", true) };
  }).filter((one) => one !== null).sort((one, other) => one.y - other.y);
  const step = 1.25 * SIZE * ratio;
  ends.forEach((one, at) => { if (at) one.y = Math.max(one.y, ends[at - 1].y + step); });
  // What would stand below the chart moves all above it up.
  ends.reduceRight((below, one) => { one.y = Math.min(one.y, below); return one.y - step; }, top + height);
  context.save();
  context.font = `600 ${SIZE * ratio}px system-ui, sans-serif`;
  context.textAlign = "left";
  context.textBaseline = "middle";
  for (const one of ends) { context.fillStyle = one.colour; context.fillText(one.name, left + width + 8 * ratio, one.y); }
  context.restore();
};
const widthOf = (names) => {
  const context = document.createElement("canvas").getContext("2d");
  context.font = `600 ${SIZE}px system-ui, sans-serif`;
  return Math.max(...names.map((name) => context.measureText(name).width));
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
  const colour = (place) => chart.colours[place];
  const names = Object.keys(chart.lines), named = !chart.dots && names.length > 1;
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
    padding: [null, named ? Math.ceil(widthOf(names)) + 14 : null, null, null],
    hooks: named ? { draw: [nameLines(names, colour)] } : {},
    legend: { show: chart.dots && names.length > 1, markers: { fill: (_, place) => (place > 0 ? colour(place - 1) : "") } },
    series: [{ label: chart.x.split(",")[0], value: (_, x) => (x === null || x === undefined ? "" : along(x)) }, ...names.map((label, place) => ({
      label, stroke: colour(place), width: chart.dots ? 0 : 1.8, paths: chart.dots ? () => null : undefined, spanGaps: true,
      points: { show: true, size: chart.dots && !words.length ? 5 : 8, fill: colour(place), width: 0 }, value: (_, y) => (y === null || y === undefined ? "" : exact(y)),
    }))],
  };
  const plot = new uPlot(options, columns(Object.values(chart.lines)), card);
  if (chart.note) card.append(make("p", { class: "quiet" }, chart.note));
  new ResizeObserver(() => plot.setSize({ width: card.clientWidth - 30, height: options.height })).observe(card);
}
