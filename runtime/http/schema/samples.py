"""Requests of each operation to copy: for curl, and for Python without any package. They run as they are
written against a server at the address below; the page /docs puts its own server's in its place."""

import json
import shlex
from collections.abc import Mapping

URL = "http://127.0.0.1:30000"
JSON_TYPE = "content-type: application/json"
PYTHON = """import json
import urllib.request

headers = {headers}
{body}request = urllib.request.Request("{url}", {arguments}headers=headers, method="{method}")
with urllib.request.urlopen(request) as answer:
    {read}
"""
READ = "print(answer.read().decode())"
STREAM = """for line in answer:
        print(line.decode(), end="")"""


def samples(
    method: str, path: str, example: Mapping[str, object] | None, form: Mapping[str, str]
) -> list[dict[str, str]]:
    """Samples of a request, in the form of the extension x-codeSamples. `example`: the body; None: there is
    none. `form`: fields of a form, in curl's words."""
    made = [{"lang": "Shell", "label": "curl", "source": _curl(method, path, example, form)}]
    if not form:
        made.append({"lang": "Python", "label": "Python", "source": _python(method, path, example)})
    return made


def _curl(method: str, path: str, example: Mapping[str, object] | None, form: Mapping[str, str]) -> str:
    plain = "POST" if example is not None or form else "GET"
    words = [f"curl -s{'N' if example and example.get('stream') else ''} {shlex.quote(URL + path)}"]
    if method != plain:
        words[0] += f" -X {method}"
    words += [f"-F {name}={value}" for name, value in form.items()]
    if example is not None:
        words += [
            f"-H {shlex.quote(JSON_TYPE)}",
            f"-d {shlex.quote(json.dumps(example, indent=2, ensure_ascii=False))}",
        ]
    return " \\\n    ".join(words)


def _python(method: str, path: str, example: Mapping[str, object] | None) -> str:
    text = PYTHON.format(
        headers='{"content-type": "application/json"}' if example is not None else "{}",
        body="" if example is None else f"body = {_literal(example)}\n",
        url=URL + path,
        arguments="" if example is None else "data=json.dumps(body).encode(), ",
        method=method,
        read=STREAM if example and example.get("stream") else READ,
    )
    return text if example is not None else text.removeprefix("import json\n")


def _literal(value: object, depth: int = 0) -> str:
    """A value of JSON as Python writes it, indented."""
    inner, outer = "    " * (depth + 1), "    " * depth
    if isinstance(value, Mapping) and value:
        rows = [f"{inner}{json.dumps(name)}: {_literal(one, depth + 1)},\n" for name, one in value.items()]
        return "{\n" + "".join(rows) + outer + "}"
    if isinstance(value, list | tuple) and any(isinstance(one, Mapping | list | tuple) for one in value):
        return "[\n" + "".join(f"{inner}{_literal(one, depth + 1)},\n" for one in value) + outer + "]"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_literal(one) for one in value) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
