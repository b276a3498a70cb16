"""Roots of providers' containers: what is read of them is hostile, and programs are GNU's or busybox's."""

import contextlib
import io
import os
import stat
import subprocess
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from forge_rl.sandbox.providers import roots
from forge_rl.sandbox.providers.roots import (
    ARCHIVE,
    DESCRIBE,
    LIST,
    VARIABLES,
    RootListing,
    UnreadableRootError,
    changes_of,
    listed_paths,
    packed_changes,
    to_fetch,
    unpacked,
)
from forge_rl.sandbox.workspaces.changes import Change, Entry
from forge_rl.sandbox.workspaces.image_programs import RootLinks
from tests.container_images import packages_layer

FILE, FOLDER, LINK = "81a4", "41ed", "a1ff"


def listing(*lines: str) -> bytes:
    return b"".join(f"{line}\n".encode() for line in lines)


def root(*lines: str, described: Sequence[str] = ()) -> RootListing:
    return RootListing.of(listing(*lines), ["/usr/bin:/bin", *[""] * (len(VARIABLES) - 1), *described])


def test_a_change_of_any_fact_counts_but_not_of_a_folders_times():
    before = root(f"{FOLDER} 4096 1 1 /a", f"{FILE} 3 1 1 /a/same", f"{FILE} 3 1 1 /a/later", f"{FILE} 3 1 1 /gone")
    after = listing(f"{FOLDER} 4096 9 9 /a", f"{FILE} 3 1 1 /a/same", f"{FILE} 3 1 2 /a/later", f"{LINK} 1 1 1 /new")
    assert [(path, old is None, new is None) for path, old, new in before.changed_to(after)] == [
        ("a/later", False, False),
        ("gone", False, True),
        ("new", True, False),
    ]


def test_a_listing_that_lies_names_nothing_outside_nor_through_a_link():
    before = root(f"{FOLDER} 0 1 1 /opt", f"{LINK} 1 1 1 /link")
    hostile = [f"{FILE} 1 1 1 /../etc/passwd", f"{FILE} 1 1 1 /opt/../x", f"{FILE} 1 1 1 //x", f"{FILE} 1 1 1 /opt/./y"]
    hostile += [f"{FILE} 1 1 1 /link/json.py", f"{FILE} 1 1 1 /none/x", f"{FILE} 1 1 1 /opt/file", "garbage", ""]
    hostile += [
        f"{FILE} 1 1 1 /opt/file/below",
        f"{FILE} {'9' * 30} 1 1 /large",
        "zz 1 1 1 /x",
        f"{FILE} 1 1 1 /opt/a\nb",
    ]
    after = listing(f"{FOLDER} 0 1 1 /opt", f"{LINK} 1 1 1 /link", *hostile)
    assert [path for path, _, _ in before.changed_to(after)] == ["opt/a", "opt/file"]


def test_names_are_those_of_the_folder_that_a_link_leads_to():
    links = ("'/bin' -> 'usr/bin'", "`/lib' -> `/usr/lib'", "'/usr/lib/b' -> '../lib/a'", "'/loop' -> 'loop'")
    names = root(f"{FOLDER} 0 1 1 /usr", f"{FILE} 1 1 1 /usr/bin/ls", f"{FILE} 1 1 1 /usr/lib/a/json.py", *links)
    resolver = RootLinks(names)
    assert ([*names.names_in(resolver.real("bin"))], [*names.names_in(resolver.real("lib/b"))]) == (["ls"], ["json.py"])
    assert resolver.on_the_way == {"bin", "lib", "usr/lib/b"}
    assert [*names.names_in(resolver.real("none"))] == []
    assert resolver.real("loop/x") == "loop/x"


def test_a_root_describes_what_its_programs_lead_to(tmp_path: Path):
    for name, text in {
        "venv/pyvenv.cfg": "home = /opt/python/bin\nversion = 3.12\n",
        "venv/bin/pip": "#!/opt/venv/bin/python -s\n",
        "venv/bin/python": "\x7fELF",
        "venv/bin/other": "#!/bin/sh\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    variables = {"PATH": f"{tmp_path}/venv/bin:/usr/bin:/bin", "LD_LIBRARY_PATH": "/opt/lib"}
    described = subprocess.run(["sh", "-c", DESCRIBE], env=variables, capture_output=True, text=True, check=True).stdout
    names = RootListing.of(b"", described.split("\n")[2:])
    assert {name: value for name, value in names.variables.items() if name in variables} == variables
    place = str(tmp_path).lstrip("/")
    assert names.text_of(f"{place}/venv/pyvenv.cfg") == "home = /opt/python/bin\n"
    assert names.text_of(f"{place}/venv/bin/pip") == "#!/opt/venv/bin/python -s\n"
    assert [names.text_of(f"{place}/venv/bin/{name}") for name in ("python", "other")] == ["", ""]


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as packed:
        for member, data in members:
            member.size = len(data)
            packed.addfile(member, io.BytesIO(data))
    return file.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def test_an_archive_that_lies_gives_what_was_asked_for_only():
    packed = archive(
        (member("./a"), b"data"),
        (member("./b", tarfile.LNKTYPE, "./a"), b""),
        (member("./c", tarfile.SYMTYPE, "/etc/shadow"), b""),
        (member("./d", tarfile.LNKTYPE, "/etc/shadow"), b""),
        (member("./e", tarfile.CHRTYPE), b""),
        (member("../a2"), b"no"),
        (member("./other"), b"no"),
    )
    assert unpacked(packed, ["a", "b", "c", "d", "e"]) == {"a": b"data", "b": b"data", "c": b"/etc/shadow"}
    for data in (b"", b"x" * 5000, packed[:700]):
        with contextlib.suppress(UnreadableRootError):
            assert unpacked(data, ["a"]).keys() <= {"a"}


def test_a_listing_without_end_costs_the_episode_not_the_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(roots, "_MOST_FILES", 3)
    before = root(f"{FILE} 1 1 1 /a", f"{FILE} 1 1 1 /b")
    lines = [f"{FILE} 1 1 1 /{name}" for name in "abcdef"]
    assert len(before.changed_to(listing(*lines[:5]))) == 3
    with pytest.raises(UnreadableRootError, match="more than 3 new files"):
        before.changed_to(listing(*lines))


def test_applied_files_are_as_new_as_written_ones():
    """Make would not build again what an older source has, and zip refuses times before 1980."""
    began_s = int(time.time())
    packed, _, _ = packed_changes([Change(path="a", before=None, after=Entry(mode=0o100644, data=b"x"))])
    with tarfile.open(fileobj=io.BytesIO(packed)) as opened:
        assert [began_s <= item.mtime <= time.time() for item in opened] == [True]


def test_what_does_not_fit_is_left_out_and_named():
    before = root()
    changed = before.changed_to(
        listing(f"{FILE} 60 1 1 /a", f"{FILE} 60 1 1 /b", f"{FILE} 10 1 1 /c", f"{FILE} 1 1 1 /d")
    )
    paths = to_fetch(changed, most_bytes=100, most_changes=3)
    assert paths == ["a", "c"]
    changes = changes_of(changed, {"a": b"a", "c": b"c"}, 3)
    assert [(change.path, change.after.data) for change in changes.changes] == [("a", b"a"), ("b", None), ("c", b"c")]
    assert len(changes.left_out) == 2


def test_what_is_replaced_is_deleted_first_and_folders_after_their_content():
    file, folder = Entry(mode=0o100755, data=b"x"), Entry(mode=stat.S_IFDIR)
    packed, files, folders = packed_changes(
        [
            Change(path="a", before=folder, after=file),
            Change(path="a/b", before=folder, after=None),
            Change(path="a/b/c", before=file, after=None),
            Change(path="d", before=file, after=file),
            Change(path="\udcff", before=None, after=Entry(mode=stat.S_IFLNK, data=b"/a")),
            Change(path="large", before=file, after=Entry(mode=0o100644)),
        ]
    )
    assert (files, folders) == (b"/a/b/c\0", b"/a/b\0/a\0")
    with tarfile.open(fileobj=io.BytesIO(packed)) as opened:
        assert [(item.name, item.mode) for item in opened if item.isreg()] == [("a", 0o755), ("d", 0o755)]
        assert opened.getnames()[-1] == "\udcff"


@pytest.mark.parametrize("programs", ["gnu", pytest.param("busybox", marks=pytest.mark.long)])
def test_the_scripts_run_with_programs_of_gnu_and_of_busybox(tmp_path: Path, programs: str):
    """They list this machine's root otherwise: here a folder below it."""
    prefix = ""
    if programs == "busybox":
        busybox = packages_layer(tmp_path, "packages", ("busybox-static",)) / "bin" / "busybox"
        (tmp_path / "bin").mkdir()
        for name in ("sh", "find", "xargs", "stat", "tar"):
            (tmp_path / "bin" / name).symlink_to(busybox)
        prefix = f"PATH={tmp_path / 'bin'};"
    folder, place = tmp_path / "root", tmp_path / "place"
    for name in ("-dash", "back\\nslash", "ünï", "new\nline", "plain"):
        (folder / "sub" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "sub" / name).write_text(name)
    os.link(folder / "sub" / "plain", folder / "hard")
    (folder / "link").symlink_to("/nowhere")

    def run(script: str) -> None:
        local_script = script.replace("PATH=/usr/bin:/bin:$PATH;", prefix)
        local_script = local_script.replace("find / ", f"find {folder} ").replace("-C /", f"-C {folder}")
        subprocess.run(["/bin/sh", "-c", local_script, str(place)], check=True)

    run(LIST)
    listed = place.read_bytes().replace(str(folder).encode() + b"/", b"/")
    changed = RootListing.of(b"", ()).changed_to(listed)
    names = ["sub/-dash", "sub/back\\nslash", "sub/new", "sub/plain", "sub/ünï"]
    assert [path for path, _, _ in changed] == ["hard", "link", "sub", *names]
    paths = to_fetch(changed, most_bytes=1000, most_changes=100)
    Path(f"{place}.list").write_bytes(listed_paths(paths))
    run(ARCHIVE)
    contents = unpacked(place.read_bytes(), paths)
    assert contents == {
        "hard": b"plain",
        "link": b"/nowhere",
        "sub/-dash": b"-dash",
        "sub/back\\nslash": b"back\\nslash",
        "sub/plain": b"plain",
        "sub/ünï": "ünï".encode(),
    }
