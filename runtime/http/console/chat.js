// The chat: the current conversation, its answers on their way, and what the user does with them.

import { append, create, messages, openCalls, path, remove, select, siblings } from "./conversation.js";
import { $, announce, h, icon, isTouch } from "./dom.js";
import { MessageView } from "./message.js";
import { Run } from "./run.js";
import { fields, SettingsError, summary } from "./settings.js";
import { remember, remembered } from "./store.js";
import { Speaker } from "./speaker.js";
import { welcome } from "./welcome.js";

const NEAR_END_PX = 80;

/** Conversations of `store`. `page` has what the chat needs of the page around it: model(), showSettings(field),
    askForKey(), connect() and changed(). */
export class Chat {
  constructor(store, page) {
    this.store = store;
    this.page = page;
    this.conversations = [];
    this.current = create(remembered("settings", {}));
    this.runs = new Map(); // id of a conversation -> its run
    this.views = new Map(); // id of a message -> its view
    this.speaker = new Speaker($("spoken"));
    this.frame = 0;
    this.isAtEnd = true;
    this.act = {
      again: (node) => this.again(node),
      continue: (node) => this.goOn(node),
      remove: (node) => this.remove(node),
      version: (node, step) => this.version(node, step),
      edited: (node, text) => this.edited(node, text),
      answer: (node, results) => this.answerCalls(results),
      keys: () => page.askForKey(),
    };
    this.wireComposer();
  }

  async load() {
    this.conversations = await this.store.all();
    const last = this.conversations.find((one) => one.id === remembered("current", null));
    this.show(last ?? this.current);
  }

  // ── conversations ─────────────────────────────────────────────────────────────────────────────────────────

  begin() {
    this.show(create(remembered("settings", {})));
    $("text").focus();
  }

  show(conversation) {
    this.current = conversation;
    remember("current", conversation.id);
    this.draw();
    this.toEnd();
    this.page.changed();
  }

  add(conversations) {
    this.conversations.unshift(...conversations);
    for (const one of conversations) this.store.save(one);
    if (conversations.length) this.show(conversations[0]);
  }

  rename(conversation, title) {
    conversation.title = title;
    this.keep(conversation);
  }

  delete(conversation) {
    this.runs.get(conversation.id)?.stop();
    this.conversations = this.conversations.filter((one) => one !== conversation);
    this.store.delete(conversation.id);
    if (conversation === this.current) this.begin();
    else this.page.changed();
  }

  isRunning(conversation) {
    return this.runs.has(conversation.id);
  }

  settingsChanged() {
    remember("settings", this.current.settings);
    if (this.conversations.includes(this.current)) this.store.save(this.current);
    this.drawComposer();
  }

  /** Keeps a conversation that has something in it. */
  keep(conversation) {
    if (!Object.keys(conversation.nodes).length) return this.page.changed();
    this.conversations = [conversation, ...this.conversations.filter((one) => one !== conversation)];
    this.store.save(conversation);
    this.page.changed();
  }

  // ── what the user does ────────────────────────────────────────────────────────────────────────────────────

  submit() {
    const text = $("text").value;
    if (!text.trim() || this.isRunning(this.current) || openCalls(this.current).length || !this.canSend())
      return;
    append(this.current, this.current.leaf, { role: "user", content: text });
    $("text").value = "";
    this.fit();
    this.isAtEnd = true;
    this.run();
  }

  again(node) {
    if (this.isRunning(this.current) || !this.canSend()) return;
    this.current.leaf = node.parent;
    this.run();
  }

  goOn(node) {
    if (this.isRunning(this.current) || !this.canSend()) return;
    this.start(node, { continue_final_message: true, add_generation_prompt: false }, node.id);
  }

  edited(node, text) {
    if (this.isRunning(this.current)) return;
    if (node.role === "user" && !this.canSend()) return;
    append(this.current, node.parent, {
      role: node.role,
      content: text,
      ...(node.role === "user" ? {} : { model: node.model }),
    });
    if (node.role === "user") this.run();
    else this.changed();
  }

  remove(node) {
    if (this.isRunning(this.current)) return;
    remove(this.current, node.id);
    this.changed();
  }

  version(node, step) {
    if (this.isRunning(this.current)) return;
    const all = siblings(this.current, node);
    const other = all[all.indexOf(node) + step];
    if (other) select(this.current, other.id);
    this.changed();
  }

  answerCalls(results) {
    const missing = results.find(({ field }) => !field?.value.trim());
    if (missing) return missing.field?.focus();
    if (!this.canSend()) return;
    const names = new Map(openCalls(this.current).map((call) => [call.id, call.name]));
    for (const { id, field } of results) {
      append(this.current, this.current.leaf, {
        role: "tool",
        callId: id,
        name: names.get(id),
        content: field.value,
      });
    }
    this.isAtEnd = true;
    this.run();
  }

  stop() {
    this.runs.get(this.current.id)?.stop();
  }

  changed() {
    this.keep(this.current);
    this.draw();
  }

  canSend() {
    try {
      fields(this.current.settings);
      return true;
    } catch (error) {
      if (!(error instanceof SettingsError)) throw error;
      this.page.showSettings(error.field);
      return false;
    }
  }

  // ── answers ───────────────────────────────────────────────────────────────────────────────────────────────

  run() {
    const parent = this.current.leaf;
    const node = append(this.current, parent, { role: "assistant", model: this.page.model() });
    this.start(node, {}, parent);
  }

  /** Streams an answer into `node`; the prompt ends with the message `last`. */
  async start(node, more, last) {
    const conversation = this.current;
    const body = {
      model: this.page.model(),
      messages: messages(conversation, last),
      stream: true,
      stream_options: { include_usage: true },
      ...fields(conversation.settings),
      ...more,
    };
    const run = new Run(node, body, () => this.grew(conversation, node));
    this.runs.set(conversation.id, run);
    this.keep(conversation);
    this.draw();
    announce("Answering");
    await run.finish();
    this.runs.delete(conversation.id);
    this.keep(conversation);
    if (node.error?.status === 0) this.page.connect(); // the server went away: says so until it is back
    if (conversation === this.current) {
      this.speaker.end(node.content);
      this.draw();
    }
  }

  /** An answer has grown: it is drawn once a frame. */
  grew(conversation, node) {
    this.store.save(conversation);
    if (conversation !== this.current || this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.views.get(node.id)?.update();
      this.speaker.grow(node.content);
      this.drawLive();
      if (this.isAtEnd) this.toEnd();
    });
  }

  // ── drawing ───────────────────────────────────────────────────────────────────────────────────────────────

  draw() {
    const conversation = this.current;
    const shown = path(conversation);
    const before = this.views;
    this.views = new Map(shown.map((node) => [node.id, this.view(conversation, node, before.get(node.id))]));
    const elements = [...this.views.values()].map((view) => view.element);
    place($("transcript"), elements.length ? elements : [welcome(this.page)]);
    if (this.isAtEnd) this.toEnd();
    this.drawComposer();
  }

  /** The view of a message: the one that there is, brought up to date, or a new one. */
  view(conversation, node, before) {
    const all = siblings(conversation, node);
    const isRunning = () => this.runs.get(conversation.id)?.node === node;
    const facts = {
      isLast: node.id === conversation.leaf,
      isRunning,
      version: { index: all.indexOf(node), count: all.length },
      openCalls: () => openCalls(conversation).filter((call) => node.calls?.includes(call)),
    };
    if (before?.node !== node) return new MessageView(node, facts, this.act);
    before.facts = facts;
    before.update();
    return before;
  }

  drawComposer() {
    const isRunning = this.isRunning(this.current);
    const waits = !isRunning && openCalls(this.current).length > 0;
    const chips = summary(this.current.settings).map((text) =>
      h("button", { type: "button", class: "chip", text, onclick: () => this.page.showSettings() }),
    );
    $("chips").replaceChildren(...chips);
    $("text").placeholder = waits ? "First the result of the call" : "Message";
    const label = isRunning ? "Stop (Escape)" : "Send (Enter)";
    const button = h(
      "button",
      {
        type: isRunning ? "button" : "submit",
        id: "send",
        class: `icon-button send${isRunning ? " stop" : ""}`,
        "aria-label": isRunning ? "Stop" : "Send",
        title: label,
        onclick: isRunning ? () => this.stop() : undefined,
        disabled: waits,
      },
      icon(isRunning ? "stop" : "send"),
    );
    const hadFocus = document.activeElement?.id === "send";
    $("send-slot").replaceChildren(button);
    if (hadFocus) button.focus();
    this.drawLive();
  }

  drawLive() {
    const stats = this.runs.get(this.current.id)?.node.stats;
    $("live").textContent = stats?.perS ? `${stats.perS.toFixed(1)} tokens/s` : "";
  }

  wireComposer() {
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    $("text").addEventListener("input", () => this.fit());
    $("text").addEventListener("keydown", (event) => {
      const isSend = event.key === "Enter" && !event.shiftKey && !event.isComposing && !isTouch();
      if (!isSend) return;
      event.preventDefault();
      this.submit();
    });
    const scroll = $("scroll");
    scroll.addEventListener("scroll", () => {
      this.isAtEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < NEAR_END_PX;
      $("to-end").hidden = this.isAtEnd;
    });
    $("to-end").addEventListener("click", () => this.toEnd());
  }

  fit() {
    const field = $("text");
    field.style.height = "auto";
    field.style.height = `${field.scrollHeight}px`;
  }

  toEnd() {
    const scroll = $("scroll");
    scroll.scrollTop = scroll.scrollHeight;
    this.isAtEnd = true;
    $("to-end").hidden = true;
  }
}

/** Puts exactly these children into a box. Those that are there already stay as they are, with what is open,
    selected or typed in them. */
function place(box, elements) {
  elements.forEach((element, i) => {
    if (box.children[i] !== element) box.insertBefore(element, box.children[i] ?? null);
  });
  while (box.children.length > elements.length) box.lastChild.remove();
}
