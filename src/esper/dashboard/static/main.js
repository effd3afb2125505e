// What is looked at, what is asked for, and what happens on a key.
import { $, h, fill, num } from "./dom.js";
import { drawNetwork, drawLanes, stageLegend } from "./network.js";
import { drawDecisions, drawWhy, drawChanges, drawTerms } from "./decisions.js";
import * as panels from "./panels.js";

const look = { run: 0, update: null, arm: "train", env: null, epoch: null, sort: "env", page: 0, follow: true, other: null };
const have = { view: null, curves: null, rollout: null, episode: null, runs: [] };

async function ask(path) {
  const answer = await fetch(`/api/${path}`);
  if (!answer.ok) throw new Error(`${answer.status}: ${await answer.text()}`);
  return answer.json();
}

function complain(error) {
  $("notice").hidden = !error;
  $("notice").textContent = error ? `The page could not be brought up to date: ${error.message}` : "";
}

// -- asking -----------------------------------------------------------------------------------------------------------

let busy = false, again = false;
// Answers may overtake each other: one to a question that has been asked anew since is not drawn.
const asked = { rollout: 0, episode: 0, comparison: 0 };

async function refresh() {
  if (busy) { again = true; return; }
  busy = true;
  try {
    const shown = look.run, run = `runs/${shown}`;
    const [view, curves] = await Promise.all([ask(`${run}/overview`), ask(`${run}/curves`)]);
    if (shown !== look.run) throw null;
    Object.assign(have, { view, curves });
    panels.drawHeader(view);
    panels.drawOverview(view, curves);
    const training = view.kind === "run";
    for (const id of ["environments", "policy", "leaderboard", "settings", "findings", "comparison"]) $(id).hidden = !training && id !== "leaderboard" && id !== "findings";
    document.querySelectorAll("nav a").forEach((link) => { link.hidden = $(link.hash.slice(1)).hidden; });
    if (training) { panels.drawLearning(curves, view); panels.drawPolicy(curves); panels.drawSettings(view); }
    await refreshRollout();
    const [found, best] = await Promise.all([ask(`${run}/findings`), ask(`${run}/leaderboard`)]);
    if (shown !== look.run) throw null;
    panels.drawFindings(found);
    panels.drawLeaderboard(best, look.run, goTo);
    await refreshComparison();
    if (shown !== look.run) throw null;
    complain(null);
    document.body.dataset.ready = String(view.update);
  } catch (error) {
    if (error) complain(error);  // null: another run was chosen meanwhile, which is asked for next
  }
  busy = false;
  if (again) { again = false; refresh(); }
}

// Of what is under way, nothing is wanted any more.
function forget() {
  for (const what of Object.keys(asked)) asked[what] += 1;
}

async function refreshRollout() {
  if (have.view?.kind === "growth") {
    Object.assign(look, { update: 1, env: 0, arm: "train" });
    await refreshEpisode(have.view.state.name === "running");
    return;
  }
  const at = look.follow || look.update === null ? "" : `&update=${look.update}`;
  const mine = ++asked.rollout;
  const rollout = await ask(`runs/${look.run}/rollout?arm=${encodeURIComponent(look.arm)}&sort=${look.sort}&page=${look.page}${at}`);
  if (mine !== asked.rollout) return;
  const moved = !have.rollout || have.rollout.update !== rollout.update || have.rollout.arm !== rollout.arm;
  have.rollout = rollout;
  look.update = rollout.update;
  if (look.env === null || (moved && !rollout.tiles.some((tile) => tile.env === look.env) && !rollout.rows.some((row) => row.env === look.env))) look.env = busiest(rollout);
  $("newer").disabled = rollout.update >= rollout.newest;
  $("older").disabled = rollout.update <= 1;
  const arms = rollout.arms.length ? rollout.arms : [look.arm];
  fill($("arm"), arms.map((name) => h("option", { value: name, selected: name === look.arm }, name)));
  $("arm-label").hidden = arms.length < 2;
  panels.drawTiles(rollout, look.env, chooseEnv);
  panels.drawAggregates(rollout);
  panels.drawRows(rollout, look.env, { sort: look.sort, choose: chooseEnv, order: (key) => { look.sort = key; look.page = 0; refreshRollout().catch(complain); }, turn: (by) => { look.page += by; refreshRollout().catch(complain); } });
  await refreshEpisode(moved);
}

// The episode with the most to see: the one that kept the most seeds, the better one of two.
function busiest(rollout) {
  const kept = (tile) => tile.stages.filter(([, stage]) => stage === "FOSSILIZED").length;
  const tiles = [...rollout.tiles].sort((a, b) => kept(b) - kept(a) || b.stages.length - a.stages.length || (b.score ?? 0) - (a.score ?? 0));
  return tiles[0]?.env ?? rollout.rows[0]?.env ?? null;
}

async function refreshEpisode(moved = true) {
  if (look.env === null) { fill($("now"), h("p", { class: "none" }, "No episode is recorded yet: the first update is under way.")); return; }
  const mine = ++asked.episode, before = look.epoch;
  const episode = await ask(`runs/${look.run}/episode?update=${look.update}&arm=${encodeURIComponent(look.arm)}&env=${look.env}`);
  if (mine !== asked.episode) return;
  have.episode = episode;
  const chosen = look.epoch !== before;  // while the answer was under way
  if ((moved && !chosen) || look.epoch === null || look.epoch >= episode.epochs) look.epoch = Math.max(0, firstDecision(episode));
  const result = episode.result;
  const growth = have.view?.kind === "growth";
  const title = growth ? `${episode.epochs} epochs` : `environment ${episode.env}, update ${episode.update}${episode.arm === "train" ? "" : `, ${episode.arm}`}${result ? `, problem ${result.draw}: score ${num(result.score)}, ${num(result.parameters, 0)} parameters (host ${num(result.host_parameters, 0)})` : ""}`;
  $("episode-title").textContent = title;
  drawEpisode();
  drawNow(episode);
  drawChanges($("changes"), episode);
  drawTerms($("terms"), episode.terms);
  $("terms-panel").hidden = growth;
  $("episode-extra").classList.toggle("two", !growth);
  $("t-learning").textContent = growth ? "Validation accuracy by epoch" : "Score by update";
  if (growth) panels.drawAccuracy(episode);
}

function firstDecision(episode) {
  if (have.view?.kind === "growth" && have.view.state.name === "running") return episode.epochs - 1;
  const at = episode.steps.findLastIndex((step) => step.op !== "WAIT");
  return at < 0 ? episode.epochs - 1 : at;
}

function drawEpisode() {
  const { episode } = have, epoch = look.epoch;
  $("why-title").textContent = `Why, epoch ${epoch + 1}`;
  drawNetwork($("drawing"), episode, epoch);
  drawLanes($("lanes"), episode, epoch, chooseEpoch);
  drawDecisions($("decisions"), episode, epoch, chooseEpoch);
  drawWhy($("why"), episode, epoch);
}

function drawNow(episode) {
  const last = Math.max(0, episode.epochs - 1), growth = have.view?.kind === "growth";
  $("now-title").textContent = growth ? `epoch ${episode.epochs}` : `environment ${episode.env} at the end of update ${episode.update}`;
  const drawing = h("div"), lanes = h("div", { class: "lanes" });
  fill($("now"), drawing, lanes);
  drawNetwork(drawing, episode, last, { compact: true });
  drawLanes(lanes, episode, last, () => {});
}

async function refreshComparison() {
  const others = have.runs.filter((run) => run.id !== look.run);
  $("other-label").hidden = !others.length;
  if (!others.length) { fill($("compared"), h("p", { class: "none" }, "Name another run to compare with: esper watch RUN OTHER")); return; }
  if (look.other === null || look.other === look.run) look.other = others[0].id;
  fill($("other"), others.map((run) => h("option", { value: run.id, selected: run.id === look.other }, run.name)));
  const mine = ++asked.comparison;
  const [view, curves] = await Promise.all([ask(`runs/${look.other}/overview`), ask(`runs/${look.other}/curves`)]);
  if (mine !== asked.comparison) return;
  if (view.kind !== "run") { fill($("compared"), h("p", { class: "none" }, "A single network has no updates to compare.")); return; }
  panels.drawComparison($("compared"), { view: have.view, curves: have.curves }, { view, curves });
}

// -- choosing ---------------------------------------------------------------------------------------------------------

function chooseEnv(env) {
  look.env = env;
  panels.drawTiles(have.rollout, env, chooseEnv);
  refreshEpisode().catch(complain);
}

function chooseEpoch(epoch) {
  look.epoch = Math.max(0, Math.min(have.episode.epochs - 1, epoch));
  const had = $("decisions").contains(document.activeElement) && document.activeElement !== $("decisions");
  drawEpisode();
  const row = $("decisions").querySelector(`[data-epoch="${look.epoch}"]`);
  if (had) row?.focus();
  if (row) $("decisions").scrollTop = Math.max(0, row.offsetTop - $("decisions").clientHeight / 2);
}

function goTo(best) {
  Object.assign(look, { update: best.update, arm: best.arm, env: best.env, epoch: null, follow: false });
  $("follow").checked = false;
  have.rollout = null;
  refreshRollout().then(() => $("network").scrollIntoView()).catch(complain);
}

function turnUpdate(by) {
  const next = look.update + by;
  if (next < 1 || next > have.rollout.newest) return;
  look.follow = false;
  look.update = next;
  look.page = 0;
  $("follow").checked = false;
  refreshRollout().catch(complain);
}

function follow(on) {
  look.follow = on;
  $("follow").checked = on;
  if (on) refreshRollout().catch(complain);
}

// -- theme ------------------------------------------------------------------------------------------------------------

const THEMES = { auto: ["◐", "Theme: as the system has it"], light: ["☀", "Theme: light"], dark: ["☾", "Theme: dark"] };
const dark = matchMedia("(prefers-color-scheme: dark)");

function setTheme(name) {
  try { localStorage.setItem("esper-theme", name); } catch { /* a private window keeps nothing */ }
  document.documentElement.dataset.chosen = name;
  document.documentElement.dataset.theme = name === "auto" ? (dark.matches ? "dark" : "light") : name;
  $("theme").textContent = THEMES[name][0];
  $("theme").setAttribute("aria-label", THEMES[name][1]);
}

function nextTheme() {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf(document.documentElement.dataset.chosen) + 1) % names.length]);
}

function startTheme() {
  let kept = "auto";
  try { kept = localStorage.getItem("esper-theme") ?? "auto"; } catch { /* the same */ }
  setTheme(THEMES[kept] ? kept : "auto");
  dark.addEventListener("change", () => document.documentElement.dataset.chosen === "auto" && setTheme("auto"));
}

// -- keys -------------------------------------------------------------------------------------------------------------

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName) || $("keys").open) return;
  const sections = [...document.querySelectorAll("nav a")].filter((link) => !link.hidden);
  if (/^[1-9]$/.test(event.key) && sections[event.key - 1]) { sections[event.key - 1].click(); sections[event.key - 1].focus(); }
  else if (event.key === "[") turnUpdate(-1);
  else if (event.key === "]") turnUpdate(1);
  else if (event.key === "f") follow(!look.follow);
  else if (event.key === "t") nextTheme();
  else if (event.key === "?") $("keys").showModal();
  else return;
  event.preventDefault();
}

function onTileKey(event) {
  const tiles = [...$("tiles").children];
  const columns = Math.max(1, tiles.filter((tile) => tile.offsetTop === tiles[0]?.offsetTop).length);
  const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -tiles.length, End: tiles.length }[event.key];
  if (by === undefined || !tiles.length) return;
  event.preventDefault();
  const at = tiles.findIndex((tile) => Number(tile.dataset.env) === look.env);
  const next = tiles[Math.max(0, Math.min(tiles.length - 1, at + by))];
  chooseEnv(Number(next.dataset.env));
  $(`tile-${next.dataset.env}`).scrollIntoView({ block: "nearest" });
}

function onDecisionKey(event) {
  const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  if (by === undefined || !have.episode) return;
  event.preventDefault();
  chooseEpoch(look.epoch + by);
}

// -- live -------------------------------------------------------------------------------------------------------------

function listen() {
  const stream = new EventSource("/api/live");
  let waiting = null;
  stream.onmessage = (event) => {
    const news = JSON.parse(event.data);
    if (news.run !== look.run && news.run !== look.other) return;
    waiting ??= setTimeout(() => { waiting = null; refresh(); }, 150);
  };
  let before = false;
  stream.onopen = () => {
    $("footer").textContent = "Esper · connected";
    if (before) refresh();  // what happened while the connection was lost
    before = true;
  };
  stream.onerror = () => { $("footer").textContent = "Esper · not connected: `esper watch` has ended, or the connection is being made again"; };
  setInterval(() => {
    const run = look.run;
    if (document.hidden || have.view?.state.name !== "running") return;
    ask(`runs/${run}/overview`).then((view) => { if (run === look.run) { have.view = view; panels.drawHeader(view); } }).catch(() => {});
  }, 5000);
}

function marks() {
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) links.forEach((link, id) => link.setAttribute("aria-current", String(id === entry.target.id)));
  }, { rootMargin: "-110px 0px -70% 0px" });
  links.forEach((_, id) => seen.observe($(id)));
}

async function start() {
  startTheme();
  stageLegend($("stages"));
  have.runs = await ask("runs");
  $("picker").hidden = have.runs.length < 2;
  $("run-name").classList.toggle("visually-hidden", have.runs.length > 1);
  fill($("runs"), have.runs.map((run) => h("option", { value: run.id }, run.name)));
  $("runs").addEventListener("change", (event) => { Object.assign(look, { run: Number(event.target.value), update: null, env: null, epoch: null, arm: "train", page: 0, follow: true, other: null }); have.rollout = null; $("follow").checked = true; forget(); refresh(); });
  $("other").addEventListener("change", (event) => { look.other = Number(event.target.value); refreshComparison().catch(complain); });
  $("arm").addEventListener("change", (event) => { Object.assign(look, { arm: event.target.value, env: null, page: 0 }); refreshRollout().catch(complain); });
  $("older").addEventListener("click", () => turnUpdate(-1));
  $("newer").addEventListener("click", () => turnUpdate(1));
  $("follow").addEventListener("change", (event) => follow(event.target.checked));
  $("theme").addEventListener("click", nextTheme);
  $("help").addEventListener("click", () => $("keys").showModal());
  $("tiles").addEventListener("keydown", onTileKey);
  $("decisions").addEventListener("keydown", onDecisionKey);
  document.addEventListener("keydown", onKey);
  new ResizeObserver(() => { if (have.episode) { drawLanes($("lanes"), have.episode, look.epoch, chooseEpoch); } }).observe($("lanes"));
  marks();
  listen();  // before the first answers: an update between the two must not be missed
  await refresh();
}

start().catch(complain);
