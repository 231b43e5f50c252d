"""aider: one message about one file, with streams, in its whole-file form; commits and analytics are off."""

# /// script
# dependencies = ["aider-chat==0.86.2"]
# server = "agents"
# ///

import os
import subprocess
import sys
from pathlib import Path

Path("count.py").write_text("print(1)\n")
done = subprocess.run(
    [
        str(Path(sys.executable).parent / "aider"),
        "--model",
        "openai/pocket",
        "--openai-api-base",
        os.environ["RUNTIME_URL"] + "/v1",
        "--openai-api-key",
        "none",
        "--no-show-model-warnings",
        "--no-git",
        "--no-check-update",
        "--analytics-disable",
        "--yes-always",
        "--edit-format",
        "ask",
        "--message",
        "Count from 1 to 5.",
        "count.py",
    ],
    env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    capture_output=True,
    text=True,
    timeout=200,
    check=False,
)
assert done.returncode == 0, done.stdout + done.stderr
assert "1, 2, 3, 4, 5" in done.stdout and "Tokens:" in done.stdout, done.stdout
print("ok: --message")
