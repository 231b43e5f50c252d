"""The tokenizer and the chat templates of a GGUF file, as the `tokenizers` library builds them.

tokenizer.ggml.model   gpt2: byte-level BPE with merges; tokenizer.ggml.pre names how texts are cut before
                       llama: SentencePiece's BPE, whose merges follow from the scores of the tokens
token_type             control tokens are special, user-defined ones are found in texts as well
add_bos_token ...      what is added to a fresh text
tokenizer.chat_template, tokenizer.chat_template.NAME
"""

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from runtime.errors import ModelError
from runtime.models.config.gguf.container import Gguf, Texts, read_gguf
from runtime.text.gguf_patterns import BEGINS, COMPOSED, PATTERNS, WHOLE_TOKENS
from runtime.text.token_text import SPACE_MARK
from runtime.text.tokenizer_files import MAX_TEMPLATE_BYTES, TokenizerFiles

KEYS = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6  # of token_type
NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # the format's own spelling
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}


def load_gguf_tokenizer(path: Path) -> tuple[Tokenizer, TokenizerFiles]:
    """The tokenizer, and what else a model folder's files would say of it. Raises ModelError for a kind that
    is not known here."""
    gguf = read_gguf(path)
    source = _Source(gguf)
    kind = gguf.metadata.get(KEYS + "model")
    match kind:
        case "gpt2":
            tokenizer = _byte_level(source)
        case "llama":
            tokenizer = _sentencepiece(source)
        case _:
            raise source.problem(f"has a tokenizer of the kind {kind}, which is not read")
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in source.of_types(UNKNOWN, CONTROL)]
    )
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in source.of_types(USER_DEFINED)])
    _add_ends(tokenizer, source)
    return tokenizer, TokenizerFiles(special_tokens=source.named(), templates=_templates(source))


class _Source:
    """What the file says of its tokenizer."""

    def __init__(self, gguf: Gguf) -> None:
        """Raises ModelError."""
        self.gguf = gguf
        tokens = gguf.metadata.get(KEYS + "tokens")
        if not isinstance(tokens, Texts):
            raise self.problem("has no tokenizer")
        self.tokens = tokens.read()
        types = gguf.metadata.get(KEYS + "token_type", (1,) * len(self.tokens))
        if not isinstance(types, tuple) or len(types) != len(self.tokens):
            raise self.problem("has types for more or fewer tokens than it has")
        self.types = types
        self.pre = str(gguf.metadata.get(KEYS + "pre", ""))

    def problem(self, what: str) -> ModelError:
        """An error with the remedy."""
        name = self.gguf.paths[0].name
        return ModelError(
            f"{name} {what}; give the folder with the model's tokenizer.json as --tokenizer-path"
        )

    def of_types(self, *types: int) -> list[str]:
        """The tokens of these types, by id."""
        return [text for text, kind in zip(self.tokens, self.types, strict=True) if kind in types and text]

    def flag(self, name: str, default: bool) -> bool:
        """A truth value."""
        return bool(self.gguf.metadata.get(KEYS + name, default))

    def id_of(self, name: str) -> int | None:
        """The id of a named token; None: there is none."""
        value = self.gguf.metadata.get(KEYS + name)
        return value if isinstance(value, int) and 0 <= value < len(self.tokens) else None

    def named(self) -> dict[str, str]:
        """The named special tokens."""
        ids = {name: self.id_of(key) for name, key in NAMED.items()}
        return {name: self.tokens[i] for name, i in ids.items() if i is not None}

    def vocabulary(self) -> dict[str, int]:
        """Token -> id; of two that look the same the first."""
        found: dict[str, int] = {}
        for i, text in enumerate(self.tokens):
            found.setdefault(text, i)
        return found


def _byte_level(source: _Source) -> Tokenizer:
    if source.pre not in PATTERNS:
        raise source.problem(f'has a tokenizer that cuts texts as "{source.pre}", which is not known')
    stored = source.gguf.metadata.get(KEYS + "merges")
    merges = stored.read() if isinstance(stored, Texts) else []
    pairs = []
    for merge in merges:
        cut = merge.find(" ", 1)
        pairs.append((merge[:cut], merge[cut + 1 :]))
    try:
        model = models.BPE(
            vocab=source.vocabulary(), merges=pairs, ignore_merges=source.pre in WHOLE_TOKENS, fuse_unk=False
        )
    except Exception as error:  # the library raises nothing more specific
        raise source.problem(f"has merges that do not fit its tokens ({error})") from None
    tokenizer = Tokenizer(model)
    if source.pre in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PATTERNS[source.pre]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(source: _Source) -> Tokenizer:
    scores = source.gguf.metadata.get(KEYS + "scores")
    if not isinstance(scores, tuple) or len(scores) != len(source.tokens):
        raise source.problem("has no score for each of its tokens")
    vocabulary = source.vocabulary()
    unknown = source.id_of("unknown_token_id")
    model = models.BPE(
        vocab=vocabulary,
        merges=_merges(source, vocabulary, scores),
        unk_token=None if unknown is None else source.tokens[unknown],
        fuse_unk=True,
        byte_fallback=BYTE in source.types,
    )
    tokenizer = Tokenizer(model)
    marks = normalizers.Replace(" ", SPACE_MARK)
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if source.flag("add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), marks])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = marks
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(source: _Source, vocabulary: dict[str, int], scores: tuple[float, ...]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a third one, the best score first; of pairs with the same score first
    those with the longest left part, as transformers has them."""
    whole = {text for text in source.of_types(UNKNOWN, CONTROL, BYTE)}
    found: list[tuple[float, int, int, str, str]] = []
    for text, i in vocabulary.items():
        if text in whole:
            continue
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in vocabulary and right in vocabulary and left not in whole and right not in whole:
                found.append((scores[i], cut, len(right), left, right))
    found.sort(key=lambda one: one[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def _add_ends(tokenizer: Tokenizer, source: _Source) -> None:
    """Adds what a fresh text begins and ends with."""
    is_text = source.gguf.metadata.get(KEYS + "model") == "llama"
    begins = source.flag("add_bos_token", is_text or source.pre in BEGINS)
    bos, eos = source.id_of("bos_token_id"), source.id_of("eos_token_id")
    first = [source.tokens[bos]] if begins and bos is not None else []
    last = [source.tokens[eos]] if source.flag("add_eos_token", False) and eos is not None else []
    if not first and not last:
        return
    ends = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(first + last)]
    second = [f"{token}:1" for token in first], [f"{token}:1" for token in last]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *second[0], "$B:1", *second[1]],
        special_tokens=ends,
    )


def _templates(source: _Source) -> dict[str, str]:
    """Chat templates by name."""
    found = {}
    for key, value in source.gguf.metadata.items():
        if key == TEMPLATE or key.startswith(TEMPLATE + "."):
            if not isinstance(value, str):
                continue
            if len(value) > MAX_TEMPLATE_BYTES:
                raise ModelError(f"{source.gguf.paths[0].name}: the template {key} is too long")
            found[key.removeprefix(TEMPLATE).removeprefix(".") or "default"] = value
    return found
