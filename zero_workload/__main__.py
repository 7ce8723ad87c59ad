"""``python -m dynamiccl.zero_workload``."""

from .train import main

if __name__ == "__main__":
    raise SystemExit(main())
