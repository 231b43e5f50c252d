// Qwen Code, the command line tool: a question.
// /// script
// dependencies = ["@qwen-code/qwen-code@0.15.10"]
// server = "agents"
// ///
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";

const answer = execFileSync(
  `${import.meta.dirname}/node_modules/.bin/qwen`,
  ["--auth-type", "openai", "-p", "Count from 1 to 5."],
  {
    env: {
      ...process.env,
      OPENAI_BASE_URL: process.env.RUNTIME_URL + "/v1",
      OPENAI_API_KEY: "none",
      OPENAI_MODEL: "pocket",
    },
    stdio: ["ignore", "pipe", "inherit"],
    timeout: 120_000,
  },
);
assert.match(answer.toString(), /1, 2, 3, 4, 5/);
console.log("ok: -p");
