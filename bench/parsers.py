"""What parsing reasoning and tool calls of an answer costs the event loop, for each format.

    python -m bench.parsers

Answers have reasoning, text, and calls of a function with a long text, a list and a number, in the notation
of the format; tokens have four characters. `us_per_token` covers http/streaming/answer_reader.py: the parser,
its events and the count of reasoning tokens. In the worst text nearly every token might begin a call, and
none does.
"""

from collections.abc import Callable
from time import thread_time

from bench.record import record
from runtime.http.streaming.answer_reader import AnswerReader, ReaderSettings
from runtime.messages.requests import Delta, Finish, FinishReason
from runtime.parsing.channel_parser import CHANNEL_FORMATS
from runtime.parsing.detect import AnswerFormats
from runtime.parsing.tool_call_formats import TOOL_CALL_FORMATS
from tests.http.fake import FakeService
from tests.parsing.render import render

SIZE = 4  # characters of a token
REPEATS = 7
PROSE = (
    "It is a long established fact that a reader of a page looks at its layout, and at its letters "
    "(some, at least). " * 12
)
CALLS = [("write", {"path": "/tmp/a b.txt", "text": PROSE, "lines": [1, 2, 3], "mode": 420})] * 2
TOOLS = {
    "write": {
        "properties": {
            "path": {"type": "string"},
            "text": {"type": "string"},
            "lines": {"type": "array"},
            "mode": {"type": "integer"},
        }
    }
}
END = Finish(FinishReason.STOP, None, 1, 1, 0)


def answers(name: str) -> dict[str, str]:
    """Texts of a format, by kind."""
    if name == "muse":
        frame = " to=self<|message|>{}<|eom|><|start|>assistant to=user<|message|>{}<|eom|>"
        return {
            "prose": frame.format(PROSE, PROSE),
            "worst": " to=user<|message|>" + "<|sta <|eo" * 200,
            "calls": frame.format(PROSE, PROSE) + render(name, CALLS),
        }
    if name == "gpt-oss":
        frame = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}"
        return {
            "prose": frame.format(PROSE, PROSE),
            "worst": "<|channel|>final<|message|>" + "<|chan <|sta" * 200,
            "calls": frame.format(PROSE, PROSE) + render(name, CALLS),
        }
    form = TOOL_CALL_FORMATS[name]
    begin = [*[section.begin for section in form.sections], *form.loose][0]
    return {
        "prose": f"<think>{PROSE}</think>{PROSE}",
        "worst": f"x{begin[:-1]} " * 200,
        "calls": render(name, CALLS),
    }


def cost(formats: AnswerFormats, text: str) -> float:
    """Microseconds a token, the best of some runs."""
    chunks = [text[i : i + SIZE] for i in range(0, len(text), SIZE)]
    reading = ReaderSettings(service=FakeService(), formats=formats, tools=TOOLS)

    def run() -> float:
        reader, deltas = AnswerReader(reading), [Delta(0, chunk, [1]) for chunk in chunks]
        deltas[-1].finish = END
        begin = thread_time()
        for delta in deltas:
            reader.read(delta)
        return (thread_time() - begin) / len(chunks) * 1e6

    return best(run)


def best(run: Callable[[], float]) -> float:
    """The quickest of several runs, in microseconds."""
    return round(min(run() for _ in range(REPEATS)), 2)


def main() -> None:
    """Runs the bench, prints its figures and records them in bench/results."""
    results = {}
    for name in [*TOOL_CALL_FORMATS, *CHANNEL_FORMATS]:
        formats = AnswerFormats(name, name if name in CHANNEL_FORMATS else "qwen3")
        results[name] = {kind: cost(formats, text) for kind, text in answers(name).items()}
        print(f"{name:16}", "  ".join(f"{kind} {us:6.2f}" for kind, us in results[name].items()), "us/token")
    print(record("parsers", {"us_per_token": results}))


if __name__ == "__main__":
    main()
