"""`python -m esper` is the `esper` program."""

import sys

from esper.cli import main

sys.exit(main())
