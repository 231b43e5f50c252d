"""Fill-in-the-middle prompts: a code model is asked for the text between a beginning and an end.

A format is the prompt as the model was trained on it, with {prefix} and {suffix} where the two texts go.
Everything else in it are special tokens of the model, so a model's format is found by its vocabulary alone.

Sources: Bavarian et al., 2022 (arXiv:2207.14255) for the idea; the model cards of StarCoder, DeepSeek-Coder,
Qwen2.5-Coder and Codestral for the tokens.
"""

import re
from collections.abc import Callable

from runtime.errors import OptionsError
from runtime.regular_file import read_text

FORMATS = {
    "star_coder": "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
    "deepseek_coder": "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",
    "qwen_coder": "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
    "codestral": "[SUFFIX]{suffix}[PREFIX]{prefix}",
}
MAX_FORMAT_BYTES = 1 << 20
_FIELDS = re.compile(r"\{(prefix|suffix)\}")


def find_format(choice: str, has_token: Callable[[str], bool]) -> str | None:
    """`choice` names a format or a file with one. "auto": the first format whose tokens the vocabulary has,
    None if there is none. Raises OptionsError."""
    if choice == "auto":
        return next((format for format in FORMATS.values() if all(map(has_token, _tokens(format)))), None)
    if choice in FORMATS:
        return FORMATS[choice]
    try:
        format = read_text(choice, MAX_FORMAT_BYTES).rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionsError(
            [
                f"--completion-template {choice} is none of {', '.join(FORMATS)}, and cannot be read as a "
                "file "
                f"({error})"
            ]
        ) from None
    if sorted(_FIELDS.findall(format)) != ["prefix", "suffix"]:
        raise OptionsError(
            [
                f"--completion-template {choice} must have {{prefix}} and {{suffix}} once each, as in "
                f"{FORMATS['star_coder']}"
            ]
        )
    return format


def infill(format: str, prefix: str, suffix: str) -> str:
    """The prompt: `format` with the two texts in it."""
    texts = {"prefix": prefix, "suffix": suffix}
    return _FIELDS.sub(lambda match: texts[match[1]], format)


def _tokens(format: str) -> list[str]:
    return [token for token in re.split(r"\{(?:prefix|suffix)\}", format) if token]
