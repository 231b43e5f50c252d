// The page: its views, keys, theme, shortcuts, and the state of the server in the corner.

import { getJson, key, Refusal, send, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { $, h, iconButton } from "./dom.js";
import { OptionsView } from "./options.js";
import { ServerView } from "./server.js";
import { SettingsForm } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { remember, remembered, Store } from "./store.js";

const VIEWS = ["chat", "server", "options"];
const TITLES = { server: "Server", options: "Options" };
const STATES = {
  ready: "good",
  loading: "wait",
  recovering: "wait",
  paused: "wait",
  released: "wait",
  draining: "wait",
};
const SHORTCUTS = [
  [["Enter"], "Send"],
  [["Shift", "Enter"], "A new line"],
  [["Esc"], "Stop the answer; close what is open"],
  [["Ctrl", "Shift", "O"], "New conversation"],
  [["Ctrl", "K"], "Search conversations"],
  [["/"], "To the message box"],
  [["↑"], "Edit the last message, in an empty box"],
  [["Ctrl", ","], "Settings"],
  [["Alt", "1 2 3"], "Chat, server, options"],
  [["?"], "This list"],
];
const THEMES = ["system", "light", "dark"];

class Page {
  async start() {
    this.models = [];
    this.store = await Store.open();
    this.chat = new Chat(this.store, this);
    this.sidebar = new Sidebar(this.chat, () => this.toChat());
    this.server = new ServerView($("server"), this);
    this.options = new OptionsView($("options"), this);
    this.form = new SettingsForm(
      $("settings"),
      () => this.chat.settingsChanged(),
      () => this.showSettings(undefined, false),
    );
    this.wire();
    await this.chat.load();
    this.route();
    await this.connect();
    if (!matchMedia("(pointer: coarse)").matches && this.view === "chat") $("text").focus();
  }

  // ── what the chat and the views use ───────────────────────────────────────────────────────────────────────

  model() {
    return $("model").value || this.models[0]?.id || "";
  }

  facts() {
    const card = this.models.find((one) => one.id === this.model());
    return { name: card?.id ?? "", contextLen: card?.max_model_len ?? this.models[0]?.max_model_len };
  }

  changed() {
    const { title, settings } = this.chat.current;
    if (this.view === "chat") $("title").textContent = title || "New conversation";
    document.title = `${this.view === "chat" ? title || "New conversation" : (TITLES[this.view] ?? "")} · runtime`;
    this.sidebar.draw();
    if (this.form.settings !== settings) this.form.show(settings);
  }

  showSettings(field, isShown = true) {
    $("settings").hidden = !isShown;
    this.settingsButton.setAttribute("aria-expanded", String(isShown));
    if (!isShown) return this.settingsButton.focus();
    this.toChat();
    this.form.show(this.chat.current.settings);
    this.form.focus(field ?? "system");
  }

  askForKey(why = "They stay in this tab and are forgotten when it is closed.") {
    $("keys-why").textContent = why;
    $("key-user").value = key("user");
    $("key-admin").value = key("admin");
    if (!$("keys").open) $("keys").showModal();
  }

  // ── the server ────────────────────────────────────────────────────────────────────────────────────────────

  /** Asks for the models; while the server loads or is away, again and again. */
  async connect() {
    clearTimeout(this.retry);
    try {
      const health = await this.health();
      this.models = (await getJson("v1/models")).data;
      this.drawModels();
      $("notice").hidden = true;
      if (!this.store.isLasting) this.note("This browser keeps nothing: conversations end with this tab.");
      if (health.state !== "ready") this.retry = setTimeout(() => this.connect(), 1500);
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      if (error.needsKey) this.askForKey(error.message);
      else {
        this.setState("bad", "not reached");
        this.note(error.message);
        this.retry = setTimeout(() => this.connect(), 3000);
      }
    }
  }

  async health() {
    const answer = await fetch("health", { cache: "no-store" }).catch(() => null);
    if (answer === null)
      throw new Refusal(
        0,
        "The server cannot be reached. Check that it runs; this page tries again by itself.",
      );
    const health = await answer.json();
    this.setState(
      STATES[health.state] ?? "bad",
      health.detail && health.state === "loading" ? `loading: ${health.detail}` : health.state,
    );
    return health;
  }

  setState(kind, text) {
    $("state").className = `state ${kind}`;
    $("state-text").textContent = text;
    $("state").title = `The server: ${text}`;
  }

  note(text) {
    $("notice").textContent = text;
    $("notice").hidden = false;
  }

  drawModels() {
    const chosen = remembered("model", "");
    $("model").replaceChildren(
      ...this.models.map(({ id, parent }) =>
        h("option", { value: id, text: parent ? `${id} (adapter)` : id, selected: id === chosen }),
      ),
    );
    $("model").parentElement.hidden = this.models.length < 2;
    $("only-model").textContent = this.models.length === 1 ? this.models[0].id : "";
    $("version").textContent = "";
    if (!this.chat.current.leaf) this.chat.draw();
    getJson("version").then(
      ({ version }) => ($("version").textContent = version),
      () => {},
    );
  }

  // ── the page ──────────────────────────────────────────────────────────────────────────────────────────────

  route() {
    const name = location.hash.replace(/^#\//, "");
    this.view = VIEWS.includes(name) ? name : "chat";
    document.body.dataset.view = this.view;
    for (const view of VIEWS) $(view).hidden = view !== this.view;
    for (const link of $("views").children) {
      if (link.hash === `#/${this.view}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    $("title").textContent = TITLES[this.view] ?? "";
    if (this.view !== "chat") $("settings").hidden = true;
    this.settingsButton.hidden = this.view !== "chat";
    this.drawer(false);
    this.changed();
    this.server.look();
    if (this.view === "options") this.options.load();
    if (this.view === "chat") this.chat.toEnd();
  }

  toChat() {
    if (this.view !== "chat") location.hash = "#/chat";
    this.drawer(false);
  }

  drawer(isOpen) {
    $("sidebar").classList.toggle("open", isOpen);
    $("veil").hidden = !isOpen;
    this.menuButton.setAttribute("aria-expanded", String(isOpen));
    if (isOpen) $("new").focus();
  }

  wire() {
    this.menuButton = iconButton("menu", "Conversations and views", () => this.drawer(true), {
      id: "menu",
      "aria-controls": "sidebar",
    });
    this.settingsButton = iconButton(
      "settings",
      "Settings (Ctrl+,)",
      () => this.showSettings(undefined, $("settings").hidden),
      { id: "settings-button", "aria-controls": "settings", "aria-expanded": "false" },
    );
    this.themeButton = iconButton("theme", "", () => this.turnTheme(), { id: "theme" });
    $("menu-slot").append(this.menuButton);
    $("settings-slot").append(this.settingsButton);
    $("tools-row").append(
      iconButton("key", "Keys", () => this.askForKey(), { id: "keys-button" }),
      this.themeButton,
      iconButton("help", "Keyboard (?)", () => $("help").showModal(), { id: "help-button" }),
    );
    this.drawTheme();
    $("shortcuts").append(
      ...SHORTCUTS.flatMap(([keys, what]) => [
        h(
          "dt",
          {},
          keys.map((text) => h("kbd", { text })),
        ),
        h("dd", { text: what }),
      ]),
    );
    $("veil").addEventListener("click", () => this.drawer(false));
    $("keys-cancel").addEventListener("click", () => $("keys").close());
    $("keys-form").addEventListener("submit", () => this.useKeys());
    $("model").addEventListener("change", () => {
      remember("model", $("model").value);
      if (!this.chat.current.leaf) this.chat.draw();
    });
    addEventListener("hashchange", () => this.route());
    addEventListener("keydown", (event) => this.onKey(event));
    addEventListener("pagehide", () => this.store.flush());
    addEventListener("online", () => this.connect());
  }

  useKeys() {
    setKey("user", $("key-user").value.trim());
    setKey("admin", $("key-admin").value.trim());
    this.connect();
    if (this.view === "options") this.options.load();
    if (this.view === "server") this.server.describe();
  }

  turnTheme() {
    const theme = THEMES[(THEMES.indexOf(this.theme()) + 1) % THEMES.length];
    try {
      localStorage.setItem("runtime-console-theme", theme);
    } catch {
      // it is forgotten with the tab
    }
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    this.drawTheme();
  }

  theme() {
    return document.documentElement.dataset.theme ?? "system";
  }

  drawTheme() {
    const name = `Theme: ${this.theme()}`;
    this.themeButton.setAttribute("aria-label", name);
    this.themeButton.title = name;
  }

  onKey(event) {
    const action = document.querySelector("dialog[open]") ? null : this.actionOf(event);
    if (!action) return;
    event.preventDefault();
    action();
  }

  /** What a key does, or several together; undefined: what the browser does with them. */
  actionOf(event) {
    const name = event.key.toLowerCase();
    if (event.ctrlKey || event.metaKey) {
      if (event.shiftKey && name === "o") return () => $("new").click();
      if (name === "k") return () => this.search();
      if (name === ",") return () => this.settingsButton.click();
      return undefined;
    }
    if (event.altKey && /^Digit[123]$/.test(event.code)) {
      return () => (location.hash = `#/${VIEWS[event.code.at(-1) - 1]}`);
    }
    if (name === "escape") return () => this.escape();
    if (event.target.matches("input, textarea, select")) {
      const isEmptyBox = event.target.id === "text" && !event.target.value;
      return isEmptyBox && name === "arrowup" ? () => this.editLast() : undefined;
    }
    if (name === "?") return () => $("help").showModal();
    if (name === "/") return () => this.write();
    return undefined;
  }

  search() {
    if (matchMedia("(max-width: 52rem)").matches) this.drawer(true);
    $("search").focus();
  }

  write() {
    this.toChat();
    $("text").focus();
  }

  escape() {
    if ($("sidebar").classList.contains("open")) {
      this.drawer(false);
      this.menuButton.focus();
    } else if (!$("settings").hidden && $("settings").contains(document.activeElement))
      this.showSettings(undefined, false);
    else this.chat.stop();
  }

  editLast() {
    const last = [...this.chat.views.values()].findLast((view) => view.node.role === "user");
    if (last && !this.chat.isRunning(this.chat.current)) last.edit();
  }
}

new Page().start();
