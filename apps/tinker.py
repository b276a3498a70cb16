"""Serve the Tinker API: several people train and sample adapters over one model, with the unmodified tinker client.

python -m apps.tinker --model smollm2-135m --port 8001

Each tenant has a key, from the file --keys, or one that is generated and kept in the folder --out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import tyro

from forge_rl.engines.architecture import read_architecture
from forge_rl.engines.context import with_longest_context
from forge_rl.engines.decode_layout import check_decode_layout
from forge_rl.engines.degrees import check_model
from forge_rl.engines.devices import gpus
from forge_rl.engines.lora_config import LoRAConfig, check_shared_base
from forge_rl.errors import ConfigError, ModelError
from forge_rl.flags.fields import check_idle
from forge_rl.gateway import check_address
from forge_rl.gateway.keys import kept_key, read_key_file
from forge_rl.models.adapters import BASE, Adapter
from forge_rl.models.bundled import default_cache
from forge_rl.models.hub import is_hub_model
from forge_rl.models.resolve import find_model
from forge_rl.run.launch import launch
from forge_rl.run.lora_settings import check_served_targets
from forge_rl.run.records.run_dir import lock_folder
from forge_rl.runtime.children import visible_gpu
from forge_rl.runtime.cluster import THIS_HOST
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.isolation import Isolation, check_isolation
from forge_rl.runtime.processes import responsive_loop
from forge_rl.runtime.seats import ServiceHosts
from forge_rl.services.generator import Generator
from forge_rl.services.policy_backend import most_scored_tokens
from forge_rl.services.service_start import ServiceStart
from forge_rl.services.trainer import Trainer
from forge_rl.services.trainer_config import TrainedModel, TrainingRun
from forge_rl.system.terminal import visible
from forge_rl.tinker import BaseModel, TinkerConfig, TinkerServer, TinkerServices, read_keys
from forge_rl.tokens.tokenizer import Tokenizer

from .gateway import RUN_FIELDS, START_DEADLINE_S, running_services

_LOADED = 4
"""Adapters that engines hold at a time, if --generator.max-loras is not set."""


@dataclass(frozen=True, kw_only=True)
class Config(TinkerConfig):
    """Serve the Tinker API over one base model."""

    model: str = "smollm2-135m"
    """Bundled model, Hugging Face id, or folder of a model: the base of all adapters, and its name in requests."""
    tokenizer_id: str = ""
    """Where clients load the tokenizer from, a Hugging Face id or a folder on their machine. By default --model if it
    is an id, else the base's folder here."""
    keys: Path | None = None
    """File with a line NAME KEY for each tenant, which no other user may have access to (chmod 600); keys start with
    tml-. By default one tenant's key is generated, and kept in the file api_key in the folder --out."""
    lora: LoRAConfig = field(default_factory=lambda: LoRAConfig(rank=32))
    """Largest rank of adapters, and the scale and targets of all; requests choose a rank, and attention or
    feed-forward layers of these targets."""
    trainer: Trainer.Config = field(default_factory=Trainer.Config)
    """The trainer. Requests set the optimizer."""
    generator: Generator.Config = field(default_factory=Generator.Config)
    """The engines. Requests set the length and temperature of samples."""
    seed: int = 0
    """Seed of samples for which requests have none."""
    cache: Path = field(default_factory=default_cache)
    """Folder for bundled models, which are built on first use."""
    out: Path = Path("runs/tinker")
    """Folder for trainings, checkpoints, accounts, the generated key, and logs; with the same one, all go on."""
    isolation: Annotated[Isolation, tyro.conf.OmitArgPrefixes] = field(default_factory=Isolation)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lora.rank:
            raise ConfigError("--lora.rank is 0", hint="set it to the largest rank of an adapter")
        check_shared_base(self.lora)
        if self.lora.dropout:
            raise ConfigError(f"--lora.dropout is {self.lora.dropout}, which requests cannot see", hint="leave it out")

    def check_effects(self) -> None:
        """Refuse flags that cannot act here.

        Raises:
            ConfigError: names the first of them.
        """
        idle_groups = {
            "requests set their temperature": ("generator.temperature",),
            "the trainer lends no devices, and no host comes or goes": RUN_FIELDS,
            "requests bring their optimizer, and say when it steps": (
                *("trainer.optimizer", "trainer.minibatches", "trainer.epochs", "trainer.max_skipped_updates"),
            ),
        }
        check_idle(self, idle_groups)


@contextlib.asynccontextmanager
async def serving(config: Config) -> AsyncIterator[tuple[TinkerServer, Faults]]:
    """Run the trainer, the engines, and the server in front of them inside the context.

    Raises:
        ForgeError: one of them failed to start.
    """
    check_address(config.http)
    # On CUDA a run chooses it by a plan of memory, which is of a run's services.
    if not config.trainer.seq_len:
        raise ConfigError(
            "--trainer.seq-len is 0, and no row of data would fit",
            hint="set it to the tokens of the longest datum, a multiple of 128: a row of as many must fit the GPU",
        )
    config.trainer.check_devices()
    if open_to := check_isolation(config.isolation):
        _warn(open_to)
    keys = _keys(config)
    async with running_services(config.out, config.isolation) as services:
        # Two servers on one folder would write over each other's trainings.
        services.stack.callback(os.close, lock_folder(config.out))
        folder = await asyncio.to_thread(find_model, config.model, config.cache)
        await asyncio.to_thread(_check_trainings, config, folder)
        trainer_config = replace(config.trainer, lora=config.lora, lora_seed=config.seed)
        architecture = read_architecture(folder, trainer_config.modelling)
        check_model(trainer_config, trainer_config.ranks, architecture)
        check_served_targets(config.lora, folder, architecture)
        settings = replace(
            config.generator,
            max_loras=config.generator.max_loras or _LOADED,
            # Engines must hold every adapter that the trainer can make.
            max_lora_rank=max(config.generator.max_lora_rank, config.lora.rank),
        )
        check_decode_layout(folder, settings, engines=settings.replicas)
        hosts = engine_hosts(settings, trainer_config.ranks)
        if config.mix_rows and (trainer_config.ranks > 1 or architecture.experts is not None):
            raise ConfigError(
                "--mix-rows takes a trainer of one rank, and a model without experts",
                hint="leave it out, or set --trainer.ranks 1",
            )
        start = ServiceStart(cluster=services.cluster, faults=services.faults, deadline_s=START_DEADLINE_S)
        run = TrainingRun(seed=config.seed, total_steps=1, skipped=config.out / "skipped")
        trainer = await services.started(
            Trainer.start(trainer_config, start, model=TrainedModel(folder=folder), run=run)
        )
        settings = with_longest_context(settings, folder, min_tokens=settings.max_tokens)
        engines = await services.engines(settings, folder, config.seed, config.cache, hosts=hosts)
        vocab_size = Tokenizer(folder).vocab_size
        base = BaseModel(
            name=config.model,
            folder=folder,
            tokenizer_id=config.tokenizer_id or _tokenizer_id(config.model, folder),
            vocab_size=vocab_size,
            max_model_len=engines.max_model_len,
            lora=config.lora,
        )
        behind = TinkerServices(
            trainer=trainer,
            engines=engines,
            max_loaded=4 * settings.max_loras,
            max_scored=most_scored_tokens(vocab_size),
        )
        server = TinkerServer(config, base, keys, behind, out=config.out, seed=config.seed)
        async with server:
            yield server, services.faults


async def main(config: Config) -> None:
    """Serve until a signal, or until the trainer or the last engine has failed for good."""
    print(f"starting {config.model}", flush=True)
    with responsive_loop():
        async with serving(config) as (server, faults):
            _greet(config, server)
            # The first of them to fail ends the program.
            failures = [asyncio.ensure_future(work) for work in (faults.wait(), server.failed())]
            done, _ = await asyncio.wait(failures, return_when=asyncio.FIRST_COMPLETED)
            raise done.pop().result()


def _keys(config: Config) -> dict[str, str]:
    """Read the tenants' keys, or generate one.

    Raises:
        ConfigError: the file is unreadable or unsafe, or malformed.
    """
    if config.keys is not None:
        return read_keys(config.keys, read_key_file(config.keys))
    return {"owner": kept_key(config.out / "api_key", prefix="tml-")}


def _check_trainings(config: Config, folder: Path) -> None:
    """Check that earlier trainings in the folder --out adapt this model.

    Raises:
        ConfigError: they adapt another one.
    """
    for depth in ("*/*", "*/*/*"):  # snapshots, and checkpoints by their kind
        for path in config.out.glob(f"models/{depth}/{BASE}"):
            try:
                adapter = Adapter.read(path.parent)
            except ModelError:  # the server leaves out what it cannot read
                continue
            try:
                adapter.check_base(folder)
            except ModelError as error:
                raise ConfigError(
                    f"{config.out} holds trainings over another model than {config.model}: {error.message}",
                    hint="choose another --out, or that model",
                ) from error
            return  # all of them adapt the same


def engine_hosts(settings: Generator.Config, ranks: int) -> ServiceHosts | None:
    """Return this host with the GPUs that the trainer leaves to the engines; None without GPUs, or if they share them.

    Raises:
        ConfigError: they share GPUs whose memory the engines would take whole.
    """
    names, needed = tuple(visible_gpu(index) for index in range(gpus())), settings.replicas * settings.devices
    if len(names) >= ranks + needed:
        return ServiceHosts(gpus={THIS_HOST: names[ranks:]})
    if names and not settings.gpu_memory_utilization:
        raise ConfigError(
            f"{ranks} ranks of the trainer and {needed} devices of engines share {len(names)} GPUs",
            hint="set --generator.gpu-memory-utilization to the share of a GPU that the trainer leaves to an engine",
        )
    return None


def _tokenizer_id(model: str, folder: Path) -> str:
    """Return where clients find the tokenizer: a hub id, which works on any machine, or else the folder on this one."""
    is_id = is_hub_model(model) and not Path(model).expanduser().is_dir()
    return model.partition("@")[0] if is_id else str(folder.absolute())


def _warn(text: str) -> None:
    print(f"warning: {visible(text)}", file=sys.stderr, flush=True)


def _greet(config: Config, server: TinkerServer) -> None:
    key = config.keys or config.out / "api_key"
    print(
        f"serving {config.model} at {server.url}\n\n"
        f"  export TINKER_BASE_URL={server.url}\n"
        f"  export TINKER_API_KEY=...  # from {key}\n\n"
        f"rank up to {config.lora.rank}; Ctrl-C stops it, and the same command goes on",
        flush=True,
    )


if __name__ == "__main__":
    launch(Config, main)
