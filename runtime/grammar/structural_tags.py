"""Structural tags whose markers are special tokens: no text spells special tokens, so these tags are matched
by token ids."""

from collections.abc import Mapping, Sequence

import msgspec

from runtime.json_value import Fields


def triggered_by_tokens(text: str, special: Mapping[str, int]) -> str:
    """The structural tag `text` with its triggers as token ids where each trigger is a special token, else
    `text` unchanged. `special`: ids of the special tokens by their texts."""
    try:
        rule = msgspec.json.decode(text)
        format = rule["format"]
        triggers = format["triggers"]
        if (
            format["type"] != "triggered_tags"
            or not triggers
            or not all(trigger in special for trigger in triggers)
        ):
            return text
        tags = [
            _tag(trigger, [tag for tag in format["tags"] if tag["begin"].startswith(trigger)], special)
            for trigger in triggers
        ]
    except (KeyError, TypeError, AttributeError):
        return text  # what is wrong with it, the backend says
    options = {key: value for key, value in format.items() if key in ("at_least_one", "stop_after_first")}
    rule["format"] = {
        "type": "token_triggered_tags",
        "trigger_tokens": [special[trigger] for trigger in triggers],
        "tags": tags,
    } | options
    return msgspec.json.encode(rule).decode()


def _tag(trigger: str, tags: Sequence[Fields], special: Mapping[str, int]) -> Fields:
    """Everything that may follow one trigger, and the end marker, which all its tags share."""
    end = tags[0]["end"]
    if not isinstance(end, str) or any(tag["end"] != end for tag in tags):
        raise TypeError("ends that differ")
    marker = next((marker for marker in special if marker and end.endswith(marker)), None)
    before = end if marker is None else end.removesuffix(marker)
    contents = [
        _sequence(tag["begin"].removeprefix(trigger), tag["content"], before if marker is not None else "")
        for tag in tags
    ]
    return {
        "type": "tag",
        "begin": _token(special[trigger]),
        "end": end if marker is None else _token(special[marker]),
        "content": contents[0] if len(contents) == 1 else {"type": "or", "elements": contents},
    }


def _sequence(before: str, content: Fields, after: str) -> Fields:
    parts = [{"type": "const_string", "value": before}] if before else []
    parts.append(content)
    parts += [{"type": "const_string", "value": after}] if after else []
    return {"type": "sequence", "elements": parts}


def _token(id: int) -> Fields:
    return {"type": "token", "token": id}
