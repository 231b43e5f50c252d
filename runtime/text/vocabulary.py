"""The tokenizer of a model folder: text to token ids and back.

Reads tokenizer.json with the `tokenizers` library alone, because transformers would cost the event-loop
process a second of start-up and much memory. Ids and texts are those of transformers' PreTrainedTokenizerFast
for the same folder. tokenizer.json alone decides what `add_special` adds, as in transformers 5: add_bos_token
of tokenizer_config.json counts only where there is no tokenizer.json.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
from tokenizers import AddedToken, Tokenizer, models

from runtime.errors import InvalidRequest, ModelError
from runtime.json_value import JsonDict
from runtime.models.config.gguf.container import is_gguf
from runtime.regular_file import read_regular
from runtime.text.detokenize import TableStream, TextStream, WindowStream
from runtime.text.gguf_tokenizer import load_gguf_tokenizer
from runtime.text.token_table import TokenTable, keep_table, key_of, read_table
from runtime.text.token_text import DecoderRule, TokenText, TokenTexts, decoder_rule, make_token_texts
from runtime.text.tokenizer_files import NAMED_TOKENS, TokenizerFiles, read_files

LONG = 1024  # tokens


class Vocabulary:
    """Encodes and decodes. Thread-safe: nothing changes after it is made, except a cache of derived
    values."""

    def __init__(
        self, tokenizer: Tokenizer, files: TokenizerFiles, size: int = 0, *, table: TokenTable | None = None
    ) -> None:
        """`size`: rows of the model's embedding, which may be more than there are tokens; the other ids
        decode to nothing. `table`: the tokens' texts, as `token_table` of an equal vocabulary has them."""
        self.files = files
        self._tokenizer = tokenizer
        self._unkept_key = ""  # under which the table is to be kept; empty: it is not
        tokenizer.no_truncation()
        tokenizer.no_padding()
        _add_tokens(tokenizer, files)
        rule = decoder_rule(_state(tokenizer.decoder))
        self._has_texts = rule is not None
        self._table = table = table or _make_table(tokenizer, size, rule)
        self.special_ids = frozenset(table.special_ids)
        self.size = len(table.texts)
        self._missing = frozenset(table.missing)
        self._all, self._visible = self._make_token_texts()
        self._by_shown: dict[tuple[str, ...], tuple[frozenset[int], TokenTexts | None]] = {}

    @classmethod
    def load(cls, folder: Path, size: int = 0, padded: int = 0) -> "Vocabulary":
        """The tokenizer of a folder or of a GGUF file. `padded`: tokens that all texts are filled up to; 0:
        none are added. Raises ModelError where the folder has no tokenizer.json or it cannot be read."""
        if is_gguf(folder):
            return cls(*load_gguf_tokenizer(folder), size)
        data = _read_json(folder)
        try:
            tokenizer = Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises nothing more specific
            raise _unreadable(folder, error) from None
        files = read_files(folder)
        key = key_of(data, files, size)
        table = read_table(key, size)
        vocabulary = cls(tokenizer, files, size, table=table)
        if padded:
            _pad(tokenizer, files, padded)
        if table is None and vocabulary._has_texts:
            vocabulary._unkept_key = key
        return vocabulary

    def keep_table(self) -> None:
        """Keeps the tokens' texts for the next start, unless they are kept already. Raises OSError."""
        key, self._unkept_key = self._unkept_key, ""
        if key:
            keep_table(key, self._table)

    def _make_token_texts(self) -> tuple[TokenTexts | None, TokenTexts | None]:
        """With and without special tokens; None where the decoder needs a WindowStream."""
        if not self._has_texts:
            return None, None
        table = self._table
        visible = list(table.texts)
        for i in self.special_ids:
            visible[i] = ""
        parts = table.replaces_each_byte, table.leading_spaces
        return TokenTexts(table.texts, *parts), TokenTexts(visible, *parts)

    @property
    def token_table(self) -> TokenTable:
        """The texts of all tokens in the middle of a text."""
        if self._has_texts:
            return self._table
        texts: list[TokenText] = [self.decode([i]) for i in range(self.size)]
        return msgspec.structs.replace(self._table, texts=texts)

    def check_text(self, param: str) -> None:
        """Raises InvalidRequest, naming the request's field, where tokens have no text."""

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it; None: there is no such token."""
        return self._tokenizer.token_to_id(token)

    @property
    def bos_id(self) -> int | None:
        """Id of the token at the beginning of texts; None: there is none."""
        return self._named_id("bos_token")

    @property
    def eos_id(self) -> int | None:
        """Id of the token that ends texts; None: there is none."""
        return self._named_id("eos_token")

    def _named_id(self, name: str) -> int | None:
        token = self.files.special_tokens.get(name)
        return None if token is None else self.token_id(token)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids. `add_special`: adds what the tokenizer adds to a fresh text (BOS, mostly). Raises
        InvalidRequest for text that is not Unicode."""
        try:
            # not `encode`: that one holds the GIL all the time, a second and a half for a million characters
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
        except (TypeError, UnicodeEncodeError):
            raise InvalidRequest(
                "the text has half a surrogate pair, which is not Unicode text; send the whole character",
                param="prompt",
            ) from None

    def encode_within(
        self, text: str, second: str | None, most: int, add_special: bool = True
    ) -> tuple[list[int], int]:
        """A text, or a pair of texts, as at most `most` tokens: tokens beyond that are cut off the end, for a
        pair off the longer text first; tokens that `add_special` adds stay. -> ids, and where the second text
        begins for models that have token types (else 0). Raises InvalidRequest."""
        tokenizer, is_pair = self._tokenizer, second is not None
        try:
            parts = tokenizer.encode_batch_fast(
                [text] if second is None else [text, second], add_special_tokens=False
            )
        except (TypeError, UnicodeEncodeError):
            raise InvalidRequest(
                "the text has half a surrogate pair, which is not Unicode text; send the whole character",
                param="prompt",
            ) from None
        room = most - (tokenizer.num_special_tokens_to_add(is_pair) if add_special else 0)
        if room < len(parts):
            raise InvalidRequest(
                f"{most} tokens have no room for a token of text next to the special ones", param="truncate"
            )
        lengths = [len(part.ids) for part in parts]
        if (over := sum(lengths) - room) > 0:
            kept = [lengths[0] - over] if not is_pair else _shares(lengths, room)
            for part, count in zip(parts, kept, strict=True):
                part.truncate(count)
        whole = tokenizer.post_process(parts[0], parts[1] if is_pair else None, add_special)
        return whole.ids, whole.type_ids.index(1) if is_pair and 1 in whole.type_ids else 0

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """The text of tokens that stand at the start of a text."""
        if len(ids) > LONG:  # `decode` holds the GIL all the time
            return self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special)[0]
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token in the middle of a text (maybe half a character); b"" for ids without a
        token."""
        if not 0 <= token_id < self.size:
            return b""
        text = self._all.table[token_id] if self._all is not None else self.decode([token_id])
        return text if isinstance(text, bytes) else text.encode()

    def stream(
        self, prompt_ids: Sequence[int] = (), skip_special: bool = True, shown: tuple[str, ...] = ()
    ) -> TextStream:
        """The text of tokens that follow a prompt: the prompt's text and the stream's text together are the
        text of both.

        So a space at the start of the output is dropped only where the prompt has no visible text. `shown`:
        special tokens that are part of one of these texts are not skipped.
        """
        shown_ids, texts = frozenset[int](), self._visible if skip_special else self._all
        if skip_special and shown:
            shown_ids, texts = self._with_shown(shown)
        if texts is None:
            skipped = self._missing | (self.special_ids - shown_ids) if skip_special else self._missing
            return WindowStream(
                partial(self.decode, skip_special=skip_special and not shown_ids), skipped, prompt_ids
            )
        table = texts.table
        return TableStream(
            texts, starts_text=not (texts.leading_spaces and any(table[i] for i in prompt_ids))
        )

    def _with_shown(self, shown: tuple[str, ...]) -> tuple[frozenset[int], TokenTexts | None]:
        """The special tokens that are part of one of the texts, and the visible token texts with them.
        Cached, because there are few formats."""
        if (entry := self._by_shown.get(shown)) is None:
            ids = frozenset(
                i
                for i in self.special_ids
                if (token := self._tokenizer.id_to_token(i)) and any(token in t for t in shown)
            )
            texts = self._visible
            if ids and self._all is not None and texts is not None:
                table = list(texts.table)
                for i in ids:
                    table[i] = self._all.table[i]
                texts = TokenTexts(table, texts.replaces_each_byte, texts.leading_spaces)
            entry = self._by_shown[shown] = ids, texts
        return entry


class IdsOnly(Vocabulary):
    """No tokenizer (--skip-tokenizer-init): prompts are token ids, and ids have no text."""

    def __init__(self, size: int) -> None:
        """`size`: rows of the model's embedding."""
        super().__init__(Tokenizer(models.BPE()), TokenizerFiles(), size)

    def check_text(self, param: str) -> None:
        """Raises InvalidRequest."""
        raise InvalidRequest(
            "this server has no tokenizer (--skip-tokenizer-init); send token ids", param=param
        )

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Raises InvalidRequest."""
        self.check_text("prompt")
        return []

    def encode_within(
        self, text: str, second: str | None, most: int, add_special: bool = True
    ) -> tuple[list[int], int]:
        """Raises InvalidRequest."""
        return self.encode(text), 0


def table_of(folder: Path, size: int) -> TokenTable | None:
    """The texts of a folder's tokens where they are kept, without reading the tokenizer; None: they are not.
    Raises ModelError."""
    if is_gguf(folder):
        return None
    return read_table(key_of(_read_json(folder), read_files(folder), size), size)


def _read_json(folder: Path) -> bytes:
    """tokenizer.json. Raises ModelError."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelError(
            f"{folder} has no tokenizer.json; give another folder with --tokenizer-path, serve token ids "
            "alone with --skip-tokenizer-init, or save the tokenizer with transformers: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        )
    try:
        return read_regular(path)
    except OSError as error:
        raise _unreadable(folder, error) from None


def _unreadable(folder: Path, error: Exception) -> ModelError:
    return ModelError(
        f"tokenizer.json of {folder} can't be read ({error}); fetch it again or update `tokenizers`"
    )


def _make_table(tokenizer: Tokenizer, size: int, rule: DecoderRule | None) -> TokenTable:
    """The tokens' texts; empty ones where the decoder needs a WindowStream."""
    tokens = tokenizer.get_vocab(with_added_tokens=True)
    by_id: list[str | None] = [None] * max(size, 1 + max(tokens.values(), default=-1))
    for token, i in tokens.items():
        by_id[i] = token
    texts = TokenTexts([""] * len(by_id), False, 0) if rule is None else make_token_texts(by_id, set(), rule)
    added = tokenizer.get_added_tokens_decoder()
    return TokenTable(
        texts.table,
        sorted(i for i, token in added.items() if token.special),
        [i for i, token in enumerate(by_id) if token is None],
        texts.replaces_each_byte,
        texts.leading_spaces,
    )


def _shares(lengths: list[int], room: int) -> list[int]:
    """Tokens of each text: of two texts the longer one is cut first."""
    short = min(min(lengths), room // 2)
    return [short, room - short] if lengths[0] <= lengths[1] else [room - short, short]


def _state(part: object) -> JsonDict | None:
    """A part of a tokenizer as tokenizer.json writes it."""
    if part is None:
        return None
    state = part.__getstate__()
    assert isinstance(state, bytes)
    return msgspec.json.decode(state, type=JsonDict)


def _pad(tokenizer: Tokenizer, files: TokenizerFiles, length: int) -> None:
    """All texts have `length` tokens at least from now on. Raises ModelError where no token fills up."""
    text = files.special_tokens.get("pad_token", "")
    id = tokenizer.token_to_id(text)
    if id is None:
        raise ModelError(
            "tokenizer_config.json names no pad_token of the vocabulary, with which texts of this model are "
            "filled up; restore it from the model's source"
        )
    tokenizer.enable_padding(pad_id=id, pad_token=text, length=length)


def _add_tokens(tokenizer: Tokenizer, files: TokenizerFiles) -> None:
    """Adds the tokens that only the other files name, like transformers: in the order of their ids, then the
    special ones."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    named = [files.special_tokens[name] for name in NAMED_TOKENS if name in files.special_tokens]
    named += [token for name, token in files.special_tokens.items() if name not in NAMED_TOKENS]
    specs = [
        AddedToken(
            s.content,
            single_word=s.single_word,
            lstrip=s.lstrip,
            rstrip=s.rstrip,
            normalized=s.normalized,
            special=s.special or s.content in named,
        )
        for s in files.added_tokens
    ]
    specs += [
        AddedToken(token, special=True, normalized=False) for token in (*named, *files.extra_special_tokens)
    ]
    for spec in specs:
        if spec.content and spec.content not in known:
            known.add(spec.content)
            tokenizer.add_tokens([spec])
