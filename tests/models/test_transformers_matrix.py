"""The table of transformers' classes without code of ours: cells say what a run found, and no class is
forgotten."""

import pytest

from tests.models import transformers_matrix as matrix
from tests.models.matrix_table import NOT_RUN
from tests.models.tiny_configs import other_classes


def test_every_class_has_a_row() -> None:
    """Its classes are those of the version of transformers that it was made with: others have others."""
    rows = matrix.PAGE.read_rows()
    assert rows and all(list(row.cells) == [matrix.SERVED, *matrix.CHECKS] for row in rows.values())
    for row in rows.values():
        served = row.cells[matrix.SERVED]
        others = {row.cells[check] for check in matrix.CHECKS}
        assert served != NOT_RUN and others == ({"yes"} if served == "yes" else {NOT_RUN}), row.name
    if matrix.TITLE in matrix.PAGE.between()[1]:
        assert rows.keys() == other_classes().keys()


# experts one by one in the checkpoint, norms without weights, BERT as a decoder; a mask, states, an encoder
@pytest.mark.parametrize(
    "name",
    [
        "LagunaForCausalLM",
        "NanoChatForCausalLM",
        "BertLMHeadModel",
        "DogeForCausalLM",
        "RwkvForCausalLM",
        "BartForCausalLM",
    ],
)
def test_a_row_is_what_the_page_has(name: str) -> None:
    row, problems = matrix.run_row(name, ("chunks", "prefix"))
    assert not problems
    kept = matrix.PAGE.read_rows()[name].cells
    skipped = [check for check in matrix.CHECKS if check not in ("chunks", "prefix")]
    assert row.cells == kept | dict.fromkeys(skipped, NOT_RUN)
