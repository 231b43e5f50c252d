"""Writes an answer as the blocks and events of /v1/messages."""

from uuid import uuid4

from runtime.http.fields.tool_arguments import object_of
from runtime.json_value import Fields
from runtime.parsing.events import Arguments, CallBegin, CallEnd, Content, Event, Reasoning

Payload = Fields
PING: Payload = {"type": "ping"}

# type of a block -> its text field, and the type of its deltas
GROWS = {"text": ("text", "text_delta"), "thinking": ("thinking", "thinking_delta")}


class Writer:
    """Writes one answer. `content` is updated; each method returns the events of the update. In a stream the
    texts are in the events only."""

    def __init__(self, content: list[Payload], *, is_stream: bool = False) -> None:
        self.content = content
        self.is_stream = is_stream
        self.has_calls = False  # at least one complete call
        self._open: Payload | None = None  # the last block until it is complete
        self._arguments = ""  # of the open call

    def add(self, events: list[Event]) -> list[Payload]:
        """Adds parse events."""
        payloads: list[Payload] = []
        for event in events:
            match event:
                case Content(text=text):
                    payloads += self._text("text", text)
                case Reasoning(text=text):
                    payloads += self._text("thinking", text)
                case CallBegin(name=name, id=call_id):
                    payloads += self._begin(
                        {
                            "type": "tool_use",
                            "id": call_id or f"toolu_{uuid4().hex}",
                            "name": name,
                            "input": {},
                        }
                    )
                case Arguments(text=text):
                    self._arguments += text
                    payloads.append(self._delta({"type": "input_json_delta", "partial_json": text}))
                case CallEnd():
                    self.has_calls = True
                    payloads += self.close()
        return payloads

    def close(self) -> list[Payload]:
        """Ends the open block, if there is one."""
        block, self._open = self._open, None
        if block is None:
            return []
        if block["type"] == "tool_use":
            block["input"] = object_of(self._arguments)
            self._arguments = ""
        return [{"type": "content_block_stop", "index": len(self.content) - 1}]

    def _text(self, kind: str, text: str) -> list[Payload]:
        payloads: list[Payload] = []
        field, delta = GROWS[kind]
        if self._open is None or self._open["type"] != kind:
            payloads = self._begin(
                {"type": kind, field: ""} | ({"signature": ""} if kind == "thinking" else {})
            )
        assert self._open is not None
        if not self.is_stream:
            self._open[field] += text
        return [*payloads, self._delta({"type": delta, field: text})]

    def _begin(self, block: Payload) -> list[Payload]:
        payloads = self.close()
        self.content.append(block)
        self._open = block
        payloads.append(
            {"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}
        )
        # Anthropic's server sends a ping after the first block as well
        return payloads if len(self.content) > 1 else [*payloads, PING]

    def _delta(self, delta: Payload) -> Payload:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}
