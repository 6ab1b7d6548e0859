"""`python -m utils.plots`: see run_pictures."""

from utils.plots.run_pictures import main

if __name__ == "__main__":
    main()
