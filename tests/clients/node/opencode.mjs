// opencode, the command line tool: a question.
// /// script
// dependencies = ["opencode-ai@1.18.33"]
// server = "agents"
// ///
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { writeFileSync } from "node:fs";

writeFileSync(
  "opencode.json",
  JSON.stringify({
    $schema: "https://opencode.ai/config.json",
    autoupdate: false,
    share: "disabled",
    provider: {
      runtime: {
        npm: "@ai-sdk/openai-compatible",
        name: "runtime",
        options: { baseURL: process.env.RUNTIME_URL + "/v1", apiKey: "none" },
        models: { pocket: { name: "pocket", limit: { context: 65536, output: 4096 } } },
      },
    },
  }),
);
const answer = execFileSync(
  `${import.meta.dirname}/node_modules/.bin/opencode`,
  ["run", "-m", "runtime/pocket", "Count from 1 to 5."],
  { stdio: ["ignore", "pipe", "inherit"], timeout: 120_000 },
);
assert.match(answer.toString(), /1, 2, 3, 4, 5/);
console.log("ok: run");
