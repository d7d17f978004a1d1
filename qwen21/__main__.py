"""`python -m qwen21`."""

import sys

from .cli import main

sys.exit(main())
