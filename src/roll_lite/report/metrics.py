"""What each metric of a run means: one table, for the run page, `roll-lite report --curve` and
docs/reference/metrics.md, which is its output:

    python -m roll_lite.report.metrics > docs/reference/metrics.md

Capital letters in a name stand for any text: a domain, a part of the reward, a number. Metrics of
--code and of losses of your own are not in it.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple


class Metric(NamedTuple):
    name: str
    title: str
    unit: str
    """Or its range; empty for a reward, which may be any number."""
    meaning: str

    @property
    def hint(self) -> str:
        """In one line, as a tooltip."""
        unit = f" ({self.unit})" if self.unit else ""
        return f"{self.title}{unit}: {self.meaning}"

    def of(self, name: str) -> "Metric | None":
        """The entry with what the capital letters stand for in this name; None if it is another."""
        pattern = re.sub("[A-Z]+", lambda word: f"(?P<{word[0]}>.+)", re.escape(self.name))
        if (found := re.fullmatch(pattern, name)) is None:
            return None
        texts = found.groupdict()
        filled = (re.sub("[A-Z]+", lambda word: texts.get(word[0], word[0]), text) for text in self)
        return Metric(*filled)


SHARE, COUNT, SECONDS, TOKENS, NATS = "0 to 1", "count", "seconds", "tokens", "nats per token"
RATE, GIB = "tokens/s", "GiB"
TABLE: dict[str, list[tuple[str, str, str, str]]] = {
    "Rewards of the samples that are trained on": [
        ("reward/mean", "reward", "", "mean reward"),
        ("reward/std", "spread", "", "standard deviation of the rewards"),
        ("reward/min", "lowest", "", "lowest reward"),
        ("reward/max", "highest", "", "highest reward"),
        ("reward/solved_groups", "solved", SHARE, "groups with any reward above 0"),
        ("reward/equal_groups", "equal", SHARE, "groups whose rewards are all equal: most "
         "estimators learn nothing from them"),
        ("reward/DOMAIN/mean", "reward of DOMAIN", "", "mean reward of one of several domains or "
         "files"),
        ("reward/DOMAIN/PART", "PART of DOMAIN", "", "mean of a part of the reward in one of "
         "several domains or files"),
        ("reward/calls", "calls", COUNT, "rewards that were computed in worker processes"),
        ("reward/seconds", "reward time", SECONDS, "time in them, summed over workers"),
        ("reward/errors", "errors", COUNT, "rewards that failed: raised, timed out or crashed"),
        ("reward/timeouts", "timeouts", COUNT, "rewards that took longer than --reward-seconds"),
        ("reward/crashes", "crashes", COUNT, "rewards whose process died or broke a limit"),
        ("reward/replaced", "replaced", COUNT, "worker processes that were replaced"),
        ("reward/accuracy", "accuracy", SHARE, "preferences: pairs whose chosen reply has the "
         "higher implicit reward; a tie counts one half"),
        ("reward/margin", "margin", "", "preferences: implicit reward of the chosen reply minus "
         "that of the rejected one"),
        ("reward/chosen", "chosen", "", "preferences: implicit reward of chosen replies, beta "
         "times the log of the ratio to the reference"),
        ("reward/rejected", "rejected", "", "preferences: implicit reward of rejected replies"),
        ("reward/PART", "PART", "", "mean of a part of the reward, or of what an environment "
         "measures, over the samples that have it"),
    ],
    "Evaluation": [
        ("eval/pass@1", "pass rate", SHARE, "samples that pass, of held-out prompts: with a "
         "success of 1, else with a reward of at least --pass-reward"),
        ("eval/pass@K", "pass@K", SHARE, "prompts of which any of K samples passes"),
        ("eval/reward", "eval reward", "", "mean reward on held-out prompts"),
        ("eval/failed", "eval failed", COUNT, "samples without a reward, which count nowhere"),
        ("eval/reply_tokens", "eval tokens", TOKENS, "mean length of the replies"),
        ("eval/truncated", "eval cut", SHARE, "replies that were cut at their longest"),
        ("eval/kl", "eval KL", NATS, "KL to the teacher on held-out data"),
        ("eval/loss", "eval loss", "", "loss on held-out rows"),
        ("eval/accuracy", "eval accuracy", SHARE, "reward/accuracy on held-out pairs"),
        ("eval/margin", "eval margin", "", "reward/margin on held-out pairs"),
        ("eval/turns", "eval turns", COUNT, "replies of an episode"),
        ("eval/sequences", "eval sequences", COUNT, "token sequences of an episode"),
        ("eval/end_REASON", "ended: REASON", SHARE, "episodes that ended for this reason"),
        ("eval/DOMAIN/NAME", "NAME of DOMAIN", "", "eval/NAME of one of several domains or files"),
        ("eval/PART", "PART", "", "mean of a part of the reward of episodes"),
    ],
    "Samples": [
        ("rollout/reply_tokens", "tokens", TOKENS, "mean number of sampled tokens of a sample that "
         "is trained on"),
        ("rollout/reply_tokens_pN", "tokens, pN", TOKENS, "N percent of the samples have at most "
         "this many"),
        ("rollout/longest_reply", "longest", TOKENS, "the most that a sample has"),
        ("rollout/truncated", "cut", SHARE, "samples with a reply that was cut at its longest"),
        ("rollout/turns", "turns", COUNT, "replies of an episode"),
        ("rollout/sequences", "sequences", COUNT, "token sequences of an episode: more than one "
         "where its conversation was rewritten"),
        ("rollout/end_REASON", "ended: REASON", SHARE, "episodes that ended for this reason"),
        ("rollout/DOMAIN/share", "share of DOMAIN", SHARE, "groups of one of several domains or "
         "files"),
        ("rollout/reward", "reward of all", "", "mean reward of all scored samples, also of groups "
         "that a filter dropped"),
        ("rollout/kl", "KL to teacher", NATS, "KL from the policy that sampled to its teachers"),
        ("rollout/tokens", "generated", TOKENS, "sampled tokens of the samples that ended, dropped "
         "ones too; without evaluations"),
        ("rollout/tokens_total", "generated so far", TOKENS, "the same since the run began, over "
         "resumes"),
        ("rollout/tokens_per_second", "generation", RATE, "rollout/tokens per second of "
         "time/rollout; with --max-staleness above 0 per second since the last step; not where "
         "samples came from the journal"),
        ("rollout/trained_samples", "trained samples", COUNT, "samples that the step trains on"),
        ("rollout/started", "started", COUNT, "samples that were started"),
        ("rollout/done", "done", COUNT, "samples that were scored"),
        ("rollout/filtered", "filtered", COUNT, "samples that a filter dropped"),
        ("rollout/aborted", "aborted", COUNT, "samples that were surplus or passed --deadline"),
        ("rollout/failed", "failed", COUNT, "samples that failed, as events.jsonl says"),
        ("rollout/retried", "retried", COUNT, "requests and rewards that were tried again"),
        ("rollout/refilled", "refilled", COUNT, "prompts in place of dropped groups"),
        ("rollout/stale", "stale", COUNT, "samples that were dropped for --max-staleness"),
        ("rollout/restored", "restored", COUNT, "samples that came from the journal"),
        ("rollout/missing_groups", "missing groups", COUNT, "groups that the step lacks"),
        ("rollout/skipped_steps", "skipped", COUNT, "1 if all groups were dropped"),
        ("rollout/staleness", "staleness", "versions", "mean number of updates of the weights "
         "since a sample's first token"),
        ("rollout/max_staleness", "most stale", "versions", "the most of them"),
        ("rollout/groups_in_flight", "in flight", COUNT, "groups that run"),
        ("rollout/groups_ready", "ready", COUNT, "groups that wait for training"),
        ("rollout/engine_running", "running", COUNT, "samples that engines generate"),
        ("rollout/engine_waiting", "waiting", COUNT, "samples that wait in engines"),
        ("rollout/engine_free_pages", "free pages", COUNT, "free pages of the fullest KV cache"),
        ("rollout/lost_engines", "lost engines", COUNT, "engines whose processes have ended"),
        ("data/truncated", "cut", COUNT, "dialogues that were cut to fit"),
    ],
    "Environments": [
        ("env/episodes", "episodes", COUNT, "episodes that were played in worker processes"),
        ("env/seconds", "environment time", SECONDS, "time in them, summed over workers"),
        ("env/errors", "env errors", COUNT, "episodes that failed"),
        ("env/timeouts", "timeouts", COUNT, "of these, steps longer than --env-seconds"),
        ("env/crashes", "crashes", COUNT, "of these, processes that died or broke a limit"),
        ("env/replayed", "replayed", COUNT, "episodes that were played again in another process"),
        ("env/replaced", "replaced", COUNT, "worker processes that were replaced"),
    ],
    "Advantages and loss": [
        ("advantage/abs_mean", "|A|", "", "mean size of the advantages of the tokens, as they are "
         "trained with"),
        ("advantage/std", "A, spread", "", "their standard deviation"),
        ("advantage/zero_share", "A is 0", SHARE, "tokens whose advantage is 0, so that they teach "
         "nothing"),
        ("loss/loss", "loss", "", "the loss whose gradient is taken, mean over updates"),
        ("loss/entropy", "entropy", NATS, "entropy of the policy's distribution over the next "
         "token, mean over trained tokens"),
        ("loss/grad_norm", "grad", "", "norm of the gradient before it is clipped"),
        ("loss/lr", "learning rate", "", "learning rate of the step"),
        ("loss/skipped_steps", "skipped", COUNT, "updates that were left out, as their gradient "
         "was not finite"),
        ("loss/kl", "KL in training", NATS, "the KL that is trained with: to the reference, by "
         "--kl-estimator; of distill.py, to the teacher"),
        ("loss/kl_coef", "KL coefficient", "", "its weight, with --kl-in reward"),
        ("loss/rejected", "rejected", SHARE, "tokens that --rejection leaves out"),
        ("loss/outside_truncation", "outside", SHARE, "sampled tokens that --top-k, --top-p or "
         "--min-p would leave out at the trainer's weights: they get no gradient"),
        ("loss/cross_entropy_observed", "observations", NATS, "ECHO: cross-entropy of what the "
         "environment said"),
        ("loss/teacher_tail", "teacher's rest", SHARE, "distill.py: probability that the teacher "
         "gives to tokens that are not compared"),
        ("loss/student_tail", "student's rest", SHARE, "distill.py: the same of the student"),
    ],
    "Policy: what moved since the samples": [
        ("policy/ratio", "ratio", "about 1", "probability of a token (gspo: of a sequence) now, "
         "over that in --denominator; mean over all updates of the step"),
        ("policy/ratio_max", "highest ratio", "1 and above", "the highest ratio"),
        ("policy/kl", "policy KL", NATS, "KL from the denominator to the policy before each "
         "update, by k3; with one update of fresh samples it is rounding"),
        ("policy/outside", "ratio off", SHARE, "tokens that have become more than twice or less "
         "than half as likely"),
        ("policy/clip_fraction", "clip", SHARE, "tokens whose ratio the loss clips"),
        ("reference/kl", "KL to reference", NATS, "KL from the policy that sampled to the "
         "reference, by k3; with --kl-coef above 0, or --reference to measure it alone"),
    ],
    "Mismatch of engine and trainer": [
        ("mismatch/logprob_mean", "mismatch", "nats", "mean difference of a token's logprob in the "
         "trainer before the step's first update and in the engine when it was sampled; of stale "
         "samples the policy has moved, too"),
        ("mismatch/logprob_max", "highest mismatch", "nats", "the highest difference"),
        ("mismatch/k3", "mismatch KL", NATS, "KL from engine to trainer, by k3"),
        ("mismatch/outside", "off", SHARE, "tokens that are more than twice or less than half as "
         "likely to the trainer"),
        ("mismatch/experts", "other experts", SHARE, "with --router replay: layers, of the tokens "
         "that are trained on, whose router would choose other experts than the engine used"),
        ("whatif/kl", "KL to recorded", NATS, "of roll-lite whatif: mismatch/k3 while recorded "
         "samples are taken, so the KL from the policy that sampled them to this one"),
    ],
    "Critic": [
        ("critic/explained_variance", "explained variance", "up to 1", "share of the variance of "
         "returns that the values explain; below 0 they are worse than the mean"),
        ("critic/value", "value", "", "mean value"),
        ("critic/value_error", "value error", "", "mean squared difference of value and return"),
        ("critic/value_clip_fraction", "values clipped", SHARE, "values that --value-clip stops"),
        ("critic/return", "return", "", "mean return"),
        ("critic/return_square", "return squared", "", "mean square of returns"),
        ("critic/NAME", "NAME of the critic", "", "of the critic, what loss/NAME and train/NAME "
         "are of the policy"),
    ],
    "Time": [
        ("time/step", "step s", SECONDS, "the whole step, without evaluation and checkpoint"),
        ("time/rollout", "rollout s", SECONDS, "waiting for samples"),
        ("time/prepare", "prepare s", SECONDS, "advantages, and what other models say of them"),
        ("time/train", "train s", SECONDS, "updates"),
        ("time/critic", "critic s", SECONDS, "of these, updates of the critic"),
        ("time/teacher", "teacher s", SECONDS, "distill.py: the teacher's distributions"),
        ("time/sync", "sync s", SECONDS, "new weights to the engines"),
        ("time/digests", "digests s", SECONDS, "of these, digests of batch, gradient and "
         "weights"),
        ("time/records", "records s", SECONDS, "metrics and samples to the run folder"),
        ("time/evaluate", "evaluate s", SECONDS, "evaluation"),
        ("colocated/PART", "PART s", SECONDS, "handing the devices over, in time/prepare and "
         "time/sync: sleep, reload, offload, wake, sync"),
        ("train/tokens", "trained", TOKENS, "tokens that went through forward and backward passes, "
         "prompts and every epoch included"),
        ("train/tokens_total", "trained so far", TOKENS, "the same since the run began, over "
         "resumes"),
        ("train/tokens_per_second", "training", RATE, "the same per second of updates"),
        ("train/expert_load", "expert load", "1 or more", "mixtures: tokens of the busiest expert "
         "of a layer over the mean of its experts, averaged over layers"),
        ("train/mfu", "MFU", SHARE, "flops of training over the peak of the GPUs in bf16; for GPUs "
         "whose peak is known"),
        ("train/peak_gib", "peak memory", GIB, "most memory that the first rank's tensors took, "
         "without the engine's"),
    ],
}  # fmt: skip
METRICS = [Metric(*row) for rows in TABLE.values() for row in rows]


def find(name: str) -> Metric | None:
    """The entry of a metric: of its own name, or the first that fits; None for one of the user's
    own."""
    own = [metric for metric in METRICS if metric.name == name]
    return next(filter(None, (metric.of(name) for metric in own + METRICS)), None)


def hints(names: Iterable[str]) -> dict[str, str]:
    """What is known of metrics, by name, each in one line."""
    found = {name: find(name) for name in names}
    return {name: metric.hint for name, metric in found.items() if metric}


def page() -> str:
    """docs/reference/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "metrics.jsonl, TensorBoard and the run page have these metrics. On the run page the title",
        "of a chart shows the meaning. `src/roll_lite/report/metrics.py` makes this page.",
        "",
        "- Capital letters in a name stand for any text.",
        "- A mean is over the tokens or samples of the step, on all ranks.",
        "- What has no unit is in units of the reward or of the loss.",
        "- Files of `--code` may add metrics of their own.",
    ]
    for heading, rows in TABLE.items():
        lines += ["", f"## {heading}", "", "| metric | unit or range | meaning |", "|---|---|---|"]
        escaped = ([cell.replace("|", "\\|") for cell in row] for row in rows)
        lines += [f"| `{name}` | {unit} | {meaning} |" for name, _, unit, meaning in escaped]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page())
