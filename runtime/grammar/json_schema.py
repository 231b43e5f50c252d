"""JSON Schema before a backend gets it: limits, keywords that the backend would ignore, and objects with
listed properties are closed.

Closed means: an object that lists its `properties` and says nothing about others gets no others. Other
servers do that and clients expect it; an object that lists none stays open. The client's schema allows both
results.
"""

from collections.abc import Callable, Mapping

import msgspec

from runtime.grammar.backend import GrammarError
from runtime.json_value import JsonDict, JsonValue

MAX_DEPTH = 64
MAX_NODES = 20_000

# keywords that no library here knows: they ignore most of them silently
UNKNOWN_KEYWORDS = frozenset(
    {
        "not",
        "if",
        "then",
        "else",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "dependentRequired",
        "dependentSchemas",
        "$dynamicRef",
        "$recursiveRef",
    }
)
_ONE = (
    "items",
    "additionalProperties",
    "additionalItems",
    "contains",
    "not",
    "if",
    "then",
    "else",
    "propertyNames",
    "unevaluatedProperties",
    "unevaluatedItems",
)  # keywords that hold a schema
_LIST = ("anyOf", "oneOf", "allOf", "prefixItems", "items")  # ... a list of them
# ... or some by name
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OPEN = {"additionalProperties", "unevaluatedProperties", "patternProperties"}
_TYPES = {"string", "number", "integer", "boolean", "object", "array", "null"}


# changes a part of a schema, given its path, to what the backend reads rightly
Rewrite = Callable[[JsonDict, str], None]


def prepare_schema(
    text: str, unsupported: frozenset[str], backend: str, rewrite: Rewrite | None = None
) -> str:
    """The schema for a backend. `unsupported`: keywords that the backend ignores; `rewrite`: changes parts of
    the schema for the backend. Raises GrammarError with the path: `at $.properties.age: ...`."""
    try:
        schema = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(f"the schema is not JSON: {error}") from error
    return msgspec.json.encode(_Walk(unsupported, backend, rewrite).close(schema, "$", 0)).decode()


class _Walk:
    """A walk through a schema."""

    def __init__(self, unsupported: frozenset[str], backend: str, rewrite: Rewrite | None) -> None:
        self._rewrite = rewrite
        self._unsupported = unsupported
        self._backend = backend
        self._num_nodes = 0

    def close(self, node: object, path: str, depth: int, *, is_part: bool = False) -> JsonValue:
        """A copy of the schema at `path`, with objects closed. `is_part`: it is a member of allOf, which must
        not exclude the properties of the others."""
        self._num_nodes += 1
        if depth > MAX_DEPTH or self._num_nodes > MAX_NODES:
            raise GrammarError(f"at {path}: the schema has more than {MAX_DEPTH} levels or {MAX_NODES} parts")
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            raise GrammarError(f"at {path}: a schema is an object or a boolean")
        self._look(node, path)
        closed = dict(node)
        for key in _ONE:
            if isinstance(node.get(key), dict):
                closed[key] = self.close(node[key], f"{path}.{key}", depth + 1)
        for key in _LIST:
            if isinstance(node.get(key), list):
                closed[key] = [
                    self.close(part, f"{path}.{key}[{i}]", depth + 1, is_part=is_part or key == "allOf")
                    for i, part in enumerate(node[key])
                ]
        for key in _NAMED:
            if isinstance(node.get(key), dict):
                closed[key] = {
                    name: self.close(part, f"{path}.{key}.{name}", depth + 1)
                    for name, part in node[key].items()
                }
        if "properties" in node and not is_part and "allOf" not in node and not _OPEN & node.keys():
            closed["additionalProperties"] = False
        if self._rewrite is not None:
            self._rewrite(closed, path)
        return closed

    def _look(self, node: Mapping[str, object], path: str) -> None:
        for key in self._unsupported & node.keys():
            if node[key] not in (False, None, {}, []):
                raise GrammarError(
                    f"at {path}.{key}: the backend {self._backend} cannot keep this keyword; leave it out, "
                    "or serve with "
                    "another --grammar-backend"
                )
        reference = node.get("$ref", "#")
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise GrammarError(
                f"at {path}.$ref: a reference begins with #; the server fetches no schemas from elsewhere"
            )
        kinds = node.get("type", [])
        wrong = [
            kind
            for kind in (kinds if isinstance(kinds, list) else [kinds])
            if not isinstance(kind, str) or kind not in _TYPES
        ]
        if wrong:
            raise GrammarError(
                f"at {path}.type: {msgspec.json.encode(wrong[0]).decode()} is none of "
                f"{', '.join(sorted(_TYPES))}"
            )
        if not isinstance(node.get("properties", {}), dict):
            raise GrammarError(f"at {path}.properties: must be an object")
