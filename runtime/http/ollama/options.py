"""What the options of Ollama's requests become here, and those that have no effect."""

import re
from functools import cache

from runtime import log
from runtime.errors import InvalidRequest
from runtime.http.ollama.ollama_request import Options, Shared
from runtime.json_value import Fields

# options that OpenAI has under the same name
SAME = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop")
NEUTRAL = {"mirostat": 0, "typical_p": 1.0, "tfs_z": 1.0}  # the only values of these that are served
# those of Ollama's own server
IGNORED = (
    "num_ctx",
    "repeat_last_n",
    "mirostat_tau",
    "mirostat_eta",
    "penalize_newline",
    "num_keep",
    "numa",
    "num_batch",
    "num_gpu",
    "main_gpu",
    "low_vram",
    "f16_kv",
    "logits_all",
    "vocab_only",
    "use_mmap",
    "use_mlock",
    "embedding_only",
    "num_thread",
    "draft_num_predict",
)
_NO_TIME = re.compile(r"0+(\.0*)?(ns|us|µs|ms|s|m|h)?")


def unloads(body: Shared) -> bool:
    """Whether the request asks for the model to be unloaded at once: a `keep_alive` of no time."""
    value = body.keep_alive
    return _NO_TIME.fullmatch(value) is not None if isinstance(value, str) else value == 0


@cache
def _report(name: str) -> None:
    """Logs once that an option has no effect."""
    log.get("ollama").warning(
        "an option of Ollama's server has no effect; the options of this one decide", option=name
    )


def fields_of(body: Shared) -> Fields:
    """Fields of the request that OpenAI's requests have, too. Raises InvalidRequest."""
    options = body.options or Options()
    for name, neutral in NEUTRAL.items():
        if getattr(options, name) not in (None, neutral):
            raise InvalidRequest(f"options.{name} is not served here; leave it out", param=f"options.{name}")
    for name in IGNORED:
        if getattr(options, name) is not None:
            _report(name)
    fields: Fields = {name: value for name in SAME if (value := getattr(options, name)) is not None}
    if options.repeat_penalty is not None:
        fields["repetition_penalty"] = options.repeat_penalty
    if options.num_predict is not None and options.num_predict > 0:
        fields["max_tokens"] = options.num_predict
    if isinstance(body.format, dict):
        fields["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": body.format},
        }
    elif body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif body.format:
        raise InvalidRequest("format must be json or a JSON schema", param="format")
    return fields
