// One network with its slots, and what happened in them epoch by epoch.
import { h, s, fill, known, num, signed, stageName, STAGES } from "./dom.js";

const EMPTY = new Set(["DORMANT", "PRUNED", "EMBARGOED", "RESETTING"]);

export function stateAt(episode, epoch) {
  const measured = episode.states[epoch];
  return episode.slots.map((path, i) => {
    const segment = episode.lanes[i].segments.find((one) => one.from <= epoch && epoch < one.to);
    const own = measured?.[i] ?? {};
    const stage = own.stage ?? segment?.stage ?? "DORMANT";
    const seed = segment?.seed ?? 0;
    const from = episode.lanes[i].segments.find((one) => one.seed === seed && !EMPTY.has(one.stage))?.from ?? epoch;
    const worth = (what) => lastMeasured(episode, i, what, from, epoch);
    return { path, stage, seed, blueprint: EMPTY.has(stage) ? null : episode.seeds[seed], alpha: own.alpha, contribution: worth("contribution"), shadow: worth("shadow") };
  });
}

// A seed that is part of the network is not measured any more: what was measured last, and when.
function lastMeasured(episode, slot, what, from, epoch) {
  for (let at = epoch; at >= from; at -= 1) {
    const own = episode.states[at]?.[slot];
    if (known(own?.[what])) return { value: own[what], error: own[`${what}_error`], epoch: at, old: at < epoch };
  }
  return null;
}

const withError = (found) => (found ? `${signed(found.value)}${known(found.error) ? ` ± ${num(found.error)}` : ""}${found.old ? `, epoch ${found.epoch + 1}` : ""}` : "not measured");

function describe(slots) {
  return slots.map((one) => `slot ${one.path}: ${stageName(one.stage)}${one.blueprint ? `, ${one.blueprint}` : ""}`).join("; ");
}

// The host as a chain of its slots, in the order of the forward pass; a seed is a box beside its slot.
export function drawNetwork(node, episode, epoch, { compact = false } = {}) {
  const slots = stateAt(episode, epoch), gap = compact ? 14 : 26;
  const left = compact ? 58 : 62, room = (node.clientWidth - 2 * left + gap) / Math.max(1, slots.length) - gap;
  const box = compact ? 118 : Math.max(216, Math.min(300, room));
  const width = left * 2 + slots.length * (box + gap) - gap, height = compact ? 164 : 196;
  const hostY = height - 46, seedY = 14, seedHeight = hostY - 44;
  const plot = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Network at epoch ${epoch + 1}. ${describe(slots)}` });
  if (compact) { plot.setAttribute("width", "100%"); plot.style.setProperty("max-width", `${width}px`); plot.removeAttribute("height"); }
  plot.append(s("line", { class: "wire", x1: 8, x2: width - 8, y1: hostY + 15, y2: hostY + 15 }));
  plot.append(s("text", { x: 8, y: hostY + 10 }, "input"), s("text", { x: width - 8, y: hostY + 10, "text-anchor": "end" }, "output"));
  slots.forEach((slot, i) => plot.append(drawSlot(slot, left + i * (box + gap), { box, hostY, seedY, seedHeight, compact })));
  fill(node, slots.length ? plot : h("p", { class: "none" }, "The slots of this network are not recorded: nothing was planted in it, and it is not one of the episodes that are recorded in detail."));
}

function drawSlot(slot, x, { box, hostY, seedY, seedHeight, compact }) {
  const group = s("g", null);
  group.append(s("rect", { class: "host", x, y: hostY, width: box, height: 30, rx: 6 }));
  group.append(s("text", { class: "strong", x: x + box / 2, y: hostY + 19, "text-anchor": "middle" }, slot.path.length > 22 ? `…${slot.path.slice(-21)}` : slot.path));
  const empty = EMPTY.has(slot.stage);
  group.append(s("path", { class: "wire", "stroke-dasharray": slot.stage === "TRAINING" || slot.stage === "GERMINATED" || empty ? "3 3" : null, d: `M${x + 14} ${hostY}V${seedY + seedHeight}M${x + box - 14} ${seedY + seedHeight}V${hostY}` }));
  if (empty) {
    group.append(s("rect", { class: "ghost", x, y: seedY, width: box, height: seedHeight, rx: 6 }));
    group.append(s("text", { x: x + box / 2, y: seedY + seedHeight / 2 + 4, "text-anchor": "middle" }, stageName(slot.stage)));
    return group;
  }
  group.append(s("rect", { class: "host seedbox", x, y: seedY, width: box, height: seedHeight, rx: 6 }));
  group.append(s("rect", { "data-stage": slot.stage, x, y: seedY, width: 8, height: seedHeight, rx: 3 }));
  group.append(s("text", { class: "strong", x: x + 16, y: seedY + 17 }, slot.blueprint ?? `seed ${slot.seed}`));
  group.append(s("text", { class: "label", x: x + box - 8, y: seedY + 17, "text-anchor": "end" }, compact ? "" : stageName(slot.stage)));
  if (compact) group.append(s("text", { class: "label", x: x + 16, y: seedY + 33 }, stageName(slot.stage)));
  const top = seedY + (compact ? 42 : 30), wide = box - 26;
  group.append(s("rect", { class: "alphaback", x: x + 16, y: top, width: wide, height: 6, rx: 3 }));
  if (known(slot.alpha)) group.append(s("rect", { class: "alphafill", x: x + 16, y: top, width: Math.max(0, Math.min(1, slot.alpha)) * wide, height: 6, rx: 3 }));
  const lines = compact
    ? [`alpha ${known(slot.alpha) ? num(slot.alpha, 2) : "–"}`]
    : [`alpha ${known(slot.alpha) ? num(slot.alpha, 2) : "not measured"}`, `contribution ${withError(slot.contribution)}`, `shadow ${withError(slot.shadow)}`];
  lines.forEach((text, i) => group.append(s("text", { class: "label", x: x + 16, y: top + 21 + 16 * i }, text)));
  return group;
}

// A lane per slot over epochs, accuracy above; a click or the arrow keys choose an epoch.
export function drawLanes(node, episode, epoch, choose) {
  const width = Math.max(280, node.clientWidth), left = 92, right = 12, plotTop = 14, plotHeight = 84, each = 20;
  const top = plotTop + plotHeight + 24, height = top + episode.slots.length * (each + 4) + 22, length = Math.max(1, episode.epochs);
  const toX = (at) => left + at / length * (width - left - right);
  const plot = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  accuracy(plot, episode, toX, plotTop, plotHeight, left, width - right);
  episode.lanes.forEach((lane, i) => {
    const y = top + i * (each + 4);
    plot.append(s("text", { class: "label", x: left - 8, y: y + 14, "text-anchor": "end" }, lane.slot.length > 14 ? `…${lane.slot.slice(-13)}` : lane.slot));
    plot.append(s("rect", { "data-stage": "DORMANT", x: left, y, width: width - left - right, height: each, rx: 2 }));
    for (const one of lane.segments) {
      if (one.stage === "DORMANT") continue;
      const wide = toX(one.to) - toX(one.from), name = EMPTY.has(one.stage) ? stageName(one.stage) : episode.seeds[one.seed] ?? "";
      plot.append(s("rect", { class: "lane", "data-stage": one.stage, x: toX(one.from), y, width: wide, height: each }, s("title", null, `${lane.slot}: ${stageName(one.stage)}, epochs ${one.from + 1} to ${one.to}${episode.seeds[one.seed] ? `, ${episode.seeds[one.seed]}` : ""}`)));
    }
    for (const change of episode.changes.filter((one) => one.slot === lane.slot && one.born)) {
      plot.append(s("path", { class: "op", d: `M${toX(change.epoch) + 1} ${y - 4}l4 0l-4 6z` }));
    }
  });
  for (let at = 0; at <= length; at += Math.max(1, Math.ceil(length / 12))) plot.append(s("text", { x: toX(at), y: height - 6, "text-anchor": "middle" }, at));
  plot.append(s("text", { x: left - 8, y: height - 6, "text-anchor": "end" }, "epoch"));
  plot.append(s("line", { class: "now-line", x1: toX(epoch + 0.5), x2: toX(epoch + 0.5), y1: plotTop - 4, y2: height - 18 }));
  plot.addEventListener("click", (event) => choose(Math.max(0, Math.min(length - 1, Math.floor((event.offsetX - left) / (width - left - right) * length)))));
  fill(node, plot);
}

function accuracy(plot, episode, toX, top, height, left, right) {
  const values = episode.steps.map((step) => step.accuracy), there = [...values, ...episode.control].filter(known);
  const low = there.length ? Math.min(...there, 100) : 0, high = Math.max(100, ...there);
  const floor = Math.floor(Math.max(0, low - 5) / 10) * 10;
  const toY = (value) => top + height - (value - floor) / (high - floor || 1) * height;
  for (const at of [floor, (floor + high) / 2, high]) {
    plot.append(s("line", { class: "grid", x1: left, x2: right, y1: toY(at), y2: toY(at) }), s("text", { x: left - 8, y: toY(at) + 4, "text-anchor": "end" }, `${num(at, 0)} %`));
  }
  const line = (list) => list.map((value, i) => (known(value) ? `${i && known(list[i - 1]) ? "L" : "M"}${toX(i + 0.5).toFixed(1)} ${toY(value).toFixed(1)}` : "")).join("");
  plot.append(s("text", { x: left, y: top + height + 15 }, there.length ? (right - left > 320 ? "validation accuracy above; the life of each slot's seeds below" : "accuracy above, seeds below") : "accuracy: not measured"));
  if (episode.control.length) plot.append(s("path", { d: line(episode.control), fill: "none", "stroke-dasharray": "4 3", "stroke-width": 1.3, style: { stroke: "var(--s6)" } }), s("text", { x: right, y: toY(episode.control.at(-1) ?? floor) + 14, "text-anchor": "end" }, "not grown"));
  plot.append(s("path", { d: line(values), fill: "none", "stroke-width": 1.8, style: { stroke: "var(--s1)" } }));
}

export function stageLegend(node) {
  fill(node, STAGES.map((stage) => h("li", null, h("span", { class: "chip", "data-stage": stage }), stageName(stage))));
}
