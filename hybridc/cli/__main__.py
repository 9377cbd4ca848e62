"""`python -m hybridc.cli`: the same as `hybridc`."""

import sys

from hybridc.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
