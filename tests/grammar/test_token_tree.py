"""Trees of tokens: a file as RTP-LLM writes it, and what may come next in it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from runtime.grammar.backend import GrammarError
from runtime.grammar.open_backend import open_backend
from runtime.grammar.token_tree import CompiledTree, TokenTree, read_token_tree
from runtime.messages.constraint import TreeRule
from tests.grammar.test_open_backend import SETUP

TREE = {"7": [3, 40], "7_3": [5], "7_3_5": [6], "7_3_5_6": [9, 2]}


def written(folder: Path, **fields: Any) -> Path:
    path = folder / "tree.json"
    path.write_text(json.dumps({"start_token_id": 7, "end_token_id": 2, "prefix_dict": TREE} | fields))
    return path


def allowed(tree: TokenTree, tokens: list[int]) -> list[int]:
    matcher = CompiledTree(tree).matcher()
    assert all([matcher.accept(token) for token in tokens])
    bits = np.full(2, -1, np.int32)
    assert matcher.fill(bits)
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("sep", ["_", ","])
def test_what_may_come_next(sep: str, tmp_path: Path) -> None:
    keys = {key.replace("_", sep): tokens for key, tokens in TREE.items()}
    tree = read_token_tree(written(tmp_path, prefix_dict=keys, sep=sep), 64)
    assert allowed(tree, []) == [3, 40]
    assert allowed(tree, [3]) == [5] and allowed(tree, [3, 5, 6]) == [2, 9]
    assert allowed(tree, [40]) == [2]  # no key: the answer ends
    matcher = CompiledTree(tree).matcher()
    assert not matcher.accept(5)
    assert matcher.accept(3) and matcher.jump_forward() == [5, 6]
    fork = matcher.fork()
    assert fork.accept(5) and not matcher.accept(6) and fork.jump_forward() == [6]
    assert CompiledTree(tree).matcher().jump_forward() == []


def test_defaults_are_those_of_rtp_llm(tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    path.write_text('{"prefix_dict": {"225": [64000]}}')
    tree = read_token_tree(path, 65000)
    assert (tree.start_token_id, tree.end_token_id, tree.sep) == (225, 2, "_")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prefix_dict": {"8": [3]}}, 'no tokens for "7".*every answer would be empty'),
        ({"prefix_dict": {"7": [3, 64]}}, r"tokens outside 0\.\.63"),
        ({"prefix_dict": {"7": [-1]}}, r"tokens outside 0\.\.63"),
        ({"end_token_id": 64}, r"tokens outside 0\.\.63"),
        ({"prefix_dict": {"7": "3"}}, "Expected `array`.*prefix_dict"),
        ({"weight_dict": {"7_3": 1.0}}, "unknown field `weight_dict`"),
    ],
)
def test_files_that_are_wrong(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(GrammarError, match=f"--tree-decode-config .*{message}"):
        read_token_tree(written(tmp_path, **fields), 64)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(GrammarError, match="can't be read: No such file"):
        read_token_tree(tmp_path / "none.json", 64)


def test_every_backend_compiles_it(tmp_path: Path) -> None:
    backend = open_backend(structs.replace(SETUP, vocab_size=64), is_trial=True)
    compiled = backend.compile(TreeRule(str(written(tmp_path)), 2).grammar)
    assert compiled.matcher().accept(40) and compiled.num_bytes > 0
    with pytest.raises(GrammarError, match="tokens outside"):
        backend.compile(TreeRule(str(written(tmp_path, prefix_dict={"7": [64]})), 2).grammar)
