"""The job around the engine: model, data, launcher; ``python -m dynamiccl.zero_workload``."""
