// The list of conversations: search, open, rename, delete, import, export.

import { $, announce, download, h, iconButton } from "./dom.js";
import { exported, imported } from "./transfer.js";

/** `chat` holds the conversations; the list draws them and calls its methods. */
export class Sidebar {
  constructor(chat, onOpen) {
    this.chat = chat;
    this.onOpen = onOpen;
    $("new").addEventListener("click", () => {
      chat.begin();
      onOpen();
    });
    $("search").addEventListener("input", () => this.draw());
    $("export").addEventListener("click", () => this.export());
    $("import").addEventListener("click", () => $("file").click());
    $("file").addEventListener("change", () => this.import());
  }

  draw() {
    const query = $("search").value.trim().toLowerCase();
    const shown = this.chat.conversations.filter((one) => !query || matches(one, query));
    const empty = h("li", { class: "empty", text: query ? "None has this text." : "None yet." });
    $("conversations").replaceChildren(...(shown.length ? shown.map((one) => this.row(one)) : [empty]));
  }

  row(conversation) {
    const isCurrent = conversation === this.chat.current;
    const title = conversation.title || "Untitled";
    const open = h("button", {
      type: "button",
      class: `open${this.chat.isRunning(conversation) ? " busy" : ""}`,
      text: title,
      title,
      "aria-current": isCurrent ? "true" : null,
      ondblclick: () => this.rename(conversation, row),
      onclick: () => {
        this.chat.show(conversation);
        this.onOpen();
      },
    });
    const small = { class: "icon-button small" };
    const row = h(
      "li",
      { class: isCurrent ? "current" : "", data: { id: conversation.id } },
      open,
      iconButton("edit", `Rename ${title}`, () => this.rename(conversation, row), small),
      iconButton("trash", `Delete ${title}`, () => this.delete(conversation), small),
    );
    return row;
  }

  rename(conversation, row) {
    const input = h("input", {
      class: "field small",
      value: conversation.title,
      "aria-label": "Title",
      maxlength: "200",
    });
    const save = () => {
      if (!input.isConnected) return;
      this.chat.rename(conversation, input.value.trim() || conversation.title);
    };
    input.addEventListener("blur", save);
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") save();
      if (event.key === "Escape") this.draw();
    });
    row.replaceChildren(input);
    input.select();
  }

  delete(conversation) {
    if (!confirm(`Delete “${conversation.title || "Untitled"}”? It is kept nowhere else.`)) return;
    this.chat.delete(conversation);
    announce("Conversation deleted");
  }

  export() {
    const day = new Date().toISOString().slice(0, 10);
    download(`conversations-${day}.json`, exported(this.chat.conversations));
  }

  async import() {
    const [file] = $("file").files;
    if (!file) return;
    try {
      const found = imported(await file.text());
      this.chat.add(found);
      announce(`${found.length} conversations imported`);
    } catch (error) {
      alert(error.message);
    }
    $("file").value = "";
  }
}

function matches(conversation, query) {
  return (
    conversation.title.toLowerCase().includes(query) ||
    Object.values(conversation.nodes).some((node) => node.content.toLowerCase().includes(query))
  );
}
