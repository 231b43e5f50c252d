"""Log probabilities in the forms of the OpenAI API."""

import codecs
from collections.abc import Callable, Sequence

from runtime.http.streaming.rows import Rows
from runtime.json_value import Fields
from runtime.messages.requests import TokenLogprob

TokenBytes = Callable[[int], bytes]
Name = Callable[[int], str]  # the name of a token id


def namer(token_bytes: TokenBytes, *, by_id: bool) -> Name:
    """How tokens are named: by text, or `by_id` as vLLM does, which distinguishes tokens of the same text."""
    if by_id:
        return "token_id:{}".format
    return lambda token_id: token_bytes(token_id).decode("utf-8", "replace")


def chat_logprobs(tokens: list[TokenLogprob], token_bytes: TokenBytes, *, by_id: bool = False) -> Fields:
    """{"content": [{token, bytes, logprob, top_logprobs}]}. `bytes` are exact where a token is a part of a
    character."""
    name = namer(token_bytes, by_id=by_id)

    def entry(token_id: int, logprob: float | None) -> Fields:
        return {"token": name(token_id), "bytes": list(token_bytes(token_id)), "logprob": logprob}

    def row(token: TokenLogprob) -> Fields:
        top = [entry(*alternative) for alternative in (*token.top, *token.picked)]
        return entry(token.token_id, token.logprob) | {"top_logprobs": top}

    return {"content": Rows(tokens, row), "refusal": None}


class TextLogprobs:
    """{tokens, token_logprobs, top_logprobs, text_offset} of one choice; offsets continue from chunk to
    chunk."""

    def __init__(self, token_bytes: TokenBytes, width: int, *, by_id: bool = False) -> None:
        """`width`: alternatives of each token."""
        self.token_bytes = token_bytes
        self.name = namer(token_bytes, by_id=by_id)
        self.width = width
        self.offset = 0  # characters so far
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: list[TokenLogprob]) -> Fields:
        """The log probabilities of the next tokens. The offset of a token that is a part of a character is
        that of the character."""
        offsets = []
        for token in tokens:
            offsets.append(self.offset)
            self.offset += len(self._decoder.decode(self.token_bytes(token.token_id)))
        return {
            "tokens": [self.name(token.token_id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": Rows(tokens, self._top)
            if self.width or any(token.picked for token in tokens)
            else None,
            "text_offset": offsets,
        }

    def _top(self, token: TokenLogprob) -> dict[str, float] | None:
        """The alternatives and the token itself, by name; None for a first token, which has no log
        probability."""
        if token.logprob is None:
            return None
        names: dict[str, float] = {}
        for token_id, logprob in [*token.top[: self.width], *token.picked, (token.token_id, token.logprob)]:
            names.setdefault(self.name(token_id), logprob)  # of tokens with one name, the likeliest
        return names


def prompt_logprobs(tokens: Sequence[TokenLogprob], token_bytes: TokenBytes, width: int) -> Rows:
    """Prompt log probabilities in vLLM's form: for each token a dict, by token id, of {logprob, rank,
    decoded_token} of the `width` likeliest tokens and of the token itself; None for the first."""
    name = namer(token_bytes, by_id=False)

    def entry(token_id: int, logprob: float, rank: int | None) -> Fields:
        return {"logprob": logprob, "rank": rank, "decoded_token": name(token_id)}

    def row(token: TokenLogprob) -> Fields | None:
        if token.logprob is None:
            return None
        entries = {
            str(token_id): entry(token_id, logprob, rank)
            for rank, (token_id, logprob) in enumerate(token.top[:width], 1)
        }
        entries.setdefault(str(token.token_id), entry(token.token_id, token.logprob, None))
        return entries

    return Rows(tokens, row)
