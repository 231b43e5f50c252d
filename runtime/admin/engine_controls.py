"""What operators do to an engine of the library face; the names are SGLang's. HTTP has the same under the
same names."""

from collections.abc import Sequence
from functools import partial

from runtime.actors.blocking import Blocking
from runtime.errors import InvalidRequest
from runtime.http.embeddings.library import Vectors
from runtime.messages.memory import Part
from runtime.messages.scheduler import PauseMode
from runtime.service import AdapterControls


class Controlled(Vectors):
    """The part of an engine that changes it for everybody."""

    async def flush_cache(self) -> int:
        """Empties the prefix cache. -> pages freed. Raises Busy while sequences run."""
        return await self._service.control.flush()

    async def pause_generation(self, mode: PauseMode = "abort") -> None:
        """Plans no more steps; what runs ends (abort), waits again (retract) or stays where it is
        (in_place)."""
        await self._service.control.pause(mode)

    async def continue_generation(self) -> None:
        await self._service.control.resume()

    def abort_request(self, rid: str = "", *, abort_all: bool = False) -> int:
        """Ends the requests whose ids begin with `rid`, or all. -> how many"""
        return self._service.control.abort("" if abort_all else rid) if rid or abort_all else 0

    async def release_memory_occupation(self, tags: Sequence[Part] | None = None) -> tuple[Part, ...]:
        """The ranks give back what is named, or everything, until it is taken again; requests wait. -> what
        is given back now. Raises InvalidRequest without enable_memory_saver, Busy while requests run,
        Unavailable."""
        return await self._service.memory_saver.release(tags)

    async def resume_memory_occupation(self, tags: Sequence[Part] | None = None) -> tuple[Part, ...]:
        """The ranks take it again. -> what is still given back. Raises Unavailable, for one when there is no
        room for it."""
        return await self._service.memory_saver.resume(tags)

    async def update_weights_from_disk(
        self,
        model_path: str,
        load_format: str | None = None,
        *,
        weight_version: str | None = None,
        flush_cache: bool = True,
    ) -> None:
        """The weights of another checkpoint of the same model. Raises InvalidRequest for one that is of no
        use, Busy, Unavailable."""
        await self._service.memory_saver.update_weights(
            model_path, load_format, weight_version, flushes=flush_cache
        )

    @property
    def adapters(self) -> AdapterControls:
        """`load(name, folder)` and `unload(name)` low-rank adapters. Raises InvalidRequest where there are
        none (enable_lora)."""
        if self._service.adapters is None:
            raise InvalidRequest("this engine has no adapters (enable_lora, lora_paths)")
        return self._service.adapters

    def open_session(self, capacity: int, session_id: str | None = None) -> str:
        """Keeps the tokens of requests, so that `session=SessionParams(id=..., rid=...)` goes on from one. ->
        its id"""
        return self._service.control.open_session(capacity, session_id)

    def close_session(self, session_id: str) -> None:
        self._service.control.close_session(session_id)


class BlockingControlled(Blocking):
    """The same for code without a loop; see Controlled for what each does."""

    _engine: Controlled

    def flush_cache(self) -> int:
        return int(self._call(self._engine.flush_cache))

    def pause_generation(self, mode: PauseMode = "abort") -> None:
        self._call(self._engine.pause_generation, mode)

    def continue_generation(self) -> None:
        self._call(self._engine.continue_generation)

    def abort_request(self, rid: str = "", *, abort_all: bool = False) -> int:
        return int(self._call(partial(self._engine.abort_request, rid, abort_all=abort_all)))

    def release_memory_occupation(self, tags: Sequence[Part] | None = None) -> tuple[Part, ...]:
        return tuple(self._call(self._engine.release_memory_occupation, tags))

    def resume_memory_occupation(self, tags: Sequence[Part] | None = None) -> tuple[Part, ...]:
        return tuple(self._call(self._engine.resume_memory_occupation, tags))

    def update_weights_from_disk(
        self,
        model_path: str,
        load_format: str | None = None,
        *,
        weight_version: str | None = None,
        flush_cache: bool = True,
    ) -> None:
        self._call(
            partial(
                self._engine.update_weights_from_disk,
                model_path,
                load_format,
                weight_version=weight_version,
                flush_cache=flush_cache,
            )
        )

    def open_session(self, capacity: int, session_id: str | None = None) -> str:
        return str(self._call(self._engine.open_session, capacity, session_id))

    def close_session(self, session_id: str) -> None:
        self._call(self._engine.close_session, session_id)
