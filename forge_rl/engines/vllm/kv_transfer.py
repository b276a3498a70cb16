"""Reads --generator.kv-transfer-config, and refuses connectors that would keep keys and values computed with older
weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from forge_rl.errors import ConfigError

_FLAG = "--generator.kv-transfer-config"


def read_kv_transfer(text: str) -> KVTransferConfig | None:
    """Return vLLM's config of KV transfer from its JSON; None for an empty text.

        read_kv_transfer('{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}')

    When weights are loaded, vLLM makes the connector reset its cache. It assumes that a connector without a
    `reset_cache` has no cache.

    Raises:
        ConfigError: vLLM does not take it, a connector cannot be imported, or one does not implement `reset_cache`.
    """
    if not text:
        return None
    config = _read(text)
    for connector in _connectors(config):
        try:
            # Imported here, so that a missing package is an error of the flag and not of an engine's start.
            connector_class = KVConnectorFactory.get_connector_class(connector)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"{_FLAG}: the connector {connector.kv_connector!r} cannot be imported: {error}",
                hint="install its package in this environment, or choose another connector",
            ) from error
        if connector_class.reset_cache is KVConnectorBase_V1.reset_cache:
            raise ConfigError(
                f"{_FLAG}: {connector.kv_connector} has no reset_cache, so that tokens of new weights would be "
                "computed from keys and values of older ones",
                hint="choose a connector that implements it, such as OffloadingConnector",
            )
    return config


def _read(text: str) -> KVTransferConfig:
    try:
        return KVTransferConfig(**json.loads(text))
    except (TypeError, ValueError) as error:  # pydantic's errors are ValueErrors
        lines = [line.strip().partition(" [type=")[0] for line in str(error).splitlines() if line.strip()]
        raise ConfigError(
            f"vLLM does not take {_FLAG}: {': '.join(lines[1:3]) or lines[0]}",
            hint='write JSON as for vLLM, such as {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}',
        ) from error


def _connectors(config: KVTransferConfig) -> Iterator[KVTransferConfig]:
    """Yield the config of each combined connector, or of the only one."""
    # vLLM's MultiConnector holds others, each of which must forget.
    if config.kv_connector != "MultiConnector":
        yield config
        return
    parts: Any = config.kv_connector_extra_config.get("connectors")
    for part in parts if isinstance(parts, list) else ():
        yield from _connectors(_read(json.dumps(part)))
