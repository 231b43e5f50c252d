// The view Options: every option in force, where its value comes from and why.

import { getJson, Refusal } from "./api.js";
import { h } from "./dom.js";

export class OptionsView {
  constructor(box, page) {
    this.page = page;
    this.rows = [];
    this.search = h("input", {
      class: "field",
      type: "search",
      placeholder: "Search names, values and reasons",
      "aria-label": "Search options",
      autocomplete: "off",
      oninput: () => this.filter(),
    });
    this.changed = h("input", { type: "checkbox", id: "only-changed", onchange: () => this.filter() });
    this.count = h("span", { class: "quiet", role: "status" });
    this.body = h("tbody");
    this.failure = h("p", { class: "notice", role: "alert", hidden: true });
    box.append(
      h(
        "div",
        { class: "page-inner" },
        this.failure,
        h(
          "div",
          { class: "filter" },
          this.search,
          h("label", { class: "check" }, this.changed, "Without the defaults"),
          this.count,
        ),
        h(
          "table",
          { class: "options-table" },
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              ["Option", "Value", "Why"].map((text) => h("th", { scope: "col", text })),
            ),
          ),
          this.body,
        ),
      ),
    );
  }

  async load() {
    try {
      const { options } = await getJson("server_info");
      this.rows = Object.entries(options).map(([name, option]) => row(name, option));
      this.failure.hidden = true;
      this.filter();
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      this.failure.replaceChildren(
        error.message,
        error.needsKey
          ? h("button", {
              type: "button",
              class: "button small",
              text: "Give a key",
              onclick: () => this.page.askForKey(),
            })
          : "",
      );
      this.failure.hidden = false;
    }
  }

  filter() {
    const words = this.search.value.toLowerCase().replace(/^--/, "").split(/\s+/).filter(Boolean);
    const shown = this.rows.filter(
      ({ text, isChanged }) =>
        (isChanged || !this.changed.checked) && words.every((word) => text.includes(word)),
    );
    this.body.replaceChildren(...shown.map((one) => one.element));
    this.count.textContent = `${shown.length} of ${this.rows.length}`;
  }
}

function row(name, option) {
  const { value, source, reason } =
    option !== null && typeof option === "object" && "value" in option ? option : { value: option };
  const flag = `--${name.replaceAll("_", "-")}`;
  const shown = value === null ? "none" : typeof value === "string" ? value || '""' : JSON.stringify(value);
  const isChanged = source !== undefined && source !== "default";
  const element = h(
    "tr",
    { class: isChanged ? "changed" : null },
    h("td", {}, h("code", { text: flag })),
    h("td", {}, h("code", { text: shown })),
    h("td", {}, reason || "", h("span", { class: "source", text: source ?? "" })),
  );
  return { element, isChanged, text: [name, flag.slice(2), shown, source, reason].join(" ").toLowerCase() };
}
