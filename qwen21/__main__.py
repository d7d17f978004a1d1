"""`python -m qwen21`."""

import signal
import sys

from .cli.main import main
from .cli.stdio import prepare

prepare()
signal.signal(signal.SIGINT, signal.SIG_IGN)  # but for `main`, which ends the process in order
sys.exit(main())
