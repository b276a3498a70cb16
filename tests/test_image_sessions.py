"""Sessions whose commands see an image as their root: its settings, files, changes and forks."""

import asyncio
import contextlib
import gc
import os
import stat
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from forge_rl.errors import ConfigError
from forge_rl.sandbox import Limits, Pool, PoolSession, SandboxError
from forge_rl.sandbox.images import ContainerImage, ImageSettings, ImageStore
from forge_rl.sandbox.pool import Profile
from forge_rl.sandbox.workspaces.snapshots import layer_of
from tests import images
from tests.container_images import host_layer, image_of, layer, packed_folder
from tests.images import write_layout
from tests.sandbox_pool import needs_bubblewrap

LIMITS = Limits(wall_s=20, memory_bytes=128 << 20, processes=24, scratch_bytes=8 << 20, scratch_files=3000)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def place(store: Path, tmp_path: Path) -> Path:
    """A folder of the store for one test."""
    return store / tmp_path.name


@pytest.fixture(scope="module")
def image(store: Path) -> ContainerImage:
    """Three layers: the second deletes a file of the first and hides what a folder of it had, the third adds."""
    base = layer(store, "base", {"data/one": "1\n", "data/two": "2\n", "hidden/old": "o\n", "gone/x": "x\n"})
    second = layer(store, "second", {"data/one": None, "hidden/new": "n\n", "gone": None})
    os.setxattr(second / "hidden", "user.overlay.opaque", b"y")
    third = layer(store, "third", {"data/three": "3\n", "srv/app/run": "#!/bin/sh\necho ran\n"})
    settings = {"env": {"GREETING": "hi"}, "user": "bob", "working_folder": "/srv/app"}
    return image_of(host_layer(store), base, second, third, **settings)


@pytest.fixture(params=["overlays", "copies"])
async def pool(store: Path, request: pytest.FixtureRequest):
    """A pool, also as on a kernel that has no overlays for images."""
    without = [] if os.geteuid() == 0 else ["cgroup"]
    limits = replace(LIMITS, scratch_bytes=64 << 20) if request.param == "copies" else LIMITS
    pool = Pool(profile="process", images=store, limits=limits, warm=0, servers=1, without=without)
    pool._settings = replace(pool._settings, copies_images=request.param == "copies")
    try:
        with warnings.catch_warnings():
            if request.param == "copies":
                warnings.filterwarnings("ignore", "each session copies")
            async with pool:
                yield pool
    except SandboxError as error:
        pytest.skip(str(error))


async def text(session: PoolSession, command: str) -> str:
    result = await session.run(command)
    assert (result.error, result.status) == (None, 0), result
    return result.stdout


def snapshot(folder: Path) -> list[tuple[str, int, int]]:
    return [(str(path), path.lstat().st_mode, path.lstat().st_mtime_ns) for path in sorted(folder.rglob("*"))]


async def test_commands_are_the_images_user_in_its_folder_with_its_variables(pool: Pool, image: ContainerImage):
    async with pool.session(image=image) as session:
        assert await text(session, "id -u; id -g; pwd; echo $GREETING $HOME; ./run") == (
            "1001\n1002\n/srv/app\nhi /home/bob\nran\n"
        )
        assert await text(session, "cat /data/* /hidden/* /etc/hosts") == (
            "3\n2\nn\n127.0.0.1 localhost sandbox\n::1 localhost\n"
        )
        folders = {path.name for layer in image.layers for path in layer.iterdir()} - {"gone"}
        assert set((await text(session, "ls /")).split()) == folders | {"dev", "proc", "tmp"}
        result = await session.run(["./run"], env={"GREETING": "x"})
        assert (result.stdout, result.status) == ("ran\n", 0)


async def test_the_settings_of_an_image_may_be_numbers_groups_or_nothing(pool: Pool, image: ContainerImage):
    for user, expected in (("", "0\n0\n/root\n"), ("1234:77", "1234\n77\n/\n"), ("bob:5", "1001\n5\n/home/bob\n")):
        other = replace(image, settings=ImageSettings(user=user))
        async with pool.session(image=other) as session:
            assert await text(session, "id -u; id -g; echo $HOME") == expected
    async with pool.session(image=replace(image, settings=ImageSettings(user="alice"))) as session:
        result = await session.run("true")
        assert result.error is not None
        assert result.error.name == "NotStarted"
        assert "'alice' is not in its /etc/passwd" in result.error.message


async def test_changes_are_the_sessions_own_and_apply_in_another(pool: Pool, image: ContainerImage):
    before = [snapshot(folder) for folder in image.layers]
    change = (
        "rm /data/two; echo more >> /data/three; rm -r /hidden; mkdir -p /hidden/deep; echo d > /hidden/deep/d;"
        "ln -s /data /link; chmod 700 run; rm -r /usr/bin 2>/dev/null; echo tmp > /tmp/t; echo x > /gone"
    )
    async with pool.session(image=image) as first, pool.session(image=image) as second:
        await first.run(change)
        changes = await first.changes(leave_out=())
        paths = {entry.path: entry for entry in changes.changes}
        assert {"data/two", "data/three", "hidden/new", "hidden/deep/d", "link", "tmp/t", "gone"} <= paths.keys()
        assert not {path for path in paths if path.startswith(("dev", "proc", "etc"))}
        assert paths["data/two"].after is None
        assert paths["data/three"].before is not None
        assert paths["data/three"].before.data == b"3\n"
        assert "hidden/old" not in paths  # which the image itself has deleted
        await second.apply([entry for entry in changes.changes if not entry.path.startswith("usr")])
        assert await text(second, "cat /data/* /hidden/deep/d /link/three; ls -A /hidden; stat -c %a run") == (
            "3\nmore\nd\n3\nmore\ndeep\n755\n"
        )
        assert "usr" not in {entry.path.split("/")[0] for entry in (await second.changes()).changes}
    assert [snapshot(folder) for folder in image.layers] == before


async def test_a_fork_has_a_copy_of_the_changes(pool: Pool, image: ContainerImage):
    async with pool.session(image=image) as session:
        await session.run("echo 1 > a; rm /data/two; rm -r /hidden; mkdir /hidden; ln -s a b")
        async with await session.fork() as fork:
            await session.run("echo 2 > a")
            assert await text(fork, "cat a b; ls -A /hidden /data; echo 3 > a") == ("1\n1\n/data:\nthree\n\n/hidden:\n")
            assert await text(session, "cat b") == "2\n"
            await session.close()
            assert await text(fork, "cat b") == "3\n"
            assert {"srv/app/a", "data/two"} <= {entry.path for entry in (await fork.changes()).changes}


async def test_files_go_in_and_out_without_a_program_of_the_image(pool: Pool, place: Path):
    empty = image_of(layer(place, "empty", {"x": "1", "bin/sh-is-not-here": ""}), working_folder="/data")
    async with pool.session(image=empty) as session:
        await session.put("made/of/folders", b"data")
        assert await session.get("/data/made/of/folders") == b"data"
        assert await session.get("../x") == b"1"
        result = await session.run("echo hi")
        assert result.error is not None
        assert result.error.message.endswith("the image has no shell: give a program and its arguments")
        result = await session.run(["/bin/echo", "hi"])
        assert result.status != 0
        async with pool.session(image=empty) as other:
            await other.apply((await session.changes()).changes)
            assert await other.get("made/of/folders") == b"data"


async def test_links_of_an_image_lead_transfers_nowhere_outside(pool: Pool, place: Path, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("s")
    links = {"abs": f"-> {secret}", "up": f"-> ../../../../..{secret}", "tree": f"-> {tmp_path}", "loop": "-> loop"}
    links |= {"self": "-> /proc/self/root", "opt/etc": "-> ../../../etc"}
    hostile = image_of(layer(place, "links", links))
    async with pool.session(image=hostile) as session:
        for path in ("abs", "up", "tree/secret", "loop", f"self{secret}", "opt/etc/passwd", f"../../..{secret}"):
            with pytest.raises(SandboxError, match="could not transfer"):
                await session.get(path)
        await session.put(f"{tmp_path}/other", b"")
        await session.put(f"{tmp_path}/other", b"")
        for path in ("abs", "up", "tree/secret"):
            await session.put(path, b"mine")  # in the session's own root
            assert await session.get(path) == b"mine"
    assert secret.read_text() == "s"
    assert os.listdir(tmp_path) == ["secret"]


async def test_more_layers_than_fit_into_one_page_of_options(pool: Pool, place: Path):
    names = [f"{number:03d}-{'long-name-of-a-layer' * 6}" for number in range(60)]
    layers = [layer(place, name, {f"{number}": str(number), "last": str(number)}) for number, name in enumerate(names)]
    async with pool.session(image=image_of(*layers)) as session:
        assert (await session.get("/0"), await session.get("/59")) == (b"0", b"59")
        assert await session.get("/last") == b"59"


async def test_what_a_pool_cannot_open_is_refused_by_name(
    pool: Pool, image: ContainerImage, store: Path, tmp_path: Path
):
    with pytest.raises(ConfigError, match="are not in Pool"):
        await pool.open(image=image_of(layer(tmp_path, "elsewhere", {})))
    with pytest.raises(ConfigError, match="workspace or an image"):
        await pool.open(image=image, workspace=tmp_path)
    with pytest.raises(SandboxError, match="cannot be mounted here"):
        await pool.open(image=replace(image, layers=(store / "nowhere" / "files",)))
    async with pool.session(image=image) as session:
        with pytest.raises(ConfigError, match="no further folders"):
            await session.run("true", folders={"/app": "app"})


async def test_programs_of_an_image_reach_its_named_addresses(pool: Pool, image: ContainerImage):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"to " + await reader.readline())
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        names = [f"127.0.0.1:{port}", f"name.example:{port}", "[2001:db8::1]:443"]
        ask = f"exec 3<>/dev/tcp/127.0.0.1/{port}; echo me >&3; cat <&3"
        async with pool.session(image=image, network=names) as session:
            assert "127.1.0.1 name.example\n" in await text(session, "cat /etc/hosts")
            assert await text(session, ask) == "to me\n"
            assert "reset" in (await session.run(ask.replace("127.0.0.1", "name.example"))).stderr  # there is no such
            async with await session.fork() as fork:
                assert await text(fork, ask) == "to me\n"
            assert "etc/hosts" not in {entry.path for entry in (await session.changes()).changes}
        async with pool.session(image=image) as session:
            assert "refused" in (await session.run(ask)).stderr


@pytest.mark.parametrize("profile", ["standard", "strict"])
async def test_this_machines_python_runs_in_an_image_that_has_none(
    store: Path, image: ContainerImage, profile: Profile
):
    """And loads no library of the image: those here would end it."""
    libraries = {
        f"{folder}/{name}": "no library" for folder in ("lib", "usr/lib", "lib64") for name in ("libssl.so.3",)
    }
    image = replace(image, layers=(*image.layers, layer(store, f"bad-{profile}", libraries)))
    without = [] if os.geteuid() == 0 else ["cgroup"]
    pool = Pool(profile=profile, images=store, limits=LIMITS, warm=0, servers=1, without=without)
    try:
        await pool.__aenter__()
    except SandboxError as error:
        pytest.skip(str(error))
    try:
        async with pool.session(image=image) as session, pool.session(image=image) as other:
            cells = {
                "import os; os.getcwd(), os.environ['GREETING'], sorted(os.listdir('/data'))": (
                    "('/srv/app', 'hi', ['three', 'two'])"
                ),
                "import asyncio, ssl, sqlite3, lzma, xml.dom.minidom, unittest.mock; ssl.HAS_TLSv1_2": ("True"),
                "import subprocess; subprocess.run(['./run'], capture_output=True).stdout": "b'ran\\n'",
                "print(open('/etc/passwd').read().count('bob')); open('new', 'w').write(os.environ['HOME'])": "1",
                "import sys; [path for path in sys.path if path and not path.startswith(('/dev/', '/srv'))]": "[]",
            }
            for code, value in cells.items():
                result = await session.run(code)
                assert (result.error, result.value) == (None, value)
            for path in ("/proc/self/oom_score_adj", "/dev/python/0/os.py", "/dev/x", "/proc/x"):
                result = await session.run(f"open('{path}', 'w')")
                assert result.error is not None, path
                assert result.error.name in ("OSError", "FileNotFoundError", "PermissionError")
            await session.put("put/file", b"data")
            assert await session.get("/srv/app/put/file") == b"data"
            changes = (await session.changes()).changes
            assert {change.path for change in changes} == {"srv/app/new", "srv/app/put", "srv/app/put/file"}
            await other.apply(changes)
            assert await other.get("new") == b"/"
            with pytest.raises(SandboxError, match="cannot fork"):
                await session.fork()
            with pytest.raises(ConfigError, match="undo=True, and a session of Python in the image"):
                await pool.open(image=image, undo=True)
        for name in ("proc", "dev"):
            hostile = layer(store, f"{profile}-{name}", {name: "-> /etc"})
            with pytest.raises(SandboxError, match=f"its /{name} is not a folder"):
                await pool.open(image=image_of(hostile))
    finally:
        await pool.__aexit__(None, None, None)


@pytest.mark.parametrize("profile", ["process", "strict"])
async def test_a_copy_of_an_image_is_bounded_and_said(store: Path, image: ContainerImage, profile: Profile):
    large = layer(store, f"large-{profile}", {"large": b"x" * (3 << 20), "same": b"y" * (3 << 20), "pipe-here": ""})
    os.mkfifo(large / "pipe")
    image = replace(image, layers=(*image.layers, large))
    without = [] if os.geteuid() == 0 else ["cgroup"]
    limits = replace(LIMITS, scratch_bytes=64 << 20, transfer_bytes=1 << 20)
    pool = Pool(profile=profile, images=store, limits=limits, warm=0, servers=1, without=without)
    pool._settings = replace(pool._settings, copies_images=True)
    try:
        await pool.__aenter__()
    except SandboxError as error:
        pytest.skip(str(error))
    try:
        with pytest.warns(UserWarning, match="each session copies .*this pool copies images"):
            session = await pool.open(image=image)
        async with session:
            change = "printf z 1<>/large; echo one > /data/one; rm -r /data/three"
            result = await session.run(change if profile == "process" else f"import os; os.system({change!r})")
            assert result.error is None
            changes = await session.changes()
            assert {entry.path for entry in changes.changes} == {"large", "data/one", "data/three"}
            assert changes.left_out == ["content of large: too large, or not readable"]
        few = replace(limits, scratch_bytes=2 << 20)
        with pytest.raises(SandboxError, match=r"copies images; and its files cannot be copied .*No space left"):
            await pool.open(image=image, limits=few)
        with pytest.raises(SandboxError, match="cannot be copied within the session's Limits"):
            await pool.open(image=image, limits=replace(limits, scratch_files=10))
    finally:
        await pool.__aexit__(None, None, None)
    assert stat.S_ISFIFO((large / "pipe").lstat().st_mode)


async def test_nothing_is_left_of_sessions_of_images(pool: Pool, image: ContainerImage):
    def mounts() -> int:
        return len(Path(f"/proc/{os.getpid()}/mountinfo").read_text().splitlines())

    gc.collect()  # what earlier tests left open in cycles would close meanwhile
    before, files = mounts(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        async with pool.session(image=image) as session:
            await session.run("sleep 100 & echo hi > x")
            async with await session.fork() as fork:
                assert await text(fork, "cat x") == "hi\n"
    assert mounts() == before
    assert len(os.listdir("/proc/self/fd")) <= files
    assert not pool.hosts[0].sessions
    assert stat.S_ISDIR(image.layers[0].stat().st_mode)


@needs_bubblewrap
async def test_a_snapshot_is_a_layer_of_an_image(image: ContainerImage, tmp_path: Path):
    """Another host fetches it, and goes on where the session was."""
    layers = [packed_folder(folder) for folder in image.layers]
    store, without = ImageStore(tmp_path / "store"), [] if os.geteuid() == 0 else ["cgroup"]
    settings = {"WorkingDir": "/srv/app"}
    write_layout(tmp_path / "first", images.image(layers[:1], settings, compress=bytes))
    pool = Pool(profile="process", images=store.folder, limits=LIMITS, warm=0, servers=1, without=without)
    async with pool, store.use(f"oci:{tmp_path / 'first'}") as base:
        async with pool.session(image=base) as session:
            await session.run("echo 1 > a; ln -s a b; chmod +x a; rm -r /home; rm /usr/bin/wc; mkdir -p /home/new/x")
            changes = await session.changes(leave_out=())
            snapshot = layer_of(changes)
            assert layer_of(await session.changes(leave_out=())) == snapshot
        write_layout(tmp_path / "second", images.image([layers[0], snapshot], settings, compress=bytes))
        async with store.use(f"oci:{tmp_path / 'second'}") as image_after:
            assert image_after.layers[0] == base.layers[0]  # which is kept once
            async with pool.session(image=image_after) as session:
                assert await text(session, "cat b; ls /home /home/new; ls /usr/bin/wc || stat -c %a a") == (
                    "1\n/home:\nnew\n\n/home/new:\nx\n755\n"
                )
                assert not (await session.changes()).changes
                await session.run("mkfifo pipe")
                with pytest.raises(SandboxError, match=r"pipe.* is neither file, link nor folder"):
                    layer_of(await session.changes())
                await session.run("rm pipe; touch .wh.a")
                with pytest.raises(SandboxError, match=r"no layer can have a file named .*\.wh\.a"):
                    layer_of(await session.changes())


@pytest.mark.parametrize("name", ["proc", "dev", "etc", "tmp", "work"])
async def test_links_in_place_of_an_images_folders_lead_nowhere(
    pool: Pool, image: ContainerImage, tmp_path: Path, place: Path, name: str
):
    """Bubblewrap mounts over these, before the image's root is all that it sees."""
    (tmp_path / "secret").write_text("secret")
    targets = (f"/oldroot{tmp_path}", f"../../../..{tmp_path}", "/oldroot/tmp/0", "/oldroot/layers", "/proc/1/root")
    for number, target in enumerate(targets):
        content = {name: f"-> {target}"} if name != "etc" else {name: None}
        links = layer(place, f"links-{name}-{number}", content)
        if name == "etc":
            (links / "etc").unlink()
            (links / "etc").symlink_to(target)
        hostile = replace(image, layers=(image.layers[0], links), settings=ImageSettings(working_folder="/data"))
        async with pool.session(image=hostile) as session:
            result = await session.run(f"ls -la /{name}/ /oldroot; cat /{name}/secret; echo mine > /{name}/secret")
            assert "secret" not in result.stdout
            with contextlib.suppress(SandboxError):
                await session.put(f"/{name}/secret", b"mine")
    async with pool.session(image=image) as session:
        assert await text(session, "echo 1") == "1\n"
    assert (tmp_path / "secret").read_text() == "secret"
    assert os.listdir(tmp_path) == ["secret"]
