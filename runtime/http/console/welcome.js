// What a conversation shows before its first message: which model answers, and how to call it from code.

import { h } from "./dom.js";
import { codeBlock } from "./markdown.js";

export function welcome(page) {
  const { name, contextLen } = page.facts();
  if (!name) return h("div", { class: "welcome" }, h("h2", { text: "Connecting…" }));
  const tokens = contextLen ? `${contextLen.toLocaleString("en")} tokens of context. ` : "";
  const base = new URL("v1", document.baseURI).href;
  return h(
    "div",
    { class: "welcome" },
    h("h2", { text: name }),
    h("p", { text: `${tokens}Conversations stay in this browser.` }),
    h(
      "details",
      {},
      h("summary", { text: "Call it from code" }),
      codeBlock(curl(base, name), "bash"),
      codeBlock(python(base, name), "python"),
    ),
  );
}

function curl(base, model) {
  const body = JSON.stringify({ model, messages: [{ role: "user", content: "Hello!" }] }).replaceAll(
    "'",
    "'\\''",
  );
  return `curl ${base}/chat/completions \\\n  -H 'Content-Type: application/json' \\\n  -d '${body}'`;
}

function python(base, model) {
  return `from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(base)}, api_key="none")
answer = client.chat.completions.create(
    model=${JSON.stringify(model)},
    messages=[{"role": "user", "content": "Hello!"}],
)
print(answer.choices[0].message.content)`;
}
