"""Keys of a server that was started with them: what they open, and that they are never printed."""

import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.serving import serve

USER, ADMIN = "s3cret-user", "s3cret-admin"


def test_keys_give_access_and_are_printed_nowhere(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "server.yaml"
    config.write_text(f"api-key: {USER}\n")
    with serve(
        "--device", "null", "--config", str(config), "--admin-api-key", ADMIN, "--log-level", "debug"
    ) as server:
        with pytest.raises(openai.AuthenticationError) as caught:
            server.client.models.list()
        outputs = [str(caught.value)]
        client = server.client.with_options(api_key=USER)
        name = client.models.list().data[0].id
        assert client.completions.create(model=name, prompt="hi", max_tokens=2).usage
        flush = server.url + "/flush_cache"
        assert [
            httpx.post(flush, headers={"authorization": f"Bearer {key}"}).status_code for key in (USER, ADMIN)
        ] == [401, 200]
        for path in ("/server_info", "/get_server_info", "/model_info", "/metrics", "/v1/models", "/health"):
            answer = httpx.get(server.url + path, headers={"x-api-key": USER})
            assert answer.status_code == 200
            outputs.append(answer.text)
        assert "(hidden)" in outputs[1] and '"api_key"' in outputs[1]
        server.process.terminate()
        assert server.process.stderr is not None
        outputs.append(server.process.stderr.read())
    for command in (["check", "explain"], ["check", "explain", "--json"], ["serve", "--port", "x"]):
        done = subprocess.run(
            [sys.executable, "-m", "runtime", *command, "--config", str(config), "--admin-api-key", ADMIN],
            capture_output=True,
            text=True,
            check=False,
        )
        outputs += [done.stdout, done.stderr]
    assert len("".join(outputs)) > 1000 and "s3cret" not in "".join(outputs)
