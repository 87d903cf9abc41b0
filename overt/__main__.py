"""`python -m overt` is `overt`."""

import sys

from overt.cli import main

if __name__ == "__main__":
    sys.exit(main())
