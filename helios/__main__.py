"""``python -m helios`` is the command ``helios``."""

import sys

from helios.cli import main

if __name__ == "__main__":
    sys.exit(main())
