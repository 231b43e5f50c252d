from itertools import combinations
from typing import Any

import pytest

from runtime.errors import InvalidRequest
from runtime.http.fields.cache_salt import salts
from runtime.http.native.generate_request import GenerateBody
from runtime.messages.requests import GenerateRequest, Sink
from tests.http.fake import FakeService
from tests.http.fields.test_headers import BODIES, client

pytestmark = pytest.mark.anyio


def body(cache_salt: Any = None, extra_key: Any = None) -> GenerateBody:
    return GenerateBody(cache_salt=cache_salt, extra_key=extra_key)


def test_without_fields_there_is_none() -> None:
    assert salts(body(), 3) == ["", "", ""] == salts(body("", [""] * 3), 3)


def test_other_values_are_other_salts() -> None:
    bodies = [
        body("a"),
        body("b"),
        body(None, "a"),
        body("a", "a"),
        body("a", "b"),
        body("ab"),
        body('["a","b"]'),
    ]
    for one, other in combinations(bodies, 2):
        assert salts(one, 1) != salts(other, 1)
    assert salts(body(["a", "b"], "x"), 2) == [*salts(body("a", "x"), 1), *salts(body("b", "x"), 1)]


@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
def test_lists_have_one_for_each_prompt(field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        salts(body(**{field: ["a"]}), 2)
    assert caught.value.param == field


@pytest.mark.parametrize("path", BODIES)
async def test_they_reach_the_service(path: str) -> None:
    service = FakeService()
    seen: list[str] = []
    submit = service.submit

    def note(request: GenerateRequest, sink: Sink) -> None:
        seen.append(request.cache_salt)
        submit(request, sink)

    service.submit = note  # type: ignore[method-assign]
    async with client(service) as http:
        for more in ({}, {"cache_salt": "a"}, {"extra_key": "a"}, {"extra_key": ["a"]}):
            assert (await http.post(path, json=BODIES[path] | more)).status_code == 200
        assert (await http.post(path, json=BODIES[path] | {"cache_salt": 5})).status_code == 400
    assert seen[0] == "" and seen[1] and seen[2] == seen[3] and seen[1] != seen[2]
