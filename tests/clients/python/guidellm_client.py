"""GuideLLM: a benchmark of three synthetic requests over chats, with the model's own tokenizer."""

# /// script
# dependencies = ["guidellm==0.8.1"]
# ///

import json
import os
import subprocess
import sys
from pathlib import Path

POCKET = Path(__file__).parents[3] / "runtime" / "pocket"
done = subprocess.run(
    [
        str(Path(sys.executable).parent / "guidellm"),
        "run",
        "--backend",
        f"kind=openai_http,target={os.environ['RUNTIME_URL']},model=pocket",
        "--profile",
        "kind=synchronous",
        "--constraint",
        "kind=max_requests,count=3",
        "--tokenizer",
        f"kind=hf_auto,model={POCKET}",
        "--data",
        "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
        "--disable-console-interactive",
    ],
    env=os.environ | {"HF_HUB_OFFLINE": "1"},
    capture_output=True,
    text=True,
    check=False,
)
assert done.returncode == 0, done.stdout + done.stderr
(benchmark,) = json.loads(Path("benchmarks.json").read_text())["benchmarks"]
requests = benchmark["requests"]
assert requests["successful"] and not requests["errored"], requests["errored"]
print("ok: run, synthetic requests")
