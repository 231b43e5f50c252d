"""What each route answers: the types that its answers and the events of its stream are encoded as. The
OpenAPI document is made of this."""

from typing import Any

from msgspec import Struct

from runtime.http.admin import memory_saver as memory_saver
from runtime.http.anthropic import message_response as anthropic
from runtime.http.embeddings import embedding_response as vectors
from runtime.http.errors import AnthropicError, OllamaError, OpenAIError
from runtime.http.native import native_response as native
from runtime.http.ollama import ollama_response as ollama
from runtime.http.openai import completion_response as openai
from runtime.http.openai.batches import Batch
from runtime.http.openai.files import File
from runtime.http.openai.responses import response_object as responses
from runtime.service import Health


class Told(Struct, frozen=True):
    """The types of one route's JSON: of the whole answer, and where it streams of one event or line. Several:
    one of them."""

    answer: tuple[Any, ...]
    event: tuple[Any, ...] = ()


# the other routes: as OpenAI's
ERRORS: dict[str, Any] = {"OpenAI": OpenAIError, "Anthropic": AnthropicError, "Ollama": OllamaError}

_RESPONSE = Told((responses.Response,), (responses.ResponseEvent,))
_SCORES = Told((vectors.Scores, vectors.LabelScores))
_TOKENS, _TEXT = Told((native.Tokenized,)), Told((native.Detokenized,))
_RANKING, _MODEL, _OPTIONS = Told((vectors.Ranking,)), Told((native.ModelInfo,)), Told((dict[str, Any],))
_ENCODED = Told((native.Encoded, list[native.Encoded]))
_CLASSES = Told((vectors.Classes, native.Encoded, list[native.Encoded]))

ANSWERS: dict[str, Told] = {  # by path; a method before it where another one answers something else
    "/v1/chat/completions": Told((openai.ChatCompletion,), (openai.ChatChunk, OpenAIError)),
    "/v1/completions": Told((openai.Completion,), (openai.Completion, OpenAIError)),
    "/v1/responses": _RESPONSE,
    "/v1/responses/input_tokens": Told((responses.InputTokens,)),
    "/v1/responses/{id}": _RESPONSE,
    "DELETE /v1/responses/{id}": Told((openai.Deleted,)),
    "/v1/responses/{id}/cancel": Told((responses.Response,)),
    "/v1/responses/{id}/input_items": Told((openai.ItemPage,)),
    "/v1/models": Told((openai.Models,)),
    "/v1/models/{name}": Told((openai.Model,)),
    "POST /v1/files": Told((File,)),
    "/v1/files": Told((openai.FilePage,)),
    "/v1/files/{id}": Told((File,)),
    "DELETE /v1/files/{id}": Told((openai.Deleted,)),
    "POST /v1/batches": Told((Batch,)),
    "/v1/batches": Told((openai.BatchPage,)),
    "/v1/batches/{id}": Told((Batch,)),
    "/v1/batches/{id}/cancel": Told((Batch,)),
    "/v1/messages": Told((anthropic.Message,), (anthropic.MessageEvent, AnthropicError)),
    "/v1/messages/count_tokens": Told((anthropic.TokenCount,)),
    "/api/chat": Told((ollama.ChatLine,), (ollama.ChatLine, OllamaError)),
    "/api/generate": Told((ollama.GenerateLine,), (ollama.GenerateLine, OllamaError)),
    "/api/embed": Told((ollama.Embeddings,)),
    "/api/embeddings": Told((ollama.Embedding,)),
    "/api/tags": Told((ollama.Tags,)),
    "/api/ps": Told((ollama.Processes,)),
    "/api/version": Told((native.Version,)),
    "/api/show": Told((ollama.Shown,)),
    "/generate": Told((native.Generated, list[native.Generated]), (native.Generated, OpenAIError)),
    "/tokenize": _TOKENS,
    "/v1/tokenize": _TOKENS,
    "/detokenize": _TEXT,
    "/v1/detokenize": _TEXT,
    "/parse_function_call": Told((native.ParsedCalls,)),
    "/separate_reasoning": Told((native.ParsedReasoning,)),
    "/get_model_info": _MODEL,
    "/model_info": _MODEL,
    "/server_info": _OPTIONS,
    "/get_server_info": _OPTIONS,
    "/version": Told((native.Version,)),
    "/v1/loads": Told((native.Loads,)),
    "/get_load": Told((list[native.OldLoad],)),
    "/open_session": Told((str,)),
    "/v1/embeddings": Told((vectors.Embeddings,)),
    "/pooling": Told((vectors.PooledList,)),
    "/encode": _ENCODED,
    "/score": _SCORES,
    "/v1/score": _SCORES,
    "/rerank": _RANKING,
    "/v1/rerank": _RANKING,
    "/v2/rerank": _RANKING,
    "/classify": _CLASSES,
    "/v1/classify": _CLASSES,
    "/health": Told((Health,)),
    "/ping": Told((Health,)),
    "/health_generate": Told((native.Probed,)),
    "/openapi.json": Told((dict[str, Any],)),
    "/pause_generation": Told((native.Done,)),
    "/continue_generation": Told((native.Done,)),
    "/abort_request": Told((native.Aborted,)),
    "/load_lora_adapter": Told((native.Adapters,)),
    "/unload_lora_adapter": Told((native.Adapters,)),
    "/release_memory_occupation": Told((memory_saver.Occupation,)),
    "/resume_memory_occupation": Told((memory_saver.Occupation,)),
    "/update_weights_from_disk": Told((memory_saver.Updated,)),
    "/start_profile": Told((native.Profiled,)),
    "/stop_profile": Told((native.Profiled,)),
    **dict.fromkeys(
        (f"/{word}_expert_distribution_record" for word in ("start", "stop", "dump")),
        Told((native.ExpertRecord,)),
    ),
}
NOTHING = {  # refused, or empty
    "/api/pull",
    "/api/push",
    "/api/create",
    "/api/copy",
    "/api/delete",
    "/api/blobs/{digest}",
    "/close_session",
}


def told(method: str, path: str) -> Told | None:
    """None: no JSON."""
    return ANSWERS.get(f"{method} {path}", ANSWERS.get(path))
