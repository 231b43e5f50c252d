"""Regular expressions that end a text: pieces against the definition, with Python's re as the judge."""

import math
import re
from time import perf_counter

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from runtime.errors import InvalidRequest
from runtime.text.regex_width import longest_match
from runtime.text.stop_regex import MAX_PROGRAM, WINDOW, RegexSearch, StopRegexes

ATOMS = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\w", "c", r"\x61"])


def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("(?:{0[0]}|{0[1]})".format),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?"])).map(
            "({0[0]}){0[1]}".format
        ),
        st.tuples(inner, st.sampled_from(["$", r"\b", r"\B"])).map("(?:{0[0]}){0[1]}".format),
        st.tuples(st.sampled_from(["^", r"\b"]), inner).map("{0[0]}(?:{0[1]})".format),
    )


REGEXES = st.recursive(ATOMS, grown, max_leaves=6).filter(
    lambda regex: re.search(regex.replace(r"\B", ""), "") is None
)
PIECES = st.lists(st.text("abc ", max_size=5), max_size=12)


def run(stops: StopRegexes, pieces: list[str], keep: bool = False) -> tuple[str, str | None]:
    search = RegexSearch(stops)
    text = ""
    for piece in pieces:
        text += search.feed(piece, keep)
        if search.matched is not None:
            return text, search.matched
    return text + search.flush(), None


def searched(regexes: list[str], text: str, keep: bool = False) -> tuple[str, str | None]:
    """By definition: the first place where a match is complete; of those the one that begins first."""
    for end in range(1, len(text) + 1):
        found = [
            (match.start(), match.end(), i)
            for i, regex in enumerate(regexes)
            if (match := re.search(regex, text[:end]))
        ]
        if found:
            start, stop, i = min(found, key=lambda one: (one[0], one[1]))
            return text[: stop if keep else start], regexes[i]
    return text, None


@settings(max_examples=600, deadline=None)
@given(st.lists(REGEXES, min_size=1, max_size=3, unique=True), PIECES, st.booleans())
def test_any_cut_gives_the_result_of_the_whole_text(
    regexes: list[str], pieces: list[str], keep: bool
) -> None:
    try:
        expressions = StopRegexes(regexes)
    except InvalidRequest:  # too large together for what they may match
        reject()
    assert run(expressions, pieces, keep) == searched(regexes, "".join(pieces), keep)


@settings(max_examples=400, deadline=None)
@given(REGEXES, st.text("abc ", max_size=30))
def test_no_match_is_longer_than_its_width(regex: str, text: str) -> None:
    match = re.search(regex, text)
    assert match is None or len(match[0]) <= longest_match(regex)


@pytest.mark.parametrize(
    ("regex", "width"),
    [
        ("abc", 3),
        ("a|bcd", 3),
        ("(ab)+", math.inf),
        ("(?i)a{2,3}b?", 4),
        ("[^]a]x", 2),
        ("[[:alpha:]]{3}", 3),
        (r"\Qa.b\Ec", 4),
        (r"\x{41}\pL\p{Greek}[\p{Greek}\]]", 4),
        ("x*?", math.inf),
        ("(?:a|(?P<n>bc)){2}", 4),
        ("(?s).{0,5}", 5),
        (r"\n\nHuman:", 8),
        (r"^\ba$", 1),
        (r"[^\n\]]{2,}", math.inf),
        (r"\101\t", 2),
        ("()*a", 1),
        ("(?s:a)(?<n>b)", 2),
        ("a(", math.inf),
        ("a)b", math.inf),
    ],
)
def test_widths(regex: str, width: float) -> None:
    assert longest_match(regex) == width


@pytest.mark.parametrize(
    ("regexes", "stops", "pieces", "text", "matched"),
    [
        ([r"\n\n(Human|User):"], [], ["Hi.\n", "\nUs", "er: x"], "Hi.", r"\n\n(Human|User):"),
        ([r"\d{3}"], [], ["a1", "2", "34"], "a", r"\d{3}"),
        (["b+"], ["abbb"], ["abbbb"], "a", "b+"),  # complete first
        (["bc"], ["abc"], ["abc"], "", "abc"),  # complete together: what begins first
        (["é+x"], [], ["aé", "éx"], "a", "é+x"),
        ([r"[😀-😂]!"], [], ["ok 😁", "!"], "ok ", r"[😀-😂]!"),
        ([r"^b"], [], ["a", "b"], "ab", None),
        ([r"(?m)^b"], [], ["a\n", "b"], "a\n", r"(?m)^b"),
        ([r"\bfoo"], [], ["xfoo ", "foo"], "xfoo ", r"\bfoo"),
        ([r"foo$"], [], ["foobar"], "", "foo$"),  # as if the text ended there
    ],
)
def test_cases(
    regexes: list[str], stops: list[str], pieces: list[str], text: str, matched: str | None
) -> None:
    assert run(StopRegexes(regexes, stops), pieces) == (text, matched)
    assert run(StopRegexes(regexes, stops), list("".join(pieces))) == (text, matched)


def test_little_is_held_back() -> None:
    search = RegexSearch(StopRegexes([r"ab[cd]"]))
    assert [search.feed(piece) for piece in ("x", "yz", "ab", "e")] == [
        "",
        "x",
        "yz",
        "a",
    ] and search.flush() == "be"
    search = RegexSearch(StopRegexes(["a.*b"]))
    assert [search.feed(piece, keep_match=True) for piece in ("xa", "y", "b")] == [
        "xa",
        "y",
        "b",
    ] and search.matched == "a.*b"


@pytest.mark.parametrize("keep", [False, True])
def test_a_match_has_at_most_a_window(keep: bool) -> None:
    fits = "a" + "x" * (WINDOW - 2) + "b"
    assert run(StopRegexes(["a[^b]*b"]), ["yy", fits[:100], fits[100:]], keep) == (
        "yy" + (fits if keep else ""),
        "a[^b]*b",
    )
    longer = "a" + "x" * (WINDOW - 1) + "b"
    assert run(StopRegexes(["a[^b]*b"]), ["yy", longer[:100], longer[100:]], keep) == ("yy" + longer, None)


@pytest.mark.parametrize(
    ("regex", "words"),
    [
        ("a(", r"missing \): a\("),
        (r"(a)\1", r"invalid escape sequence: \\1"),
        ("(?=a)", r"\(\?="),
        ("[z-a]", "z-a"),
        ("a*", "empty text"),
        ("x|$", "empty text"),
        ("(?:a{100}){100}", "repetition"),
        ("[a-z]{900}[0-9]{900}", "bound its repetitions"),
        ("[ab]*a[ab]{240}$", "bound its repetitions"),
        ("\ud800", "not text"),
    ],
)
def test_what_is_refused(regex: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as error:
        StopRegexes(["ok", regex])
    assert error.value.param == "stop_regex"


def test_stop_strings_count() -> None:
    StopRegexes(["ok"], ["x" * 900])
    with pytest.raises(InvalidRequest, match=str(MAX_PROGRAM)):
        StopRegexes(["ok"], ["x" * 900, "y" * 900])


def test_no_expression_takes_long() -> None:
    """What takes a backtracking engine for ever."""
    search = RegexSearch(StopRegexes([r"(a|a|aa)+(b|b)+c", r"(a*)*d", r"[ab]*a[ab]{12}Q"]))
    begin = perf_counter()
    for _ in range(100):
        search.feed("ab" * 50)
    assert search.matched is None and perf_counter() - begin < 5


@pytest.mark.parametrize(
    ("regex", "width"),
    [
        ("a{00}", 5),  # RE2 takes leading zeros as text
        ("a{٣}", 4),  # and digits of other alphabets
        ("a{1," + "9" * 400 + "}", 405),
        ("a{2,3}", 3),
        ("(a{2}|b){3}", 6),
        ("(" * 90 + "a" + ")" * 90, 1),
        ("(" * 500 + "a" + ")" * 500, math.inf),
        ("((a{1,10}){1,10})", 100),
    ],
)
def test_odd_repetitions_are_as_long_as_re2_takes_them(regex: str, width: float) -> None:
    assert longest_match(regex) == width
    if width < WINDOW:
        StopRegexes([regex])


@pytest.mark.parametrize(
    "regex", ["((a{100}){100}){100}", "(a{1000}){1,2}b", ".{1000}" * 30, "((a?){30}){30}b" * 30]
)
def test_nested_counts_are_refused(regex: str) -> None:
    with pytest.raises(InvalidRequest, match="stop_regex"):
        StopRegexes([regex])
