"""Gradio's load_chat: a chat page over OpenAI's API, asked through Gradio's own client."""

# /// script
# dependencies = ["gradio==6.31.0", "openai==3.54.0"]
# ///

import os

os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_OFFLINE": "1"}

import gradio
from gradio_client import Client

page = gradio.load_chat(os.environ["RUNTIME_URL"] + "/v1", model="pocket", token="none")
_, url, _ = page.launch(prevent_thread_lock=True, quiet=True)

answer = Client(url, verbose=False).predict(
    {"text": "Count from 1 to 5.", "files": []}, api_name="/open_api_stream"
)
assert "1, 2, 3" in str(answer), answer
page.close()
print("ok: load_chat")
