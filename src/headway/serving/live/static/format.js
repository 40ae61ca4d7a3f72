// Numbers, names and colours as the page shows them, and elements.

export const seconds = (s) => {
  if (s === null || s === undefined) return "–";
  const size = Math.abs(s);
  if (size < 0.0995) return `${(s * 1e3).toFixed(size < 0.00995 ? 1 : 0)} ms`;
  if (size < 0.9995) return `${(s * 1e3).toFixed(0)} ms`;
  return size < 99.5 ? `${s.toFixed(size < 9.95 ? 2 : 1)} s` : `${(s / 60).toFixed(1)} min`;
};

// On an axis: 0.003 is "3 ms", 100 is "100 s".
export const tick = (s) => (s < 0.9995 ? `${Number((s * 1e3).toPrecision(2))} ms` : `${Number(s.toPrecision(2))} s`);

export const count = (n) => {
  if (n === null || n === undefined) return "–";
  const size = Math.abs(n);
  if (size >= 9.995e5) return `${(n / 1e6).toFixed(1)}M`;
  if (size >= 1e4) return `${(n / 1e3).toFixed(0)}K`;
  return size >= 1e3 ? `${(n / 1e3).toFixed(1)}K` : `${Math.round(n)}`;
};

export const share = (x) => (x === null || x === undefined ? "–" : `${(100 * x).toFixed(x > 0 && x < 0.1 ? 1 : 0)}%`);

// Ids are long and random: their beginning tells them apart.
export const shortName = (id) => {
  const bare = id.replace(/#\d+$/, "");
  return bare.length > 18 ? bare.slice(0, 8) : bare;
};

const PALETTE = ["#D55E00", "#7a5cc4", "#E69F00", "#c2457e", "#8a6d1f", "#5b7f95"];
const given = new Map();

// Long prompts have colours of their own, in the order in which they are first seen; the last few thousand are kept.
export const colourOf = (id) => {
  if (!given.has(id)) {
    if (given.size > 4000) given.clear();
    given.set(id, PALETTE[given.size % PALETTE.length]);
  }
  return given.get(id);
};

export const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// make("div", {class: "row"}, child, "text"): never markup, so that no name can become any.
export const make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "colour") element.style.backgroundColor = value;
    else if (name === "width") element.style.width = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
};
