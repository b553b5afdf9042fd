// The settings of answers: the system prompt and sampling. An empty field is the served model's own value.

import { element, keep, kept } from "./dom.js";

const NUMBERS = [
  // name in the API, label, least, most, step, hint
  ["temperature", "Temperature", 0, 2, 0.1, "0 takes the likeliest token"],
  ["top_p", "Top p", 0, 1, 0.05, "Draw among the tokens that make up this share"],
  ["top_k", "Top k", 0, 1000000, 1, "Draw among so many tokens; 0: all"],
  ["min_p", "Min p", 0, 1, 0.01, "Least share of the likeliest token's probability"],
  ["max_tokens", "Most tokens", 1, 1000000, 1, "Length of an answer"],
  ["seed", "Seed", 0, 9007199254740991, 1, "The same seed, the same answer"],
  ["repetition_penalty", "Repetition", 0.01, 100, 0.05, "Penalty for tokens of prompt and answer; 1: off"],
  ["presence_penalty", "Presence", -2, 2, 0.1, "Penalty for tokens of the answer; 0: off"],
  ["frequency_penalty", "Frequency", -2, 2, 0.1, "Penalty for each time that a token stands in the answer; 0: off"],
];

export class SettingsError extends Error {
  constructor(message, field) {
    super(message);
    this.field = field;
  }
}

/** The form's fields, kept in this tab. */
export class Settings {
  constructor(form) {
    this.form = form;
    const inputs = NUMBERS.map(([name, label, min, max, step, hint]) => {
      const input = element("input", { type: "number", id: `field-${name}`, name, min, max, step: "any", placeholder: "default",
        title: hint, inputMode: "decimal", autocomplete: "off" });
      input.addEventListener("keydown", (event) => stepped(event, input, step));
      return element("div", { className: "field" }, element("label", { htmlFor: `field-${name}` }, label), input);
    });
    form.append(
      written("system", "System prompt", 5, "None"),
      element("fieldset", {}, element("legend", {}, "Sampling"), ...inputs.slice(0, 6)),
      element("details", {}, element("summary", {}, "Penalties and stops"),
        element("fieldset", { className: "three" }, ...inputs.slice(6)),
        written("stop", "Stop strings, one a line", 2, "None")),
      element("label", { className: "check" }, element("input", { type: "checkbox", name: "tint" }),
        "Tint words that were less likely"),
      element("button", { type: "button", className: "quiet", onclick: () => this.reset() }, "Back to the defaults"));
    this.fill(kept("settings", {}));
    form.addEventListener("input", () => this.changed());
    form.addEventListener("submit", (event) => event.preventDefault());
    this.changed();
  }

  fill(values) {
    for (const field of this.fields) {
      if (field.type === "checkbox") field.checked = values[field.name] === true;
      else field.value = typeof values[field.name] === "string" ? values[field.name] : "";
    }
  }

  get fields() {
    return [...this.form.elements].filter((field) => field.name);
  }

  changed() {
    document.body.classList.toggle("tinted", this.form.elements.tint.checked);
    for (const field of this.fields) field.setAttribute("aria-invalid", String(!field.checkValidity()));
    keep("settings", Object.fromEntries(this.fields.map((one) => [one.name, one.type === "checkbox" ? one.checked : one.value])));
  }

  reset() {
    this.fill({ tint: this.form.elements.tint.checked });
    this.changed();
  }

  /** {system, sampling}: the system prompt, "" for none, and the fields of a request; SettingsError names a bad one. */
  read() {
    const sampling = {};
    for (const [name, label, least, most] of NUMBERS) {
      const field = this.form.elements[name];
      const whole = ["top_k", "max_tokens", "seed"].includes(name);
      if (field.validity.badInput || !field.checkValidity() || (whole && !Number.isInteger(Number(field.value)))) {
        throw new SettingsError(`${label}: expected ${whole ? "a whole number" : "a number"} from ${least} to ${most}.`, field);
      }
      if (field.value !== "") sampling[name] = Number(field.value);
    }
    const stops = this.form.elements.stop.value.split("\n").filter((line) => line !== "");
    if (stops.length) sampling.stop = stops;
    return { system: this.form.elements.system.value, sampling };
  }
}

function written(name, label, rows, placeholder) {
  return element("div", { className: "field" }, element("label", { htmlFor: `field-${name}` }, label),
    element("textarea", { id: `field-${name}`, name, rows, placeholder, autocomplete: "off" }));
}

/** Arrow keys step by the field's own step; any number may be typed. */
function stepped(event, input, step) {
  const direction = { ArrowUp: 1, ArrowDown: -1 }[event.key];
  if (!direction) return;
  event.preventDefault();
  const from = input.value === "" ? Math.max(Number(input.min), 0) - direction * step : Number(input.value);
  const next = Math.min(Math.max(from + direction * step, Number(input.min)), Number(input.max));
  input.value = Number(next.toPrecision(12));
  input.dispatchEvent(new Event("input", { bubbles: true }));
}
