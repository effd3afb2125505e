// Elements and numbers. Text always goes in as text: nothing that a run is named or says can become markup.

const SVG = "http://www.w3.org/2000/svg";

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") node.setAttribute("class", value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.entries(value).forEach(([key, one]) => node.style.setProperty(key, one));
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

export const h = (tag, attributes, ...children) => build(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) => build(document.createElementNS(SVG, tag), attributes, children);
export const $ = (id) => document.getElementById(id);

export function fill(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const known = (value) => typeof value === "number" && Number.isFinite(value);
export const notMeasured = () => h("span", { class: "none" }, "not measured");

export function num(value, digits = 1) {
  if (!known(value)) return "–";
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }).replace("-", "−");
}

export function short(value) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1000) return Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 }).format(value).replace("-", "−");
  if (size < 0.001) return value.toExponential(0).replace("-", "−").replace("e−", "e-");
  return String(Number(value.toPrecision(3))).replace("-", "−");
}

export const signed = (value, digits = 1) => (known(value) ? (value >= 0 ? "+" : "") + num(value, digits) : "–");
export const percent = (value, digits = 0) => (known(value) ? `${num(100 * value, digits)} %` : "–");

export function probability(value) {
  if (!known(value)) return "–";
  if (value > 0 && value < 0.005) return "< 1 %";
  if (value < 1 && value > 0.995) return "> 99 %";
  return `${Math.round(100 * value)} %`;
}

export function clock(seconds) {
  if (!known(seconds)) return "–";
  const whole = Math.max(0, Math.round(seconds));
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (value) => String(value).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) { value /= 1000; at += 1; }
  return `${num(value, at ? 1 : 0)} ${units[at]}`;
}

export const STAGES = ["DORMANT", "GERMINATED", "TRAINING", "BLENDING", "HOLDING", "FOSSILIZED", "PRUNED", "EMBARGOED", "RESETTING"];
export const stageName = (stage) => ({ DORMANT: "empty", FOSSILIZED: "kept", PRUNED: "removed", EMBARGOED: "resting" }[stage] ?? stage.toLowerCase());
