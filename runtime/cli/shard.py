"""`runtime shard --output FOLDER [OPTION ...]`: writes what each rank reads of a checkpoint to files of its
own, for --load-format sharded_state. The options are those of `runtime serve`, of which --tp-size and
--ep-size count."""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from runtime.options.parse import from_argv
from runtime.options.resolve import plan_for

MAX_BYTES = 2 * 10**9  # of a file


def run(argv: Sequence[str]) -> int:
    """Writes the files. Raises StartError for options that cannot work."""
    parser = argparse.ArgumentParser(
        prog="runtime shard",
        allow_abbrev=False,
        usage="runtime shard --output FOLDER [--max-bytes N] --model-path MODEL --tp-size N ...",
        description="Write what each rank reads of a checkpoint to files of its own. The options are those "
        "of `runtime serve`; start it with --load-format sharded_state and the same parallel options.",
    )
    parser.add_argument("--output", required=True, metavar="FOLDER", help="a new folder")
    parser.add_argument("--max-bytes", type=int, default=MAX_BYTES, metavar="N", help="bytes of a file")
    own, options = parser.parse_known_args(list(argv))
    plan = plan_for(from_argv(options))
    from runtime.settings import model_config, start_rank  # here, so that --help answers at once

    start = start_rank(plan, model_config(plan))
    command = [sys.executable, "-m", "runtime.ranks.write_rank_files", own.output, str(own.max_bytes)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, input=msgspec.json.encode(start), env=environment, check=False)
    if done.returncode == 0:
        print(
            f"serve it with --model-path {own.output} --load-format sharded_state and the same "
            "parallel options"
        )
    return done.returncode
