"""Lines of batches are bounded as bodies are."""

import pytest

from runtime.http.json_weight import MIN_WEIGHT
from runtime.http.openai.batch_lines import line_error

URL = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"1", None),
        (b'"' + b"x" * 200_000 + b'"', None),
        (b'"' + b"x" * 300_000 + b'"', "line_too_large"),
        (b"[" + b"[]," * (MIN_WEIGHT // 5 + 1) + b"[]]", "line_too_large"),
    ],
    ids=["small", "fits", "too-long", "too-many-values"],
)
def test_a_line_is_as_large_as_a_body_at_most(body: bytes, code: str | None) -> None:
    line = b'{"custom_id":"a","method":"POST","url":"%b","body":%b}' % (URL.encode(), body)
    most = 250_000 if b"x" in body else 2**24
    error = line_error(3, line, URL, set(), most)
    assert (None if error is None else (error.code, error.line)) == (None if code is None else (code, 3))
    assert error is None or "--max-body-bytes" in error.message


@pytest.mark.parametrize(
    ("line", "param", "message"),
    [
        (b'{"custom_id":"a","method":"GET","url":"u","body":1}', "method", "method: 'GET' is none of POST"),
        (b'{"custom_id":"","method":"POST","url":"u","body":1}', "custom_id", "str of length >= 1"),
        (b'{"method":"POST","url":"u","body":1}', "custom_id", "custom_id is missing"),
        (b"\xef\xbb\xbf{}", None, "byte order mark"),
        (b'{"custom_id":"\\ud83d"}', None, "half a surrogate pair"),
        (b'{"custom_id":"\xff"}', None, "UTF-8"),
        (b"[]", None, "the line: expected object, got array"),
        (b'{"body":' + b"[" * 100_000, None, "nested too deeply"),
    ],
)
def test_what_is_wrong_with_a_line_is_named(line: bytes, param: str | None, message: str) -> None:
    error = line_error(7, line, URL, set())
    assert error is not None and (error.code, error.line) == ("invalid_json_line", 7)
    assert error.param == param and message in error.message, error
