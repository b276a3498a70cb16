"""Workspaces: sessions share a folder as their own, and what each changed is read without trusting it."""

import asyncio
import os
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from forge_rl.sandbox import SandboxError, bodies
from forge_rl.sandbox.inside import kernel
from forge_rl.sandbox.workspaces.changes import Change, Changes, Entry, FolderDescriptor, read_changes
from forge_rl.sandbox.workspaces.diffs import diff_text
from tests.sandbox_pool import LIMITS, SharedPool
from tests.security.other_user import needs_root

FILE = stat.S_IFREG | 0o644


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with a package, a script, a link and two names for one file."""
    folder = tmp_path / "base"
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "a.py").write_text("x = 1\ny = 2\n")
    (folder / "package" / "b.py").write_text("z = 3\n")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    os.link(folder / "run.sh", folder / "same.sh")
    os.symlink("run.sh", folder / "link")
    return folder


def snapshot(folder: Path) -> list[tuple[str, int, bytes]]:
    return [
        (str(path.relative_to(folder)), path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    ]


def changed_by(sandbox: SharedPool, base: Path, code: str, **limits: object) -> tuple[Changes, str]:
    """Run a cell, which must succeed, in a workspace; return what changed, also as text."""

    async def work():
        async with sandbox.pool.session(workspace=base, limits=replace(LIMITS, **limits)) as session:
            result = await session.run(code)
            assert result.error is None, result.error.traceback
            return await session.changes(), await session.diff()

    return sandbox.run(work())


def test_the_diff_of_a_workspace_is_one_that_git_applies(sandbox: SharedPool, base: Path, tmp_path: Path):
    before = snapshot(base)
    found, text = changed_by(
        sandbox,
        base,
        "import os, shutil\nopen('package/a.py', 'a').write('w = 4')\nos.chmod('run.sh', 0o755)\nos.unlink('link')\n"
        "os.symlink('package', 'link')\nshutil.move('package/b.py', 'moved.py')\nos.makedirs('new/empty')\n"
        "open('new/line\\nfeed', 'w').write('hi\\n')\nopen(b'new/\\xff', 'w').write('hi\\n')\n"
        "open('zeros', 'wb').write(bytes(9))\n"
        "open('same.sh', 'r+').close()",
    )
    assert snapshot(base) == before
    assert [change.path for change in found.changes] == [
        *("link", "moved.py", "new", "new/empty", "new/line\nfeed", "new/\udcff", "package/a.py", "package/b.py"),
        *("run.sh", "zeros"),
    ]
    assert not found.left_out
    assert "Binary files /dev/null and b/zeros differ" in text
    without = "".join(f"diff --git{each}" for each in text.split("diff --git")[1:] if "b/zeros" not in each)
    subprocess.run(["git", "apply", "-"], cwd=base, input=without, text=True, check=True)
    assert (base / "package" / "a.py").read_text() == "x = 1\ny = 2\nw = 4"
    assert not (base / "package" / "b.py").exists()
    assert (base / "moved.py").read_text() == "z = 3\n"
    assert os.readlink(base / "link") == "package"
    assert (base / "run.sh").stat().st_mode & stat.S_IXUSR
    assert os.listdir(os.fsencode(base / "new")) in ([b"line\nfeed", b"\xff"], [b"\xff", b"line\nfeed"])


def test_changes_of_a_session_apply_in_another_even_to_other_types(sandbox: SharedPool, base: Path):
    async def work():
        async with sandbox.pool.session(workspace=base) as first, sandbox.pool.session(workspace=base) as second:
            shell = "rm -r package link run.sh; echo 1 > package; mkdir link; echo 2 > link/x; chmod +x link/x"
            await first.run(f"import os; os.system('{shell}; ln -s / run.sh; mkdir -p a/b; echo 3 > same.sh')")
            changes = await first.changes()
            assert (await second.run("import os; os.listdir('package')")).value in (
                "['a.py', 'b.py']",
                "['b.py', 'a.py']",
            )
            await second.apply(changes.changes)
            assert (
                await second.run("os.getcwd().endswith('/workspace'), os.listdir(os.environ['HOME'])")
            ).value == "(True, [])"
            return changes, await second.changes()

    first, second = sandbox.run(work())
    assert first.changes == second.changes
    assert {change.path for change in first.changes} >= {"package", "package/a.py", "link", "link/x", "run.sh", "a/b"}


def test_changes_of_commands_are_made_in_another_session_of_commands(process_pool: SharedPool, base: Path):
    async def work():
        async with (
            process_pool.pool.session(workspace=base) as first,
            process_pool.pool.session(workspace=base) as second,
        ):
            await first.run("rm package/a.py link; mkdir link; echo 1 > link/x; chmod +x package/b.py; touch 'a b'")
            changes = await first.changes()
            await second.apply(changes.changes)
            with pytest.raises(SandboxError, match=r"do not apply: .*FileNotFoundError"):
                await second.apply(changes.changes)
            return changes, await second.changes(), (await second.run("ls /tmp")).stdout

    first, second, left = process_pool.run(work())
    assert first.changes == second.changes
    assert {change.path for change in first.changes} == {"package/a.py", "package/b.py", "link", "link/x", "a b"}
    assert left == ""


def test_a_deleted_and_rebuilt_folder_hides_what_the_base_had(sandbox: SharedPool, base: Path):
    found, _ = changed_by(
        sandbox, base, "import shutil, os\nshutil.rmtree('package'); os.mkdir('package'); open('package/c', 'w')"
    )
    assert [(change.path, change.after is None) for change in found.changes] == [
        *(("package/a.py", True), ("package/b.py", True), ("package/c", False)),
    ]


def test_what_a_session_changed_is_there_after_it_was_killed(sandbox: SharedPool, base: Path):
    async def work():
        async with sandbox.pool.session(workspace=base) as session:
            await session.run("import os\nopen('kept', 'w').write('1'); os._exit(1)")
            assert not session.alive
            text = await session.diff()
        with pytest.raises(SandboxError, match="is closed"):
            await session.diff()
        return text

    assert "+1" in sandbox.run(work())


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("os.symlink('/etc/shadow', 'a'); os.symlink('/etc', 'b')", {"a", "b"}),
        ("os.mkfifo('a'); os.mknod('b', 0o140644)", {"a", "b"}),
        ("open('a', 'w').write('x'); os.chmod('a', 0o6777); os.chmod('package', 0)", {"a"}),
        (
            "os.mkdir('.git'); open('.git/config', 'w').write('[core]\\n fsmonitor = touch /tmp/hurt'); open('a', 'w')",
            {"a"},
        ),
        ("open('.gitattributes', 'w').write('* filter=x diff=y')", {".gitattributes"}),
        ("os.link('run.sh', 'a'); open('a', 'w').write('b')", {"a", "run.sh"}),
    ],
    ids=["links", "special files", "modes", "git's config", "attributes", "hard links"],
)
def test_a_hostile_tree_is_only_read(sandbox: SharedPool, base: Path, code: str, names: set[str]):
    before = snapshot(base)
    found, text = changed_by(sandbox, base, f"import os\n{code}")
    assert {change.path for change in found.changes} == names
    for change in found.changes:
        assert change.after is not None
        assert change.after.mode & 0o6022 == 0  # also git's own modes have no setuid
    assert "root:" not in text
    assert snapshot(base) == before


def test_a_folder_that_turns_into_a_link_while_it_is_read_leads_nowhere(sandbox: SharedPool, base: Path):
    swap = (
        "import os, threading\nos.mkdir('a'); open('a/passwd', 'w').write('mine'); os.symlink('/etc', 'b')\n"
        "def swap():\n  while True:\n    os.rename('a', 't'); os.rename('b', 'a'); os.rename('t', 'b')\n"
        "threading.Thread(target=swap, daemon=True).start()"
    )

    async def work():
        async with sandbox.pool.session(workspace=base) as session:
            assert (await session.run(swap)).error is None
            return [await session.changes() for _ in range(150)]

    seen = {change.path: change.after.data for each in sandbox.run(work()) for change in each.changes if change.after}
    inside = {path: data for path, data in seen.items() if "/" in path}
    assert inside.keys() <= {"a/passwd", "b/passwd", "t/passwd"}
    assert set(inside.values()) == {b"mine"}


@pytest.mark.parametrize(
    "code",
    [
        "open('big', 'wb').write(bytes(5 << 20))",
        "for i in range(99): open(f'file {i}', 'w').close()",
        "import os\nos.mknod('device', 0o20666, os.makedev(1, 3))",
        "import os\nos.listdir('/changes')",
        "import os\nos.listdir('/base')",
        "import os\nos.setxattr('package', 'trusted.overlay.opaque', b'y')",
    ],
    ids=["quota of bytes", "quota of files", "device", "overlay's own folder", "base itself", "overlay's marks"],
)
def test_a_session_cannot_go_around_its_workspace(sandbox: SharedPool, base: Path, code: str):
    async def work():
        async with sandbox.pool.session(workspace=base) as session:
            return await session.run(code)

    error = sandbox.run(work()).error
    assert error is not None
    assert error.name in ("OSError", "PermissionError")


def test_long_paths_and_huge_files_are_left_out_and_named(sandbox: SharedPool, base: Path):
    code = "import os\nopen('big', 'wb').truncate(3 << 20)\nfor _ in range(130):\n  os.mkdir('d'); os.chdir('d')"
    found, text = changed_by(sandbox, base, code, scratch_files=300, transfer_bytes=1 << 20)
    assert [change.after for change in found.changes if change.path == "big"] == [Entry(mode=FILE)]
    assert len(found.left_out) == 2
    assert "# left out: content of big: too large, or not readable" in text


def test_where_there_is_no_overlay_each_session_copies_its_workspace(
    sandbox: SharedPool, base: Path, monkeypatch: pytest.MonkeyPatch
):
    def refused(folder: str) -> int:
        raise OSError(f"no open_tree of {folder}")  # as without root

    monkeypatch.setattr(kernel, "detached", refused)
    before = snapshot(base)

    async def work():
        with pytest.warns(UserWarning, match="each session copies"):
            session = await sandbox.pool.open(workspace=base)
        async with session, sandbox.pool.session(workspace=base) as small:
            result = await session.run(
                "import os\nos.unlink('link'); os.unlink('package/a.py'); open('new', 'w').write('1')\n"
                "open('same.sh').read(), oct(os.stat('package').st_mode & 0o777)"
            )
            assert result.value == "('#!/bin/sh\\n', '0o755')"
            assert not (await small.changes()).changes
            return await session.changes()

    found = sandbox.run(work())
    assert [(change.path, change.after is None) for change in found.changes] == [
        *(("link", True), ("new", False), ("package/a.py", True)),
    ]
    assert snapshot(base) == before
    sandbox.pool._told.clear()  # the next test's pool is the same


@needs_root
def test_a_copy_of_a_workspace_gives_a_session_what_an_overlay_does(
    sandbox: SharedPool, base: Path, monkeypatch: pytest.MonkeyPatch
):
    for number, mode in enumerate((0o600, 0o644, 0o640, 0o660)):
        for owner in ((4242, 4343), (0, 0), (0, 4343)):
            path = base / f"file {number} {owner}"
            path.write_text("content")
            os.chown(path, *owner)
            path.chmod(mode)
    os.chown(base, 4242, 4343)
    code = (
        "import os\n[(name, [os.access(name, right) for right in (os.R_OK, os.W_OK)])"
        " for name in sorted(os.listdir()) if 'file' in name]"
    )

    async def rights():
        async with sandbox.pool.session(workspace=base) as session:
            return (await session.run(code)).value

    mounted = sandbox.run(rights())
    monkeypatch.setattr(bodies, "_detached", lambda folder: os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
    with pytest.warns(UserWarning, match="each session copies"):
        copied = sandbox.run(rights())
    sandbox.pool._told.clear()
    assert copied == mounted
    assert "True" in mounted
    assert "False" in mounted


def test_too_many_open_files_are_an_error_of_the_sandbox(
    sandbox: SharedPool, base: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(folder: str) -> int:
        raise OSError(24, f"Too many open files: {folder}")

    async def work():
        free = sandbox.pool._places._value
        with monkeypatch.context() as patched:
            patched.setattr(bodies, "_detached", full)
            with pytest.raises(SandboxError, match="Too many open files"):
                await sandbox.pool.open(workspace=base)
        assert sandbox.pool._places._value == free

    sandbox.run(work())


EDITED = "import os\nopen('package/a.py', 'a').write('w = 4\\n'); os.unlink('link'); os.rename('run.sh', 'ran.sh')"
ADDED = "os.unlink('package/b.py'); os.makedirs('new'); open('new/{0}', 'w').write('{0}')"
"""Cells: a change, a mark of a deletion and a rename, and later changes of one session."""


def test_a_forked_workspace_goes_on_apart(sandbox: SharedPool, base: Path):
    before = snapshot(base)

    async def work():
        async with sandbox.pool.session(workspace=base) as session:
            await session.run("import package.a")
            assert (await session.run(EDITED)).error is None
            async with await session.fork() as fork, await fork.fork() as second:
                alike = await asyncio.gather(*(each.diff() for each in (session, fork, second)))
                await session.run(ADDED.format("first"))
                result = await fork.run(ADDED.format("fork") + "\nimport package.b")
                assert result.error is not None
                assert result.error.name == "ModuleNotFoundError"
                await second.run("import shutil; shutil.rmtree('package'); os.mkdir('package')")
                apart = [await each.changes() for each in (session, fork, second)]
            assert (await session.run("sorted(os.listdir('new'))")).value == "['first']"
            assert (await session.run("sorted(os.listdir('..'))")).value == "['0', 'workspace']"
            return alike, [{change.path: change.after for change in each.changes} for each in apart]

    alike, (first, fork, second) = sandbox.run(work())
    assert alike[0] == alike[1] == alike[2]
    assert "+w = 4" in alike[0]
    assert "deleted file mode 120000" in alike[0]
    common = {"link": None, "run.sh": None, "package/a.py": Entry(mode=FILE, data=b"x = 1\ny = 2\nw = 4\n")}
    assert first.items() >= {**common, "package/b.py": None, "new/first": Entry(mode=FILE, data=b"first")}.items()
    assert fork.items() >= {**common, "package/b.py": None, "new/fork": Entry(mode=FILE, data=b"fork")}.items()
    assert ("new/first" in fork, "new/fork" in first) == (False, False)
    assert (second["package/a.py"], second["package/b.py"], "new" in second) == (None, None, False)
    assert snapshot(base) == before


def test_links_planted_where_a_fork_gets_its_workspace_lead_nowhere(sandbox: SharedPool, base: Path):
    async def work():
        async with sandbox.pool.session(workspace=base) as session:
            names = range(int(session._body.name), int(session._body.name) + 20)
            await session.run(f"import os\nfor n in {[*names]}: os.symlink('/usr', f'../workspace-{{n}}')")
            with pytest.raises(SandboxError, match="File exists"):
                await session.fork()
            assert (await session.run("len(os.listdir('/usr')) > 2, os.listdir('package')")).error is None
        async with sandbox.pool.session(workspace=base) as other, await other.fork() as fork:
            return await fork.run("import os; len(os.listdir('/usr')) > 2")

    assert sandbox.run(work()).value == "True"


def test_a_workspace_goes_back_to_the_cell_before(sandbox: SharedPool, base: Path):
    async def work():
        async with sandbox.pool.session(workspace=base, undo=True) as session:
            await session.run("import os; open('new', 'w').write('1'); x = 1")
            await session.run("open('new', 'w').write('2'); os.unlink('link'); os.kill(os.getpid(), 9)")
            assert not session.alive
            await session.restore()
            assert (await session.run("open('new').read(), x, os.path.lexists('link')")).value == "('1', 1, True)"
            return await session.changes()

    [change] = sandbox.run(work()).changes
    assert (change.path, change.after) == ("new", Entry(mode=FILE, data=b"1"))


def test_a_copied_workspace_is_forked_and_files_of_ended_forks_are_deleted(
    sandbox: SharedPool, base: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bodies, "_detached", lambda folder: os.open(folder, os.O_RDONLY | os.O_DIRECTORY))

    async def work():
        with pytest.warns(UserWarning, match="each session copies"):
            session = await sandbox.pool.open(workspace=base)
        async with session:
            await session.run("import os; os.unlink('package/a.py')")
            for _ in range(4):  # which would not fit together
                async with await session.fork() as fork:
                    await fork.run("open('large', 'wb').write(bytes(3 << 20)); open('../large', 'w')")
                    found = await fork.changes()
            return found, await session.changes()

    fork, first = sandbox.run(work())
    assert [change.path for change in fork.changes] == ["large", "package/a.py"]
    assert [change.path for change in first.changes] == ["package/a.py"]
    sandbox.pool._told.clear()


def test_a_workspace_is_a_folder(sandbox: SharedPool, base: Path):
    with pytest.raises(SandboxError, match="not a folder"):
        sandbox.run(sandbox.pool.open(workspace=base / "none"))


def test_a_diff_is_as_short_as_possible_and_bounded():
    old = "".join(f"{line}\n" for line in "abcdefghijklmnop")
    new = old.replace("c\n", "").replace("n\n", "n\nN\n")
    change = Change(path="f", before=Entry(mode=FILE, data=old.encode()), after=Entry(mode=FILE, data=new.encode()))
    text = diff_text(Changes(changes=[change]))
    assert [line for line in text.splitlines() if line[0] in "-+@"][2:] == [
        "@@ -1,6 +1,5 @@",
        "-c",
        "@@ -12,5 +11,6 @@",
        "+N",
    ]
    assert (
        diff_text(Changes(changes=[change, change]), most_chars=len(text))
        == text + "# 1 more changed files are not shown\n"
    )
    lines = [b"".join(b"%d\n" % (number * step) for number in range(20_000)) for step in (1, 3)]
    huge = Change(path="f", before=Entry(mode=FILE, data=lines[0]), after=Entry(mode=FILE, data=lines[1]))
    text = diff_text(Changes(changes=[huge]))  # difflib takes minutes
    assert text.count("\n-") == text.count("\n+") == 20_000


def test_changes_are_bounded_in_number_and_bytes(tmp_path: Path):
    (tmp_path / "base").mkdir()
    mine = tmp_path / "mine"
    mine.mkdir()
    for number in range(9):
        (mine / str(number)).write_bytes(bytes(10))
    folder = FolderDescriptor(os.open(mine, os.O_RDONLY), is_overlay=False)
    found = read_changes([str(tmp_path / "base")], folder, most_changes=4, most_bytes=25)
    assert [change.after.data for change in found.changes if change.after] == [bytes(10), bytes(10), None, None]
    assert len(found.left_out) == 3
    # All files are deleted: their content is bounded too, and what is missing makes the changes no less whole.
    deletions = read_changes(
        [str(mine)], FolderDescriptor(os.open(tmp_path / "base", os.O_RDONLY), is_overlay=False), most_bytes=25
    )
    assert [change.before.data for change in deletions.changes if change.before] == [bytes(10)] * 2 + [None] * 7
    assert not deletions.left_out


def test_what_a_folder_that_was_made_again_no_longer_has_is_a_change(sandbox: SharedPool, base: Path):
    (base / "package" / "inner").mkdir()
    (base / "package" / "inner" / "c.py").write_text("1\n")
    code = "shutil.rmtree('package'); os.makedirs('package/inner'); open('package/inner/d', 'w').close()"
    changes, _ = changed_by(sandbox, base, f"import os, shutil\n{code}")
    assert [(change.path, change.after is None) for change in changes.changes] == [
        *(("package/a.py", True), ("package/b.py", True), ("package/inner/c.py", True), ("package/inner/d", False)),
    ]
