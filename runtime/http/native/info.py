"""Information about the model and the server, and tokenization: routes of SGLang and vLLM."""

from collections.abc import Sequence
from typing import cast

from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response

from runtime.errors import InvalidRequest
from runtime.gil import give_way
from runtime.http.operation import Operation
from runtime.http.streaming.large import compute, encoded
from runtime.http.streaming.rows import Rows, made
from runtime.json_value import Fields
from runtime.messages.media import MediaKind
from runtime.messages.requests import Chat, Text
from runtime.service import Service

MAX_TEXTS = 1_024
MAX_TOKENS = 2**20  # of texts that are made of tokens
FEW_TOKENS = 1_024  # are handled on the event loop
IDS = 4_096  # are checked between two pauses of a worker thread


class TokenizeBody(Struct, frozen=True, kw_only=True):
    """The body of /tokenize: a prompt, several, or a chat."""

    model: str | None = None
    prompt: str | list[str] | None = None
    # null: in prompts; chats get them from their template
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    messages: list[Fields] | None = None
    tools: list[Fields] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Fields = {}


class DetokenizeBody(Struct, frozen=True, kw_only=True):
    """The body of /detokenize: the tokens of a text, or of several."""

    tokens: list[int | list[int]]
    model: str | None = None
    skip_special_tokens: bool = True


class Tokenized(Struct, kw_only=True, forbid_unknown_fields=True):
    """The response of /tokenize: of one text, or of several."""

    tokens: list[int | list[int]]
    count: int | list[int]
    max_model_len: int
    token_strs: list[str] | None | UnsetType = UNSET


class Detokenized(Struct, forbid_unknown_fields=True):
    """The response of /detokenize: `text` as in SGLang, `prompt` as in vLLM."""

    text: str | list[str]
    prompt: str | list[str]


class ModelInfo(Struct, kw_only=True, forbid_unknown_fields=True):
    """The response of /get_model_info."""

    model_path: str | None
    tokenizer_path: str | None
    served_model_name: str
    is_generation: bool
    preferred_sampling_params: Fields | None
    weight_version: str
    has_image_understanding: bool
    has_audio_understanding: bool
    architectures: list[str | None]
    context_length: int
    vocab_size: int


class TokenizerShown(Struct, kw_only=True, forbid_unknown_fields=True):
    """The response of /tokenizer_info, in the names of tokenizer_config.json."""

    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    sep_token: str | None = None
    pad_token: str | None = None
    cls_token: str | None = None
    mask_token: str | None = None
    chat_template: str | None = None
    model_max_length: int


class Version(Struct, forbid_unknown_fields=True):
    """The version of this server."""

    version: str


async def tokens_of(service: Service, body: TokenizeBody) -> Response | Fields:
    """Token ids of texts or of a chat. Raises InvalidRequest."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    longest = service.card.limits.context_len
    if isinstance(body.prompt, list):
        if len(body.prompt) > MAX_TEXTS:
            raise InvalidRequest(
                f"prompt has {len(body.prompt)} texts; the most is {MAX_TEXTS}", param="prompt"
            )
        several = [
            await service.control.tokenize(Text(text, body.add_special_tokens is not False))
            for text in body.prompt
        ]
        counts = [len(ids) for ids in several]
        return await _answer({"tokens": several, "count": counts, "max_model_len": longest}, sum(counts))
    if body.messages is not None:
        args = body.chat_template_kwargs | (
            {} if body.add_generation_prompt else {"add_generation_prompt": False}
        )
        ids = await service.control.tokenize(
            Chat(body.messages, body.tools, args, body.continue_final_message)
        )
    else:
        ids = await service.control.tokenize(Text(body.prompt or "", body.add_special_tokens is not False))
    names = Rows(ids, lambda i: service.decode([i])) if body.return_token_strs else None
    answer = {"tokens": ids, "count": len(ids), "max_model_len": longest, "token_strs": names}
    return await _answer(answer, len(ids))


async def text_of(service: Service, body: DetokenizeBody) -> Response | Fields:
    """The texts of token ids. Raises InvalidRequest."""
    count = len(body.tokens)
    if count <= FEW_TOKENS:
        count += sum([len(ids) for ids in body.tokens if isinstance(ids, list)])
    texts = _texts(service, body) if count <= FEW_TOKENS else await compute(_texts, service, body)
    return await _answer({"text": texts, "prompt": texts}, count)


def _texts(service: Service, body: DetokenizeBody) -> str | list[str]:
    vocab = service.card.limits.vocab_size
    several = [ids for ids in body.tokens if isinstance(ids, list)]
    is_one = len(several) < len(body.tokens) or not body.tokens
    lists: Sequence[Sequence[int | list[int]]] = [body.tokens] if is_one else several
    count = sum([len(ids) for ids in lists])
    if count > MAX_TOKENS:
        raise InvalidRequest(
            f"tokens has {count} ids; the most is {MAX_TOKENS}, so send fewer", param="tokens"
        )
    texts = []
    for ids in lists:
        give_way()
        if not _are_ids(ids, vocab):
            raise InvalidRequest(f"tokens must be token ids in 0..{vocab - 1}", param="tokens")
        texts.append(service.decode(cast(list[int], ids), skip_special=body.skip_special_tokens))
    return texts[0] if is_one else texts


def _are_ids(values: Sequence[int | list[int]], vocab: int) -> bool:
    for at in range(0, len(values), IDS):
        give_way()
        if any(not isinstance(i, int) or not 0 <= i < vocab for i in values[at : at + IDS]):
            return False
    return True


async def _answer(answer: Fields, num_tokens: int) -> Response | Fields:
    """The answer; as JSON already, where it has many tokens."""
    if num_tokens > FEW_TOKENS:
        return Response(await compute(encoded, answer), media_type="application/json")
    shown = made(answer)
    assert isinstance(shown, dict)
    return shown


NAMED_TOKENS = tuple([name for name in TokenizerShown.__struct_fields__ if name.endswith("_token")])


def tokenizer_info(service: Service) -> Fields:
    """The tokenizer in vLLM's form, for clients that apply the chat template themselves."""
    info = service.control.tokenizer_info()
    return {
        **{name: info.special_tokens.get(name) for name in NAMED_TOKENS},
        "chat_template": info.chat_template,
        "model_max_length": service.card.limits.context_len,
    }


def model_info(service: Service) -> Fields:
    """The served model, in SGLang's form."""
    info, options = service.server_info(), service.server_info()["options"]
    return {
        "model_path": _value(options, "model_path"),
        "tokenizer_path": _value(options, "tokenizer_path"),
        "served_model_name": service.card.name,
        "is_generation": service.card.pooling is None,
        "preferred_sampling_params": service.card.preferred or None,
        "weight_version": service.card.weight_version,
        "has_image_understanding": MediaKind.IMAGE in service.card.limits.media_kinds,
        "has_audio_understanding": MediaKind.AUDIO in service.card.limits.media_kinds,
        "architectures": [info.get("architecture")],
        "context_length": service.card.limits.context_len,
        "vocab_size": service.card.limits.vocab_size,
    }


def server_info(service: Service) -> Fields:
    """The options in force, flat as in SGLang and with their sources; secrets are hidden in both."""
    info, load = service.server_info(), service.load()
    flat = {name: _value(info["options"], name) for name in info["options"]}
    state: Fields = {
        "last_gen_throughput": load.tokens_per_s,
        "max_running_requests_per_dp": load.max_running,
        "memory_usage": {
            "weight": load.weights_bytes / 1e9,
            "kvcache": load.pages_bytes / 1e9,
            "token_capacity": load.total_pages * load.page_size,
        },
    }
    if load.verified_rows:  # SGLang's name: tokens that a row with drafts brings
        state["avg_spec_accept_length"] = 1 + load.accepted_drafts / load.verified_rows
    return (
        flat | {"max_total_num_tokens": load.total_pages * load.page_size, "internal_states": [state]} | info
    )


def _value(options: Fields, name: str) -> object:
    option = options.get(name)
    return option.get("value") if isinstance(option, dict) else option


OPERATIONS = (
    *[
        Operation(
            "POST",
            prefix + "/tokenize",
            "Token ids of texts, or of a conversation",
            body=TokenizeBody,
            example={"prompt": "Hello!"},
            answers=(Tokenized,),
            call=tokens_of,
        )
        for prefix in ("", "/v1")
    ],
    *[
        Operation(
            "POST",
            prefix + "/detokenize",
            "The text of tokens",
            body=DetokenizeBody,
            example={"tokens": [1, 2, 3]},
            answers=(Detokenized,),
            call=text_of,
        )
        for prefix in ("", "/v1")
    ],
    Operation(
        "GET",
        "/tokenizer_info",
        "Special tokens and chat template",
        answers=(TokenizerShown,),
        show=lambda service, _: tokenizer_info(service),
    ),
    *[
        Operation(
            "GET",
            path,
            "About the served model",
            answers=(ModelInfo,),
            show=lambda service, _: model_info(service),
        )
        for path in ("/get_model_info", "/model_info")
    ],
    *[
        Operation(
            "GET",
            path,
            "Options in force, and the server's state",
            answers=(Fields,),
            show=lambda service, _: server_info(service),
        )
        for path in ("/server_info", "/get_server_info")
    ],
    Operation(
        "GET",
        "/version",
        "Version of this server",
        answers=(Version,),
        show=lambda service, _: {"version": service.server_info()["version"]},
    ),
)
