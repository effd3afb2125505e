"""What Esper creates itself does not go through links, and looking whether it can be created leaves nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from esper.cli.options import claim, claim_file, results_folder
from esper.files import write_whole


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file somewhere else, which nobody asked Esper to write."""
    path = tmp_path / "precious"
    path.write_text("precious")
    return path


def test_a_folder_is_claimed_without_a_test_file(tmp_path: Path, precious: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / ".write-test").symlink_to(precious)
    claim(out)
    with results_folder(out, tmp_path / "usual"):
        pass
    assert precious.read_text() == "precious"
    assert [path.name for path in out.iterdir()] == [".write-test"]


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="choose another folder with --out"):
        claim(tmp_path / "file")
    if os.geteuid() != 0:
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(OSError, match="choose another folder with --out"):
            claim(tmp_path / "locked")


@pytest.mark.parametrize("new", [True, False])
def test_a_file_is_claimed_without_writing_through_links(tmp_path: Path, precious: Path, new: bool) -> None:
    link, dangling = tmp_path / "link", tmp_path / "dangling"
    link.symlink_to(precious)
    dangling.symlink_to(tmp_path / "created")
    for path in (link, dangling):
        if new:
            with pytest.raises(ValueError, match="exists already"):
                claim_file(path, "--out", new=True)
        else:
            claim_file(path, "--json")
    assert precious.read_text() == "precious"
    assert not (tmp_path / "created").exists()
    claim_file(tmp_path / "fresh", "--out", new=new)
    assert not (tmp_path / "fresh").exists()


def test_claiming_a_pipe_does_not_wait_for_a_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    claim_file(tmp_path / "pipe", "--json")
    with pytest.raises(OSError, match="choose another file with --json"):
        claim_file(tmp_path, "--json")


def test_a_link_at_the_target_is_replaced_and_not_followed(tmp_path: Path, precious: Path) -> None:
    (tmp_path / "target").symlink_to(precious)
    write_whole(tmp_path / "target", "new")
    assert precious.read_text() == "precious"
    assert not (tmp_path / "target").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


@pytest.mark.parametrize("kind", ["link", "dangling", "file"])
def test_what_lies_at_the_temporary_name_is_not_written_to(tmp_path: Path, precious: Path, kind: str) -> None:
    temporary = tmp_path / f".target.{os.getpid()}.tmp"
    if kind == "file":  # of a process that was killed and had the same number
        temporary.write_text("half of someth")
    else:
        temporary.symlink_to(precious if kind == "link" else tmp_path / "created")
    write_whole(tmp_path / "target", b"new")
    assert (tmp_path / "target").read_bytes() == b"new"
    assert precious.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", "target"]
