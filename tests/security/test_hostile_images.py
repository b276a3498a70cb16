"""Images made to harm: each is refused by an error that names why, and nothing changes outside of the store."""

from __future__ import annotations

import gzip
import json
import os
import re
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from forge_rl.sandbox.images import ImageError, ImageStore
from forge_rl.sandbox.images.unpack import LayerLimits
from tests.images import Made, digest_of, folder, image, layer, link, member, write_layout

LIMITS = LayerLimits(bytes=4 << 20, entries=200, depth=20, name_bytes=20_000, ratio=100, free_bytes=1 << 20)
HARD = {"type": tarfile.LNKTYPE}


def raw(name: bytes = b"a", size: bytes = b"00000000000\0", kind: bytes = b"0", data: bytes = b"") -> bytes:
    """An entry whose header says what tarfile would not write."""
    header = bytearray(name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + size.ljust(12, b"\0"))
    header += b"00000000000\0" + b" " * 8 + kind + bytes(100) + b"ustar\00000" + bytes(247)
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + data + bytes(-len(data) % 512)


def pax(*records: tuple[bytes, bytes], kind: bytes = b"x") -> bytes:
    text = b""
    for key, value in records:
        rest = b" " + key + b"=" + value + b"\n"
        length = len(rest) + len(str(len(rest) + 3))
        text += str(length if len(str(length)) + len(rest) == length else length + 1).encode() + rest
    return raw(b"pax", b"%011o\0" % len(text), kind, text)


END = bytes(1024)
OUTSIDE = "../outside"

LAYERS: dict[str, tuple[Callable[[str], bytes], str]] = {
    "a name leads out": (lambda _: layer(member("../evil")), "leads out"),
    "a name leads out by a folder": (lambda _: layer(member("a/../../evil")), "leads out"),
    "an absolute name": (lambda outside: layer(member(f"{outside}/evil")), "absolute name"),
    "a PAX name leads out": (lambda _: pax((b"path", b"../evil")) + raw() + END, "leads out"),
    "a GNU name leads out": (
        lambda _: layer(member("../" * 40 + "evil"), format=tarfile.GNU_FORMAT),
        "leads out",
    ),
    "a global header names files": (lambda _: pax((b"path", b"../evil"), kind=b"g") + raw() + END, "global header"),
    "a zero byte in a name": (lambda _: pax((b"path", b"a\0b")) + raw() + END, "zero byte"),
    "a file through a link": (lambda outside: layer(link("a", outside), member("a/evil")), "is a link"),
    "a file through a link up": (lambda _: layer(link("a", "../../.."), member("a/evil")), "is a link"),
    "a file through a link inside": (lambda _: layer(folder("b"), link("a", "b"), member("a/evil")), "is a link"),
    "a folder through a link": (lambda outside: layer(link("a", outside), folder("a/b/c")), "is a link"),
    "a link through a link": (lambda outside: layer(link("a", outside), link("a/evil", "x")), "is a link"),
    "a hard link out": (lambda _: layer(member("a", linkname="../../../../secret", **HARD)), "leads out"),
    "an absolute hard link": (lambda outside: layer(member("a", linkname=f"{outside}/secret", **HARD)), "absolute"),
    "a hard link through a link": (
        lambda outside: layer(link("a", outside), member("b", linkname="a/secret", **HARD)),
        "is a link",
    ),
    "a hard link to nothing": (lambda _: layer(member("a", linkname="b", **HARD)), "not in the layer"),
    "a hard link to a folder": (lambda _: layer(folder("b"), member("a", linkname="b", **HARD)), "to the folder"),
    "a hard link to itself": (lambda _: layer(member("a"), member("a", linkname="a", **HARD)), "to itself"),
    "a deletion of nothing": (lambda _: layer(member(".wh.")), "deletes nothing"),
    "a deletion of the folder above": (lambda _: layer(folder("a"), member("a/.wh...")), "deletes nothing"),
    "a deletion through a link": (lambda outside: layer(link("a", outside), member("a/.wh.secret")), "is a link"),
    "hiding through a link": (lambda outside: layer(link("a", outside), member("a/.wh..wh..opq")), "is a link"),
    "a file in place of a folder": (lambda _: layer(member("a/b"), member("a")), "replaces a folder"),
    "a file in place of everything": (lambda _: raw(b"./.") + END, "top is no"),
    "a name that is not UTF-8": (lambda _: raw(b"caf\xe9") + END, "not UTF-8"),
    "a long name": (lambda _: layer(member("a" * 256)), "more than 255 bytes"),
    "a long path": (lambda _: layer(member("/".join(["a" * 250] * 17))), "bytes"),
    "a deep tree": (lambda _: layer(member("a/" * 30 + "b")), "below 31 folders"),
    "many entries": (lambda _: layer(*(member(str(index)) for index in range(300))), "more than 200 entries"),
    "much text in names": (lambda _: layer(*(member(f"{index}{'a' * 200}") for index in range(150))), "its names"),
    "many bytes": (lambda _: layer(member("a", os.urandom(5 << 20))), "more than a layer may have"),
    "a bomb": (lambda _: layer(member("a", bytes(3 << 20))), "more than a layer may have"),
    "a bomb after the end": (lambda _: layer(member("a")) + bytes(3 << 20), "more bytes than a layer"),
    "a bomb of headers": (lambda _: pax((b"comment", b"a" * (1 << 20))) + raw() + END, "headers of an entry"),
    "a file that is cut off": (lambda _: raw(size=b"00000002000\0", data=b"abc"), "cut off"),
    "headers that are cut off": (lambda _: pax((b"path", b"a")), "cut off"),
    "a negative size": (lambda _: raw(size=b"\xff" * 12) + END, "size is -1"),
    "an enormous size": (lambda _: raw(size=b"\x80" + b"\xff" * 11) + END, "size is"),
    "a size that is no number": (lambda _: raw(size=b"0x1") + END, "size is"),
    "a PAX size that is no number": (lambda _: pax((b"size", b"1_0")) + raw() + END, "size is"),
    "a damaged extended header": (lambda _: raw(b"pax", b"00000000005\0", b"x", b"9 a=b") + raw() + END, "damaged"),
    "a GNU sparse file": (lambda _: raw(kind=b"S") + END, "sparse"),
    "a PAX sparse file": (lambda _: pax((b"GNU.sparse.major", b"1")) + raw() + END, "sparse"),
    "an unknown kind": (lambda _: raw(kind=b"V") + END, "unknown kind"),
    "a damaged header": (lambda _: raw().replace(b"0000644", b"0000645") + END, "damaged"),
    "entries after the end": (lambda _: raw() + bytes(512) + raw(), "followed by entries"),
    "no archive": (lambda _: b"1" * 2048, "not a tar archive"),
}


def broken(change: Callable[[Made], None]) -> Made:
    made = image([layer(member("a", b"data"))])
    change(made)
    return made


def changed_manifest(old: bytes, new: bytes) -> Made:
    made = image([layer(member("a", b"data"))])
    manifest = made.blobs.pop(made.manifest).replace(old, new)
    made.manifest = digest_of(manifest)
    made.blobs[made.manifest] = manifest
    return made


def lie(made: Made) -> None:
    made.blobs[made.layers[0]] = made.blobs[made.layers[0]][:-1] + b"x"


IMAGES: dict[str, tuple[Callable[[], Made], str]] = {
    "bytes of another digest": (lambda: broken(lie), "another digest"),
    "content of another digest": (
        lambda: image([layer(member("a"))], diff_ids=[digest_of(b"another layer")]),
        "has other content",
    ),
    "a digest that is a path": (
        lambda: changed_manifest(b'"digest": "sha256:', b'"digest": "sha256:../'),
        "not a digest",
    ),
    "a digest of another kind": (lambda: changed_manifest(b'"sha256:', b'"md5:'), "not a digest"),
    "a negative size of a layer": (lambda: changed_manifest(b'"size": ', b'"size": -'), "size is -"),
    "fewer layers than said": (
        lambda: image([layer(member("a"))], diff_ids=[digest_of(b"a"), digest_of(b"b")]),
        "1 layers, its configuration 2",
    ),
    "a configuration that is a list": (lambda: image([layer()], {"Env": {"A": 1}}), "Env is not a list"),
    "a user that is a number": (lambda: image([layer()], {"User": 5}), "User is not text"),
    "a gzip stream that is cut off": (
        lambda: image([layer(member("a", os.urandom(9000)))], compress=lambda data: gzip.compress(data)[:-20]),
        "cut off",
    ),
    "a gzip stream that is damaged": (
        lambda: image([layer(member("a"))], compress=lambda data: gzip.compress(data)[:60] + bytes(99)),
        "damaged",
    ),
    "data after a gzip stream": (
        lambda: image([layer(member("a"))], compress=lambda data: gzip.compress(data) + b"more"),
        "damaged",
    ),
    "a zstd stream that is damaged": (
        lambda: image([layer(member("a"))], compress=lambda _: b"\x28\xb5\x2f\xfd" + os.urandom(99)),
        "zstd stream is damaged",
    ),
}


def tree(top: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything below a folder but the store."""
    entries = {}
    for place, folders, files in os.walk(top):
        if Path(place) == top:
            folders.remove("store")
        for name in (*folders, *files):
            path = Path(place, name)
            status = path.lstat()
            data = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
            entries[str(path)] = (status.st_mode, status.st_nlink, data)
    return entries


async def refused(folder: Path, made: Made, reason: str) -> None:
    (folder / "outside").mkdir()
    (folder / "outside/secret").write_text("secret")
    write_layout(folder / "layout", made)
    store = ImageStore(folder / "store", limits=LIMITS)
    before = tree(folder)
    with pytest.raises(ImageError, match=reason) as error:
        await store.get(f"oci:{folder}/layout")
    assert "\n" not in error.value.message
    assert tree(folder) == before
    assert list((folder / "store/layers").iterdir()) == []
    assert [path for path in (folder / "store/partial").iterdir() if path.suffix != ".part"] == []


UNPACK = """
import json, os, sys
from forge_rl.sandbox.images.unpack import CompressionError, LayerLimits, TarError, unpack
limits, answers = LayerLimits(**json.loads(sys.argv[2])), {}
for name in sorted(os.listdir(sys.argv[1])):
    fd = os.open(f"{sys.argv[1]}/{name}/layer", os.O_RDONLY)
    try:
        answers[name] = str(unpack(fd, 0, os.fstat(fd).st_size, f"{sys.argv[1]}/{name}/store", limits))
    except (CompressionError, TarError) as error:
        answers[name] = f"refused: {error}"
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder with one for each hostile layer, by its number, and what one process said that unpacked all of them."""
    top = tmp_path_factory.mktemp("layers")
    for number, (make, _) in enumerate(LAYERS.values()):
        (top / str(number) / "outside").mkdir(parents=True)
        (top / str(number) / "outside/secret").write_text("secret")
        (top / str(number) / "layer").write_bytes(gzip.compress(make(str(top / str(number) / "outside"))))
        (top / str(number) / "store/files").mkdir(parents=True)
    result = subprocess.run(
        [sys.executable, "-c", UNPACK, str(top), json.dumps(asdict(LIMITS))], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return top, json.loads(result.stdout)


@pytest.mark.parametrize("name", LAYERS)
def test_a_hostile_layer_is_refused(name: str, unpacked: tuple[Path, dict[str, str]]):
    top, answers = unpacked
    number = str([*LAYERS].index(name))
    assert re.fullmatch(f"refused: .*{LAYERS[name][1]}.*", answers[number]), answers[number]
    assert sorted(path.name for path in (top / number).iterdir()) == ["layer", "outside", "store"]
    outside = [(path.name, path.read_text(), path.stat().st_nlink) for path in (top / number / "outside").iterdir()]
    assert outside == [("secret", "secret", 1)]


@pytest.mark.parametrize("name", [*LAYERS][::3])
async def test_an_image_with_a_hostile_layer_is_refused_and_leaves_nothing(name: str, tmp_path: Path):
    make, reason = LAYERS[name]
    await refused(tmp_path, image([make(str(tmp_path / "outside"))]), reason)


@pytest.mark.parametrize("name", IMAGES)
async def test_a_hostile_image_is_refused_and_leaves_nothing(name: str, tmp_path: Path):
    make, reason = IMAGES[name]
    await refused(tmp_path, make(), reason)


async def test_what_could_raise_privileges_is_taken_out(tmp_path: Path):
    attributes = {
        "pax_headers": {"SCHILY.xattr.user.overlay.redirect": "/etc", "SCHILY.xattr.security.capability": "x"}
    }
    write_layout(
        tmp_path / "layout",
        image(
            [
                layer(
                    member("su", b"#!", mode=0o6755, uid=7, gid=8),
                    folder("d", **attributes),
                    member("sda", type=tarfile.BLKTYPE, devmajor=8, devminor=0),
                    member("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
                    member("pipe", type=tarfile.FIFOTYPE, mode=0o600),
                )
            ]
        ),
    )
    image_here = await ImageStore(tmp_path / "store").get(f"oci:{tmp_path}/layout")
    files = image_here.layers[0]
    assert sorted(os.listdir(files)) == ["d", "pipe", "su"]
    assert stat.S_IMODE((files / "su").stat().st_mode) == 0o755
    assert (files / "su").stat().st_uid == os.geteuid()
    assert os.listxattr(files / "d") == []
    assert (files.parent / "owners.json").read_text() == '{"su": [7, 8, 3565]}'
    assert "sda: device 8:0" in (files.parent / "layer.json").read_text()
