"""Tool calls: pick the tool, copy its names from the definition, and read its result.

Names of tools and parameters vary, so that pocket reads them from the tools block
instead of knowing them by heart; a share of the tools is entirely invented.
"""

from __future__ import annotations

import json
import random
from typing import Any

from pocket.exchange import Exchange, Message, Tool, fill, vary
from pocket.kinds.intents import INTENTS, Intent
from pocket.words import NAMES, invented, some_word

_VERBS = """get set find create delete update list show send read write open
close start stop check lookup fetch add remove count run move save load""".split()
_NOUNS = """order user file page item report ticket task event door photo record
price account invoice room device job message group note score map menu""".split()
_INVENTED_ASK = (
    "(Call|Use|Run|Please call|Please use|Invoke) (|the tool |the function |the tool called ){n} with "
    "{p}(.|)",
    "(Call|Use|Run) {n} (for|using) {p}(.|)",
    "{n}(: | with ){p}",
    "(I want you to|Please|Now) (call|use|run) {n}, {p}(.|)",
)
_GUESSES = {
    "string": ("The {n} to use.", "A {n}.", "{n} as text."),
    "integer": ("The {n}.", "A whole number."),
    "number": ("The {n}.", "A number."),
    "boolean": ("Whether {n}.",),
}


def definition(name: str, description: str, params: list[tuple[str, str, str]], rng: random.Random) -> Tool:
    """Write a tool definition, with the small differences that clients have."""
    properties: dict[str, Any] = {}
    for param, kind, hint in params:
        properties[param] = {"type": kind}
        if hint and rng.random() < 0.4:
            properties[param]["description"] = hint
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.75:
        parameters["required"] = [param for param, _, _ in params]
    if rng.random() < 0.1:
        parameters["additionalProperties"] = False
    function: dict[str, Any] = {"name": name}
    if rng.random() < 0.8:
        function["description"] = description
    function["parameters"] = parameters
    if rng.random() < 0.05:
        function["strict"] = True
    return {"type": "function", "function": function}


def call(name: str, arguments: dict[str, Any]) -> Message:
    """Make the tool-call part of an assistant message."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def intent_tool(intent: Intent, rng: random.Random) -> tuple[Tool, list[str]]:
    """Choose the names under which an intent's tool is offered this time."""
    names = [rng.choice(param.names) for param in intent.params]
    params = [
        (name, param.kind, rng.choice(param.hints)) for name, param in zip(names, intent.params, strict=True)
    ]
    return definition(rng.choice(intent.names), rng.choice(intent.descriptions), params, rng), names


def tool_use(rng: random.Random) -> Exchange:
    """Ask for something a tool does; the tool may answer, and then pocket reports."""
    if rng.random() < 0.25:
        return invented_use(rng)
    intent = rng.choice(INTENTS)
    tool, names = intent_tool(intent, rng)
    values = intent.values(rng)
    name = tool["function"]["name"]
    question = vary(
        fill(rng.choice(intent.asks), rng, **{str(i): v for i, v in enumerate(values)}), rng, recase=False
    )
    sets = [values]
    if intent.pair_ask and rng.random() < 0.12:
        sets.append(intent.values(rng))
        question = fill(intent.pair_ask, rng, a=sets[0][0], b=sets[1][0])
    calls = [call(name, dict(zip(names, one, strict=True))) for one in sets]
    messages: list[Message] = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    if rng.random() < 0.6:
        answers = []
        for one in sets:
            result, answer = intent.result(rng, one)
            messages.append(
                {"role": "tool", "content": result if isinstance(result, str) else json.dumps(result)}
            )
            answers.append(answer)
        messages.append({"role": "assistant", "content": " ".join(answers)})
    key = f"tools:{intent.topic}:" + json.dumps(sets)
    thought = f"The tool {name} can do this."
    return Exchange("tools", key, tuple(messages), (), thought, (tool,), False, intent.topic)


def _invented_value(rng: random.Random) -> tuple[str, Any]:
    roll = rng.random()
    if roll < 0.5:
        return "string", rng.choice(
            (some_word(rng), rng.choice(NAMES), invented(rng), f"{some_word(rng)} {some_word(rng)}")
        )
    if roll < 0.85:
        return "integer", rng.randint(0, rng.choice((9, 99, 999, 9999)))
    if roll < 0.93:
        return "boolean", rng.random() < 0.5
    return "number", rng.randint(0, 99) + 0.5


def invented_tool(rng: random.Random) -> tuple[Tool, dict[str, Any]]:
    """Make up a tool and a set of arguments for it."""
    name = rng.choice(
        (
            f"{rng.choice(_VERBS)}_{rng.choice(_NOUNS)}",
            f"{rng.choice(_VERBS)}_{invented(rng)}",
            invented(rng),
            rng.choice(_VERBS) + rng.choice(_NOUNS).capitalize(),
            rng.choice(_VERBS),
        )
    )
    arguments: dict[str, Any] = {}
    params = []
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        param = rng.choice(
            (
                rng.choice(_NOUNS),
                f"{rng.choice(_NOUNS)}_id",
                some_word(rng),
                "name",
                "text",
                "value",
                "x",
                "y",
                "n",
                "id",
                "key",
            )
        )
        kind, value = _invented_value(rng)
        if param not in arguments:
            arguments[param] = value
            params.append((param, kind, rng.choice(_GUESSES[kind]).replace("{n}", param)))
    description = f"{rng.choice(_VERBS).capitalize()} the {rng.choice(_NOUNS)}."
    return definition(name, description, params, rng), arguments


def invented_use(rng: random.Random) -> Exchange:
    """Ask in so many words for a call of an invented tool."""
    tool, arguments = invented_tool(rng)
    name = tool["function"]["name"]
    form = rng.choice(("{k} {v}", "{k} = {v}", "{k}={v}", "{k}: {v}", "{k} set to {v}", '{k} "{v}"'))
    parts = [
        form.replace("{k}", k).replace("{v}", str(v).lower() if isinstance(v, bool) else str(v))
        for k, v in arguments.items()
    ]
    question = fill(rng.choice(_INVENTED_ASK), rng, n=name, p=rng.choice((", ", " and ")).join(parts))
    messages: list[Message] = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call(name, arguments)]},
    ]
    if rng.random() < 0.4:
        done = rng.random() < 0.8
        messages.append(
            {
                "role": "tool",
                "content": rng.choice(("ok", '{"status": "ok"}', "done", '{"ok": true}', "success"))
                if done
                else rng.choice(("error", '{"error": "failed"}', '{"status": "error"}', "failed")),
            }
        )
        messages.append(
            {"role": "assistant", "content": f"Done, {name} worked." if done else f"Sorry, {name} failed."}
        )
    key = f"tools:invented:{name}:{json.dumps(arguments)}"
    return Exchange(
        "tools", key, tuple(messages), (), f"The tool {name} can do this.", (tool,), False, "invented"
    )


def distractors(rng: random.Random, count: int, avoid: set[str]) -> list[Tool]:
    """Offer tools that the conversation does not need."""
    tools: list[Tool] = []
    while len(tools) < count:
        if rng.random() < 0.25:
            tools.append(invented_tool(rng)[0])
            continue
        intent = rng.choice(INTENTS)
        if intent.topic not in avoid and intent.area not in avoid:
            tools.append(intent_tool(intent, rng)[0])
    return tools
