"""Text streams beside requests with images: `python -m bench.media streams` measures, and this module run by
itself sends the images, so that what that takes is not in the gaps.

    python -m bench.media_streams --port PORT
"""

import argparse
import asyncio
import io
import os
import socket
import subprocess
import sys
import time
from base64 import b64decode, b64encode
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bench.load import request_bytes
from bench.loop_gaps import Stream, figures

STREAMS = 8


def picture(height: int, width: int, kind: str) -> str:
    """A file of random pixels in base64."""
    pixels = np.random.default_rng(height).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((width, height)).save(file := io.BytesIO(), kind, quality=90)
    return b64encode(file.getvalue()).decode()


def streams(port: int, pid: int, other_port: int, turns: int, seconds: float) -> dict[str, Any]:
    """Gaps between the tokens of text streams in milliseconds, in turns: alone, beside images for the same
    server, and beside images for another one. Of each also the share of a core that each of the server's
    processes took, how long the event loop's thread waited for a core, and the images that were answered."""
    images_for = {"alone": None, "images": port, "control": other_port}
    gaps: dict[str, list[float]] = {label: [] for label in images_for}
    used: dict[str, Counter[str]] = {label: Counter() for label in images_for}
    answered = Counter[str]()
    for _ in range(turns):
        for label, target in images_for.items():
            answered[label] += asyncio.run(turn(port, pid, seconds, target, gaps[label], used[label]))
    total_s = turns * seconds
    return {
        label: figures(values)
        | {f"{name}_%": round(s / total_s * 100, 1) for name, s in used[label].items()}
        | {"images_answered": answered[label]}
        for label, values in gaps.items()
    }


async def turn(
    port: int, pid: int, seconds: float, images_for: int | None, gaps: list[float], used: Counter[str]
) -> int:
    """Adds the streams' gaps within so many seconds to `gaps`, and to `used` what the server's processes
    took. `images_for`: port of the server that gets images; None: there are none. -> number of images that
    were answered meanwhile"""
    process = None
    if images_for is not None:
        words = [sys.executable, "-m", "bench.media_streams", "--port", str(images_for)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()  # it has begun
    text = {"model": "x", "prompt": [9, 8, 7], "stream": True, "ignore_eos": True, "max_tokens": 400}
    loop, asked = asyncio.get_running_loop(), request_bytes(port, "/v1/completions", text)
    before = cpu_of(pid)
    open_streams = [
        (await loop.create_connection(lambda: Stream(asked, gaps), "127.0.0.1", port))[0]
        for _ in range(STREAMS)
    ]
    await asyncio.sleep(seconds)
    used += cpu_of(pid) - before
    answered = 0
    if process is not None:
        process.terminate()
        answered = len(process.communicate()[0].splitlines())
    for one in open_streams:
        one.close()
    return answered


def cpu_of(pid: int) -> Counter[str]:
    """Seconds of a core that a server's processes took, and that its event loop's thread waited for one. What
    decoded a file and has ended is in none of them."""
    found = Counter[str]()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = path.joinpath("stat").read_text("ascii").rpartition(")")[2].split()
            words = path.joinpath("cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if pid in (int(path.name), int(fields[1])):
            name = words[words.index(b"-m") + 1].decode() if b"-m" in words else "other"
            found[name.removeprefix("runtime.")] += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    waited_ns = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text("ascii").split()[1]
    found["loop_waits"] = int(waited_ns) / 1e9
    return found


def send(port: int) -> None:
    """Sends requests with images one after the other, and prints a line for each answer."""
    os.nice(10)
    whole = b64decode(picture(2160, 3840, "JPEG"))
    whole += bytes(-len(whole) % 3)  # so the base64 of what follows can be written behind it
    head, _, tail = image_request(port, b64encode(whole).decode() + "0" * 8).rpartition(b"0" * 8)
    for number in count(time.time_ns() % 10**6):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(head)
            # a comment behind the picture: none was decoded before
            connection.sendall(b64encode(b"%06d" % (number % 10**6)) + tail)
            answer = connection.recv(1 << 16)
            assert b" 200 " in answer.partition(b"\r\n")[0], answer
            print(number, flush=True)


def image_request(port: int, image: str) -> bytes:
    """A chat with an image."""
    part = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{image}"}}
    message = {"role": "user", "content": [part, {"type": "text", "text": "what?"}]}
    body = {"model": "x", "max_tokens": 1, "messages": [message]}
    return request_bytes(port, "/v1/chat/completions", body)


def main() -> None:
    """Sends images."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    send(parser.parse_args().port)


if __name__ == "__main__":
    main()
