"""Public names of the jobs."""

from forge_rl.jobs.allocation import AllocationJob as AllocationJob
from forge_rl.jobs.doctor import Examination as Examination
from forge_rl.jobs.doctor import examine as examine
from forge_rl.jobs.kubernetes import KubernetesHosts as KubernetesHosts
from forge_rl.jobs.local import LocalJob as LocalJob
from forge_rl.jobs.process import ProcessHosts as ProcessHosts
from forge_rl.jobs.slurm import SlurmJob as SlurmJob
