// Conversations in IndexedDB, by the path of the page: servers mounted under one origin have their own. Where
// the browser keeps nothing (a private window), they live as long as the tab.

const NAME = `runtime-console:${location.pathname}`;
const TABLE = "conversations";

export class Store {
  /** Opens the database. `isLasting` says whether it outlives the tab. */
  static async open() {
    try {
      return new Store(await opened());
    } catch {
      return new Store(null);
    }
  }

  constructor(database) {
    this.database = database;
    this.isLasting = database !== null;
    this.waiting = new Map(); // conversations to be written, by id
    this.timer = 0;
  }

  /** All conversations, the newest first. */
  async all() {
    if (!this.isLasting) return [];
    const found = await done(this.table("readonly").getAll());
    return found.sort((a, b) => b.updated - a.updated);
  }

  /** Writes a conversation soon: those of a stream once in a while, and not once a token. */
  save(conversation) {
    this.waiting.set(conversation.id, conversation);
    if (!this.timer) this.timer = setTimeout(() => this.flush(), 400);
  }

  /** Writes what waits now. */
  async flush() {
    clearTimeout(this.timer);
    this.timer = 0;
    const conversations = [...this.waiting.values()];
    this.waiting.clear();
    if (!this.isLasting || !conversations.length) return;
    const table = this.table("readwrite");
    await Promise.all(conversations.map((one) => done(table.put(structuredClone(one)))));
  }

  async delete(id) {
    this.waiting.delete(id);
    if (this.isLasting) await done(this.table("readwrite").delete(id));
  }

  table(mode) {
    return this.database.transaction(TABLE, mode).objectStore(TABLE);
  }
}

function opened() {
  const request = indexedDB.open(NAME, 1);
  request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: "id" });
  return done(request);
}

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** A small value that outlives the tab, where the browser allows it. */
export function remembered(name, fallback) {
  try {
    return JSON.parse(localStorage.getItem(`${NAME}:${name}`)) ?? fallback;
  } catch {
    return fallback;
  }
}

export function remember(name, value) {
  try {
    localStorage.setItem(`${NAME}:${name}`, JSON.stringify(value));
  } catch {
    // the browser keeps nothing: it is forgotten with the tab
  }
}
