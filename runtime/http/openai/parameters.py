"""What each parameter of /v1/chat/completions and /v1/completions does here: one table, for refusals and for
docs/api.md."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from msgspec import Struct

from runtime.errors import InvalidRequest
from runtime.http.openai.completion_request import ChatBody, CompletionBody, Shared

Status = Literal["works", "no effect", "400"]
Source = Literal["OpenAI", "SGLang", "vLLM", "SGLang, vLLM"]

# of a refused field, values by which nothing is asked for, besides null
NOTHING: tuple[Any, ...] = ("", False, [], {})
BOTH = "SGLang, vLLM"


class Parameter(Struct, frozen=True):
    """One field of a request. `neutral`: a value that asks for what happens anyway."""

    source: Source
    status: Status
    note: str = ""
    neutral: Any = None


def _rows(source: Source, status: Status, notes: Mapping[str, str]) -> Iterator[tuple[str, Parameter]]:
    for name, note in notes.items():
        yield name, Parameter(source, status, note)


_FORM = "structured.md; at most one field that says what the answer looks like"
_DATA_PARALLEL = "there is one replica"
_DISAGGREGATION = "prompts and answers are computed by the same ranks"
_IMAGES = "only text is served"

PARAMETERS: dict[str, Parameter] = dict(
    [
        *_rows(
            "OpenAI",
            "works",
            {
                "model": "a name of /v1/models, or left out",
                "messages": "roles system, developer, user, assistant, tool; parts of type text; of earlier answers also `tool_calls` and "
                "`reasoning_content` (or `reasoning`); other fields in them are passed over: clients send answers back with their own",
                "prompt": "a text, texts, token ids, or lists of token ids",
                "stream": "",
                "stream_options": "`include_usage`; `continuous_usage_stats` as in vLLM; `include_obfuscation` has no effect",
                "max_tokens": "/v1/completions: 16 unless given; 0 with `echo` gives the prompt back",
                "max_completion_tokens": "the newer name",
                "temperature": "0 is greedy",
                "top_p": "",
                "n": "to 128",
                "best_of": "so many are computed, and the `n` likeliest (by the mean of their log probabilities) returned; in a stream as many "
                "as `n`",
                "frequency_penalty": "",
                "presence_penalty": "",
                "logit_bias": "to ±1000",
                "seed": "the same seed, the same answer",
                "stop": "to 64 strings",
                "logprobs": "chat: true or false; /v1/completions: how many alternatives beside the token's own",
                "top_logprobs": "to 1024",
                "echo": "the answer begins with the prompt, `logprobs` too",
                "suffix": "for models with fill-in-the-middle tokens; --completion-template",
                "tools": "tools.md",
                "tool_choice": "tools.md",
                "parallel_tool_calls": "tools.md",
                "response_format": _FORM,
                "reasoning_effort": "handed to the chat template, with `enable_thinking` and `thinking`: false for `none`, true for others; "
                "a number, as in SGLang, is one as well",
                "modalities": "text only",
            },
        ),
        *_rows(
            "OpenAI",
            "no effect",
            {
                "user": "tenants are told by key or header: scheduling.md",
                "safety_identifier": "",
                "metadata": "",
                "store": "chat completions are not kept; /v1/responses are",
                "service_tier": "see `priority`",
                "prompt_cache_key": "whatever begins alike is found; `cache_salt` keeps it apart",
                "prompt_cache_retention": "",
                "prompt_cache_options": "",
                "verbosity": "",
                "prediction": "would be a hint for speed only",
            },
        ),
        *_rows(
            "OpenAI",
            "400",
            {
                "functions": "use tools",
                "function_call": "use tool_choice",
                "audio": _IMAGES,
                "moderation": "there is no moderation model",
                "web_search_options": "the server searches nothing; give a tool that does",
            },
        ),
        *_rows(
            BOTH,
            "works",
            {
                "top_k": "-1 and 0: the whole vocabulary",
                "min_p": "",
                "min_tokens": "no end before",
                "repetition_penalty": "",
                "stop_token_ids": "to 64",
                "ignore_eos": "",
                "skip_special_tokens": "false shows them",
                "add_generation_prompt": "false: the template does not open an answer",
                "continue_final_message": "the answer goes on with the last message",
                "chat_template_kwargs": "variables of the template",
                "priority": "--enable-priority-scheduling; scheduling.md",
                "cache_salt": "cached prefixes are shared within one salt only",
                "return_token_ids": "`token_ids` in each choice; `prompt_token_ids` beside the choices of a chat, and in those of a completion",
            },
        ),
        *_rows(
            "SGLang",
            "works",
            {
                "stop_regex": "the text ends where one of these (to 16) is found: api.md, stop expressions",
                "extra_key": "a second `cache_salt`",
                "no_stop_trim": "keeps the stop string in the text",
                "regex": _FORM,
                "ebnf": _FORM,
                "json_schema": _FORM,
                "structural_tag": _FORM,
                "rid": "the request's id, to abort it by; of several prompts a list, or one that gets -0, -1, ... behind it",
                "input_ids": "the prompt; `messages` are then not rendered",
                "return_hidden_states": "`hidden_states` in each choice, of a stream in its last chunk: what its last token was sampled from; "
                "--enable-return-hidden-states",
                "lora_path": "the name of a loaded adapter, of several prompts also a list: lora.md",
                "return_prompt_token_ids": "`prompt_token_ids` in each choice",
                "separate_reasoning": "false: thoughts are content",
                "stream_reasoning": "false: thoughts come in one piece",
                "reasoning": "`{effort, enabled}`; see `reasoning_effort`",
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
                "return_tokens_as_token_ids": "log probabilities call tokens `token_id:123`",
                "prompt_logprobs": "of the prompt's tokens, with so many alternatives; not in a stream. Ranks are told as far as alternatives are",
                "logprob_token_ids": "tokens whose log probabilities stand behind the alternatives; needs `logprobs`",
                "stream_interval": "tokens between two chunks of a choice; not less than --stream-interval",
                "include_reasoning": "false: thoughts are not told",
                "request_id": "as `rid`",
                "documents": "for the template",
                "add_special_tokens": "what the tokenizer puts at the beginning of a text; a chat's template does that itself, true is a 400",
            },
        ),
        *_rows(
            BOTH,
            "no effect",
            {
                "session_id": "what they have in common is found in the cache",
                "spaces_between_special_tokens": "only slow tokenizers had a use for it",
            },
        ),
        *_rows(
            "SGLang",
            "400",
            {
                "return_routed_experts": "ranks report tokens only",
                "routed_experts_start_len": "ranks report tokens only",
                "return_cached_tokens_details": "usage has the sum",
                "return_meta_info": "/generate has it",
                "custom_params": "for a logit processor",
                "custom_logit_processor": "named ones are served by /generate: processors.md",
                "session_params": "sessions are served by /generate",
                "images_config": _IMAGES,
                "max_dynamic_patch": _IMAGES,
                "min_dynamic_patch": _IMAGES,
                "use_audio_in_video": _IMAGES,
                "bootstrap_host": _DISAGGREGATION,
                "bootstrap_port": _DISAGGREGATION,
                "bootstrap_room": _DISAGGREGATION,
                "routed_dp_rank": _DATA_PARALLEL,
                "disagg_prefill_dp_rank": _DATA_PARALLEL,
                "data_parallel_rank": _DATA_PARALLEL,
                "ngram_corpus_id": "there is no speculation",
                "custom_labels": "metrics have fixed labels",
                "task": "use the chat template",
            },
        ),
        *_rows(
            "vLLM",
            "400",
            {
                "use_beam_search": "there is no beam search; best_of is near",
                "watermarking": "there is none",
                "truncate_prompt_tokens": "see --allow-auto-truncate",
                "truncation_side": "see --allow-auto-truncate",
                "allowed_token_ids": "use guided_choice or a grammar",
                "bad_words": "use logit_bias",
                "kv_transfer_params": _DISAGGREGATION,
                "ec_transfer_params": _DISAGGREGATION,
                "vllm_xargs": "there are no plug-ins",
                "repetition_detection": "see repetition_penalty",
                "thinking_token_budget": "see reasoning_effort",
                "routed_experts_prompt_start": "ranks report tokens only",
                "return_token_offsets": "/tokenize has token_strs",
                "return_prompt_text": "return_token_ids tells the prompt's tokens",
                "media_io_kwargs": _IMAGES,
                "mm_processor_kwargs": _IMAGES,
                "prompt_embeds": "give texts or token ids",
                "chat_template": "templates are the server's: --chat-template",
            },
        ),
        ("length_penalty", Parameter("vLLM", "400", "there is no beam search", neutral=1)),
        ("return_mm_kwargs", Parameter("vLLM", "400", _IMAGES, neutral=True)),
    ]
)
# by route: refused fields that are served on the other one
_HERE = {
    ChatBody: {
        "echo": "of a chat; continue_final_message is near",
        "add_special_tokens": "the chat template writes them",
    }
}
_REFUSED = {
    kind: {name: PARAMETERS[name] for name in kind.__struct_fields__ if PARAMETERS[name].status == "400"}
    | {name: Parameter("vLLM", "400", note) for name, note in _HERE.get(kind, {}).items()}
    for kind in (ChatBody, CompletionBody)
}


def refuse(body: Shared) -> None:
    """Raises InvalidRequest for what is known, and not served here."""
    for name, parameter in _REFUSED[type(body)].items():
        value = getattr(body, name)
        if value is not None and value not in NOTHING and value != parameter.neutral:
            raise InvalidRequest(f"{name} is not served here: {parameter.note}", param=name)


def table() -> Iterator[tuple[str, str, str, str, str]]:
    """Rows of (parameter, routes, whose it is, what it does here, note), OpenAI's first and what works
    first."""

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
