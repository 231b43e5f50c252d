"""The tokens that a request excludes, from the texts and token ids that it names."""

import numpy as np

from runtime.errors import InvalidRequest
from runtime.messages.requests import TokenBans
from runtime.messages.sampling import SamplingParams
from runtime.text.vocabulary import Vocabulary

MAX_BAD_TOKENS = 8_192  # of all bad words of a request
NO_BITS = np.empty(0, np.uint8)


def token_bans(params: SamplingParams, vocabulary: Vocabulary) -> TokenBans | None:
    """What `params` excludes; None: nothing. Raises InvalidRequest for a bad word without tokens,
    and for too many."""
    if params.allowed_token_ids is None and not params.bad_words:
        return None
    allowed = NO_BITS if params.allowed_token_ids is None else packed(params.allowed_token_ids)
    sequences = [ids for word in params.bad_words for ids in sequences_of(word, vocabulary)]
    words = dict.fromkeys(sequences)
    if (count := sum(map(len, words))) > MAX_BAD_TOKENS:
        raise InvalidRequest(
            f"bad_words are {count} tokens, with and without a space before; the most is {MAX_BAD_TOKENS}, "
            "so give fewer",
            param="bad_words",
        )
    return TokenBans(allowed, tuple(words))


def packed(ids: tuple[int, ...]) -> np.ndarray:
    """uint8 [largest id / 8 + 1]: bit i of byte k is set for token 8 k + i."""
    tokens = np.array(ids, np.int64)
    bits = np.zeros(int(tokens.max()) + 1, np.uint8)
    bits[tokens] = 1
    return np.packbits(bits, bitorder="little")


def sequences_of(word: str, vocabulary: Vocabulary) -> list[tuple[int, ...]]:
    """The token sequences of a word at the beginning of a text, and behind a space. Raises
    InvalidRequest."""
    bare = word.lstrip() or word
    found = [tuple(vocabulary.encode(text, add_special=False)) for text in (bare, f" {bare}")]
    if not all(found):
        raise InvalidRequest(
            f"bad_words: the tokenizer makes no tokens of {word[:80]!r}; leave it out", param="bad_words"
        )
    return list(dict.fromkeys(found))
