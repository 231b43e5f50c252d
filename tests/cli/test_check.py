"""`runtime check`: golden text of explain and memory, JSON for programs, exit codes."""

import json
from pathlib import Path

import pytest

from runtime.cli import check, main
from runtime.cli.doctor.probe import Finding
from runtime.options.facts import MachineFacts
from runtime.options.footprint import Footprint, Stored
from runtime.options.parse import from_argv
from runtime.options.resolve import plan_for
from runtime.scheduling.speculation.corpus import Corpus
from tests.models.make import make_checkpoint
from tests.models.make_next_token import add_next_token_layers

MACHINE = MachineFacts(cores=2, memory_bytes=2**33, entropy=7)


@pytest.fixture(autouse=True)
def the_same_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "this_machine", lambda: MACHINE)


def printed(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert main(["check", *argv]) == code
    return capsys.readouterr().out


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    lines = {
        line.split()[0]: line.split() for line in printed(capsys, "explain", "--page-size", "8").splitlines()
    }
    assert lines["port"] == ["port", "30000", "default"]
    assert lines["page-size"] == ["page-size", "8", "flag", "--page-size"]
    assert lines["num-threads"] == "num-threads 2 derived 2 cores for 1 rank".split()


def test_explain_diff(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--diff", "--tp", "2", "--reuse-cache", "0", "--enable-mixed-chunk"]
    lines = [" ".join(line.split()) for line in printed(capsys, "explain", *argv).splitlines()]
    assert [line for line in lines if not line.startswith("max-connections")] == [  # it follows ulimit -n
        "disable-radix-cache on flag --reuse-cache",
        "tensor-parallel-size 2 flag --tp",
        "num-threads 1 derived 2 cores for 2 ranks",
        "num-ranks 2 derived one process for each part of the model",
        "note: --reuse-cache is --disable-radix-cache here",
        "note: --enable-mixed-chunk has no effect: every step mixes them.",
    ]
    rest = [line for line in printed(capsys, "--diff").splitlines() if not line.startswith("max-connections")]
    assert rest in ([], ["nothing differs from the defaults"])


def test_explain_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(printed(capsys, "explain", "--json", "--port", "1"))
    assert report["values"]["port"] == {"value": 1, "source": "flag --port", "reason": ""}
    assert report["values"]["page_size"]["reason"] and report["notices"] == []


def test_explain_says_what_speculation_does(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(printed(capsys, "explain", "--json", "--speculative-algorithm", "NGRAM"))
    assert report["values"]["speculative_num_draft_tokens"]["value"] == 12
    assert any("up to 11 tokens of a sequence are guessed" in notice for notice in report["notices"])
    usual = json.loads(printed(capsys, "explain", "--json"))
    assert "NGRAM is worth a try" in usual["values"]["speculative_algorithm"]["reason"]


def test_explain_recommends_next_token_layers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = add_next_token_layers(make_checkpoint("glm4_moe", tmp_path / "model"))
    options = ("--model-path", str(folder), "--max-running-requests", "100")
    report = json.loads(printed(capsys, "explain", "--json", *options))
    reason = report["values"]["speculative_algorithm"]["reason"]
    assert reason.startswith("--speculative-algorithm NEXTN") and "few of the 100 sequences" in reason


def test_memory_of_drafts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Texts that are looked up, as much as the arrays take; and a draft model, as a part of the sums."""
    options = ("--speculative-algorithm", "NGRAM", "--speculative-ngram-capacity", "5000")
    assert "5000 tokens are remembered" in printed(capsys, "memory", *options)
    report = json.loads(printed(capsys, "memory", "--json", *options))
    corpus = Corpus(5000, (3, 1))
    arrays = [corpus.tokens, corpus._owners]
    arrays += [part for one in corpus.windows for part in (one._heads.data, one._before.data)]
    assert report["rank"]["ngram_bytes"] == sum(array.nbytes for array in arrays)
    folder = add_next_token_layers(make_checkpoint("glm4_moe", tmp_path / "model"))
    model = ("--model-path", str(folder), "--max-total-tokens", "1024")
    usual = json.loads(printed(capsys, "memory", "--json", *model))["rank"]
    with_drafts = (*model, "--speculative-algorithm", "NEXTN")
    found = json.loads(printed(capsys, "memory", "--json", *with_drafts))["rank"]
    for part in ("weights_bytes", "token_bytes"):
        assert found[part] - usual[part] == found[f"draft_{part}"] > 0
    assert found["activations_bytes"] > usual["activations_bytes"] and found["ngram_bytes"] == 0
    assert "draft model" in printed(capsys, "memory", *with_drafts)


def test_a_pasted_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert "flag --port" in printed(capsys, "runtime", "serve", "--port", "1")


def test_options_that_cannot_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "explain", "--enable-lora", "--page-size", "0"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_memory(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "memory", "--max-total-tokens", "1024")
    assert (
        "65 of 16 tokens" in text
        and "bounded by --max-total-tokens" in text
        and "room for 1024 tokens" in text
    )
    report = json.loads(printed(capsys, "memory", "--json", "--max-total-tokens", "1024"))
    assert report["fits"] is True and report["rank"]["num_pages"] == 65 and report["stored"]["files"] == 1
    parts = ("weights_bytes", "pages_bytes", "activations_bytes", "graphs_bytes")
    assert report["rank"]["total_bytes"] == sum(report["rank"][part] for part in parts)


def test_memory_that_does_not_suffice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "this_machine", lambda: MachineFacts(cores=2, memory_bytes=2**20, entropy=7))
    assert "this does not fit" in printed(capsys, "memory", code=1)


def test_the_memory_table() -> None:
    found = Footprint(
        weights_bytes=3 * 2**20,
        pages_bytes=2**30,
        activations_bytes=1536,
        graphs_bytes=0,
        num_pages=5,
        token_bytes=128,
        pool_tokens=64,
        longest_tokens=32,
        budget_bytes=2**31,
        bound="--max-total-tokens",
    )
    lines = check.memory_lines(
        plan_for(from_argv([]), MACHINE), found, Stored(2, 9, 2**21, "BF16"), 2**33, True
    )
    assert lines == [
        "weights         3.0 MiB  bfloat16; 2 files hold 2.0 MiB of BF16",
        "pages           1.0 GiB  5 of 16 tokens, 128 bytes a token; bounded by --max-total-tokens",
        "activations     1.5 KiB  at most, for a step of 512 tokens",
        "graphs              0 B  none are captured",
        "in all          1.0 GiB  of 8.0 GiB available to each of 1 ranks",
        "room for 64 tokens; the longest sequence has 32",
    ]


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    findings = json.loads(printed(capsys, "doctor", "--json", "--port", "0"))
    assert {"python", "torch", "processor", "memory", "port", "sysctl: vm.swappiness"} <= {
        finding["name"] for finding in findings
    }
    assert "127.0.0.1:0 is free" in printed(capsys, "doctor", "--port", "0")


def test_doctor_with_a_problem(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    finding = Finding("port", "taken", "problem", "choose another")
    monkeypatch.setattr(check, "examine", lambda **_: [finding])
    assert (
        printed(capsys, "doctor", code=1)
        == "problem  port" + " " * 49 + "taken   choose another\nverdict: 1 in the way: port\n"
    )


def test_every_aspect_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["check", "--help"])
    text = capsys.readouterr().out
    assert left.value.code == 0 and all(f"    {aspect}" in text for aspect in check.ASPECTS)


def test_explain_chooses_a_split(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """From config.json alone, for devices that this machine does not have."""
    config = json.loads((Path(__file__).parents[2] / "docs" / "model_configs.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config["Llama-3.1-70B"]))
    argv = ["--model-path", str(tmp_path), "--load-format", "dummy", "--skip-tokenizer-init"]
    argv += ["--device", "cuda", "--dtype", "bfloat16", "--devices", "8", "--device-memory", "80"]
    report = json.loads(printed(capsys, "explain", "--json", *argv))
    assert report["split"]["flags"][:2] == ["--tensor-parallel-size", "4"]
    assert any(
        notice.startswith("split: --tensor-parallel-size 4 --data-parallel-size 2: of 8 devices")
        for notice in report["notices"]
    )
    text = printed(capsys, "explain", "--tp", "8", *argv)
    assert "note: split: --tensor-parallel-size 4 --data-parallel-size 2: " in text, "whatever was given"
    text = printed(capsys, "memory", "--tp", "4", "--dp", "2", *argv)
    assert "of 80.0 GiB available to each of 8 ranks" in text
    assert printed(capsys, "memory", *argv[:-2], "--device-memory", "24", code=1)


def test_devices_that_are_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "explain", "--devices", "2"]) == 2
    assert "--devices needs --device-memory" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["check", "explain", "--devices", "0"])
    assert "invalid number above 0 value: '0'" in capsys.readouterr().err


SPLITS = {
    "tp": (["--tp", "2"], 2),
    "pp": (["--pp", "2"], 2),
    "tp and pp": (["--tp", "2", "--pp", "2"], 4),
    "dp": (["--dp", "2"], 2),
    "ep": (["--tp", "2", "--ep", "2"], 2),
    "nodes": (["--tp", "2", "--nnodes", "2", "--dist-init-addr", "10.0.0.1:50000"], 1),
}


@pytest.mark.parametrize("name", SPLITS)
def test_memory_of_splits(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank of this machine has its part of the memory, and of the model."""
    monkeypatch.setenv("RUNTIME_DIST_SECRET", "a secret that all nodes of a test share")
    folder = make_checkpoint("qwen3_moe", tmp_path / "model", num_hidden_layers=4)
    argv, ranks = SPLITS[name]
    model = ["--model-path", str(folder), "--dtype", "float32"]
    whole = json.loads(printed(capsys, "memory", "--json", *model))["rank"]
    report = json.loads(printed(capsys, "memory", "--json", *model, *argv))
    rank = report["rank"]
    assert rank["budget_bytes"] == pytest.approx(whole["budget_bytes"] / ranks, abs=2)
    is_divided = name != "dp"
    assert (rank["weights_bytes"] < 0.75 * whole["weights_bytes"]) == is_divided
    assert len(report["stages"]) == report["split"]["pipeline_parallel_size"]
    largest = max(report["stages"], key=lambda stage: stage["total_bytes"])
    assert largest["weights_bytes"] == rank["weights_bytes"]
    text = printed(capsys, "memory", *model, *argv)
    assert f"available to each of {ranks} ranks" in text
    assert ("\nstage 1 " in text) == ("--pp" in argv)


def test_the_memory_of_all_replicas_counts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint("llama", tmp_path / "model")
    model = ["--model-path", str(folder), "--max-total-tokens", "512", "--mem-fraction-static", "1"]
    one = json.loads(printed(capsys, "memory", "--json", *model))["rank"]["total_bytes"]
    room = MachineFacts(cores=2, memory_bytes=int(1.5 * one), entropy=7)
    monkeypatch.setattr(check, "this_machine", lambda: room)
    printed(capsys, "memory", *model)
    printed(capsys, "memory", *model, "--dp", "2", code=1)
