"""The job around the engine: model, data, optimizers, launcher, checkpoints; ``python -m dynamiccl.zero_workload``."""
