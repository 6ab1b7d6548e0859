"""The command `python -m utils.plots`."""

from utils.plots.pictures import main

if __name__ == "__main__":
    main()
