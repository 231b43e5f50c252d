"""cohere's client: documents in the order of a query."""

# /// script
# dependencies = ["cohere==7.3.1"]
# server = "embedder"
# ///

import os

import cohere

client = cohere.ClientV2(api_key="none", base_url=os.environ["RUNTIME_URL"])
documents = ["Count from 1 to 5.", "What is the weather in Oslo?", "Tell me a story about a fox."]
order = client.rerank(model="pocket", query="What is the weather in Oslo?", documents=documents, top_n=2)
assert order.results[0].index == 1 and len(order.results) == 2
assert order.results[0].relevance_score >= order.results[1].relevance_score
print("ok: rerank")
