"""Methods of the library's engines that operators use, with SGLang's names. HTTP has routes of the same
names."""

from collections.abc import Sequence
from functools import partial

from runtime.actors.blocking import Blocking
from runtime.errors import InvalidRequest
from runtime.http.embeddings.library import Vectors
from runtime.messages.memory import Part
from runtime.messages.scheduler import PauseMode
from runtime.service import AdapterControls


class EngineControls(Vectors):
    """Methods of Engine that affect all its requests."""

    async def flush_cache(self) -> int:
        """Empties the prefix cache. -> pages freed. Raises Busy while sequences run."""
        return await self._service.control.flush()

    async def pause_generation(self, mode: PauseMode = "abort") -> None:
        """Plans no more steps. Running sequences end (abort), wait again (retract) or keep their pages
        (in_place)."""
        await self._service.control.pause(mode)

    async def continue_generation(self) -> None:
        """Ends a pause."""
        await self._service.control.resume()

    def abort_request(self, rid: str = "", *, abort_all: bool = False) -> int:
        """Ends the requests whose ids begin with `rid`, or all. -> how many"""
        return self._service.control.abort("" if abort_all else rid) if rid or abort_all else 0

    async def release_memory_occupation(self, tags: Sequence[Part] | None = None) -> tuple[Part, ...]:
        """The ranks release these parts of their memory, or all, until they are resumed; requests wait. ->
        the parts that are released now. Raises InvalidRequest without enable_memory_saver, Busy while
        requests run, Unavailable."""
        return await self._service.memory_saver.release(tags)

    async def resume_memory_occupation(self, tags: Sequence[Part] | None = None) -> tuple[Part, ...]:
        """The ranks resume these parts, or all. -> the parts that are still released. Raises Unavailable, as
        when the device lacks memory for them."""
        return await self._service.memory_saver.resume(tags)

    async def update_weights_from_disk(
        self,
        model_path: str,
        load_format: str | None = None,
        *,
        weight_version: str | None = None,
        flush_cache: bool = True,
    ) -> None:
        """Replaces the weights by those of another checkpoint of the same model. Raises InvalidRequest for
        one that cannot be loaded, Busy, Unavailable."""
        await self._service.memory_saver.update_weights(
            model_path, load_format, weight_version, flushes=flush_cache
        )

    @property
    def adapters(self) -> AdapterControls:
        """Has `load(name, folder)` and `unload(name)` for LoRA adapters. Raises InvalidRequest without
        enable_lora."""
        if self._service.adapters is None:
            raise InvalidRequest("this engine has no adapters (enable_lora, lora_paths)")
        return self._service.adapters

    def open_session(self, capacity: int, session_id: str | None = None) -> str:
        """Opens a session, which keeps the tokens of its requests: one with `session=SessionParams(id=...,
        rid=...)` continues an earlier one. -> the session's id"""
        return self._service.control.open_session(capacity, session_id)

    def close_session(self, session_id: str) -> None:
        """Closes a session. Raises NotFound."""
        self._service.control.close_session(session_id)


class BlockingEngineControls(Blocking):
    """The methods of EngineControls for code without an event loop."""

    _engine: EngineControls

    def flush_cache(self) -> int:
        """Empties the prefix cache. -> pages freed"""
        return self._call(self._engine.flush_cache)

    def pause_generation(self, mode: PauseMode = "abort") -> None:
        """Plans no more steps; see EngineControls.pause_generation for `mode`."""
        self._call(self._engine.pause_generation, mode)

    def continue_generation(self) -> None:
        """Ends a pause."""
        self._call(self._engine.continue_generation)

    def abort_request(self, rid: str = "", *, abort_all: bool = False) -> int:
        """Ends the requests whose ids begin with `rid`, or all. -> how many"""
        return int(self._call(partial(self._engine.abort_request, rid, abort_all=abort_all)))

    def release_memory_occupation(self, tags: Sequence[Part] | None = None) -> tuple[Part, ...]:
        """The ranks release these parts of their memory, or all. -> the parts that are released now"""
        return tuple(self._call(self._engine.release_memory_occupation, tags))

    def resume_memory_occupation(self, tags: Sequence[Part] | None = None) -> tuple[Part, ...]:
        """The ranks resume these parts, or all. -> the parts that are still released"""
        return tuple(self._call(self._engine.resume_memory_occupation, tags))

    def update_weights_from_disk(
        self,
        model_path: str,
        load_format: str | None = None,
        *,
        weight_version: str | None = None,
        flush_cache: bool = True,
    ) -> None:
        """Replaces the weights by those of another checkpoint of the same model."""
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
        """Opens a session. -> its id"""
        return str(self._call(self._engine.open_session, capacity, session_id))

    def close_session(self, session_id: str) -> None:
        """Closes a session. Raises NotFound."""
        self._call(self._engine.close_session, session_id)
