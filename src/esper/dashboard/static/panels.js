// What the page says of a run as a whole: facts, health, learning, environments, alarms, best networks, settings.
import { $, h, fill, known, num, short, signed, percent, clock, bytes, notMeasured, stageName } from "./dom.js";
import { chart, spark, histogram } from "./chart.js";

const MARKS = { good: "✓", neutral: "–", warning: "!", bad: "×", unknown: "?" };
const HEADS = [["op", "var(--s1)", null], ["slot", "var(--s2)", "6 3"], ["blueprint", "var(--s3)", "2 2"], ["blend", "var(--s4)", "7 2 2 2"]];
const TERM_COLORS = ["var(--s1)", "var(--s2)", "var(--s3)", "var(--s4)", "var(--s5)", "var(--s6)", "var(--s7)", "var(--s8)", "var(--s9)", "var(--s10)"];

const hidden = (text) => h("span", { class: "visually-hidden" }, text);
const fact = (label, value, more) => h("div", { class: "fact" }, h("div", { class: "label" }, label), h("div", { class: "value" }, value ?? notMeasured()), h("div", { class: "more" }, more ?? ""));

export function drawHeader(view) {
  const { name, task, state } = view, growth = view.kind === "growth", unit = growth ? "epoch" : "update";
  $("run-name").textContent = name;
  $("run-task").textContent = growth ? `a network grown by ${view.controller ?? "a controller"}` : [task, view.engine?.split(":")[0], view.envs ? `${view.envs} environments` : null].filter(Boolean).join(" · ");
  document.title = `${view.updates ? `${view.update}/${view.updates} ` : ""}${name} · Esper`;
  const left = known(view.seconds_left) ? ` · ${clock(view.seconds_left)} left` : "";
  $("state").dataset.state = state.name;
  $("state-text").textContent = `${state.name} · ${unit} ${view.update}${view.updates ? ` of ${view.updates}` : ""}${left}`;
  $("state").title = state.said;
  const share = view.updates ? Math.min(100, 100 * view.update / view.updates) : 0;
  $("progress").setAttribute("aria-valuenow", Math.round(share));
  $("progress-bar").style.width = `${share}%`;
}

export function drawOverview(view, curves) {
  if (view.kind === "growth") { drawGrowth(view); return; }
  const m = view.latest, first = curves.series["episode/score"]?.find(known);
  const judged = m["evaluation/score"];
  fill($("facts"),
    fact("score, last update", known(m["episode/score"]) ? num(m["episode/score"]) : null, known(first) ? `${signed(m["episode/score"] - first)} since update 1` : ""),
    fact("held-out score", known(judged) ? num(judged) : null, known(judged) ? "frozen policy, new problems" : "evaluations are off"),
    fact("accuracy", known(m["episode/accuracy"]) ? [num(m["episode/accuracy"]), h("small", null, " %")] : null, "of the final networks"),
    fact("size", known(m["episode/growth"]) ? [h("small", null, "×"), num(m["episode/growth"], 2)] : null, "of the host's parameters"),
    fact("seeds, last update", known(m["episode/germinated"]) ? [short(m["episode/germinated"]), h("small", null, " planted")] : null, `${short(m["episode/fossilized"])} kept, ${short(m["episode/pruned"])} removed`),
    fact("speed", known(view.steps_per_second) ? [short(view.steps_per_second), h("small", null, " steps/s")] : null, `${short(view.steps)} steps so far`));
  drawLights(view.lights);
}

function drawLights(lights) {
  fill($("lights"), lights.map((one) => h("li", { class: "light", "data-state": one.state, title: one.remedy || one.said }, h("span", { class: "mark", "aria-hidden": "true" }, MARKS[one.state]), h("b", null, one.name, h("span", { class: "visually-hidden" }, `: ${one.state}. `)), h("span", { class: "said" }, one.remedy ? `${one.said}: ${one.remedy}` : one.said))));
}

function drawGrowth(view) {
  const result = view.result ?? {};
  fill($("facts"),
    fact("validation accuracy", known(view.accuracy) ? [num(view.accuracy), h("small", null, " %")] : null, known(view.control_accuracy) ? `${num(view.control_accuracy)} % without growth` : "no control was trained"),
    fact("test accuracy", known(result.test_accuracy) ? [num(result.test_accuracy), h("small", null, " %")] : null, known(result.control_accuracy) ? `${num(result.control_accuracy)} % without growth` : view.state.name === "running" ? "measured at the end" : ""),
    fact("score", known(result.score) ? num(result.score) : null, known(view.rent) ? `rent ${short(view.rent)} points a host-size` : ""),
    fact("parameters", known(view.parameters) ? num(view.parameters, 0) : null, known(view.host_parameters) ? `host ${num(view.host_parameters, 0)}` : ""),
    fact("size", known(view.parameters / view.host_parameters) ? [h("small", null, "×"), num(view.parameters / view.host_parameters, 2)] : null, "of the host's parameters"),
    fact("controller", view.controller ?? null, ""));
  drawLights(view.lights);
}

export function drawLearning(curves, view) {
  const get = (name) => curves.series[name] ?? [];
  const colours = ["var(--s6)", "var(--s4)", "var(--s5)", "var(--s2)", "var(--s9)"];
  const levels = curves.levels.filter((one) => known(one.score)).map((one, i) => ({ name: one.name, value: one.score, color: colours[i % colours.length] }));
  chart($("c-learning"), {
    label: "Score by update", x: curves.updates, levels, empty: "no update is recorded yet",
    band: curves.band.updates.length > 1 ? { x: curves.band.updates, low: curves.band.low, high: curves.band.high, color: "var(--s1)" } : null,
    series: [
      { name: "training mean (band: middle 80 % of episodes)", values: get("episode/score"), color: "var(--s1)" },
      { name: "held-out", x: curves.evaluation.updates, values: curves.evaluation.scores, color: "var(--s3)", points: true },
    ],
  });
  $("levels-note").textContent = levels.length
    ? "Dashed: mean score of each controller on held-out problems, from this run's comparison."
    : `Levels of the baselines: not measured. To measure them: esper compare --task ${view.task ?? "TASK"} --out ${view.name}/comparison`;
}

export function drawAccuracy(episode) {
  const x = episode.steps.map((step) => step.epoch + 1);
  chart($("c-learning"), {
    label: "Validation accuracy by epoch", x, empty: "no epoch is recorded yet",
    series: [
      { name: "grown", values: episode.steps.map((step) => step.accuracy), color: "var(--s1)" },
      { name: "the same host, not grown", x: episode.control.map((_, i) => i + 1), values: episode.control, color: "var(--s6)", dash: "5 3" },
    ],
  });
  $("levels-note").textContent = episode.control.length ? "" : "The same host without growth: not measured (the run had --no-control).";
}

export function drawPolicy(curves) {
  const get = (name) => curves.series[name] ?? [];
  const one = (id, label, name, options = {}) => { $(id).classList.add("one"); chart($(id), { label, x: curves.updates, series: [{ name: options.name ?? label.toLowerCase(), values: get(name), color: "var(--s1)" }], ...options }); };
  const heads = (id, label, what, options = {}) => chart($(id), { label, x: curves.updates, series: HEADS.map(([head, color, dash]) => ({ name: head, values: get(`${head}/${what}`), color, dash })), ...options });
  $("every").textContent = curves.every > 1 ? `each point is the mean of ${curves.every} updates` : "";
  const terms = Object.keys(curves.series).filter((name) => name.startsWith("reward/"));
  terms.sort((a, b) => weight(get(b)) - weight(get(a)));
  chart($("c-reward"), { label: "Reward by term", x: curves.updates, stacked: true, zero: true, series: terms.filter((name) => weight(get(name)) > 0).map((name, i) => ({ name: name.slice(7).replaceAll("_", " "), values: get(name), color: TERM_COLORS[i % TERM_COLORS.length] })) });
  heads("c-entropy", "Entropy by head", "entropy", { zero: true });
  heads("c-kl", "KL by head", "kl", { zero: true });
  one("c-variance", "Explained variance", "explained_variance", { zero: true });
  one("c-clip", "Clip fraction", "clip_fraction", { zero: true });
  chart($("c-gradients"), { label: "Gradient norms", x: curves.updates, zero: true, series: [{ name: "all", values: get("gradient_norm"), color: "var(--s1)" }, { name: "critic", values: get("value_gradient_norm"), color: "var(--s2)", dash: "6 3" }, { name: "trunk", values: get("trunk_gradient_norm"), color: "var(--s3)", dash: "2 2" }] });
  chart($("c-seeds"), { label: "Seeds per update", x: curves.updates, zero: true, series: [{ name: "planted", values: get("episode/germinated"), color: "var(--s1)" }, { name: "kept", values: get("episode/fossilized"), color: "var(--s3)", dash: "6 3" }, { name: "removed", values: get("episode/pruned"), color: "var(--s2)", dash: "2 2" }] });
  one("c-size", "Size of the final networks", "episode/growth", { name: "× host" });
  one("c-speed", "Steps per second", "steps_per_second", { zero: true });
}

const weight = (values) => values.reduce((sum, value) => sum + Math.abs(value ?? 0), 0);

export function drawTiles(rollout, selected, choose) {
  $("at-update").textContent = `update ${rollout.update}`;
  const every = rollout.all;
  $("env-sums").textContent = every.episodes ? `${every.episodes} episodes: mean score ${num(every.score)}, accuracy ${num(every.accuracy)} %, size ×${num(every.size, 2)}${every.governed ? `, ${every.governed} ended by the governor` : ""}` : "no episode is recorded yet";
  const tiles = rollout.tiles.map((tile) => h("div", { class: "tile", role: "option", id: `tile-${tile.env}`, "aria-selected": String(tile.env === selected), "data-env": tile.env, onclick: () => choose(tile.env) },
    h("div", { class: "head" }, h("span", null, `#${tile.env}`, h("span", { class: "sub" }, ` problem ${tile.draw}`)), h("b", null, hidden("score "), num(tile.score))),
    tile.plot.some(known) ? spark(tile.plot) : h("span", { class: "none" }, "not measured"),
    h("div", { class: "foot" }, h("span", { class: "chips" }, tile.stages.map(([slot, stage]) => h("span", { class: "chip", "data-stage": stage, title: `${slot}: ${stageName(stage)}` }, hidden(`${slot} ${stageName(stage)}, `)))), h("span", null, tile.governor ? h("span", { class: "tag warning", title: tile.governor }, "ended") : `×${num(tile.size, 2)}`))));
  fill($("tiles"), tiles);
  if (selected === null || selected === undefined) $("tiles").removeAttribute("aria-activedescendant");
  else $("tiles").setAttribute("aria-activedescendant", `tile-${selected}`);
}

export function drawAggregates(rollout) {
  const many = rollout.sampled;
  $("aggregates").hidden = !many;
  if (!many) return;
  const table = (title, counts) => {
    const total = Object.values(counts).reduce((sum, one) => sum + one, 0);
    return h("div", { class: "panel" }, h("h3", null, title), total ? h("table", null, h("tbody", null, Object.entries(counts).filter(([, n]) => n).sort((a, b) => b[1] - a[1]).map(([name, n]) => h("tr", null, h("td", null, name.toLowerCase()), h("td", { class: "r" }, num(n, 0)), h("td", { class: "r faint" }, percent(n / total, 1)))))) : notMeasured());
  };
  fill($("aggregates"), h("div", { class: "panel" }, h("h3", null, `Scores of all ${num(rollout.all.episodes, 0)} episodes`), histogram(rollout.histogram, "Histogram of scores")), table("Operations, over all steps", rollout.counts.actions), table("Stage changes, over all episodes", rollout.counts.transitions));
}

export function drawRows(rollout, selected, { sort, choose, order, turn }) {
  const node = $("rows");
  node.hidden = !(rollout.sampled || rollout.pages > 1);
  if (node.hidden) return;
  const columns = [["env", "env"], ["draw", "problem"], ["score", "score"], ["accuracy", "accuracy"], ["return", "return"], ["size", "size"]];
  const head = h("tr", null, columns.map(([key, name]) => h("th", { scope: "col", class: "r" }, h("button", { type: "button", "aria-pressed": String(sort === key), onclick: () => order(key) }, name))), h("th", { scope: "col" }, "steps"), h("th", { scope: "col" }, "governor"));
  const rows = rollout.rows.map((row) => h("tr", { tabindex: 0, "aria-selected": String(row.env === selected), onclick: () => choose(row.env), onkeydown: (event) => event.key === "Enter" && choose(row.env) },
    h("td", { class: "r" }, row.env), h("td", { class: "r" }, row.draw), h("td", { class: "r" }, num(row.score)), h("td", { class: "r" }, num(row.accuracy)), h("td", { class: "r" }, num(row.return)), h("td", { class: "r" }, `×${num(row.size, 2)}`), h("td", null, row.recorded ? "recorded" : h("span", { class: "faint" }, "not recorded")), h("td", null, row.governor ?? "")));
  fill(node, h("div", { class: "panel" }, h("h3", null, "Every episode ", h("span", { class: "sub" }, `page ${rollout.page + 1} of ${rollout.pages} `), h("span", { class: "stepper" }, h("button", { type: "button", "aria-label": "Page before", disabled: rollout.page === 0, onclick: () => turn(-1) }, "◀"), h("button", { type: "button", "aria-label": "Next page", disabled: rollout.page + 1 >= rollout.pages, onclick: () => turn(1) }, "▶"))), h("div", { class: "scroll short", tabindex: 0, role: "region", "aria-label": "Every episode" }, h("table", null, h("thead", null, head), h("tbody", null, rows)))));
}

export function drawFindings(found) {
  const counts = Object.entries(found.counts).sort((a, b) => b[1] - a[1]);
  $("finding-counts").textContent = counts.map(([kind, n]) => `${n} ${kind.replaceAll("_", " ")}`).join(", ");
  if (!found.events.length) { fill($("events"), h("p", { class: "none" }, "Nothing was reported.")); return; }
  const rows = found.events.map((one) => h("tr", null, h("td", { class: "r" }, one.update), h("td", null, h("span", { class: `tag ${one.severity}` }, (one.name ?? one.kind).replaceAll("_", " "))), h("td", null, one.env === null ? "" : `#${one.env}${one.epoch === null ? "" : `, epoch ${one.epoch + 1}`}`), h("td", null, one.message), h("td", { class: "faint" }, one.remedy)));
  fill($("events"), h("table", null, h("thead", null, h("tr", null, ["update", "what", "where", "said", "what to do"].map((name, i) => h("th", { scope: "col", class: i ? null : "r" }, name)))), h("tbody", null, rows)));
}

export function drawLeaderboard(found, run, go) {
  const rows = found.best.map((one) => h("tr", { tabindex: 0, onclick: () => go(one), onkeydown: (event) => event.key === "Enter" && go(one) }, h("td", { class: "r" }, num(one.score)), h("td", { class: "r" }, num(one.accuracy)), h("td", { class: "r" }, `×${num(one.size, 2)}`), h("td", { class: "r" }, one.draw), h("td", null, `${one.arm}, update ${one.update} #${one.env}`), h("td", null, one.kept === null ? h("span", { class: "none" }, "not recorded") : one.kept.join(", ") || "unfinished seeds only"), h("td", null, one.kept === null ? "" : h("a", { href: `/api/runs/${run}/episode?update=${one.update}&arm=${encodeURIComponent(one.arm)}&env=${one.env}`, download: `network-${one.draw}.json`, onclick: (event) => event.stopPropagation() }, "recipe"))));
  fill($("best"), rows.length ? h("table", null, h("thead", null, h("tr", null, ["score", "accuracy", "size", "problem", "episode", "kept", "download"].map((name, i) => h("th", { scope: "col", class: i < 4 ? "r" : null }, name)))), h("tbody", null, rows)) : h("p", { class: "none" }, "No network has grown yet."));
  fill($("files"), found.files.length ? h("table", null, h("tbody", null, found.files.map((file) => h("tr", null, h("td", null, h("a", { href: `/api/runs/${run}/files/${file.name.split("/").map(encodeURIComponent).join("/")}`, download: true }, file.name)), h("td", { class: "r faint" }, bytes(file.bytes)))))) : h("p", { class: "none" }, "There are no files yet."));
}

export function drawSettings(view) {
  const named = Object.entries(view.settings ?? {});
  fill($("setting-list"), named.length ? named.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, Array.isArray(value) ? value.join(", ") : String(value)))) : h("p", { class: "none" }, "not recorded"));
}

export function drawComparison(node, mine, other) {
  const length = Math.max(mine.curves.updates.at(-1) ?? 1, other.curves.updates.at(-1) ?? 1);
  const x = (curves) => curves.updates;
  const panel = (title, name) => {
    const place = h("div", { class: "chart" });
    return [h("div", { class: "panel" }, h("h3", null, title), place), () => chart(place, { label: title, x: length === mine.curves.updates.at(-1) ? x(mine.curves) : x(other.curves), series: [{ name: mine.view.name, x: x(mine.curves), values: mine.curves.series[name] ?? [], color: "var(--s1)" }, { name: other.view.name, x: x(other.curves), values: other.curves.series[name] ?? [], color: "var(--s2)", dash: "6 3" }] })];
  };
  const panels = [panel("Score", "episode/score"), panel("Size, × host", "episode/growth"), panel("Entropy", "entropy")];
  const keys = [...new Set([...Object.keys(mine.view.settings ?? {}), ...Object.keys(other.view.settings ?? {})])];
  const differing = keys.filter((key) => JSON.stringify(mine.view.settings?.[key]) !== JSON.stringify(other.view.settings?.[key]));
  const value = (view, name) => (known(view.latest?.[name]) ? num(view.latest[name], name === "episode/growth" ? 2 : 1) : "not measured");
  const lines = [["updates", (one) => one.view.update], ["score, last update", (one) => value(one.view, "episode/score")], ["held-out score", (one) => value(one.view, "evaluation/score")], ["accuracy, %", (one) => value(one.view, "episode/accuracy")], ["size, × host", (one) => value(one.view, "episode/growth")], ["steps per second", (one) => short(one.view.steps_per_second)], ...differing.map((key) => [key, (one) => String(one.view.settings?.[key] ?? "not set")])];
  fill(node, h("div", { class: "three" }, panels.map(([element]) => element)), h("div", { class: "panel", style: { "margin-top": "12px" } }, h("h3", null, "Side by side ", h("span", { class: "sub" }, differing.length ? "with the settings that differ" : "all settings are the same")), h("table", null, h("thead", null, h("tr", null, h("th", { scope: "col" }, "of the run"), h("th", { scope: "col", class: "r" }, mine.view.name), h("th", { scope: "col", class: "r" }, other.view.name))), h("tbody", null, lines.map(([name, of]) => h("tr", null, h("th", { scope: "row" }, name), h("td", { class: "r" }, of(mine)), h("td", { class: "r" }, of(other))))))));
  panels.forEach(([, drawIt]) => drawIt());
}
