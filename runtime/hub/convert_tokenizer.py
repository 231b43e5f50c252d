"""A process that makes tokenizer.json of a tokenizer in another form, with transformers.

`python -m runtime.hub.convert_tokenizer SOURCE TARGET`: the folder TARGET gets tokenizer.json and what goes
with it. Exit code 0; or 1, with the reason as the last line of standard error.

    tokenizer.model      SentencePiece, or tiktoken as Llama 3 has it; the class that config.json or
                         tokenizer_config.json name says how its pieces are joined
    *.tiktoken           tiktoken; special tokens are those of tokenizer_config.json
    tekken.json          Mistral AI's

The server never imports transformers, so this is a process of its own. It reads files only: no code of the
model's folder is run.
"""

import json
import sys
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from runtime.json_value import Fields

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}  # of Mistral AI and Llama


def convert(source: Path, target: Path) -> None:
    """Writes the tokenizer. Raises whatever the libraries raise."""
    if (source / "tekken.json").is_file():
        from transformers.integrations.mistral.tokenizer import MistralConverter

        _save(MistralConverter(str(source / "tekken.json")).converted(), target, SPECIALS)
        return
    if files := sorted(source.glob("*.tiktoken")):
        _save(_of_tiktoken(files[0], _object(source / "tokenizer_config.json")), target, {})
        return
    from transformers import AutoTokenizer, LlamaTokenizer

    names_class = any((source / name).is_file() for name in ("config.json", "tokenizer_config.json"))
    kind = AutoTokenizer if names_class else LlamaTokenizer
    tokenizer = kind.from_pretrained(str(source), local_files_only=True, trust_remote_code=False)
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(f"{type(tokenizer).__name__} has no form that tokenizer.json could hold")
    tokenizer.save_pretrained(str(target))


def _of_tiktoken(path: Path, config: Fields) -> Tokenizer:
    """Special tokens have the ids behind those of the file, in the order of the ids that are given."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    added = {int(i): token["content"] for i, token in config.get("added_tokens_decoder", {}).items()}
    base = len(TikTokenConverter.load_tiktoken_bpe(str(path)))
    last = max(added, default=base - 1)
    names = [added.get(i, f"<|reserved_token_{i}|>") for i in range(base, last + 1)]
    return TikTokenConverter(vocab_file=str(path), extra_special_tokens=names).converted()


def _save(tokenizer: Tokenizer, target: Path, named: dict[str, str]) -> None:
    tokenizer.save(str(target / "tokenizer.json"))
    known = {name: token for name, token in named.items() if tokenizer.token_to_id(token) is not None}
    (target / "tokenizer_config.json").write_text(json.dumps(known))


def _object(path: Path) -> Fields:
    return msgspec.json.decode(path.read_bytes(), type=Fields) if path.is_file() else {}


def main(argv: list[str]) -> int:
    """Converts what the arguments say."""
    try:
        convert(Path(argv[1]), Path(argv[2]))
    except Exception as error:  # of many libraries; the parent makes one line of it
        print(f"{type(error).__name__}: {error}".replace("\n", " "), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
