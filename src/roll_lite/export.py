"""Export a checkpoint of a run as a Hugging Face folder; adapters are merged.

python -m roll_lite.export runs/RUN/checkpoints/step-00000100 OUT
"""

import argparse
import sys
from pathlib import Path

from roll_lite.train.export import base_model, export_checkpoint


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("roll_lite.export", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="like RUN_DIR/checkpoints/step-00000100")
    parser.add_argument("out", help="folder to write, which must not exist")
    parser.add_argument("--model", help="model that training started from, if it has moved since")
    options = parser.parse_args(arguments)
    try:
        if Path(options.out).exists():
            raise ValueError(f"{options.out} exists; remove it, or name another folder")
        base = options.model or base_model(options.checkpoint)
        print(f"wrote {export_checkpoint(options.checkpoint, base, options.out)}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
