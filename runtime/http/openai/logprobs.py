"""Log probabilities in the two forms of the OpenAI API."""

from collections.abc import Callable
from typing import Any

from runtime.request import TokenLogprob

TokenBytes = Callable[[int], bytes]


def chat_logprobs(tokens: list[TokenLogprob], token_bytes: TokenBytes) -> dict[str, Any]:
    """{"content": [{token, bytes, logprob, top_logprobs}]}. Bytes tell halves of a character apart, which texts cannot."""
    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        raw = token_bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "bytes": list(raw), "logprob": logprob}

    content = [entry(token.token_id, token.logprob) | {"top_logprobs": [entry(*top) for top in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


class TextLogprobs:
    """{tokens, token_logprobs, top_logprobs, text_offset} of one choice; offsets go on from one chunk to the next."""

    def __init__(self, token_bytes: TokenBytes, width: int) -> None:
        self.token_bytes = token_bytes
        self.width = width
        self.offset = 0  # characters so far

    def add(self, tokens: list[TokenLogprob]) -> dict[str, Any]:
        texts = [self._text(token.token_id) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self.offset)
            self.offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens] if self.width else None,
            "text_offset": offsets,
        }

    def _top(self, token: TokenLogprob) -> dict[str, float] | None:
        """The alternatives, and the token itself, by their texts; None for a first token, which has no probability."""
        if token.logprob is None:
            return None
        texts: dict[str, float] = {}
        for token_id, logprob in [*token.top, (token.token_id, token.logprob)]:
            texts.setdefault(self._text(token_id), logprob)  # of tokens that look alike the likeliest
        return texts

    def _text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")
