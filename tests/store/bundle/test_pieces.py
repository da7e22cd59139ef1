"""Cutting into pieces and joining: every byte in exactly one piece, damage and gaps named, in any order."""

from __future__ import annotations

import filecmp
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import BundleError
from server.store.bundle import pieces
from server.store.bundle.bag import STATE, files_below
from server.store.bundle.install import verify
from server.store.bundle.pieces import Joined, join, plan, report, split
from tests.store.bundle.bundles import small_bundle


def say(line: str) -> None:
    assert line


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A bundle and its pieces, small enough that files are cut."""
    place = tmp_path_factory.mktemp("cut")
    bundle = small_bundle(place / "bundle")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_OVERHEAD_BYTES", 0)
        made = split(bundle, place / "pieces", 20_000, say=say)
    assert len(made) > 3
    return bundle, made


def same(one: Path, other: Path) -> bool:
    paths = list(files_below(one))
    return paths == [path for path in files_below(other) if path != STATE] and not any(
        filecmp.cmpfiles(one, other, paths, shallow=False)[1:]
    )


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 40))
def test_every_byte_is_in_exactly_one_piece_and_no_piece_is_too_large(sizes: list[int], n_bytes: int) -> None:
    planned = plan([(f"f{i}", size) for i, size in enumerate(sizes)], n_bytes)
    assert all(sum(each.n_bytes for each in piece) <= n_bytes for piece in planned)
    assert all(sum(each.n_bytes for each in piece) == n_bytes for piece in planned[:-1])  # no disk is left half empty
    ranges: dict[str, list[tuple[int, int]]] = {}
    for piece in planned:
        for each in piece:
            ranges.setdefault(each.path, []).append((each.offset, each.offset + each.n_bytes))
    for i, size in enumerate(sizes):
        ends = [0, *(end for _, end in ranges[f"f{i}"])]
        assert [start for start, _ in ranges[f"f{i}"]] == ends[:-1]
        assert ends[-1] == size


def test_pieces_in_any_order_on_different_days_make_the_bundle_again(
    cut: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    bundle, made = cut
    to, joined = tmp_path / "joined", Joined((), 0, ())
    for n, piece in enumerate(reversed(made), 1):
        joined = join([piece], to, say=say)
        assert joined.missing == tuple(range(1, len(made) - n + 1))
    assert same(bundle, to)
    assert verify(to).faults == []
    assert report(joined, to)[-1].startswith(f"all {len(made)} pieces are in")


def test_what_is_missing_is_named(cut: tuple[Path, list[Path]], tmp_path: Path) -> None:
    _, made = cut
    joined = join([made[0], *made[2:]], tmp_path / "joined", say=say)
    assert joined == Joined((2,), len(made), ())
    assert f"still missing: piece 2 of {len(made)}" in report(joined, tmp_path / "joined")[-1]


@pytest.mark.parametrize("spoil", [lambda path: path.write_bytes(b"x" + path.read_bytes()[1:]), Path.unlink])
def test_a_damaged_piece_is_named_and_may_be_copied_again(
    cut: tuple[Path, list[Path]], tmp_path: Path, spoil: object
) -> None:
    bundle, made = cut
    here = [Path(shutil.copytree(piece, tmp_path / piece.name)) for piece in made]
    spoil(here[1] / "slices" / "0001")  # type: ignore[operator]
    joined = join([tmp_path], tmp_path / "to" / "joined", say=say)
    assert joined.missing == (2,)
    assert "piece 2" in joined.faults[0]
    assert f"copy '{here[1]}' again" in joined.faults[0]
    shutil.rmtree(here[1])
    shutil.copytree(made[1], here[1])
    assert join([here[1]], tmp_path / "to" / "joined", say=say).missing == ()
    assert same(bundle, tmp_path / "to" / "joined")


def test_a_damaged_list_of_a_piece_is_refused(cut: tuple[Path, list[Path]], tmp_path: Path) -> None:
    piece = Path(shutil.copytree(cut[1][0], tmp_path / "piece"))
    record = piece / "piece.json"
    record.write_bytes(record.read_bytes().replace(b"offset", b"0ffset", 1))
    with pytest.raises(BundleError, match="its checksum differs"):
        join([piece], tmp_path / "joined", say=say)


def test_join_py_needs_nothing_but_the_standard_library(cut: tuple[Path, list[Path]], tmp_path: Path) -> None:
    bundle, made = cut
    to = tmp_path / "joined"
    command = [sys.executable, "-I", "-S", str(made[0] / "join.py"), "--to", str(to)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (BundleError.exit_code, "")
    assert "still missing: pieces 2, 3" in done.stdout
    done = subprocess.run([*command, str(made[0].parent)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert same(bundle, to)


def test_one_piece_at_a_time_for_one_disk_at_a_time(
    cut: tuple[Path, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, made = cut
    monkeypatch.setattr(pieces, "_OVERHEAD_BYTES", 0)
    (piece,) = split(bundle, tmp_path, 20_000, say=say, only=2)
    assert same(made[1], piece)
    with pytest.raises(BundleError, match=f"numbered from 1 to {len(made)}"):
        split(bundle, tmp_path / "x", 20_000, say=say, only=99)


def test_mistakes_are_refused_with_the_way_out(cut: tuple[Path, list[Path]], tmp_path: Path) -> None:
    bundle, made = cut
    with pytest.raises(BundleError, match="too small"):
        split(bundle, tmp_path, 1000, say=say)
    with pytest.raises(BundleError, match="no finished bundle"):
        split(tmp_path, tmp_path / "x", 10**9, say=say)
    with pytest.raises(BundleError, match=r"no piece\.json"):
        join([tmp_path], tmp_path / "x", say=say)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(BundleError, match="holds other things"):
        join([made[0]], tmp_path / "full", say=say)
    with pytest.raises(BundleError, match="is this bundle already"):
        join([made[0]], bundle, say=say)
