"""The chat templates of a model, or of --chat-template."""

from collections.abc import Mapping

from runtime.media_kind import MediaKind
from runtime.text.builtin_templates import template_sources
from runtime.text.chat_template import ChatTemplates
from runtime.text.vocabulary import Vocabulary

NO_IDS: Mapping[MediaKind, int] = {}


def chat_templates(
    vocabulary: Vocabulary, choice: str, name: str | None, marks: Mapping[MediaKind, int] = NO_IDS
) -> ChatTemplates:
    """The chat templates of the model or of --chat-template. `marks`: tokens that stand for images, videos
    and sounds. Raises OptionsError, ModelError."""
    sources = template_sources(vocabulary.files.templates, choice, name)
    begins = vocabulary.bos_id is not None and vocabulary.encode("", True)[:1] == [vocabulary.bos_id]
    special_tokens = vocabulary.files.special_tokens
    return ChatTemplates(
        sources.by_name,
        special_tokens | {"text_begin": special_tokens.get("bos_token", "") if begins else ""},
        sources.stops,
        {kind.value: vocabulary.decode([id]) for kind, id in marks.items()},
    )
