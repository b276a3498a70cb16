"""Runs a command in an episode's container: container_exec.py SOCKET exec [-w FOLDER] [-e NAME=VALUE] ID COMMAND ...

Takes Docker's command line as far as agents use it to work in a container: `run` names the container that the task has,
`exec` runs a command there, `stop`, `kill` and `rm` do nothing, as the container ends with the episode. Needs nothing
but Python's library.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence

_REFUSED = 125
"""Exit status for what Docker's program itself refuses."""
_FLAGS = ("-i", "-t", "-it", "-ti", "--interactive", "--tty")
_SHORT = {"-w": "--workdir", "-e": "--env"}


class UsageError(Exception):
    """The command line asks for something unsupported."""


def parsed_exec(arguments: Sequence[str]) -> dict[str, object]:
    """Return the folder, the variables and the command of the arguments of `exec`.

    Raises:
        UsageError: there is no command, or an option has no equivalent here.
    """
    rest, folder, env = [*arguments], "", {}
    while rest and rest[0].startswith("-"):
        option, equals, value = rest.pop(0).partition("=")
        if option in _FLAGS:
            continue
        option = _SHORT.get(option, option)
        if option not in _SHORT.values():
            raise UsageError(f"exec has no option {option}")
        if not equals:
            if not rest:
                raise UsageError(f"{option} needs a value")
            value = rest.pop(0)
        if option == "--workdir":
            folder = value
        else:
            name, _, env[name] = value.partition("=")
    # The first is the container's id: there is only one container.
    if len(rest) < 2:
        raise UsageError("exec needs a container and a command")
    return {"folder": folder, "env": env, "command": rest[1:]}


def answered(path: str, request: dict[str, object]) -> dict[str, object]:
    """Send a request to the episode; return its answer."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile("rb") as file:
            line = file.readline()
    if not line:
        raise UsageError("the container has ended")
    answer: dict[str, object] = json.loads(line)
    return answer


def main(path: str, action: str, arguments: Sequence[str]) -> int:
    """Do what the command line says; return the exit status."""
    if action == "exec":
        answer = answered(path, parsed_exec(arguments))
        for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
            stream.buffer.write(str(answer[name]).encode("utf-8", "surrogateescape"))
            stream.flush()
        return int(str(answer["status"]))
    if action == "run":
        # Agents read the new container's id from the output of `run`.
        print("container")
    elif action not in ("stop", "kill", "rm"):
        raise UsageError(f"there is no {action!r}: run, exec, stop, kill or rm")
    return 0


if __name__ == "__main__":
    try:
        status = main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "", sys.argv[3:])
    except (UsageError, OSError) as problem:
        print(f"container: {problem}", file=sys.stderr)
        status = _REFUSED
    sys.exit(status)
