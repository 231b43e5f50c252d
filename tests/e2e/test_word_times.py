"""Times of words of /v1/audio/transcriptions, against those of transformers' Whisper and its tokenizer."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import torch
from tokenizers import Tokenizer
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration
from transformers.generation.utils import GenerateEncoderDecoderOutput
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

import runtime
from runtime.actors.rank_commands import RankCommands
from runtime.http.openai.audio.windows import windows
from runtime.messages.media import Media
from runtime.preparation.preparer import Preparer
from runtime.text.media_prompts import Prepared
from tests.e2e.test_transcriptions import LONG, PATH, wav
from tests.models.make_audio import RATE, SOUND_PREPARATION
from tests.models.make_whisper import END, IDS, make_whisper

# a window is one segment; what is left are mostly letters and marks
SILENT = [*range(128, 256), *IDS.values()]
COUNT = 30
SPECIAL = 256  # id of the first token without text
HEADS = [[0, 0], [1, 3], [2, 0]]
HEAD = [IDS[f"<|{name}|>"] for name in ("startoftranscript", "en", "transcribe", "0.00")]
ZERO = IDS["<|0.00|>"]
# the likeliest tokens say one thing again and again
SAMPLED = {"max_completion_tokens": COUNT, "temperature": 1.5, "seed": 7}
FORM = {"language": "en", "response_format": "verbose_json"} | SAMPLED
WORDS = FORM | {"timestamp_granularities[]": "word"}
OPTIONS: dict[str, Any] = {"num_threads": 1, "dtype": "float32", "page_size": 4, "max_running_requests": 4}


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whisper")
    make_whisper(folder)
    path = folder / "generation_config.json"
    fields = {"suppress_tokens": SILENT, "is_multilingual": True, "alignment_heads": HEADS}
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


class Answers:
    """The model of transformers, and what it tells of an answer."""

    def __init__(self, folder: Path) -> None:
        self.model = WhisperForConditionalGeneration.from_pretrained(
            folder, attn_implementation="eager"
        ).eval()
        self.tokenizer = tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.shim = SimpleNamespace(
            decode=lambda ids, **_: tokenizer.decode(list(ids)), eos_token_id=END, language="english"
        )

    def times(self, samples: Any, tokens: list[int], *, is_cut: bool) -> list[float]:
        """The times of tokens, of which the first one is that of 0 s."""
        given, aligned = HEAD[:-1], tokens[:-1] if is_cut else tokens
        prepared = WhisperFeatureExtractor(**SOUND_PREPARATION)(
            samples, sampling_rate=RATE, return_attention_mask=True, return_tensors="pt"
        )
        ids = torch.tensor([[*given, *aligned]])
        with torch.inference_mode():
            seen = self.model(prepared["input_features"], decoder_input_ids=ids, output_attentions=True)
        found = self.model._extract_token_timestamps(
            GenerateEncoderDecoderOutput(sequences=ids, cross_attentions=(seen.cross_attentions,)),
            HEADS,
            num_frames=prepared["attention_mask"].sum(-1),
            num_input_ids=len(given),
        )
        return found[0, len(given) :].tolist()

    def words(
        self, samples: Any, begin_s: float, end_s: float, tokens: list[int], *, is_cut: bool
    ) -> list[dict[str, Any]]:
        """Words between timestamps, as in the answer."""
        times, found = self.times(samples, tokens, is_cut=is_cut), []
        runs: list[list[int]] = [[]]
        for place, token in enumerate(tokens):
            if token >= ZERO:
                runs.append([])
            elif token < SPECIAL:
                runs[-1].append(place)
        for places in runs:
            texts, _, indices = _combine_tokens_into_words(
                self.shim, [tokens[place] for place in places], "english"
            )
            for text, inner in zip(texts, indices, strict=True):
                first, last = places[inner[0]], places[inner[-1]]
                start, end = (round(min(begin_s + times[at], end_s), 2) for at in (first - 1, last))
                if text.strip():
                    found.append({"word": text.strip(), "start": start, "end": end})
        return found


def client(engine: runtime.Engine) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(engine.asgi())
    return httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.full)], ids=str
)
async def test_times_are_those_of_transformers(
    options: dict[str, Any], whisper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part of the sound is prepared once, and encoded once."""
    answers, encode, encodings = Answers(whisper), RankCommands.encode, list[int]()
    prepare, prepared = Preparer.prepare, list[bytes]()

    async def spy(self: RankCommands, command: Any) -> Any:
        encodings.append(command.media.id)
        return await encode(self, command)

    def count(self: Preparer, media: Media) -> Prepared:
        prepared.append(media.digest)
        return prepare(self, media)

    monkeypatch.setattr(RankCommands, "encode", spy)
    monkeypatch.setattr(Preparer, "prepare", count)
    async with runtime.Engine(model_path=str(whisper), **OPTIONS | options) as engine, client(engine) as http:
        files = {"file": ("a.wav", wav(LONG))}
        both = FORM | {"timestamp_granularities[]": ["word", "segment"]}
        answer = (await http.post(PATH, files=files, data=both)).json()
        expected, cuts = list[dict[str, Any]](), windows(LONG, RATE, 1)
        for (begin, end), segment in zip(cuts, answer["segments"], strict=True):
            tokens, samples = [ZERO, *segment["tokens"]], LONG[begin:end]
            expected += answers.words(samples, begin / RATE, end / RATE, tokens, is_cut=len(tokens) > COUNT)
        assert len(expected) > 4 and len({one["end"] for one in expected}) > 4
        assert answer["words"] == expected
        assert len(set(prepared)) == len(prepared) == len(cuts)
        assert len(set(encodings)) == len(cuts) and min(encodings) >= 0, "the ranks keep what they encoded"
        texts = ["".join(one["text"].split()) for one in answer["segments"]]
        assert "".join(texts) == "".join(["".join(one["word"].split()) for one in answer["words"]])
        alone = (await http.post(PATH, files=files, data=WORDS)).json()
        assert alone["words"] == expected and "segments" not in alone
        api = openai.AsyncOpenAI(api_key="-", base_url="http://test/v1", http_client=http)
        transcription = await api.audio.transcriptions.create(
            model=str(whisper),
            file=files["file"],
            language="en",
            response_format="verbose_json",
            timestamp_granularities=["word"],
            extra_body=SAMPLED,
        )
        assert transcription.words is not None
        assert [one.model_dump() for one in transcription.words] == expected


@pytest.mark.anyio
async def test_models_without_heads_that_follow_sounds(whisper: Path, tmp_path: Path) -> None:
    for file in whisper.iterdir():
        (tmp_path / file.name).symlink_to(file)
    path = tmp_path / "generation_config.json"
    fields = json.loads(path.read_text())
    path.unlink()
    path.write_text(json.dumps(fields | {"alignment_heads": None}))
    async with runtime.Engine(model_path=str(tmp_path), **OPTIONS) as engine, client(engine) as http:
        answer = await http.post(PATH, files={"file": ("a.wav", wav(LONG))}, data=WORDS)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "timestamp_granularities"
        assert "alignment_heads" in answer.json()["error"]["message"]
