"""Files are written atomically; devices, pipes and links are not replaced."""

import os
import stat
import subprocess
import sys
import threading

import pytest

from regard.errors import RegardError
from regard.files import write_atomically, write_output

posix_only = pytest.mark.skipif(os.name != "posix", reason="devices, pipes and modes are POSIX")


def test_file_and_its_folders_are_created(tmp_path):
    path = tmp_path / "a" / "b" / "out.json"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert [one.name for one in path.parent.iterdir()] == ["out.json"]


@posix_only
def test_target_of_a_symbolic_link_is_replaced(tmp_path):
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    target.parent.mkdir()
    link.symlink_to("folder/target")
    for content in (b"new", b"replaced"):  # the first time the target does not exist
        write_atomically(link, content)
        assert link.is_symlink()
        assert target.read_bytes() == content
    assert sorted(one.name for one in tmp_path.rglob("*")) == ["folder", "link", "target"]


@posix_only
@pytest.mark.parametrize("mode", [0o600, 0o644, 0o755])
def test_replaced_file_keeps_its_mode(tmp_path, mode):
    path = tmp_path / "out"
    path.write_bytes(b"old")
    path.chmod(mode)
    write_atomically(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert path.read_bytes() == b"new"


@posix_only
def test_leftover_part_file_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / "out.part").symlink_to("precious")
    write_atomically(tmp_path / "out", b"new")
    assert (tmp_path / "precious").read_bytes() == b"precious"
    assert (tmp_path / "out").read_bytes() == b"new"


@posix_only
def test_named_pipe_is_written_directly(tmp_path):
    pipe, received = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
    reader.start()
    write_atomically(pipe, b"through the pipe")
    reader.join(10)
    assert received == [b"through the pipe"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.skipif(sys.platform != "linux", reason="needs the Linux device that is always full")
def test_full_device_is_an_error_and_is_not_replaced(tmp_path):
    device = tmp_path / "full"  # a copy of /dev/full, which a failing test might destroy
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 7))
        open(device, "wb").close()
    except PermissionError:
        pytest.skip("creating device nodes is not permitted")
    with pytest.raises(RegardError, match=r"full: no space left on the device"):
        write_atomically(device, b"content")
    assert stat.S_ISCHR(device.stat().st_mode)
    assert [one.name for one in tmp_path.iterdir()] == ["full"]


def test_directory_is_an_error(tmp_path):
    with pytest.raises(RegardError, match=r"is a directory\. Name a file\.$"):
        write_atomically(tmp_path, b"content")
    assert not list(tmp_path.iterdir())


def test_dash_is_standard_output(tmp_path, monkeypatch, capsysbinary):
    monkeypatch.chdir(tmp_path)
    write_output(tmp_path.__class__("-"), b"to stdout\n")
    write_output(tmp_path / "file", b"to a file\n")
    assert capsysbinary.readouterr().out == b"to stdout\n"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/stdout")
def test_file_that_stdout_is_redirected_to_is_not_replaced(tmp_path):
    code = "from pathlib import Path; from regard.files import write_atomically; print('before'); "
    code += "write_atomically(Path('/dev/stdout'), b'content\\n'); print('after')"
    with open(tmp_path / "out", "wb") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "before\ncontent\nafter\n"
