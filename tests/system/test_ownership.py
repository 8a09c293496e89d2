"""Files are trusted only if no other user could have put them there."""

import os
import stat
from pathlib import Path

import pytest

from ksopt.system import ownership

ME, OTHER = 1000, 1001
DIR, LINK, FILE = stat.S_IFDIR, stat.S_IFLNK, stat.S_IFREG

as_root = pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0, reason="only root can give a file to another user"
)


class Tree:
    """A file system: path -> (kind and mode, owner, group) or the same and a link's target."""

    def __init__(self, **unused: object) -> None:
        self.entries: dict[str, tuple[int, int, int, str]] = {}

    def add(self, path: str, mode: int, owner: int, group: int = 0, target: str = "") -> None:
        self.entries[path] = (mode, owner, group, target)

    def lstat(self, path: Path) -> os.stat_result:
        if str(path) not in self.entries:
            raise FileNotFoundError(path)
        mode, owner, group, _ = self.entries[str(path)]
        return os.stat_result((mode, 1, 1, 1, owner, group, 0, 0, 0, 0))

    def readlink(self, path: Path) -> str:
        return self.entries[str(path)][3]

    def objection(self, path: str, own: str, user: int = ME) -> str | None:
        try:
            ownership.check(
                Path(path), Path(own), lstat=self.lstat, readlink=self.readlink, user=user
            )
        except ownership.Distrusted as error:
            return str(error)
        return None


@pytest.fixture
def tree() -> Tree:
    """A cache that is fine: a sticky /tmp, and all below it the user's own."""
    tree = Tree()
    tree.add("/tmp", DIR | 0o1777, 0)
    tree.add("/tmp/cache", DIR | 0o700, ME, ME)
    tree.add("/tmp/cache/1.0", DIR | 0o755, ME, ME)
    tree.add("/tmp/cache/1.0/lib.so", FILE | 0o644, ME, ME)
    return tree


ARTIFACT, CACHE = "/tmp/cache/1.0/lib.so", "/tmp/cache"


def test_what_only_we_could_write_is_believed(tree: Tree) -> None:
    assert tree.objection(ARTIFACT, CACHE) is None


@pytest.mark.parametrize("place", ["/tmp", "/tmp/cache", "/tmp/cache/1.0", ARTIFACT])
def test_everything_on_the_way_must_be_ours_or_roots(tree: Tree, place: str) -> None:
    mode, _, group, _ = tree.entries[place]
    tree.add(place, mode, OTHER, group)
    assert tree.objection(ARTIFACT, CACHE) == f"{place} belongs to another user"
    tree.add(place, mode, 0, group)
    assert tree.objection(ARTIFACT, CACHE) is None


@pytest.mark.parametrize("bits", [0o777, 0o775, 0o1777, 0o722])
@pytest.mark.parametrize("place", ["/tmp/cache", "/tmp/cache/1.0", ARTIFACT])
def test_nothing_of_the_cache_may_be_open_to_others(tree: Tree, place: str, bits: int) -> None:
    kind = stat.S_IFMT(tree.entries[place][0])
    tree.add(place, kind | bits, ME, 4711)  # no group of that number
    assert tree.objection(ARTIFACT, CACHE) == f"{place} is writable by other users"


@pytest.mark.parametrize("owner", [0, ME])
def test_a_folder_above_that_others_may_write_must_be_sticky(tree: Tree, owner: int) -> None:
    tree.add("/tmp", DIR | 0o777, owner)
    assert tree.objection(ARTIFACT, CACHE) == "/tmp is writable by other users"


def test_links_of_others_are_not_followed(tree: Tree) -> None:
    tree.add("/tmp/link", LINK | 0o777, OTHER, 0, "/tmp/cache")
    assert (
        tree.objection("/tmp/link/1.0/lib.so", "/tmp/link") == "/tmp/link belongs to another user"
    )


def test_links_of_ours_lead_to_what_is_looked_at_too(tree: Tree) -> None:
    tree.add("/tmp/link", LINK | 0o777, ME, 0, "cache/../cache")
    assert tree.objection("/tmp/link/1.0/lib.so", "/tmp/link") is None
    tree.add("/tmp/theirs", DIR | 0o755, OTHER)
    tree.add("/tmp/link", LINK | 0o777, ME, 0, "/tmp/theirs")
    expected = "/tmp/theirs belongs to another user"
    assert tree.objection("/tmp/link/1.0/lib.so", "/tmp/link") == expected


def test_a_link_to_a_sticky_folder_does_not_make_it_ours(tree: Tree) -> None:
    tree.add("/home", DIR | 0o755, 0)
    tree.add("/home/link", LINK | 0o777, ME, 0, "/tmp")
    assert tree.objection("/home/link/1.0", "/home/link") == "/tmp is writable by other users"


def test_links_in_a_circle_end(tree: Tree) -> None:
    tree.add("/tmp/a", LINK | 0o777, ME, 0, "b")
    tree.add("/tmp/b", LINK | 0o777, ME, 0, "a")
    with pytest.raises(OSError, match="symbolic links"):
        tree.objection("/tmp/a/x", "/tmp/a")


def test_root_trusts_root_alone(tree: Tree) -> None:
    assert tree.objection(ARTIFACT, CACHE, user=0) == "/tmp/cache belongs to another user"


def test_what_is_not_there_is_passed_over(tree: Tree) -> None:
    assert tree.objection("/tmp/new/1.0/lib.so", "/tmp/new") is None


def test_a_group_of_ones_own_may_write() -> None:
    grp, pwd = pytest.importorskip("grp"), pytest.importorskip("pwd")
    for entry in pwd.getpwall():
        try:
            group = grp.getgrgid(entry.pw_gid)
        except KeyError:
            continue
        expected = entry.pw_gid == 0 or (
            group.gr_name == entry.pw_name and set(group.gr_mem) <= {entry.pw_name}
        )
        assert ownership._is_private_group(entry.pw_gid, entry.pw_uid) == expected
    assert not ownership._is_private_group(4711_000, 0)


def test_folders_are_created_private_at_every_level(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        ownership.make_folder(tmp_path / "a" / "cache" / "1.0" / "x", tmp_path / "a" / "cache")
    finally:
        os.umask(before)
    for part in ("a", "a/cache", "a/cache/1.0", "a/cache/1.0/x"):
        assert stat.S_IMODE((tmp_path / part).stat().st_mode) == 0o700


def test_what_is_read_is_a_file_and_no_link(tmp_path: Path) -> None:
    own = tmp_path / "cache"
    ownership.make_folder(own, own)
    (own / "file").write_bytes(b"text")
    (own / "link").symlink_to(own / "file")
    os.mkfifo(own / "fifo")
    assert ownership.read_bytes(own / "file", own) == b"text"
    for name in ("link", "fifo", "nothing"):
        with pytest.raises(OSError, match=r"(?i)symbolic|regular|no such"):
            ownership.read_bytes(own / name, own)


@as_root
def test_a_file_of_another_user_is_not_read(tmp_path: Path) -> None:
    own = tmp_path / "cache"
    ownership.make_folder(own, own)
    (own / "file").write_bytes(b"planted")
    os.chown(own / "file", 54321, -1)
    with pytest.raises(ownership.Distrusted, match="belongs to another user"):
        ownership.read_bytes(own / "file", own)


@as_root
def test_nothing_is_created_in_a_folder_of_another_user(tmp_path: Path) -> None:
    own = tmp_path / "theirs" / "cache"
    own.parent.mkdir()
    os.chown(own.parent, 54321, -1)
    with pytest.raises(ownership.Distrusted, match="theirs belongs to another user"):
        ownership.make_folder(own / "1.0", own)
    assert not own.exists()


def test_temporary_files_are_not_put_into_others_hands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with ownership.temporary_folder("x-") as name:
        assert Path(name).parent == tmp_path
    tmp_path.chmod(0o777)  # everybody may replace its files
    refused = pytest.raises(ownership.Distrusted, match="writable by other users")
    with refused, ownership.temporary_folder("x-"):
        pass
    assert not list(tmp_path.iterdir())
