"""All operations of the HTTP API by tag, from which the routes and the OpenAPI document are made."""

from runtime.http.admin import (
    adapters,
    control,
    expert_load,
    health,
    live_settings,
    memory_saver,
    model_files,
)
from runtime.http.anthropic import message_batches, messages
from runtime.http.console import routes as console
from runtime.http.embeddings import embeddings, scores
from runtime.http.native import generate, info, invocations, load, parse, sessions
from runtime.http.ollama import embed as ollama_embed
from runtime.http.ollama import models as ollama_models
from runtime.http.ollama import serve as ollama
from runtime.http.openai import chat, completions, models, stored_objects
from runtime.http.openai.audio import routes as audio
from runtime.http.openai.conversations import routes as conversations
from runtime.http.openai.responses import routes as responses
from runtime.http.operation import Operation
from runtime.json_value import JsonDict

DOCUMENT = Operation("GET", "/openapi.json", "This document", answers=(JsonDict,))
PAGE = Operation("GET", "/docs", "This document, to read and try", media="html")

OPERATIONS: dict[str, tuple[Operation, ...]] = {
    "OpenAI": (
        *chat.OPERATIONS,
        *completions.OPERATIONS,
        *responses.OPERATIONS,
        *conversations.OPERATIONS,
        *models.OPERATIONS,
        *audio.OPERATIONS,
        *stored_objects.OPERATIONS,
    ),
    "Anthropic": (*messages.OPERATIONS, *message_batches.OPERATIONS),
    "Ollama": (*ollama.OPERATIONS, *ollama_embed.OPERATIONS, *ollama_models.OPERATIONS),
    "Native": (
        *generate.OPERATIONS,
        *info.OPERATIONS,
        *parse.OPERATIONS,
        *load.OPERATIONS,
        *sessions.OPERATIONS,
        *invocations.OPERATIONS,
    ),
    "Vectors": (*embeddings.OPERATIONS, *scores.OPERATIONS),
    "Health": (*health.OPERATIONS, *console.OPERATIONS, DOCUMENT, PAGE),
    "Control": (
        *control.OPERATIONS,
        *live_settings.OPERATIONS,
        *memory_saver.OPERATIONS,
        *model_files.OPERATIONS,
        *adapters.OPERATIONS,
        *expert_load.OPERATIONS,
    ),
}
