"""Trainers on one rank, their gradients and state."""

import torch

from roll_lite.train.losses import PolicyLoss
from roll_lite.train.optimizer import Schedule
from roll_lite.train.trainer import Trainer

PPO = PolicyLoss()


def make_trainer(place, folder, loss=PPO, **options):
    options = {"schedule": Schedule(lr=1e-3), "max_grad_norm": 1e9} | options
    return Trainer(folder, place=place, loss=loss, **options)


def step_gradient(trainer, batch):
    """The gradient that step() would use, caught before the optimizer takes it."""
    grads = {}
    update = trainer.optimizer.step

    def catch(lr):
        for name, parameter in trainer.model.named_parameters():
            grads[name] = parameter.grad.full_tensor().clone()
        update(lr)

    trainer.optimizer.step = catch
    metrics = trainer.step(batch)
    trainer.optimizer.step = update
    return grads, metrics


def same(a, b, tolerance=1e-5):
    for name in a:
        scale = b[name].abs().max()
        assert (a[name] - b[name]).abs().max() <= tolerance * scale + 1e-9, name


def same_state(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
