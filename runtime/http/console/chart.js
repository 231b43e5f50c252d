// A chart of one or two series over the last minutes, in SVG.

import { h, svg } from "./dom.js";

const HEIGHT = 104;
const LEFT = 50; // room for the axis
const TOP = 8;
const BOTTOM = 18;

/** A chart. `series` has a label and the key of a point for each line; `format` writes a value; `most` is the top
    of the axis, where it is fixed; otherwise it is one of `steps` times a power of ten. */
export class Chart {
  constructor({ title, series, format, most = null, steps = [1, 2, 5], spanS }) {
    Object.assign(this, { series, format, most, steps, spanS });
    this.points = [];
    this.width = 320;
    this.pointed = null; // seconds that the pointer is at
    this.value = h("span", { class: "value" });
    this.keys = series.map(({ label }, i) => h("span", { class: `key${i ? " second" : ""}`, text: label }));
    this.plot = svg("svg", { class: "plot", role: "img", "aria-label": title });
    this.element = h(
      "section",
      { class: "chart", "aria-label": title },
      h("h3", { text: title }),
      h("div", { class: "now" }, this.value, ...this.keys),
      this.plot,
    );
    this.title = title;
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(([entry]) => {
      this.width = Math.max(entry.contentRect.width, 120);
      this.draw(this.points);
    }).observe(this.plot);
  }

  point(event) {
    const left = event && event.clientX - this.plot.getBoundingClientRect().left;
    const isInside = event && left >= LEFT && this.points.length;
    this.pointed = isInside ? this.begin + ((left - LEFT) / (this.width - LEFT)) * this.spanS : null;
    this.draw(this.points);
  }

  draw(points) {
    this.points = points;
    this.begin = (points.at(-1)?.at ?? 0) - this.spanS;
    const top =
      this.most ??
      niceTop(
        Math.max(...points.flatMap((point) => this.series.map(({ key }) => point[key] ?? 0)), 0),
        this.steps,
      );
    const x = (at) => LEFT + ((at - this.begin) / this.spanS) * (this.width - LEFT);
    const y = (value) => TOP + (1 - Math.min(value / top, 1)) * (HEIGHT - TOP - BOTTOM);
    this.plot.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.plot.replaceChildren(
      ...this.grid(top, y),
      ...this.series
        .map(({ key }, i) => lines(points, key, i, x, y))
        .reverse()
        .flat(), // the first on top
      ...this.cursor(x),
    );
    this.words();
  }

  grid(top, y) {
    const ends = [
      [LEFT, `−${this.spanS / 60} min`, "start"],
      [this.width, "now", "end"],
    ];
    return [0, 0.5, 1]
      .flatMap((part) => [
        svg("line", { class: "grid", x1: LEFT, x2: this.width, y1: y(top * part), y2: y(top * part) }),
        text(this.format(top * part), LEFT - 8, y(top * part) + 3.5, "end"),
      ])
      .concat(ends.map(([at, words, anchor]) => text(words, at, HEIGHT - 3, anchor)));
  }

  cursor(x) {
    if (this.pointed === null) return [];
    const at = x(this.shown().at);
    return [svg("line", { class: "cursor", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM })];
  }

  /** The point whose values are written: that at the pointer, or the last one. */
  shown() {
    if (this.pointed === null) return this.points.at(-1);
    const distance = (point) => Math.abs(point.at - this.pointed);
    return this.points.reduce((best, point) => (distance(point) < distance(best) ? point : best));
  }

  words() {
    const point = this.shown();
    const values = this.series.map(({ key }) =>
      (point?.[key] ?? null) === null ? "–" : this.format(point[key]),
    );
    const age = this.pointed === null ? "" : `${Math.round(this.points.at(-1).at - point.at)} s ago`;
    this.value.replaceChildren(values[0], h("small", { text: age }));
    this.keys.forEach((key, i) => {
      key.textContent = i ? `${this.series[i].label} ${values[i]}` : this.series[i].label;
    });
    const said = this.series.map(({ label }, i) => `${label} ${values[i]}`).join(", ");
    this.plot.setAttribute("aria-label", `${this.title}: ${said}`);
  }
}

/** The paths of a series: a stretch for each run of points that have a value. */
function lines(points, key, index, x, y) {
  const stretches = [];
  let open = null;
  for (const point of points) {
    if ((point[key] ?? null) === null) open = null;
    else if (open) open.push(point);
    else stretches.push((open = [point]));
  }
  return stretches.flatMap((stretch) => {
    const path = stretch.map((point) => `${x(point.at).toFixed(1)},${y(point[key]).toFixed(1)}`).join("L");
    const line = svg("path", {
      class: `line${index ? " second" : ""}`,
      d: `M${path}${stretch.length === 1 ? "h0.01" : ""}`,
    });
    if (index) return [line];
    const [first, last] = [x(stretch[0].at).toFixed(1), x(stretch.at(-1).at).toFixed(1)];
    const floor = y(0).toFixed(1);
    return [svg("path", { class: "area", d: `M${first},${floor}L${path}L${last},${floor}Z` }), line];
  });
}

function text(words, x, y, anchor) {
  return svg("text", { x, y, "text-anchor": anchor }, words);
}

/** A round number that is not below `value`: one of `steps` times a power of ten. */
function niceTop(value, steps) {
  if (!(value > 0)) return steps[0];
  const power = 10 ** Math.floor(Math.log10(value));
  return [...steps, 10 * steps[0]].map((step) => step * power).find((top) => top >= value * 0.999);
}
