// A plot of figures by step, as SVG: lines, their running mean, points of evaluations, and a reading at a step.

import { drawn, element } from "./dom.js";

const [LEFT, RIGHT, TOP, BOTTOM] = [54, 14, 10, 26];

/** Columns that grow by rows of the same names. */
export class Columns {
  constructor(names) {
    this.names = names;
    this.clear();
  }

  clear() {
    for (const name of this.names) this[name] = [];
  }

  add(rows) {
    for (const row of rows) for (const name of this.names) this[name].push(row[name]);
  }
}

export class Plot {
  /**
   * @param title of the plot.
   * @param series [{label, colour: a class, columns, name, form: "line" or "points"}].
   * @param shown a figure as text.
   * @param zero whether the axis begins at 0.
   * @param mean whether the first series has a running mean, over its own faint line.
   */
  constructor({ title, series, shown, zero = false, mean = false, wide = false }) {
    Object.assign(this, { title, series, shown, zero, mean });
    this.svg = drawn("svg", { class: "plot", role: "slider", tabindex: 0, "aria-label": title });
    this.reading = element("output", {});
    this.legend = element("span", { className: "legend" });
    this.node = element("figure", { className: wide ? "wide" : "" },
      element("figcaption", {}, element("h3", {}, title), this.legend, this.reading), this.svg);
    this.at = null;
    new ResizeObserver(() => this.draw()).observe(this.svg);
    this.svg.addEventListener("pointermove", (event) => this.read(this.stepAt(event)));
    this.svg.addEventListener("pointerleave", () => this.read(null));
    this.svg.addEventListener("blur", () => this.read(null));
    this.svg.addEventListener("focus", () => this.read(this.steps.at(-1) ?? null));
    this.svg.addEventListener("keydown", (event) => this.move(event));
  }

  get steps() {
    return this.series[0].columns.step;
  }

  draw() {
    const [width, height] = [this.svg.clientWidth, this.svg.clientHeight];
    this.svg.replaceChildren();
    this.legend.replaceChildren();
    if (!width) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const known = this.series.map(({ columns, name }) => points(columns.step, columns[name]));
    const all = known.flat();
    if (!all.length) return this.svg.append(text(width / 2, height / 2, "No figures yet", "middle"));
    const mean = this.mean ? smoothed(known[0]) : null;
    const first = all.reduce((least, [step]) => Math.min(least, step), Infinity);
    const last = Math.max(all.reduce((most, [step]) => Math.max(most, step), 0), first + 1);
    const ticks = axis(...limits(known, mean, this.zero));
    this.x = (step) => LEFT + ((step - first) / (last - first)) * (width - LEFT - RIGHT);
    this.y = (value) => height - BOTTOM - ((value - ticks.low) / (ticks.high - ticks.low)) * (height - TOP - BOTTOM);
    this.extent = [first, last];
    this.grid(ticks, width, height, first, last);
    this.series.forEach((one, index) => this.line(one, known[index], index ? null : mean, width));
    this.cursor = drawn("g", { class: "cursor", visibility: "hidden" }, drawn("line", { y1: TOP, y2: height - BOTTOM }),
      ...this.series.map(({ colour }) => drawn("circle", { class: colour, r: 4 })));
    this.svg.append(this.cursor);
    this.read(this.at);
  }

  grid(ticks, width, height, first, last) {
    for (const value of ticks.values) {
      const y = this.y(value);
      this.svg.append(drawn("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }),
        text(LEFT - 8, y + 4, this.shown(value), "end"));
    }
    const steps = axis(first, last, Math.max(3, Math.floor((width - LEFT - RIGHT) / 64)));
    for (const value of steps.values.filter((one) => one >= first && one <= last && Number.isInteger(one))) {
      this.svg.append(text(this.x(value), height - 8, value.toLocaleString("en"), "middle"));
    }
  }

  line({ label, colour, form }, known, mean, width) {
    if (!known.length) return;
    const path = (line) => line.map(([step, value], index) =>
      `${index ? "L" : "M"}${this.x(step).toFixed(1)} ${this.y(value).toFixed(1)}`).join("");
    const thin = thinned(known, Math.max(width - LEFT - RIGHT, 1));
    this.svg.append(drawn("path", { class: `${colour} ${mean ? "faint" : ""}`, d: path(thin) }));
    if (mean) this.svg.append(drawn("path", { class: colour, d: path(thinned(mean, width)) }));
    if (form === "points" || known.length === 1) {
      for (const [step, value] of known) {
        this.svg.append(drawn("circle", { class: colour, cx: this.x(step), cy: this.y(value), r: 3 }));
      }
    }
    if (this.series.length > 1) this.legend.append(element("span", { className: colour }, label));
  }

  stepAt(event) {
    if (!this.extent || !this.steps.length) return null;
    const { left, width } = this.svg.getBoundingClientRect();
    const share = (event.clientX - left - LEFT) / (width - LEFT - RIGHT);
    const step = this.extent[0] + share * (this.extent[1] - this.extent[0]);
    return this.steps[nearest(this.steps, step)];
  }

  move(event) {
    const index = this.at === null ? this.steps.length - 1 : nearest(this.steps, this.at);
    const far = Math.max(1, Math.round(this.steps.length / 20));
    const goals = { ArrowLeft: index - 1, ArrowRight: index + 1, PageDown: index - far, PageUp: index + far, Home: 0,
      End: this.steps.length - 1 };
    if (!(event.key in goals) || !this.steps.length) return;
    event.preventDefault();
    this.read(this.steps[Math.min(Math.max(goals[event.key], 0), this.steps.length - 1)]);
  }

  /** Read the figures at a step; null: those of the last one, without a mark. */
  read(step) {
    this.at = step;
    const at = step ?? this.steps.at(-1);
    const found = this.series.map(({ columns, name }) => valueAt(columns.step, columns[name], at));
    const told = this.series.map(({ label }, index) => (found[index] === null ? null : `${label} ${this.shown(found[index], true)}`));
    const reading = at === undefined ? "" : [`step ${at.toLocaleString("en")}`, ...told.filter(Boolean)].join(" · ");
    this.reading.textContent = reading;
    const [least, most] = this.extent ?? [0, 1];
    const values = { "aria-valuemin": least, "aria-valuemax": most, "aria-valuenow": at ?? least, "aria-valuetext": reading || "no figures yet" };
    for (const [name, value] of Object.entries(values)) this.svg.setAttribute(name, value);
    if (!this.cursor || !this.x) return;
    this.cursor.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step === null) return;
    const [line, ...dots] = this.cursor.children;
    line.setAttribute("x1", this.x(step));
    line.setAttribute("x2", this.x(step));
    dots.forEach((dot, index) => {
      dot.setAttribute("visibility", found[index] === null ? "hidden" : "inherit");
      if (found[index] === null) return;
      dot.setAttribute("cx", this.x(step));
      dot.setAttribute("cy", this.y(found[index]));
    });
  }
}

const points = (steps, values) => steps.map((step, index) => [step, values[index]]).filter(([, value]) => value !== null);

/** The centred mean over a thirtieth of the points, an odd number from 5 to 101; null for too few of them. */
function smoothed(known) {
  const reach = Math.min(Math.max(5, Math.floor(known.length / 30)), 100) >> 1;
  if (known.length < 6 * reach) return null;
  const sums = [0];
  for (const [, value] of known) sums.push(sums.at(-1) + value);
  return known.map(([step], index) => {
    const [from, to] = [Math.max(0, index - reach), Math.min(known.length, index + reach + 1)];
    return [step, (sums[to] - sums[from]) / (to - from)];
  });
}

/** The lowest and the highest point of every stretch, at most two for each of `most` stretches. */
function thinned(line, most) {
  if (line.length <= 2 * most) return line;
  const picked = [];
  for (let part = 0; part < most; part += 1) {
    const [from, to] = [part, part + 1].map((one) => Math.floor((one * line.length) / most));
    let [low, high] = [from, from];
    for (let index = from; index < to; index += 1) {
      if (line[index][1] < line[low][1]) low = index;
      if (line[index][1] > line[high][1]) high = index;
    }
    for (const index of new Set([Math.min(low, high), Math.max(low, high)])) if (to > from) picked.push(line[index]);
  }
  return picked;
}

/** The least and the greatest value shown; a lone spike, far above the mean, does not flatten all else. */
function limits(known, mean, zero) {
  const ordered = known[0].map(([, value]) => value).sort((one, other) => one - other);
  const others = known.slice(1).flat().map(([, value]) => value);
  const most = ordered.length > 200 ? ordered[Math.floor(ordered.length * 0.999)] : ordered.at(-1) ?? -Infinity;
  const extremes = [most, ordered[0] ?? Infinity, ...others, ...(mean ? [Math.max(...ends(mean))] : [])].filter(Number.isFinite);
  return [zero ? 0 : Math.min(...extremes), Math.max(...extremes)];
}

const ends = (line) => line.reduce(([low, high], [, value]) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);

/** Round values over a range: {low, high, values}. */
function axis(least, most, count = 4) {
  const span = most > least ? most - least : Math.abs(most) || 1;
  const power = 10 ** Math.floor(Math.log10(span / count));
  const step = power * [1, 2, 5, 10].find((one) => one * power * count >= span);
  const from = Math.floor(least / step + 1e-6);  // figures were float32
  const to = Math.max(Math.ceil(most / step - 1e-6), from + 1);
  const values = Array.from({ length: to - from + 1 }, (_, index) => Number(((from + index) * step).toPrecision(12)));
  return { low: values[0], high: values.at(-1), values };
}

/** The index of the nearest of rising numbers. */
function nearest(rising, value) {
  let [low, high] = [0, rising.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (rising[middle] <= value) low = middle;
    else high = middle;
  }
  return Math.abs(rising[low] - value) <= Math.abs(rising[Math.max(high, 0)] - value) ? low : Math.max(high, 0);
}

/** The figure of a step; null: it has none. */
function valueAt(steps, values, step) {
  const index = steps.length ? nearest(steps, step) : -1;
  return steps[index] === step ? values[index] : null;
}

function text(x, y, content, anchor) {
  const made = drawn("text", { x, y, "text-anchor": anchor });
  made.textContent = content;
  return made;
}
