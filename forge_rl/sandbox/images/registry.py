"""Fetches images by the distribution protocol: tokens, mirrors, and downloads that resume where they broke off."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import os
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import httpx

from forge_rl.sandbox.images.credentials import Credentials, credentials_for
from forge_rl.sandbox.images.image import ImageError
from forge_rl.sandbox.images.references import LOOPBACK, RegistryReference
from forge_rl.sandbox.images.sources import (
    INDEX_TYPES,
    MANIFEST_TYPES,
    MAX_MANIFEST,
    BlobPlace,
    ImageContent,
    LayerBlob,
    LayerJob,
    choose_manifest,
    content_of,
    json_object,
)

_TRIES, _FIRST_WAIT_S, _MAX_WAIT_S = 5, 0.25, 30.0
_PROGRESS = 1 << 20
"""Bytes that a download must gain; one that gains fewer counts as a failed try."""
_MAX_TOKEN = 1 << 16
_TIMEOUT = httpx.Timeout(30.0, connect=15.0)
_CHALLENGE = re.compile(r'\b(\w+)="([^"]*)"')
_MAX_CHALLENGE = 1 << 12
_MAX_REDIRECTS = 5
_ANSWER_S = 120.0
"""Time for a whole manifest, configuration or token."""
_SLOW_S, _MIN_BYTES_S = 60.0, 1 << 10
"""After this time, a download of fewer bytes a second counts as a failed try."""
_PASSING = (408, 425, 429, 500, 502, 503, 504)


_T = TypeVar("_T")


class _TryAgain(Exception):
    """A failure that may pass."""

    def __init__(self, cause: str, wait_s: float = 0.0) -> None:
        super().__init__(cause)
        self.wait_s = wait_s


@dataclass(frozen=True, kw_only=True)
class RegistryAccess:
    """Access to registries: mirrors, credentials, tokens and connections."""

    mirrors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Addresses, such as "https://mirror.example", to ask before a registry; by its host, or "*" for all."""
    credential_files: tuple[Path, ...] = ()
    tokens: dict[tuple[str, str], str] = field(default_factory=dict, repr=False)
    """Values of the authorization header by address and repository: a token for one is not sent to another."""

    @functools.cached_property
    def client(self) -> httpx.Client:
        """Connections, made on first use, through the proxies of the environment."""
        return _client(uses_proxies=True)

    @functools.cached_property
    def local_client(self) -> httpx.Client:
        """Connections to registries on this machine, which no proxy can reach."""
        return _client(uses_proxies=False)


def _client(*, uses_proxies: bool) -> httpx.Client:
    # A layer is checked and unpacked as it is stored; a compressed transfer would change its bytes.
    headers = {"accept-encoding": "identity", "user-agent": "forge-rl"}
    return httpx.Client(timeout=_TIMEOUT, headers=headers, verify=_trusted_certificates(), trust_env=uses_proxies)


@functools.cache
def _trusted_certificates() -> ssl.SSLContext:
    """Return the certificates of a process, which take 40 ms to load."""
    return httpx.create_ssl_context()


class RegistrySource:
    """An image in a registry."""

    def __init__(self, reference: RegistryReference, access: RegistryAccess) -> None:
        self._reference, self._access = reference, access
        mirrors = access.mirrors.get(reference.registry, access.mirrors.get("*", ()))
        self._addresses = (*(address.rstrip("/") for address in mirrors), reference.address)

    def content(self) -> ImageContent:
        """Fetch manifest and configuration. See `ImageSource`."""
        name = f"{self._reference.registry}/{self._reference.repository}:{self._reference.tag_or_digest}"
        tag_or_digest = self._reference.tag_or_digest
        for _ in range(3):  # an index may list another
            data, kind = self._manifest(tag_or_digest)
            digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
            manifest = json_object(data, f"the manifest of {name}")
            kind = str(manifest.get("mediaType") or kind).partition(";")[0]
            # Registries may leave out the media type, or send another: the fields decide as well.
            if kind in INDEX_TYPES or "manifests" in manifest:
                tag_or_digest = choose_manifest(manifest, name)
            elif kind in MANIFEST_TYPES or "layers" in manifest:
                return content_of(manifest, digest, self._config)
            else:
                break
        raise ImageError(f"{name} is of the kind {kind!r:.100}, not an image", hint="push it again as an OCI image")

    def fetch(self, layer: LayerBlob, job: LayerJob) -> BlobPlace:
        """Download a layer into the job's file, after the bytes it holds already. See `ImageSource`."""
        for round_number in (1, 2):  # bytes of an earlier process, or of a mirror, may be bad
            self._everywhere(lambda address: self._download(address, layer, job), job.wait)
            if _digest_of(job.partial_fd, job) == layer.digest:
                return BlobPlace(job.partial_fd, 0, layer.size)
            os.ftruncate(job.partial_fd, 0)
            if round_number == 1:  # a mirror may be the cause
                self._addresses = (self._reference.address,)
        raise ImageError(
            f"{self._reference.registry}/{self._reference.repository}: the layer that was sent as {layer.digest} has "
            "another digest",
            hint="the registry, or a proxy on the way, has damaged or changed it",
        )

    def _manifest(self, tag_or_digest: str) -> tuple[bytes, str]:
        def ask(address: str) -> tuple[bytes, str]:
            headers = {"accept": ", ".join((*INDEX_TYPES, *MANIFEST_TYPES))}
            with self._asked(address, f"manifests/{tag_or_digest}", headers) as response:
                data = self._body(response, MAX_MANIFEST)
            self._check_digest(data, tag_or_digest, address)
            return data, response.headers.get("content-type", "")

        return self._everywhere(ask)

    def _config(self, digest: str, size: int) -> bytes:
        def ask(address: str) -> bytes:
            with self._asked(address, f"blobs/{digest}", {}) as response:
                data = self._body(response, size)
            self._check_digest(data, digest, address)
            return data

        return self._everywhere(ask)

    def _check_digest(self, data: bytes, expected: str, address: str) -> None:
        """Raise ImageError if bytes have another digest than is expected, so that the next address is asked."""
        if expected.startswith("sha256:") and expected != (digest := f"sha256:{hashlib.sha256(data).hexdigest()}"):
            raise ImageError(f"{address}: {self._reference.repository}: bytes named {expected} have {digest}")

    def _download(self, address: str, layer: LayerBlob, job: LayerJob) -> None:
        fd = job.partial_fd
        start = os.fstat(fd).st_size
        if start > layer.size:
            os.ftruncate(fd, start := 0)
        if start == layer.size:
            return
        first_byte = start
        headers = {"range": f"bytes={start}-"} if start else {}
        began_s, received = time.monotonic(), 0
        try:
            with self._asked(address, f"blobs/{layer.digest}", headers) as response:
                place = response.headers.get("content-range", "")
                if response.status_code != 206 or not place.startswith(f"bytes {start}-"):
                    os.ftruncate(fd, start := 0)  # the whole of it is sent, or another part
                    if response.status_code == 206:
                        raise _TryAgain(f"{address} sent {place!r:.60} instead of the rest of a layer")
                for part in response.iter_raw():  # as they come: one waited for could keep it from being cancelled
                    job.check_wanted()
                    received += len(part)
                    if time.monotonic() - began_s > _SLOW_S + received / _MIN_BYTES_S:
                        raise _TryAgain(f"{address} sent {received} bytes of a layer in {_SLOW_S:g} s")
                    # The manifest has said the size: more than that is refused before it fills the disk.
                    if start + len(part) > layer.size:
                        raise ImageError(f"{layer.digest}: more than its {layer.size} bytes were sent")
                    start += os.pwrite(fd, part, start)
                    job.tell(start)
        except OSError as error:
            raise ImageError(
                f"{layer.digest} cannot be kept: {error.strerror}", hint="free space on the disk"
            ) from None
        except _TryAgain as error:
            # Negative: the download advanced, so this try neither counts as a failure nor waits.
            error.wait_s = -1.0 if start - first_byte >= _PROGRESS else error.wait_s
            raise
        if start < layer.size:
            raise _TryAgain(
                f"{address} sent {start} of {layer.size} bytes", -1.0 if start - first_byte > _PROGRESS else 0
            )

    def _everywhere(self, ask: Callable[[str], _T], wait: Callable[[float], None] | None = None) -> _T:
        """Return the first answer: of the mirrors, and then of the registry, which is asked several times."""
        failures: list[str] = []
        for address in self._addresses:
            tries = _TRIES if address == self._addresses[-1] else 1
            failure_count = 0
            while failure_count < tries:
                try:
                    return ask(address)
                except _TryAgain as error:
                    failures.append(str(error))
                    if error.wait_s < 0:  # it came further
                        continue
                    failure_count += 1
                    if failure_count < tries:
                        wait_s = min(_MAX_WAIT_S, max(error.wait_s, _FIRST_WAIT_S * 4**failure_count / 4))
                        (wait or threading.Event().wait)(wait_s)
                except ImageError as error:
                    if address == self._addresses[-1]:
                        raise
                    failures.append(error.message)
                    break
        raise ImageError(
            f"{self._reference.registry}/{self._reference.repository} cannot be fetched: {failures[-1]}",
            hint="check the network and the registry's name; the next try resumes where this one ended",
        )

    @contextlib.contextmanager
    def _asked(self, address: str, path: str, headers: Mapping[str, str]) -> Iterator[httpx.Response]:
        """Send a request for a part of the repository, with a token if the registry wants one."""
        repository, tokens = self._reference.repository, self._access.tokens
        url, key = f"{address}/v2/{repository}/{path}", (address, repository)
        # The first answer may be a challenge, or the token may have expired; the second try has a new one.
        for is_last in (False, True):
            token = tokens.get(key)
            sent_headers = {**headers, **({"authorization": token} if token else {})}
            with self._sent("GET", url, address, headers=sent_headers) as response:
                if response.status_code == 401 and not is_last:
                    challenge = response.headers.get("www-authenticate", "")
                elif response.is_success:
                    yield response
                    return
                else:
                    raise self._refusal(response, address, path)
            tokens.pop(key, None)
            tokens[key] = self._authorization(challenge, address)

    @contextlib.contextmanager
    def _sent(self, method: str, url: str, address: str, **arguments: object) -> Iterator[httpx.Response]:
        auth = arguments.pop("auth", None)
        try:
            request = self._access.client.build_request(method, url, **arguments)  # type: ignore[arg-type]
            for _ in range(_MAX_REDIRECTS):
                is_local = LOOPBACK.fullmatch(request.url.netloc.decode())
                client = self._access.local_client if is_local else self._access.client
                with contextlib.closing(client.send(request, stream=True, auth=auth)) as response:  # type: ignore[arg-type]
                    if (next_request := response.next_request) is None:
                        yield response
                        return
                # Anybody on the way could then change what is fetched, or read a token.
                if request.url.scheme == "https" and next_request.url.scheme != "https":
                    raise ImageError(f"{address} redirects to an address without TLS")
                # httpx drops the authorization header of a request that is redirected to another host.
                request, auth = next_request, None
            raise ImageError(f"{address} redirects in circles")
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise _TryAgain(f"{address} cannot be reached: {type(error).__name__}: {str(error)[:200]}") from None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise ImageError(f"{address} cannot be asked: {type(error).__name__}") from None

    def _refusal(self, response: httpx.Response, address: str, path: str) -> Exception:
        status, place = response.status_code, f"{address}: {self._reference.repository} ({path[:90]})"
        if status in _PASSING:
            seconds = response.headers.get("retry-after", "")
            return _TryAgain(f"{place} answered {status}", float(seconds) if seconds.isdecimal() else 0.0)
        if status in (401, 403):
            return ImageError(f"{place} may not be read ({status})", hint="log in with docker, podman or skopeo")
        if status == 404:
            return ImageError(f"{place} does not exist", hint="check the image's name")
        return ImageError(f"{place} answered {status}")

    def _authorization(self, challenge: str, address: str) -> str:
        """Return the authorization header that a registry asks for."""
        scheme, values = challenge.partition(" ")[0].lower(), dict(_CHALLENGE.findall(challenge[:_MAX_CHALLENGE]))
        reference = self._reference
        credentials = credentials_for(reference.registry, reference.repository, self._access.credential_files)
        # A mirror is another host: it gets the credentials for itself only.
        if address != reference.address:
            credentials = credentials_for(urlsplit(address).netloc, reference.repository, self._access.credential_files)
        if scheme == "basic" and credentials is not None:
            return f"Basic {base64.b64encode(f'{credentials.user}:{credentials.password}'.encode()).decode()}"
        if scheme != "bearer":
            raise ImageError(
                f"{address} wants a password for {reference.repository}", hint="log in with docker, podman or skopeo"
            )
        return f"Bearer {self._token(values, address, credentials)}"

    def _token(self, values: Mapping[str, str], address: str, credentials: Credentials | None) -> str:
        realm = values.get("realm", "")
        # The registry chooses where the password is sent.
        if not realm.startswith("https://") and not (realm.startswith("http://") and address.startswith("http://")):
            raise ImageError(
                f"{address} sends for tokens to {realm!r:.100}", hint="only https is trusted with a password"
            )
        params = {"scope": values.get("scope") or f"repository:{self._reference.repository}:pull"}
        if "service" in values:
            params["service"] = values["service"]
        auth = (credentials.user, credentials.password) if credentials else None
        with self._sent("GET", realm, address, params=params, **({"auth": auth} if auth else {})) as response:
            if response.status_code in _PASSING:
                raise _TryAgain(f"the tokens of {address} answered {response.status_code}")
            if not response.is_success:
                raise ImageError(
                    f"{address} gives no token for {self._reference.repository} ({response.status_code})",
                    hint="log in with docker, podman or skopeo",
                )
            answer = json_object(self._body(response, _MAX_TOKEN), f"the token of {address}")
        token = answer.get("token") or answer.get("access_token")
        if not isinstance(token, str) or not token.isprintable():
            raise ImageError(f"{address} answered without a token")
        return token

    def _body(self, response: httpx.Response, max_bytes: int) -> bytes:
        data, end_s = bytearray(), time.monotonic() + _ANSWER_S
        for part in response.iter_raw():
            data += part
            if time.monotonic() > end_s:
                raise _TryAgain(f"an answer took more than {_ANSWER_S:g} s")
            if len(data) > max_bytes:
                raise ImageError(f"{self._reference.repository}: an answer has more than {max_bytes} bytes")
        return bytes(data)


def _digest_of(fd: int, job: LayerJob) -> str:
    digest, start = hashlib.sha256(), 0
    while part := os.pread(fd, 1 << 20, start):
        job.check_wanted()
        digest.update(part)
        start += len(part)
    return f"sha256:{digest.hexdigest()}"
