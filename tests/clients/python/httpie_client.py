"""HTTPie: an answer and a stream."""

# /// script
# dependencies = ["httpie==3.2.4"]
# ///

import os
import subprocess
import sys
from pathlib import Path

HTTP = str(Path(sys.executable).parent / "http")
ASK = [
    "--ignore-stdin",
    "--check-status",
    os.environ["RUNTIME_URL"] + "/v1/chat/completions",
    "model=pocket",
    "temperature:=0",
    "messages[0][role]=user",
    "messages[0][content]=Count from 1 to 5.",
]
done = subprocess.run([HTTP, *ASK], capture_output=True, text=True, check=True)
assert "1, 2, 3, 4, 5" in done.stdout
done = subprocess.run([HTTP, "--stream", *ASK, "stream:=true"], capture_output=True, text=True, check=True)
assert done.stdout.strip().endswith("data: [DONE]")
print("ok: http, --stream")
