// The panels of the monitor and of the settings: each function draws one from what the server told.

import {Chart, make} from "./chart.js";
import {bytes, number, percent, seconds, short, text} from "./texts.js";

const $ = id => document.getElementById(id);
const STATES = {free: "--free", cached: "--c1", owned: "--c3", shared: "--c2"};
const KINDS = {
  weights: "--c1", kv_cache: "--c3", tables: "--c6", activations: "--c2", graphs: "--c4", other: "--c5",
  free: "--free",
};

let charts = null;

export function showCharts(history) {
  charts ??= [
    new Chart($("charts"), "output", "outputRate", [{field: "output", label: "seriesOutput", color: "--c1"}]),
    new Chart($("charts"), "input", "inputRate", [{field: "input", label: "seriesInput", color: "--c3"}]),
    new Chart($("charts"), "requests", "requestsChart", [
      {field: "running", label: "running", color: "--c1"}, {field: "waiting", label: "waiting", color: "--c2"}]),
    new Chart($("charts"), "ttft", "ttftChart", [{field: "ttft", label: "mean", color: "--c4"}]),
    new Chart($("charts"), "itl", "itlChart", [{field: "itl", label: "mean", color: "--c4"}]),
    new Chart($("charts"), "kv", "kvChart", [{field: "use", label: "seriesUse", color: "--c3"}], 100),
  ];
  for (const chart of charts) chart.show(history.points);
}

/** A text in which `{name}` is a figure of /metrics, marked with its name there. */
function note(key, figures) {
  const made = make("p", "note");
  const marks = Object.fromEntries(Object.keys(figures).map(name => [name, `\u0000${name}\u0000`]));
  for (const [i, part] of text(key, marks).split("\u0000").entries()) {
    if (i % 2 === 0) {
      made.append(part);
      continue;
    }
    const [metric, shown] = figures[part];
    const figure = make("span", "", shown);
    if (metric) figure.dataset.figure = metric;
    made.append(figure);
  }
  return made;
}

function tile(id, title, value, unit, notes) {
  const made = make("div", "card tile"), shown = make("p", "value", value);
  made.id = `tile-${id}`;
  if (unit) shown.append(make("small", "", unit));
  made.append(make("h2", "", text(title)), shown, ...notes);
  return made;
}

/** Sum of a counter over its labels. */
function sum(metrics, name) {
  return Object.entries(metrics).filter(([key]) => key.startsWith(`${name}{`)).reduce((all, [, n]) => all + n, 0);
}

export function showTiles(history) {
  const {metrics, kv} = history.last;
  const count = name => [name, number(metrics[name] ?? 0)];
  const speed = name => {
    const rate = history.rate(name, 5);
    return rate === null ? "—" : short(rate);
  };
  const delay = (id, title, name) => {
    const recent = history.recent(name), whole = history.whole(name);
    const notes = [recent.count
      ? make("p", "note", text(recent.over ? "beyond" : "within", {bound: seconds(recent.bound)}))
      : make("p", "note", text("none"))];
    if (whole.count) {
      notes.push(note("observed", {n: [`${name}_count`, number(whole.count)], mean: [null, seconds(whole.mean)]}));
    }
    return tile(id, title, recent.count ? seconds(recent.mean) : "—", text("window"), notes);
  };
  const made = [
    tile("output", "output", speed("generation_tokens_total"), text("perSecond"),
      [note("total", {n: count("generation_tokens_total")})]),
    tile("input", "input", speed("prompt_tokens_total"), text("perSecond"),
      [note("total", {n: count("prompt_tokens_total")})]),
    delay("ttft", "ttft", "time_to_first_token_seconds"),
    delay("itl", "itl", "inter_token_latency_seconds"),
    requestsTile(metrics, count),
  ];
  if (kv.num_blocks) {
    const used = kv.counts.owned + kv.counts.shared;
    made.push(tile("kv", "kvUse", percent(metrics.kv_cache_usage_perc), "", [
      note("blocksUsed", {used: [null, number(used)], all: ["kv_blocks", number(metrics.kv_blocks)]})]));
    const queries = history.growth("prefix_cache_queries_total"), hits = history.growth("prefix_cache_hits_total");
    made.push(tile("hits", "hitRate", queries ? percent(hits / queries) : "—", text("window"), [
      note("hitTokens", {
        hits: count("prefix_cache_hits_total"), queries: count("prefix_cache_queries_total")})]));
  }
  if (metrics.spec_decode_num_draft_tokens_total > 0) made.push(draftsTile(history, count));
  $("tiles").replaceChildren(...made);
}

function requestsTile(metrics, count) {
  const ended = sum(metrics, "request_success_total");
  const aborted = metrics['request_success_total{finished_reason="abort"}'] ?? 0;
  const made = tile("requests", "requestsNow", "", "", [
    note("ended", {
      n: ["request_success_total", number(ended)],
      aborted: ['request_success_total{finished_reason="abort"}', number(aborted)],
    }),
    note("preempted", {n: count("num_preemptions_total")}),
  ]);
  const value = made.querySelector(".value");
  for (const [metric, word] of [["num_requests_running", "running"], ["num_requests_waiting", "waiting"]]) {
    const figure = make("span", "", number(metrics[metric])), pair = make("span", "whole");
    figure.dataset.figure = metric;
    pair.append(figure, make("small", "", text(word)));
    value.append(pair, " ");
  }
  return made;
}

function draftsTile(history, count) {
  const drafted = "spec_decode_num_draft_tokens_total", accepted = "spec_decode_num_accepted_tokens_total";
  const recent = history.growth(drafted), metrics = history.last.metrics;
  const drafts = metrics.spec_decode_num_drafts_total;
  return tile("drafts", "acceptance", recent ? percent(history.growth(accepted) / recent) : "—", text("window"), [
    note("accepted", {
      accepted: count(accepted), drafted: count(drafted),
      length: [null, drafts ? number(1 + metrics[accepted] / drafts, 2) : "—"]})]);
}

export function showKV({kv}) {
  $("kv-summary").textContent = kv.num_blocks ? text("kvSummary", {
    blocks: number(kv.num_blocks), tokens: number(kv.block_tokens), bytes: bytes(kv.num_blocks * kv.block_bytes),
    cell: kv.blocks_per_cell === 1 ? text("oneBlock") : text("someBlocks", {n: number(kv.blocks_per_cell)}),
  }) : text("kvNone");
  $("kv-cells").hidden = $("kv-legend").hidden = !kv.num_blocks;
  $("kv-host").hidden = !kv.host_blocks;
  $("kv-legend").replaceChildren(...kv.states.map(state => {
    const item = make("li"), count = make("span", "", number(kv.counts[state]));
    count.dataset.blocks = state;
    item.append(swatch(STATES[state]), `${text(state)} `, count);
    return item;
  }));
  if (kv.num_blocks) drawCells($("kv-cells"), kv.cells, kv.states.map(state => STATES[state]));
  if (!kv.host_blocks) return;
  const used = [...kv.host_cells].filter(cell => cell === "1").length * kv.host_blocks_per_cell;
  $("kv-host-summary").textContent = text("kvHostSummary", {
    used: number(Math.min(used, kv.host_blocks)), all: number(kv.host_blocks), copies: number(kv.host_copies)});
  drawCells($("kv-host-cells"), kv.host_cells, ["--free", "--c4"]);
}

/** Squares in rows, as wide as the canvas has room for, sharp on any screen. */
function drawCells(canvas, cells, names) {
  const width = canvas.clientWidth;
  if (!width) return;
  const style = getComputedStyle(document.documentElement), dots = window.devicePixelRatio || 1;
  const size = cells.length <= 256 ? 14 : cells.length <= 512 ? 12 : 10;
  const columns = Math.max(1, Math.floor(width / size));
  const height = Math.ceil(cells.length / columns) * size;
  canvas.width = Math.round(width * dots);
  canvas.height = Math.round(height * dots);
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(dots, dots);
  const colors = names.map(name => style.getPropertyValue(name));
  for (let i = 0; i < cells.length; i++) {
    pen.fillStyle = colors[+cells[i]];
    pen.fillRect(i % columns * size, Math.floor(i / columns) * size, size - 2, size - 2);
  }
}

function swatch(color) {
  const made = make("i");
  made.style.background = `var(${color})`;
  return made;
}

/** A table with a head; cells are texts, [text, class] or nodes. */
function table(target, head, rows) {
  const cell = (name, content) => {
    if (content instanceof Node) return content;
    const [words, kind] = Array.isArray(content) ? content : [content, ""];
    return make(name, kind, words);
  };
  const top = make("thead"), line = make("tr"), body = make("tbody");
  line.append(...head.map(content => cell("th", content)));
  top.append(line);
  body.append(...rows.map(row => {
    if (row instanceof Node) return row;
    const made = make("tr", row.kind ?? "");
    made.append(...row.cells.map(content => cell("td", content)));
    return made;
  }));
  target.replaceChildren(...(head.length ? [top] : []), body);
}

function rowHead(words, ...before) {
  const made = make("th");
  made.scope = "row";
  made.append(...before);
  for (const [i, part] of words.split("_").entries()) {
    if (i) made.append("_", make("wbr")); // may be broken there
    made.append(part);
  }
  return made;
}

export function showMemory({metrics}) {
  const held = kind => metrics[`memory_bytes{kind="${kind}"}`];
  const total = held("total");
  const kinds = Object.keys(KINDS).filter(kind => held(kind) > 0);
  $("memory-bar").hidden = !total;
  if (!total) {
    table($("memory"), [], [{cells: [text("memoryNone")]}]);
    return;
  }
  $("memory-bar").replaceChildren(...kinds.map(kind => {
    const part = make("div");
    part.style.background = `var(${KINDS[kind]})`;
    part.style.width = `${100 * held(kind) / total}%`;
    return part;
  }));
  const row = (kind, name, color, share) => {
    const size = make("td", "number", bytes(held(kind)));
    size.dataset.bytes = kind;
    size.dataset.exact = held(kind);
    return {cells: [rowHead(text(name), ...(color ? [swatch(color)] : [])), size, [share, "number"]]};
  };
  const rows = kinds.map(kind =>
    row(kind, kind === "free" ? "freeMemory" : kind, KINDS[kind], percent(held(kind) / total)));
  rows.push(row("total", "memoryTotal", null, ""));
  if (held("host_cache") > 0) rows.push(row("host_cache", "host_cache", null, ""));
  for (const one of rows) {
    const cells = one.cells[0].querySelector("i");
    if (cells) cells.setAttribute("aria-hidden", "true");
  }
  table($("memory"), [text("memoryKind"), [text("size"), "number"], [text("share"), "number"]], rows);
}

export function showRequests({requests, metrics}) {
  const all = metrics.num_requests_running + metrics.num_requests_waiting;
  $("requests-note").textContent = !requests.length ? text("requestsNone")
    : all > requests.length ? text("requestsMore", {shown: number(requests.length), all: number(all)}) : "";
  if (!requests.length) {
    $("requests").replaceChildren();
    return;
  }
  const states = {running: "stateRunning", waiting: "stateWaiting", loading: "stateLoading"};
  const head = [
    [text("id"), "minor"], text("state"), [text("prompt"), "number"], [text("out"), "number"],
    [text("reused"), "number minor"], [text("preemptions"), "number minor"], [text("age"), "number"]];
  const rows = requests.flatMap(one => {
    const lines = [{cells: [
      [one.id, "id minor"], text(states[one.state]), [number(one.prompt_tokens), "number"],
      [`${number(one.output_tokens)} / ${number(one.max_tokens)}`, "number"], [number(one.cached_tokens), "number minor"],
      [number(one.preemptions), "number minor"], [seconds(one.age), "number"]]}];
    for (const [name, words] of [["prompt", one.prompt], ["out", one.output]]) {
      if (!words) continue;
      const line = make("tr", "text"), cell = make("td", "", `${text(name)}: …${words}`);
      cell.colSpan = head.length;
      line.append(cell);
      lines.push(line);
    }
    return lines;
  });
  table($("requests"), head, rows);
}

export function showFacts(info) {
  table($("facts"), [], Object.entries(info.facts).map(([name, value]) => ({cells: [rowHead(name), value]})));
}

export function showSettings(info) {
  const shown = info.settings.filter(one => one.changed || $("all-settings").checked);
  if (!shown.length) {
    table($("settings"), [], [{cells: [text("allDefault")]}]);
    return;
  }
  table($("settings"), [text("setting"), text("value"), [text("default"), "minor"]], shown.map(one => ({
    kind: one.changed ? "changed" : "",
    cells: [rowHead(one.name), one.secret && one.value === null ? text("hidden") : one.value === "null" ? "—" : one.value, [one.default === "null" ? "—" : one.default, "minor"]],
  })));
}
