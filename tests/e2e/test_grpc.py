"""`runtime serve --grpc-mode` as a process."""

import json
import subprocess
import sys
import time

import grpc

from runtime.rpc.schema import SERVICE, load

WAIT_S = 60.0


def test_a_server_of_grpc_generates_and_stops() -> None:
    types, methods = load()
    command = [sys.executable, "-m", "runtime", "serve", "--grpc-mode", "--device", "null", "--port", "0", "--log-format", "json"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = next(line for line in process.stderr if "listening" in line)
        url = json.loads(line)["url"]
        assert url.startswith("grpc://")
        with grpc.insecure_channel(url.removeprefix("grpc://")) as channel:
            calls = {name: (channel.unary_stream if several else channel.unary_unary)(
                f"/{SERVICE}/{name}", request_serializer=types[takes].SerializeToString, response_deserializer=types[gives].FromString)
                for name, takes, several, gives in methods}
            deadline = time.monotonic() + WAIT_S
            while calls["Health"](types["HealthRequest"](), timeout=WAIT_S).state != "ready":
                assert time.monotonic() < deadline
                time.sleep(0.05)
            wish = types["GenerateRequest"](text="Once upon a time", sampling_params={"max_new_tokens": 12, "ignore_eos": True})
            messages = list(calls["Generate"](wish, timeout=WAIT_S))
            assert sum(len(message.output_ids) for message in messages) == 12 and messages[-1].finish.reason == "length"
            process.terminate()
            assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
