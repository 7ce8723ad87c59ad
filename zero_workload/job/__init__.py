"""The job around the engine: model, data, launcher, checkpoints; ``python -m dynamiccl.zero_workload``."""
