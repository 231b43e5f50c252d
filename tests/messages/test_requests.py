"""Alternatives of a token are two arrays that look like pairs."""

from array import array

import numpy as np

from runtime.messages.requests import Alternatives, TokenLogprob


def alternatives(*pairs: tuple[int, float]) -> Alternatives:
    ids, logprobs = zip(*pairs, strict=True) if pairs else ((), ())
    return Alternatives(array("i", ids).tobytes(), np.array(logprobs, np.float32).tobytes())


def test_they_are_pairs() -> None:
    two = alternatives((7, -0.5), (70_000, -1.25))
    assert list(two) == [(7, -0.5), (70_000, -1.25)] and two[1] == (70_000, -1.25) and len(two) == 2
    assert two[:1] == ((7, -0.5),) and (7, -0.5) in two and repr(two) == "((7, -0.5), (70000, -1.25))"
    assert not alternatives() and list(alternatives()) == []


def test_they_equal_other_pairs() -> None:
    two = alternatives((7, -0.5), (8, -1.0))
    assert two == alternatives((7, -0.5), (8, -1.0)) == ((7, -0.5), (8, -1.0))
    assert two != ((7, -0.5),) and two != alternatives((7, -0.5), (8, -2.0))
    assert TokenLogprob(1, -2.0, two) == TokenLogprob(1, -2.0, ((7, -0.5), (8, -1.0)))
