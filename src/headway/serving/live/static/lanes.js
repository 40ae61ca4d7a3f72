// Lanes: one for each instance (and KV group and pipeline stage), iterations as blocks, KV transfers as lines.
import { colourOf, count, seconds, shortName, theme } from "./format.js";

const TOP = 6, AXIS = 22, MOST = 12000;

export class Lanes {
  constructor(canvas, tip, onChoose) {
    this.canvas = canvas; this.tip = tip; this.onChoose = onChoose;
    this.blocks = []; this.transfers = []; this.lanes = []; this.window = 30; this.long = 8192;
    canvas.addEventListener("mousemove", (event) => this.point(event));
    canvas.addEventListener("mouseleave", () => { tip.hidden = true; });
    canvas.addEventListener("click", (event) => this.choose(event));
  }

  reset() { this.blocks = []; this.transfers = []; }

  add(blocks, transfers, now) {
    for (const [instance, group, stage, start, end, predicted, decodes, iterations, chunks] of blocks)
      this.blocks.push({ instance, group, stage, start, end, predicted, decodes, iterations, chunks });
    for (const [request, source, target, start, end] of transfers) this.transfers.push({ request, source, target, start, end });
    this.blocks = this.blocks.filter((one) => one.end > now - 125).slice(-MOST);
    this.transfers = this.transfers.filter((one) => one.end > now - 125).slice(-MOST);
  }

  arrange(instances) {
    const stages = new Map();
    for (const one of this.blocks) stages.set(`${one.instance} ${one.group} ${one.stage}`, one);
    for (const each of instances) {
      const known = [...stages.values()].some((one) => one.instance === each.id);
      if (!known) stages.set(`${each.id} 0 0`, { instance: each.id, group: 0, stage: 0 });
    }
    const many = instances.length > 1;
    this.lanes = [...stages.values()]
      .map(({ instance, group, stage }) => ({ instance, group, stage }))
      .sort((a, b) => a.instance - b.instance || a.group - b.group || a.stage - b.stage);
    const own = (lane) => this.lanes.filter((one) => one.instance === lane.instance).length > 1;
    for (const lane of this.lanes) {
      const about = instances.find((one) => one.id === lane.instance);
      const parts = own(lane) ? ` g${lane.group} s${lane.stage}` : "";
      lane.name = many ? `${lane.instance}${about && about.role !== "mixed" ? ` ${about.role}` : ""}${parts}` : parts.trim() || "engine";
      lane.kv = about && about.kv_total ? about.kv_used / about.kv_total : null;
    }
    const height = TOP + this.lanes.length * this.tall + AXIS;
    if (this.height !== height) { this.height = height; this.canvas.style.height = `${height}px`; }
  }

  get tall() { return this.lanes.length < 3 ? 64 : 40; }
  left() { return this.canvas.clientWidth < 500 ? 54 : 92; }
  x(t) { return this.left() + (1 - (this.now - t) / this.window) * (this.canvas.clientWidth - this.left()); }
  lane(one) { return this.lanes.findIndex((l) => l.instance === one.instance && l.group === one.group && l.stage === one.stage); }
  isLong([, start, , remaining]) { return start + remaining > this.long; }
  colour(chunk) { return this.isLong(chunk) ? colourOf(chunk[0]) : this.colours.short; }

  draw(now) {
    this.now = now;
    const canvas = this.canvas, ratio = devicePixelRatio || 1, width = canvas.clientWidth, height = this.height || 0;
    if (!width || !height) return;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
    }
    const g = canvas.getContext("2d");
    this.colours = { short: theme("short"), decode: theme("decode"), quiet: theme("quiet"), line: theme("line"), ink: theme("ink"), transfer: theme("transfer"), accent: theme("accent") };
    g.setTransform(ratio, 0, 0, ratio, 0, 0); g.clearRect(0, 0, width, height); g.font = "12px system-ui, sans-serif";
    this.lanes.forEach((lane, i) => this.frame(g, lane, TOP + i * this.tall, width));
    g.save(); g.beginPath(); g.rect(this.left(), 0, width, height); g.clip();
    for (const one of this.blocks) this.block(g, one);
    for (const one of this.transfers) this.transfer(g, one);
    g.restore();
    this.axis(g, width);
  }

  frame(g, lane, y, width) {
    g.fillStyle = this.colours.line; g.fillRect(this.left(), y + this.tall - 5, width, 1);
    g.fillStyle = this.colours.ink; g.fillText(lane.name, 0, y + 16, this.left() - 8);
    if (lane.kv !== null && lane.stage === 0) {
      const full = this.left() - 14;
      g.fillStyle = this.colours.line; g.fillRect(0, y + 22, full, 4);
      g.fillStyle = this.colours.accent; g.fillRect(0, y + 22, full * Math.min(1, lane.kv), 4);
    }
  }

  block(g, one) {
    const i = this.lane(one);
    if (i < 0 || one.end < this.now - this.window) return;
    const y = TOP + i * this.tall, x = this.x(one.start), w = Math.max(0.6, this.x(one.end) - x), gap = w > 4 ? 1 : 0;
    const total = one.chunks.reduce((sum, chunk) => sum + chunk[2], 0);
    if (one.decodes) {
      g.fillStyle = this.colours.decode;
      const tall = Math.min(this.tall - 10, 6 + 3 * Math.log2(1 + one.decodes));
      const h = total ? Math.min(10, tall) : tall;
      g.fillRect(x, y + this.tall - 6 - h, w - gap, h);
    }
    let at = x;
    for (const chunk of one.chunks) {
      const part = (w - gap) * chunk[2] / total;
      g.fillStyle = this.colour(chunk); g.fillRect(at, y, part, one.decodes ? this.tall - 17 : this.tall - 6);
      if (part > 58) { g.fillStyle = "#fff"; g.fillText(shortName(chunk[0]), at + 4, y + 15, part - 6); }
      at += part;
    }
  }

  transfer(g, one) {
    const from = this.lanes.findIndex((l) => l.instance === one.source), to = this.lanes.findIndex((l) => l.instance === one.target);
    if (from < 0 || to < 0) return;
    g.strokeStyle = this.colours.transfer; g.lineWidth = 1.5; g.setLineDash([4, 3]); g.beginPath();
    g.moveTo(this.x(one.start), TOP + from * this.tall + this.tall / 2); g.lineTo(this.x(one.end), TOP + to * this.tall + this.tall / 2); g.stroke();
    g.setLineDash([]);
  }

  axis(g, width) {
    const step = this.window / (width < 500 ? 3 : 6), y = TOP + this.lanes.length * this.tall;
    g.fillStyle = this.colours.quiet;
    for (let back = 0; back < this.window; back += step) {
      const x = this.x(this.now - back), text = back ? `−${step < 1 ? back.toFixed(1) : Math.round(back)} s` : "now";
      g.fillRect(x - 1, y - 2, 1, 5); g.fillText(text, back ? x - 14 : x - 26, y + 16);
    }
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect(), x = event.clientX - box.left, i = Math.floor((event.clientY - box.top - TOP) / this.tall);
    return this.blocks.findLast((one) => this.lane(one) === i && this.x(one.start) <= x && x <= Math.max(this.x(one.end), this.x(one.start) + 3));
  }

  point(event) {
    const one = this.at(event);
    this.tip.hidden = !one;
    if (!one) return;
    const many = one.iterations > 1 ? `${one.iterations} iterations, together ` : "";
    const lines = [`${many}${seconds(one.end - one.start)}${one.predicted ? ` (predicted ${seconds(one.predicted)})` : ""}`];
    for (const [request, start, tokens, remaining, limit] of one.chunks)
      lines.push(`${shortName(request)}: ${count(tokens)} tokens from ${count(start)}, ${count(remaining)} left; bound by: ${limit}`);
    if (one.decodes) lines.push(`${one.decodes} decodes`);
    this.tip.textContent = lines.join("\n");
    const box = this.canvas.getBoundingClientRect(), x = event.clientX - box.left;
    this.tip.style.left = `${Math.min(x + 12, Math.max(0, box.width - 330))}px`;
    this.tip.style.top = `${event.clientY - box.top + 16}px`;
  }

  choose(event) {
    const one = this.at(event);
    if (!one || !one.chunks.length) return;
    this.onChoose(one.chunks.reduce((most, chunk) => (chunk[2] > most[2] ? chunk : most))[0]);
  }
}
