"""POST /v1/audio/transcriptions, /v1/audio/translations: the text of a sound.

A sound that is longer than the model takes is cut where it is quiet, and all parts are transcribed at the
same time. The language is that of the first part.
"""

import time
from functools import partial
from hashlib import sha256
from typing import Literal

from anyio.to_thread import run_sync
from msgspec import Struct, structs
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from runtime.errors import InvalidRequest, RequestError
from runtime.gil import giving_way
from runtime.http import errors
from runtime.http.body import read_bytes, respond_early
from runtime.http.errors import OpenAIError, renamed
from runtime.http.fields.headers import RequestHeaders, read_headers
from runtime.http.fields.model import check_model
from runtime.http.fields.request_id import request_ids
from runtime.http.openai.audio.answers import (
    AudioAnswerFormat,
    SoundFacts,
    TextDelta,
    TextDone,
    Transcription,
    VerboseTranscription,
    WholeAnswer,
    plain,
)
from runtime.http.openai.audio.body import AudioBody, read_fields
from runtime.http.openai.audio.form import Form, read_form
from runtime.http.openai.audio.marks import Marks, language_id, previous_ids, read_marks
from runtime.http.openai.audio.windows import windows
from runtime.http.openai.audio.word_times import WordTimes
from runtime.http.openai.files import new_id
from runtime.http.operation import Operation
from runtime.http.settings import HttpSettings
from runtime.http.streaming.answer_format import Output
from runtime.http.streaming.exchange import Answer, Exchange
from runtime.http.tenant_service import service_for, tenant_in
from runtime.media.settings import MAX_FILE_BYTES
from runtime.messages.media import Media, MediaKind, MediaSource, TranscriptionFacts
from runtime.messages.requests import GenerateRequest, Tokens
from runtime.messages.sampling import SamplingParams
from runtime.service import Service

MAX_BYTES = MAX_FILE_BYTES[MediaKind.AUDIO] + (1 << 16)  # of a form: the file, and its other fields
NAMES = {"max_new_tokens": "max_completion_tokens"}
Task = Literal["transcribe", "translate"]


class Job(Struct, frozen=True, kw_only=True):
    """A sound that is to be transcribed, cut into windows."""

    facts: TranscriptionFacts
    body: AudioBody
    marks: Marks
    task: Task
    parts: list[Media]
    windows_s: list[tuple[float, float]]  # begin and end of each part
    headers: RequestHeaders
    id: str

    def request(self, id: str, ids: list[int], part: Media, params: SamplingParams) -> GenerateRequest:
        """A request for tokens behind the decoder's prompt `ids`."""
        source = MediaSource(kind=MediaKind.AUDIO, param="file", decoded=part)
        return GenerateRequest(
            id=id, prompt=Tokens(ids), params=params, arrival_s=time.monotonic(), media=(source,)
        )


async def transcribe(
    service: Service, form: Form, body: AudioBody, task: Task, headers: RequestHeaders
) -> ASGIApp:
    """The answer for a sound. Raises RequestError."""
    facts = service.card.transcription
    if facts is None:
        raise InvalidRequest("this model transcribes nothing; serve a Whisper model", param="model")
    check_model(service.card, body.model)
    if body.times_words and facts.alignment is None:
        raise InvalidRequest(
            "timestamp_granularities: the generation_config.json of this model has no alignment_heads, so "
            "times of words are not known; take segment",
            param="timestamp_granularities",
        )
    if task == "translate" and not facts.has_languages:
        raise InvalidRequest("this model knows English alone; take transcriptions", param="model")
    source = MediaSource(kind=MediaKind.AUDIO, param="file", data=form.file)
    (sound,) = await service.control.sounds.load([source])
    cuts = await run_sync(giving_way, windows, sound.values, facts.rate, facts.longest_s)
    job = Job(
        facts=facts,
        body=body,
        marks=await read_marks(service.control),
        task=task,
        parts=[part_of(sound, *cut) for cut in cuts],
        windows_s=[(begin / facts.rate, end / facts.rate) for begin, end in cuts],
        headers=headers,
        id=new_id("trsc"),
    )
    language = await language_of(service, job)
    prompt = await decoder_prompt(service, job, language)
    name = service.decode([language]).strip("<|>") if language is not None else "en"
    marks = job.marks
    suppressed = (*facts.suppressed, *((marks.plain,) if body.is_timed else ()))
    params = body.params(tuple(dict.fromkeys(suppressed)))
    ids = request_ids(job.id, len(job.parts))
    answer = Answer(
        service,
        [job.request(id, prompt, part, params) for id, part in zip(ids, job.parts, strict=True)],
        AudioAnswerFormat(
            service,
            SoundFacts(
                task=task,
                language=name,
                temperature=body.temperature,
                windows_s=job.windows_s,
                first_timestamp=marks.first_timestamp,
                is_timed=body.is_timed,
            ),
            VerboseTranscription if body.is_timed else Transcription,
        ),
        is_stream=body.stream,
        names=NAMES,
    )
    answer.exchange.apply_headers(headers)
    kind = body.response_format
    if body.times_words:
        answer.is_large = False  # its tokens are looked at
        return WholeAnswer(answer, word_times(service, job, prompt, name, answer.outputs).respond)
    if body.stream or kind == "json" or kind == "verbose_json":
        return answer
    return WholeAnswer(answer, plain(kind))


def word_times(
    service: Service, job: Job, prompt: list[int], language: str, outputs: list[Output]
) -> WordTimes:
    """What finds the times of words in `outputs`, one for each part of the sound."""
    assert job.facts.alignment is not None, "others are refused"
    return WordTimes(
        service=service,
        facts=job.facts.alignment,
        rate=job.facts.rate,
        prompt=prompt,
        language=language,
        parts=job.parts,
        windows_s=job.windows_s,
        outputs=outputs,
        has_segments=job.body.has_segments,
    )


def part_of(sound: Media, begin: int, end: int) -> Media:
    """A part of a sound, from one sample to another."""
    if (begin, end) == (0, len(sound.values)):
        return sound
    digest = sha256(b"%b %d %d" % (sound.digest, begin, end)).digest()
    return structs.replace(sound, values=sound.values[begin:end], digest=digest)


async def language_of(service: Service, job: Job) -> int | None:
    """The token of the sound's language: the client's, or the likeliest; None: the model knows English
    alone. Raises RequestError."""
    if not job.facts.has_languages:
        if job.body.language not in (None, "en"):
            raise InvalidRequest("language: this model knows English alone; leave it out", param="language")
        return None
    if job.body.language is not None:
        return await language_id(service.control, job.marks, job.body.language)
    params = SamplingParams(
        max_new_tokens=1, temperature=0, allowed_token_ids=job.marks.languages, ignore_eos=True
    )
    request = job.request(f"{job.id}-language", [job.marks.start], job.parts[0], params)
    exchange, output = Exchange(service, [request]), Output()
    exchange.apply_headers(job.headers)
    try:
        exchange.submit(lambda choice, delta: output.add(delta))
        await exchange.ready.wait()
    finally:
        exchange.abort()
    if exchange.failure is not None:
        raise renamed(exchange.failure, NAMES)
    return output.token_ids[0]


async def decoder_prompt(service: Service, job: Job, language: int | None) -> list[int]:
    """The tokens behind which the text of a part begins. Raises InvalidRequest."""
    marks, most = job.marks, service.card.limits.context_len // 2 - 1
    task = () if language is None else (language, getattr(marks, job.task))
    return [
        *await previous_ids(service.control, marks, job.body.prompt, most),
        marks.start,
        *task,
        marks.first_timestamp if job.body.is_timed else marks.plain,
    ]


def routes(service: Service, settings: HttpSettings) -> list[Route]:
    """The routes of both tasks."""
    return [operation.route(partial(_endpoint, service, settings, task)) for operation, task in TASKS]


async def _endpoint(service: Service, settings: HttpSettings, task: Task, request: Request) -> ASGIApp:
    try:
        content = await read_bytes(request.scope, request.receive, MAX_BYTES)
    except RequestError as error:  # not all of it has been read
        return respond_early(errors.error_response(error, errors.path_of(request)))
    form = await run_sync(giving_way, read_form, request.headers.get("content-type", ""), content)
    own = service_for(service, tenant_in(request.scope))
    headers = read_headers(request.headers, settings.label_header)
    answer = await transcribe(own, form, read_fields(form), task, headers)
    if isinstance(answer, Answer):
        answer.interval = settings.stream_interval
    return answer


TRANSCRIBE = Operation(
    "POST",
    "/v1/audio/transcriptions",
    "The text of a sound (Whisper)",
    answers=(Transcription, VerboseTranscription),
    events=(TextDelta, TextDone, OpenAIError),
    media="sse",
    form={"file": "@sound.wav"},
    form_options=tuple([name for name in AudioBody.__struct_fields__ if name != "chunking_strategy"]),
)
TRANSLATE = structs.replace(
    TRANSCRIBE, path="/v1/audio/translations", summary="The text of a sound, in English (Whisper)"
)
OPERATIONS = (TRANSCRIBE, TRANSLATE)
TASKS: tuple[tuple[Operation, Task], ...] = ((TRANSCRIBE, "transcribe"), (TRANSLATE, "translate"))
