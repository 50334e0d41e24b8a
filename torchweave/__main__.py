"""`python -m torchweave` is the command `torchweave`."""

from __future__ import annotations

import sys

from torchweave.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
