"""One worker process. What torchrun runs: ``torchrun train.py --config FILE [--section.key value]``."""

from torchtitan_ft.worker import main

if __name__ == "__main__":
    main()
