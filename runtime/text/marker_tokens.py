"""Tokens that stand among those of an image."""

from runtime.errors import ModelError
from runtime.text.vocabulary import Vocabulary


def marker_id(vocabulary: Vocabulary, text: str) -> int:
    """The id of a token that stands among those of an image. Raises ModelError where there is none."""
    id = vocabulary.token_id(text)
    if id is None:
        raise ModelError(
            f"the tokenizer has no token {text}, which stands among the tokens of an image; restore "
            "tokenizer.json from the model's source, or set --enable-multimodal false to serve text alone"
        )
    return id
