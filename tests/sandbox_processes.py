"""Which processes belong to the sandboxes of these sources."""

from pathlib import Path

SOURCES = str(Path(__file__).parent.parent / "src")


def sandbox_processes() -> set[int]:
    """Zygotes of these sources and all that was forked from them: they share a command line."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if b"roll_lite.sandbox.zygote" in command and SOURCES.encode() in command:
            found.add(int(path.parent.name))
    return found
