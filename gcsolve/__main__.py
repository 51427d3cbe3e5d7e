"""`python -m gcsolve`: the command line."""

import sys

from gcsolve.cli import main

if __name__ == "__main__":
    sys.exit(main())
