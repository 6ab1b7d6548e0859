"""How OpenMP's threads wait for each other. Import this before torch: OpenMP reads its settings when it is loaded.

By default a thread that waits at the end of a parallel region spins. Where a loader process, or anyone else, has taken
the core of the thread that it waits for, both lose their time slice: on 2 cores beside one busy process a training step
of yolov5n took 20 times longer than with threads that sleep (docs/benchmarks.md). A user's own setting stays.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
