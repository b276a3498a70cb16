"""Prints what the installed tinker client asks of a server, as JSON: `python tinker_surface.py`.

"routes" has every path of the package, and "methods" the paths that each public method of its clients may lead to, by
"Class.method". Methods that end with _async are left out: they are the same.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import tinker
from tinker.lib.internal_client_holder import InternalClientHolder

_ROUTE = re.compile(r'"/api/v1/([^"]+)"')
_RESOURCES = importlib.import_module("tinker.resources")
_CLIENTS = tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, tinker.RestClient, tinker.AdminClient


def routes_of(owner: Any, name: str, past: set[tuple[str, str]]) -> set[str]:
    """Return the paths in a method's source, and in those of others that it names."""
    method = inspect.getattr_static(owner, name, None)
    method = getattr(method, "__func__", method)
    if (owner.__name__, name) in past or not inspect.isfunction(method):
        return set()
    past.add((owner.__name__, name))
    source = inspect.getsource(inspect.unwrap(method))
    routes = set(_ROUTE.findall(source))
    for helper in re.findall(r"\bself\.(\w+)\(", source):
        routes |= routes_of(owner, helper, past)
    for verb in re.findall(r"\bclient\.\w+\.(\w+)\(", source):
        for resource in filter(inspect.isclass, vars(_RESOURCES).values()):
            routes |= routes_of(resource, verb, past)
    for name_there in re.findall(r"\bself\.holder\.(\w+)\(", source):
        routes |= routes_of(InternalClientHolder, name_there, past)
    for name_there in re.findall(r"_client\(\)\.(\w+)\(", source):
        for client in _CLIENTS:
            routes |= routes_of(client, name_there, past)
    return routes


def main() -> None:
    """Print both."""
    package = Path(tinker.__file__).parent
    sources = [path.read_text() for path in package.rglob("*.py") if not path.name.endswith("_test.py")]
    methods = {
        f"{client.__name__}.{name}": sorted(routes_of(client, name, set()))
        for client in _CLIENTS
        for name, value in vars(client).items()
        if not name.startswith("_") and not name.endswith("_async") and not isinstance(value, property)
    }
    print(
        json.dumps(
            {"routes": sorted({route for text in sources for route in _ROUTE.findall(text)}), "methods": methods}
        )
    )


if __name__ == "__main__":
    main()
