"""``dynamiccl lab``: commands for those who work on dynamiccl."""

from .. import Group

lab = Group(
    "lab",
    __name__,
    {"Commands": ("gpu-check", "submit", "train")},
    help="Check a machine with GPUs, file its results, train the policy.",
)
