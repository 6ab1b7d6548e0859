"""Plants the fault that the environment names: Python imports this module first if PYTHONPATH leads to its folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if os.environ.get("FAULT"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from fault_points import plant

    plant(os.environ["FAULT"])
