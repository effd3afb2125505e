// Charts over updates as SVG: lines, bands, dashed levels, stacked areas. One cursor for all; values stand in the key,
// whose place is fixed, so nothing moves while a run is live.
import { h, s, fill, known, short } from "./dom.js";

const cursors = new Set();
let cursorAt = null;

function moveCursor(update) {
  cursorAt = update;
  cursors.forEach((draw) => draw());
}

function ticks(low, high, count = 4) {
  const span = high - low || 1;
  const raw = span / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((k) => k * power).find((k) => k >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) found.push(Math.abs(at) < step * 1e-6 ? 0 : at);
  return found;
}

function range(values, options) {
  let low = Infinity, high = -Infinity;
  for (const value of values) if (known(value)) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low > high) return null;
  if (options.zero) { low = Math.min(0, low); high = Math.max(0, high); }
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [options.zero && low === 0 ? 0 : low - room, high + room];
}

function path(x, values, toX, toY) {
  let text = "", pen = false;
  values.forEach((value, i) => {
    if (!known(value)) { pen = false; return; }
    text += `${pen ? "L" : "M"}${toX(x[i]).toFixed(1)} ${toY(value).toFixed(1)}`;
    pen = true;
  });
  return text;
}

function swatch(one) {
  return s("svg", { width: 16, height: 8, "aria-hidden": "true" }, one.points
    ? s("circle", { cx: 8, cy: 4, r: 3, style: { fill: one.color } })
    : s("line", { x1: 0, x2: 16, y1: 4, y2: 4, "stroke-width": one.fill ? 7 : 2, "stroke-dasharray": one.dash, style: { stroke: one.color } }));
}

// {x, series: [{name, values, x?, color, dash, points}], band: {x, low, high}, levels: [{name, value, color}], zero, stacked, label}
export function chart(node, options) {
  const series = options.series.filter((one) => one.values.some(known));
  node.chart = options;
  if (!node.watched) {
    node.watched = true;
    new ResizeObserver(() => node.chart && draw(node)).observe(node);
    node.tabIndex = 0;
    node.setAttribute("role", "img");
    node.addEventListener("keydown", (event) => step(node, event));
    node.addEventListener("pointerleave", () => moveCursor(null));
    node.addEventListener("blur", () => moveCursor(null));
  }
  const last = series.map((one) => `${one.name} ${short(one.values.filter(known).at(-1))}`).join(", ");
  node.setAttribute("aria-label", series.length ? `${options.label}; last values: ${last}` : `${options.label}: not measured`);
  draw(node);
}

function step(node, event) {
  const x = node.chart.x;
  if (!["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key) || !x.length) return;
  event.preventDefault();
  let at = cursorAt === null ? x.length - 1 : x.findIndex((update) => update >= cursorAt);
  if (at < 0) at = x.length - 1;
  at = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: x.length - 1 }[event.key];
  moveCursor(x[Math.max(0, Math.min(x.length - 1, at))]);
}

function draw(node) {
  const options = node.chart, series = options.series.filter((one) => one.values.some(known));
  cursors.delete(node.cursor);
  if (node.clientHeight < 60) return;  // not on the page, or not shown
  if (!series.length) {
    fill(node, h("div", { class: "empty" }, options.empty ?? "not measured yet"));
    return;
  }
  const key = h("div", { class: "key" });
  const keyHeight = node.classList.contains("one") ? 17 : 34;
  const width = Math.max(160, node.clientWidth), height = node.clientHeight - keyHeight - 2;
  const levels = options.levels ?? [];
  const margin = { left: 42, right: levels.length ? 108 : 10, top: 6, bottom: 18 };
  const stacks = options.stacked ? stack(series) : null;
  const all = stacks ? stacks.flatMap((one) => [...one.low, ...one.high]) : series.flatMap((one) => one.values);
  const found = range([...all, ...(options.band ? [...options.band.low, ...options.band.high] : []), ...levels.map((one) => one.value)], options);
  const [low, high] = options.range ?? found;
  const first = options.x[0], end = Math.max(options.x.at(-1), first + 1);
  const toX = (update) => margin.left + (update - first) / (end - first) * (width - margin.left - margin.right);
  const toY = (value) => height - margin.bottom - (value - low) / (high - low || 1) * (height - margin.top - margin.bottom);
  const plot = s("svg", { class: "plot", width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  for (const at of ticks(low, high)) {
    plot.append(s("line", { class: "grid", x1: margin.left, x2: width - margin.right, y1: toY(at), y2: toY(at) }));
    plot.append(s("text", { x: margin.left - 6, y: toY(at) + 3.5, "text-anchor": "end" }, short(at)));
  }
  for (const at of ticks(first, end, Math.max(2, Math.min(6, (width - 150) / 70))).filter(Number.isInteger)) {
    plot.append(s("text", { x: toX(at), y: height - 4, "text-anchor": "middle" }, at));
  }
  plot.append(s("line", { class: "axis", x1: margin.left, x2: width - margin.right, y1: height - margin.bottom, y2: height - margin.bottom }));
  if (options.band?.x.length) {
    const up = path(options.band.x, options.band.high, toX, toY);
    const down = path([...options.band.x].reverse(), [...options.band.low].reverse(), toX, toY).replace("M", "L");
    plot.append(s("path", { d: `${up}${down}Z`, "fill-opacity": 0.13, style: { fill: options.band.color } }));
  }
  drawLevels(plot, levels, toY, margin, width, height);
  if (stacks) for (const one of stacks) {
    const down = path([...options.x].reverse(), [...one.low].reverse(), toX, toY).replace("M", "L");
    plot.append(s("path", { d: `${path(options.x, one.high, toX, toY)}${down}Z`, "fill-opacity": 0.85, style: { fill: one.color } }));
  }
  else for (const one of series) {
    const x = one.x ?? options.x;
    if (one.points) {
      plot.append(s("path", { d: path(x, one.values, toX, toY), fill: "none", "stroke-width": 1, "stroke-opacity": 0.6, style: { stroke: one.color } }));
      one.values.forEach((value, i) => known(value) && plot.append(s("circle", { cx: toX(x[i]), cy: toY(value), r: 3.2, style: { fill: one.color } })));
    } else {
      plot.append(s("path", { d: path(x, one.values, toX, toY), fill: "none", "stroke-width": 1.7, "stroke-linejoin": "round", "stroke-dasharray": one.dash, style: { stroke: one.color } }));
    }
  }
  const line = s("line", { class: "cursor", y1: margin.top, y2: height - margin.bottom, visibility: "hidden" });
  plot.append(line);
  plot.addEventListener("pointermove", (event) => {
    const share = (event.offsetX - margin.left) / (width - margin.left - margin.right);
    const wanted = first + share * (end - first);
    moveCursor(options.x.reduce((best, update) => (Math.abs(update - wanted) < Math.abs(best - wanted) ? update : best), options.x[0]));
  });
  node.cursor = () => {
    const at = cursorAt === null ? -1 : options.x.indexOf(cursorAt);
    line.setAttribute("visibility", at < 0 ? "hidden" : "visible");
    if (at >= 0) { line.setAttribute("x1", toX(cursorAt)); line.setAttribute("x2", toX(cursorAt)); }
    fill(key, series.map((one) => {
      const x = one.x ?? options.x;
      const upTo = at < 0 ? x.length - 1 : x.findLastIndex((update) => update <= cursorAt);
      const value = one.values.slice(0, upTo + 1).findLast(known);
      return h("span", null, swatch({ ...one, fill: options.stacked }), one.name, h("b", null, short(at < 0 || !one.x ? one.values[upTo] ?? value : value)));
    }), at < 0 ? null : h("span", null, "at ", h("b", null, cursorAt)));
  };
  cursors.add(node.cursor);
  node.cursor();
  fill(node, key, plot);
}

function drawLevels(plot, levels, toY, margin, width, height) {
  let above = Infinity;
  for (const one of [...levels].sort((a, b) => a.value - b.value)) {
    const y = toY(one.value);
    plot.append(s("line", { class: "level", x1: margin.left, x2: width - margin.right, y1: y, y2: y, style: { stroke: one.color } }));
    const at = Math.min(Math.max(y + 3.5, margin.top + 8), height - margin.bottom, above - 12);  // labels do not lie on each other
    above = at;
    plot.append(s("text", { class: "label", x: width - margin.right + 6, y: at }, `${one.name.slice(0, 11)} ${short(one.value)}`));
  }
}

function stack(series) {
  const size = series[0].values.length;
  const above = new Array(size).fill(0), below = new Array(size).fill(0);
  return series.map((one) => {
    const low = [], high = [];
    one.values.forEach((value, i) => {
      const side = (value ?? 0) >= 0 ? above : below;
      low.push(side[i]);
      side[i] += value ?? 0;
      high.push(side[i]);
    });
    return { ...one, low, high };
  });
}

export function spark(values, width = 118, height = 34) {
  const there = values.filter(known);
  const node = s("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  if (there.length < 2) return node;
  const x = values.map((_, i) => i);
  const toX = (i) => i / Math.max(1, values.length - 1) * width;
  const toY = (value) => height - 2 - value / 100 * (height - 4);
  for (const level of [50, 100]) node.append(s("line", { class: "grid", x1: 0, x2: width, y1: toY(level), y2: toY(level) }));
  node.append(s("path", { d: path(x, values, toX, toY), fill: "none", "stroke-width": 1.6, "vector-effect": "non-scaling-stroke", style: { stroke: "var(--s1)" } }));
  return node;
}

export function histogram(data, label) {
  const width = 300, height = 110, most = Math.max(1, ...data.counts), each = width / Math.max(1, data.counts.length);
  const node = s("svg", { viewBox: `0 -6 ${width} ${height + 24}`, role: "img", "aria-label": label, width: "100%" });
  data.counts.forEach((count, i) => node.append(s("rect", { x: i * each + 1, width: each - 2, y: height - count / most * height, height: count / most * height, style: { fill: "var(--s1)" } })));
  node.append(s("line", { class: "axis", x1: 0, x2: width, y1: height, y2: height }));
  for (const share of [0, 0.5, 1]) node.append(s("text", { x: share * width, y: height + 14, "text-anchor": ["start", "middle", "end"][share * 2] }, short(data.low + share * (data.high - data.low))));
  return node;
}
