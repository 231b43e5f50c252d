"""Forms with a file, as clients of OpenAI send them: multipart/form-data that is in memory as a whole."""

from msgspec import Struct
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from runtime.errors import InvalidRequest

WHAT = "send multipart/form-data with a file"
MAX_FIELDS = 64


class Form(Struct, frozen=True):
    """A form."""

    file: bytes
    fields: dict[str, str | list[str]]  # the other fields; those whose names end with [] may come often


def read_form(content_type: str, body: bytes) -> Form:
    """Raises InvalidRequest for anything but a form with a file."""
    kind, parameters = parse_options_header(content_type)
    if kind != b"multipart/form-data" or not parameters.get(b"boundary"):
        raise InvalidRequest(f"the body is no form; {WHAT}", param="file")
    parts = _Parts()
    try:
        parser = MultipartParser(
            parameters[b"boundary"],
            {
                "on_part_begin": parts.begin,
                "on_header_field": parts.take_name,
                "on_header_value": parts.take_value,
                "on_header_end": parts.end_header,
                "on_part_data": parts.take_data,
                "on_part_end": parts.end,
                "on_end": parts.finish,
            },
        )
        parser.write(body)
    except FormParserError as error:
        raise InvalidRequest(f"the form can't be read: {error}", param="file") from None
    if not parts.has_ended:
        raise InvalidRequest(f"the form has no end; {WHAT}", param="file")
    return _form(parts.found)


def _form(parts: list[tuple[str, bool, bytes]]) -> Form:
    files = [data for name, is_file, data in parts if name == "file" and is_file]
    if len(files) != 1:
        raise InvalidRequest(f"the form has {len(files)} files; {WHAT} named file", param="file")
    fields: dict[str, str | list[str]] = {}
    for name, _, data in parts:
        if name == "file":
            continue
        text = data.decode("utf-8", "replace")
        if name.endswith("[]"):
            known = fields.setdefault(name.removesuffix("[]"), [])
            assert isinstance(known, list), "names that end with [] have lists"
            known.append(text)
        elif name in fields:
            raise InvalidRequest(f"the form has {name} twice; send it once", param=name)
        else:
            fields[name] = text
    return Form(files[0], fields)


class _Parts:
    """Collects the parts of a form: of each its name, whether it is a file, and its data."""

    def __init__(self) -> None:
        self.found: list[tuple[str, bool, bytes]] = []
        self.has_ended = False
        self._headers: dict[bytes, bytes] = {}
        self._name = self._value = b""  # of the header that is being read
        self._data = bytearray()

    def begin(self) -> None:
        """A part begins."""
        if len(self.found) == MAX_FIELDS:
            raise InvalidRequest(f"the form has over {MAX_FIELDS} fields; send fewer", param="file")
        self._headers, self._data = {}, bytearray()

    def take_name(self, data: bytes, start: int, end: int) -> None:
        """Some of a header's name."""
        self._name += data[start:end]

    def take_value(self, data: bytes, start: int, end: int) -> None:
        """Some of a header's value."""
        self._value += data[start:end]

    def end_header(self) -> None:
        """A header is complete."""
        self._headers[self._name.lower()] = self._value
        self._name = self._value = b""

    def take_data(self, data: bytes, start: int, end: int) -> None:
        """Some of the part's data."""
        self._data += memoryview(data)[start:end]

    def end(self) -> None:
        """The part is complete."""
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        self.found.append((name, b"filename" in options, bytes(self._data)))

    def finish(self) -> None:
        """The form is complete."""
        self.has_ended = True
