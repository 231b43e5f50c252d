"""The chat templates of a model, or of --chat-template."""

from runtime.text.builtin_templates import template_sources
from runtime.text.chat_template import ChatTemplates
from runtime.text.vocabulary import Vocabulary


def chat_templates(vocabulary: Vocabulary, choice: str, name: str | None) -> ChatTemplates:
    """The chat templates of the model or of --chat-template. Raises OptionsError, ModelError."""
    sources = template_sources(vocabulary.files.templates, choice, name)
    begins = vocabulary.bos_id is not None and vocabulary.encode("", True)[:1] == [vocabulary.bos_id]
    special_tokens = vocabulary.files.special_tokens
    return ChatTemplates(
        sources.by_name,
        special_tokens | {"text_begin": special_tokens.get("bos_token", "") if begins else ""},
        sources.stops,
    )
