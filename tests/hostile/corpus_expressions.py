"""Expressions and grammars that would take time or memory without end."""

from functools import partial

from tests.hostile.case import (
    BAD,
    CHAT,
    CLOUD,
    NATIVE,
    OK,
    OK_OR_BAD,
    Case,
    chat,
    inside,
    nested,
    sampling,
    schema,
)

# Expressions and grammars that would take time or memory without end.
EXPRESSIONS = (
    *(
        Case(f"stop-regex-{name}", NATIVE, partial(sampling, stop_regex=value), status)
        for name, value, status in (
            ("counted", "(a{1000}){1000}", BAD),
            ("counted-deep", "((((((a{9}){9}){9}){9}){9}){9}){9}", BAD),
            ("look-ahead", "(?=a)b", BAD),
            ("back-reference", r"(a)\1", BAD),
            ("python-bomb", "(a+)+$", OK),
            ("alternatives-bomb", "(a|a)*b", OK),
            ("unclosed", "(" * 2000, BAD),
            ("parentheses", "(" * 2000 + "a" + ")" * 2000, OK_OR_BAD),
            ("long", "a" * 200_000, BAD),
            ("classes", "[\\p{L}-\\x{10FFFF}]{500}", OK_OR_BAD),
            ("seventeen", ["a"] * 17, BAD),
            ("number", 5, BAD),
            ("nul", "\0", OK_OR_BAD),
        )
    ),
    *(
        Case(f"grammar-{name}", CHAT, partial(chat, **more), status, needs_model=True)
        for name, more, status in (
            ("regex-counted", {"regex": "((a{1,1000}){1,1000}){1,1000}"}, OK_OR_BAD),
            ("regex-back-reference", {"regex": r"(a)\1"}, BAD),
            ("regex-bomb", {"regex": "(a+)+b"}, OK),
            ("regex-unclosed", {"regex": "(" * 5000}, BAD),
            ("regex-long", {"regex": "(ab|cd)" * 100_000}, OK_OR_BAD),
            ("ebnf-left-recursive", {"ebnf": 'root ::= root "a" | "b"'}, OK_OR_BAD),
            ("ebnf-without-rules", {"ebnf": "root ::= x"}, BAD),
            ("ebnf-circle", {"ebnf": "root ::= root"}, OK_OR_BAD),
            ("ebnf-long", {"ebnf": "root ::= " + '"a" | ' * 50_000 + '"b"'}, OK_OR_BAD),
            ("tag-junk", {"structural_tag": "{{{"}, BAD),
            ("choices-100000", {"guided_choice": [f"x{i}" for i in range(100_000)]}, OK_OR_BAD),
            ("two", {"regex": "a", "ebnf": 'root ::= "a"'}, BAD),
        )
    ),
    *(
        Case(f"schema-{name}", CHAT, partial(schema, value), status, needs_model=True)
        for name, value, status in (
            ("remote-ref", {"$ref": CLOUD}, BAD),
            ("file-ref", {"$ref": "file:///etc/passwd"}, BAD),
            ("ref-to-itself", {"$ref": "#"}, OK_OR_BAD),
            (
                "ref-circle",
                {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
                OK_OR_BAD,
            ),
            ("ref-to-nothing", {"$ref": "#/$defs/none"}, BAD),
            ("no-type", {"type": "wormhole"}, BAD),
            ("false", False, OK_OR_BAD),
            ("items-without-end", {"type": "array", "minItems": 10**9}, OK_OR_BAD),
            ("text-without-end", {"type": "string", "minLength": 10**9}, OK_OR_BAD),
            ("pattern-bomb", {"type": "string", "pattern": "^((a{1,999}){1,999}){1,999}$"}, OK_OR_BAD),
            ("pattern-back-reference", {"type": "string", "pattern": r"^(a)\1$"}, OK_OR_BAD),
            (
                "nested-choices",
                {
                    "allOf": [
                        {"anyOf": [{"properties": {f"p{j}": {"const": i}}} for i in range(6)]}
                        for j in range(12)
                    ]
                },
                OK_OR_BAD,
            ),
            (
                "5000-properties",
                {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(5_000)}},
                OK_OR_BAD,
            ),
            ("20000-constants", {"enum": [f"x{i}" for i in range(20_000)]}, OK_OR_BAD),
            (
                "number-range",
                {"type": "number", "minimum": -1e308, "maximum": 1e308, "multipleOf": 1e-300},
                OK_OR_BAD,
            ),
        )
    ),
    Case(
        "schema-deep",
        CHAT,
        lambda: inside(schema("@"), nested(3_000, '{"items":', "{}", "}")),
        BAD,
        needs_model=True,
    ),
)
