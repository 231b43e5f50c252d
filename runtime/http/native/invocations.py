"""POST /invocations: SageMaker's one route for requests, each of which is of the API that its fields show."""

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType
from starlette.responses import Response

from runtime.errors import InvalidRequest
from runtime.http.embeddings.embedding_response import Embeddings
from runtime.http.embeddings.embeddings import embeddings
from runtime.http.errors import OpenAIError, decode
from runtime.http.openai.chat import chat
from runtime.http.openai.completion_response import ChatChunk, ChatCompletion, Completion
from runtime.http.openai.completions import completions
from runtime.http.operation import HELLO, Operation, Serve
from runtime.http.streaming.exchange import Answer
from runtime.json_value import JsonDict
from runtime.service import Service


class Shape(Struct):
    """The fields by which bodies are told apart."""

    messages: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET


class InvocationBody(Struct):
    """The body of /v1/chat/completions (`messages`), /v1/completions (`prompt`) or /v1/embeddings (`input`),
    with all fields of that route."""

    messages: list[JsonDict] | None = None
    prompt: str | list[str | int | list[int]] | None = None
    input: str | list[str | int | list[int]] | None = None


ROUTES: dict[str, Serve] = {"messages": chat, "prompt": completions, "input": embeddings}

_decoder = msgspec.json.Decoder(Shape)


def invocations(service: Service, content: bytes) -> Answer | Response:
    """The answer of the route that the body is for. Raises RequestError."""
    shape = decode(content, _decoder)
    found = [name for name in ROUTES if getattr(shape, name) is not UNSET]
    if len(found) != 1:
        raise InvalidRequest(
            "give messages (a chat), prompt (a text to continue) or input (texts to embed); there "
            + (f"are {' and '.join(found)}" if found else "is none of them"),
            param=found[1] if found else "messages",
        )
    return ROUTES[found[0]](service, content)


OPERATIONS = (
    Operation(
        "POST",
        "/invocations",
        "Answer, continue or embed, as the body says (SageMaker)",
        body=InvocationBody,
        example={"messages": HELLO},
        answers=(ChatCompletion, Completion, Embeddings),
        events=(ChatChunk, Completion, OpenAIError),
        media="sse",
        serve=invocations,
    ),
)
