"""Two steps with LoRA, where engines compute with the trainer's frozen weights or with their own:
one_copy_program.py DEVICE_MAP MODEL RESULT_FILE TURNS DEVICE, with TURNS yes or no."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import torch

from roll_lite.cluster.cluster import Cluster
from roll_lite.cluster.role import split
from roll_lite.engine.request import Request
from roll_lite.models.fsdp import local
from roll_lite.roles import Roles
from roll_lite.sync import WeightSync
from roll_lite.train.batch import pack
from roll_lite.train.losses import sft_loss
from roll_lite.train.optimizer import Schedule
from roll_lite.train.scorer import score_over_ranks
from roll_lite.train.sequences import TrainingSequence
from roll_lite.train.trainer import Trainer
from roll_lite.types import SamplingParams
from support import train_programs
from support.training_data import random_sequences

PROMPTS = [[5, 9, 11], [100, 3, 7, 21, 60], [2] * 70]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
NO_ROLLOUT = SimpleNamespace(set_version=lambda version: None)


class Rank(WeightSync):
    """Looks at trainer and engine of a rank."""

    def generate(self):
        requests = [Request(prompt_ids=prompt, params=GREEDY) for prompt in PROMPTS]
        engine = self.engine
        if engine is None or (engine.model.shard and engine.model.shard.rank > 0):
            return engine and engine.follow()
        turns = engine.generate(requests)
        if engine.model.shard:
            engine.pause()
        return [(turn.token_ids, turn.logprobs) for (turn,) in turns]

    def generate_after_sleep(self):
        self.engine.sleep()
        self.engine.wake()
        return self.generate()

    def addresses(self):
        """By name, where the trainer and the engine of this rank have a parameter."""
        theirs = dict(self.engine.model.named_parameters()) if self.engine else {}
        ours = dict(self.trainer.model.named_parameters()) if self.trainer else {}
        places = {name: (local(p.detach()).data_ptr(), p.requires_grad) for name, p in ours.items()}
        return {name: (*places[name], p.data_ptr()) for name, p in theirs.items() if name in places}

    def adapters_are_equal(self):
        theirs = dict(self.engine.model.named_parameters())
        ours = dict(self.trainer.adapters())
        return all(torch.equal(p.to(theirs[name].dtype), theirs[name]) for name, p in ours.items())

    def whole_model_is_refused(self):
        before = [p.clone() for p in self.engine.model.parameters()]
        weights = [*self.trainer.whole_parameters(only_part=True)]
        for given in (weights, dict(self.engine.model.named_parameters()).items()):
            try:
                self.engine.load_weights(given, 9)
            except ValueError as error:
                assert "do not fit the model" in str(error)
            else:
                return False
        return all(map(torch.equal, before, self.engine.model.parameters()))

    def held(self):
        return [arena.is_held for arena in self.engine.weight_arenas], self.engine.is_ready


def scored(policy, generated, method="logprobs"):
    """What the trainer says of the replies."""
    sequences = [
        TrainingSequence(
            id=str(i), token_ids=[*prompt, *ids], logprobs=[0.0] * (len(prompt) + len(ids)),
            loss_mask=[False] * len(prompt) + [True] * len(ids),
            advantages=[0.0] * (len(prompt) + len(ids)),
        )
        for i, (prompt, (ids, _)) in enumerate(zip(PROMPTS, generated, strict=True))
    ]  # fmt: skip
    found = score_over_ranks(getattr(policy, method), sequences, 200)
    pairs = zip(found, generated, strict=True)
    return [logprobs[-len(ids) :] for logprobs, (ids, _) in pairs]


def main(text, model, result_file, turns, device="cpu"):
    taking = dict.fromkeys(("engines_sleep", "offload"), turns == "yes")
    results = {"generated": [], "scored": [], "addresses": [], "digests": [], "equal": []}
    with Cluster(text, device) as cluster:
        roles = Roles(cluster, **taking)
        roles.policy = policy = roles.add(
            "train", Trainer, folder=model, loss=sft_loss, schedule=Schedule(lr=3e-2),
            lora=replace(train_programs.adapters(model), rank=3), temperature=1.0,
        )  # fmt: skip
        roles.engines = roles.add_engines(folder=model, kv_cache_gib=0.01)
        rank = cluster.role("sync", Rank)
        batch = pack(random_sequences(), 200, num_shards=policy.role.num_replicas)
        results["base"] = rank.generate()
        for version in (1, 2):
            roles.to_training()
            results["held"] = rank.held.options(collect="all")() if turns == "yes" else []
            policy.step(split(batch))
            roles.sync(version, NO_ROLLOUT)
            results["generated"].append(rank.generate())
            roles.to_training()
            results["scored"].append(scored(policy, results["generated"][-1]))
            results["reference"] = scored(policy, results["base"], "reference_logprobs")
            roles.sync(version, NO_ROLLOUT)
            results["addresses"].append(rank.addresses.options(collect="all")())
            results["digests"].append(roles.digest())
        if cluster.device_map.shares_weights:
            results["after_sleep"] = rank.generate_after_sleep()
            results["equal"] = rank.adapters_are_equal.options(collect="all")()
            results["refused"] = rank.whole_model_is_refused.options(collect="all")()
    torch.save(results, result_file)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
