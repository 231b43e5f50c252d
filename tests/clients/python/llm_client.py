"""llm, the command line tool, as a model of OpenAI's API and through its plugin for Ollama."""

# /// script
# dependencies = ["llm==0.36", "llm-ollama==0.19.1"]
# ///

import os
import subprocess
import sys
from pathlib import Path

URL = os.environ["RUNTIME_URL"]
folder = Path.cwd() / "llm"
folder.mkdir()
(folder / "extra-openai-models.yaml").write_text(
    f"- model_id: mine\n  model_name: pocket\n  api_base: {URL}/v1\n"
    "  supports_tools: true\n  supports_schema: true\n"
)
LLM = str(Path(sys.executable).parent / "llm")


def llm(*arguments: str) -> str:
    environment = os.environ | {"LLM_USER_PATH": str(folder), "OPENAI_API_KEY": "none", "OLLAMA_HOST": URL}
    done = subprocess.run([LLM, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


for name in ("mine", "ollama/pocket"):
    count = "Count from 1 to 5."
    assert llm("-m", name, "-o", "temperature", "0", count) == "1, 2, 3, 4, 5"
    assert llm("-m", name, "-o", "temperature", "0", "--no-stream", count) == "1, 2, 3, 4, 5"
    assert '"stars"' in llm("-m", name, "--no-stream", "--schema", "stars int", "A review of a phone.")
    print(f"ok: {name}: prompt, stream, schema")
