"""The chat templates that have names, in the models' published prompt formats."""

import pytest

from runtime.errors import InvalidRequest
from runtime.messages.requests import Chat
from runtime.text.builtin_templates import TEMPLATES
from runtime.text.chat_template import ChatTemplates

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "V"},
]
WANT = {
    "alpaca": "S\n\n### Instruction:\nU\n\n### Response:\nA</s>\n\n### Instruction:\nV\n\n### Response:\n",
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
    "<|im_start|>assistant\nA<|im_end|>\n<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n",
    "deepseek": "<s>S\n\nUser: U\n\nAssistant: A</s>User: V\n\nAssistant:",
    "gemma-it": "<s><start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
    "<start_of_turn>user\nV<end_of_turn>\n<start_of_turn>model\n",
    "llama-2": "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nU [/INST] A </s><s>[INST] V [/INST]",
    "llama-3": "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nV<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<s>[INST] S\n\nU [/INST] A</s>[INST] V [/INST]",
    "phi-3": "<|system|>\nS<|end|>\n<|user|>\nU<|end|>\n<|assistant|>\nA<|end|>\n"
    "<|user|>\nV<|end|>\n<|assistant|>\n",
    "vicuna": "S USER: U ASSISTANT: A</s> USER: V ASSISTANT:",
    "zephyr": "<|system|>\nS</s>\n<|user|>\nU</s>\n<|assistant|>\nA</s>\n<|user|>\nV</s>\n<|assistant|>\n",
}
ALIASES = {
    "llama-2-chat": "llama-2",
    "llama-3-instruct": "llama-3",
    "vicuna_v1.1": "vicuna",
    "qwen": "chatml",
}


def test_every_name_has_its_example() -> None:
    assert TEMPLATES.keys() == WANT.keys() | ALIASES.keys()


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_a_conversation(name: str) -> None:
    assert (
        ChatTemplates({"default": TEMPLATES[name]}, TOKENS).render(Chat(CHAT))
        == WANT[ALIASES.get(name, name)]
    )


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_without_a_system_message(name: str) -> None:
    text = ChatTemplates({"default": TEMPLATES[name]}, TOKENS).render(Chat(CHAT[1:2]))
    assert "U" in text and "None" not in text and ("<<SYS>>" not in text)


def test_qwen_has_a_system_message_of_its_own() -> None:
    text = ChatTemplates({"default": TEMPLATES["qwen"]}, TOKENS).render(Chat(CHAT[1:2]))
    assert text.startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n")


def test_a_role_that_a_format_lacks_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not tool"):
        ChatTemplates({"default": TEMPLATES["mistral"]}, TOKENS).render(
            Chat([*CHAT, {"role": "tool", "content": "1"}])
        )
