"""`python -m runtime` is `runtime`."""

import sys

from runtime.cli import main

sys.exit(main())
