// Text within a block: code, bold, italic, strikethrough, links. What a model writes is hostile until shown to
// be text: everything becomes text nodes, links lead to other sites only, and the work is linear in the length.

import { h } from "./dom.js";

const SPECIAL = /[\\`*_~[!<\n]|https?:\/\//g;
const TARGET = String.raw`([^\s()<>]{1,2000}(?:\([^\s()<>]{0,500}\)[^\s()<>]{0,500})?)`; // with one pair of brackets
const LINK = new RegExp(String.raw`\[([^[\]\n]{1,500})\]\(\s*<?${TARGET}>?(?:\s+"[^"\n]{0,300}")?\s*\)`, "y");
const URL_TEXT = /https?:\/\/[^\s<>"'`\\]{1,2000}/y;
const TICKS = /`+/y;
const BREAK = /<br\s{0,3}\/?>/iy;
const MARKS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];
const SCHEMES = ["http:", "https:", "mailto:"];
const MAX_DEPTH = 6;

/** The nodes of a text. */
export function inline(text, depth = 0) {
  return new Reader(text, depth).read();
}

/** The address of a link that may be followed: to another site. null: it may not. A link to this server could
    do something here in the user's name. */
export function safeHref(address) {
  try {
    const url = new URL(address);
    return SCHEMES.includes(url.protocol) && url.origin !== location.origin ? url.href : null;
  } catch {
    return null;
  }
}

class Reader {
  constructor(text, depth) {
    this.text = text;
    this.depth = depth;
    this.at = 0; // everything before is in `nodes` or `plain`
    this.plain = "";
    this.nodes = [];
    this.unclosed = new Map(); // mark -> where a search for its end has failed
  }

  read() {
    while (this.at < this.text.length) {
      SPECIAL.lastIndex = this.at;
      const found = SPECIAL.exec(this.text);
      const next = found?.index ?? this.text.length;
      this.plain += this.text.slice(this.at, next);
      this.at = next;
      if (found && !this.special(found[0])) this.plain += this.text[this.at++];
    }
    this.flush();
    return this.nodes;
  }

  special(found) {
    if (found === "\n") return this.add(h("br"), 1);
    if (found === "\\") return this.escaped();
    if (found === "`") return this.code();
    if (found === "<") return this.matched(BREAK, () => h("br"));
    if (found === "[") return this.matched(LINK, (match) => link(match[2], inline(match[1], MAX_DEPTH)));
    if (found === "!") return this.picture();
    if (found.startsWith("http")) return this.address();
    return this.depth < MAX_DEPTH && MARKS.some(([mark, tag]) => this.marked(mark, tag));
  }

  add(node, length) {
    this.flush();
    this.nodes.push(node);
    this.at += length;
    return true;
  }

  flush() {
    if (this.plain) this.nodes.push(document.createTextNode(this.plain));
    this.plain = "";
  }

  matched(pattern, make) {
    pattern.lastIndex = this.at;
    const match = pattern.exec(this.text);
    return match !== null && this.add(make(match), match[0].length);
  }

  escaped() {
    const next = this.text[this.at + 1];
    if (next === undefined || !/[!-/:-@[-`{-~]/.test(next)) return false;
    this.plain += next;
    this.at += 2;
    return true;
  }

  code() {
    TICKS.lastIndex = this.at;
    const [ticks] = TICKS.exec(this.text);
    const begin = this.at + ticks.length;
    const end = this.find(ticks, begin, (i) => this.text[i - 1] !== "`" && this.text[i + ticks.length] !== "`");
    if (end < 0) {
      this.plain += ticks;
      this.at = begin;
      return true;
    }
    const inner = this.text.slice(begin, end);
    const code = /^ .*[^ ].* $/s.test(inner) ? inner.slice(1, -1) : inner;
    return this.add(h("code", { text: code.replaceAll("\n", " ") }), end + ticks.length - this.at);
  }

  marked(mark, tag) {
    const { text, at } = this;
    if (!text.startsWith(mark, at)) return false;
    const begin = at + mark.length;
    if (!text[begin] || /\s/.test(text[begin]) || text[begin] === mark[0]) return false;
    if (mark[0] === "_" && /\w/.test(text[at - 1] ?? "")) return false; // snake_case
    const end = this.find(mark, begin + 1, (i) => this.closes(mark, i));
    if (end < 0) return false;
    return this.add(h(tag, {}, inline(text.slice(begin, end), this.depth + 1)), end + mark.length - at);
  }

  closes(mark, i) {
    const { text } = this;
    if (/\s/.test(text[i - 1]) || text[i - 1] === "\\") return false;
    const after = text[i + mark.length] ?? "";
    if (mark.length === 1 && (after === mark || text[i - 1] === mark)) return false;
    return mark[0] !== "_" || !/\w/.test(after);
  }

  find(mark, from, fits) {
    if ((this.unclosed.get(mark) ?? Infinity) <= from) return -1;
    for (let i = this.text.indexOf(mark, from); i >= 0; i = this.text.indexOf(mark, i + 1))
      if (fits(i)) return i;
    this.unclosed.set(mark, from);
    return -1;
  }

  picture() {
    this.at += 1; // pictures of elsewhere are not loaded: they would say who reads
    const shown =
      this.text[this.at] === "[" && this.matched(LINK, (match) => link(match[2], [`image: ${match[1]}`]));
    if (!shown) this.at -= 1;
    return shown;
  }

  address() {
    URL_TEXT.lastIndex = this.at;
    const match = URL_TEXT.exec(this.text);
    if (match === null) return false;
    let address = match[0].replace(/[.,;:!?*_~]{1,20}$/, "");
    if (address.endsWith(")") && !address.includes("(")) address = address.slice(0, -1);
    return this.add(link(address, [address]), address.length);
  }
}

function link(address, content) {
  const href = safeHref(address);
  if (href === null) return h("span", { class: "no-link", title: `not a link here: ${address}` }, ...content);
  return h("a", { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...content);
}
