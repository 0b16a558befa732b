"""Files of any size: order, resuming after a crash at any step, invalid items, errors of the disk, memory."""

import errno
import gzip
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from regard.data.text.compression import InputStream
from regard.errors import Interrupted, RegardError
from regard.pipelines import files, resumable_file
from regard.pipelines.files import (
    MAX_LOSSES,
    BlockOutput,
    FileProgress,
    FileSummary,
    WorkerLost,
    process_blocks,
    process_file,
    process_shards,
)
from regard.pipelines.input_items import InputItems, find_shards

LINES = [f"line {i} " + "é" * (i % 7) for i in range(100)]
SETTINGS = {"task": "test", "beam": 4}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(files, "BLOCK_ITEMS", 8)


@pytest.fixture
def corpus(tmp_path) -> Path:
    path = tmp_path / "corpus.en"
    path.write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    return path


def shout(lines, first_index, on_batch) -> BlockOutput:
    """Upper-case lines with their index; a line with "bad" is invalid."""
    for line in lines:
        check(line, "a line")
    text = "".join(f"{i} {line.upper()}\n" for i, line in enumerate(lines, first_index))
    return BlockOutput(text.encode(), {"lines": len(lines)})


def check(line: str, name: str) -> None:
    if "bad" in line:
        raise RegardError(f"{name} is bad.", "Fix it.")


def expected(lines=LINES) -> str:
    return "".join(f"{i} {line.upper()}\n" for i, line in enumerate(lines))


def run(source: Path, output: Path, processors=(shout,), settings=SETTINGS, **options) -> FileSummary:
    items = InputItems.from_lines(source)
    return process_file(items, output, list(processors), settings=settings, check=check, **options)


def leftovers(output: Path) -> list[str]:
    return sorted(path.name for path in output.parent.glob(f"{output.name}.*"))


def stop_after(count: int) -> Callable:
    """A processor that fails, without a message for users, after some blocks."""
    blocks = itertools.count()

    def process(lines, first_index, on_batch):
        if next(blocks) == count:
            raise ZeroDivisionError
        return shout(lines, first_index, on_batch)

    return process


# Output


def test_output_has_one_line_per_line_in_order(corpus, tmp_path):
    summary = run(corpus, tmp_path / "out.txt")
    assert (tmp_path / "out.txt").read_text("utf-8") == expected()
    assert (summary.items, summary.resumed_items, summary.totals) == (100, 0, {"lines": 100})
    assert leftovers(tmp_path / "out.txt") == []


def test_compressed_files(corpus, tmp_path):
    with gzip.open(tmp_path / "corpus.gz", "wb") as file:
        file.write(corpus.read_bytes())
    for suffix in (".gz", ".bz2", ".xz"):
        output = tmp_path / f"out{suffix}"
        run(tmp_path / "corpus.gz", output)
        assert list(InputItems.from_lines(output)) == expected().splitlines()
        first = output.read_bytes()
        run(tmp_path / "corpus.gz", output, overwrite=True)
        assert output.read_bytes() == first  # no time stamp
    with pytest.raises(RegardError, match=r"out.zst: zstd output is not supported. Use .gz"):
        run(corpus, tmp_path / "out.zst")


def test_slow_workers_keep_the_order(corpus, tmp_path):
    busy, most = [0], [0]
    lock = threading.Lock()

    def slow(lines, first_index, on_batch):
        with lock:
            busy[0] += 1
            most[0] = max(busy[0], most[0])
        time.sleep(0.02 if first_index % 16 else 0.002)
        with lock:
            busy[0] -= 1
        return shout(lines, first_index, on_batch)

    run(corpus, tmp_path / "out.txt", [slow, slow, slow])
    assert (tmp_path / "out.txt").read_text("utf-8") == expected()
    assert most[0] == 3


def test_long_lines_make_small_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK_CHARACTERS", 1000)
    (tmp_path / "long.txt").write_text(("x" * 600 + "\n") * 9)
    sizes = []

    def process(lines, first_index, on_batch):
        sizes.append(len(lines))
        return shout(lines, first_index, on_batch)

    run(tmp_path / "long.txt", tmp_path / "out.txt", [process])
    assert sizes == [2, 2, 2, 2, 1]


def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK_ITEMS", 100)

    def peak(count: int) -> int:
        source = InputItems("numbers", lambda on_open: (f"{i} " * 20 for i in range(count)))
        tracemalloc.start()
        process_file(
            source, tmp_path / f"{count}.txt.gz", [shout, shout], settings=SETTINGS, check=check, overwrite=True
        )
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    peak(200)
    assert peak(6000) < 1.5 * peak(1200)


def test_progress_has_rate_and_time_left(corpus, tmp_path):
    with gzip.open(tmp_path / "corpus.gz", "wb") as file:
        file.write(b"".join(b"%d\n" % (i**9) for i in range(2500)))
    for source in (corpus, tmp_path / "corpus.gz"):
        seen: list[FileProgress] = []
        run(source, tmp_path / "out.txt", progress=seen.append, overwrite=True)
        shares = [one.share for one in seen]
        assert shares == sorted(shares)
        assert shares[-1] == pytest.approx(1)
        assert len(set(shares)) > 1
        assert [one.items for one in seen][:2] == [8, 16]
        assert all(one.items_per_second > 0 for one in seen)
        assert seen[-1].seconds_left == pytest.approx(0, abs=0.01)
    assert str(FileProgress(1000, None, 10.0, None)) == "1,000 lines, 10 lines/s"


def test_progress_inside_a_block(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "REPORT_INTERVAL", 0.01)
    monkeypatch.setattr(files, "BLOCK_ITEMS", 100)
    seen: list[FileProgress] = []

    def halfway(lines, first_index, on_batch):
        on_batch(1, 2)
        time.sleep(0.2)
        return shout(lines, first_index, on_batch)

    run(corpus, tmp_path / "out.txt", [halfway], progress=seen.append)
    assert (seen[0].items, seen[0].share) == (50, pytest.approx(0.5))


# Resuming


@pytest.mark.parametrize("name", ["out.txt", "out.gz"])
def test_resumed_output_is_identical(corpus, tmp_path, name, caplog):
    output, undisturbed = tmp_path / name, tmp_path / f"undisturbed-{name}"
    run(corpus, undisturbed)
    for done in (3, 2, 0):
        with pytest.raises(ZeroDivisionError):
            run(corpus, output, [stop_after(done)])
        assert not output.exists()
        assert leftovers(output) == [f"{name}.partial", f"{name}.partial.json"]
        with open(tmp_path / f"{name}.partial", "ab") as file:
            file.write(b"a part of the next block")
    assert json.loads((tmp_path / f"{name}.partial.json").read_text())["items"] == 40
    summary = run(corpus, output)
    assert output.read_bytes() == undisturbed.read_bytes()
    assert (summary.items, summary.resumed_items, summary.totals) == (100, 40, {"lines": 100})
    assert f"Resuming {output} after 40 lines." in caplog.messages
    assert leftovers(output) == []


@pytest.mark.skipif(os.name != "posix", reason="fork is POSIX")
@pytest.mark.parametrize("name", ["out.txt", "out.gz"])
def test_process_ends_at_any_step(corpus, tmp_path, name):
    """The process is ended before each step that changes the disk, and in the middle of each write."""
    corpus.write_text("".join(f"{line}\n" for line in LINES[:40]), "utf-8")
    output, undisturbed = tmp_path / name, tmp_path / f"undisturbed-{name}"
    run(corpus, undisturbed)
    crashes = 0
    for step in itertools.count():
        output.unlink(missing_ok=True)
        if not _dies_at(step, corpus, output):
            break
        crashes += 1
        if step % 2:
            run(corpus, output)
        else:  # further crashes on the way, each after at least one complete block
            crashes_on_the_way = 0
            while _dies_at(step % 5 + 10, corpus, output):
                crashes_on_the_way += 1
                assert crashes_on_the_way < 20
        assert output.read_bytes() == undisturbed.read_bytes()
        assert leftovers(output) == []
    assert crashes > 20


def _dies_at(step: int, corpus: Path, output: Path) -> bool:
    """Run in a new process that ends at a step; False if there are fewer steps."""
    pid = os.fork()
    if pid == 0:
        try:
            _exit_at_step(step)
            run(corpus, output, overwrite=False)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def _exit_at_step(step: int) -> None:
    left = itertools.count(step, -1)

    def before(function):
        def wrapped(*arguments, **options):
            if next(left) == 0:
                os._exit(9)
            return function(*arguments, **options)

        return wrapped

    def torn_write(self, offset: int, data: bytes) -> None:
        if next(left) == 0:
            write(self, offset, data[: len(data) // 2])
            os._exit(9)
        write(self, offset, data)

    write, resumable_file.ResumableFile._write = resumable_file.ResumableFile._write, torn_write
    os.replace, os.fsync, Path.unlink = before(os.replace), before(os.fsync), before(Path.unlink)


def test_finished_file_after_a_kill_before_the_journal_was_removed(corpus, tmp_path):
    output = tmp_path / "out.txt"
    with pytest.raises(ZeroDivisionError):
        run(corpus, output, [stop_after(12)])
    journal = tmp_path / "out.txt.partial.json"
    with resumable_file.ResumableFile(output, SETTINGS) as file:
        text = expected(LINES)[len(expected(LINES[:96])) :]
        digest = files.hashlib.sha256("".join(f"{line}\n" for line in LINES).encode()).hexdigest()
        file.append(text.encode(), 4, input_sha256=digest, totals={"lines": 4})
        unlink, Path.unlink = Path.unlink, lambda path, missing_ok=False: None
        file.finish()
        Path.unlink = unlink
    assert journal.exists()
    assert run(corpus, output).resumed_items == 100
    assert output.read_text("utf-8") == expected()
    assert not journal.exists()
    # Another input is not taken for the finished one.
    journal.write_text(json.dumps({"complete": True, "items": 100, "bytes": 1, "totals": {}, "input_sha256": digest,
                                   "settings": SETTINGS}))  # fmt: skip
    corpus.write_text("another\n")
    with pytest.raises(RegardError, match=r"out.txt exists"):
        run(corpus, output)
    run(corpus, output, overwrite=True)
    assert output.read_text() == "0 ANOTHER\n"


def test_other_settings_or_input_are_an_error(corpus, tmp_path):
    output = tmp_path / "out.txt"
    with pytest.raises(ZeroDivisionError):
        run(corpus, output, [stop_after(2)])
    partial = (tmp_path / "out.txt.partial").read_bytes()
    message = (
        r"out.txt.partial cannot be resumed: it was written with other settings \(beam was 4, now 5\). Delete .*out"
    )
    with pytest.raises(RegardError, match=message):
        run(corpus, output, settings=SETTINGS | {"beam": 5})
    text = corpus.read_text("utf-8")
    corpus.write_text(text.replace("line 7 ", "line VII "), "utf-8")
    with pytest.raises(RegardError, match=r"written from another input; .*corpus.en differs in the first 16 lines"):
        run(corpus, output)
    corpus.write_text("line 0 \n")
    with pytest.raises(RegardError, match=r"corpus.en has only 1 lines"):
        run(corpus, output)
    assert (tmp_path / "out.txt.partial").read_bytes() == partial
    # Changes after the finished lines do not matter.
    corpus.write_text(text.replace("line 50 ", "line L "), "utf-8")
    assert run(corpus, output).resumed_items == 16
    assert "50 LINE L " in output.read_text("utf-8")


def test_overwrite_starts_again(corpus, tmp_path):
    output = tmp_path / "out.txt"
    for change in ("settings", "input", "same"):
        corpus.write_text("".join(f"{line}\n" for line in LINES), "utf-8")
        with pytest.raises(ZeroDivisionError):
            run(corpus, output, [stop_after(2)], overwrite=True)
        settings = SETTINGS | ({"beam": 5} if change == "settings" else {})
        if change == "input":
            corpus.write_text("another\n")
        summary = run(corpus, output, settings=settings, overwrite=True)
        assert summary.resumed_items == (16 if change == "same" else 0)
        assert output.read_text("utf-8") == ("0 ANOTHER\n" if change == "input" else expected())
        assert leftovers(output) == []


def test_deleted_partial_file_starts_again(corpus, tmp_path):
    output = tmp_path / "out.txt"
    with pytest.raises(ZeroDivisionError):
        run(corpus, output, [stop_after(2)])
    (tmp_path / "out.txt.partial").unlink()
    assert run(corpus, output, settings={"other": 1}).resumed_items == 0


def test_partial_file_without_or_with_a_broken_journal(corpus, tmp_path):
    output, journal = tmp_path / "out.txt", tmp_path / "out.txt.partial.json"
    (tmp_path / "out.txt.partial").write_text("mine")
    with pytest.raises(RegardError, match=r"out.txt.partial cannot be resumed: out.txt.partial.json, which .* missing"):
        run(corpus, output)
    journal.write_text("{}")
    with pytest.raises(RegardError, match="not a journal of an output file"):
        run(corpus, output)
    valid = dict(complete=False, items=0, bytes=0, totals={}, input_sha256="", settings={})
    for name, value in (("items", "1"), ("bytes", -1), ("totals", {"a": "b"}), ("settings", []), ("complete", 1)):
        journal.write_text(json.dumps(valid | {name: value}))
        with pytest.raises(RegardError, match=rf"out.txt.partial.json: invalid {name} \("):
            run(corpus, output)
    assert (tmp_path / "out.txt.partial").read_text() == "mine"
    journal.unlink()
    run(corpus, output, overwrite=True)
    assert output.read_text("utf-8") == expected()


def test_shortened_partial_file(corpus, tmp_path):
    with pytest.raises(ZeroDivisionError):
        run(corpus, tmp_path / "out.txt", [stop_after(2)])
    (tmp_path / "out.txt.partial").write_text("short")
    with pytest.raises(RegardError, match=r"it has 5 bytes, but out.txt.partial.json records"):
        run(corpus, tmp_path / "out.txt")


@pytest.mark.skipif(os.name != "posix", reason="locks are POSIX")
def test_second_process_is_refused(corpus, tmp_path):
    reader, writer = os.pipe()
    with resumable_file.ResumableFile(tmp_path / "out.txt", SETTINGS):
        if os.fork() == 0:
            try:
                run(corpus, tmp_path / "out.txt")
            except RegardError as error:
                os.write(writer, str(error).encode())
            finally:
                os._exit(0)
        os.wait()
        assert b"out.txt.partial is in use by another process" in os.read(reader, 1000)
    os.close(reader)
    os.close(writer)


@pytest.mark.skipif(os.name != "posix", reason="locks are POSIX")
def test_lock_is_not_inherited_by_forked_workers(corpus, tmp_path):
    reader, writer = os.pipe()
    with resumable_file.ResumableFile(tmp_path / "out.txt", SETTINGS) as file:
        file.append(b"", 0)
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)  # until the parent closes the pipe
            os._exit(0)
    run(corpus, tmp_path / "out.txt")
    os.close(reader)
    os.close(writer)
    os.waitpid(child, 0)


def test_interrupt_keeps_the_finished_lines(corpus, tmp_path):
    def interrupt(progress: FileProgress) -> None:
        if progress.items == 24:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match=r"Interrupted; 24 lines are complete. The same command resumes"):
        run(corpus, tmp_path / "out.txt", progress=interrupt)
    run(corpus, tmp_path / "out.txt")
    assert (tmp_path / "out.txt").read_text("utf-8") == expected()


# Invalid input


def test_invalid_line_keeps_the_lines_before_it(corpus, tmp_path):
    output = tmp_path / "out.txt"
    lines = [*LINES[:21], "a bad line", *LINES[22:]]
    corpus.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    message = "line 22 is bad. Fix it. The 21 lines before it are kept: after the fix, the same command resumes there."
    for _ in range(2):  # the same error again, at the same line
        with pytest.raises(RegardError, match=message):
            run(corpus, output, [shout, shout])
        assert (tmp_path / "out.txt.partial").read_text("utf-8") == expected(lines[:21])
    corpus.write_text("".join(f"{line}\n" for line in LINES), "utf-8")
    assert run(corpus, output).resumed_items == 21
    assert output.read_text("utf-8") == expected()


def test_invalid_first_line_leaves_no_file(corpus, tmp_path):
    corpus.write_text("bad\n")
    with pytest.raises(RegardError, match=r"corpus.en, line 1 is bad. Fix it.$"):
        run(corpus, tmp_path / "out.txt")
    assert leftovers(tmp_path / "out.txt") == []


def test_line_that_is_not_utf8(corpus, tmp_path):
    corpus.write_bytes(corpus.read_bytes() + b"caf\xe9\n")
    message = r"corpus.en, line 101: not UTF-8. Convert it: .* The 100 lines before it are kept"
    with pytest.raises(RegardError, match=message):
        run(corpus, tmp_path / "out.txt")
    corpus.write_bytes(corpus.read_bytes().replace(b"\xe9", "é".encode()))
    assert run(corpus, tmp_path / "out.txt").resumed_items == 100
    assert (tmp_path / "out.txt").read_text("utf-8") == expected([*LINES, "café"])


def test_truncated_gzip_input(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK_ITEMS", 64)  # each block is written to the disk, which takes time
    data = gzip.compress(b"".join(f"{hash(str(i))} {i}\n".encode() for i in range(5000)))
    source, output = tmp_path / "corpus.gz", tmp_path / "out.txt"
    source.write_bytes(data[: len(data) // 2])
    with pytest.raises(RegardError, match=r"corpus.gz: corrupt compressed data after line .* the same command resumes"):
        run(source, output)
    source.write_bytes(data)
    assert run(source, output).resumed_items > 100
    assert output.read_text("utf-8") == expected(gzip.decompress(data).decode().splitlines())


def test_empty_or_missing_input(tmp_path):
    (tmp_path / "empty").write_text("")
    with pytest.raises(RegardError, match="empty is empty"):
        run(tmp_path / "empty", tmp_path / "out.txt")
    with pytest.raises(RegardError, match="There is no file"):
        run(tmp_path / "none", tmp_path / "out.txt")
    assert leftovers(tmp_path / "out.txt") == []


def test_output_that_cannot_be_written(corpus, tmp_path):
    output = tmp_path / "out.txt"
    output.write_text("keep me")
    with pytest.raises(RegardError, match=r"out.txt exists. Name another output, or use --overwrite"):
        run(corpus, output)
    assert output.read_text() == "keep me"
    with pytest.raises(RegardError, match=r"there is no folder .*none. Create it first"):
        run(corpus, tmp_path / "none" / "out.txt")
    with pytest.raises(RegardError, match=r"is a directory. Name a file"):
        run(corpus, tmp_path)
    (tmp_path / "link").symlink_to(corpus)
    for name in ("corpus.en", "link"):
        with pytest.raises(RegardError, match="the input and the output are the same file"):
            run(corpus, tmp_path / name, overwrite=True)
    assert leftovers(output) == []


def test_output_behind_a_symbolic_link(corpus, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "out.txt").symlink_to(tmp_path / "other" / "real.txt")
    run(corpus, tmp_path / "out.txt")
    assert (tmp_path / "out.txt").is_symlink()
    assert (tmp_path / "other" / "real.txt").read_text("utf-8") == expected()


# The disk


def test_full_disk(corpus, tmp_path, monkeypatch):
    output, fsync, calls = tmp_path / "out.txt", os.fsync, itertools.count()

    def full(descriptor: int) -> None:
        if next(calls) >= 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RegardError, match=r"no space left on the device.*run the same command again: it resumes"):
        run(corpus, output)
    assert not output.exists()
    monkeypatch.setattr(os, "fsync", fsync)
    assert run(corpus, output).resumed_items > 0
    assert output.read_text("utf-8") == expected()


@pytest.mark.skipif(os.name != "posix", reason="limits are POSIX")
def test_file_size_limit(corpus, tmp_path):
    """A write that fails half-way, as on a full disk."""
    script = (
        "import resource, sys; from pathlib import Path; import tests.pipelines.test_files as t\n"
        "t.files.BLOCK_ITEMS = 8; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: t.run(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "except t.RegardError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(corpus), str(tmp_path / "out.txt")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "out.txt.partial: cannot be written: File too large" in done.stdout
    assert "Traceback" not in done.stderr
    assert run(corpus, tmp_path / "out.txt").resumed_items > 0
    assert (tmp_path / "out.txt").read_text("utf-8") == expected()


# Threads


def test_blocks_are_read_only_a_little_ahead():
    read = []

    def blocks():
        for i in itertools.count():
            read.append(i)
            yield i

    results = process_blocks(blocks(), [lambda block, on_batch: block] * 2, lambda pending: None)
    assert list(itertools.islice(results, 5)) == [(i, i) for i in range(5)]
    assert len(read) <= 8
    results.close()


def test_error_stops_the_workers(monkeypatch):
    started = threading.Event()

    def work(block, on_batch):
        if block == 1:
            started.set()
            while True:  # ends because on_batch raises
                on_batch(1, 2)
                time.sleep(0.001)
        started.wait()
        raise ValueError("broken")

    before = threading.active_count()
    with pytest.raises(ValueError, match="broken"):
        list(process_blocks(iter([0, 1]), [work, work], lambda pending: None))
    assert threading.active_count() == before


def test_position_of_a_stream(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"".join(b"%d\n" % (i * i) for i in range(50_000))))
    for file in (path, tmp_path / "plain"):
        if not file.exists():
            file.write_bytes(gzip.decompress(path.read_bytes()))
        with open(file, "rb") as opened:
            stream = InputStream(opened, "a")
            stream.readline(100)
            assert stream.position < file.stat().st_size / 2
            while stream.readline(100):
                pass
            assert stream.position == file.stat().st_size


# Several files


@pytest.fixture
def shards(tmp_path) -> list[Path]:
    """Files of different sizes, one of them empty."""
    sizes, paths = (3, 20, 0, 8, 69), []
    for i, size in enumerate(sizes):
        first = sum(sizes[:i])
        paths.append(tmp_path / f"part-{i}.txt")
        paths[-1].write_text("".join(f"{line}\n" for line in LINES[first : first + size]), "utf-8")
    return paths


def run_shards(tmp_path: Path, processors=(shout,), settings=SETTINGS, **options) -> FileSummary:
    found = find_shards(tmp_path / "part-*.txt", tmp_path / "out")
    return process_shards(found, list(processors), settings=settings, check=check, **options)


def check_outputs(tmp_path: Path, shards: list[Path]) -> None:
    for shard in shards:
        assert (tmp_path / "out" / shard.name).read_text("utf-8") == expected(shard.read_text("utf-8").splitlines())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {shard.name for shard in shards}


def test_one_output_per_input(shards, tmp_path):
    seen: list[FileProgress] = []
    summary = run_shards(tmp_path, [shout, shout], progress=seen.append)
    check_outputs(tmp_path, shards)
    assert (summary.items, summary.resumed_items, summary.totals) == (100, 0, {"lines": 100})
    assert seen[-1].items == 100
    assert seen[-1].share == pytest.approx(1)
    with pytest.raises(RegardError, match=r"part-0.txt exists"):
        run_shards(tmp_path)


def test_small_files_are_processed_in_parallel(tmp_path):
    for i in range(4):
        (tmp_path / f"part-{i}.txt").write_text("one line\n")
    barrier = threading.Barrier(4)

    def meet(lines, first_index, on_batch):
        barrier.wait()
        return shout(lines, first_index, on_batch)

    run_shards(tmp_path, [meet] * 4)


@pytest.mark.parametrize("overwrite", [False, True])
def test_resumed_shards(shards, tmp_path, caplog, overwrite):
    done = 0
    for blocks in (2, 3, 0):
        with pytest.raises(ZeroDivisionError):
            run_shards(tmp_path, [stop_after(blocks)], overwrite=overwrite)
        done += blocks
        with pytest.raises(RegardError, match=r"exists|other settings"):
            run_shards(tmp_path, settings={"task": "test", "beam": 5})
    summary = run_shards(tmp_path, overwrite=overwrite)
    check_outputs(tmp_path, shards)
    assert summary.resumed_items == 3 + 20 + 8  # five blocks
    assert (summary.items, summary.totals) == (100, {"lines": 100})


def test_changed_input_of_a_finished_shard(shards, tmp_path):
    text = shards[1].read_text("utf-8")
    for change in ("another\n", text + "another\n", text.replace("line 4 ", "line IV ")):
        with pytest.raises(ZeroDivisionError):
            run_shards(tmp_path, [stop_after(6)], overwrite=True)
        shards[1].write_text(change, "utf-8")
        with pytest.raises(RegardError, match=r"part-1.txt exists"):
            run_shards(tmp_path)
        run_shards(tmp_path, overwrite=True)
        check_outputs(tmp_path, shards)


def test_invalid_line_of_a_shard(shards, tmp_path):
    shards[3].write_text("bad\n")
    with pytest.raises(RegardError, match=r"part-3.txt, line 1 is bad. Fix it. The 23 lines before it are kept"):
        run_shards(tmp_path)
    shards[3].write_text("good\n")
    assert run_shards(tmp_path).resumed_items == 23
    check_outputs(tmp_path, shards)


def test_patterns_without_files_or_folder(shards, tmp_path):
    with pytest.raises(RegardError, match=r"No file matches .*none-\*. Check the pattern"):
        find_shards(tmp_path / "none-*", tmp_path / "out")
    with pytest.raises(RegardError, match=r"part-0.txt is a file; the outputs for .* need a folder"):
        find_shards(tmp_path / "part-*", shards[0])
    with pytest.raises(RegardError, match=r"there is no folder .*missing. Create it first"):
        find_shards(tmp_path / "part-*", tmp_path / "missing" / "out")
    (tmp_path / "part-0.txt.gz").touch()
    with pytest.raises(RegardError, match=r"two inputs would be written to .*part-0.npy"):
        find_shards(tmp_path / "part-*", tmp_path / "out", ".npy")
    (tmp_path / "part-*.txt").write_text("a file, not a pattern\n")
    assert len(find_shards(tmp_path / "part-*.txt", tmp_path / "out.txt")) == 1


# Lost workers


class Fragile:
    """A worker that is lost with some blocks, and is ready again after a while."""

    def __init__(self, lost: list[int]) -> None:
        self.lost, self.is_ready, self.starts = lost, False, 0

    def wait_until_ready(self, is_stopped) -> None:
        self.starts, self.is_ready = self.starts + 1, True

    def __call__(self, block: int, on_batch) -> int:
        assert self.is_ready
        if block in self.lost:
            self.lost.remove(block)
            self.is_ready = False
            raise WorkerLost("killed")
        return 10 * block


def test_block_of_a_lost_worker_is_processed_again():
    workers = [Fragile([2, 5, 5]), Fragile([])]
    results = list(process_blocks(iter(range(20)), workers, lambda blocks: None))
    assert results == [(i, 10 * i) for i in range(20)]
    alone = Fragile([0, 3, 3])
    assert list(process_blocks(iter(range(5)), [alone], lambda blocks: None)) == [(i, 10 * i) for i in range(5)]
    assert alone.starts == 4


def test_worker_that_does_not_come_back_holds_no_block():
    class Gone(Fragile):
        def wait_until_ready(self, is_stopped) -> None:
            super().wait_until_ready(is_stopped)
            while self.starts > 1 and not is_stopped():
                time.sleep(0.01)

    gone = Gone([0])
    results = list(process_blocks(iter(range(20)), [gone, Fragile([])], lambda blocks: None))
    assert [block for block, _ in results] == list(range(20))


def test_block_that_ends_every_worker_is_an_error():
    with pytest.raises(RegardError, match=f"{MAX_LOSSES} workers were lost, .* the same block: killed"):
        list(process_blocks(iter(range(3)), [Fragile([1] * MAX_LOSSES)], lambda blocks: None))


def test_worker_that_cannot_start_is_an_error():
    class Broken(Fragile):
        def wait_until_ready(self, is_stopped) -> None:
            raise RegardError("no memory")

    with pytest.raises(RegardError, match="no memory"):
        list(process_blocks(iter(range(3)), [Broken([])], lambda blocks: None))
