"""SDFT (Shenfeld et al. 2026, arXiv 2601.19897): the model that has seen a demonstration teaches.

The model answers the plain prompt; then it scores the tokens of its answer behind a prompt that
also shows a demonstration, and each token moves towards that score. No reward is read. With a
solution as the demonstration this is OPSD (Zhao et al. 2026, arXiv 2601.18734). The teacher is the
policy of this step; the papers also use an average of its weights, or the starting model.

A row has a field "demonstration"; where it has none, its ground_truth is shown.

python recipes/rlvr.py --code recipes/code/sdft.py --advantage sdft --data mine.jsonl
"""

import roll_lite as rl

SHOWN = """{question}

Here is an example of a good answer:

{demonstration}

Now give an answer of your own, with all of your reasoning."""


def with_demonstration(prompt: rl.Prompt) -> tuple[dict, ...] | None:
    """The messages of a question, with a demonstration in the last one; None if there is none."""
    demonstration = prompt.extra.get("demonstration") or prompt.ground_truth
    if not prompt.is_question or not demonstration:
        return None
    *before, last = prompt.messages
    content = SHOWN.format(question=last["content"], demonstration=demonstration)
    return (*before, {**last, "content": content})


@rl.AdvantageFacts(reprompt=with_demonstration)
def sdft(reprompted_logprobs_R, logprobs_R) -> rl.PerToken:
    """log p(token | prompt with the demonstration) - log mu(token); without one it is 0."""
    return reprompted_logprobs_R - logprobs_R


ADVANTAGES = {"sdft": sdft}
