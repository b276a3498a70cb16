"""Attestation: whether a reader holds what was published."""

from __future__ import annotations

from collections.abc import Mapping

from forge_rl.errors import AttestationError
from forge_rl.weights.manifest import Manifest


def attest(manifest: Manifest, fingerprints: Mapping[str, int], reader: str) -> None:
    """Compare what a reader holds with what was published.

    Args:
        manifest: of the version that was published.
        fingerprints: by name, of what the reader holds.
        reader: in the error's words.

    Raises:
        AttestationError: they differ; names the tensors.
    """
    differing = [entry.name for entry in manifest.tensors if fingerprints.get(entry.name) != entry.fingerprint]
    if differing:
        shown = ", ".join(differing[:5]) + (", …" if len(differing) > 5 else "")
        raise AttestationError(
            f"{reader} holds other weights than version {manifest.version}: {len(differing)} of "
            f"{len(manifest.tensors)} tensors differ: {shown}",
            hint="do not trust what was sampled from it; report this with the run folder's logs",
        )
