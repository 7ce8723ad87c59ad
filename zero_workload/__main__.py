"""``python -m dynamiccl.zero_workload``: the door of ``job``."""

from .job.train import main

if __name__ == "__main__":
    raise SystemExit(main())
