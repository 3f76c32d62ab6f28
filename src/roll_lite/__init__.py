"""roll_lite: reinforcement learning for language models in one torchrun program."""

import os

if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun started this process, or one of its ancestors
    from roll_lite.processes import end_with_launcher

    end_with_launcher()  # before anything that takes time to import
