"""Records that are written beside the run."""

import threading

import pytest

from roll_lite.report import records
from roll_lite.report.records import Writer


def test_files_are_written_in_order_while_the_caller_goes_on(tmp_path):
    writer, may_go_on, path = Writer(), threading.Event(), tmp_path / "a"

    def slow():
        yield "1\n"
        may_go_on.wait()
        yield "2\n"

    writer.append(path, slow())
    writer.append(path, ["3\n"])
    may_go_on.set()
    writer.flush()
    assert path.read_text() == "1\n2\n3\n"
    writer.write(path, (f"{number}\n" for number in range(1000)))
    writer.close()
    assert path.read_text().split() == [str(number) for number in range(1000)]


def test_an_error_reaches_a_later_call(tmp_path):
    writer = Writer()
    writer.append(tmp_path / "no" / "such" / "folder", ["1\n"])
    with pytest.raises(FileNotFoundError):
        writer.flush()
    writer.append(tmp_path / "no" / "such" / "folder", ["1\n"])
    with pytest.raises(FileNotFoundError):
        for _ in range(records.MAX_PENDING + 1):  # no flush is needed
            writer.append(tmp_path / "a", ["1\n"])
    writer.close()


def test_what_waits_to_be_written_is_bounded(tmp_path):
    writer, may_go_on = Writer(), threading.Event()

    def slow():
        may_go_on.wait()
        yield "\n"

    writer.append(tmp_path / "a", slow())
    for _ in range(records.MAX_PENDING - 1):
        writer.append(tmp_path / "a", ["\n"])
    one_more = threading.Thread(target=writer.append, args=(tmp_path / "a", ["\n"]))
    one_more.start()
    one_more.join(0.05)
    assert one_more.is_alive()  # it waits, however slow the machine
    may_go_on.set()
    one_more.join()
    writer.close()
    assert (tmp_path / "a").read_text() == "\n" * (records.MAX_PENDING + 1)
