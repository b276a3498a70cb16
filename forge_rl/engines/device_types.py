"""Speeds and memory sizes of GPUs for planning runs, from the vendors' data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass

from forge_rl.errors import ConfigError
from forge_rl.flags.texts import suggest

_FORM = re.compile(r"(?:(\d{1,4})x)?([A-Za-z0-9][A-Za-z0-9-]{0,30})")
_MOST_DEVICES = 64
"""Maximum number of devices of one host."""


@dataclass(frozen=True, kw_only=True)
class DeviceType:
    """Peak performance and links of one device. Rates are per second, links in one direction."""

    name: str
    memory: int
    """Bytes of the device's memory."""
    flops: float
    """Operations of dense matrix multiplications in the dtype of training: bfloat16 on GPUs, without sparsity."""
    bandwidth: float
    """Bytes read from or written to the device's own memory."""
    link: float
    """Bytes sent to the other devices of its host."""
    network: float
    """Bytes sent to other hosts, per device."""
    host_link: float
    """Bytes sent to the host's memory."""
    host_memory: int
    """Bytes of host memory per device."""
    source: str
    """Source of these numbers."""


def _gpu(
    name: str, gb: int, tflops: float, gb_s: float, links: tuple[float, float, float], host_gib: int, source: str
) -> DeviceType:
    """Make a GPU's type; `links` are gigabytes per second to its peers, to other hosts and to the host's memory."""
    link, network, host_link = links
    return DeviceType(
        name=name,
        memory=gb * 10**9,
        flops=tflops * 1e12,
        bandwidth=gb_s * 1e9,
        link=link * 1e9,
        network=network * 1e9,
        host_link=host_link * 1e9,
        host_memory=host_gib << 30,
        source=source,
    )


DEVICE_TYPES: dict[str, DeviceType] = {
    gpu.name: gpu
    for gpu in (
        _gpu("A100-40G", 40, 312, 1555, (300, 25, 32), 128, "NVIDIA A100 data sheet (SXM), DGX A100"),
        _gpu("A100-80G", 80, 312, 2039, (300, 25, 32), 256, "NVIDIA A100 data sheet (SXM), DGX A100"),
        _gpu("H100-80G", 80, 989, 3350, (450, 50, 64), 256, "NVIDIA H100 data sheet (SXM), DGX H100"),
        _gpu("H100-PCIE-80G", 80, 756, 2000, (64, 12.5, 64), 128, "NVIDIA H100 data sheet (PCIe)"),
        _gpu("H200-141G", 141, 989, 4800, (450, 50, 64), 256, "NVIDIA H200 data sheet (SXM), DGX H200"),
        _gpu("B200-180G", 180, 2250, 8000, (900, 50, 64), 256, "NVIDIA DGX B200 data sheet"),
        _gpu("L40S-48G", 48, 362, 864, (32, 6.25, 32), 96, "NVIDIA L40S data sheet"),
        _gpu("L4-24G", 24, 121, 300, (32, 3.125, 32), 48, "NVIDIA L4 data sheet"),
        _gpu("RTX4090-24G", 24, 165, 1008, (32, 1.25, 32), 48, "NVIDIA Ada GPU Architecture whitepaper"),
    )
}
"""Device types by name. Where the source does not describe a whole system, network and host memory are assumptions."""


def parse_machine(text: str) -> tuple[int, DeviceType]:
    """Return a host's number of devices and their type: `parse_machine("8xH100-80G")`.

    Raises:
        ConfigError: it does not have this form, or names an unknown type; lists the known ones.
    """
    match = _FORM.fullmatch(text.strip())
    name = match[2].upper() if match else ""
    device_type = next((device for key, device in DEVICE_TYPES.items() if key.upper() == name), None)
    if match is None or device_type is None:
        suggestion = suggest(name or text, DEVICE_TYPES, "device types")
        raise ConfigError(f"--on {text!r:.60} is not a known machine", hint=f"write COUNTxTYPE or local; {suggestion}")
    count = int(match[1] or 1)
    if not 1 <= count <= _MOST_DEVICES:
        raise ConfigError(f"--on {text!r:.60} has {count} devices in a host", hint=f"give 1 to {_MOST_DEVICES}")
    return count, device_type
