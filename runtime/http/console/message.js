// A message as elements: what is in it, what can be done with it, and its figures.

import { Markdown } from "./markdown.js";
import { copy, h, iconButton } from "./dom.js";

/** The view of one message. `act` holds what its buttons do; `facts` says which version of how many it is,
    whether it is the last one, and the calls that wait for a result. */
export class MessageView {
  constructor(node, facts, act) {
    this.node = node;
    this.facts = facts;
    this.act = act;
    this.body = h("div", { class: "message-body" });
    this.foot = h("div", { class: "message-foot" });
    const names = { user: "You", assistant: "Answer", tool: "Result of a tool" };
    this.element = h(
      "article",
      {
        class: `message ${node.role}`,
        "aria-label": names[node.role],
        data: { id: node.id },
      },
      this.body,
      this.foot,
    );
    this.update();
  }

  /** Draws what has changed. */
  update() {
    const { node, body } = this;
    this.element.setAttribute("aria-busy", String(this.facts.isRunning()));
    this.element.classList.toggle("last", this.facts.isLast);
    if (node.role === "user") body.className = "bubble";
    if (node.role === "user") body.textContent = node.content;
    else if (node.role === "tool") body.replaceChildren(result(node));
    else this.updateAnswer();
    this.foot.replaceChildren(...this.footNodes());
  }

  updateAnswer() {
    const { node } = this;
    this.parts ??= this.answerParts();
    const isRunning = this.facts.isRunning();
    const isEmpty = !node.content && !node.reasoning && !node.calls?.length;
    this.parts.waiting.hidden = !(isRunning && isEmpty);
    this.parts.reasoning.hidden = !node.reasoning;
    if (node.reasoning) {
      const isThinking = isRunning && !node.content && !node.calls?.length;
      const seconds = node.reasoningS ? ` for ${node.reasoningS.toFixed(1)} s` : "";
      this.parts.summary.textContent = isThinking ? `Reasoning${seconds}…` : `Reasoned${seconds}`;
      this.parts.thinking.update(node.reasoning);
    }
    this.parts.text.update(node.content);
    this.parts.ending.replaceChildren(...this.endingNodes(isRunning));
    if (!isRunning || node.calls?.length) this.updateCalls(isRunning);
  }

  answerParts() {
    const waiting = h(
      "span",
      { class: "waiting", role: "img", "aria-label": "waiting for the first token" },
      h("i"),
      h("i"),
      h("i"),
    );
    const summary = h("summary");
    const thoughtBox = h("div", { class: "prose" });
    const reasoning = h("details", { class: "reasoning" }, summary, thoughtBox);
    const textBox = h("div", { class: "prose answer-text" });
    const calls = h("div", { class: "calls" });
    const ending = h("div", { class: "ending" });
    this.body.append(waiting, reasoning, textBox, calls, ending);
    return {
      waiting,
      reasoning,
      summary,
      calls,
      ending,
      thinking: new Markdown(thoughtBox),
      text: new Markdown(textBox),
    };
  }

  endingNodes(isRunning) {
    const { node, act, facts } = this;
    if (isRunning) return [];
    if (node.error) {
      const buttons = [
        h("button", {
          type: "button",
          class: "button small",
          text: "Try again",
          onclick: () => act.again(node),
        }),
      ];
      if (node.error.status === 401) {
        buttons.unshift(
          h("button", { type: "button", class: "button small primary", text: "Give a key", onclick: act.keys }),
        );
      }
      return [
        h(
          "div",
          { class: "failure", role: "alert" },
          h("p", { text: node.error.message }),
          h("div", { class: "row" }, buttons),
        ),
      ];
    }
    const why = {
      length: "The answer ended at the limit of tokens.",
      stopped: "You stopped the answer.",
      abort: "The answer was aborted on the server.",
    }[node.finish];
    if (!why) return [];
    const canGoOn = facts.isLast && node.content && !node.calls?.length;
    return [
      h(
        "p",
        { class: "finish" },
        why,
        " ",
        canGoOn &&
          h("button", {
            type: "button",
            class: "button small",
            text: "Continue",
            onclick: () => act.continue(node),
          }),
      ),
    ];
  }

  updateCalls(isRunning) {
    const { node, facts, act } = this;
    const open = isRunning ? [] : facts.openCalls();
    const shape = JSON.stringify([node.calls, open]);
    if (shape === this.callsShape) return; // what the user types into the fields stays
    this.callsShape = shape;
    const cards = (node.calls ?? []).map((call) => callCard(call, open.includes(call)));
    const foot =
      open.length > 0 &&
      h(
        "div",
        { class: "calls-foot" },
        h("button", {
          type: "button",
          class: "button primary",
          text: open.length > 1 ? "Send results" : "Send result",
          onclick: () => act.answer(node, cards.map(typed)),
        }),
      );
    this.parts.calls.replaceChildren(...cards, ...(foot ? [foot] : []));
  }

  footNodes() {
    const { node, facts, act } = this;
    if (facts.isRunning()) return [];
    const copies = iconButton("copy", "Copy", () => copy(node.content || callsText(node), copies), {
      class: "icon-button small",
    });
    const small = { class: "icon-button small" };
    const buttons = [copies];
    if (node.role !== "tool") buttons.push(iconButton("edit", "Edit", () => this.edit(), small));
    if (node.role === "assistant")
      buttons.push(iconButton("again", "Answer again", () => act.again(node), small));
    buttons.push(iconButton("trash", "Delete from here on", () => act.remove(node), small));
    const { index, count } = facts.version;
    const versions =
      count > 1 &&
      h(
        "span",
        { class: "versions" },
        iconButton("previous", "Version before", () => act.version(node, -1), {
          ...small,
          disabled: index === 0,
        }),
        h("span", { text: `${index + 1} / ${count}` }),
        iconButton("next", "Next version", () => act.version(node, 1), {
          ...small,
          disabled: index === count - 1,
        }),
      );
    return [versions, stats(node), h("span", { class: "actions" }, buttons)].filter(Boolean);
  }

  /** Puts a field in place of the text. */
  edit() {
    const { node, act } = this;
    const isUser = node.role === "user";
    const field = h("textarea", { class: "field", "aria-label": "Edit the message", value: node.content });
    const end = () => {
      form.replaceWith(this.body);
      this.foot.hidden = false;
    };
    const save = () => (field.value.trim() ? act.edited(node, field.value) : field.focus());
    const form = h(
      "form",
      { class: "edit", onsubmit: (event) => (event.preventDefault(), save()) },
      field,
      h(
        "div",
        { class: "dialog-row" },
        h("button", { type: "button", class: "button", text: "Cancel", onclick: end }),
        h("button", { type: "submit", class: "button primary", text: isUser ? "Send" : "Save" }),
      ),
    );
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") end();
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
      if (event.key === "Escape" || event.key === "Enter") event.stopPropagation();
    });
    this.body.replaceWith(form);
    this.foot.hidden = true;
    field.style.height = `${Math.min(Math.max(field.scrollHeight + 4, 96), innerHeight / 2)}px`;
    field.focus();
  }
}

function callCard(call, isOpen) {
  const answer =
    isOpen &&
    h(
      "label",
      { class: "answer labelled" },
      "Result",
      h("textarea", {
        class: "field mono",
        rows: "3",
        placeholder: "What the function returned",
        spellcheck: "false",
      }),
    );
  return h(
    "section",
    { class: "call", "aria-label": `Call of ${call.name}`, data: { call: call.id } },
    h(
      "div",
      { class: "call-head" },
      h("span", { class: "quiet", text: "calls" }),
      h("code", { text: call.name }),
    ),
    h("pre", { text: pretty(call.args) }),
    answer,
  );
}

function typed(card) {
  return { id: card.dataset.call, field: card.querySelector("textarea") };
}

function result(node) {
  return h(
    "div",
    { class: "call" },
    h(
      "div",
      { class: "call-head" },
      h("span", { class: "quiet", text: "result of" }),
      h("code", { text: node.name ?? "the call" }),
    ),
    h("pre", { text: pretty(node.content) }),
  );
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function callsText(node) {
  return (node.calls ?? []).map((call) => `${call.name}(${call.args})`).join("\n");
}

/** The figures of an answer. */
export function stats(node) {
  if (!node.stats) return null;
  const { ttftS, tokens, perS, cached } = node.stats;
  const texts = [
    perS && `${perS.toFixed(perS < 10 ? 2 : 1)} tokens/s`,
    `TTFT ${seconds(ttftS)}`,
    `${tokens.toLocaleString("en")} ${tokens === 1 ? "token" : "tokens"}`,
    cached ? `${cached.toLocaleString("en")} cached` : null,
  ];
  return h(
    "span",
    { class: "stats", title: node.model ?? null },
    texts.filter(Boolean).map((text) => h("span", { text })),
  );
}

function seconds(value) {
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(2)} s`;
}
