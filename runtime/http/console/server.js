// The view Server: what it is, live charts, and the requests that run. It asks while it is looked at only.

import { getJson, key, Refusal, send } from "./api.js";
import { Chart } from "./chart.js";
import { $, announce, h, svg } from "./dom.js";
import { History, SPAN_S } from "./metrics.js";

const EVERY_MS = 1000;

const rate = (value) =>
  value >= 10_000 ? `${(value / 1000).toFixed(1)}k` : String(Number(value.toPrecision(value < 100 ? 2 : 3)));
const percent = (value) => `${Number((100 * value).toPrecision(value < 0.1 ? 2 : 3))} %`;
const count = (value) => rate(value);
const whole = (value) => value.toLocaleString("en");

function duration(seconds) {
  if (seconds === 0) return "0";
  if (seconds < 0.9995) return `${Number((seconds * 1000).toPrecision(3))} ms`;
  return `${Number(seconds.toPrecision(3))} s`;
}

const CHARTS = [
  {
    title: "Tokens per second",
    format: rate,
    series: [
      { label: "generated", key: "tokensPerS" },
      { label: "prompt", key: "promptPerS" },
    ],
  },
  {
    title: "Time to first token",
    format: duration,
    series: [
      { label: "mean", key: "ttft" },
      { label: "p95", key: "ttft95" },
    ],
  },
  {
    title: "Time between tokens",
    format: duration,
    series: [
      { label: "mean", key: "itl" },
      { label: "p95", key: "itl95" },
    ],
  },
  {
    title: "Requests",
    format: count,
    steps: [2, 4, 6, 8],
    series: [
      { label: "running", key: "running" },
      { label: "waiting", key: "waiting" },
    ],
  },
  {
    title: "Pages of the cache",
    format: percent,
    most: 1,
    series: [
      { label: "in use", key: "inUse" },
      { label: "with cached prefixes", key: "occupied" },
    ],
  },
  {
    title: "Prompt tokens found in the cache",
    format: percent,
    most: 1,
    series: [{ label: "hit rate", key: "hitRate" }],
  },
];

export class ServerView {
  constructor(box, page) {
    this.page = page;
    this.history = new History();
    this.timer = 0;
    this.isAsking = false;
    this.charts = CHARTS.map((settings) => new Chart({ ...settings, spanS: SPAN_S }));
    this.facts = h("dl", { class: "facts" });
    this.requests = h("div", { id: "requests" });
    this.all = h("button", {
      type: "button",
      class: "button small danger",
      text: "Abort all",
      hidden: true,
      onclick: () => this.abortAll(),
    });
    this.failure = h("p", { class: "notice", role: "alert", hidden: true });
    box.append(
      h(
        "div",
        { class: "page-inner" },
        this.failure,
        this.facts,
        h("h2", { text: "Figures" }),
        h(
          "div",
          { class: "charts" },
          this.charts.map((chart) => chart.element),
        ),
        h(
          "div",
          { class: "page-head" },
          h("h2", { text: "Open requests" }),
          h("span", { class: "spacer" }),
          this.all,
        ),
        this.requests,
      ),
    );
    document.addEventListener("visibilitychange", () => this.look());
  }

  /** Begins or ends to ask, by whether the view is seen. */
  look() {
    const isSeen = !document.hidden && !$("server").hidden;
    if (isSeen && !this.timer) {
      this.timer = setInterval(() => this.ask(), EVERY_MS);
      this.ask();
      this.describe();
    } else if (!isSeen && this.timer) {
      clearInterval(this.timer);
      this.timer = 0;
    }
  }

  async ask() {
    if (this.isAsking) return; // the server is slower than the clock
    this.isAsking = true;
    try {
      const text = await (await send("metrics")).text();
      this.history.add(performance.now() / 1000, text);
      for (const chart of this.charts) chart.draw(this.history.points);
      this.failure.hidden = true;
      await this.list();
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      this.failure.textContent = error.message;
      this.failure.hidden = false;
    } finally {
      this.isAsking = false;
    }
  }

  async describe() {
    try {
      const info = await getJson("server_info");
      const ranks = info.ranks ?? [];
      const size = (bytes) =>
        bytes < 2 ** 30 ? `${(bytes / 2 ** 20).toFixed(0)} MiB` : `${(bytes / 2 ** 30).toFixed(1)} GiB`;
      const sum = (name) => ranks.reduce((total, rank) => total + rank[name], 0);
      const facts = [
        ["Model", info.model],
        ["Architecture", info.architecture],
        ["State", info.state],
        ["Devices", ranks.map((rank) => rank.device).join(", ") || "–"],
        ["Context", `${whole(info.context_length)} tokens`],
        ["Weights", size(sum("weights_bytes"))],
        ["Pages", size(sum("pages_bytes"))],
        ["Room in pages", `${whole(info.max_total_num_tokens)} tokens`],
      ];
      this.facts.replaceChildren(
        ...facts.map(([name, value]) => h("div", {}, h("dt", { text: name }), h("dd", { text: value }))),
      );
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      this.facts.replaceChildren(h("div", {}, h("dt", { text: "Server" }), h("dd", { text: error.message })));
    }
  }

  async list() {
    if (this.refusedWith === `${key("user")} ${key("admin")}`) return; // these keys were refused: nothing has changed
    try {
      this.draw(await getJson("open_requests", { level: "admin" }));
      this.refusedWith = null;
    } catch (error) {
      if (!(error instanceof Refusal) || ![401, 403].includes(error.status)) throw error;
      this.refusedWith = `${key("user")} ${key("admin")}`;
      this.all.hidden = true;
      this.requests.replaceChildren(
        h(
          "p",
          { class: "none" },
          error.message,
          error.status === 401 &&
            h("button", {
              type: "button",
              class: "button small",
              text: "Give a key",
              onclick: () => this.page.askForKey(),
            }),
        ),
      );
    }
  }

  draw({ total, requests }) {
    this.all.hidden = total === 0;
    if (!total) {
      this.requests.replaceChildren(h("p", { class: "none", text: "None at this moment." }));
      return;
    }
    const had = document.activeElement?.dataset?.rid; // the button that has the focus keeps it
    const head = ["Request", "Tenant", "State", "Age", "Prompt", "Answer", ""];
    const ends = [3, 4, 5];
    const table = h(
      "table",
      { class: "requests" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          head.map((text, i) => h("th", { scope: "col", class: ends.includes(i) ? "end" : null, text })),
        ),
      ),
      h(
        "tbody",
        {},
        requests.map((one) => this.row(one)),
      ),
    );
    const rest =
      total > requests.length && h("p", { class: "hint", text: `and ${whole(total - requests.length)} more` });
    this.requests.replaceChildren(table, ...(rest ? [rest] : []));
    if (had) this.requests.querySelector(`[data-rid="${CSS.escape(had)}"]`)?.focus();
  }

  row(one) {
    const most = one.max_completion_tokens;
    const cached = one.cached_tokens ? ` (${whole(one.cached_tokens)} cached)` : "";
    const prompt = whole(one.prompt_tokens) + cached;
    return h(
      "tr",
      {},
      h("td", {}, h("code", { text: one.rid })),
      h("td", { text: one.tenant || "–", data: { label: "Tenant" } }),
      h("td", { text: one.state }),
      h("td", {
        class: "end",
        text: one.age_s === null ? "–" : `${one.age_s.toFixed(1)} s`,
        data: { label: "Age" },
      }),
      h("td", { class: "end", text: prompt, data: { label: "Prompt" } }),
      h(
        "td",
        { class: "end", data: { label: "Answer" } },
        `${whole(one.completion_tokens)} of ${whole(most)}`,
        progress(most ? one.completion_tokens / most : 0),
      ),
      h(
        "td",
        {},
        h("button", {
          type: "button",
          class: "button small danger",
          text: "Abort",
          "aria-label": `Abort ${one.rid}`,
          data: { rid: one.rid },
          onclick: () => this.abort({ rid: one.rid }),
        }),
      ),
    );
  }

  abortAll() {
    if (confirm("Abort all open requests? Their clients get what there is so far."))
      this.abort({ abort_all: true });
  }

  async abort(body) {
    try {
      const { aborted } = await getJson("abort_request", { method: "POST", body, level: "admin" });
      announce(`${aborted} aborted`);
      await this.list();
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      this.failure.textContent = error.message;
      this.failure.hidden = false;
    }
  }
}

function progress(part) {
  const bar = svg("svg", {
    class: "progress",
    viewBox: "0 0 100 4",
    preserveAspectRatio: "none",
    "aria-hidden": "true",
  });
  bar.append(svg("rect", { width: (100 * Math.min(part, 1)).toFixed(1), height: 4 }));
  return bar;
}
