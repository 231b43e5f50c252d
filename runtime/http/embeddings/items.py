"""Inputs of /v1/embeddings that may be images: items as SGLang's clients send them, and conversations as
vLLM's do. CLIP and SigLIP embed a text or an image by itself; models with a chat template embed a whole
conversation."""

from collections.abc import Sequence
from typing import Annotated as A
from typing import Literal, NamedTuple

from msgspec import Meta, Struct

from runtime.errors import InvalidRequest
from runtime.http.embeddings.pooling_requests import prompts_of
from runtime.http.fields.media import MediaParts, url_or_base64
from runtime.json_value import Fields, JsonDict, JsonValue
from runtime.messages.media import MediaKind, MediaSource
from runtime.messages.requests import Chat, Text, Tokens

IMAGE = Tokens([0])  # in place of the text of an image: the tokenizer knows its token


class InputItem(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text or an image."""

    text: str | None = None
    image: A[str, Meta(min_length=1)] | None = None  # a URL, or the file in base64


class ImageUrl(Struct, frozen=True):
    """Where an image is."""

    url: str
    detail: str | None = None  # accepted without effect


class TextPart(Struct, frozen=True, tag_field="type", tag="text"):
    """A part that is text."""

    text: str


class ImagePart(Struct, frozen=True, tag_field="type", tag="image_url"):
    """A part that is an image."""

    image_url: ImageUrl


class VideoPart(Struct, frozen=True, tag_field="type", tag="video_url"):
    """A part that is a video."""

    video_url: ImageUrl


class EmbeddingMessage(Struct, frozen=True):
    """A message whose content is embedded."""

    role: Literal["user", "system", "assistant"]
    content: str | A[list[TextPart | ImagePart | VideoPart], Meta(min_length=1)]


class Embedded(NamedTuple):
    """Prompts, and the files of each; (): no prompt has any."""

    prompts: Sequence[Text | Tokens | Chat]
    media: list[tuple[MediaSource, ...]] | tuple[()] = ()


Item = str | int | list[int] | InputItem


def embedded(
    inputs: str | list[Item] | None,
    messages: Sequence[EmbeddingMessage] | None,
    kinds: frozenset[MediaKind],
    *,
    add_special: bool,
    reads_chats: bool,
) -> Embedded:
    """What is to be embedded, of a body's `input` or `messages`. `kinds`: files that the model takes;
    `reads_chats`: as in Pooling. Raises InvalidRequest."""
    if messages is not None:
        if inputs is not None:
            raise InvalidRequest("give either input or messages", param="messages")
        if reads_chats:
            chat, files = _chat(messages, kinds)
            return Embedded([chat], [files])
        return _of_messages(messages, kinds, add_special=add_special)
    if inputs is None:
        raise InvalidRequest("input is missing", param="input")
    if isinstance(inputs, str):
        return Embedded(prompts_of(inputs, add_special=add_special))
    items = [one for one in inputs if isinstance(one, InputItem)]
    if not items:
        plain = [one for one in inputs if not isinstance(one, InputItem)]
        return Embedded(prompts_of(plain, add_special=add_special))
    if len(items) < len(inputs):
        raise InvalidRequest("input mixes kinds; give items with text or image only", param="input")
    if reads_chats:
        chats = [_item_chat(item, f"input[{i}]", kinds) for i, item in enumerate(items)]
        return Embedded([chat for chat, _ in chats], [files for _, files in chats])
    return _of_items(items, kinds, add_special=add_special)


def _of_items(items: Sequence[InputItem], kinds: frozenset[MediaKind], *, add_special: bool) -> Embedded:
    prompts: list[Text | Tokens | Chat] = []
    media: list[tuple[MediaSource, ...]] = []
    for i, item in enumerate(items):
        path = f"input[{i}]"
        if item.text is not None and item.image is None:
            prompts.append(Text(item.text, add_special))
            media.append(())
        elif item.image is not None and item.text is None:
            prompts.append(IMAGE)
            media.append(_image(item.image, f"{path}.image", kinds))
        else:
            raise InvalidRequest(f"{path}: give either text or image; both are embedded apart", param=path)
    return Embedded(prompts, media)


def _of_messages(
    messages: Sequence[EmbeddingMessage], kinds: frozenset[MediaKind], *, add_special: bool
) -> Embedded:
    """The one part of the one message."""
    if len(messages) != 1:
        raise InvalidRequest(
            f"messages has {len(messages)} entries; one message is one embedding", param="messages"
        )
    content = messages[0].content
    if isinstance(content, str):
        return Embedded([Text(content, add_special)])
    if len(content) != 1:
        raise InvalidRequest(
            f"messages[0].content has {len(content)} parts; send one text or one image, as both are "
            "embedded apart",
            param="messages[0].content",
        )
    part, path = content[0], "messages[0].content[0].image_url.url"
    if isinstance(part, TextPart):
        return Embedded([Text(part.text, add_special)])
    if isinstance(part, VideoPart):
        raise InvalidRequest(
            "messages[0].content[0]: this model embeds no videos; send a text or an image",
            param="messages[0].content[0].type",
        )
    return Embedded([IMAGE], [_image(part.image_url.url, path, kinds)])


ChatOfFiles = tuple[Chat, tuple[MediaSource, ...]]


def _chat(messages: Sequence[EmbeddingMessage], kinds: frozenset[MediaKind]) -> ChatOfFiles:
    """A conversation, and its files in order. Raises InvalidRequest."""
    files, found = MediaParts(kinds), list[JsonDict]()
    for i, message in enumerate(messages):
        content: JsonValue = message.content if isinstance(message.content, str) else None
        if not isinstance(message.content, str):
            content = [
                _part(part, f"messages[{i}].content[{j}]", files) for j, part in enumerate(message.content)
            ]
        found.append({"role": message.role, "content": content})
    return Chat(messages=found), tuple(files.sources)


def _part(part: TextPart | ImagePart | VideoPart, path: str, files: MediaParts) -> Fields:
    match part:
        case TextPart(text=text):
            return {"type": "text", "text": text}
        case ImagePart(image_url=ImageUrl(url=url)):
            return files.add(url_or_base64(url, MediaKind.IMAGE, f"{path}.image_url.url"))
        case VideoPart(video_url=ImageUrl(url=url)):
            return files.add(url_or_base64(url, MediaKind.VIDEO, f"{path}.video_url.url"))


def _item_chat(item: InputItem, path: str, kinds: frozenset[MediaKind]) -> ChatOfFiles:
    """An item as a conversation of one message: its image, then its text. Raises InvalidRequest."""
    files, parts = MediaParts(kinds), list[JsonValue]()
    if item.image is not None:
        parts.append(files.add(url_or_base64(item.image, MediaKind.IMAGE, f"{path}.image")))
    if item.text is not None:
        parts.append({"type": "text", "text": item.text})
    if not parts:
        raise InvalidRequest(f"{path} is empty; give text, image or both", param=path)
    return Chat(messages=[{"role": "user", "content": parts}]), tuple(files.sources)


def _image(text: str, path: str, kinds: frozenset[MediaKind]) -> tuple[MediaSource, ...]:
    parts = MediaParts(kinds)
    parts.add(url_or_base64(text, MediaKind.IMAGE, path))
    return tuple(parts.sources)
