"""Prompts of POST /generate: texts, token ids, or embeddings."""

import msgspec

from runtime.errors import InvalidRequest
from runtime.http.fields.token_ids import are_ids
from runtime.http.native.generate_request import MAX_PROMPTS, GenerateBody
from runtime.messages.requests import Embeds, Text, Tokens

NativePrompt = Text | Tokens | Embeds
Ids = list[int | list[int]] | None

_rows = msgspec.json.Decoder(list[msgspec.Raw])


def prompts_of(body: GenerateBody) -> tuple[list[NativePrompt], str, bool]:
    """The prompts, the field that has them, and whether the answer is a list. Raises InvalidRequest."""
    if body.input_embeds is not None:
        if body.text is not None:
            raise InvalidRequest("give either text or input_embeds", param="text")
        return _embeds(body.input_embeds, body.input_ids)
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("give either text, input_ids or input_embeds", param="text")
    if body.text is not None:
        texts = body.text if isinstance(body.text, list) else [body.text]
        return [Text(text) for text in texts], "text", isinstance(body.text, list)
    lists, is_batch = _id_lists(body.input_ids)
    return [Tokens(ids) for ids in lists], "input_ids", is_batch


def _id_lists(ids: Ids) -> tuple[list[list[int]], bool]:
    """The lists of token ids, and whether the request has several."""
    if ids is not None and (not ids or are_ids(ids)):
        return [ids], False  # type: ignore[list-item]
    if ids is None or len(ids) > MAX_PROMPTS or set(map(type, ids)) != {list}:
        raise InvalidRequest(
            f"input_ids must be a list of token ids, or up to {MAX_PROMPTS} lists of them", param="input_ids"
        )
    return ids, True  # type: ignore[return-value]


def _embeds(rows: list[msgspec.Raw], ids: Ids) -> tuple[list[NativePrompt], str, bool]:
    """The prompts of input_embeds. Rows stay JSON here; the tokenizer decodes them in a worker thread."""
    try:
        first = _rows.decode(rows[0])
        is_batch = bool(first) and bytes(first[0]).startswith(b"[")
        prompts = [_rows.decode(part) for part in rows] if is_batch else [rows]
    except msgspec.DecodeError:
        raise InvalidRequest(
            "input_embeds must be a list of rows of numbers, or a list of such lists", param="input_embeds"
        ) from None
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest(
            f"input_embeds has {len(prompts)} prompts; the most is {MAX_PROMPTS}", param="input_embeds"
        )
    token_lists: list[list[int] | None] = [None] * len(prompts)
    if ids is not None:
        lists, is_list = _id_lists(ids)
        if is_list != is_batch or len(lists) != len(prompts):
            raise InvalidRequest(
                "input_ids with input_embeds must have a token for each row", param="input_ids"
            )
        token_lists = [*lists]
    return (
        [Embeds(rows, tokens) for rows, tokens in zip(prompts, token_lists, strict=True)],
        "input_embeds",
        is_batch,
    )
