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
