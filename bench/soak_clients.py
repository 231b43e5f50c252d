"""The clients of bench/soak.py: each kind uses the server in its own way, over and over, and compares every
answer that it can know."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random

from tests.hostile.attack import misanswered
from tests.hostile.case import ADMIN_KEY, CHAT, FORM, NATIVE, RESPONSES, TEXT, USER_KEY, Case, dump, upload
from tests.hostile.corpus import CORPUS
from tests.hostile.fuzz import complaint, fuzzed
from tests.hostile.neighbours import GOOD_KEY, essence
from tests.hostile.wire import Reply, exchange, head

THIRD_KEY = "third-user"
KEYS = (GOOD_KEY, THIRD_KEY)
WAIT_S = 180.0  # for an answer: a queue, and ranks that are started again
KEPT = 2000  # answers that are compared with later ones
SHOWN = 40  # wrong answers that are shown in full
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"enum": ["a", "b"]}},
    "required": ["name", "age", "tags"],
}


class Clients:
    """What all clients share: the server's port, counts by kind and outcome, and the first answer to each
    request, with which every later one to the same request must agree."""

    def __init__(self, port: int, until_s: float, seed: int, adapters: list[str]) -> None:
        """`until_s`: when they stop, on the monotonic clock; `adapters`: folders."""
        self.port = port
        self.adapters = adapters
        self.until_s = until_s
        self.random = Random(seed)
        self.counts: Counter[str] = Counter()
        self.answers: dict[str, tuple[str, ...]] = {}
        self.wrong: list[str] = []
        self.num_seeds = 0

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self.until_s

    def note(self, kind: str, outcome: str, detail: object = "") -> None:
        """Counts an outcome; anything but `ok`, `same` and `left` is shown."""
        self.counts[f"{kind}: {outcome}"] += 1
        if outcome not in ("ok", "same", "left") and len(self.wrong) < SHOWN:
            self.wrong.append(f"{kind}: {outcome} {str(detail)[:400]}")
            print(self.wrong[-1], flush=True)

    async def send(
        self, kind: str, path: str, body: bytes, *, key: str = GOOD_KEY, method: str = "POST", **headers: str
    ) -> Reply | None:
        """One request. An answer that is none, or another than 200, is counted, and None returned."""
        case = Case(
            kind,
            path,
            body,
            key=key,
            method=method,
            headers={k.replace("_", "-"): v for k, v in headers.items()},
        )
        try:
            reply = await exchange(self.port, case.request(), method, WAIT_S)
        except Exception as error:
            self.note(kind, type(error).__name__, repr(error))
            return None
        if reply.status == 503 and b"try again in a moment" in reply.body:  # ranks are being started again
            self.counts[f"{kind}: asked to try again"] += 1
            await asyncio.sleep(1.0)
            return None
        if reply.status != 200:
            self.note(kind, str(reply.status), reply.body)
            return None
        return reply

    def compare(self, kind: str, name: str, reply: Reply | None) -> None:
        """Compares an answer with the first one of this name."""
        if reply is None:
            return
        got, first = essence(reply.body), self.answers.get(name)
        if first is None:
            self.note(kind, "ok")
            if len(self.answers) < KEPT:
                self.answers[name] = got
        else:
            self.note(kind, "same" if got == first else "different", f"{first} {got} {name}")

    def prompt(self) -> list[int]:
        """One of 40 prefixes, the first ones often, and one of four ends."""
        prefix = min(int(self.random.paretovariate(0.7)), 40)
        return [
            *((prefix * k + k // 7) % 90 + 100 for k in range(64 + 4 * prefix)),
            prefix,
            *[self.random.randrange(4)] * 9,
        ]

    # kinds of clients: each method is one round

    async def stream(self) -> None:
        """A stream of a prompt that others send too, greedy or seeded."""
        prompt, seed = self.prompt(), self.random.randrange(3)
        body = dump(
            {
                "prompt": prompt,
                "max_tokens": 24,
                "stream": True,
                "ignore_eos": True,
                "temperature": 0.7 * (seed > 0),
                "seed": seed,
            }
        )
        self.compare(
            "stream", body.hex(), await self.send("stream", TEXT, body, key=self.random.choice(KEYS))
        )

    async def leave(self) -> None:
        """A stream that is left after some bytes."""
        body = dump(
            {
                "prompt": self.prompt(),
                "max_tokens": 64,
                "stream": True,
                "ignore_eos": True,
                "n": self.random.randint(1, 4),
            }
        )
        await self.read_some("leave", body, self.random.randint(1, 3000), 0.0)

    async def read_slowly(self) -> None:
        """A stream that is read 200 bytes at a time, and then left."""
        body = dump({"prompt": self.prompt(), "max_tokens": 300, "stream": True, "ignore_eos": True})
        await self.read_some("slow reader", body, 8000, 0.2)

    async def read_some(self, kind: str, body: bytes, num_bytes: int, pause_s: float) -> None:
        """Reads a part of an answer and leaves."""
        request = Case(kind, TEXT, body, key=self.random.choice(KEYS)).request()
        try:
            async with asyncio.timeout(WAIT_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1024)
                writer.write(request)
                while num_bytes > 0 and not self.is_over and (data := await reader.read(200)):
                    num_bytes -= len(data)
                    await asyncio.sleep(pause_s)
                writer.transport.abort()
        except Exception as error:
            self.note(kind, type(error).__name__, repr(error))
        else:
            self.note(kind, "left")

    async def grammar(self) -> None:
        """An answer that follows a schema, one of ten. It is JSON where it is complete."""
        number = self.random.randrange(10)
        schema = SCHEMA | {"properties": SCHEMA["properties"] | {f"x{number}": {"type": "boolean"}}}
        body = dump(
            {
                "messages": [{"role": "user", "content": f"Who is number {number}?"}],
                "max_tokens": 120,
                "temperature": 0.5,
                "seed": number,
                "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
            }
        )
        reply = await self.send("grammar", CHAT, body)
        self.compare("grammar", f"grammar {number}", reply)
        if reply is not None and (choice := json.loads(reply.body)["choices"][0])["finish_reason"] == "stop":
            json.loads(choice["message"]["content"])

    async def stop_regex(self) -> None:
        """A stream that an expression ends, and whose text is then held back."""
        number = self.random.randrange(8)
        params = {
            "max_new_tokens": 60,
            "sampling_seed": number,
            "temperature": 0.9,
            "stop_regex": rf"[aeiou][^aeiou]{{1,{number + 1}}}[.,]",
        }
        reply = await self.send(
            "stop_regex", NATIVE, dump({"text": "Once upon a time", "sampling_params": params})
        )
        self.compare("stop_regex", f"stop {number}", reply)

    async def session(self) -> None:
        """A session of three turns, which continue one another."""
        opened = await self.send("session", "/open_session", dump({"capacity_of_str_len": 400}))
        if opened is None:
            return
        session, rid = json.loads(opened.body), None
        for turn in range(3):
            params = {"id": session} | ({} if rid is None else {"rid": rid})
            reply = await self.send(
                "session",
                NATIVE,
                dump(
                    {
                        "input_ids": [40 + turn, 41, 42],
                        "session_params": params,
                        "sampling_params": {"max_new_tokens": 6, "ignore_eos": True, "temperature": 0},
                    }
                ),
            )
            if reply is None:
                break
            rid = json.loads(reply.body)["meta_info"]["id"]
            self.compare("session", f"turn {turn}", reply)
        await self.send("session", "/close_session", dump({"session_id": session}))

    async def adapter(self) -> None:
        """An adapter that is loaded, asked and unloaded while others are asked; a rank may die meanwhile."""
        name, number = f"a{self.random.randrange(10**9)}", self.random.randrange(len(self.adapters))
        loaded = await self.send(
            "adapter",
            "/load_lora_adapter",
            dump({"lora_name": name, "lora_path": self.adapters[number]}),
            key=ADMIN_KEY,
        )
        if loaded is None:
            return
        for _ in range(2):
            prompt = self.random.randrange(3)
            body = dump(
                {
                    "prompt": [prompt + 50, *range(60, 80)],
                    "max_tokens": 12,
                    "ignore_eos": True,
                    "temperature": 0,
                    "lora_path": name,
                }
            )
            self.compare("adapter", f"adapter {number} {prompt}", await self.send("adapter", TEXT, body))
        if (
            await self.send("adapter", "/unload_lora_adapter", dump({"lora_name": name}), key=ADMIN_KEY)
            is not None
        ):
            self.note("adapter", "ok")

    async def batch(self) -> None:
        """A batch of eight lines in idle time; its output is compared, and its files are deleted."""
        lines = [
            dump(
                {
                    "custom_id": str(i),
                    "method": "POST",
                    "url": TEXT,
                    "body": {
                        "prompt": [i + 30, 31, 32],
                        "max_tokens": 10,
                        "temperature": 0,
                        "ignore_eos": True,
                    },
                }
            )
            for i in range(8)
        ]
        uploaded = await self.send(
            "batch", "/v1/files", upload("x.jsonl", b"\n".join(lines)), content_type=FORM
        )
        if uploaded is None:
            return
        files = [json.loads(uploaded.body)["id"]]
        made = await self.send(
            "batch",
            "/v1/batches",
            dump({"input_file_id": files[0], "endpoint": TEXT, "completion_window": "24h"}),
        )
        while made is not None and (state := json.loads(made.body))["status"] not in (
            "completed",
            "failed",
            "expired",
            "cancelled",
        ):
            await asyncio.sleep(0.5)
            made = await self.send("batch", f"/v1/batches/{state['id']}", b"", method="GET")
            if self.is_over:
                return
        if made is not None and state["status"] == "completed" and state["output_file_id"]:
            files.append(state["output_file_id"])
            output = await self.send("batch", f"/v1/files/{files[1]}/content", b"", method="GET")
            if output is not None:
                rows = sorted(
                    (json.loads(row) for row in output.body.splitlines()), key=lambda row: row["custom_id"]
                )
                ordered = b"\n".join(
                    dump({"custom_id": row["custom_id"], "choices": row["response"]["body"]["choices"]})
                    for row in rows
                )
                self.compare("batch", "batch", Reply(200, {}, ordered))
        elif made is not None:
            self.note("batch", state["status"], state)
        for file in files:
            await self.send("batch", f"/v1/files/{file}", b"", method="DELETE")

    async def background(self) -> None:
        """A response that is computed in the background, fetched when it is complete, and deleted."""
        number = self.random.randrange(6)
        made = await self.send(
            "background",
            RESPONSES,
            dump(
                {
                    "input": f"Hello {number}!",
                    "max_output_tokens": 16,
                    "background": True,
                    "temperature": 0,
                    "seed": number,
                }
            ),
        )
        while made is not None and (state := json.loads(made.body))["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.2)
            made = await self.send("background", f"{RESPONSES}/{state['id']}", b"", method="GET")
        if made is not None:
            self.compare(
                "background", f"background {number}", Reply(200, {}, dump({"content": state["output"]}))
            )
            await self.send("background", f"{RESPONSES}/{state['id']}", b"", method="DELETE")

    async def hostile(self) -> None:
        """A request of the corpus, or a fuzzed one."""
        self.num_seeds += 1
        is_fuzzed = self.num_seeds % 2 == 0
        case = fuzzed(self.num_seeds) if is_fuzzed else self.random.choice(CORPUS)
        try:
            reply = await exchange(self.port, case.request(), case.method, WAIT_S)
            wrong = complaint(case, reply) if is_fuzzed else misanswered(case, reply)
        except Exception as error:
            wrong = repr(error)
        self.note("hostile", "ok" if wrong is None else "misanswered", f"{case.name} {wrong}")
        await asyncio.sleep(0.1)

    async def flood(self) -> None:
        """Many requests at once of one key that names itself anew each time."""

        async def one(number: int) -> None:
            body = dump({"prompt": self.prompt(), "max_tokens": 8, "ignore_eos": True})
            names = {
                "authorization": f"Bearer {' ' * (number % 4)}{USER_KEY}",
                "x-tenant-id": f"t{number}",
                "content-type": "application/json",
            }
            try:
                reply = await exchange(self.port, head("POST", TEXT, names, len(body)) + body, "POST", WAIT_S)
            except Exception as error:
                return self.note("flood", type(error).__name__, repr(error))
            self.note("flood", "ok" if reply.status in (200, 429) else str(reply.status), reply.body)

        await asyncio.gather(*(one(self.random.randrange(10**6)) for _ in range(12)))
        await asyncio.sleep(2.0)

    @property
    def kinds(self) -> dict[str, tuple[int, Callable[[], Awaitable[None]]]]:
        """Clients by kind: how many there are at once, and one round of each."""
        return {
            "stream": (5, self.stream),
            "leave": (2, self.leave),
            "slow reader": (2, self.read_slowly),
            "grammar": (1, self.grammar),
            "stop_regex": (1, self.stop_regex),
            "session": (1, self.session),
            "adapter": (1, self.adapter),
            "batch": (1, self.batch),
            "background": (1, self.background),
            "hostile": (2, self.hostile),
            "flood": (1, self.flood),
        }

    async def run(self) -> None:
        """All clients, until the time is up. A client that raises is counted, and goes on."""

        async def client(kind: str, one_round: Callable[[], Awaitable[None]]) -> None:
            while not self.is_over:
                try:
                    await one_round()
                except Exception as error:  # an answer in no form that the client knows
                    self.note(kind, f"client {type(error).__name__}", repr(error))
                await asyncio.sleep(0.02)

        async with asyncio.TaskGroup() as tasks:
            for kind, (count, one_round) in self.kinds.items():
                for _ in range(count):
                    tasks.create_task(client(kind, one_round))
