"""The folder of the draft model in the plan: the model's own means its next-token layers."""

import pytest

from tests.options.test_plan import plan


@pytest.mark.parametrize(
    ("algorithm", "path", "expected"),
    [
        ("NEXTN", "/m", None),
        ("NEXTN", "/m/", None),
        ("EAGLE", "/m", None),
        ("NEXTN", "/other", "/other"),
        ("STANDALONE", "/m", "/m"),
    ],
)
def test_the_model_itself(algorithm: str, path: str, expected: str | None) -> None:
    made = plan(f"-m /m --speculative-algorithm {algorithm} --speculative-draft-model-path {path}")
    assert made.speculation.speculative_draft_model_path == expected
    assert made.why["speculative_draft_model_path"].source == "flag --speculative-draft-model-path"
