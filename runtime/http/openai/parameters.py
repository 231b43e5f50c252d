"""Support of each parameter of /v1/chat/completions and /v1/completions: one table for refusals and for
docs/api.md."""

from collections.abc import Iterator, Mapping
from typing import Literal

from msgspec import Struct

from runtime.errors import InvalidRequest
from runtime.http.openai.completion_request import ChatBody, CompletionBody, Shared
from runtime.json_value import JsonValue

Status = Literal["works", "no effect", "400"]
Source = Literal["OpenAI", "SGLang", "vLLM", "SGLang, vLLM", "only here"]

# values of a refused field that ask for nothing, like null
NOTHING: tuple[JsonValue, ...] = ("", False, [], {})
BOTH: Source = "SGLang, vLLM"


class Parameter(Struct, frozen=True):
    """One field of a request. `neutral`: a value that asks for what happens anyway, and is not refused."""

    source: Source
    status: Status
    note: str = ""
    neutral: JsonValue = None


def _rows(source: Source, status: Status, notes: Mapping[str, str]) -> Iterator[tuple[str, Parameter]]:
    for name, note in notes.items():
        yield name, Parameter(source, status, note)


_FORM = "structured.md; at most one of the fields that constrain the output"
_DATA_PARALLEL = "it belongs to disaggregation"
_DISAGGREGATION = "the router says it in a header: disaggregation.md"
_BOOTSTRAP = "from a router with the key of the servers: disaggregation.md; else 403, or 400 without it"
_IMAGES = "options set it for all requests: media.md"

PARAMETERS: dict[str, Parameter] = dict(
    [
        *_rows(
            "OpenAI",
            "works",
            {
                "model": "a name of /v1/models, or left out",
                "messages": "roles system, developer, user, assistant, tool; parts of type text; "
                "`tool_calls` and `reasoning_content` (or `reasoning`) of earlier answers; "
                "unknown fields of messages are ignored: clients send answers back with "
                "fields of their own",
                "prompt": "a text, texts, token ids, or lists of token ids",
                "stream": "",
                "stream_options": "`include_usage`; `continuous_usage_stats` as in vLLM; "
                "`include_obfuscation` has no effect",
                "max_tokens": "/v1/completions: 16 by default; 0 with `echo` returns the prompt",
                "max_completion_tokens": "the newer name",
                "temperature": "0 is greedy",
                "top_p": "",
                "n": "to 128",
                "best_of": "so many are sampled, and the `n` likeliest (by mean log probability) "
                "returned; in a stream at most `n`",
                "frequency_penalty": "",
                "presence_penalty": "",
                "logit_bias": "values to ±1000",
                "seed": "the same seed, the same answer",
                "stop": "to 64 strings",
                "logprobs": "chat: true or false; /v1/completions: number of alternatives of each token",
                "top_logprobs": "to --max-logprobs",
                "echo": "the answer begins with the prompt, `logprobs` too",
                "suffix": "for models with fill-in-the-middle tokens; --completion-template",
                "tools": "tools.md",
                "tool_choice": "tools.md",
                "parallel_tool_calls": "tools.md",
                "response_format": _FORM,
                "reasoning_effort": "passed to the chat template, with `enable_thinking` and `thinking`: "
                "false for `none`, else true; also a number, as in SGLang",
                "modalities": "text only",
                "prediction": "`{type: content, content}`: its tokens are drafts; speculation.md",
            },
        ),
        *_rows(
            "OpenAI",
            "no effect",
            {
                "user": "tenants are recognized by key or header: scheduling.md",
                "safety_identifier": "",
                "metadata": "",
                "store": "chat completions are not stored; /v1/responses are",
                "service_tier": "see `priority`",
                "prompt_cache_key": "common prefixes are always found; `cache_salt` separates them",
                "prompt_cache_retention": "",
                "prompt_cache_options": "",
                "verbosity": "",
            },
        ),
        *_rows(
            "OpenAI",
            "400",
            {
                "functions": "use tools",
                "function_call": "use tool_choice",
                "audio": "answers are texts",
                "moderation": "there is no moderation model",
                "web_search_options": "there is no web search; use a tool of your own",
            },
        ),
        *_rows(
            BOTH,
            "works",
            {
                "top_k": "-1 and 0: the whole vocabulary",
                "min_p": "",
                "min_tokens": "no end of sequence before",
                "repetition_penalty": "",
                "stop_token_ids": "to 64",
                "ignore_eos": "",
                "skip_special_tokens": "false: they are part of the text",
                "add_generation_prompt": "false: the template does not open an answer",
                "continue_final_message": "the answer continues the last message",
                "chat_template_kwargs": "variables of the template",
                "priority": "--enable-priority-scheduling; scheduling.md",
                "data_parallel_rank": "the replica that serves it: parallelism.md",
                "cache_salt": "cached prefixes are shared within one salt only",
                "return_token_ids": "`token_ids` in each choice; `prompt_token_ids` next to the choices of a "
                "chat, and in the choices of a completion",
            },
        ),
        *_rows(
            "SGLang",
            "works",
            {
                "routed_dp_rank": "as `data_parallel_rank`",
                "bootstrap_host": _BOOTSTRAP,
                "bootstrap_port": "8998 where it is left out",
                "bootstrap_room": _BOOTSTRAP,
                "stop_regex": "up to 16; the text ends where one matches: api.md, stop expressions",
                "extra_key": "a second `cache_salt`",
                "no_stop_trim": "keeps the stop string in the text",
                "regex": _FORM,
                "ebnf": _FORM,
                "json_schema": _FORM,
                "structural_tag": _FORM,
                "rid": "the request's id, by which it is aborted; for several prompts a list, or "
                "one id to which -0, -1, ... is appended",
                "input_ids": "the prompt; `messages` are then not rendered",
                "return_hidden_states": "`hidden_states` in each choice, in a stream in its last chunk: "
                "the state from which the last token was sampled; --enable-return-hidden-states",
                "return_routed_experts": "`sglext.routed_experts` next to the one choice, in a stream in its "
                "last chunk; --enable-return-routed-experts",
                "routed_experts_start_len": "the first token whose experts are returned",
                "lora_path": "the name of a loaded adapter; for several prompts also a list: lora.md",
                "return_prompt_token_ids": "`prompt_token_ids` in each choice",
                "use_audio_in_video": "the model is given the sounds of videos, too: media.md",
                "separate_reasoning": "false: reasoning is part of the content",
                "stream_reasoning": "false: reasoning is sent in one piece",
                "reasoning": "`{effort, enabled, max_tokens}`; see `reasoning_effort`; the last one as "
                "`thinking_token_budget`",
            },
        ),
        *_rows(
            "vLLM",
            "works",
            {
                "include_stop_str_in_output": "keeps the stop string in the text",
                "structured_outputs": _FORM,
                "guided_json": _FORM,
                "guided_regex": _FORM,
                "guided_choice": _FORM,
                "guided_grammar": _FORM,
                "allowed_token_ids": "the only tokens that are sampled, what ends the answer included",
                "bad_words": "up to 1024 texts that the answer does not have: api.md, bad words",
                "return_tokens_as_token_ids": "log probabilities name tokens `token_id:123`",
                "prompt_logprobs": "log probabilities of the prompt's tokens with so many alternatives; "
                "not in a stream. The rank of a token is known if it is one of the alternatives",
                "logprob_token_ids": "tokens whose log probabilities are added to the alternatives; needs "
                "`logprobs`",
                "stream_interval": "tokens between two chunks of a choice; at least --stream-interval",
                "include_reasoning": "false: reasoning is left out",
                "thinking_token_budget": "most tokens of reasoning, -1: no limit; needs a reasoning parser: "
                "tools.md",
                "request_id": "as `rid`",
                "mm_processor_kwargs": "`{use_audio_in_video}`",
                "documents": "passed to the chat template",
                "enable_thinking": "as in `chat_template_kwargs`, which comes first; `thinking` gets the "
                "same value",
                "add_special_tokens": "whether the tokenizer adds its BOS token to a text; a chat's template "
                "adds it itself, so true is a 400",
            },
        ),
        *_rows(
            "only here",
            "works",
            {"speculation": "`{enabled, max_draft_tokens}`: false or 0 for no drafts; speculation.md"},
        ),
        *_rows(
            BOTH,
            "no effect",
            {
                "session_id": "common prefixes are found in the cache",
                "spaces_between_special_tokens": "only slow tokenizers had a use for it",
            },
        ),
        *_rows(
            "vLLM", "no effect", {"guided_decoding_backend": "--grammar-backend has one for all requests"}
        ),
        *_rows(
            "SGLang",
            "400",
            {
                "return_cached_tokens_details": "usage has the sum",
                "return_meta_info": "/generate has it",
                "custom_params": "for a logit processor",
                "custom_logit_processor": "named ones are served by /generate: processors.md",
                "session_params": "sessions are served by /generate",
                "images_config": _IMAGES,
                "max_dynamic_patch": _IMAGES,
                "min_dynamic_patch": _IMAGES,
                "disagg_prefill_dp_rank": _DATA_PARALLEL,
                "ngram_corpus_id": "texts are found by themselves: speculation.md",
                "custom_labels": "a header has them: --tokenizer-metrics-custom-labels-header",
                "task": "use the chat template",
            },
        ),
        *_rows(
            "vLLM",
            "400",
            {
                "use_beam_search": "there is no beam search; best_of is similar",
                "watermarking": "there is none",
                "truncate_prompt_tokens": "see --allow-auto-truncate",
                "truncation_side": "see --allow-auto-truncate",
                "kv_transfer_params": _DISAGGREGATION,
                "ec_transfer_params": _DISAGGREGATION,
                "vllm_xargs": "there are no plug-ins",
                "repetition_detection": "see repetition_penalty",
                "routed_experts_prompt_start": "see routed_experts_start_len",
                "return_token_offsets": "/tokenize has token_strs",
                "return_prompt_text": "return_token_ids returns the prompt's tokens",
                "media_io_kwargs": _IMAGES,
                "prompt_embeds": "give texts or token ids",
                "chat_template": "templates are the server's: --chat-template",
                "guided_whitespace_pattern": "--constrained-json-whitespace-pattern has one for all requests",
                "logits_processors": "named ones are served by /generate: processors.md",
                "early_stopping": "there is no beam search",
            },
        ),
        ("length_penalty", Parameter("vLLM", "400", "there is no beam search", neutral=1)),
        ("return_mm_kwargs", Parameter("vLLM", "400", _IMAGES, neutral=True)),
    ]
)
# by route: fields that only the other route supports
_HERE: dict[type[Shared], dict[str, str]] = {
    ChatBody: {
        "echo": "not in a chat; continue_final_message is similar",
        "add_special_tokens": "the chat template writes them",
        "best_of": "n gives several answers",
    }
}
_REFUSED: dict[type[Shared], dict[str, Parameter]] = {
    kind: {name: PARAMETERS[name] for name in kind.__struct_fields__ if PARAMETERS[name].status == "400"}
    | {
        name: Parameter("vLLM", "400", note, neutral=1 if name == "best_of" else None)
        for name, note in _HERE.get(kind, {}).items()
    }
    for kind in (ChatBody, CompletionBody)
}


def refuse(body: Shared) -> None:
    """Raises InvalidRequest for parameters that are known and not supported."""
    for name, parameter in _REFUSED[type(body)].items():
        value = getattr(body, name)
        if value is not None and value not in NOTHING and value != parameter.neutral:
            raise InvalidRequest(f"{name} is not served here: {parameter.note}", param=name)


def table() -> Iterator[tuple[str, str, str, str, str]]:
    """Rows of docs/api.md: parameter, routes, source, status, note."""

    def routes(name: str) -> str:
        return ", ".join(
            [
                route
                for route, kind in (("chat", ChatBody), ("text", CompletionBody))
                if name in kind.__struct_fields__ and name not in _HERE.get(kind, {})
            ]
        )

    for name, parameter in PARAMETERS.items():
        yield f"`{name}`", routes(name), parameter.source, parameter.status, parameter.note
