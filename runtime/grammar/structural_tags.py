"""Structural tags whose marks are special tokens: no text spells those, so the tags are told by the tokens'
ids."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

Json = dict[str, Any]


def by_tokens(text: str, special: Mapping[str, int]) -> str:
    """The same rule, where each trigger is a special token; else `text` as it is. `special`: their ids."""
    try:
        rule = msgspec.json.decode(text)
        found = rule["format"]
        triggers = found["triggers"]
        if (
            found["type"] != "triggered_tags"
            or not triggers
            or not all(trigger in special for trigger in triggers)
        ):
            return text
        tags = [
            _tag(trigger, [tag for tag in found["tags"] if tag["begin"].startswith(trigger)], special)
            for trigger in triggers
        ]
    except (KeyError, TypeError, AttributeError):
        return text  # what is wrong with it, the backend says
    more = {key: value for key, value in found.items() if key in ("at_least_one", "stop_after_first")}
    rule["format"] = {
        "type": "token_triggered_tags",
        "trigger_tokens": [special[trigger] for trigger in triggers],
        "tags": tags,
    } | more
    return msgspec.json.encode(rule).decode()


def _tag(trigger: str, tags: Sequence[Json], special: Mapping[str, int]) -> Json:
    """All that may follow one trigger, and the mark at the end, which they share."""
    end = tags[0]["end"]
    if not isinstance(end, str) or any(tag["end"] != end for tag in tags):
        raise TypeError("ends that differ")
    mark = next((mark for mark in special if mark and end.endswith(mark)), None)
    before = end if mark is None else end.removesuffix(mark)
    contents = [
        _sequence(tag["begin"].removeprefix(trigger), tag["content"], before if mark is not None else "")
        for tag in tags
    ]
    return {
        "type": "tag",
        "begin": _token(special[trigger]),
        "end": end if mark is None else _token(special[mark]),
        "content": contents[0] if len(contents) == 1 else {"type": "or", "elements": contents},
    }


def _sequence(before: str, content: Json, behind: str) -> Json:
    parts = [{"type": "const_string", "value": before}] if before else []
    parts.append(content)
    parts += [{"type": "const_string", "value": behind}] if behind else []
    return {"type": "sequence", "elements": parts}


def _token(id: int) -> Json:
    return {"type": "token", "token": id}
