// Colours in code: comments, strings, numbers and words that most languages share. One pattern for each family
// of languages; what it does not know stays plain.

import { h } from "./dom.js";

const MAX_CHARS = 20_000; // longer code stays plain
const STRING = String.raw`"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'`;
const REST = String.raw`|(?<number>\b\d[\w.]*\b)|(?<word>\b[A-Za-z_]\w*\b)`;
const SLASHES = String.raw`\/\/[^\n]*|\/\*[\s\S]*?(?:\*\/|$)`;
const FAMILIES = {
  hash: pattern(String.raw`#[^\n]*`, String.raw`"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|${STRING}`),
  slash: pattern(SLASHES, "`(?:\\\\.|[^`\\\\])*`|" + STRING),
  dash: pattern(String.raw`--[^\n]*`, STRING),
};
const LANGUAGES = {
  hash: "python py sh bash shell zsh console yaml yml toml ini ruby rb perl r dockerfile makefile nix elixir julia",
  slash:
    "javascript js typescript ts jsx tsx json jsonc c cpp c++ h cs csharp java kotlin go rust rs swift php css " +
    "scss scala dart zig proto glsl",
  dash: "sql lua haskell hs",
};
const BY_LANGUAGE = new Map(
  Object.entries(LANGUAGES).flatMap(([family, names]) =>
    names.split(" ").map((name) => [name, FAMILIES[family]]),
  ),
);
const WORDS = new Set(
  `and as assert async await break case catch class const continue def default defer del do elif else
   enum except export extends false False final finally fn for from func function global go if impl
   implements import in interface is lambda let match mod module mut new nil None not null or package
   pass private protected pub public raise return self static struct super switch then this throw trait
   true True try type typeof undefined union use using var void where while with yield SELECT FROM
   WHERE INSERT INTO UPDATE DELETE CREATE TABLE JOIN LEFT ON GROUP BY ORDER LIMIT AND OR NOT NULL
   VALUES SET AS select from where insert into update delete create table join left on group by order
   limit values set echo export fi done local`.split(/\s+/),
);

function pattern(comments, strings) {
  return new RegExp(`(?<comment>${comments})|(?<string>${strings})${REST}`, "g");
}

/** The nodes of some code in a language. */
export function highlight(code, language) {
  const family = BY_LANGUAGE.get(language);
  if (!family || code.length > MAX_CHARS) return [code];
  const nodes = [];
  let at = 0;
  for (const match of code.matchAll(family)) {
    const kind = kindOf(match.groups);
    if (!kind) continue;
    nodes.push(code.slice(at, match.index), h("span", { class: `code-${kind}`, text: match[0] }));
    at = match.index + match[0].length;
  }
  return [...nodes, code.slice(at)];
}

function kindOf({ comment, string, number, word }) {
  if (comment !== undefined) return "comment";
  if (string !== undefined) return "string";
  if (number !== undefined) return "number";
  return WORDS.has(word) ? "word" : null;
}
