"""The compile process where its surroundings fail; tests/actors/test_grammars.py has its verdicts."""

import subprocess
import sys

import msgspec

from runtime.grammar.compile_process import CompileResult

BROKEN = """
from runtime.grammar.compile_process import CompileRequest, _compile
from runtime.messages.constraint import Grammar, GrammarSetup

class Broken:
    def compile(self, grammar):
        raise ValueError("a fault of the library")

setup = GrammarSetup(backend="outlines", tokenizer_path="", vocab_size=8, eos_ids=(2,))
_compile(Broken(), setup, CompileRequest(7, Grammar("regex", "a"), 5.0), 1)
"""


def test_a_fault_is_reported_where_stderr_is_full() -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", BROKEN], stdout=subprocess.PIPE, stderr=full, timeout=60, check=True
        )
    result = msgspec.msgpack.decode(ended.stdout, type=CompileResult)
    assert result.id == 7 and result.is_fault and "the server's log has the details" in result.error
