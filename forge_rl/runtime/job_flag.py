"""Builds the job that the flag --job names."""

from __future__ import annotations

import dataclasses
from typing import Any

from forge_rl.flags.options import build
from forge_rl.flags.texts import parse, suggest
from forge_rl.runtime.job_protocol import Job, SubmittedJob
from forge_rl.system.lazy import LazyNames

JOBS: LazyNames[type[Any]] = LazyNames(
    {
        "local": "forge_rl.jobs.local:LocalJob",
        "allocation": "forge_rl.jobs.allocation:AllocationJob",
        "slurm": "forge_rl.jobs.slurm:SlurmJob",
        "kubernetes": "forge_rl.jobs.kubernetes:KubernetesHosts",
        "process": "forge_rl.jobs.process:ProcessHosts",
    }
)
"""Kinds of jobs by name: frozen dataclasses whose fields are the options. KIND:VALUE sets the first field."""


def build_job(text: str) -> Job | SubmittedJob:
    """Return the job that a text names, as KIND[:KEY=VALUE,...] in the grammar of `flags.texts.parse`.

        build_job("local")
        build_job("process:4")
        build_job('process:hosts=4')

    Raises:
        ConfigError: the kind or an option is unknown, or an option has an invalid value.
    """
    parsed = parse(text, "--job", bundled=JOBS, takes_argument=True, takes_weight=False)
    if parsed.name not in JOBS:
        raise parsed.wrong(f"unknown kind of job {parsed.name!r}", suggest(parsed.name, JOBS, "kinds"))
    kind = JOBS[parsed.name]
    if parsed.argument:
        fields = [field.name for field in dataclasses.fields(kind)]
        if not fields:
            raise parsed.wrong(f"{parsed.name} has no options", f"write --job {parsed.name}")
        parsed = dataclasses.replace(parsed, raw_params={fields[0]: parsed.argument, **parsed.raw_params})
    job: Job | SubmittedJob = build(parsed, kind)
    return job
