"""Stop strings: pieces against a search of the whole text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.text.stop_strings import Pattern, StopSearch, StopStrings

STOPS = st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=4)


def run(stops: list[str], pieces: list[str], keep: bool = False) -> tuple[str, str | None]:
    search = StopSearch(StopStrings(stops))
    text = ""
    for piece in pieces:
        text += search.feed(piece, keep)
        if search.matched is not None:
            return text, search.matched
    return text + search.flush(), None


def searched(stops: list[str], text: str, keep: bool = False) -> tuple[str, str | None]:
    """The same by definition: the stop string that is complete first; of those, the longest."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[:end] if keep else text[: end - len(stop)], stop
    return text, None


@settings(max_examples=500, deadline=None)
@given(STOPS, st.lists(st.text("abc", max_size=5), max_size=20), st.booleans())
def test_any_cut_gives_the_result_of_the_whole_text(stops: list[str], pieces: list[str], keep: bool) -> None:
    assert run(stops, pieces, keep) == searched(stops, "".join(pieces), keep)


@settings(max_examples=300, deadline=None)
@given(STOPS, st.lists(st.text("abc", max_size=5), max_size=20))
def test_exactly_what_may_begin_a_stop_string_is_held_back(stops: list[str], pieces: list[str]) -> None:
    search = StopSearch(StopStrings(stops))
    seen = sent = ""
    for piece in pieces:
        seen += piece
        sent += search.feed(piece)
        if search.matched is not None:
            return
        held = max(k for stop in stops for k in range(len(stop)) if seen.endswith(stop[:k]))
        assert sent == seen[: len(seen) - held]


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "matched"),
    [
        (["stop"], ["we ", "st", "op here"], "we ", "stop"),
        (["stop"], ["we st", "ay"], "we stay", None),
        (["stop"], ["we st"], "we st", None),
        (["ab", "b"], ["xab"], "x", "ab"),  # complete together: the longest
        (["abcd", "bc"], ["abcd"], "a", "bc"),  # complete first
        (["\n\n"], ["line\n", "\nnext"], "line", "\n\n"),
        (["👍🏽"], ["ok 👍", "🏽!"], "ok ", "👍🏽"),
        (["a"], ["", "", "a"], "", "a"),
        (["aab"], ["aa", "aab"], "aa", "aab"),
    ],
)
def test_cases(stops: list[str], pieces: list[str], text: str, matched: str | None) -> None:
    assert run(stops, pieces) == (text, matched)


def test_a_search_reads_only_as_far_as_it_must() -> None:
    pattern = Pattern("a" * 1000)
    assert pattern.advance(0, "aaab", 4) == (0, -1)
    assert len(pattern._borders) <= 4  # the table grows with the match, not with the stop string


def test_sequences_share_stop_strings_but_not_state() -> None:
    stops = StopStrings(["abab"])
    first, second = StopSearch(stops), StopSearch(stops)
    assert (first.feed("aba"), second.feed("xab")) == ("", "x")
    assert (first.feed("b"), first.matched) == ("", "abab")
    assert (second.feed("c"), second.matched) == ("abc", None)
