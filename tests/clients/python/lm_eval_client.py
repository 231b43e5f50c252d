"""lm-eval: log likelihoods over completions, answers over chats, on three questions written here."""

# /// script
# dependencies = ["lm-eval[api]==0.4.13"]
# ///

import json
import os
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import lm_eval
from lm_eval.tasks import TaskManager

URL = os.environ["RUNTIME_URL"]
questions = [
    {"question": f"Count from 1 to {n}.", "answer": ", ".join(map(str, range(1, n + 1)))} for n in (3, 5, 7)
]
Path("questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
COMMON = f"""
dataset_path: json
dataset_kwargs:
  data_files:
    test: {Path.cwd()}/questions.jsonl
test_split: test
doc_to_text: "{{{{question}}}}"
"""
Path("counting.yaml").write_text(
    f"task: counting{COMMON}doc_to_target: answer\noutput_type: generate_until\n"
    "generation_kwargs: {until: [], max_gen_toks: 60, do_sample: false}\n"
    "metric_list:\n  - metric: exact_match\n"
)
Path("likelihood.yaml").write_text(
    f"task: likelihood{COMMON}doc_to_target: answer\noutput_type: loglikelihood\n"
    "metric_list:\n  - metric: perplexity\n"
)


def evaluate(model: str, path: str, task: str, **options: object) -> dict[str, float]:
    found = lm_eval.simple_evaluate(
        model=model,
        model_args={
            "model": "pocket",
            "base_url": URL + path,
            "max_length": 2048,
            "num_concurrent": 2,
            "max_retries": 1,
            **options,
        },
        tasks=[task],
        task_manager=TaskManager(include_path=str(Path.cwd())),
        apply_chat_template=model == "local-chat-completions",
        bootstrap_iters=0,
    )
    assert found is not None
    return found["results"][task]


chat = evaluate("local-chat-completions", "/v1/chat/completions", "counting")
assert chat["exact_match,none"] == 1.0, chat
print("ok: local-chat-completions, generate_until")
text = evaluate(
    "local-completions", "/v1/completions", "likelihood", tokenizer_backend="remote", tokenized_requests=True
)
assert text["perplexity,none"] > 0, text
print("ok: local-completions, loglikelihood, remote tokenizer")
