"""`python -m data.shapes`: draw the built-in data set by hand; see data/builtin/shapes.py."""

from data.builtin.shapes import main
from utils.distributed.failure import run_main

if __name__ == "__main__":
    run_main(main)
