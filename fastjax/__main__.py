"""`python -m fastjax` is the command `fastjax`."""

import sys

from fastjax.cli import main

sys.exit(main())
