"""Tools of an MCP server, started by a command or reached by URL."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from forge_rl.envs.protocol import Observation, Step
from forge_rl.envs.tool import read_arguments, tool_schema
from forge_rl.envs.tools import ToolSettings, ToolUse
from forge_rl.errors import ConfigError, ForgeError, ReplicaError, check_flags, check_installed
from forge_rl.system.redaction import without_credentials
from forge_rl.system.supervised import supervised
from forge_rl.types import Task, ToolCall

_AGAIN_S = 0.5
"""Delay before reconnecting, in seconds."""
_CLOSE_S = 10.0
"""Longest wait for a connection to close, in seconds; a command that hangs is killed within 4."""
_HINT = "write --env 'mcp:COMMAND' or --env mcp:http://HOST:PORT/mcp"


def _block_text(block: Any) -> str:
    """Return one block of a tool's result as text for the model: its text, a resource's text, or an address."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource":
        text = getattr(block.resource, "text", None)
        return f"{block.resource.uri}\n{text}" if text is not None else f"[resource {block.resource.uri}]"
    return f"[{block.type} {block.uri}]" if block.type == "resource_link" else f"[{block.type}]"


@dataclass(frozen=True, eq=False)
class McpEnv(ToolSettings):
    """Makes environments with the tools of an MCP server; a completion without a tool call is the answer, which the
    run's reward scores.

        McpEnv("python server.py", instruction="Use the tools.")  # --env "mcp:python server.py"
        McpEnv("http://127.0.0.1:8000/mcp")

    The model sees tool results as text, and so errors, arguments that cannot be sent, and results that do not fit the
    tool's own schema. If a server dies during a call, its episode is an infrastructure error and is retried with a new
    server. After a call that timed out, a shared server that does not even list its tools within timeout_s is replaced
    before the next call. A command gets only MCP's default environment variables, such as HOME and PATH.
    """

    server: str
    """Command line of a stdio server, or URL of a streamable HTTP server."""
    _: KW_ONLY
    per: Literal["process", "session"] = "process"
    """One server for all episodes of an environment process, or one per episode for stateful servers."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables of the command."""
    tools: Sequence[str] = ()
    """Names of the tools to show the model; all by default."""
    start_s: float = 60.0
    """Timeout for the server to start and list its tools."""
    _shared: list[McpConnection] = field(default_factory=list, init=False, repr=False)
    """Connection of this process, once opened."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(self, "McpEnv's ", above={"start_s": 0})
        check_installed("--env mcp", "mcp", "mcp")
        if self.per not in ("process", "session"):
            raise ConfigError(f"per is {self.per!r} in --env mcp", hint="write per=process or per=session")
        if not self.server.strip():
            raise ConfigError("--env mcp names no server", hint=_HINT)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shared": []}  # a connection belongs to one process

    def __call__(self, task: Task) -> McpSession:
        """Make the environment of one episode."""
        return McpSession(self, task)

    @property
    def title(self) -> str:
        """Name of the server for messages, without the credentials of its URL."""
        return f"MCP server {without_credentials(self.server)!r}"

    async def connect(self) -> McpConnection:
        """Return an open connection: the one shared by this process, or a new one per session.

        Raises:
            ForgeError: the server does not start; gives the cause.
        """
        if self.per == "session":
            connection = McpConnection(self)
            try:
                return await connection.opened()
            except BaseException:
                # Also if the episode was cancelled: it does not know of the connection yet.
                await connection.close()
                raise
        if self._shared:
            # A server that may hang is not used before it is known whether it does.
            await self._shared[0].checked()
        while self._shared and (old := self._shared[0]).is_over:
            await old.close()  # its server may hold a port or a lock that the next one needs
            # Another episode may have replaced it while this one waited.
            if self._shared == [old]:
                self._shared.clear()
        if not self._shared:
            self._shared.append(McpConnection(self))
        return await self._shared[0].opened()


class McpConnection:
    """Connection to a server, which owns its process if it is a command. One task holds it open, as `mcp` requires."""

    def __init__(self, config: McpEnv) -> None:
        self.schemas: Mapping[str, Mapping[str, object]] = {}
        """Tool schemas by name."""
        self._config = config
        self._client: Any = None
        self._ready = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._checking: asyncio.Task[None] | None = None
        """Check whether the server answers, after a late call."""
        self._holding = asyncio.get_running_loop().create_task(self._hold())

    @property
    def is_over(self) -> bool:
        """True once the connection is closed or lost."""
        return self._stop.is_set() or self._holding.done()

    async def opened(self) -> McpConnection:
        """Wait until the server has listed its tools."""
        # Shielded: all episodes wait for this one future, and one of them may be cancelled.
        await asyncio.shield(self._ready)
        return self

    async def checked(self) -> None:
        """Wait for the check that follows a call that timed out, if one is running."""
        if self._checking is not None:
            await asyncio.wait([self._checking])

    async def close(self) -> None:
        """Close the connection, and stop the server if it is a command; waits no longer than `_CLOSE_S`."""
        self._stop.set()
        if not self._ready.done():
            # It may still wait for the server to start.
            self._holding.cancel()
        tasks = [self._holding] if self._checking is None else [self._holding, self._checking]
        await asyncio.wait(tasks, timeout=_CLOSE_S)

    async def call(self, name: str, arguments: dict[str, object], timeout_s: float) -> str:
        """Call a tool and return its result as text.

        Raises:
            ReplicaError: the server is gone.
        """
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, INTERNAL_ERROR, INVALID_REQUEST, JSONRPCRequest

        request = {"name": name, "arguments": arguments}
        try:
            # A request that cannot be written, such as one with a lone surrogate, would end the connection of all
            # episodes.
            JSONRPCRequest(jsonrpc="2.0", id=0, method="tools/call", params=request).model_dump_json()
        except ValueError as error:
            return f"error: the arguments of {name} cannot be sent: {error}"
        try:
            # The package's own limit begins once the request is written, for which a hung server may never make room.
            async with asyncio.timeout(timeout_s):
                result = await self._client.call_tool(name, arguments)
        except TimeoutError:
            # One slow call is the tool's matter; a server that answers nothing would fail every episode.
            if self._config.per == "process" and (self._checking is None or self._checking.done()):
                self._checking = asyncio.get_running_loop().create_task(self._check(timeout_s))
            return f"error: {name} took longer than {timeout_s:g} s"
        except MCPError as error:
            # The package's codes for a lost connection or session are also those of tools' own errors: a server that
            # still lists its tools is there.
            if error.error.code not in (CONNECTION_CLOSED, INVALID_REQUEST, INTERNAL_ERROR) or await self._answers(
                timeout_s
            ):
                return f"error: {error.error.message}"
            self._stop.set()
            raise self._gone(name, error.error.message) from error
        except OSError as error:
            self._stop.set()
            raise self._gone(name, f"{type(error).__name__}: {error}") from error
        # So the package reports results that break the protocol or the tool's own schema.
        except (ValueError, RuntimeError) as error:
            return f"error: {name} returned an invalid result: {error}"
        parts = [_block_text(block) for block in result.content]
        text = "\n".join(parts) or (json.dumps(result.structured_content) if result.structured_content else "")
        # Output that begins with "error: " is recorded as a failed call.
        return f"error: {text}" if result.is_error and not text.startswith("error: ") else text

    async def _check(self, timeout_s: float) -> None:
        """End the connection if the server hangs."""
        if not await self._answers(timeout_s):
            self._stop.set()

    async def _answers(self, timeout_s: float) -> bool:
        """Return whether the server lists its tools in time."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(timeout_s):
                # A list that the client has kept would say nothing about the server.
                await self._client.list_tools(cache_mode="bypass")
            return True
        return False

    def _gone(self, name: str, cause: str) -> ReplicaError:
        return ReplicaError(f"it died during a call of {name}: {cause}", service=self._config.title)

    async def _hold(self) -> None:
        try:
            # Entered and left in one task, as the cancel scopes inside of `mcp` require.
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(self._config.start_s):
                    # The deadline covers the wait for the port, too.
                    await self._until_listening()
                    self._client = await stack.enter_async_context(self._made())
                    self.schemas = await self._list()
                self._ready.set_result(None)
                await self._stop.wait()
        except (Exception, BaseExceptionGroup) as error:
            if not self._ready.done():
                self._ready.set_exception(self._not_started(error))
        finally:
            self._stop.set()

    async def _until_listening(self) -> None:
        """Wait until something listens at the server's URL, as it may still be starting."""
        url = urlsplit(self._config.server)
        if url.scheme not in ("http", "https"):
            return
        while True:
            try:
                port = url.port or (443 if url.scheme == "https" else 80)
                _, writer = await asyncio.open_connection(url.hostname, port)
            except OSError:
                await asyncio.sleep(_AGAIN_S)
            else:
                writer.close()
                return

    def _made(self) -> Any:
        from mcp import Client, StdioServerParameters

        if self._config.server.startswith(("http://", "https://")):
            return Client(self._config.server)
        # The supervisor ends the server with all of its descendants, also if this process is killed.
        program, *arguments = supervised(shlex.split(self._config.server))
        return Client(StdioServerParameters(command=program, args=arguments, env=dict(self._config.env)))

    async def _list(self) -> dict[str, Mapping[str, object]]:
        schemas: dict[str, Mapping[str, object]] = {}
        cursor = None
        while True:
            # Servers may list their tools in pages.
            page = await self._client.list_tools(cursor=cursor)
            for tool in page.tools:
                schemas[tool.name] = tool_schema(tool.name, tool.description or "", tool.input_schema)
            if not (cursor := page.next_cursor):
                break
        unknown_names = [name for name in self._config.tools if name not in schemas]
        if unknown_names or not schemas:
            raise ForgeError(
                f"the {self._config.title} has no tool {', '.join(unknown_names)}".removesuffix(" "),
                hint=f"its tools are: {', '.join(schemas) or 'none'}",
            )
        return {name: schemas[name] for name in self._config.tools or schemas}

    def _not_started(self, error: BaseException) -> ForgeError:
        # The task groups inside of `mcp` wrap the cause.
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, ForgeError):
            return error
        is_timeout = isinstance(error, TimeoutError)
        cause = f"not ready in {self._config.start_s:g} s" if is_timeout else f"{type(error).__name__}: {error}"
        return ForgeError(
            f"the {self._config.title} does not start: {cause}",
            hint="run the command by hand; its output is in the log of the environment process",
        )


@dataclass(frozen=True)
class _RemoteTool:
    """A tool of the server."""

    session: McpSession
    name: str
    schema: Mapping[str, object]

    async def call(self, arguments: str, *, timeout_s: float) -> str:
        try:
            parsed_arguments = read_arguments(self.name, arguments)
        except ValueError as error:
            return f"error: {error}"
        connection = await self.session.connected()
        return await connection.call(self.name, parsed_arguments, timeout_s)


class McpSession:
    """One episode with the tools of a server."""

    def __init__(self, config: McpEnv, task: Task) -> None:
        self._config = config
        self._task = task
        self._connection: McpConnection | None = None
        self._use: ToolUse | None = None

    async def reset(self) -> Observation:
        """Connect and show the tools; raises ForgeError if the server does not start."""
        self._connection = await self._config.connect()
        tools = {name: _RemoteTool(self, name, schema) for name, schema in self._connection.schemas.items()}
        self._use = ToolUse(self._config, self._task, tools)
        return await self._use.reset()

    async def connected(self) -> McpConnection:
        """Return the connection for the next call; the shared one may have been replaced."""
        if self._connection is None or self._config.per == "process":
            self._connection = await self._config.connect()
        return self._connection

    @property
    def replayable(self) -> bool:
        """Whether the server keeps no state of the episode."""
        return self._config.per == "process"

    def resume(self, completion: str, step: Step, calls: Sequence[ToolCall]) -> bool:
        """Take an earlier turn from its step without running its calls."""
        assert self._use is not None, "reset comes first"
        return self._use.resume(completion, step, calls)

    async def step(self, completion: str, *, truncated: bool, calls: Sequence[ToolCall]) -> Step:
        """Run the tool calls, or end the episode."""
        assert self._use is not None, "reset comes first"
        return await self._use.step(completion, truncated=truncated, calls=calls)

    async def close(self) -> None:
        """Close the connection if it belongs to this episode alone."""
        if self._connection is not None and self._config.per == "session":
            await self._connection.close()
