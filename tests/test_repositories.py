"""The store of repositories: checkouts by revision, shared files, eviction, several processes, hostile content."""

import asyncio
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from forge_rl.errors import ConfigError
from forge_rl.sandbox import SandboxError
from forge_rl.sandbox.workspaces.repositories import RepositoryStore


def git(folder: Path, *arguments: str, data: bytes | None = None) -> str:
    """Run git in a folder without the user's configuration."""
    env = {
        **{name: os.environ[name] for name in ("PATH",)},
        **{f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_NOSYSTEM": "1",
        "HOME": "/nowhere",
    }
    done = subprocess.run(["git", *arguments], cwd=folder, env=env, input=data, capture_output=True, check=True)
    return done.stdout.decode().strip()


def commit(folder: Path) -> str:
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "--message=x")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    (folder / "package").mkdir()
    (folder / "package" / "a.py").write_text("x = 1\n")
    (folder / "big").write_bytes(os.urandom(100_000))
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    os.symlink("package/a.py", folder / "link")
    commit(folder)
    return folder


async def files(store: RepositoryStore, repository: Path | str, revision: str) -> tuple[Path, dict[str, bytes]]:
    async with store.checkout(str(repository), revision) as found:
        tree = sorted(path for path in found.folder.rglob("*") if not path.is_dir())
        read = {str(each.relative_to(found.folder)): each.read_bytes() for each in tree}
        return found.folder, read


def test_a_checkout_has_its_revisions_files_and_shares_equal_files(repository: Path, tmp_path: Path):
    first = git(repository, "rev-parse", "HEAD")
    (repository / "package" / "a.py").write_text("x = 2\n")
    second = commit(repository)
    git(repository, "tag", "--annotate", "--message=x", "v1", first)
    store = RepositoryStore(tmp_path / "store")

    async def main():
        old, read = await files(store, repository, first)
        new, _ = await files(store, repository, "main")
        tagged, _ = await files(store, repository.as_uri(), "v1")
        return old, new, tagged, read

    old, new, tagged, read = asyncio.run(main())
    assert set(read) == {"big", "link", "package/a.py", "run.sh"}
    assert (old.name, new.name, tagged) == (first, second, old)
    assert (old / "package" / "a.py").read_text() == "x = 1\n"
    assert (new / "link").read_text() == "x = 2\n"
    assert stat.S_IMODE((new / "run.sh").stat().st_mode) == 0o755
    assert (old / "big").stat().st_ino == (new / "big").stat().st_ino
    (repository / ".git").rename(tmp_path / "gone")
    asyncio.run(files(RepositoryStore(tmp_path / "store"), repository, first))  # offline, in another run


@pytest.mark.parametrize(
    ("repository_", "revision", "error"),
    [
        ("ext::sh -c touch% hurt", "main", "is not a repository"),
        ("ssh://host/x", "main", "is not a repository"),
        ("/nowhere", "main", "is not a repository"),
        ("", "--upload-pack=touch hurt", "is not a revision"),
        ("", "none", "no branch or tag none"),
        ("", "0" * 40, "git fetch failed"),
    ],
)
async def test_what_is_no_repository_or_revision_is_refused(
    repository_: str, revision: str, error: str, repository: Path, tmp_path: Path
):
    store = RepositoryStore(tmp_path / "store")
    with pytest.raises((ConfigError, SandboxError), match=error):
        await files(store, repository_ or repository, revision)
    assert os.listdir(tmp_path / "store" / "trees") in ([], [f"{revision}.lock"])


async def test_nothing_that_a_repository_contains_is_run(repository: Path, tmp_path: Path):
    hurt = f"touch {tmp_path / 'hurt'}"
    for name in ("post-checkout", "reference-transaction", "post-index-change"):
        hook = repository / ".git" / "hooks" / name
        hook.parent.mkdir(exist_ok=True)
        hook.write_text(f"#!/bin/sh\n{hurt}\n")
        hook.chmod(0o755)
    (repository / ".gitattributes").write_text("* filter=hurt\nbig export-ignore\n*.py ident\n")
    (repository / ".gitmodules").write_text('[submodule "x"]\n path = x\n url = https://nowhere.invalid/x\n')
    (repository / "large.bin").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    (repository / "a\nb").write_text("$Id$\n")
    commit(repository)
    git(repository, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},x")
    git(repository, "commit", "--quiet", "--message=x")
    revision = git(repository, "rev-parse", "HEAD")
    (tmp_path / "hurt").unlink(missing_ok=True)  # the repository's own git runs its hooks
    with (repository / ".git" / "config").open("a") as file:
        file.write(
            f'[core]\n fsmonitor = {hurt}\n[uploadpack]\n packObjectsHook = {hurt}\n[filter "hurt"]\n smudge = {hurt}\n'
        )
    store = RepositoryStore(tmp_path / "store")

    async def main():
        async with store.checkout(str(repository), revision) as found:
            return found.left_out, (found.folder / "a\nb").read_text(), (found.folder / "big").exists()

    with pytest.warns(UserWarning, match=r"left out are submodule x, LFS large.bin"):
        found = await main()
    assert found == (("submodule x", "LFS large.bin"), "$Id$\n", True)
    assert not (tmp_path / "hurt").exists()


@pytest.mark.parametrize("path", ["../hurt", ".git/config", "a/.GIT/x"])
async def test_a_tree_with_paths_that_lead_out_is_refused(path: str, repository: Path, tmp_path: Path):
    blob = git(repository, "hash-object", "-w", "--stdin", data=b"hurt")
    names = path.split("/")
    tree = f"100644 blob {blob}\t{names[-1]}"
    for name in reversed(names[:-1]):
        made = git(repository, "hash-object", "-w", "-t", "tree", "--literally", "--stdin", data=_tree(tree))
        tree = f"040000 tree {made}\t{name}"
    made = git(repository, "hash-object", "-w", "-t", "tree", "--literally", "--stdin", data=_tree(tree))
    revision = git(repository, "commit-tree", made, "-m", "x")
    git(repository, "update-ref", "refs/heads/hostile", revision)
    with pytest.raises(SandboxError, match=r"git fetch failed|it was made to do harm"):
        await files(RepositoryStore(tmp_path / "store"), repository, revision)
    assert not (tmp_path / "hurt").exists()


def _tree(line: str) -> bytes:
    mode, _, rest = line.split(" ", 2)
    blob, name = rest.split("\t")
    return f"{mode.lstrip('0')} {name}\0".encode() + bytes.fromhex(blob)


def test_what_was_used_longest_ago_is_evicted_and_nothing_in_use(repository: Path, tmp_path: Path):
    revisions = []
    for _ in range(3):
        (repository / "big").write_bytes(os.urandom(100_000))
        revisions.append(commit(repository))
    store = RepositoryStore(tmp_path / "store", most_bytes=450_000)  # two checkouts with their objects

    def kept():
        return {path.name for path in (tmp_path / "store" / "trees").iterdir() if path.is_dir()}

    async def main():
        async with store.checkout(str(repository), revisions[0]):
            await files(store, repository, revisions[1])
            both = kept()
            await files(store, repository, revisions[2])
            return both, kept()

    both, after = asyncio.run(main())
    assert both == set(revisions[:2])
    assert after == {revisions[0], revisions[2]}
    asyncio.run(files(store, repository, revisions[1]))  # is fetched again
    assert revisions[1] in kept()


def test_interrupted_and_parallel_checkouts_leave_one_whole_tree(repository: Path, tmp_path: Path):
    revision = git(repository, "rev-parse", "HEAD")
    code = (
        "import asyncio, os, sys, pathlib\nfrom forge_rl.sandbox.workspaces.repositories import RepositoryStore\n"
        "store = RepositoryStore(pathlib.Path(sys.argv[1]))\n"
        "if len(sys.argv) > 4: store._link = lambda *_: os._exit(9)\n"
        "async def main():\n"
        "  async with store.checkout(*sys.argv[2:4]) as found: print((found.folder / 'link').read_text())\n"
        "asyncio.run(main())"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "store"), str(repository), revision]
    assert subprocess.run([*command, "die"]).returncode == 9
    assert [path for path in (tmp_path / "store" / "trees").iterdir() if path.name.startswith(".partial-")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=60)[0] for process in both] == ["x = 1\n\n"] * 2
    names = {path.name for path in (tmp_path / "store" / "trees").iterdir()}
    assert names == {revision, f"{revision}.json", f"{revision}.lock"}
