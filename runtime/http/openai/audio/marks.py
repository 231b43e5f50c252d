"""The special tokens of Whisper that say what is to be done with a sound."""

from collections.abc import Sequence

from msgspec import Struct

from runtime.errors import InvalidRequest
from runtime.messages.requests import Text
from runtime.service import Controls

START, PREVIOUS, PLAIN = "<|startoftranscript|>", "<|startofprev|>", "<|notimestamps|>"
TASKS = ("<|translate|>", "<|transcribe|>")


class Marks(Struct, frozen=True):
    """Ids of the special tokens."""

    start: int
    previous: int  # before text that came before the sound
    translate: int
    transcribe: int
    plain: int  # the answer has no timestamps; those follow on this id

    @property
    def languages(self) -> tuple[int, ...]:
        """The tokens of all languages: they stand between the start and the tasks."""
        return tuple(range(self.start + 1, min(self.translate, self.transcribe)))

    @property
    def first_timestamp(self) -> int:
        """The token of 0 s."""
        return self.plain + 1


async def ids_of(control: Controls, texts: Sequence[str]) -> list[int] | None:
    """The ids of special tokens; None: the tokenizer does not have all of them."""
    ids = await control.tokenize(Text("".join(texts), add_special=False))
    return ids if len(ids) == len(texts) else None


async def read_marks(control: Controls) -> Marks:
    """The special tokens of the served model. Raises InvalidRequest where its tokenizer lacks some."""
    ids = await ids_of(control, (START, PREVIOUS, *TASKS, PLAIN))
    if ids is None:
        raise InvalidRequest(
            "the tokenizer of this model has no tokens of Whisper; serve the tokenizer that belongs to it",
            param="model",
        )
    return Marks(*ids)


async def language_id(control: Controls, marks: Marks, language: str) -> int:
    """The token of a language, by its code. Raises InvalidRequest for one that the model does not know."""
    ids = await ids_of(control, (f"<|{language}|>",))
    if ids is None or ids[0] not in marks.languages:
        raise InvalidRequest(
            f"language {language} is none that this model knows; give its ISO 639 code, or leave it out",
            param="language",
        )
    return ids[0]


async def previous_ids(control: Controls, marks: Marks, prompt: str, most: int) -> list[int]:
    """Tokens that tell the model of text before the sound: the last ones of `prompt`, which has no special
    tokens, up to `most`."""
    words = prompt.strip().replace("<|", "< |")
    if not words:
        return []
    ids = await control.tokenize(Text(f" {words}", add_special=False))
    return [marks.previous, *ids[-most:]]
