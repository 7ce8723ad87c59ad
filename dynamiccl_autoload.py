"""What ``import torch`` calls at its end (entry point group ``torch.backends``): nothing, unless a run asks for it.

A module beside the packages, of the standard library alone: every ``import torch`` in the environment passes through
it, and must not fail, nor become slower, for anything that is wrong with the rest.
"""

import os


def autoload() -> None:
    """Register the emulated backend, install the probe, each where the environment asks for it; never raises.

    As in the plugin, an empty variable counts as not set: an empty path would be the job's current folder.
    """
    try:
        if os.environ.get("DYNAMICCL_CLUSTER"):
            from dynamiccl.envs.sim.emulated.backend import register

            register()
        if _is_of_a_job_within():
            del os.environ["DYNAMICCL_RUN"]
        if os.environ.get("DYNAMICCL_RUN") and not _is_switched_off():
            from dynamiccl.envs.nccl.probe.probe import install

            install()
    except (Exception, SystemExit) as error:
        try:  # noqa: SIM105 - contextlib would be one more import
            os.write(
                2, f"dynamiccl: not attached: {type(error).__name__}: {error}\n".encode(errors="replace")
            )
        except OSError:
            pass


def _is_of_a_job_within() -> bool:
    """Whether this process was started by a rank of the run's job: it may be of another job, which has no run."""
    rank, _, run = os.environ.get("DYNAMICCL_WITHIN", "").partition(":")
    return run != "" and run == os.environ.get("DYNAMICCL_RUN") and rank != str(os.getpid())


def _is_switched_off() -> bool:
    """Whether the site has turned the tuner off here; then nothing of ours stays in the environment."""
    from dynamiccl.envs.nccl.site_switch import leave, switched_off

    if not switched_off():
        return False
    leave(os.environ)
    return True
