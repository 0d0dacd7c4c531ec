"""``python -m layerstore.cli``: the command line if its script is not on the PATH."""

import sys

from layerstore.cli.entry import main

sys.exit(main())
