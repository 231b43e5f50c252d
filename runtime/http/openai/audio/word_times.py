"""Answers with times of words: when all is said, the ranks see once more what each token goes with."""

from functools import partial

import msgspec
from anyio.to_thread import run_sync
from msgspec import Struct, structs
from starlette.responses import Response

from runtime.gil import giving_way
from runtime.http.openai.audio.answers import VerboseTranscription
from runtime.http.openai.audio.segments import Window, spans
from runtime.http.openai.audio.words import Word, first_positions, timed, words_of
from runtime.http.streaming.answer_format import Output
from runtime.messages.media import AlignmentFacts, Media
from runtime.service import Service


class WordTimes(Struct, frozen=True, kw_only=True):
    """A sound's windows, and what the model says of them."""

    service: Service
    facts: AlignmentFacts
    rate: int  # samples a second
    prompt: list[int]  # of each window; its last token is that of 0 s
    language: str
    parts: list[Media]
    windows_s: list[tuple[float, float]]
    outputs: list[Output]
    has_segments: bool

    async def respond(self, answer: object) -> Response:
        """The answer with words. Raises RequestError."""
        assert isinstance(answer, VerboseTranscription)
        words: list[Word] = []
        for part, window_s, output in zip(self.parts, self.windows_s, self.outputs, strict=True):
            if output.token_ids:
                words += await self._words(part, window_s, output)
        answer = structs.replace(answer, words=words)
        if not self.has_segments:
            answer = structs.replace(answer, segments=msgspec.UNSET)
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def _words(self, part: Media, window_s: tuple[float, float], output: Output) -> list[Word]:
        """The words of a window. The token of 0 s counts as said. The last token, be it the end, has the time
        of the one before it: nothing attends from it."""
        is_cut = output.finish is None or output.finish.reason != "stop"
        aligned = output.token_ids[:-1] if is_cut else output.token_ids
        given = len(self.prompt) - 1
        text, tenant = [*self.prompt, *aligned], self.service.tenant.name
        scores = await self.service.control.sounds.align(part, text, given, self.facts, tenant)
        begins = await run_sync(giving_way, first_positions, scores)
        times_s = (begins * (self.facts.samples / self.rate)).tolist()
        times_s.append(times_s[-1])
        window = Window(begin_s=window_s[0], end_s=window_s[1], token_ids=output.token_ids)
        return await run_sync(giving_way, self._timed, window, times_s)

    def _timed(self, window: Window, times_s: list[float]) -> list[Word]:
        decode = partial(self.service.decode, skip_special=True)
        return [
            word
            for _, _, place, ids in spans(window, self.prompt[-1])
            for word in timed(
                words_of(ids, decode, self.language), place + 1, times_s, window.begin_s, window.end_s
            )
        ]
