// Continue's command line tool, with the config.yaml that its extensions read: a question.
// /// script
// dependencies = ["@continuedev/cli@1.5.47"]
// server = "agents"
// ///
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { writeFileSync } from "node:fs";

writeFileSync(
  "config.yaml",
  `name: local
version: 1.0.0
schema: v1
models:
  - name: pocket
    provider: openai
    model: pocket
    apiBase: ${process.env.RUNTIME_URL}/v1
    apiKey: none
    roles: [chat, edit, apply]
`,
);
const answer = execFileSync(
  `${import.meta.dirname}/node_modules/.bin/cn`,
  ["-p", "Count from 1 to 5.", "--config", "config.yaml"],
  {
    env: { ...process.env, CONTINUE_TELEMETRY_ENABLED: "0" },
    stdio: ["ignore", "pipe", "inherit"],
    timeout: 120_000,
  },
);
assert.equal(answer.toString().trim(), "1, 2, 3, 4, 5");
console.log("ok: -p");
