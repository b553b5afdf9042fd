// One answer: its text as it comes, its thoughts and calls apart, and its figures.
//
// A record, which is kept over a reload, is {model, reasoning, content, calls, finish, figures, error}; the first two are
// lists of pieces (tokens.js), `finish` is null while the answer comes.

import { announce, element } from "./dom.js";
import { appendPiece, divide } from "./tokens.js";

export const newRecord = (model) =>
  ({ model, reasoning: [], content: [], calls: [], finish: null, figures: null, error: null });

export const joined = (pieces) => pieces.map(([text]) => text).join("");

const ENDS = { length: "cut at the limit", stopped: "stopped", content_filter: "filtered" };

/** The answer on the page; it keeps its record up to date. */
export class Answer {
  /** `retry` and `goOn` are called with the answer when its reader asks for another, or for more. */
  constructor(record, { retry, goOn }) {
    this.record = record;
    this.pending = [];  // tokens whose text is yet to come
    this.text = element("div", { className: "text" });
    this.thoughtText = element("div", { className: "text" });
    this.summary = element("summary", {}, "Thinking");
    this.thought = element("details", { className: "thought", hidden: true }, this.summary, this.thoughtText);
    this.calls = element("div", { className: "calls" });
    this.error = element("p", { className: "error", hidden: true });
    this.figures = element("span", { className: "figures" });
    this.copy = element("button", { type: "button", className: "quiet", onclick: () => this.copyText() }, "Copy");
    this.retry = element("button", { type: "button", className: "quiet retry", onclick: () => retry(this) }, "Retry");
    this.more = element("button", { type: "button", className: "quiet go-on", onclick: () => goOn(this) }, "Go on");
    this.foot = element("footer", { hidden: true }, this.figures,
      element("span", { className: "acts" }, this.copy, this.more, this.retry));
    this.node = element("article", { className: "answer", attributes: { "aria-label": `Answer by ${record.model}` } },
      element("h3", {}, record.model), this.thought, this.text, this.calls, this.error, this.foot);
    this.summary.addEventListener("click", () => { this.touched = true; });
    this.openThought(record.finish === null);
    for (const piece of record.reasoning) this.show("reasoning", piece);
    for (const piece of record.content) this.show("content", piece);
    for (const index of record.calls.keys()) this.showCall(index);
    if (record.finish !== null) this.showEnd();
    else this.begin();
  }

  /** An answer begins to come, or goes on. */
  begin() {
    this.record.finish = this.record.error = null;
    this.started = performance.now();
    this.first = null;  // time of the first text
    this.tokens = null;
    this.error.hidden = this.foot.hidden = true;
    this.node.classList.add("running");
  }

  /** Take an event of the stream. */
  add(event) {
    if (event.usage) this.tokens = event.usage.completion_tokens;
    const choice = event.choices?.[0];
    if (!choice) return;
    const { reasoning_content: reasoning, content, tool_calls: calls } = choice.delta ?? {};
    const came = choice.logprobs?.content ?? [];
    if (came.length) this.tokens = (this.tokens ?? 0) + came.length;  // of a stopped answer no usage comes
    let told = [...this.pending, ...came];
    this.pending = reasoning || content || calls ? [] : told;
    if (this.first === null && (reasoning || content || calls)) this.first = performance.now();
    for (const [kind, text] of [["reasoning", reasoning], ["content", content]]) {
      if (!text) continue;
      const { pieces, left } = divide(text, told);
      told = left;
      for (const piece of pieces) {
        this.record[kind].push(piece);
        this.show(kind, piece);
      }
    }
    for (const call of calls ?? []) this.addCall(call);
    if (choice.finish_reason) this.record.finish = choice.finish_reason;
  }

  show(kind, piece) {
    if (kind === "reasoning") {
      this.thought.hidden = false;
      appendPiece(this.thoughtText, piece);
      return;
    }
    if (!this.text.hasChildNodes()) this.openThought(false);
    appendPiece(this.text, piece);
  }

  /** Thoughts are open while they come, and closed before the answer, unless the reader has opened or closed them. */
  openThought(open) {
    if (!this.touched) this.thought.open = open;
  }

  addCall({ index, function: { name = "", arguments: text = "" } = {} }) {
    const call = (this.record.calls[index] ??= { name: "", arguments: "" });
    call.name += name ?? "";
    call.arguments += text ?? "";
    this.showCall(index);
  }

  showCall(index) {
    while (this.calls.children.length <= index) this.calls.append(element("pre"));
    const { name, arguments: text } = this.record.calls[index] ?? { name: "", arguments: "" };
    this.calls.children[index].textContent = `${name}(${text})`;
  }

  /** The stream has ended, or was stopped, or has failed with a sentence. */
  end({ stopped = false, error = null } = {}) {
    const now = performance.now();
    const { record } = this;
    record.finish = stopped || error !== null ? "stopped" : record.finish ?? "stop";
    record.error = error;
    if (this.first !== null) {
      const before = record.figures ?? { tokens: 0, first: this.first - this.started, rest: 0 };
      const tokens = this.tokens === null || before.tokens === null ? null : before.tokens + this.tokens;
      record.figures = { ...before, tokens, rest: before.rest + now - this.first };
    }
    this.node.classList.remove("running");
    this.showEnd();
    announce(error ?? `The answer by ${record.model} is ${stopped ? "stopped" : "complete"}.`);
  }

  showEnd() {
    const { record } = this;
    this.summary.textContent = "Thought";
    this.error.hidden = record.error === null;
    this.error.textContent = record.error ?? "";
    this.copy.hidden = !record.content.length;
    this.more.hidden = !record.content.length || !["length", "stopped"].includes(record.finish);
    if (record.error === null && !record.content.length && !record.reasoning.length && !record.calls.length) {
      this.text.replaceChildren(element("em", {}, record.finish === "stopped" ? "Nothing yet." : "An empty answer."));
    }
    this.figures.textContent = [figures(record.figures), record.error === null ? ENDS[record.finish] : null]
      .filter(Boolean).join(" · ");
    this.foot.hidden = false;
  }

  async copyText() {
    try {
      await navigator.clipboard.writeText(joined(this.record.content));
      this.copy.textContent = "Copied";
    } catch {  // browsers allow it on https and localhost alone
      getSelection().selectAllChildren(this.text);
      this.copy.textContent = "Selected";
    }
    setTimeout(() => { this.copy.textContent = "Copy"; }, 1500);
  }
}

function figures(figures) {
  if (!figures) return null;
  const { tokens, first, rest } = figures;
  const speed = tokens > 1 && rest > 0 ? `${rounded((tokens - 1) / (rest / 1000))} tokens/s` : null;
  const count = tokens === null ? null : `${tokens} token${tokens === 1 ? "" : "s"}`;
  return [count, speed, `first after ${first < 1000 ? `${rounded(first)} ms` : `${rounded(first / 1000)} s`}`].filter(Boolean).join(" · ");
}

const rounded = (value) => Number(value.toPrecision(value < 100 ? 2 : 3)).toLocaleString("en");
