"""Files that options name and a start reads: what is no regular file is refused at once, by the option's
name. Opening a FIFO would wait for a writer, and a device may have no end."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from runtime.diffusion_settings import read_algorithm
from runtime.errors import OptionsError, StartError
from runtime.http.key_file import read_key_file
from runtime.http.server import tls_context
from runtime.messages.speculation import DraftModel, Speculation
from runtime.models.config.cache_scales import read_cache_scales
from runtime.models.config.checksums import check_files
from runtime.models.config.draft_config import read_draft_config
from runtime.models.config.expert_location import read_expert_location
from runtime.models.config.model_config import read_config
from runtime.models.draft_heads import read_token_map
from runtime.nodes.secret import NODES_SECRET
from runtime.options.parse import from_argv, from_values
from runtime.options.profile import read_profile
from runtime.options.resolve import plan_for
from runtime.options.table import rows
from runtime.pdmux_settings import read_pdmux
from runtime.ranks.tensor_dump import read_recorded
from runtime.settings import tree_rule
from runtime.text.builtin_templates import template_sources
from runtime.text.infill import find_format
from runtime.transfer.key import SERVERS_KEY

POCKET = Path(__file__).parents[2] / "runtime/pocket"
LIMIT_S = 20  # for a read that would never end


def good(folder: Path) -> str:
    """A file that can be opened."""
    (file := folder / "good").write_text("")
    return str(file)


# what a start does with the file of each option; it raises OptionsError or StartError
READERS: dict[str, Callable[[Path], object]] = {
    "--config": lambda file: from_argv(["--config", str(file)]),
    "--profile": lambda file: read_profile(str(file)),
    "--chat-template": lambda file: template_sources({}, str(file), None),
    "--completion-template": lambda file: find_format(str(file), lambda _: True),
    "--api-key-file": read_key_file,
    "--model-checksum": partial(check_files, POCKET),
    "--decrypted-config-file": lambda file: read_config(POCKET, config_file=str(file)),
    "--decrypted-draft-config-file": lambda file: read_draft_config(
        Speculation(
            algorithm="STANDALONE",
            num_steps=3,
            topk=1,
            num_draft_tokens=4,
            draft_model=DraftModel(path=str(POCKET), config_file=str(file)),
        ),
        read_config(POCKET),
    ),
    "--debug-tensor-dump-input-file": lambda file: read_recorded(str(file)),
    "--disaggregation-key-file": lambda file: SERVERS_KEY.read(str(file)),
    "--dllm-algorithm-config": lambda file: read_algorithm("LowConfidence", str(file)),
    "--dist-secret-file": lambda file: NODES_SECRET.read(str(file)),
    "--init-expert-location": lambda file: read_expert_location(str(file), (True,), 4, 4),
    "--pdmux-config-path": lambda file: read_pdmux(str(file)),
    "--quantization-param-path": lambda file: read_cache_scales(str(file), 1, 4),
    "--speculative-token-map": lambda file: read_token_map(file, 100),
    "--ssl-certfile": lambda file: tls_context(str(file), None, None, None),
    "--ssl-keyfile": lambda file: tls_context(good(file.parent), str(file), None, None),
    "--ssl-ca-certs": lambda file: tls_context(good(file.parent), None, None, str(file)),
    "--tree-decode-config": lambda file: tree_rule(
        plan_for(from_values({"model_path": str(POCKET), "tree_decode_config": str(file)})),
        read_config(POCKET),
    ),
}


def fifo(file: Path) -> None:
    """A FIFO without a writer."""
    os.mkfifo(file)


def device(file: Path) -> None:
    """A link to a device."""
    file.symlink_to("/dev/null")


KINDS: dict[str, Callable[[Path], None]] = {"a FIFO": fifo, "a folder": Path.mkdir, "a device": device}


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """Ends a test that waits for a writer."""

    def end(*_: object) -> None:
        raise TimeoutError("the file is being read")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", READERS)
def test_what_is_no_regular_file_is_refused(tmp_path: Path, option: str, kind: str) -> None:
    KINDS[kind](file := tmp_path / "x.yaml")
    with pytest.raises((OptionsError, StartError)) as caught:
        READERS[option](file)
    assert option in str(caught.value) and f"it is {kind}" in str(caught.value)


def test_every_option_that_names_a_file_to_read_is_tried() -> None:
    named = {
        row.flag
        for row in rows()
        if row.status in ("works", "partial")
        and row.type == "str"
        and re.search(r"\bfiles?\b", f"{row.help} {row.note}", re.IGNORECASE)
        and not row.help.startswith(("Folder", "PATH", "Address"))
    }
    assert named == READERS.keys()
