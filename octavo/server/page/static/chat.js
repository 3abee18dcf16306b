// The playground: a conversation (or, for a model without a chat template, a text) that the server continues.

import {make} from "./chart.js";
import {number, seconds, short, text} from "./texts.js";

const $ = id => document.getElementById(id);
const FIELDS = [
  ["temperature", 0, 2, 0.1], ["max_tokens", 1, null, 1], ["top_p", 0, 1, 0.05], ["top_k", -1, null, 1],
  ["min_p", 0, 1, 0.05], ["repetition_penalty", 0.01, null, 0.05], ["presence_penalty", -2, 2, 0.1],
  ["frequency_penalty", -2, 2, 0.1], ["seed", null, null, 1], ["stopText", null, null, null],
];

export class Chat {
  /** `headers()` gives those of a request; `refused()` is told where the key is not taken. */
  constructor(headers, refused) {
    this.headers = headers;
    this.refused = refused;
    this.turns = []; // {role, content, element}
    this.running = null;
    this.info = null;
    $("compose").addEventListener("submit", event => {
      event.preventDefault();
      this.send();
    });
    $("draft").addEventListener("keydown", event => {
      // Enter also ends the choice of a character in an input method, which is no wish to send.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
      event.preventDefault();
      this.send();
    });
    $("stop").addEventListener("click", () => this.running?.abort());
    $("clear").addEventListener("click", () => {
      this.running?.abort();
      this.turns = [];
      $("messages").replaceChildren();
    });
    if (window.matchMedia("(max-width: 720px)").matches) $("sampling").open = false;
  }

  /** Draws what depends on the server and the language. */
  show(info) {
    this.info = info;
    const chats = info.interface === "chat";
    const none = {embedding: "noEmbedding", tokens: "noTokenizer"}[info.interface];
    $("chat-area").hidden = Boolean(none);
    $("chat-none").hidden = !none;
    if (none) $("chat-none").textContent = text(none);
    $("system-field").hidden = !chats;
    $("model-field").hidden = info.models.length < 2;
    if ($("chat-model").childElementCount !== info.models.length) {
      $("chat-model").replaceChildren(...info.models.map(name => make("option", "", name)));
    }
    $("draft").placeholder = text(chats ? "chatPlaceholder" : "completionPlaceholder");
    $("draft").setAttribute("aria-label", $("draft").placeholder);
    if (!$("sampling-fields").childElementCount) $("sampling-fields").append(...FIELDS.map(field));
    for (const [name] of FIELDS) {
      const input = $(`field-${name}`), known = info.sampling[name];
      input.previousElementSibling.textContent = text(name);
      input.placeholder = known !== undefined ? String(+known.toFixed(4))
        : {max_tokens: text("limit"), seed: text("random")}[name] ?? "";
    }
    for (const turn of this.turns) turn.tell?.();
  }

  async send() {
    const draft = $("draft").value;
    if (!draft.trim() || this.running || !this.info) return;
    for (const input of document.querySelectorAll("#sampling-fields input")) {
      if (!input.reportValidity()) {
        $("sampling").open = true;
        input.reportValidity();
        return;
      }
    }
    $("draft").value = "";
    this.#add("user", draft);
    const answer = this.#add("assistant", "");
    this.running = new AbortController();
    this.#busy(answer, true);
    const figures = {begin: performance.now(), first: null, last: null, usage: null, reason: null};
    let problem = null;
    try {
      await this.#stream(answer, figures);
    } catch (error) {
      if (!this.running.signal.aborted) problem = error.message;
    }
    if (this.running.signal.aborted) figures.reason = "abort";
    this.#busy(answer, false);
    this.running = null;
    answer.tell = () => this.#tell(answer, figures, problem);
    answer.tell();
    this.#follow();
    if (problem && !answer.content) this.turns = this.turns.slice(0, -2); // is not asked again
  }

  async #stream(answer, figures) {
    const chats = this.info.interface === "chat";
    const answered = await fetch(chats ? "v1/chat/completions" : "v1/completions", {
      method: "POST", signal: this.running.signal, body: JSON.stringify(this.#body(chats)),
      headers: {"content-type": "application/json", ...this.headers()},
    });
    if (!answered.ok) {
      if (answered.status === 401) this.refused();
      throw new Error((await answered.json()).error.message);
    }
    for await (const event of events(answered.body)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) figures.usage = event.usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      const piece = (chats ? choice.delta.content : choice.text) ?? "";
      const thought = choice.delta?.reasoning_content ?? choice.delta?.reasoning ?? "";
      if (piece || thought) {
        figures.last = performance.now();
        figures.first ??= figures.last;
      }
      if (thought) answer.think(thought);
      if (piece) answer.write(piece);
      if (choice.finish_reason) figures.reason = choice.finish_reason;
    }
  }

  #body(chats) {
    const body = {stream: true, stream_options: {include_usage: true}};
    body.model = this.info.models.length > 1 ? $("chat-model").value : this.info.models[0];
    const turns = this.turns.slice(0, -1);
    if (chats) {
      body.messages = turns.map(({role, content}) => ({role, content}));
      if ($("system").value.trim()) body.messages.unshift({role: "system", content: $("system").value});
    } else {
      body.prompt = turns.map(turn => turn.content).join("");
    }
    for (const [name] of FIELDS) {
      const value = $(`field-${name}`).value;
      if (value === "") continue;
      if (name === "stopText") body.stop = [value];
      else body[name] = Number(value);
    }
    if (!chats) body.max_tokens ??= 256;
    return body;
  }

  #add(role, content) {
    const element = make("div", `message ${role}`), words = make("div", "text", content), foot = make("p", "note");
    let thought = null;
    element.append(words, foot);
    $("messages").append(element);
    const turn = {
      role, content, element, foot,
      write: piece => {
        turn.content += piece;
        words.append(piece);
        this.#follow();
      },
      think: piece => {
        if (!thought) words.before(thought = make("div", "thought"));
        thought.append(piece);
        this.#follow();
      },
    };
    this.turns.push(turn);
    element.scrollIntoView({block: "end"});
    return turn;
  }

  /** Keeps the newest words in sight, unless the reader has scrolled away. */
  #follow() {
    const page = document.scrollingElement;
    if (page.scrollHeight - page.scrollTop - page.clientHeight < 160) page.scrollTop = page.scrollHeight;
  }

  #busy(answer, is) {
    answer.element.classList.toggle("busy", is);
    $("send").hidden = is;
    $("stop").hidden = !is;
  }

  #tell(answer, figures, problem) {
    answer.foot.classList.toggle("wrong", problem !== null);
    if (problem !== null) {
      answer.foot.textContent = text("failed", {message: problem});
      return;
    }
    const {usage, first, last} = figures;
    const reason = {stop: "reasonStop", length: "reasonLength", abort: "stopped"}[figures.reason];
    const named = reason ? text(reason) : String(figures.reason);
    if (!usage) {
      answer.foot.textContent = named;
      return;
    }
    const tokens = usage.completion_tokens, passed = (last - first) / 1000;
    answer.foot.textContent = text("figures", {
      tokens: number(tokens), rate: tokens > 1 && passed > 0 ? short((tokens - 1) / passed) : "—",
      ttft: first === null ? "—" : seconds((first - figures.begin) / 1000), prompt: number(usage.prompt_tokens),
      cached: number(usage.prompt_tokens_details?.cached_tokens ?? 0), reason: named,
    });
  }
}

function field([name, low, high, step]) {
  const label = make("label"), input = make("input");
  input.id = `field-${name}`;
  if (step === null) {
    input.type = "text";
  } else {
    input.type = "number";
    input.step = step === 1 ? "1" : "any";
    if (low !== null) input.min = low;
    if (high !== null) input.max = high;
  }
  label.append(make("span"), input);
  return label;
}

/** The events of a stream, as JSON; ends with `[DONE]`. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
