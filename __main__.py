"""``python -m dynamiccl``: the command line."""

from .agent.cli import main

if __name__ == "__main__":
    main()
