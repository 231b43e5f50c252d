// Markdown as elements: headings, paragraphs, lists, quotes, code, tables, rules. HTML in it is shown as text.
// A text that grows draws its last blocks anew, and keeps the others.

import { copy, h, icon } from "./dom.js";
import { highlight } from "./highlight.js";
import { inline } from "./inline.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]{0,40})[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const ITEM = /^( {0,12})([-*+]|\d{1,9}[.)])(\s+|$)(.*)$/;
const QUOTE = /^ {0,3}> ?/;
const DIVIDER = /^ {0,3}\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const MAX_DEPTH = 8;
const MAX_MARK_CHARS = 1000; // of lines that are tried as fences, headings, rules and rows of tables

/** Draws a text into `box`, and again when the text has grown or changed. */
export class Markdown {
  constructor(box) {
    this.box = box;
    this.drawn = []; // [source, element] of each block
  }

  update(text) {
    const blocks = split(text);
    const sources = blocks.map((block) => `${block.kind}\n${block.lines.join("\n")}`);
    let same = 0;
    while (same < this.drawn.length && this.drawn[same][0] === sources[same]) same++;
    for (const [, node] of this.drawn.splice(same)) node.remove();
    for (let i = same; i < blocks.length; i++) {
      const node = MAKERS[blocks[i].kind](blocks[i].lines, 0);
      this.box.append(node);
      this.drawn.push([sources[i], node]);
    }
  }
}

/** The blocks of a text: their kind and their lines. */
export function split(text) {
  const lines = text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n");
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const kind = kindOf(lines, at);
    const end = ENDS[kind](lines, at);
    blocks.push({ kind, lines: lines.slice(at, end) });
    at = end;
  }
  return blocks;
}

function kindOf(lines, at) {
  const line = lines[at];
  const isShort = line.length <= MAX_MARK_CHARS;
  if (isShort && FENCE.test(line)) return "code";
  if (isShort && HEADING.test(line)) return "heading";
  if (isShort && RULE.test(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  return isShort && line.includes("|") && isDivider(lines[at + 1], line) ? "table" : "paragraph";
}

function isDivider(line, head) {
  return (
    line !== undefined &&
    line.length <= MAX_MARK_CHARS &&
    DIVIDER.test(line) &&
    cells(line).length === cells(head).length
  );
}

const ENDS = {
  heading: (_, at) => at + 1,
  rule: (_, at) => at + 1,
  code(lines, at) {
    const fence = FENCE.exec(lines[at])[1];
    let end = at + 1;
    while (end < lines.length && !closesFence(lines[end], fence)) end++;
    return Math.min(end + 1, lines.length);
  },
  quote(lines, at) {
    let end = at + 1;
    while (end < lines.length && (QUOTE.test(lines[end]) || isPlain(lines, end))) end++;
    return end;
  },
  table(lines, at) {
    let end = at + 2;
    while (end < lines.length && lines[end].includes("|") && lines[end].trim()) end++;
    return end;
  },
  paragraph(lines, at) {
    let end = at + 1;
    while (end < lines.length && isPlain(lines, end)) end++;
    return end;
  },
  list(lines, at) {
    const indent = ITEM.exec(lines[at])[1].length;
    let end = at + 1;
    for (let next = end; next < lines.length; next++) {
      const line = lines[next];
      if (!line.trim()) continue; // whether it belongs to the list, what follows says
      const isInside =
        /^ */.exec(line)[0].length > indent + 1 || (ITEM.test(line) && kindOf(lines, next) === "list");
      if (!isInside && !(next === end && isPlain(lines, next))) break;
      end = next + 1;
    }
    return end;
  },
};

function isPlain(lines, at) {
  return lines[at].trim() !== "" && kindOf(lines, at) === "paragraph";
}

function closesFence(line, fence) {
  const text = line.trim();
  return text.length >= fence.length && text.startsWith(fence) && text === fence[0].repeat(text.length);
}

const MAKERS = {
  heading([line]) {
    const [, marks, text] = HEADING.exec(line);
    const title = text.trim().replace(/ #{1,6}$/, "");
    return h(`h${Math.min(marks.length + 2, 6)}`, {}, inline(title)); // h1 and h2 are the page's
  },
  rule: () => h("hr"),
  paragraph: (lines) => h("p", {}, inline(lines.map((line) => line.trim()).join("\n"))),
  quote(lines, depth) {
    const inner = lines.map((line) => line.replace(QUOTE, ""));
    return h("blockquote", {}, blocks(inner, depth + 1));
  },
  list(lines, depth) {
    const first = ITEM.exec(lines[0]);
    const isOrdered = /\d/.test(first[2]);
    const list = h(isOrdered ? "ol" : "ul", isOrdered ? { start: String(Number.parseInt(first[2], 10)) } : {});
    for (const item of items(lines, first[1].length)) list.append(h("li", {}, itemContent(item, depth + 1)));
    return list;
  },
  table(lines) {
    const aligns = cells(lines[1]).map((cell) =>
      cell.endsWith(":") ? (cell.startsWith(":") ? "middle" : "end") : "",
    );
    const row = (line, tag) =>
      h(
        "tr",
        {},
        cells(line)
          .slice(0, aligns.length)
          .map((cell, i) => h(tag, { class: aligns[i] || null }, inline(cell))),
      );
    const body = lines.slice(2).map((line) => row(line, "td"));
    return h(
      "div",
      { class: "table", tabindex: "0", role: "group", "aria-label": "Table" },
      h("table", {}, h("thead", {}, row(lines[0], "th")), h("tbody", {}, body)),
    );
  },
  code(lines) {
    const [, fence, language] = FENCE.exec(lines[0]);
    const isClosed = lines.length > 1 && closesFence(lines.at(-1), fence);
    return codeBlock(lines.slice(1, isClosed ? -1 : undefined).join("\n"), language);
  },
};

/** Code with its language and a button that copies it. */
export function codeBlock(code, language) {
  const button = h(
    "button",
    {
      type: "button",
      class: "icon-button small",
      "aria-label": "Copy code",
      title: "Copy code",
      onclick: () => copy(code, button),
    },
    icon("copy"),
  );
  const text = h("code", {}, highlight(code, language.toLowerCase()));
  return h(
    "figure",
    { class: "code" },
    h("figcaption", {}, h("span", { text: language || "text" }), button),
    h("pre", { tabindex: "0" }, text),
  );
}

function blocks(lines, depth) {
  if (depth > MAX_DEPTH) return [h("p", { text: lines.join("\n") })];
  return split(lines.join("\n")).map((block) => MAKERS[block.kind](block.lines, depth));
}

/** The lines of each item of a list, without their marks and indents. */
function items(lines, indent) {
  const found = [];
  let inner = indent + 2;
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (match && match[1].length < inner) {
      inner = match[1].length + match[2].length + Math.min(Math.max(match[3].length, 1), 4);
      found.push([match[4]]);
    } else {
      found.at(-1).push(line.slice(Math.min(/^ */.exec(line)[0].length, inner)));
    }
  }
  return found;
}

/** An item: a text alone as it is, otherwise its blocks. A [ ] or [x] in front is a box. */
function itemContent(lines, depth) {
  const task = /^\[([ xX])\]\s+/.exec(lines[0]);
  const rest = task ? [lines[0].slice(task[0].length), ...lines.slice(1)] : lines;
  const made = blocks(rest, depth);
  if (made[0]?.tagName === "P" && !lines.includes("")) made[0] = h("span", {}, ...made[0].childNodes);
  const box =
    task && h("input", { type: "checkbox", disabled: true, checked: task[1] !== " ", "aria-label": "task" });
  return [box, ...made];
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.replaceAll("\\|", "|").trim());
}
