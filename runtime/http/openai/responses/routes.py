"""The routes of /v1/responses, and the answers that are computed in the background."""

from operator import itemgetter
from typing import Any

import anyio
from anyio.abc import TaskGroup
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from runtime import log
from runtime.errors import InternalFault, InvalidRequest, Overloaded, RequestError, Unavailable
from runtime.http.body import read_body
from runtime.http.face import Face
from runtime.http.openai.chat import chat_prompt
from runtime.http.openai.files import page_of
from runtime.http.openai.responses.serve import Wish, answer
from runtime.http.openai.responses.store import OPEN, Kept, ResponseStore
from runtime.http.origin import origin
from runtime.http.replies import json, telling
from runtime.service import Service

MAX_BACKGROUND = 256


class Responses:
    """The answers of one server. `run` is the life of those in the background."""

    def __init__(self, service: Service, store: ResponseStore) -> None:
        self.service = service
        self.store = store
        self._scopes: dict[str, anyio.CancelScope] = {}  # of answers in the background
        self._tasks: TaskGroup | None = None

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                await anyio.sleep_forever()
        finally:
            self._tasks = None
            self.store.close()

    def routes(self, face: Face) -> list[Route]:
        return [
            Route("/v1/responses", self._creating(face), methods=["POST"]),
            Route("/v1/responses/input_tokens", self._counting(face), methods=["POST"]),
            Route("/v1/responses/{id}", telling(self._get)),
            Route("/v1/responses/{id}", telling(self._delete), methods=["DELETE"]),
            Route("/v1/responses/{id}/cancel", telling(self._cancel), methods=["POST"]),
            Route("/v1/responses/{id}/input_items", telling(self._input_items)),
        ]

    def _creating(self, face: Face) -> Any:
        async def create(request: Request) -> ASGIApp:
            wish = Wish(self.service, self.store, await read_body(request.scope, request.receive, face.max_body_bytes))
            serving = answer(self.service, wish, self.store.put)
            serving.exchange.come_from(origin(request.headers, face.tenant_is))
            serving.interval = face.stream_interval
            if not wish.body.background:
                return serving
            if self._tasks is None or len(self._scopes) >= MAX_BACKGROUND:
                raise Overloaded(f"{len(self._scopes)} answers are computed in the background already; try again later")
            wish.response["status"] = "queued"
            kept = wish.kept()
            self.store.put(kept)
            queued = json(wish.response)
            self._tasks.start_soon(self._complete, kept, serving)
            return queued

        return create

    def _counting(self, face: Face) -> Any:
        async def count(request: Request) -> Response:
            wish = Wish(self.service, self.store, await read_body(request.scope, request.receive, face.max_body_bytes))
            ids = await self.service.control.tokenize(chat_prompt(wish.chat))
            return json({"object": "response.input_tokens", "input_tokens": len(ids)})

        return count

    async def _complete(self, kept: Kept, serving: Any) -> None:
        """One answer in the background. It ends in the store, whatever happens."""
        response = kept.response
        response_id = str(response["id"])
        response["status"] = "in_progress"
        self.store.put(kept)
        try:
            with anyio.CancelScope() as scope:
                self._scopes[response_id] = scope
                await serving.complete()
            if scope.cancelled_caught and response_id in self._scopes:
                response["status"] = "cancelled"
                self.store.put(kept)
        except RequestError as error:
            self._fail(kept, error)
        except Exception:
            log.get("responses").exception("an answer in the background failed", response=response_id, exc_info=True)
            self._fail(kept, InternalFault("something went wrong in the server; its log has the details"))
        finally:
            self._scopes.pop(response_id, None)

    def _fail(self, kept: Kept, error: RequestError) -> None:
        code = "rate_limit_exceeded" if isinstance(error, (Overloaded, Unavailable)) else "server_error"
        kept.response.update(status="failed", error={"code": code, "message": error.message})
        self.store.put(kept)

    def _get(self, request: Request) -> Any:
        if request.query_params.get("stream") == "true":
            raise InvalidRequest("a kept response is given whole; leave stream out", param="stream")
        return self.store.find(request.path_params["id"]).response

    def _delete(self, request: Request) -> Any:
        response_id = request.path_params["id"]
        if (scope := self._scopes.pop(response_id, None)) is not None:
            scope.cancel()
        self.store.delete(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    def _cancel(self, request: Request) -> Any:
        kept = self.store.find(request.path_params["id"])
        if not kept.response["background"]:
            raise InvalidRequest("only answers in the background can be cancelled; close the connection of others", param="response_id")
        if (scope := self._scopes.get(str(kept.response["id"]))) is not None and kept.response["status"] in OPEN:
            scope.cancel()
            kept.response["status"] = "cancelled"
        return kept.response

    def _input_items(self, request: Request) -> Any:
        kept = self.store.find(request.path_params["id"])
        limit = request.query_params.get("limit", "20")
        if not limit.isdigit() or not 1 <= int(limit) <= 100:
            raise InvalidRequest("limit must be a number from 1 to 100", param="limit")
        return page_of([*kept.context, *kept.input], after=request.query_params.get("after"), limit=int(limit),
                       order=request.query_params.get("order", "desc"), id_of=itemgetter("id"))
