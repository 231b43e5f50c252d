"""The tokenizer's files of a model folder, apart from tokenizer.json: special tokens and chat templates.

tokenizer_config.json    named special tokens, added tokens, chat_template (one, or a list of named ones)
special_tokens_map.json  named special tokens, of older folders
chat_template.jinja      the default template; wins over the others
chat_templates/*.jinja   further named templates
chat_template.json       the default template, in a JSON object
"""

from pathlib import Path

import msgspec
from msgspec import Struct

from runtime.errors import ModelError
from runtime.json_value import Fields
from runtime.regular_file import read_regular, read_text

MAX_TEMPLATE_BYTES = 1 << 20
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class AddedSpec(Struct, frozen=True, kw_only=True):
    """An added token as tokenizer_config.json writes it."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


class TokenizerFiles(Struct, frozen=True, kw_only=True):
    """What the folder's files say about its tokenizer."""

    special_tokens: dict[str, str] = {}  # bos_token, eos_token, ... and what else the folder names `*_token`
    extra_special_tokens: list[str] = []  # special, without a name of their own
    added_tokens: list[AddedSpec] = []  # in the order of their ids
    templates: dict[str, str] = {}  # by name; "default" is the one for ordinary chats


def read_files(folder: Path) -> TokenizerFiles:
    """Reads the files, each of which may be missing. Raises ModelError for a file that is not what it should
    be."""
    config = _object(folder / "tokenizer_config.json")
    named = config
    if "added_tokens_decoder" not in config:
        named = config | _object(folder / "special_tokens_map.json")
    extra = named.get("extra_special_tokens") or named.get("additional_special_tokens") or []
    tokens = {
        key: text
        for key, value in named.items()
        if key.endswith("_token") and (text := _content(value)) is not None
    }
    if isinstance(extra, dict):
        tokens |= {key: text for key, value in extra.items() if (text := _content(value)) is not None}
        extra = []
    try:
        added = msgspec.convert(config.get("added_tokens_decoder") or {}, dict[int, AddedSpec], strict=False)
    except msgspec.ValidationError as error:
        raise ModelError(f"tokenizer_config.json: added_tokens_decoder: {error}") from None
    return TokenizerFiles(
        special_tokens=tokens,
        extra_special_tokens=[text for value in extra if (text := _content(value)) is not None],
        added_tokens=[added[i] for i in sorted(added)],
        templates=_templates(folder, config),
    )


def _object(path: Path) -> Fields:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(read_regular(path), type=Fields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise ModelError(f"{path.name} is not a JSON object ({error}); fetch it again") from None


def _content(value: object) -> str | None:
    """The text of a token, which is written as a string or as an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _templates(folder: Path, config: Fields) -> dict[str, str]:
    source = config.get("chat_template")
    match source:
        case None:
            templates = {}
        case str():
            templates = {"default": source}
        case list():
            try:
                templates = {item["name"]: item["template"] for item in source}
            except (TypeError, KeyError):
                raise ModelError(
                    "tokenizer_config.json: each item of the list chat_template needs name and template"
                ) from None
        case dict():
            templates = dict(source)
        case _:
            raise ModelError(
                "tokenizer_config.json: chat_template must be a string or a list of named templates"
            )
    alone = _object(folder / "chat_template.json").get("chat_template")
    if isinstance(alone, str):
        templates["default"] = alone
    for path in sorted((folder / "chat_templates").glob("*.jinja")):
        templates[path.stem] = _template(path)
    if (path := folder / "chat_template.jinja").is_file():
        templates["default"] = _template(path)
    return templates


def _template(path: Path) -> str:
    try:
        return read_text(path, MAX_TEMPLATE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"the chat template {path.name} cannot be read ({error}); mend it or remove it"
        ) from None
