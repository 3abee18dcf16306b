// A line chart of the last minutes as SVG: time to the right, zero at the bottom, units in the title.

import {WINDOW} from "./history.js";
import {short, text} from "./texts.js";

const HEIGHT = 130, LEFT = 46, RIGHT = 8, TOP = 10, BOTTOM = 20;

export class Chart {
  /** `series`: [{field, label, color}], where `color` names a property of the style sheet. */
  constructor(parent, id, title, series, most = null) {
    this.title = title;
    this.series = series;
    this.most = most; // the axis's end, where it is known
    this.points = [];
    this.at = null; // the time that is pointed at
    this.card = make("div", "card chart");
    this.card.id = `chart-${id}`;
    this.svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    this.svg.setAttribute("role", "img");
    this.head = make("div", "head");
    this.card.append(this.head, this.svg);
    parent.append(this.card);
    new ResizeObserver(() => this.draw()).observe(this.card);
    this.svg.addEventListener("pointermove", event => {
      const box = this.svg.getBoundingClientRect();
      const share = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
      this.at = share >= 0 && share <= 1 ? share : null;
      this.draw();
    });
    this.svg.addEventListener("pointerleave", () => {
      this.at = null;
      this.draw();
    });
  }

  show(points) {
    this.points = points;
    this.draw();
  }

  draw() {
    const width = this.svg.clientWidth;
    if (!width) return;
    const end = this.points.length ? this.points.at(-1).time : 0;
    const right = width - RIGHT, low = HEIGHT - BOTTOM;
    const x = time => right - (end - time) / WINDOW * (right - LEFT);
    const values = this.points.flatMap(point => this.series.map(one => point[one.field] ?? 0));
    const ticks = scale(this.most ?? Math.max(0, ...values));
    const top = ticks.at(-1);
    const y = value => low - value / top * (low - TOP);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const parts = [];
    for (const tick of ticks) {
      parts.push(line(LEFT, y(tick), right, y(tick), "grid"));
      parts.push(label(LEFT - 6, y(tick) + 4, "end", shortTick(tick, top)));
    }
    for (let minute = 0; minute <= WINDOW / 60; minute++) {
      if (width < 280 && minute % 2) continue;
      const place = right - minute * 60 / WINDOW * (right - LEFT);
      const anchor = minute === 0 ? "end" : "middle";
      parts.push(label(place, HEIGHT - 4, anchor, minute ? text("minutes", {n: minute}) : text("now")));
    }
    for (const one of this.series) parts.push(...this.#lines(one, x, y));
    const shown = this.#pointed(end);
    if (this.at !== null && shown) parts.push(line(x(shown.time), TOP, x(shown.time), low, "mark"));
    this.svg.replaceChildren(...parts);
    this.#heading(shown, end);
  }

  /** The point that is pointed at, else the last one. */
  #pointed(end) {
    if (this.at === null) return this.points.at(-1);
    const time = end - (1 - this.at) * WINDOW;
    return this.points.reduce((best, point) =>
      best && Math.abs(best.time - time) <= Math.abs(point.time - time) ? best : point, null);
  }

  #heading(shown, end) {
    const title = make("h2", "", text(this.title));
    const keys = make("span", "keys");
    for (const one of this.series) {
      const key = make("span"), mark = make("i");
      mark.style.background = `var(${one.color})`;
      const value = shown?.[one.field];
      key.append(mark, `${text(one.label)} ${value === null || value === undefined ? "—" : short(value)}`);
      keys.append(key);
    }
    if (this.at !== null && shown) keys.append(make("span", "", `−${Math.round(end - shown.time)} s`));
    this.head.replaceChildren(title, keys);
    this.svg.setAttribute("aria-label", `${title.textContent}: ${keys.textContent}`);
  }

  /** The series as lines, broken where there is no value; a value without neighbours is a dot. */
  #lines(one, x, y) {
    const runs = [];
    let run = null, before = null;
    for (const point of this.points) {
      const value = point[one.field];
      const gap = before === null || point.time - before > 15;
      before = point.time;
      if (value === null || value === undefined) {
        run = null;
        continue;
      }
      if (run === null || gap) runs.push(run = []);
      run.push(`${x(point.time).toFixed(1)} ${y(value).toFixed(1)}`);
    }
    return runs.map(places => {
      const path = element("path");
      path.setAttribute("d", `M${places.join("L")}${places.length === 1 ? "h0.01" : ""}`);
      path.style.stroke = `var(${one.color})`;
      if (places.length === 1) path.style.strokeWidth = "4";
      return path;
    });
  }
}

/** Two to five even steps from 0 to at least `most`. */
export function scale(most) {
  if (!(most > 0)) return [0, 1];
  const rough = most / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(n => n * power).find(n => n >= rough * 0.999);
  return Array.from({length: Math.ceil(most / step - 1e-9) + 1}, (_, i) => i * step);
}

function shortTick(value, top) {
  if (value && top >= 10000) return `${+(value / 1000).toPrecision(3)}k`;
  return String(+value.toPrecision(3));
}

function element(name) {
  return document.createElementNS("http://www.w3.org/2000/svg", name);
}

function line(x1, y1, x2, y2, kind) {
  const made = element("line");
  for (const [name, value] of Object.entries({x1, y1, x2, y2, class: kind})) made.setAttribute(name, value);
  return made;
}

function label(x, y, anchor, words) {
  const made = element("text");
  for (const [name, value] of Object.entries({x, y, "text-anchor": anchor})) made.setAttribute(name, value);
  made.textContent = words;
  return made;
}

/** An element with a class and a text; nothing here is ever parsed as HTML. */
export function make(name, kind = "", words = null) {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  if (words !== null) made.textContent = words;
  return made;
}
