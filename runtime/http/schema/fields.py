"""What the fields of request bodies mean, in a few words each: the descriptions of the OpenAPI document.
Those of chats and completions are in openai/parameters.py, which is the table of docs/api.md too."""

from runtime.http.openai.parameters import PARAMETERS

NO_EFFECT = "Accepted without effect."
REFUSED = "Refused, unless the value asks for nothing."
SHORT = 34  # characters; a note of the table that has no more says little without a description
TABLED = ("openai.ChatBody", "CompletionBody")  # bodies whose fields openai/parameters.py describes

DESCRIPTIONS: dict[str, str] = {
    "abort_all": "Ends all requests instead of the one that `rid` names.",
    "abort_all_requests": "Ends the requests that run; else they wait and go on with the new weights.",
    "activation": "Older name of `use_activation`.",
    "activities": "What is recorded, such as CPU and GPU.",
    "audio_data": "Sounds for the marks of the text: URLs or base64.",
    "apply_softmax": "The scores of the labels add up to 1.",
    "background": "Answers at once, and generates in the background.",
    "capacity_of_str_len": "How long the session may become, in characters.",
    "chat_template_kwargs": "Variables of the model's chat template.",
    "completion_window": "Only 24h.",
    "conversation": "A conversation whose items come first, and that the answer joins.",
    "context_management": "Edits of the conversation; some have no effect, others are refused.",
    "data": "The bytes of the part.",
    "dimensions": "Length to which vectors are shortened.",
    "documents": "The texts that are ranked.",
    "encoding_format": "float, or base64 of float32.",
    "endpoint": "The route that answers the lines of the batch.",
    "bytes": "How many bytes the file will have.",
    "file": "The content of the file.",
    "filename": "The name of the file.",
    "flush_cache": "Empties the prefix cache, whose entries are of the old weights.",
    "format": "json, or a JSON schema that the answer is held to by a grammar.",
    "frequency_penalty": "Lowers the probability of tokens by how often they came already.",
    "ignore_eos": "Goes on behind the end-of-text token.",
    "image_data": "Images for the marks of the text: URLs or base64.",
    "images": "Images before the text, in base64.",
    "include": "What the answer has in addition, as message.output_text.logprobs.",
    "input": "The text, or a list of texts, token ids or items.",
    "input_embeds": "Instead of a text: a row of numbers for each token.",
    "input_file_id": "The file whose lines are the requests of the batch.",
    "input_ids": "Instead of a text: token ids, or a list of such prompts.",
    "instructions": "The system message of this answer.",
    "item_first": "Items stand before the query.",
    "items": "Messages, tool calls and their outputs, in order.",
    "ScoreBody.items": "The texts that are scored.",
    "keep_alive": "Accepted without effect: the model stays loaded.",
    "label_token_ids": "Tokens whose probabilities are the scores.",
    "language": "ISO 639 code of what is spoken; left out: the model detects it.",
    "load_format": "How the new weights are read; as the option --load-format.",
    "load_inplace": "Replaces a loaded adapter of this name.",
    "log_level": "The least important lines that are logged.",
    "log_requests": "Whether requests are logged.",
    "log_requests_format": "text or json.",
    "log_requests_level": "How much of a request is logged; 0: only its figures.",
    "logit_bias": "Added to the logits of these tokens, by id.",
    "logprob_start_len": "Log probabilities of the prompt from this position on; -1: none.",
    "lora_name": "Name of the adapter.",
    "lora_path": "Name of a loaded adapter; for loading, its folder.",
    "max_output_tokens": "The longest answer in tokens.",
    "max_tokens": "The longest answer in tokens.",
    "instruct": "What relevance means, in words, for a language model that judges.",
    "max_tokens_per_doc": "Query and document together are cut to so many tokens.",
    "messages": "The conversation so far.",
    "metadata": "Data of the client's own, kept with what is stored.",
    "md5": "The checksum of the whole file, in hex; another one is refused.",
    "mime_type": "The kind of the file; it has no effect.",
    "min_p": "Tokens less likely than this part of the likeliest are left out.",
    "mode": "What becomes of requests that run.",
    "model": "A name of /v1/models; left out: the model of this server.",
    "model_path": "Folder of the new checkpoint, of the same model.",
    "name": "Name of the model.",
    "n": "Number of answers.",
    "normalize": "Brings vectors to length 1; left out: as the model's folder says.",
    "num_steps": "Steps after which the profile is written.",
    "options": "Sampling parameters, such as temperature and num_predict.",
    "output_config": "`format`: a JSON schema that a grammar holds the answer to; `effort` of the reasoning.",
    "output_dir": "Folder on the server's machine for the files that are written.",
    "output_format": "Older name of `output_config.format`.",
    "part_ids": "The parts in the order in which they make up the file.",
    "pinned": "The adapter's slot is never given to another one.",
    "presence_penalty": "Lowers the probability of tokens that came already.",
    "previous_response_id": "A stored response whose conversation goes on.",
    "prompt": "The text that the answer continues.",
    "purpose": "batch, or another purpose.",
    "queries": "Newer name of `text_1`.",
    "query": "The text that others are compared with.",
    "queue_timeout": "Seconds until the first step, after which the request fails.",
    "raw": "The prompt goes to the model without a template.",
    "reasoning_parser": "The reasoning format by its name.",
    "repetition_penalty": "Divides the probability of tokens that came already.",
    "requests": "For each a custom_id, and params: a body of /v1/messages.",
    "return_documents": "The answer repeats the documents.",
    "return_logprob": "Returns log probabilities of the tokens.",
    "return_text_in_logprobs": "Log probabilities name tokens by text as well as by id.",
    "return_token_strs": "Returns the text of each token too.",
    "rid": "An id of the client's own, by which the request can be ended.",
    "sampling_params": "Sampling parameters: one set for all prompts, or a list.",
    "server_args": "Options by name, with their new values.",
    "skip_special_tokens": "Leaves special tokens out of the text.",
    "stop": "Texts that end the answer.",
    "stop_regex": "Expressions that end the answer where they match.",
    "stop_sequences": "Texts that end the answer.",
    "stop_token_ids": "Tokens that end the answer.",
    "store": "Keeps the response, so that another one can continue it.",
    "stream": "Sends the answer piece by piece, as it is generated.",
    "suffix": "The text behind the gap that the answer fills; needs a model that was trained for it.",
    "system": "The system message.",
    "tags": "Parts of the memory; left out: all.",
    "temperature": "How random the answer is.",
    "tenant": "Only this tenant may use the adapter.",
    "text": "The text, or a list of texts.",
    "text_1": "The text, or texts, that are compared with `text_2`.",
    "text_2": "The text, or texts, that are compared with `text_1`.",
    "think": "true, false, or an effort of the reasoning.",
    "thinking": "Whether the model reasons before it answers.",
    "thread": "Refused with a code by which the SDK falls back to whole conversations.",
    "timeout": "Seconds until the end, after which it fails.",
    "timestamp_granularities": "segment, with the response_format verbose_json.",
    "token_ids_logprob": "Tokens whose log probabilities are returned at each position.",
    "tokens": "Token ids.",
    "tool_call_parser": "The format of tool calls by its name.",
    "tool_choice": "Whether a tool is called: auto, none, required, or a certain tool.",
    "tools": "The functions that the model may call, with JSON schemas of their arguments.",
    "top_k": "Samples among so many of the likeliest tokens.",
    "top_logprobs_num": "Number of alternatives with log probabilities at each position.",
    "top_n": "So many of the best are returned; left out: all.",
    "top_p": "Samples among the likeliest tokens that together have this probability.",
    "EmbedBody.truncate": "Cuts what is too long instead of refusing it.",
    "video_data": "Videos for the marks of the text: URLs or base64.",
    "use_audio_in_video": "The model is given the sounds of videos, too.",
    "use_activation": "false returns logits instead of probabilities.",
    "weight_version": "A name for the new weights, which answers carry.",
    "with_stack": "Records the stacks of Python.",
    "record_shapes": "Records the shapes of tensors.",
    "CallBody.text": "An answer of a model.",
    "ReasoningBody.text": "An answer of a model.",
    "ResponseBody.text": "`format`: text, json_object, or json_schema, which a grammar enforces.",
    "OpenSessionBody.streaming": "Each request continues the previous one.",
    "OpenSessionBody.timeout": "Seconds without a request after which the session is closed.",
    "EncodeBody.text": "The text, or a list of texts, to be embedded.",
}
_NO_EFFECT = """
billing_policy cache_control client_metadata container conversation_id diagnostics
dump_requests_threshold expires_after external_trace_header fallback_credit_token inference_geo
keep_pause log_metrics lora_int_id no_logs prompt_cache_options prompt_cache_retention
recapture_cuda_graph received_time safety_identifier shift speed token_step torch_empty_cache truncate
truncation user_profile_id verbose verbosity workspace_id
"""
_REFUSED = """
access_programs background_options compaction context crash_dump_folder
dump_requests_exclude_meta_keys dump_requests_folder enable_response_messages fallbacks height
image is_async lora_id manifest max_thinking_tokens max_tool_calls mcp_servers
output_expires_after previous_input_messages previous_response require_reasoning return_bytes return_entropy
return_sampling_mask steps template width
"""
WITHOUT_EFFECT, NOT_SERVED = frozenset(_NO_EFFECT.split()), frozenset(_REFUSED.split())


def description(body: str, field: str) -> str:
    """What a field of a body means; empty: its name says it."""
    name = body.rpartition(".")[2]
    if body in TABLED and (tabled := _tabled(field)):
        return f"{DESCRIPTIONS[field]} {tabled}" if len(tabled) < SHORT and field in DESCRIPTIONS else tabled
    for key in (f"{name}.{field}", field):
        if key in DESCRIPTIONS:
            return DESCRIPTIONS[key]
    if field in WITHOUT_EFFECT:
        return NO_EFFECT
    return REFUSED if field in NOT_SERVED else _tabled(field)


def _tabled(field: str) -> str:
    """The description in the table of chats and completions."""
    row = PARAMETERS.get(field)
    if row is None:
        return ""
    begin = {"works": "", "no effect": NO_EFFECT, "400": REFUSED}[row.status]
    note = row.note[:1].upper() + row.note[1:] + "." * bool(row.note and not row.note.endswith("."))
    return " ".join(part for part in (begin, note) if part)
