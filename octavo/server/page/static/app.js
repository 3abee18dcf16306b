// The page: asks the server for its state every few seconds and has the panels draw it.

import {Chat} from "./chat.js";
import {History} from "./history.js";
import {
  showCharts, showFacts, showKV, showMemory, showRequests, showSettings, showTiles,
} from "./panels.js";
import {number, seconds, setLanguage, text} from "./texts.js";

const PERIOD = 2000; // milliseconds between questions
const PATIENCE = 30000; // milliseconds that an answer may take: a long step delays it
const VIEWS = ["monitor", "chat", "settings"];
const $ = id => document.getElementById(id);
const history = new History();

let info = null;
let known = false; // whether `info` is of the server that answers now
let polling = false;
let key = sessionStorage.getItem("octavo-key") ?? "";
let timer = null;

const headers = () => key ? {authorization: `Bearer ${key}`} : {};
const chat = new Chat(headers, () => askKey(true));

// ---- language and theme ---------------------------------------------------------------------------

const preferred = localStorage.getItem("octavo-language") ?? (navigator.language.startsWith("zh") ? "zh" : "en");

function translate(language) {
  setLanguage(language);
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  $("language").value = language;
  for (const one of document.querySelectorAll("[data-text]")) one.textContent = text(one.dataset.text);
  for (const one of document.querySelectorAll("[data-label]")) one.setAttribute("aria-label", text(one.dataset.label));
  draw();
}

$("language").addEventListener("change", () => {
  localStorage.setItem("octavo-language", $("language").value);
  translate($("language").value);
});

const dark = window.matchMedia("(prefers-color-scheme: dark)");

function paint() {
  const theme = localStorage.getItem("octavo-theme") ?? "auto";
  $("theme").value = theme;
  document.documentElement.dataset.theme = theme === "auto" ? (dark.matches ? "dark" : "light") : theme;
  draw();
}

$("theme").addEventListener("change", () => {
  localStorage.setItem("octavo-theme", $("theme").value);
  paint();
});
dark.addEventListener("change", paint);

// ---- views ----------------------------------------------------------------------------------------

function view() {
  const wanted = location.hash.slice(1);
  return VIEWS.includes(wanted) ? wanted : VIEWS[0];
}

function turn() {
  for (const name of VIEWS) {
    $(`view-${name}`).hidden = name !== view();
    const link = document.querySelector(`nav a[href="#${name}"]`);
    if (name === view()) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  draw();
}

addEventListener("hashchange", turn);
addEventListener("resize", () => draw());
$("all-settings").addEventListener("change", () => draw());

function draw() {
  if (!info) return;
  document.title = `${info.models[0]} · Octavo`;
  const state = history.last;
  $("model").textContent = [
    info.models.join(", "), text("context", {tokens: number(info.max_model_len)}),
    ...(state ? [text("up", {time: seconds(Math.max(0, state.time - info.started))})] : []), `Octavo ${info.version}`,
  ].join(" · ");
  if (view() === "chat") chat.show(info);
  if (view() === "settings") {
    showFacts(info);
    showSettings(info);
  }
  if (view() === "monitor" && state) {
    showTiles(history);
    showCharts(history);
    showKV(state);
    showMemory(state);
    showRequests(state);
  }
}

// ---- the key, and questions to the server -----------------------------------------------------------

class WrongKey extends Error {}

async function ask(path) {
  const answer = await fetch(path, {headers: headers(), signal: AbortSignal.timeout(PATIENCE)});
  if (answer.status === 401) throw new WrongKey();
  if (!answer.ok) throw new Refused((await answer.json()).error.message);
  return answer.json();
}

class Refused extends Error {}

function askKey(wrong) {
  clearTimeout(timer);
  key = "";
  sessionStorage.removeItem("octavo-key");
  tell("");
  $("content").hidden = true;
  $("forget").hidden = true;
  $("ask-key").hidden = false;
  $("key-wrong").hidden = !wrong;
  $("key").focus();
}

$("ask-key").addEventListener("submit", event => {
  event.preventDefault();
  key = $("key").value.trim();
  $("key").value = "";
  poll();
});

$("forget").addEventListener("click", () => {
  history.clear();
  known = false;
  askKey(false);
});

function tell(problem) {
  $("problem").hidden = !problem;
  if ($("problem").textContent !== problem) $("problem").textContent = problem;
}

async function poll() {
  if (polling) return;
  polling = true;
  clearTimeout(timer);
  try {
    if (!known) info = await ask("server_info.json");
    known = true;
    const first = $("content").hidden;
    if (first) {
      if (key) sessionStorage.setItem("octavo-key", key);
      $("content").hidden = false;
      $("ask-key").hidden = true;
      $("forget").hidden = !key;
      turn();
    }
    history.add(await ask("server_state.json"));
    tell(history.last.draining ? text("draining") : "");
    draw();
  } catch (error) {
    if (error instanceof WrongKey) {
      askKey(Boolean(key));
      return;
    }
    if (!(error instanceof Refused || error instanceof TypeError || error instanceof DOMException)) throw error;
    tell(error instanceof Refused ? text("refused", {message: error.message}) : text("unreachable"));
    known = false; // it may come back as another one
  } finally {
    polling = false;
  }
  schedule();
}

function schedule() {
  clearTimeout(timer);
  if (!document.hidden) timer = setTimeout(poll, PERIOD);
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden && $("ask-key").hidden) poll();
});

translate(preferred);
paint();
turn();
if (document.documentElement.dataset.needsKey === "true" && !key) askKey(false);
else poll();
