"""Serve a model over OpenAI's and Anthropic's APIs.

python -m apps.gateway --model smollm2-135m --port 8000
python -m apps.gateway --model smollm2-135m --adapters math=runs/grpo-1a2b3c4d code=my_adapter

Requests need a key: --api-key-file, the environment's FORGE_RL_API_KEY, or one that is generated and kept in the folder
--out. The key itself cannot be a flag, as all users of a machine see the flags of its processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sys
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, Protocol, TypeVar

import tyro

from forge_rl.engines.context import with_longest_context
from forge_rl.engines.speculation import resolve_draft_model
from forge_rl.errors import CheckpointError, ConfigError, ModelError, check_flags
from forge_rl.flags.fields import check_idle
from forge_rl.gateway import Gateway, GatewayConfig, GeneratorBackend, check_address
from forge_rl.gateway.adapters import ServedAdapters
from forge_rl.gateway.keys import kept_key, read_key
from forge_rl.models.adapter_limits import check_served, served_rank
from forge_rl.models.adapters import Adapter, is_adapter
from forge_rl.models.bundled import default_cache
from forge_rl.models.hf_folder import read_object
from forge_rl.models.resolve import check_files, find_model, find_trained
from forge_rl.run.launch import launch
from forge_rl.runtime.cluster import Cluster
from forge_rl.runtime.faults import Faults
from forge_rl.runtime.isolation import Isolation, check_isolation
from forge_rl.runtime.processes import responsive_loop
from forge_rl.runtime.seats import ServiceHosts
from forge_rl.services.generator import Generator
from forge_rl.services.service_start import ServiceStart
from forge_rl.system.folders import make_private
from forge_rl.system.terminal import visible
from forge_rl.system.variables import pop_key
from forge_rl.tokens.stops import describe_added_stop
from forge_rl.tokens.template_args import TemplateArgTexts, read_template_args
from forge_rl.tokens.tokenizer import Tokenizer

KEY_VARIABLE = "FORGE_RL_API_KEY"
START_DEADLINE_S = 900.0
_STEP_ADAPTERS = 4
"""Adapters in a step of an engine, if --generator.max-loras is not set."""
RUN_FIELDS = tuple(f"generator.{name}" for name in ("guests", "min_replicas", "max_replicas"))
"""Settings of engines that have no effect without a trainer, or without hosts that come and go."""
_AGENT_FIELDS = ("agent_sampling", "agent_deadline_s", "agent_limits", "session_turns", "session_tokens")


class _Service(Protocol):
    async def stop(self) -> None: ...


S = TypeVar("S", bound=_Service)


@dataclass(frozen=True, kw_only=True)
class Config(GatewayConfig):
    """Serve a model over OpenAI's and Anthropic's APIs."""

    model: str = "smollm2-135m"
    """Bundled model, Hugging Face id, or folder of a model, a checkpoint, or a run, for its newest checkpoint."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters to serve as well as the model, as NAME=FOLDER: requests give NAME as their model. FOLDER is of an
    adapter in PEFT's format, of a checkpoint, or of a run with --lora.rank, for its best checkpoint or else its newest.
    --generator.max-loras limits how many share a step, and is 4 by default here."""
    adapter_folders: tuple[Path, ...] = ()
    """Folders from which requests may load further adapters, by POST /v1/load_lora_adapter, and then also drop any, by
    POST /v1/unload_lora_adapter, as vLLM has them. By default they can do neither."""
    max_adapters: int = 32
    """Maximum adapters that are loaded at a time."""
    port: int = 8000
    """Port to listen on; 0 picks a free one."""
    api_key_file: Path | None = None
    """File with the API key for requests, which no other user may have access to (chmod 600). By default the key is the
    environment's FORGE_RL_API_KEY, or else generated and kept in the file api_key in the folder --out."""
    without_key: Literal["nobody", "this-machine", "anybody"] = "nobody"
    """Who may send requests without a key: nobody, all users of this machine, or anybody who can reach the gateway. The
    last two turn the key off."""
    generator: Generator.Config = field(default_factory=Generator.Config)
    """The engines. Requests set the length and temperature of completions. The context is as long as the model and
    --generator.kv-cache-gib allow, unless --generator.max-model-len is set."""
    seed: int = 0
    """Seed of the engines, for requests without a seed."""
    parse_control_tokens: bool = False
    """Encode text in messages and tools that looks like a control token, such as <|im_end|>, as that token. By default
    it is text, as otherwise a tool's output could end its turn and inject a system message. Prompts of /v1/completions
    are always encoded with control tokens, as their author also writes the chat template's part."""
    template_args: TemplateArgTexts = ()
    cache: Path = field(default_factory=default_cache)
    """Folder for bundled models, which are built on first use."""
    out: Path = Path("runs/gateway")
    """Folder for the engines' logs, in logs/, and for the generated key."""
    isolation: Annotated[Isolation, tyro.conf.OmitArgPrefixes] = field(default_factory=Isolation)

    def __post_init__(self) -> None:
        super().__post_init__()
        read_template_args(self.template_args)
        check_flags(self, "--", minimum={"max_adapters": 1})
        self._check_adapters()
        if self.without_key == "this-machine" and self.is_public:
            raise ConfigError(
                f"--without-key is this-machine, but other machines can reach the host {self.host}",
                hint="leave out --host, use a key, or set --without-key anybody",
            )
        if self.without_key != "nobody" and self.api_key_file is not None:
            raise ConfigError(
                f"--without-key is {self.without_key}, but --api-key-file is set", hint="leave out one of them"
            )

    def check_effects(self) -> None:
        """Refuse flags that cannot act here, or that other flags rule out.

        Raises:
            ConfigError: names the first of them.
        """
        idle_groups = {
            "it is of the sessions of a run's agents": _AGENT_FIELDS,
            "requests set their temperature": ("generator.temperature",),
            "no trainer lends devices, and no host comes or goes": RUN_FIELDS,
            "no adapters are served": () if self.serves_adapters else ("max_adapters",),
        }
        check_idle(self, idle_groups)

    @property
    def serves_adapters(self) -> bool:
        """True if there are adapters to serve, or may be."""
        return bool(self.adapters or self.adapter_folders or self.generator.max_loras)

    @property
    def adapter_places(self) -> dict[str, Path]:
        """Where each adapter of --adapters is, by name."""
        return {name: Path(place).expanduser() for name, _, place in (text.partition("=") for text in self.adapters)}

    def _check_adapters(self) -> None:
        for text in self.adapters:
            name, _, place = text.partition("=")
            if not name or not place or not name.isprintable():
                raise ConfigError(f"--adapters has {text!r:.200}", hint="give NAME=FOLDER, such as math=runs/math")
        names = [text.partition("=")[0] for text in self.adapters]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"--adapters names {twice[0]!r} twice", hint="give each adapter a name of its own")
        if len(names) > self.max_adapters:
            raise ConfigError(
                f"--adapters has {len(names)}, and --max-adapters is {self.max_adapters}", hint="raise --max-adapters"
            )
        if self.adapter_folders and self.without_key != "nobody":
            raise ConfigError(
                f"--without-key is {self.without_key}, but --adapter-folders lets requests load and drop adapters",
                hint="leave out one of them",
            )


@dataclass(frozen=True, kw_only=True)
class Services:
    """Services that run while a model is served or evaluated."""

    cluster: Cluster
    faults: Faults
    stack: contextlib.AsyncExitStack

    @property
    def start(self) -> ServiceStart:
        """Cluster, faults and deadline with which services start."""
        return ServiceStart(cluster=self.cluster, faults=self.faults, deadline_s=START_DEADLINE_S)

    async def started(self, starting: Awaitable[S]) -> S:
        """Return a service once it has started; it is stopped at the end."""
        service = await starting
        self.stack.push_async_callback(service.stop)
        return service

    async def engines(
        self, config: Generator.Config, folder: Path, seed: int, cache: Path, *, hosts: ServiceHosts | None = None
    ) -> Generator:
        """Start engines that serve the model in a folder; `cache` is where a bundled draft model is kept."""
        drafts = await asyncio.to_thread(resolve_draft_model, config.speculation, folder, cache)
        config, start = replace(config, speculation=drafts), replace(self.start, hosts=hosts)
        generator = await self.started(Generator.start(config, start, model=folder, seed=seed))
        await generator.serve_model()
        return generator


@contextlib.asynccontextmanager
async def running_services(out: Path, isolation: Isolation) -> AsyncIterator[Services]:
    """Let services run inside the context, with their logs in the folder `out`/logs."""
    faults = Faults()
    faults.install()
    logs = out / "logs"
    make_private(logs, CheckpointError)
    cluster = Cluster(logs.resolve(), may_be_public=isolation.public_ports)
    async with contextlib.AsyncExitStack() as stack:
        # First in, last out: services stop before the processes that they run in.
        stack.push_async_callback(cluster.close)
        try:
            yield Services(cluster=cluster, faults=faults, stack=stack)
        finally:
            # From here on, processes that end are no failures.
            faults.closing = True


@contextlib.asynccontextmanager
async def serving(config: Config, key: str = "") -> AsyncIterator[tuple[Gateway, Generator, Faults]]:
    """Run engines and the gateway in front of them inside the context.

    Args:
        key: the owner's key, for requests outside of sessions; "" for none.

    Raises:
        ForgeError: the engines or the gateway failed to start.
    """
    check_address(config)
    if open_to := check_isolation(config.isolation):
        _warn(open_to)
    async with running_services(config.out, config.isolation) as services:
        folder, name = await asyncio.to_thread(_model, config)
        args = read_template_args(config.template_args)
        tokenizer = Tokenizer(folder, parse_control_tokens=config.parse_control_tokens, template_args=args)
        if note := describe_added_stop(tokenizer):
            _warn(note)
        settings = await asyncio.to_thread(_with_adapters, config, folder, name)
        settings = with_longest_context(settings, folder, min_tokens=settings.max_tokens)
        engines = await services.engines(settings, folder, config.seed, config.cache)
        gateway = Gateway(
            config,
            GeneratorBackend(engines, name),
            tokenizer,
            api_key=key,
            open_to_all=config.without_key != "nobody",
            healthy=lambda: engines.answers,
            warn=_warn,
            adapters=await _adapters(config, engines, settings, folder) if config.serves_adapters else None,
        )
        async with gateway:
            yield gateway, engines, services.faults


async def main(config: Config) -> None:
    """Serve until a signal, or until no engine is left."""
    key, shell_key = _key(config)
    print(f"starting {config.model}", flush=True)
    with responsive_loop():
        async with serving(config, key) as (gateway, engines, faults):
            _greet(gateway, shell_key, engines.max_model_len)
            raise await faults.wait()


def _key(config: Config) -> tuple[str, str]:
    """Read or generate the key for requests; return it, and a shell expression for it. Both are "" for none.

    Raises:
        ConfigError: the key file is unreadable or unsafe, or no valid key is there.
    """
    environment_key = pop_key("the gateway", KEY_VARIABLE)
    if config.without_key != "nobody":
        return "", ""
    file = config.api_key_file or config.out / "api_key"
    if config.api_key_file is not None:
        key = read_key(file)
    elif environment_key:
        return environment_key, f"${KEY_VARIABLE}"
    else:
        key = kept_key(file)
    return key, f"$(cat {shlex.quote(str(file.resolve()))})"


def _warn(text: str) -> None:
    print(f"warning: {visible(text)}", file=sys.stderr, flush=True)


def _model(config: Config) -> tuple[Path, str]:
    """Return the model's folder, and its name in requests."""
    folder = find_model(config.model, config.cache)
    path = Path(config.model).expanduser()
    return folder, Path(os.path.abspath(path)).name if path.is_dir() else config.model


def _with_adapters(config: Config, model: Path, name: str) -> Generator.Config:
    """Return the engines' settings, with room for the adapters, all of which they can serve.

    Raises:
        ConfigError, ModelError: they cannot serve one, which the message names.
    """
    settings = config.generator
    if not config.serves_adapters:
        return settings
    # A request names its model only, so an adapter of the same name could never be asked for.
    if clash := config.adapter_places.keys() & {name, *config.aliases}:
        raise ConfigError(f"--adapters names {min(clash)!r}, the model's own name", hint="choose another name")
    folders = [adapter_folder(place, model) for place in config.adapter_places.values()]
    settings = replace(
        settings,
        max_loras=settings.max_loras or _STEP_ADAPTERS,
        max_lora_rank=max([settings.max_lora_rank, *(Adapter.read(folder).rank for folder in folders)]),
    )
    # Checked before the engines start, which takes long.
    for folder in folders:
        check_served(Adapter.read(folder), model, max_rank=served_rank(settings.max_lora_rank))
    return settings


def adapter_folder(place: Path, model: Path) -> Path:
    """Return the folder of the adapter that a run, a checkpoint or a folder stands for.

    Raises:
        ModelError: there is none, it is not safe to read, or it adapts another model than the folder `model` holds.
    """
    try:
        folder = find_trained(place)
    except OSError as error:
        raise ModelError(f"{place} cannot be read: {error.strerror}", hint="name a folder that you may read") from error
    if not is_adapter(folder):
        raise ModelError(
            f"{place} holds no adapter in PEFT's format",
            hint="name a folder with adapter_config.json, or a run with --lora.rank",
        )
    check_files(folder)
    adapter = Adapter.read(folder)
    adapter.check_base(model)
    if adapter.quantization is not None:
        raise ModelError(
            f"{place} was trained on a base in {adapter.quantization.base_format}, and engines hold other values of it",
            hint="serve the merged model: --model names the run, or what forge-rl merge writes",
        )
    return folder


def describe_other_template(folder: Path, model: Path) -> str:
    """Return a warning that an adapter has another chat template than the model, whose template its requests get; ""
    if it has the same one, or none."""
    template = _template(folder)
    if not template or template == _template(model):
        return ""
    return f"the adapter in {folder} has another chat template than the model, and answers with the model's"


def _template(folder: Path) -> object:
    """Return a folder's chat template, or its named ones, in whichever file it is; None if there is none."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(errors="replace").strip()
    for name in ("tokenizer_config.json", "chat_template.json"):
        if (folder / name).is_file() and (template := read_object(folder / name).get("chat_template")):
            return template.strip() if isinstance(template, str) else template
    return None


async def _adapters(config: Config, engines: Generator, settings: Generator.Config, model: Path) -> ServedAdapters:
    """Load the adapters of --adapters into the engines."""

    def find(place: Path) -> Path:
        folder = adapter_folder(place, model)
        check_served(Adapter.read(folder), model, max_rank=served_rank(settings.max_lora_rank))
        if note := describe_other_template(folder, model):
            _warn(note)
        return folder

    # `find` also checks the adapters that requests load later.
    adapters = ServedAdapters(engines, find, folders=config.adapter_folders, max_adapters=config.max_adapters)
    for name, place in config.adapter_places.items():
        await adapters.add(name, place)
    return adapters


def _greet(gateway: Gateway, shell_key: str, max_model_len: int) -> None:
    # Through a file from the shell: all users of the machine can see command lines.
    key = f""" \\\n    -H @<(echo "authorization: Bearer {shell_key}")""" if shell_key else ""
    who = f'the API key is "{shell_key}"' if shell_key else "requests need no key"
    body = f'{{"model": "{gateway.model}", "messages": [{{"role": "user", "content": "What is 2 + 3?"}}]}}'
    print(
        f"serving {gateway.model} at {gateway.base_url}\n{who}\n"
        f"prompt and answer have up to {max_model_len:,} tokens\n"
        f"{_adapter_line(gateway)}\n"
        f"  curl {gateway.base_url}/chat/completions{key} -H 'content-type: application/json' \\\n    -d '{body}'\n\n"
        "Ctrl-C stops it",
        flush=True,
    )


def _adapter_line(gateway: Gateway) -> str:
    names = () if gateway.adapters is None else tuple(gateway.adapters.names)
    return f"adapters, by the model that a request names: {', '.join(names)}\n" if names else ""


if __name__ == "__main__":
    launch(Config, main)
