// Settings of a conversation: the form beside the chat, and the fields of a request that are made of them.

import { $, h, iconButton } from "./dom.js";

/** A setting that cannot be sent, with the field that it is in. */
export class SettingsError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

const TOOLS_EXAMPLE = `[{
  "name": "get_weather",
  "description": "Weather of a city",
  "parameters": {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"]
  }
}]`;
const SCHEMA_EXAMPLE = `{
  "type": "object",
  "properties": {"name": {"type": "string"}},
  "required": ["name"]
}`;

// kind "number": [least, most, step]; an empty field means the server's default
const FIELDS = [
  { group: "Instructions" },
  { name: "system", label: "System prompt", kind: "text", rows: 4 },
  { group: "Sampling" },
  { name: "temperature", label: "Temperature", kind: "number", limits: [0, 2, 0.05] },
  { name: "top_p", label: "Top p", kind: "number", limits: [0, 1, 0.01] },
  { name: "top_k", label: "Top k", kind: "number", limits: [-1, null, 1] },
  { name: "min_p", label: "Min p", kind: "number", limits: [0, 1, 0.01] },
  { name: "max_tokens", label: "Max tokens", kind: "number", limits: [1, null, 1] },
  { name: "seed", label: "Seed", kind: "number", limits: [null, null, 1] },
  { name: "stop", label: "Stop strings", kind: "text", rows: 2, hint: "One on each line." },
  { group: "Form of the answer" },
  {
    name: "format",
    label: "Response format",
    kind: "choice",
    choices: [
      ["", "Text"],
      ["json_object", "JSON"],
      ["json_schema", "JSON Schema"],
    ],
  },
  {
    name: "schema",
    label: "Schema",
    kind: "json",
    rows: 7,
    example: SCHEMA_EXAMPLE,
    when: (settings) => settings.format === "json_schema",
  },
  {
    name: "reasoning",
    label: "Reasoning",
    kind: "choice",
    choices: [
      ["", "As the model does"],
      ["on", "On"],
      ["off", "Off"],
    ],
    hint: "For models whose template knows enable_thinking.",
  },
  { group: "Tools" },
  {
    name: "tools",
    label: "Definitions",
    kind: "json",
    rows: 6,
    example: TOOLS_EXAMPLE,
    hint: "A JSON list of functions. Calls are shown in the chat, and you write what they return.",
  },
  { group: "More" },
  {
    name: "extra",
    label: "Other fields of the request",
    kind: "json",
    rows: 3,
    example: '{"repetition_penalty": 1.1}',
    hint: "A JSON object; the server names a field that it does not know.",
  },
];

/** The fields of a request. Throws SettingsError. */
export function fields(settings) {
  const found = {};
  for (const { name, kind, label, limits } of FIELDS) {
    if (kind === "number" && settings[name]) found[name] = number(name, label, settings[name], limits);
  }
  const stops = (settings.stop ?? "").split("\n").filter(Boolean);
  if (stops.length) found.stop = stops.map((text) => text.replaceAll("\\n", "\n"));
  if (settings.format === "json_object") found.response_format = { type: "json_object" };
  if (settings.format === "json_schema") {
    const schema = json("schema", "The schema", settings.schema, (value) => isObject(value), "an object");
    found.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  }
  if (settings.reasoning) found.chat_template_kwargs = { enable_thinking: settings.reasoning === "on" };
  const tools = definitions(settings);
  if (tools.length) found.tools = tools;
  if (settings.extra?.trim())
    Object.assign(found, json("extra", "This", settings.extra, isObject, "an object"));
  return found;
}

function number(name, label, text, [least, most, step]) {
  const value = Number(text);
  if (!Number.isFinite(value)) throw new SettingsError(name, `${label} is not a number.`);
  if (step === 1 && !Number.isInteger(value)) throw new SettingsError(name, `${label} must be a whole number.`);
  if (least !== null && value < least) throw new SettingsError(name, `${label} must be at least ${least}.`);
  if (most !== null && value > most) throw new SettingsError(name, `${label} must be at most ${most}.`);
  return value;
}

function json(name, label, text, fits, kind) {
  let value;
  try {
    value = JSON.parse(text || "");
  } catch (error) {
    throw new SettingsError(
      name,
      text?.trim() ? `${label} is not JSON: ${error.message}` : `${label} is empty.`,
    );
  }
  if (!fits(value)) throw new SettingsError(name, `${label} must be ${kind}.`);
  return value;
}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

function definitions(settings) {
  if (!settings.tools?.trim()) return [];
  const given = json(
    "tools",
    "This",
    settings.tools,
    (value) => typeof value === "object" && value !== null,
    "a list",
  );
  return (Array.isArray(given) ? given : [given]).map((one) => {
    const tool = isObject(one) && one.type === "function" ? one : { type: "function", function: one };
    if (!tool.function?.name) throw new SettingsError("tools", "Each function needs a name.");
    return tool;
  });
}

/** Short words for the settings that are in force. */
export function summary(settings) {
  const words = [];
  if (settings.system?.trim()) words.push("System prompt");
  for (const { name, label, kind } of FIELDS)
    if (kind === "number" && settings[name]) words.push(`${label} ${settings[name]}`);
  if (settings.stop?.trim()) words.push("Stop strings");
  if (settings.format) words.push(settings.format === "json_schema" ? "JSON Schema" : "JSON");
  if (settings.reasoning) words.push(`Reasoning ${settings.reasoning}`);
  if (settings.tools?.trim()) {
    try {
      const count = definitions(settings).length;
      words.push(count === 1 ? "1 tool" : `${count} tools`);
    } catch {
      words.push("Tools");
    }
  }
  if (settings.extra?.trim()) words.push("Other fields");
  return words;
}

/** The form. `onChange` gets the settings whenever one changes. */
export class SettingsForm {
  constructor(box, onChange, onClose) {
    this.box = box;
    this.onChange = onChange;
    this.settings = {};
    this.inputs = {};
    this.hints = {};
    const groups = [];
    for (const field of FIELDS) {
      if (field.group)
        groups.push(
          h("h3", { text: field.group }),
          h("div", { class: field.group === "Sampling" ? "grid" : "" }),
        );
      else if (field.name === "stop") groups.push(h("div", {}, this.labelled(field)));
      else groups.at(-1).append(this.labelled(field));
    }
    const reset = h("button", {
      type: "button",
      class: "button small",
      text: "Set back to the defaults",
      onclick: () => this.reset(),
    });
    box.append(
      h(
        "div",
        { class: "settings-head" },
        h("h2", { text: "Settings" }),
        iconButton("close", "Close settings", onClose),
      ),
      h("p", {
        class: "hint",
        text: "Of this conversation; new ones begin with the same. What is empty is the server's choice.",
      }),
      ...groups,
      h("p", { class: "settings-foot" }, reset),
    );
  }

  labelled(field) {
    const { name, label, kind, rows, hint, example } = field;
    const shared = { id: `set-${name}`, oninput: () => this.changed(name), "aria-describedby": `hint-${name}` };
    const input =
      kind === "number"
        ? h("input", {
            ...shared,
            class: "field",
            type: "text",
            inputmode: "decimal",
            placeholder: "default",
            autocomplete: "off",
          })
        : kind === "choice"
          ? h(
              "select",
              { ...shared, class: "select" },
              field.choices.map(([value, text]) => h("option", { value, text })),
            )
          : h("textarea", {
              ...shared,
              class: `field${kind === "json" ? " mono" : ""}`,
              rows,
              placeholder: example ?? "",
              spellcheck: kind === "json" ? "false" : "true",
            });
    this.inputs[name] = input;
    this.hints[name] = h("span", { id: `hint-${name}`, class: "hint", text: hint ?? "", hidden: !hint });
    return h("label", { class: "labelled", data: { name } }, label, input, this.hints[name]);
  }

  show(settings) {
    this.settings = settings;
    for (const [name, input] of Object.entries(this.inputs)) input.value = settings[name] ?? "";
    this.check();
  }

  changed(name) {
    this.settings[name] = this.inputs[name].value;
    this.check();
    this.onChange(this.settings);
  }

  reset() {
    for (const name of Object.keys(this.settings)) delete this.settings[name];
    this.show(this.settings);
    this.onChange(this.settings);
  }

  /** Marks the first field that cannot be sent. */
  check() {
    let wrong = null;
    try {
      fields(this.settings);
    } catch (error) {
      if (!(error instanceof SettingsError)) throw error;
      wrong = error;
    }
    for (const { name, hint, when } of FIELDS.filter((field) => field.name)) {
      const isWrong = wrong?.field === name;
      this.inputs[name].setAttribute("aria-invalid", String(isWrong));
      this.hints[name].textContent = isWrong ? wrong.message : (hint ?? "");
      this.hints[name].classList.toggle("bad", isWrong);
      this.hints[name].hidden = !isWrong && !hint;
      this.inputs[name].parentElement.hidden = when !== undefined && !when(this.settings);
    }
  }

  focus(name) {
    $(`set-${name}`)?.focus();
  }
}
