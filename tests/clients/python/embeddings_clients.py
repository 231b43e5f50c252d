"""Embeddings through the clients of OpenAI, Ollama, LangChain and litellm: the vectors are the same."""

# /// script
# dependencies = [
#   "openai==2.54.0",
#   "ollama==0.6.3",
#   "langchain-openai==1.7.3",
#   "litellm==1.106.2",
# ]
# server = "embedder"
# ///

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it looks for one on the net

import litellm
import ollama
import openai
from langchain_openai import OpenAIEmbeddings

URL = os.environ["RUNTIME_URL"]
TEXTS = ["What is the weather in Oslo?", "Count from 1 to 5."]


def close(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and all(abs(a - b) < 1e-4 for a, b in zip(one, other, strict=True))


plain = openai.OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0)
vectors = [row.embedding for row in plain.embeddings.create(model="pocket", input=TEXTS).data]
floats = plain.embeddings.create(model="pocket", input=TEXTS, encoding_format="float").data
assert all(map(close, vectors, [row.embedding for row in floats])) and not close(*vectors)
print("ok: openai: base64, float")

assert all(map(close, vectors, ollama.Client(URL).embed("pocket", TEXTS).embeddings))
print("ok: ollama: embed")

# by default it sends token ids of OpenAI's tokenizer, which mean nothing to another model
chain = OpenAIEmbeddings(
    model="pocket", base_url=URL + "/v1", api_key="none", max_retries=0, check_embedding_ctx_length=False
)
assert all(map(close, vectors, chain.embed_documents(TEXTS)))
print("ok: langchain: embed_documents without check_embedding_ctx_length")

answer = litellm.embedding(
    "openai/pocket", TEXTS, api_base=URL + "/v1", api_key="none", encoding_format="float"
)
assert all(map(close, vectors, [row["embedding"] for row in answer.data]))
print("ok: litellm: embedding")
