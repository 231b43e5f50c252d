// openai's client for JavaScript: chat, its stream helper, typed answers, tools that run, responses.
// /// script
// dependencies = ["openai@6.49.0", "zod@4.6.7"]
// ///
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: process.env.RUNTIME_URL + "/v1", apiKey: "none", maxRetries: 0 });
const count = { model: "pocket", messages: [{ role: "user", content: "Count from 1 to 5." }], temperature: 0 };

const whole = await client.chat.completions.create(count);
assert.equal(whole.choices[0].message.content, "1, 2, 3, 4, 5");
const streamed = client.chat.completions.stream(count);
assert.equal((await streamed.finalChatCompletion()).choices[0].message.content, "1, 2, 3, 4, 5");
console.log("ok: chat, stream helper");

const Review = z.object({ stars: z.number().int() });
const format = zodResponseFormat(Review, "review");
const parsed = await client.chat.completions.parse({ ...count, response_format: format });
assert.ok(Number.isInteger(parsed.choices[0].message.parsed.stars));
console.log("ok: parse");

const asked = [];
const runner = client.chat.completions.runTools({
  model: "pocket",
  messages: [{ role: "user", content: "What is the weather in Oslo?" }],
  temperature: 0,
  max_tokens: 100,
  tools: [
    {
      type: "function",
      function: {
        name: "get_weather",
        description: "The weather in a city.",
        parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
        parse: JSON.parse,
        function: ({ city }) => (asked.push(city), "21 degrees, clear"),
      },
    },
  ],
});
assert.ok(await runner.finalContent());
assert.deepEqual(asked, ["Oslo"]);
console.log("ok: runTools");

const response = await client.responses.create({ model: "pocket", input: "Count from 1 to 5.", temperature: 0 });
assert.equal(response.output_text, "1, 2, 3, 4, 5");
console.log("ok: responses");
