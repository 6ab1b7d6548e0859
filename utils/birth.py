"""The process that started this one. The scripts import it first: a launcher may be killed during the other imports."""

import os

PARENT = os.getppid()
