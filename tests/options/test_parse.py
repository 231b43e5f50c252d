"""From words, files and keyword arguments to Options; every problem at once, never a traceback."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as examples
from hypothesis import settings
from hypothesis import strategies as st

from runtime.errors import OptionsError
from runtime.options.parse import ParsedOptions, from_argv, from_values
from runtime.options.table import by_flag, by_name


def value(parsed: ParsedOptions, name: str) -> Any:
    return getattr(getattr(parsed.options, by_name()[name].group), name)


@pytest.mark.parametrize(
    ("words", "name", "expected", "source"),
    [
        ("", "port", 30000, None),
        ("--port 0", "port", 0, "flag --port"),
        ("--port=1", "port", 1, "flag --port"),
        ("--port 1 --port 2", "port", 2, "flag --port"),
        ("--page_size 8", "page_size", 8, "flag --page_size"),
        ("--page-size auto", "page_size", "auto", "flag --page-size"),
        ("--tp 2", "tensor_parallel_size", 2, "flag --tp"),
        ("-m x", "model_path", "x", "flag -m"),
        ("--disable-radix-cache", "disable_radix_cache", True, "flag --disable-radix-cache"),
        ("--disable-radix-cache false", "disable_radix_cache", False, "flag --disable-radix-cache"),
        ("--no-disable-radix-cache", "disable_radix_cache", False, "flag --no-disable-radix-cache"),
        ("--chunked-prefill-size -1", "chunked_prefill_size", -1, "flag --chunked-prefill-size"),
        ("--model-checksum", "model_checksum", "", "flag --model-checksum"),
        ("--model-checksum --port 1", "model_checksum", "", "flag --model-checksum"),
        ("--model-checksum sums", "model_checksum", "sums", "flag --model-checksum"),
        ("--enable-lora --max-lora-rank 8 --lora-target-modules all -m x", "model_path", "x", "flag -m"),
        ("--concurrency-limit 7", "max_running_requests", 7, "flag --concurrency-limit"),
        ("--reuse_cache 0", "disable_radix_cache", True, "flag --reuse_cache"),
        ("--max-batch-size 0", "max_running_requests", "auto", None),
        ("--shutdown-timeout 1.5", "shutdown_timeout", 1.5, "flag --shutdown-timeout"),
    ],
)
def test_words(words: str, name: str, expected: Any, source: str | None) -> None:
    parsed = from_argv(words.split())
    assert value(parsed, name) == expected and parsed.sources.get(name) == source


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--prt 1", "--prt is no flag of this runtime; did you mean --port?"),
        ("--expert-distribution-recorder-buffer-size 0", "0 holds no step; give a number of steps, or -1"),
        ("--qqqqqq", "`runtime options` lists all"),
        ("--port", "--port needs a value: int >=0 <=65535"),
        ("--port --host x", "--port needs a value"),
        ("--port 70000", "--port 70000 is not possible; expected int >=0 <=65535"),
        ("--port x", "--port x is not possible"),
        ("--mem-fraction-static nan", "--mem-fraction-static nan is not possible"),
        ("--mem-fraction-static 1.5", "expected float >0 <=1|auto"),
        ("--port 99999999999999999999999", "is not possible"),
        ("--port 1 stray", "stray stands alone: a value follows its flag; a model is --model-path stray"),
        ("--dtype int3", "--dtype int3 is not possible; expected auto|bfloat16"),
        ("--hicache-mem-layout page_head", "--hicache-mem-layout page_head is not here yet; choose one of "),
        ("--disable-radix-cache=7", "expected bool"),
        ("--json-model-override-args {", "is not JSON: "),
        ("--json-model-override-args [1]", "--json-model-override-args [1] is not possible: expected"),
        ("--json-model-override-args " + "[" * 9999, "is not possible; expected json"),
        ("--json-model-override-args \udc80", "is not possible; expected json"),
        ("--moe-a2a-backend mori", "--moe-a2a-backend mori is not here yet; choose one of "),
        ("--enable-double-sparsity", "cuda devices"),
        ("--api-key good s3cret=é", "--api-key is empty, or has"),
        ("--admin-api-key=", "--admin-api-key is empty"),
        ("--served-model-name=", "--served-model-name is empty"),
        ("--cors-origins https://a.example/", "--cors-origins https://a.example/ is no origin"),
        ("--cors-origins * a.example", "--cors-origins a.example is no origin"),
        ("--allowed-hosts http://a.example", "--allowed-hosts http://a.example is no name"),
        ("--allowed-hosts a.example:8000", "without scheme, port and pattern"),
        ("--allowed-hosts a *.example", "--allowed-hosts *.example is no name"),
    ],
)
def test_problems(words: str, problem: str) -> None:
    with pytest.raises(OptionsError) as caught:
        from_argv(words.split())
    assert problem in "\n".join(caught.value.problems)
    assert "s3cret" not in str(caught.value)


def test_a_model_in_front_of_all_options() -> None:
    parsed = from_argv(["org/name", "--port", "1"])
    assert parsed.options.model.model_path == "org/name" and parsed.sources["model_path"] == "argument MODEL"
    assert from_argv(["a", "--model-path", "b"]).options.model.model_path == "b", "the last one given"


def test_all_problems_at_once() -> None:
    with pytest.raises(OptionsError) as caught:
        from_argv(
            "--port x --page-size 0 --nonsense 1 --enable-lora --max-lora-rank 8 "
            "--served-model-name a:b".split()
        )
    assert len(caught.value.problems) == 5  # --enable-lora lacks target modules


def test_notices_say_who_does_the_job() -> None:
    parsed = from_argv(["--enable-mixed-chunk", "--concurrency-limit", "7", "--sp-type", "vanilla"])
    assert parsed.notices == [
        "--enable-mixed-chunk has no effect: every step mixes them.",
        "--concurrency-limit is --max-running-requests here",
        "--sp-type vanilla asks for what is the default here",
    ]


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("port: 1\npage_size: 8\nmodel: x\ntp: 2\ndisable-radix-cache: true\n")
    parsed = from_argv(["--config", str(file), "--port", "2"])
    assert (value(parsed, "port"), value(parsed, "page_size"), value(parsed, "model_path")) == (2, 8, "x")
    assert parsed.sources["page_size"] == "file server.yaml" and parsed.sources["port"] == "flag --port"
    assert value(parsed, "tensor_parallel_size") == 2 and value(parsed, "disable_radix_cache") is True


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("prt: 1\n", "prt in server.yaml is no option of this runtime; did you mean port?"),
        ("port: [1\n", "is not YAML"),
        ("- port\n", "must be a mapping"),
        ("port: x\n", "port in server.yaml x is not possible"),
        ("port: 1\nhost: x\nport: 2\n", "port is in server.yaml more than once"),
        ("model: a\nmodel-path: b\n", "model and model-path in server.yaml are one option"),
        (
            "served-model-name: 123\n",
            "123 is not possible; expected str; a text like that is written in quotes",
        ),
        ("served-model-name: no\n", "written in quotes"),
        ("api-key: [0123]\n", "written in quotes"),
        ("port: true\n", "port in server.yaml True is not possible; expected int >=0 <=65535"),
        ("port:\n", "port in server.yaml has no value"),
        ("config: other.yaml\n", "it is an option of the command line alone"),
        ("1: 2\n", "1 in server.yaml is no option"),
        ("[a]: 2\n", "is not YAML"),
        ("port: 2024-13-01\n", "is not YAML"),
        ("port: " + "[" * 3000, "is not YAML"),
    ],
)
def test_wrong_files(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(text)
    with pytest.raises(OptionsError) as caught:
        from_argv(["--config", str(file)])
    assert problem in "\n".join(caught.value.problems)


def test_an_empty_file_and_one_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    assert from_argv(["--config", str(tmp_path / "empty.yaml")]).sources == {"config": "flag --config"}
    with pytest.raises(OptionsError, match="cannot be read"):
        from_argv(["--config", str(tmp_path / "missing.yaml")])


def test_keyword_arguments() -> None:
    parsed = from_values({"port": 5, "tp_size": 2, "disable_radix_cache": True})
    assert parsed.sources == dict.fromkeys(
        ("port", "tensor_parallel_size", "disable_radix_cache"), "argument"
    )
    with pytest.raises(OptionsError, match="did you mean port"):
        from_values({"prot": 1})


values = st.sampled_from(["1", "0", "-1", "auto", "true", "x", "1.5", "{}", "", "--", "-", "="])
words = st.one_of(st.sampled_from(sorted(by_flag())), values, st.text(max_size=8))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.text(max_size=3), max_size=2),
)
trees = st.dictionaries(
    st.one_of(st.sampled_from([row.name for row in by_flag().values()]), st.text(max_size=8)),
    scalars,
    max_size=6,
)


@settings(max_examples=300, deadline=None)
@examples(st.lists(words, max_size=8))
def test_any_words_give_options_or_sentences(argv: list[str]) -> None:
    try:
        from_argv([word for word in argv if word != "--config"])
    except OptionsError as error:
        assert error.problems and all(error.problems)


@settings(max_examples=200, deadline=None)
@examples(st.one_of(st.text(max_size=40), st.binary(max_size=20)), st.lists(words, max_size=3))
def test_any_file_with_any_words_gives_options_or_sentences(content: str | bytes, argv: list[str]) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
        file.flush()
        try:
            from_argv([*(word for word in argv if word != "--config"), "--config", file.name])
        except OptionsError as error:
            assert error.problems and all(error.problems)


@settings(max_examples=300, deadline=None)
@examples(trees)
def test_any_mapping_gives_options_or_sentences(tree: dict[str, Any]) -> None:
    try:
        from_values(tree)
    except OptionsError as error:
        assert error.problems and all(error.problems)


@pytest.mark.parametrize("words", ["--wrr-available-ratio 80", "--wrr-available-ratio=80"])
def test_options_that_are_not_here_may_ask_for_nothing(words: str) -> None:
    parsed = from_argv(words.split())
    assert parsed.notices and all("it is what happens anyway" in notice for notice in parsed.notices)


@pytest.mark.parametrize("words", ["--tool-server x"])
def test_and_are_refused_otherwise(words: str) -> None:
    with pytest.raises(OptionsError, match="--tool-server is refused"):
        from_argv(words.split())


def test_a_list_of_another_engine_is_one_word() -> None:
    parsed = from_argv(["--language-only", "--remote-vit-server-ip", "10.0.0.1:8997,10.0.0.2:8997"])
    assert parsed.options.disaggregation.encoder_urls == ("10.0.0.1:8997", "10.0.0.2:8997")


def test_flags_of_vllm_are_named_in_our_words() -> None:
    with pytest.raises(
        OptionsError, match="--gpu-memory-utilization is vLLM's; here it is --mem-fraction-static"
    ):
        from_argv(["--gpu-memory-utilization", "0.5"])
