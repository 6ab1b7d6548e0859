"""The parent process at start. The scripts import it first, as a launcher may be killed during the other imports."""

import os

PARENT = os.getppid()
