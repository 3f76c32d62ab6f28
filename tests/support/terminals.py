"""Programs in a terminal of a given width, and what a person sees there."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios


def run_in_terminal(code: str, width: int, *arguments: object) -> str:
    """All that a Python program writes to a terminal."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    command = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    written = b""
    try:
        while piece := os.read(master, 65536):
            written += piece
    except OSError:  # how Linux tells that the program has ended
        pass
    os.close(master)
    process.wait()
    return written.decode()


def screens(written: str, width: int) -> list[list[str]]:
    """The lines on the screen after each piece of text; they wrap at the width.

    A second reading of the control characters: line feed, carriage return, erase to the end.
    """
    lines, column, shown, rest = [""], 0, [], written
    while rest:
        if rest.startswith("\x1b[K"):
            lines[-1], rest = lines[-1][:column], rest[3:]
            continue
        character, rest = rest[0], rest[1:]
        assert character != "\x1b", "an escape sequence that this terminal does not know"
        if character == "\n":
            lines.append(" " * column)
        elif character == "\r":
            column = 0
        else:
            if column == width:
                lines.append("")
                column = 0
            lines[-1] = lines[-1][:column].ljust(column) + character + lines[-1][column + 1 :]
            column += 1
        if not rest or rest[0] in "\r\n":
            shown.append([line.rstrip() for line in lines])
    return [*shown, [line.rstrip() for line in lines]]
