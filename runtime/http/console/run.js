// One answer on its way: the stream of /v1/chat/completions, read into a message.

import { Refusal, events, send } from "./api.js";

/** Streams an answer into `node`. `onChange` is called as it grows; it may be called often. */
export class Run {
  constructor(node, body, onChange) {
    this.node = node;
    this.body = body;
    this.onChange = onChange;
    this.abort = new AbortController();
    this.began = performance.now();
    this.first = null; // when the first token came
    this.chunks = 0;
    this.isStopped = false;
    this.before = node.stats?.tokens ?? 0; // of a message that is continued
  }

  stop() {
    this.isStopped = true;
    this.abort.abort();
  }

  /** Returns when the answer has ended, however it did; never throws. */
  async finish() {
    const { node } = this;
    node.error = null;
    node.finish = null;
    try {
      const answer = await send("v1/chat/completions", {
        method: "POST",
        body: this.body,
        signal: this.abort.signal,
      });
      for await (const event of events(answer)) this.take(event);
    } catch (error) {
      if (this.isStopped) node.finish = "stopped";
      else if (error instanceof Refusal) node.error = { message: error.message, status: error.status };
      else {
        node.error = { message: `The console failed: ${error.message}`, status: 0 };
        console.error(error);
      }
    }
    this.measure();
    this.onChange();
  }

  take(event) {
    if (event.usage) this.usage = event.usage;
    const choice = event.choices?.[0];
    if (!choice) return;
    const { delta } = choice;
    if (delta && (delta.content || delta.reasoning_content || delta.tool_calls)) this.grow(delta);
    if (choice.finish_reason) this.node.finish = choice.finish_reason;
    this.onChange();
  }

  grow(delta) {
    const { node } = this;
    const now = performance.now();
    this.first ??= now;
    this.chunks += 1;
    if (delta.reasoning_content) {
      node.reasoning = (node.reasoning ?? "") + delta.reasoning_content;
      node.reasoningS = (now - this.first) / 1000;
    }
    if (delta.content) node.content += delta.content;
    for (const call of delta.tool_calls ?? []) this.growCall(call);
    this.measure();
  }

  growCall({ index, id, function: named }) {
    this.node.calls ??= [];
    const call = (this.node.calls[index] ??= { id: "", name: "", args: "" });
    if (id) call.id = id;
    call.name += named?.name ?? "";
    call.args += named?.arguments ?? "";
  }

  /** Time to the first token, and the rate of those after it: from the server's count at the end, before that
      from the chunks. */
  measure() {
    if (this.first === null) return;
    const tokens = this.usage?.completion_tokens ?? this.chunks;
    const seconds = ((this.usage ? this.ended() : performance.now()) - this.first) / 1000;
    this.node.stats = {
      ttftS: (this.first - this.began) / 1000,
      tokens: this.before + tokens,
      perS: tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null,
      prompt: this.usage?.prompt_tokens ?? null,
      cached: this.usage?.prompt_tokens_details?.cached_tokens ?? null,
    };
  }

  ended() {
    return (this.end ??= performance.now());
  }
}
