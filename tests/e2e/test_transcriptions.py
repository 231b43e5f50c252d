"""/v1/audio/transcriptions and /v1/audio/translations, with files that clients send, against what
transformers makes of the same sounds."""

import io
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile
import torch
from tokenizers import Tokenizer
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

import runtime
from runtime.http.openai.audio.windows import windows
from tests.models.make_audio import RATE, SOUND_PREPARATION, sound
from tests.models.make_whisper import END, IDS, make_whisper

TIMES = ("<|0.30|>", "<|0.60|>")  # the only timestamps of answers: a random model says little else
SUPPRESSED = [
    *range(100, 120),
    IDS["<|startoftranscript|>"],
    IDS["<|nospeech|>"],
    *(id for name, id in IDS.items() if name[2].isdigit() and name not in TIMES),
]
COUNT = 12
PATH, TRANSLATE = "/v1/audio/transcriptions", "/v1/audio/translations"
SHORT = sound(2, 7777)
LONG = np.concatenate([sound(3, 12000), np.zeros(800, np.float32), sound(4, 9000), sound(5, 6000)])
LANGUAGES = [IDS["<|en|>"], IDS["<|de|>"]]
Made = tuple[WhisperForConditionalGeneration, Tokenizer, runtime.Engine]


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WhisperForConditionalGeneration]:
    folder = tmp_path_factory.mktemp("whisper")
    model = make_whisper(folder)
    path = folder / "generation_config.json"
    fields = json.loads(path.read_text()) | {"suppress_tokens": SUPPRESSED, "is_multilingual": True}
    path.write_text(json.dumps(fields))
    return folder, model


@pytest.fixture
async def made(whisper: tuple[Path, WhisperForConditionalGeneration]) -> AsyncIterator[Made]:
    folder, model = whisper
    options: dict[str, Any] = {"num_threads": 1, "dtype": "float32", "page_size": 4}
    options |= {"served_model_name": "whisper", "max_running_requests": 4}
    async with runtime.Engine(model_path=str(folder), **options) as engine:
        yield model, Tokenizer.from_file(str(folder / "tokenizer.json")), engine


def wav(samples: np.ndarray) -> bytes:
    """A file of these samples, without loss."""
    soundfile.write(file := io.BytesIO(), samples, RATE, "FLOAT", format="WAV")
    return file.getvalue()


def expected(
    made: Made,
    samples: np.ndarray,
    *names: str,
    before: Sequence[int] = (),
    suppressed: Sequence[int] = SUPPRESSED,
) -> list[int]:
    """What transformers says of a sound behind the tokens `before` and those of these names."""
    model = made[0]
    features = WhisperFeatureExtractor(**SOUND_PREPARATION)(samples, sampling_rate=RATE, return_tensors="pt")[
        "input_features"
    ]
    tokens = [*before, *(IDS[f"<|{name}|>"] for name in names)]
    found: list[int] = []
    with torch.inference_mode():
        while len(found) < COUNT:
            ids = torch.tensor([[*tokens, *found]])
            logits = model(input_features=features, decoder_input_ids=ids, use_cache=False).logits[0, -1]
            logits[list(suppressed)] = -torch.inf
            if not found:
                logits[END] = -torch.inf
            found.append(int(logits.argmax()))
            if found[-1] == END:
                break
    return found


def language(made: Made, samples: np.ndarray) -> str:
    """The likeliest of the two languages."""
    model = made[0]
    features = WhisperFeatureExtractor(**SOUND_PREPARATION)(samples, sampling_rate=RATE, return_tensors="pt")[
        "input_features"
    ]
    with torch.inference_mode():
        ids = torch.tensor([[IDS["<|startoftranscript|>"]]])
        logits = model(input_features=features, decoder_input_ids=ids).logits[0, -1]
    return ("en", "de")[int(logits[LANGUAGES].argmax())]


def texts(made: Made, samples: np.ndarray, *names: str) -> str:
    """The text of all windows of a sound."""
    found = [
        made[1].decode(expected(made, samples[begin:end], *names)) for begin, end in windows(samples, RATE, 1)
    ]
    return "".join(found).strip()


@pytest.mark.anyio
async def test_texts_are_those_of_transformers(made: Made) -> None:
    transport = httpx.ASGITransport(made[2].asgi())
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as http:
        limit = {"max_completion_tokens": str(COUNT)}
        head = ("startoftranscript", "de", "transcribe", "notimestamps")
        german = texts(made, SHORT, *head)
        files = {"file": ("a.wav", wav(SHORT))}
        answer = await http.post(PATH, files=files, data=limit | {"language": "de", "model": "whisper"})
        assert answer.status_code == 200, answer.text
        assert answer.json() == {"text": german, "usage": {"type": "duration", "seconds": 1}}
        plain = await http.post(PATH, files=files, data=limit | {"language": "de", "response_format": "text"})
        assert (plain.text, plain.headers["content-type"]) == (f"{german}\n", "text/plain; charset=utf-8")

        own = language(made, LONG[: windows(LONG, RATE, 1)[0][1]])
        files = {"file": ("a.wav", wav(LONG))}
        for path, task in ((PATH, "transcribe"), (TRANSLATE, "translate")):
            whole = texts(made, LONG, "startoftranscript", own, task, "notimestamps")
            answer = await http.post(path, files=files, data=limit)
            assert answer.json() == {"text": whole, "usage": {"type": "duration", "seconds": 2}}
        await check_stream(http, files, limit, texts(made, LONG, "startoftranscript", own, *head[2:]))
        await check_times(http, made, files, limit, own)
        await check_prompt(http, made)


async def check_stream(http: httpx.AsyncClient, files: Any, limit: dict[str, str], whole: str) -> None:
    """Deltas are the text in order, and the last event has all of it."""
    answer = await http.post(PATH, files=files, data=limit | {"stream": "true"})
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    *deltas, done = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert {one["type"] for one in deltas} == {"transcript.text.delta"}
    assert (done["type"], done["text"]) == ("transcript.text.done", whole)
    assert "".join(one["delta"] for one in deltas).strip() == whole
    assert done["usage"]["output_tokens"] > len(deltas) > 1


async def check_times(
    http: httpx.AsyncClient, made: Made, files: Any, limit: dict[str, str], own: str
) -> None:
    """Segments of all windows, whose times are within them, and as subtitles."""
    body = limit | {"response_format": "verbose_json", "timestamp_granularities[]": "segment"}
    answer = (await http.post(PATH, files=files, data=body)).json()
    head, zero = ("startoftranscript", own, "transcribe", "0.00"), IDS["<|0.00|>"]
    no_plain = [*SUPPRESSED, IDS["<|notimestamps|>"]]
    tokens = [
        token
        for begin, end in windows(LONG, RATE, 1)
        for token in expected(made, LONG[begin:end], *head, suppressed=no_plain)
        if token != END and token < zero
    ]
    assert [token for one in answer["segments"] for token in one["tokens"]] == tokens
    assert (answer["task"], answer["language"], answer["duration"]) == ("transcribe", own, 1.74)
    assert answer["text"] == "".join(one["text"] for one in answer["segments"]).strip()
    times = [time for one in answer["segments"] for time in (one["start"], one["end"])]
    assert times == sorted(times)
    assert times[-1] <= 1.74
    assert all(one["avg_logprob"] < 0 < one["compression_ratio"] for one in answer["segments"])
    count = len(answer["segments"])
    subtitles = (await http.post(PATH, files=files, data=limit | {"response_format": "srt"})).text
    assert subtitles.count(" --> ") == count
    subtitles = (await http.post(PATH, files=files, data=limit | {"response_format": "vtt"})).text
    assert subtitles.startswith("WEBVTT\n\n00:00:00.")
    assert subtitles.count(" --> ") == count


async def check_prompt(http: httpx.AsyncClient, made: Made) -> None:
    """Text that came before is told the model, and special tokens in it are none."""
    prompt = "so far <|de|>"
    ids = [IDS["<|startofprev|>"], *made[1].encode(" so far < |de|>").ids]
    head = ("startoftranscript", "en", "transcribe", "notimestamps")
    tokens = expected(made, SHORT, *head, before=ids)
    body = {"language": "en", "prompt": prompt, "max_completion_tokens": str(COUNT), "stream": "true"}
    answer = await http.post(PATH, files={"file": ("a.wav", wav(SHORT))}, data=body)
    done = json.loads(answer.text.split("data: ")[-1])
    assert done["text"] == made[1].decode(tokens).strip()
    assert done["usage"]["input_tokens"] == len(ids) + len(head)


@pytest.mark.anyio
async def test_the_openai_client(made: Made) -> None:
    transport = httpx.ASGITransport(made[2].asgi())
    http = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60)
    async with openai.AsyncOpenAI(api_key="-", base_url="http://test/v1", http_client=http) as client:
        text = texts(made, SHORT, "startoftranscript", "en", "transcribe", "notimestamps")
        limit = {"extra_body": {"max_completion_tokens": COUNT}}
        file = ("a.wav", wav(SHORT))
        own: dict[str, Any] = {"model": "whisper", "file": file, "language": "en"} | limit
        assert (await client.audio.transcriptions.create(**own)).text == text
        stream = await client.audio.transcriptions.create(stream=True, **own)
        assert [event async for event in stream][-1].text == text
        verbose = await client.audio.transcriptions.create(response_format="verbose_json", **own)
        assert verbose.segments
        assert verbose.duration == 0.49


@pytest.mark.anyio
async def test_refusals_name_the_field(made: Made) -> None:
    transport = httpx.ASGITransport(made[2].asgi())
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as http:
        good = {"file": ("a.wav", wav(SHORT))}
        cases: list[tuple[dict[str, Any], dict[str, str], str]] = [
            ({"file": ("a.wav", b"no sound")}, {}, "file"),
            ({"other": ("a.wav", wav(SHORT))}, {}, "file"),
            (good, {"language": "fr"}, "language"),
            (good, {"language": "transcribe"}, "language"),
            (good, {"temperature": "hot"}, "temperature"),
            (good, {"response_format": "xml"}, "response_format"),
            (good, {"response_format": "srt", "stream": "true"}, "stream"),
            (good, {"timestamp_granularities[]": "word"}, "timestamp_granularities"),
            (good, {"no_such_field": "1"}, "no_such_field"),
            (good, {"model": "other"}, "model"),
        ]
        for files, data, param in cases:
            answer = await http.post(PATH, files=files, data=data)
            assert answer.status_code in (400, 404), (data, answer.text)
            assert answer.json()["error"]["param"] == param, answer.text
        answer = await http.post(PATH, json={"file": "a"})
        assert answer.status_code == 400
        answer = await http.post("/v1/completions", json={"model": "whisper", "prompt": "a"})
        assert "transcribes one sound a request" in answer.text
