"""The engine within your own web application: your routes next to those of the APIs.

hypercorn examples/mounted:app        then: curl http://127.0.0.1:8000/llm/v1/models
"""

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

import runtime

llm = runtime.asgi()  # runtime.asgi(model_path="DIR") for a model of yours


async def home(request: Request) -> PlainTextResponse:
    """A route of the application's own."""
    return PlainTextResponse("The model is at /llm/v1/chat/completions.")


app = Starlette(routes=[Route("/", home), Mount("/llm", llm)], lifespan=llm.lifespan)
