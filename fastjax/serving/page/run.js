// The live view of a run: its last figures, three plots and its events, fetched as they come.

import { element } from "./dom.js";
import { Columns, Plot } from "./plot.js";
import { runRows } from "./server.js";

const SECONDS = 2;  // between two requests, of a run at work
const SECONDS_AFTER = 15;  // of one that has ended
const SILENCE = 300;  // from when on a run at work has nothing written
const ENDS = { finished: ["finished", "good"], interrupted: ["interrupted", "bad"], not_finite: ["loss not finite", "bad"] };
const MOST_EVENTS = 200;

export class RunView {
  constructor(root) {
    this.root = root;
    this.steps = new Columns(["step", "loss", "learning_rate", "tokens_per_second", "seconds_left"]);
    this.evaluations = new Columns(["step", "eval_loss"]);
    this.place = { file: "", offset: 0 };
    this.last = null;  // event of the last row
    this.ended = false;
    this.timer = 0;
    this.watched = false;
    document.addEventListener("visibilitychange", () => this.plan(0));
  }

  /** Take an answer of the server; false: it has no run. */
  take(rows) {
    if (rows === null) return false;
    if (!this.built) this.build();
    if (rows.restarted) for (const list of [this.steps, this.evaluations]) list.clear();
    if (rows.restarted) this.events.replaceChildren();
    this.place = { file: rows.file, offset: rows.offset };
    this.steps.add(rows.steps);
    this.evaluations.add(rows.evaluations);
    for (const event of rows.events) this.addEvent(event);
    this.last = rows.last ?? (rows.restarted ? null : this.last);
    this.ended = this.last in ENDS;
    const told = rows.age > SILENCE ? [`silent for ${duration(rows.age)}`, "bad"] : ["at work", "good"];
    this.setStatus(...(this.last === null ? ["no step yet", ""] : ENDS[this.last] ?? told));
    this.more = rows.more;
    this.name.textContent = rows.name;
    if (!rows.more) this.show();
    return true;
  }

  build() {
    this.built = true;
    this.name = element("h2", {});
    this.status = element("span", { className: "pill" }, "no step yet");
    this.tiles = element("dl", { className: "tiles" });
    this.events = element("ol", { className: "events" });
    this.trouble = element("p", { className: "error", hidden: true });
    const line = (title, name, label, colour, shown, others = [], more = {}) =>
      new Plot({ title, series: [{ label, colour, columns: this.steps, name, form: "line" }, ...others], shown, ...more });
    this.plots = [
      line("Loss", "loss", "loss", "blue", (value) => value.toPrecision(4).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, ""),
        [{ label: "evaluation", colour: "orange", columns: this.evaluations, name: "eval_loss", form: "points" }], { wide: true, mean: true }),
      line("Learning rate", "learning_rate", "rate", "pink", small, [], { zero: true }),
      line("Tokens per second", "tokens_per_second", "tokens/s", "green", whole, [], { zero: true, mean: true }),
    ];
    this.root.append(element("div", { className: "heading" }, this.name, this.status), this.tiles, this.trouble,
      element("div", { className: "plots" }, ...this.plots.map(({ node }) => node)),
      element("section", {}, element("h3", {}, "Events"), this.events));
  }

  setStatus(text, kind) {
    this.status.textContent = text;
    this.status.className = `pill ${kind}`;
  }

  addEvent({ step, event, message }) {
    this.events.prepend(element("li", {}, element("span", { className: "soft" }, `step ${whole(step)}`),
      element("span", {}, message || event.replaceAll("_", " "))));
    while (this.events.children.length > MOST_EVENTS) this.events.lastChild.remove();
  }

  show() {
    const last = (name) => this.steps[name].at(-1) ?? null;
    const best = this.evaluations.eval_loss.filter((value) => value !== null);
    const facts = [
      ["Step", last("step"), whole],
      ["Loss", last("loss"), (value) => value.toFixed(4)],
      ["Best evaluation", best.length ? best.reduce((one, other) => Math.min(one, other)) : null, (value) => value.toFixed(4)],
      ["Learning rate", last("learning_rate"), small],
      ["Tokens/s", last("tokens_per_second"), whole],
      ["Time left", this.ended ? null : last("seconds_left"), duration],
    ];
    this.tiles.replaceChildren(...facts.filter(([, value]) => value !== null).map(([label, value, shown]) =>
      element("div", {}, element("dt", {}, label), element("dd", {}, shown(value)))));
    for (const plot of this.plots) plot.draw();
  }

  /** Begin to fetch, or end it. */
  watch(on) {
    this.watched = on;
    if (on && this.built) this.show();
    this.plan(0);
  }

  plan(seconds) {
    clearTimeout(this.timer);
    if (this.watched && !document.hidden) this.timer = setTimeout(() => this.fetch(), 1000 * seconds);
  }

  async fetch() {
    try {
      this.take(await runRows(this.place.file, this.place.offset));
      this.trouble.hidden = true;
    } catch (error) {
      this.trouble.textContent = `${error.message} Trying again.`;
      this.trouble.hidden = false;
      this.more = false;
    }
    this.plan(this.more ? 0 : this.ended ? SECONDS_AFTER : SECONDS);
  }
}

const whole = (value) => Math.round(value).toLocaleString("en");

const small = (value) => (value === 0 ? "0" : value.toExponential(2).replace(/\.?0+e/, "e").replace("e-", "e−"));

function duration(seconds) {
  const [hours, minutes] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60];
  return hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min ${Math.floor(seconds % 60)} s` : `${Math.floor(seconds)} s`;
}
