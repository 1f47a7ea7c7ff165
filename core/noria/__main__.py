"""`python -m noria`."""

import sys

from noria.cli.main import main

sys.exit(main())
