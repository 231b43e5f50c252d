"""A tree of tokens that all answers of a server follow (--tree-decode-config), in RTP-LLM's file format:

    {"start_token_id": 225, "end_token_id": 2, "sep": "_",
     "prefix_dict": {"225": [64000, 64003], "225_64000": [64001, 64002]}}

A key is the token ids of an answer so far, joined by `sep`; `start_token_id` stands before the first of them,
in place of the prompt. Its value has the ids of the tokens that may come next. Where an answer has no key,
only `end_token_id` may come.
"""

from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from runtime.grammar.backend import GrammarError
from runtime.messages.constraint import Grammar
from runtime.regular_file import read_regular

OPTION = "--tree-decode-config"
MAX_BYTES = 1 << 30  # of a file
KEY_BYTES, TOKEN_BYTES = 200, 8  # of memory: of a key with its list, and of each token in it


class TokenTree(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of a file."""

    start_token_id: int = 225
    end_token_id: int = 2
    sep: str = "_"
    prefix_dict: dict[str, list[int]]


def read_token_tree(path: Path, vocab_size: int) -> TokenTree:
    """The tree in a file, checked. Raises GrammarError."""
    try:
        tree = msgspec.json.decode(read_regular(path, MAX_BYTES), type=TokenTree)
    except OSError as error:
        raise GrammarError(f"{OPTION} {path} can't be read: {error.strerror}; name a JSON file") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(
            f"{OPTION} {path}: {error}; it has start_token_id, end_token_id, sep and prefix_dict"
        ) from None
    if not tree.prefix_dict.get(str(tree.start_token_id)):
        raise GrammarError(
            f'{OPTION} {path}: prefix_dict has no tokens for "{tree.start_token_id}", which is '
            "start_token_id, so every answer would be empty; add the tokens that may come first"
        )
    lists = [[tree.end_token_id], *tree.prefix_dict.values()]
    if any([tokens and not (0 <= min(tokens) and max(tokens) < vocab_size) for tokens in lists]):
        raise GrammarError(
            f"{OPTION} {path} has tokens outside 0..{vocab_size - 1}; give one that was made for this model"
        )
    return tree


class CompiledTree:
    """See Compiled."""

    def __init__(self, tree: TokenTree) -> None:
        self._tree = tree
        lists = tree.prefix_dict.values()
        self.num_bytes = sum([KEY_BYTES + TOKEN_BYTES * len(tokens) for tokens in lists])

    def matcher(self) -> "TreeMatcher":
        """See Compiled.matcher."""
        return TreeMatcher(self._tree, str(self._tree.start_token_id))


class TreeMatcher:
    """See Matcher. `key`: of the answer so far."""

    def __init__(self, tree: TokenTree, key: str) -> None:
        self._tree = tree
        self._key = key

    @property
    def _allowed(self) -> list[int]:
        return self._tree.prefix_dict.get(self._key) or [self._tree.end_token_id]

    def accept(self, token: int) -> bool:
        """See Matcher.accept."""
        if token not in self._allowed:
            return False
        self._key += f"{self._tree.sep}{token}"
        return True

    def fill(self, bits: np.ndarray) -> bool:
        """See Matcher.fill."""
        tokens = np.array(self._allowed)
        bits[:] = 0
        np.bitwise_or.at(bits, tokens >> 5, (1 << (tokens & 31)).astype(np.uint32).view(np.int32))
        return True

    def fork(self) -> "TreeMatcher":
        """See Matcher.fork."""
        return TreeMatcher(self._tree, self._key)

    def jump_forward(self) -> list[int]:
        """The tokens up to the next choice, or the end."""
        ahead, tokens = self.fork(), list[int]()
        while len(set(allowed := ahead._allowed)) == 1 and allowed[0] != self._tree.end_token_id:
            ahead.accept(allowed[0])
            tokens.append(allowed[0])
        return tokens


class TokenTrees:
    """See Backend. Grammars of the kind `token_tree`, whose text is the path of a file."""

    byte_ids: tuple[int, ...] = ()

    def __init__(self, vocab_size: int) -> None:
        """`vocab_size`: of the model, whose tokens trees may have."""
        self._vocab_size = vocab_size

    def compile(self, grammar: Grammar) -> CompiledTree:
        """See Backend.compile."""
        return CompiledTree(read_token_tree(Path(grammar.text), self._vocab_size))
