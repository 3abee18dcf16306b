"""`python -m octavo` is the `octavo` command."""

import sys

from octavo.cli.main import main

sys.exit(main())
