"""roll_lite: reinforcement learning for language models in one torchrun program."""
