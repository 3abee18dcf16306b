// What the server told in the last minutes, and figures made of it.

export const WINDOW = 300; // seconds

export class History {
  constructor() {
    this.clear();
  }

  clear() {
    this.states = [];
    this.points = [];
  }

  /** Takes in a state; a counter that fell means a new engine, and a new beginning. */
  add(state) {
    const last = this.states.at(-1);
    if (last && state.time <= last.time) return;
    if (last && state.metrics.generation_tokens_total < last.metrics.generation_tokens_total) this.clear();
    this.states.push(state);
    while (this.states.length > 2 && this.states[1].time < state.time - WINDOW) this.states.shift();
    this.points.push(this.#point(state, last));
    while (this.points[0].time < state.time - WINDOW) this.points.shift();
  }

  get last() {
    return this.states.at(-1);
  }

  #point(state, before) {
    const metrics = state.metrics;
    const point = {
      time: state.time, running: metrics.num_requests_running, waiting: metrics.num_requests_waiting,
      use: 100 * metrics.kv_cache_usage_perc, output: null, input: null, ttft: null, itl: null,
    };
    if (before && before === this.states.at(-2)) {
      const passed = state.time - before.time;
      const grown = name => metrics[name] - before.metrics[name];
      point.output = grown("generation_tokens_total") / passed;
      point.input = grown("prompt_tokens_total") / passed;
      for (const [name, key] of [["ttft", "time_to_first_token_seconds"], ["itl", "inter_token_latency_seconds"]]) {
        const {mean} = difference(state.histograms[key], before.histograms[key]);
        point[name] = mean === null ? null : 1000 * mean;
      }
    }
    return point;
  }

  /** The state that was the last one `span` seconds ago, or the first that is known. */
  #before(span) {
    const since = this.last.time - span;
    return this.states.findLast(state => state.time <= since) ?? this.states[0];
  }

  /** By how much a counter grew in the last `span` seconds. */
  growth(name, span = WINDOW) {
    return (this.last.metrics[name] ?? 0) - (this.#before(span).metrics[name] ?? 0);
  }

  /** A counter's growth per second. */
  rate(name, span) {
    const passed = this.last.time - this.#before(span).time;
    return passed > 0 ? this.growth(name, span) / passed : null;
  }

  /** What a histogram took in within the window: see `difference`. */
  recent(name) {
    return difference(this.last.histograms[name], this.#before(WINDOW).histograms[name]);
  }

  /** The same since the server started. */
  whole(name) {
    return difference(this.last.histograms[name], null);
  }
}

/** How many values a histogram took in between two states, their mean, and the bound that 95% are within. */
function difference(after, before) {
  const counts = after.counts.map((count, i) => count - (before ? before.counts[i] : 0));
  const count = counts.reduce((sum, n) => sum + n, 0);
  if (!count) return {count, mean: null, bound: null, over: false};
  let below = 0, bucket = 0;
  while ((below += counts[bucket]) < 0.95 * count) bucket++;
  const over = bucket >= after.bounds.length;
  return {
    count, mean: (after.sum - (before ? before.sum : 0)) / count, over,
    bound: over ? after.bounds.at(-1) : after.bounds[bucket],
  };
}
