// The decisions of an episode, and why one was made: probabilities per head, what was illegal, what was expected.
import { h, fill, known, num, signed, short, probability, notMeasured } from "./dom.js";

export function whole(step) {
  const parts = [step.p_op, step.p_slot, step.p_blueprint, step.p_blend].filter(known);
  return parts.length ? parts.reduce((product, one) => product * one, 1) : null;
}

const what = (step) => [step.blueprint, step.slot].filter(Boolean).join(" → ");

export function drawDecisions(node, episode, chosen, choose) {
  if (!episode.steps.length) {
    fill(node, h("p", { class: "none" }, "The steps of this episode are not recorded: of a rollout of thousands of episodes, 8 are. Choose one of the tiles."));
    return;
  }
  const rows = episode.steps.map((step) => h("tr", { tabindex: step.epoch === chosen ? 0 : -1, "aria-selected": String(step.epoch === chosen), "data-epoch": step.epoch, onclick: () => choose(step.epoch) },
    h("td", { class: "r" }, step.epoch + 1),
    h("td", null, h("span", { class: step.op === "WAIT" ? "faint" : "op-name" }, step.op.toLowerCase()), step.op !== "WAIT" && !step.changed ? h("span", { class: "tag warning" }, "no effect") : null),
    h("td", null, what(step)),
    h("td", { class: "r" }, probability(whole(step))),
    h("td", { class: "r" }, known(step.value) ? num(step.value) : "–"),
    h("td", { class: "r" }, known(step.reward) ? signed(step.reward) : "–"),
    h("td", { class: "r" }, known(step.accuracy) ? num(step.accuracy) : "–")));
  const heads = ["epoch", "operation", "seed → slot", "probability", "value", "reward", "accuracy"];
  fill(node, h("table", null, h("thead", null, h("tr", null, heads.map((name, i) => h("th", { scope: "col", class: i === 0 || i > 2 ? "r" : null }, name)))), h("tbody", null, rows)));
}

export function drawWhy(node, episode, epoch) {
  const step = episode.steps[epoch];
  if (!step) { fill(node, notMeasured()); return; }
  const facts = h("dl", null,
    h("dt", null, "value"), h("dd", null, known(step.value) ? `the critic expected ${num(step.value)} from here` : notMeasured()),
    h("dt", null, "reward"), h("dd", null, known(step.reward) ? signed(step.reward, 2) : notMeasured()),
    h("dt", null, "effect"), h("dd", null, step.changed ? "it was done" : step.op === "WAIT" ? "nothing to do" : "none"),
    step.message && step.message !== "wait" ? [h("dt", null, "said"), h("dd", null, step.message)] : null);
  const changes = episode.changes.filter((one) => one.epoch === epoch && one.reason);
  const taken = { op: step.op, slot: step.slot, blueprint: step.blueprint, blend: step.blend };
  fill(node, facts,
    step.choices ? Object.entries(step.choices).map(([head, options]) => drawHead(head, options, taken[head], step.illegal[head] ?? {})) : h("p", { class: "none" }, known(step.p_op) ? `Probability of what was chosen: ${Object.entries({ operation: step.p_op, slot: step.p_slot, blueprint: step.p_blueprint, blend: step.p_blend }).filter(([, p]) => known(p)).map(([name, p]) => `${name} ${probability(p)}`).join(", ")}. Those of the other choices are recorded for 16 episodes of an update.` : "Probabilities by head: not measured (rules, and single networks, have none)."),
    changes.length ? [h("h4", null, "Then"), changes.map((one) => h("p", null, h("span", { class: "chip", "data-stage": one.target }), ` ${one.slot} ${one.target.toLowerCase()}: ${one.reason}`))] : null);
}

function drawHead(head, options, taken, illegal) {
  const legal = Object.entries(options).filter(([, p]) => p !== null).sort((a, b) => b[1] - a[1]);
  const refused = Object.entries(illegal);
  const reasons = new Map();
  for (const [name, why] of refused) reasons.set(why, [...(reasons.get(why) ?? []), name]);
  return [
    h("h4", null, { op: "Operation", slot: "Slot", blueprint: "Blueprint", blend: "Blend" }[head] ?? head),
    legal.map(([name, p]) => h("div", { class: `choice${name === taken ? " taken" : ""}` }, h("span", null, head === "op" ? name.toLowerCase() : name), h("span", { class: "meter" }, h("i", { style: { width: `${100 * p}%` } })), h("span", { class: "p" }, probability(p), name === taken ? h("span", { class: "visually-hidden" }, " chosen") : null))),
    [...reasons].map(([why, names]) => h("div", { class: "choice illegal" }, h("span", null, names.map((name) => (head === "op" ? name.toLowerCase() : name)).join(", ")), h("span", null, `illegal: ${why}`))),
  ];
}

export function drawChanges(node, episode) {
  if (!episode.changes.length) { fill(node, h("p", { class: "none" }, episode.steps.length ? "Nothing was planted." : "Not recorded for this episode.")); return; }
  const rows = episode.changes.map((one) => h("tr", null, h("td", { class: "r" }, one.epoch + 1), h("td", { class: "n" }, one.slot), h("td", { class: "n" }, h("span", { class: "chip", "data-stage": one.target }), ` ${one.target.toLowerCase()}`), h("td", { class: "faint" }, one.reason)));
  fill(node, h("table", null, h("thead", null, h("tr", null, ["epoch", "slot", "becomes", "because"].map((name, i) => h("th", { scope: "col", class: i === 0 ? "r" : null }, name)))), h("tbody", null, rows)));
}

export function drawTerms(node, terms) {
  const named = Object.entries(terms).filter(([, value]) => known(value));
  if (!named.length) { fill(node, h("p", { class: "none" }, "not measured")); return; }
  const most = Math.max(...named.map(([, value]) => Math.abs(value)), 1e-9);
  fill(node, named.sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).map(([name, value]) => h("div", { class: "term" }, h("span", null, name.replaceAll("_", " ")),
    h("span", { class: "track" }, h("i", { class: value >= 0 ? "plus" : "minus", style: value >= 0 ? { left: "50%", width: `${50 * value / most}%` } : { right: "50%", width: `${-50 * value / most}%` } })), h("span", { class: "r num" }, signed(value, Math.abs(value) < 1 ? 2 : 1)))),
    h("p", { class: "note" }, `sum ${short(named.reduce((total, [, value]) => total + value, 0))}: the return of the episode`));
}
