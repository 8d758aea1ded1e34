
"use strict";
// What a model or a world wrote is put on the page by document.createTextNode alone.

const { runs, within } = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const KINDS = { train: "training", eval: "evaluation" };
const SHOWN_TEXT = 4000; // characters of a text before a button shows the rest
const SHOWN_GROUPS = 80;
const NAMES = { // of a step's numbers: how they are called, and what they are
  implicit_reward: ["step reward", "r_phi = beta (log pi_phi - log pi_old), less what log pi_old explains: the PRM's reward; in the ablations that of --step-reward"],
  ground_truth_reward: ["step reward", "the world's own reward, as the algorithm saw it"],
  step_advantage: ["A^S", "step advantage: the step reward, standardised in its group"],
  episode_advantage: ["A^E", "episode advantage: the outcome against the group's others"],
  advantage: ["A", "the advantage that the policy was trained with"],
  value: ["value", "the critic's value of the step"],
  ratio: ["ratio", "pi_theta / pi_old, as the step's minibatch saw it"],
  clipped: ["clipped", "whether the ratio was outside 1 +- clip; with a ratio per token, the share"],
  progress: ["truth", "by how much the world says that the goal came nearer; no algorithm sees it"],
  reward: ["game reward", "the game's own reward; no algorithm but an ablation sees it"],
  logprob: ["log \u03c0", "log-probability of the answer when it was sampled [nats]"],
};
const ORDER = Object.keys(NAMES);
const NAMED = new Set(["observation", "action", "valid", "picture", "tokens"]); // shown elsewhere

// ------------ elements ------------

function el(tag, attributes = {}, ...children) {
  const svg = /^(svg|path|line|rect|circle|text|tspan|g|title|defs|pattern)$/.test(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "colour") node.style.setProperty("--colour", value);
    else if (name === "background") node.style.background = value;
    else if (name === "ink") node.style.color = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(3).filter((child) => child !== null && child !== undefined));
  return node;
}

const fill = (node, ...children) => node.replaceChildren(...children.flat(3).filter((c) => c));

/** A^S as A and a raised S. */
function label(name) {
  const words = (NAMES[name] || [name.replaceAll("_", " ")])[0];
  const [base, raised] = words.split("^");
  return raised ? [base, el("sup", {}, raised)] : [base];
}
const plainLabel = (name) => (NAMES[name] || [name.replaceAll("_", " ")])[0].replace("^", "");

/** Characters that would move, hide or reorder others are shown by their code. */
function characters(text) {
  const parts = [];
  let last = 0;
  for (const found of text.matchAll(/[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu)) {
    const code = found[0].codePointAt(0);
    if (code === 10 || code === 9 || code === 0x200c || code === 0x200d) continue;
    const name = "U+" + code.toString(16).toUpperCase().padStart(4, "0");
    parts.push(text.slice(last, found.index), el("span", { class: "code" }, name));
    last = found.index + found[0].length;
  }
  parts.push(text.slice(last));
  return parts;
}

/** A text in a node; of a long one the beginning, and a button for the rest. */
function written(node, text, render = characters) {
  const whole = () => fill(node, render(text));
  if (text.length <= SHOWN_TEXT) {
    whole();
    return node;
  }
  let end = SHOWN_TEXT;
  if (/[\ud800-\udbff]/.test(text[end - 1])) end -= 1;
  const all = `Show all ${text.length.toLocaleString("en")} characters`;
  const button = el("button", { type: "button", class: "clip", onclick: whole }, all);
  fill(node, render(text.slice(0, end)), "\u2026", button);
  return node;
}

/** A number in few characters, with a sign where signs matter. */
function written_number(value, signed = true) {
  if (value === null || value === undefined) return "\u2013";
  if (typeof value === "boolean") return value ? "yes" : "no";
  const size = Math.abs(value);
  let digits = size >= 100 ? 1 : size >= 10 ? 2 : 3;
  if (size && size < 0.0005) digits = 5;
  const text = size.toFixed(digits);
  const sign = value < 0 && Number(text) ? "\u2212" : signed ? "+" : "";
  return sign + text;
}

const short = (value, digits = 3) => (value === null ? "\u2013" : String(Number(value.toFixed(digits))));

function entry(name, value) {
  if (value === null || value === undefined) return "\u2013";
  if (name === "clipped") {
    if (value === 0 || value === 1) return value ? "yes" : "no";
    return `${Math.round(100 * value)} %`;
  }
  return written_number(value, name !== "ratio" && name !== "value");
}

// ------------ what is shown ------------

const state = {
  run: 0, kind: "train", iteration: null, task: "", outcome: "any", invalid: false,
  truncated: false, sort: "best", by: null, shown: SHOWN_GROUPS,
  open: null, // {run, kind, iteration, task, episode, step}
  against: null, // {run, kind, iteration, episode}
};

/** The episodes of a set, by task. */
function groupsOf(set) {
  if (!set.groups) {
    set.groups = new Map();
    set.episodes.forEach(([task, outcome, success, truncated, invalid, steps], place) => {
      if (!set.groups.has(task)) set.groups.set(task, []);
      const group = set.groups.get(task);
      group.push({ task, outcome, success, truncated, invalid, steps, place, number: group.length });
    });
  }
  return set.groups;
}

const setOf = (run, kind, iteration) =>
  runs[run].sets.find((set) => set.kind === kind && set.iteration === iteration);
const groupOf = ({ run, kind, iteration, task }) => {
  const set = setOf(run, kind, iteration);
  return (set && groupsOf(set).get(task)) || [];
};
const who = (run) => (runs.length > 1 ? `${runs[run].name}, ` : ""); // before what is said of a run
const mean = (values) => values.reduce((sum, x) => sum + x, 0) / values.length;
const outcomes = (group) => group.map((e) => e.outcome).filter((x) => x !== null);
const meanOutcome = (group) => (outcomes(group).length ? mean(outcomes(group)) : 0);

const unpacked = new Map();
async function stepsOf(set) {
  if (!unpacked.has(set.chunk)) {
    const bytes = Uint8Array.from(atob($(`chunk-${set.chunk}`).textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    unpacked.set(set.chunk, new Response(stream).json());
  }
  return unpacked.get(set.chunk);
}

/** The steps of an episode as objects. */
async function readSteps({ run, kind, iteration }, episode) {
  const { columns, texts, episodes } = await stepsOf(setOf(run, kind, iteration));
  return episodes[episode.place].map((entries) => {
    const step = Object.fromEntries(columns.map((name, i) => [name, entries[i]]));
    for (const name of ["observation", "action", "picture"]) {
      if (typeof step[name] === "number") step[name] = texts[step[name]];
    }
    return step;
  });
}

// ------------ links ------------

const besideOf = ({ run, kind, iteration, episode }) => [run, kind, iteration, episode].join(".");

function hashOf(open, against = null) {
  const words = new URLSearchParams();
  if (runs.length > 1) words.set("run", open.run);
  words.set("set", open.kind);
  for (const name of ["iteration", "task", "episode"]) words.set(name, open[name]);
  if (open.step !== null && open.step !== undefined) words.set("step", open.step);
  if (state.by) words.set("by", state.by);
  if (against) words.set("beside", besideOf(against));
  return "#" + words;
}

function readHash() {
  const words = new URLSearchParams(location.hash.slice(1));
  if (!words.has("task")) return false;
  const number = (name) => (words.has(name) ? Number(words.get(name)) : null);
  const open = { run: number("run") || 0, kind: words.get("set"), iteration: number("iteration"),
    task: number("task"), episode: number("episode") || 0, step: number("step") };
  if (!runs[open.run] || !groupOf(open)[open.episode]) return false;
  state.open = open;
  if (runs[open.run].scales[words.get("by")]) state.by = words.get("by");
  state.against = null;
  if (words.has("beside")) {
    const [run, kind, iteration, episode] = words.get("beside").split(".");
    const against = { run: +run, kind, iteration: +iteration, episode: +episode };
    if (runs[run] && groupOf({ ...against, task: open.task })[episode]) state.against = against;
  }
  return true;
}

/** Show what is open, and let the address say it. */
function go(open, against = state.against, scroll = false) {
  const sameTask = state.open && open.task === state.open.task;
  state.open = open;
  state.against = sameTask ? against : partner(open);
  history.replaceState(null, "", hashOf(state.open, state.against));
  markCurrent();
  return drawEpisodes(scroll);
}

/** Where two runs are compared: the same task of the other one. */
function partner(open) {
  if (runs.length < 2) return null;
  const found = { run: 1 - open.run, kind: open.kind, iteration: open.iteration, episode: 0 };
  return groupOf({ ...found, task: open.task }).length ? found : null;
}

// ------------ head ------------

function drawHead() {
  fill($("title"), characters(runs.map((run) => run.name).join(" against ")));
  fill($("about"), runs.map((run, n) => {
    const successes = run.metrics["eval/success"] || [];
    const seen = run.iterations.filter((_, i) => successes[i] !== null && i < successes.length);
    const values = successes.filter((x) => x !== null);
    const validates = run.flags.eval_set === "validation";
    const facts = [run.script, run.described, `${run.iterations.at(-1) ?? 0} iterations`];
    if (values.length) {
      const change = values.length > 1 ? ` to ${values.at(-1).toFixed(3)}` : "";
      const where = values.length > 1 ? `iterations ${seen[0]} and ${seen.at(-1)}` : "the start";
      facts.push(`success on the ${validates ? "validation tasks" : "panel"} ${values[0].toFixed(3)}${change} (${where})`);
    }
    const name = runs.length > 1 ? [runKey(n), el("b", {}, characters(run.name)), ": "] : [];
    const flags = JSON.stringify(run.flags, null, 1).slice(2, -2);
    return [
      el("p", { class: `facts run${n}-facts` }, name, facts.filter(Boolean).join(" \u00b7 ")),
      run.told ? el("p", { class: "note" }, run.told,
        " The flag --episodes of view.py shows more.") : null,
      el("details", {}, el("summary", {}, "Command and flags"),
        el("pre", {}, characters(run.command)), el("pre", {}, characters(flags))),
    ];
  }));
}

function runKey(n) {
  return el("svg", { class: `run${n}`, width: 28, height: 10, viewBox: "0 0 28 10", "aria-hidden": true },
    el("path", { class: `train run${n}`, d: "M1 5H27" }));
}

// ------------ curves ------------

const CURVES = ["success", "return", "episode_steps", "valid_actions", "prm/pair_accuracy",
  "prm/skill", "prm/credit_share", "prm/advantage_progress_correlation", "policy/clip_fraction",
  "policy/approx_kl"];

/** {kind: key of the metrics}: training and evaluation of one thing stand in one picture. */
function keysOf(name) {
  const has = (key) => runs.some((run) => (run.metrics[key] || []).some((x) => x !== null));
  const pair = { train: `train/${name}`, eval: `eval/${name}` };
  const found = Object.fromEntries(Object.entries(pair).filter(([, key]) => has(key)));
  if (Object.keys(found).length) return found;
  return has(name) ? { train: name } : null;
}

function drawCurves() {
  const shown = CURVES.filter(keysOf);
  fill($("curve-keys"), curveKeys(), el("span", { class: "key" }, "against iterations"));
  fill($("curves"), shown.map((name) => curve(name)));
  const keys = new Set();
  for (const run of runs) {
    for (const key of Object.keys(run.metrics)) keys.add(key.replace(/^(train|eval)\//, ""));
  }
  const others = [...keys].filter((key) => !shown.includes(key) && keysOf(key)).sort();
  fill($("more"), el("option", { value: "" }, "choose a metric"),
    others.map((key) => el("option", { value: key }, key)));
  $("more").onchange = () => {
    if (!$("more").value) return;
    $("curves").append(curve($("more").value));
    $("more").selectedOptions[0].remove();
    $("more").value = "";
  };
}

function niceTicks(low, high) {
  const rough = (high - low) / 3 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((x) => x * power).find((x) => x >= rough);
  const ticks = [];
  for (let i = Math.floor(low / step + 1e-9); i <= Math.ceil(high / step - 1e-9); i++) {
    ticks.push(Number((i * step).toPrecision(12)));
  }
  return ticks.length > 1 ? ticks : [ticks[0], ticks[0] + step];
}

function curve(name) {
  const keys = keysOf(name);
  const [width, height, left, right, top, bottom] = [300, 132, 36, 48, 8, 20];
  const series = [];
  runs.forEach((run, n) => {
    for (const [kind, key] of Object.entries(keys)) {
      const points = run.iterations.map((x, i) => [x, (run.metrics[key] || [])[i] ?? null]);
      series.push({ n, kind, points: points.filter(([, y]) => y !== null) });
    }
  });
  const all = series.flatMap((one) => one.points);
  const ys = niceTicks(Math.min(...all.map((p) => p[1])), Math.max(...all.map((p) => p[1])));
  const last = Math.max(1, ...runs.flatMap((run) => run.iterations));
  const x = (value) => left + (width - left - right) * value / last;
  const y = (value) => height - bottom
    - (height - top - bottom) * (value - ys[0]) / (ys.at(-1) - ys[0]);
  const percent = (value) => Number(value.toPrecision(6)).toLocaleString("en", { maximumSignificantDigits: 3 })
    .replace("-", "\u2212");

  const svg = el("svg", { class: "curve", viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `${name} against iterations` });
  for (const tick of ys) {
    svg.append(el("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }),
      el("text", { x: left - 5, y: y(tick) + 3.5, "text-anchor": "end" }, percent(tick)));
  }
  svg.append(el("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
  const xs = niceTicks(0, last).filter((tick) => tick <= last && Number.isInteger(tick));
  for (const tick of xs) {
    svg.append(el("text", { x: x(tick), y: height - 6, "text-anchor": "middle" }, String(tick)));
  }
  const ends = [];
  for (const { n, kind, points } of series) {
    if (!points.length) continue;
    const d = points.map(([px, py], i) => `${i ? "L" : "M"}${x(px).toFixed(1)} ${y(py).toFixed(1)}`);
    svg.append(el("path", { class: `${kind} run${n}`, d: d.join("") }));
    if (kind === "eval") svg.append(...points.map(([px, py]) => dot(n, x(px), y(py))));
    ends.push({ at: y(points.at(-1)[1]), value: points.at(-1)[1], n });
  }
  ends.sort((a, b) => a.at - b.at);
  ends.forEach((end, i) => {
    if (i && end.at < ends[i - 1].at + 11) end.at = ends[i - 1].at + 11;
    svg.append(el("text", { x: width - right + 6, y: end.at + 3.5 }, percent(end.value)));
  });
  const iterations = [...new Set(runs.flatMap((run) => run.iterations))];
  const half = (width - left - right) / last / 2;
  for (const i of iterations) {
    const told = series.flatMap(({ n, kind, points }) => {
      const point = points.find(([px]) => px === i);
      return point ? [`${who(n)}${keys.eval ? KINDS[kind] : name}: ${written_number(point[1], false)}`] : [];
    });
    const [from, to] = [Math.max(left, x(i) - half), Math.min(width - right, x(i) + half)];
    svg.append(el("rect", { class: "hit", x: from, y: top, width: to - from,
      height: height - top - bottom, onclick: () => chooseIteration(i) },
    el("title", {}, [`iteration ${i}`, ...told].join("\n"))));
  }
  return el("figure", {}, el("figcaption", { title: Object.values(keys).join(", ") }, titleOf(name)), svg);
}

const titleOf = (name) => name.replace("prm/", "PRM: ").replace("policy/", "policy: ")
  .replaceAll("_", " ").replace(/ kl$/, " KL");

/** An evaluation: round of the first run, square of the second. */
const dot = (n, x, y) => (n
  ? el("rect", { class: "eval run1", x: x - 2.6, y: y - 2.6, width: 5.2, height: 5.2 })
  : el("circle", { class: "eval run0", cx: x, cy: y, r: 2.8 }));

/** The legend of all curves. */
function curveKeys() {
  return runs.flatMap((_, n) => Object.entries(KINDS).map(([kind, words]) => el("span", { class: "key" },
    el("svg", { viewBox: "0 0 28 10", "aria-hidden": true },
      el("path", { class: `${kind} run${n}`, d: "M1 5H27" }), kind === "eval" ? dot(n, 14, 5) : null),
    characters(who(n) + words))));
}

// ------------ groups ------------

function drawFilters() {
  const field = (name, words, control) => el("label", {}, words, control);
  const choices = (name, options) => el("select", { id: `filter-${name}` },
    options.map(([value, words]) => el("option", { value }, words)));
  const check = (name, words) => el("label", { class: "check" },
    el("input", { type: "checkbox", id: `filter-${name}` }), words);
  const kinds = Object.keys(KINDS).filter((kind) => runs.some((r) => r.sets.some((s) => s.kind === kind)));
  const sorts = [["best", "highest outcome first"], ["worst", "lowest outcome first"],
    ["mixed", "most mixed first"], ["task", "by task"]];
  if (runs.length > 1) sorts.push(["ahead", `${runs[0].name} ahead first`], ["behind", `${runs[1].name} ahead first`]);
  fill($("filters"),
    field("kind", "Episodes of", choices("kind", kinds.map((kind) => [kind, KINDS[kind]]))),
    field("iteration", "Iteration", choices("iteration", [])),
    field("task", "Task", el("input", { type: "text", inputmode: "numeric", id: "filter-task",
      placeholder: "any", autocomplete: "off" })),
    field("outcome", "Outcome", choices("outcome", [["any", "any"], ["solved", "success"],
      ["failed", "no success"], ["mixed", "groups with both"]])),
    el("label", { class: "wide" }, "Order", choices("sort", sorts)),
    check("invalid", "invalid steps"), check("truncated", "truncated"));
  for (const name of ["kind", "iteration", "task", "outcome", "sort", "invalid", "truncated"]) {
    const control = $(`filter-${name}`);
    control.addEventListener("input", () => {
      const value = control.type === "checkbox" ? control.checked : control.value;
      state[name] = name === "iteration" && value !== "all" ? Number(value) : value;
      state.shown = SHOWN_GROUPS;
      if (name === "kind") fillIterations();
      drawGroups();
    });
  }
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  if (!kinds.includes(state.kind)) state.kind = kinds[0];
  $("filter-kind").value = state.kind;
  fillIterations();
}

function fillIterations() {
  const all = new Set(runs.flatMap((run) => run.sets.filter((s) => s.kind === state.kind))
    .map((set) => set.iteration));
  const iterations = [...all].sort((a, b) => a - b);
  if (state.iteration !== "all" && !all.has(state.iteration)) state.iteration = iterations.at(-1) ?? "all";
  fill($("filter-iteration"), iterations.map((i) => el("option", { value: i }, String(i))),
    el("option", { value: "all" }, "all"));
  $("filter-iteration").value = state.iteration;
}

/** The nearest iteration that has episodes of this kind. */
function chooseIteration(wanted) {
  const options = [...$("filter-iteration").options].map((o) => o.value).filter((v) => v !== "all");
  if (!options.length) return;
  const near = options.reduce((a, b) => (Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a));
  state.iteration = Number(near);
  $("filter-iteration").value = near;
  state.shown = SHOWN_GROUPS;
  drawGroups();
}

function matching(episode) {
  if (state.outcome === "solved" && !episode.success) return false;
  if (state.outcome === "failed" && episode.success) return false;
  if (state.invalid && !episode.invalid) return false;
  return !state.truncated || episode.truncated;
}

/** The groups that the filters leave: {run, kind, iteration, task, group, kept, other}. */
function listed() {
  const rows = [];
  const task = state.task.trim();
  const seen = new Set();
  runs.forEach((run, n) => {
    for (const set of run.sets) {
      if (set.kind !== state.kind) continue;
      if (state.iteration !== "all" && set.iteration !== state.iteration) continue;
      for (const [number, group] of groupsOf(set)) {
        const key = `${set.iteration} ${number}`;
        if ((task && String(number) !== task) || seen.has(key)) continue;
        const at = { kind: set.kind, iteration: set.iteration, task: number };
        const other = runs.length > 1 && !n ? groupOf({ run: 1, ...at }) : [];
        if (runs.length > 1 && !other.length) continue; // the same tasks alone
        seen.add(key);
        const kept = [group, other].map((members) => members.filter(matching));
        if (!kept[0].length && !kept[1].length) continue;
        const mixed = (members) => new Set(members.map((e) => e.success)).size > 1;
        if (state.outcome === "mixed" && !mixed(group) && !mixed(other)) continue;
        rows.push({ run: n, ...at, group, other, kept });
      }
    }
  });
  return rows.sort(ORDERS[state.sort]);
}

const spread = ({ group }) => {
  const values = outcomes(group);
  return values.length ? mean(values.map((x) => Math.abs(x - meanOutcome(group)))) : 0;
};
const ahead = ({ group, other }) => meanOutcome(group) - meanOutcome(other);
const byTask = (a, b) => a.iteration - b.iteration || a.task - b.task;
const ORDERS = {
  best: (a, b) => meanOutcome(b.group) - meanOutcome(a.group) || byTask(a, b),
  worst: (a, b) => meanOutcome(a.group) - meanOutcome(b.group) || byTask(a, b),
  mixed: (a, b) => spread(b) - spread(a) || byTask(a, b),
  task: byTask,
  ahead: (a, b) => ahead(b) - ahead(a) || byTask(a, b),
  behind: (a, b) => ahead(a) - ahead(b) || byTask(a, b),
};

let rowsListed = [];
function drawGroups() {
  rowsListed = listed();
  const episodes = rowsListed.reduce((sum, row) => sum + row.kept[0].length + row.kept[1].length, 0);
  const groups = `${rowsListed.length.toLocaleString("en")} group${rowsListed.length === 1 ? "" : "s"}`;
  fill($("found"), `${groups}, ${episodes.toLocaleString("en")} episode${episodes === 1 ? "" : "s"}`,
    runs.length > 1 ? comparison() : null);
  fill($("groups"), rowsListed.slice(0, state.shown).map(groupRow));
  $("further").hidden = rowsListed.length <= state.shown;
  markCurrent();
}

/** What the comparison of two runs says over the tasks in the list. */
function comparison() {
  if (!rowsListed.length) return el("p", {}, "The two runs have no task in common here.");
  const [a, b] = [rowsListed.map((r) => meanOutcome(r.group)), rowsListed.map((r) => meanOutcome(r.other))];
  const difference = a.map((value, i) => value - b[i]);
  const count = (test) => difference.filter(test).length;
  return el("p", {}, "Mean outcome over the tasks of both: ", el("b", {}, characters(runs[0].name)),
    ` ${mean(a).toFixed(3)}, `, el("b", {}, characters(runs[1].name)), ` ${mean(b).toFixed(3)}, difference `,
    written_number(mean(difference)), `. ${count((d) => d > 1e-9)} tasks are better, `
    + `${count((d) => d < -1e-9)} worse, ${count((d) => Math.abs(d) <= 1e-9)} equal.`);
}

function groupRow(row) {
  const at = { run: row.run, kind: row.kind, iteration: row.iteration, task: row.task };
  const both = runs.length > 1;
  const first = row.kept[0][0] || row.group[0];
  const link = { ...at, episode: first.number, step: null };
  const where = state.iteration === "all" ? ` iteration ${row.iteration}` : "";
  const means = both ? `${meanOutcome(row.group).toFixed(2)}  ${meanOutcome(row.other).toFixed(2)}`
    : meanOutcome(row.group).toFixed(2);
  const told = both ? "mean outcome of the first run, and of the second" : "mean outcome";
  return el("li", { class: "group", "data-key": `${row.run} ${row.kind} ${row.iteration} ${row.task}` },
    el("a", { class: "task", href: hashOf(link), onclick: opens(link) }, `Task ${row.task}`,
      el("small", {}, where)),
    el("span", { class: "mean", title: told }, means),
    row.kept.map((members, n) => (members.length ? el("div", { class: "members" },
      both ? el("span", { class: "of" }, "AB"[n]) : null,
      members.map((episode) => member(episode, { ...at, run: both ? n : row.run }))) : null)));
}

function member(episode, at) {
  const link = { ...at, episode: episode.number, step: null };
  const told = [`episode ${episode.number + 1}: outcome ${short(episode.outcome)}`, stepsIn(episode),
    episode.success && "success", ...flaws(episode)].filter(Boolean).join(", ");
  const share = Math.min(1, Math.max(0, episode.outcome || 0));
  const grey = Math.round(255 - 195 * share);
  const kind = `member${episode.invalid ? " invalid" : ""}${episode.truncated ? " truncated" : ""}`;
  const words = short(episode.outcome, 2).replace(/^0\./, ".");
  return el("a", { class: kind, href: hashOf(link), onclick: opens(link), title: told,
    "aria-label": told, "data-key": keyOf(link), ink: inkOn([grey, grey, grey]),
    background: rgb([grey - 12 * share, grey, grey + 6 * share].map(Math.round)) }, words);
}

const stepsIn = ({ steps }) => `${steps} step${steps === 1 ? "" : "s"}`;
const flaws = (episode) => [episode.invalid && `${episode.invalid} invalid`, episode.truncated && "truncated"].filter(Boolean);
const keyOf = ({ run, kind, iteration, task, episode }) => [run, kind, iteration, task, episode].join(" ");
const opens = (link) => (event) => {
  event.preventDefault();
  go(link, null, true);
};

function markCurrent() {
  const { run, kind, iteration, task } = state.open || {};
  const key = `${runs.length > 1 ? 0 : run} ${kind} ${iteration} ${task}`;
  for (const row of document.querySelectorAll(".group")) {
    row.classList.toggle("current", row.dataset.key === key);
    for (const link of row.querySelectorAll(".member")) {
      if (state.open && link.dataset.key === keyOf(state.open)) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  }
}

function drawMarks() {
  const mark = (kind, words, text = "1") =>
    el("span", {}, el("i", { class: `member ${kind}`, "aria-hidden": true }, text), words);
  fill($("marks"), "A box is an episode with its outcome;", mark("invalid", "has invalid steps", "0"),
    mark("truncated", "truncated", "0"),
    runs.length > 1 ? [el("span", {}, "A ", characters(runs[0].name)), el("span", {}, "B ", characters(runs[1].name))] : null);
}

// ------------ colours ------------

const POSITIVE = [31, 95, 158], NEGATIVE = [169, 80, 12], NONE = [243, 244, 243];

/** The colour of a share from -1 to 1, as [red, green, blue]. */
function mix(share) {
  const end = share < 0 ? NEGATIVE : POSITIVE;
  const size = Math.min(1, Math.abs(share));
  return NONE.map((x, i) => Math.round(x + (end[i] - x) * size));
}
const rgb = (parts) => `rgb(${parts.join(" ")})`;

/** Black or white, whichever is read on this colour: a contrast of 4.5 or more. */
function inkOn(parts) {
  const [r, g, b] = parts.map((part) => {
    const x = part / 255;
    return x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
}

/** How a value is coloured by the run's scale: {share from -1 to 1, colour, ink}. */
function coloured(run, name, value) {
  if (value === null || value === undefined) return { share: 0, colour: "#fff", ink: "#5b666e" };
  const share = Math.max(-1, Math.min(1, value / runs[run].scales[name]));
  const parts = mix(share);
  return { share, colour: rgb(parts), ink: inkOn(parts) };
}

const colourings = () => ORDER.filter((name) => runs.some((run) => run.scales[name])
  && !["ratio", "clipped", "value", "logprob"].includes(name));

function drawCredit() {
  const names = colourings();
  if (!names.includes(state.by)) {
    const known = (name) => runs.every((run) => run.scales[name]);
    state.by = ["implicit_reward", "ground_truth_reward", "advantage"].find(known) || names[0];
  }
  const switches = names.map((name) => el("label", { title: (NAMES[name] || [])[1] },
    el("input", { type: "radio", name: "by", value: name, checked: name === state.by,
      onchange: () => {
        state.by = name;
        go(state.open);
        drawScale();
      } }), label(name)));
  const colours = el("fieldset", {}, el("legend", {}, "Steps are coloured by"),
    el("div", { class: "switch" }, switches), el("div", { class: "scale", id: "scale" }));
  fill($("credit"), names.length ? colours : null, el("div", { class: "beside", id: "beside" }));
  drawScale();
}

/** The legend: the scale's colours with its ends, and what lies beyond. */
function drawScale() {
  if (!$("scale") || !state.by) return;
  const run = state.open ? state.open.run : 0;
  const end = runs[run].scales[state.by] ?? 0;
  const pieces = 21;
  const svg = el("svg", { viewBox: "0 0 300 13", preserveAspectRatio: "none", role: "img",
    "aria-label": `scale from ${written_number(-end)} to ${written_number(end)}` });
  const parts = Array.from({ length: pieces }, (_, i) => {
    const share = (2 * i) / (pieces - 1) - 1;
    return el("rect", { x: (300 * i) / pieces, y: 0, width: 300 / pieces + 0.4, height: 13, fill: rgb(mix(share)) });
  });
  svg.append(hatch("legend-hatch"), ...parts, el("rect", { x: 0, y: 0, width: 150, height: 13, fill: "url(#legend-hatch)" }));
  const words = el("div", { class: "ends" }, el("span", {}, written_number(-end)), el("span", {}, "0"),
    el("span", {}, written_number(end)));
  fill($("scale"), svg, words,
    `${Math.round(100 * within)} % of the steps other than 0 lie within; the colour ends there, the number does not. `
    + "Hatched: negative.");
}

function hatch(id) {
  return el("defs", {}, el("pattern", { id, width: 6, height: 6, patternUnits: "userSpaceOnUse",
    patternTransform: "rotate(45)" }, el("rect", { width: 1.6, height: 6, fill: "#fff", "fill-opacity": 0.35 })));
}

// ------------ episodes ------------

let drawing = 0;
let panes = []; // of the episodes on the page: {at, episode, steps, element}

async function drawEpisodes(scroll = false) {
  const mine = ++drawing;
  if (!state.open) {
    fill($("panes"), el("p", { class: "empty" }, "This run has kept no episode."));
    return;
  }
  const views = [state.open];
  if (state.against) views.push({ ...state.against, task: state.open.task, step: state.open.step });
  const read = [];
  for (const at of views) {
    const group = groupOf(at);
    const episode = group[at.episode];
    read.push({ at, group, episode, steps: await readSteps(at, episode) });
  }
  if (mine !== drawing) return; // another one was opened meanwhile
  panes = read.map((one, n) => ({ ...one, element: pane(one, n) }));
  $("panes").className = panes.length > 1 ? "two" : "";
  fill($("panes"), panes.map((one) => one.element));
  drawBeside();
  drawScale();
  showStep(scroll);
}

/** What may stand beside the open episode: the same task in another iteration, or run. */
function drawBeside() {
  const { run, kind, iteration, task } = state.open;
  const options = [];
  runs.forEach((other, n) => {
    for (const set of other.sets) {
      const group = groupsOf(set).get(task);
      const same = n === run && set.kind === kind && set.iteration === iteration;
      if (!group || (same && group.length < 2)) continue;
      const what = same ? "another episode of this group" : `${who(n)}${KINDS[set.kind]}, iteration ${set.iteration}`;
      const episode = same ? (state.open.episode + 1) % group.length : 0;
      options.push({ value: besideOf({ ...set, run: n, episode }),
        words: `${what}: ${meanOutcome(group).toFixed(2)}` });
    }
  });
  const select = el("select", { id: "beside-select", onchange: () => {
    const [n, itsKind, i, episode] = select.value.split(".");
    go(state.open, select.value ? { run: +n, kind: itsKind, iteration: +i, episode: +episode } : null);
  } }, el("option", { value: "" }, options.length ? "nothing" : "this task was played once"),
  options.map((o) => el("option", { value: o.value }, o.words)));
  const now = state.against;
  if (now) {
    const near = options.find((o) => o.value.startsWith(`${now.run}.${now.kind}.${now.iteration}.`));
    select.value = near ? near.value : "";
  }
  select.disabled = !options.length;
  fill($("beside"), el("label", {}, "The same task beside it", select));
}

function pane({ at, group, episode, steps }, n) {
  const run = runs[at.run];
  const facts = [`outcome ${short(episode.outcome)}`, episode.success ? "success" : "no success",
    stepsIn(episode), ...flaws(episode)];
  const turn = (by) => {
    const next = { ...at, episode: (at.episode + by + group.length) % group.length };
    if (n) go(state.open, next);
    else go({ ...next, step: null });
  };
  const title = `Task ${at.task}, ${KINDS[at.kind]}, iteration ${at.iteration}`;
  const credited = run.scales[state.by] && steps.some((s) => typeof s[state.by] === "number");
  return el("article", { class: "pane", "aria-label": `${who(at.run)}${title}, episode ${at.episode + 1}` },
    el("header", {},
      el("h3", {}, characters(who(at.run)), title),
      el("p", { class: "facts" }, `Episode ${at.episode + 1} of ${group.length}`, " \u00b7 ", facts.join(" \u00b7 ")),
      group.length > 1 ? el("div", { class: "walk" },
        el("button", { type: "button", onclick: () => turn(-1) }, "\u2190 previous"),
        el("button", { type: "button", onclick: () => turn(1) }, "next \u2192")) : null,
      credited ? strip(at, steps, n) : null),
    el("ol", { class: `steps ${run.world === "sotopia" ? "talk" : ""}` },
      steps.map((step, i) => stepItem(at, step, i, steps, n))));
}

/** The credit of an episode at a glance: a bar per step. */
function strip(at, steps, n) {
  const width = Math.max(steps.length, 6) * 40;
  const middle = 30;
  const svg = el("svg", { class: "strip", viewBox: `0 0 ${width} 74`, preserveAspectRatio: "xMinYMid meet",
    role: "img", "aria-label": `${plainLabel(state.by)} of every step` }, hatch(`hatch-${n}`),
  el("line", { x1: 0, x2: steps.length * 40, y1: middle, y2: middle, stroke: "#aeb8be" }));
  steps.forEach((step, i) => {
    const value = step[state.by];
    const { share, colour } = coloured(at.run, state.by, value);
    const size = Math.max(Math.abs(share) * 24, value ? 1 : 0);
    const box = { x: i * 40 + 9, y: share < 0 ? middle : middle - size, width: 22, height: size };
    svg.append(el("rect", { class: "bar", ...box, fill: colour, stroke: "#6d7881", "stroke-width": 0.6 }));
    if (share < 0) svg.append(el("rect", { ...box, fill: `url(#hatch-${n})` }));
    svg.append(el("text", { x: i * 40 + 20, y: 71 }, String(i + 1)),
      el("rect", { class: "hit", x: i * 40, y: 0, width: 40, height: 74,
        onclick: () => go({ ...state.open, step: i }, state.against, true) },
      el("title", {}, `step ${i + 1}: ${plainLabel(state.by)} ${entry(state.by, value)}`)));
  });
  return svg;
}

function stepItem(at, step, i, steps, n) {
  const name = state.by;
  const value = step[name];
  const has = typeof value === "number" && runs[at.run].scales[name];
  const { share, colour, ink } = coloured(at.run, name, has ? value : null);
  const link = n ? null : hashOf({ ...at, step: i }, state.against);
  const head = `Step ${i + 1}`;
  const credit = has ? el("span", { class: `pill${share < 0 ? " negative" : ""}`, ink,
    title: (NAMES[name] || [])[1] }, label(name), " ", entry(name, value)) : null;
  return el("li", { class: "step", "data-step": i, tabindex: "-1", colour: has ? colour : null },
    el("div", { class: "top" },
      link ? el("a", { href: link, title: "a link to this step",
        onclick: (event) => { event.preventDefault(); go({ ...state.open, step: i }); } }, head)
        : el("b", {}, head),
      credit, step.tokens ? el("span", { class: "soft" }, `${step.tokens} tokens`) : null, step.valid ? null : el("span", { class: "tag" }, "invalid answer"),
      step.clipped === 1 ? el("span", { class: "tag" }, "clipped") : null),
    scene(runs[at.run].world, step, i, numbersOf(at.run, step), steps));
}

function numbersOf(run, step) {
  const names = [...ORDER.filter((name) => name in step),
    ...Object.keys(step).filter((name) => !ORDER.includes(name) && !NAMED.has(name))];
  const shown = names.filter((name) => !["progress", "reward"].includes(name) || runs[run].scales[name]);
  return el("dl", { class: "numbers" }, shown.map((name) => el("div", { class: name === state.by ? "lit" : "",
    title: (NAMES[name] || [])[1] }, el("dt", {}, label(name)), el("dd", {}, entry(name, step[name])))));
}

/** Scroll to the open step, and mark it in every pane. */
function showStep(scroll) {
  for (const { element } of panes) {
    for (const item of element.querySelectorAll(".step")) {
      item.classList.toggle("current", Number(item.dataset.step) === state.open.step && state.open.step !== null);
    }
  }
  if (!scroll || !panes.length) return;
  const item = panes[0].element.querySelector(".step.current");
  if (item) {
    item.scrollIntoView({ block: "nearest" });
    item.focus({ preventScroll: true });
  } else if ($("episode").getBoundingClientRect().top > innerHeight * 0.8) {
    $("episode").scrollIntoView();
  }
}

// ------------ worlds ------------

/** What the agent saw, what it answered, and the numbers of that. */
function scene(world, step, i, numbers, steps) {
  const draw = { sokoban, webshop, sotopia: talk, alfworld: household }[world] || plain;
  return draw(step, numbers, i, steps) || plain(step, numbers);
}

const said = (step) => written(el("div", { class: "said", dir: "ltr" }), step.action || "(nothing)", tagged);

/** A model's answer with its tags in a quieter type; every character stays. */
function tagged(text) {
  const parts = text.split(/(<\/?(?:think|action)>)/);
  let inside = "";
  return parts.map((part) => {
    if (/^<\/?(?:think|action)>$/.test(part)) {
      inside = part.startsWith("</") ? "" : part.slice(1, -1);
      return el("span", { class: "mark" }, part);
    }
    const kind = { think: "thought", action: "act" }[inside];
    return kind ? el("span", { class: kind }, characters(part)) : characters(part);
  });
}

const asRead = (text) => el("details", { class: "raw" }, el("summary", {}, "As the agent read it"),
  written(el("pre", { dir: "ltr" }), text));

/** What was seen, and below it the answer with its numbers. */
const below = (step, numbers, ...seen) => el("div", { class: "scene" },
  el("div", { class: "world", dir: "ltr" }, seen), said(step), numbers);

function plain(step, numbers) {
  return below(step, numbers, picture(step), written(el("pre", {}), step.observation));
}

function picture(step) {
  const named = /^pictures\/([0-9a-f]{16})\.png$/.exec(step.picture || "");
  const kept = named && $(`picture-${named[1]}`);
  if (!kept) return null;
  return el("img", { class: "picture", src: `data:image/png;base64,${kept.textContent}`, alt: "what the agent saw" });
}

const GRID = /^(?:[#_OXP*S]{3,}\n){2,}[#_OXP*S]{3,}$/m;

function sokoban(step, numbers) {
  const found = GRID.exec(step.observation);
  const drawn = picture(step) || (found && board(found[0].split("\n"), moveOf(step)));
  if (!drawn) return null;
  const before = step.observation.slice(0, found ? found.index : undefined).trim();
  const told = before && before.length < 200 ? el("p", { class: "soft" }, characters(before)) : null;
  return el("div", { class: "scene drawn" }, drawn,
    el("div", {}, told, said(step), numbers, asRead(step.observation)));
}

function moveOf(step) {
  const found = /<action>\s*(up|down|left|right)\s*<\/action>/.exec(step.action || "");
  return step.valid && found ? found[1] : null;
}

/** Sokoban's grid before the action, and an arrow for the action. Shapes differ, not colours alone. */
function board(rows, move) {
  const size = 24;
  const [width, height] = [size * Math.max(...rows.map((row) => row.length)), size * rows.length];
  const svg = el("svg", { class: "board", viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `Sokoban: ${rows.join(" / ")}` }, el("title", {}, "# wall, ring: target, crossed box, disc: the player"),
  el("rect", { width, height, fill: "#f6f4ee" }));
  let player = null;
  rows.forEach((row, r) => [...row].forEach((cell, c) => {
    const [x, y] = [c * size, r * size];
    const [cx, cy] = [x + size / 2, y + size / 2];
    if (cell === "#") svg.append(el("rect", { x, y, width: size, height: size, fill: "#56636c", stroke: "#6d7a83" }));
    else svg.append(el("rect", { x, y, width: size, height: size, fill: "none", stroke: "#e4dfd2" }));
    if ("O*S".includes(cell)) {
      svg.append(el("circle", { cx, cy, r: 8.5, fill: "none", stroke: "#1d2327", "stroke-width": 1.8, "stroke-dasharray": "3 2" }));
    }
    if ("X*".includes(cell)) {
      const [a, b] = [x + 5, y + 5];
      svg.append(el("rect", { x: a, y: b, width: 14, height: 14, fill: cell === "*" ? "#e9c46a" : "#d9b382", stroke: "#5f3f16", "stroke-width": 1.6 }),
        el("path", { d: `M${a} ${b}l14 14M${a + 14} ${b}l-14 14`, stroke: "#5f3f16", "stroke-width": 1.1 }));
    }
    if ("PS".includes(cell)) player = [cx, cy];
  }));
  if (player) {
    const [cx, cy] = player;
    svg.append(el("circle", { cx, cy, r: 6, fill: "#1f5f9e", stroke: "#fff", "stroke-width": 1.2 }));
    if (move) svg.append(arrow(cx, cy, move, "#fff", 4.5), arrow(cx, cy, move, "#1d2327", 2));
  }
  return svg;
}

function arrow(cx, cy, move, stroke, width) {
  const [dx, dy] = { up: [0, -1], down: [0, 1], left: [-1, 0], right: [1, 0] }[move];
  const [ex, ey] = [cx + dx * 17, cy + dy * 17];
  const wings = [`${ex - dx * 5 - dy * 4} ${ey - dy * 5 - dx * 4}`, `${ex - dx * 5 + dy * 4} ${ey - dy * 5 + dx * 4}`];
  const d = `M${cx + dx * 6} ${cy + dy * 6}L${ex} ${ey}M${wings[0]}L${ex} ${ey}L${wings[1]}`;
  return el("path", { d, fill: "none", stroke, "stroke-width": width, "stroke-linecap": "round" });
}

/** A page of the shop: what can be clicked as buttons, and what the agent clicked marked. */
function webshop(step, numbers, i) {
  const lines = step.observation.split("\n");
  const actions = lines.findLast((line) => line.startsWith("Actions: "));
  if (!actions) return null;
  const can = new Set([...actions.matchAll(/click\[(.*?)\](?= click\[|$)/g)].map((found) => found[1]));
  const clicked = /<action>\s*click\[(.*)\]\s*<\/action>/s.exec(step.action || "");
  const chosen = clicked ? clicked[1].trim().toLowerCase() : null;
  const shop = el("div", { class: "shop" });
  const page = lines.findLast((line) => line.includes(" [SEP] ")) || "";
  for (const line of lines) {
    if (line === page || line === actions || (i === 0 && !/^(Instruction|WebShop|Search)/.test(line))) continue;
    const wish = line.startsWith("Instruction");
    shop.append(el("div", { class: wish ? "row wish" : "row" }, el("span", {}, characters(line))));
  }
  let row = null;
  let after = "";
  for (const part of page ? page.split(" [SEP] ") : []) {
    const button = can.has(part.toLowerCase());
    const item = /^B\w{3,9}$/i.test(part) && button;
    if (!row || item || (!button && after === "button")) {
      shop.append(row = el("div", { class: item ? "row item" : "row" }));
    }
    const marked = button && part.toLowerCase() === chosen;
    row.append(el("span", { class: button ? `can${marked ? " chosen" : ""}` : /^\$/.test(part) ? "price" : "" }, characters(part)));
    after = item ? "item" : button ? "button" : "text";
    if (/^(?:\$|Price)/.test(part)) row = null;
  }
  return below(step, numbers, shop, asRead(step.observation));
}

/** A turn of a conversation: what the other one said, and the answer. */
function talk(step, numbers, i) {
  if (i === 0) return below(step, numbers, written(el("div", { class: "prose" }), step.observation));
  const turns = step.observation.split("\n").map((line) => {
    const found = /^([^:]{1,40}): (.*)$/s.exec(line);
    if (!found || /^Invalid/.test(line)) return el("p", { class: "soft" }, characters(line));
    return el("div", { class: "other" }, el("b", {}, characters(found[1])), written(el("span", {}), found[2]));
  });
  return below(step, numbers, turns);
}

/** A room as far as the agent has seen it: where it is, what it holds, what was where. */
function household(step, numbers, i, steps) {
  const names = (words) => [...words.matchAll(/\ba ([a-z]+ \d+)/g)].map((found) => found[1]);
  const [task, room] = [/Your task is to: (.*)\./, /you see (.*)\./].map((form) => form.exec(steps[0].observation));
  if (!task || !room) return null;
  // of each place: the things that are known to be there, whether all are, and how its door stands
  const places = new Map(names(room[1]).map((name) => [name, { things: [], all: false, door: "" }]));
  const at = (name) => places.get(name) || places.set(name, { things: [], all: false, door: "" }).get(name);
  const states = new Map();
  let [here, held] = ["the middle of the room", null];
  for (const { observation } of steps.slice(1, i + 1)) {
    const find = (form) => form.exec(observation) || [];
    const [, seen, open, inside] = find(/(?:On the|The) ([a-z]+ \d+)( is open\. In it)?, you see (.*?)\.(?:\n|$)/);
    const [, taken, from] = find(/^You pick up the (.+) from the (.+)\./);
    const [, moved, to] = find(/^You move the (.+) to the (.+)\./);
    const [, treated, thing] = find(/^You (heat|cool|clean|turn on|sliced) the ([a-z]+ \d+)/);
    const [, shut] = find(/(?:The|close the) ([a-z]+ \d+)(?: is closed)?\.$/m);
    here = find(/^You arrive at (.+?)\. /)[1] || here;
    if (seen) Object.assign(at(seen), { things: names(inside), all: true, door: open ? "open" : "" });
    else if (/closed|close the/.test(observation) && shut) at(shut).door = "closed";
    if (taken) [held, at(from).things] = [taken, at(from).things.filter((name) => name !== taken)];
    if (moved) [held, at(to).things] = [null, [...at(to).things, moved]];
    if (treated) {
      const word = { heat: "hot", cool: "cool", "turn on": "on" }[treated] || treated;
      const ends = { hot: "cool", cool: "hot" }[word];
      states.set(thing, [...(states.get(thing) || []).filter((had) => had !== ends && had !== word), word]);
    }
  }
  const named = (name) => characters(states.has(name) ? `${name} (${states.get(name).join(", ")})` : name);
  const row = (head, things, more = "") => el("div", { class: `row ${more}` }, el("b", {}, head),
    [things].flat().map((name) => el("span", { class: "can" }, named(name))));
  const isKnown = ([name, { things, all, door }]) => things.length || all || door || name === here;
  const rest = [...places].filter((place) => !isKnown(place)).map(([name]) => name);
  const shop = el("div", { class: "shop" }, el("div", { class: "row wish" }, characters(task[1])),
    row("holds", held || "nothing"), places.has(here) ? null : row("is at", here),
    [...places].filter(isKnown).map(([name, { things, all, door }]) => row(
      `${name === here ? "is at " : ""}${name}${door && ` (${door})`}`,
      all ? (things.length ? things : "empty") : [...things, "not looked into"], name === here ? "item" : "")),
    rest.length ? el("p", { class: "soft" }, `not seen: ${rest.join(", ")}`) : null);
  const told = i ? step.observation.replace(/\nYou can: .*/s, "") : "";
  return below(step, numbers, written(el("pre", {}), told), shop, asRead(step.observation));
}

// ------------ keys ------------

const KEYS = {
  "j k": "next and previous step",
  "n p": "next and previous episode of the list",
  "[ ]": "previous and next iteration",
  c: "colour the steps by the next quantity",
  "/": "find a task",
  "?": "these keys",
};

function drawKeys() {
  fill($("keys"), el("h2", { id: "keys-title" }, "Keys"), el("dl", {}, Object.entries(KEYS).map(([keys, words]) => [
    el("dt", {}, keys.split(" ").map((key) => [el("kbd", {}, key), " "])), el("dd", {}, words)])),
  el("button", { type: "button", onclick: () => $("keys").close() }, "Close"));
  $("keys-button").onclick = () => $("keys").showModal();
}

function nextStep(by) {
  const { steps } = panes[0];
  const now = state.open.step ?? (by > 0 ? -1 : steps.length);
  const step = Math.max(0, Math.min(steps.length - 1, now + by));
  go({ ...state.open, step }, state.against, true);
}

function nextEpisode(by) {
  const links = [...document.querySelectorAll("#groups .member")];
  const now = links.findIndex((link) => link.hasAttribute("aria-current"));
  const next = links[now + by] || (now < 0 ? links[0] : null);
  if (next) {
    next.click();
    next.scrollIntoView({ block: "nearest" });
  }
}

function nextIteration(by) {
  const options = [...$("filter-iteration").options].map((o) => o.value).filter((v) => v !== "all");
  const now = options.indexOf(String(state.iteration));
  const next = options[Math.max(0, Math.min(options.length - 1, now + by))];
  if (next !== undefined) chooseIteration(Number(next));
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("keys").open) return;
  if (event.target.matches("input[type=text], select, textarea")) return;
  const moves = {
    j: () => nextStep(1), k: () => nextStep(-1), n: () => nextEpisode(1), p: () => nextEpisode(-1),
    "]": () => nextIteration(1), "[": () => nextIteration(-1), "?": () => $("keys").showModal(),
    "/": () => $("filter-task").focus(),
    c: () => {
      const names = colourings();
      state.by = names[(names.indexOf(state.by) + 1) % names.length];
      drawCredit();
      go(state.open);
    },
  };
  const move = moves[event.key];
  if (!move || (!state.open && !"?/".includes(event.key))) return;
  event.preventDefault();
  move();
});

window.addEventListener("hashchange", () => {
  if (!readHash()) return;
  drawCredit();
  markCurrent();
  drawEpisodes(true);
});

// ------------ begin ------------

async function begin() {
  drawHead();
  drawCurves();
  drawKeys();
  const linked = readHash();
  if (linked) {
    state.kind = state.open.kind;
    state.iteration = state.open.iteration;
  }
  drawFilters();
  drawMarks();
  drawCredit();
  drawGroups();
  $("further").onclick = () => {
    state.shown += SHOWN_GROUPS;
    drawGroups();
  };
  if (!linked && rowsListed.length) {
    const mixed = rowsListed.find((row) => spread(row) > 0); // others have no credit to look at
    const { run, kind, iteration, task, kept } = mixed || rowsListed[0];
    const worth = (e) => 1000 * e.success + e.steps; // the longest that was solved
    const first = kept[0].reduce((a, b) => (worth(b) > worth(a) ? b : a));
    state.open = { run, kind, iteration, task, episode: first.number, step: null };
    state.against = partner(state.open);
  }
  markCurrent();
  await drawEpisodes(linked);
  document.documentElement.dataset.ready = "true";
}

begin();
