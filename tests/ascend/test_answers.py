"""`runtime check doctor --record`: answers of a CANN to the calls of the tables. Those of the simulation are
the tables'; fixtures of real ones go to tests/ascend/answered, with what is known to differ."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ascend import answers
from tests.ascend.emulate.table import Refused, only_shapes

pytestmark = pytest.mark.ascend
ANSWERED = Path(__file__).parent / "answered"  # NPU-CANN.jsonl, as --record wrote it
KNOWN: dict[str, set[tuple[str, str | None]]] = {}  # its name -> operator and reason of what differs there


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("answers") / "simulated.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "runtime", "check", "doctor", "--device", "npu", "--record", str(file)],
        capture_output=True,
        text=True,
    )
    assert "0 answers are not those of the tables" in done.stdout, done.stdout + done.stderr
    return file


@pytest.mark.parametrize("name", ["", *sorted(path.name for path in ANSWERED.glob("*.jsonl"))])
def test_answers_are_those_of_the_tables(name: str, recorded: Path) -> None:
    found = answers.disagreements(ANSWERED / name if name else recorded)
    assert {(given["operator"], given["wrong"]) for given in found} == KNOWN.get(name, set())


def test_what_differs_is_found(recorded: Path, tmp_path: Path) -> None:
    about, *lines = recorded.read_text().splitlines()
    assert json.loads(about)["is_simulated"] and len(lines) == len(list(answers.calls()))
    others = {"taken": "failed", "refused": "taken"}
    given = [json.loads(line) for line in lines]
    turned = [one | {"answer": others[one["answer"]]} for one in given]
    file = tmp_path / "turned.jsonl"
    file.write_text("\n".join([about, *map(json.dumps, turned)]))
    counted = [one for one in turned if "emulated" not in (one["wrong"] or "")]
    assert answers.disagreements(file) == counted and len(counted) > 200


def test_which_calls_are_wrong_by_values_only() -> None:
    """What is refused without looking at values may be called on a real device."""
    for case, at in answers.calls():
        if at is None:
            continue
        reason, change = case.wrong[at]
        try:
            with only_shapes():
                case.call(change())
        except Refused:
            assert reason not in answers.VALUES, (case.name, reason)
        except Exception:  # the emulation goes on with what it did not check
            assert reason in answers.VALUES, (case.name, reason)
        else:
            assert reason in answers.VALUES, (case.name, reason)


def test_a_process_that_dies_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [json.dumps({"operator": "npu::one", "wrong": None, "source": ""})] * 3
    line = json.dumps(json.loads(names[0]) | {"answer": "taken", "message": ""})
    outcomes = {"--machine": (0, "{}"), "--names": (0, "\n".join(names))}
    rounds = {"0": (-11, line), "2": (0, line)}

    def child(*words: str) -> subprocess.CompletedProcess[str]:
        status, out = rounds[words[1]] if words[0] == "--from" else outcomes[words[0]]
        return subprocess.CompletedProcess(words, status, out)

    monkeypatch.setattr(answers, "child", child)
    answers.record(tmp_path / "answers.jsonl")
    found = [json.loads(one)["answer"] for one in (tmp_path / "answers.jsonl").read_text().splitlines()[1:]]
    assert found == ["taken", "died", "taken"]
    assert len(answers.disagreements(tmp_path / "answers.jsonl")) == 1


def test_it_needs_an_npu() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "runtime", "check", "doctor", "--device", "cpu", "--record", "x"],
        capture_output=True,
        text=True,
    )
    assert done.returncode and "--record asks an NPU, not cpu" in done.stderr + done.stdout
