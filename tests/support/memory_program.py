"""Does one thing with a model folder, and prints how many bytes its memory rose meanwhile.

python memory_program.py load|load_half|save|export FOLDER OUT
"""

import sys
from contextlib import ExitStack
from pathlib import Path

import torch

from roll_lite.models.config import LoraOptions
from roll_lite.models.hf import load_model
from roll_lite.models.hf_write import save_model
from roll_lite.models.tensor_parallel import TensorShard
from roll_lite.train.losses import sft_loss
from roll_lite.train.optimizer import Schedule
from roll_lite.train.trainer import Trainer
from support.launch import start_alone


def held(name: str) -> int:
    """Bytes: VmRSS is what is held now, VmHWM the most since `start`."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[name].split()[0]) * 1024


def start() -> int:
    Path("/proc/self/clear_refs").write_text("5")  # the most is what is held now
    return held("VmRSS")


def main(what: str, folder: str, out: str) -> None:
    with ExitStack() as stack:
        before = start()
        if what == "export":
            place = stack.enter_context(start_alone("cpu"))
            options = {"schedule": Schedule(lr=1e-3), "lora": LoraOptions(targets=("qkv", "out"))}
            trainer = Trainer(folder, place=place, loss=sft_loss, **options)
            before = start()
            trainer.export(out)
        else:
            shard = TensorShard(0, 2, None) if what == "load_half" else None
            model = load_model(folder, dtype=torch.bfloat16, shard=shard)
            if what == "save":
                before = start()
                save_model(out, model, like=folder)
        print(held("VmHWM") - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
