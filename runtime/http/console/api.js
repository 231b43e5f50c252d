// Requests to the server that the page comes from. Links are relative, so any prefix works.

const KEYS = { user: "runtime-console-key", admin: "runtime-console-admin-key" };

/** A refusal, with the server's own words, which name the field and the remedy. */
export class Refusal extends Error {
  constructor(status, message, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }

  get needsKey() {
    return this.status === 401;
  }
}

/** The key of a level ("user" or "admin"), which lives as long as this tab. */
export function key(level) {
  try {
    return sessionStorage.getItem(KEYS[level]) ?? "";
  } catch {
    return "";
  }
}

export function setKey(level, value) {
  if (value) sessionStorage.setItem(KEYS[level], value);
  else sessionStorage.removeItem(KEYS[level]);
}

/** Sends a request. -> the response, if it succeeded. Throws Refusal, and AbortError when `signal` fires. */
export async function send(path, { method = "GET", body, signal, level = "user" } = {}) {
  const headers = {};
  const value = (level === "admin" && key("admin")) || key("user");
  if (value) headers.authorization = `Bearer ${value}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, {
      method,
      headers,
      body: body && JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error instanceof TypeError && /header|ISO-8859-1/i.test(error.message)) {
      throw new Refusal(0, "The key has characters that no key has; give it again.");
    }
    throw new Refusal(0, "The server cannot be reached. Check that it runs, then try again.");
  }
  if (!answer.ok) throw await refusal(answer);
  return answer;
}

export async function getJson(path, options) {
  return (await send(path, options)).json();
}

async function refusal(answer) {
  const text = await answer.text().catch(() => "");
  try {
    const { error } = JSON.parse(text);
    return new Refusal(answer.status, error.message ?? String(error), error.param ?? null);
  } catch {
    return new Refusal(answer.status, text.slice(0, 500) || `The server answered ${answer.status}.`);
  }
}

/** The decoded `data:` events of a stream, until [DONE]. Throws Refusal for an error among them, and for a
    stream that breaks off. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) throw new Refusal(0, "The connection broke off before the answer was complete; try again.");
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new Refusal(event.error.code ?? 0, event.error.message, event.error.param);
        yield event;
      }
    }
  } catch (error) {
    if (error instanceof TypeError) throw new Refusal(0, "The connection broke off; try again.");
    throw error;
  } finally {
    reader.cancel().catch(() => {});
  }
}
