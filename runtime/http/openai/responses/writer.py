"""Writes an answer as the items and events of /v1/responses."""

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypedDict

from runtime.http.openai.custom_tools import input_of
from runtime.http.openai.files import new_id
from runtime.http.openai.responses.items import PREFIXES
from runtime.http.openai.responses.tools import Tool
from runtime.json_value import Fields, JsonValue
from runtime.parsing.events import Arguments, CallBegin, CallEnd, Content, Event, Reasoning

Payload = Fields


class OpenPart(TypedDict, total=False):
    """The part of an open message or reasoning."""

    type: str
    text: str
    annotations: list[JsonValue]
    logprobs: list[Payload]


# type of an item -> type of its part, and the prefix of its events
PARTS = {
    "message": ("output_text", "response.output_text"),
    "reasoning": ("reasoning_text", "response.reasoning_text"),
}


NO_TOOLS: Mapping[str, Tool] = MappingProxyType({})


class Writer:
    """Writes one response. `response` is updated; each method returns the events of the update."""

    def __init__(self, response: Payload, tools: Mapping[str, Tool] = NO_TOOLS) -> None:
        """`tools`: by the names that the model uses."""
        self.response = response
        self.tools = tools
        output = response["output"]
        assert isinstance(output, list)
        self.output: list[Payload] = output
        self._number = 0
        self._open: Payload | None = None  # the last item of `output` until it is complete
        self._part: OpenPart = {}  # its content, of a message or reasoning
        self._arguments = ""  # of an open custom tool call

    def queue(self) -> list[Payload]:
        """The events of a background response that has not started."""
        return [
            self._event("response.created", response=self._snapshot()),
            self._event("response.queued", response=self._snapshot()),
        ]

    def begin(self) -> list[Payload]:
        """The events at the start."""
        created = [] if self._number else [self._event("response.created", response=self._snapshot())]
        return [*created, self._event("response.in_progress", response=self._snapshot())]

    def add(self, events: list[Event], logprobs: list[Payload]) -> list[Payload]:
        """Adds parse events. `logprobs` are those of the tokens of `events`, and belong to the text."""
        payloads: list[Payload] = []
        for event in events:
            match event:
                case Content(text=text):
                    payloads += self._text("message", text, logprobs)
                    logprobs = []
                case Reasoning(text=text):
                    payloads += self._text("reasoning", text, [])
                case CallBegin(name=name, id=call_id):
                    payloads += self._close("completed")
                    payloads += self._call(self.tools.get(name, Tool(name)), call_id or new_id("call"))
                case Arguments(text=text):
                    payloads += self._add_arguments(text)
                case CallEnd():
                    payloads += self._close("completed")
        return payloads

    def end(self, *, is_cut: bool, usage: Payload) -> list[Payload]:
        """Ends the response; `is_cut`: at its maximum length."""
        status = "incomplete" if is_cut else "completed"
        payloads = self._close(status)
        self.response |= {
            "status": status,
            "usage": usage,
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        }
        return [*payloads, self._event(f"response.{status}", response=self.response)]

    def fail(self, code: str, message: str) -> list[Payload]:
        """Ends the response with an error."""
        self.response |= {"status": "failed", "error": {"code": code, "message": message}}
        return [self._event("response.failed", response=self.response)]

    def _text(self, kind: str, text: str, logprobs: list[Payload]) -> list[Payload]:
        payloads: list[Payload] = []
        part_kind, name = PARTS[kind]
        if self._open is None or self._open["type"] != kind:
            payloads += self._close("completed")
            self._part = {"type": part_kind, "text": ""}
            if kind == "message":
                self._part |= {"annotations": [], "logprobs": []}
            added = dict(self._part)
            fields: Payload = {"role": "assistant"} if kind == "message" else {"summary": []}
            payloads += self._begin(kind, **fields, content=[self._part])
            payloads.append(
                self._event("response.content_part.added", part=added, content_index=0, **self._position())
            )
        self._part["text"] += text
        extras: Payload = {}
        if kind == "message":
            self._part["logprobs"] += logprobs
            extras = {"logprobs": logprobs}
        return [
            *payloads,
            self._event(f"{name}.delta", delta=text, content_index=0, **extras, **self._position()),
        ]

    def _call(self, tool: Tool, call_id: str) -> list[Payload]:
        fields: Payload = {"call_id": call_id, "name": tool.name} | (
            {} if tool.namespace is None else {"namespace": tool.namespace}
        )
        self._arguments = ""
        if tool.is_custom:
            return self._begin("custom_tool_call", input="", **fields)
        return self._begin("function_call", arguments="", **fields)

    def _add_arguments(self, text: str) -> list[Payload]:
        assert self._open is not None
        if self._open["type"] == "custom_tool_call":  # its input is sent at the end
            self._arguments += text
            return []
        self._open["arguments"] = self._arguments = self._arguments + text
        return [self._event("response.function_call_arguments.delta", delta=text, **self._position())]

    def _begin(self, kind: str, **fields: object) -> list[Payload]:
        self._open = {"id": new_id(PREFIXES[kind]), "type": kind, "status": "in_progress", **fields}
        self.output.append(self._open)
        shown = self._open | ({"content": []} if "content" in fields else {})
        return [self._event("response.output_item.added", item=shown, output_index=len(self.output) - 1)]

    def _close(self, status: str) -> list[Payload]:
        item = self._open
        if item is None:
            return []
        item["status"] = status
        position = self._position()
        if item["type"] == "function_call":
            payloads = [
                self._event(
                    "response.function_call_arguments.done",
                    name=item["name"],
                    arguments=item["arguments"],
                    **position,
                )
            ]
        elif item["type"] == "custom_tool_call":
            item["input"] = input_of(self._arguments)
            payloads = [
                self._event("response.custom_tool_call_input.delta", delta=item["input"], **position),
                self._event("response.custom_tool_call_input.done", input=item["input"], **position),
            ]
        else:
            part, (_, name) = self._part, PARTS[str(item["type"])]
            extras: Payload = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            payloads = [
                self._event(f"{name}.done", text=part["text"], content_index=0, **extras, **position),
                self._event("response.content_part.done", part=part, content_index=0, **position),
            ]
        self._open = None
        return [
            *payloads,
            self._event("response.output_item.done", item=item, output_index=len(self.output) - 1),
        ]

    def _position(self) -> Payload:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.output) - 1}

    def _snapshot(self) -> Payload:
        return self.response | {"output": []}

    def _event(self, kind: str, **fields: object) -> Payload:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event
