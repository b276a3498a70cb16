"""Jobs: hosts for a run from Slurm, Kubernetes, ssh or this machine, and their examination before a run.

    job = SlurmJob(nodes=2)
    async with ProcessHosts(hosts=2).open(JobListener(say=print)) as hosts:

Names are imported on first use. The core reaches them by the flag --job.
"""

from forge_rl.system.lazy import lazy_package

__all__, __getattr__ = lazy_package(__name__, __file__)
