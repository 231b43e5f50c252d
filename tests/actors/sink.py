"""A sink that keeps what it gets and checks that a request ends once."""

from runtime.errors import RequestError
from runtime.messages.requests import Delta, Finish


class ListSink:
    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.errors: list[RequestError] = []

    def push(self, delta: Delta) -> None:
        assert not self.errors, "nothing may follow fail"
        assert delta.index not in self.finishes, "nothing may follow finish"
        self.deltas.append(delta)

    def fail(self, error: RequestError) -> None:
        assert not self.errors, "fail comes once"
        self.errors.append(error)

    def text(self, index: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas if delta.index == index)

    def token_ids(self, index: int = 0) -> list[int]:
        return [i for delta in self.deltas if delta.index == index for i in delta.token_ids]

    @property
    def finishes(self) -> dict[int, Finish]:
        return {delta.index: delta.finish for delta in self.deltas if delta.finish is not None}
