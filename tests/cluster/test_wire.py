"""Messages between ranks: values decode to what they were, and posts are sent in order."""

import pickle
import threading

import pytest
import torch

from roll_lite.cluster import wire
from roll_lite.cluster.wire import LONG, Mailbox, Post, decode, encode
from roll_lite.types import Prompt, Sample, TokenSequence

IDS = list(range(1000, 1000 + 3 * LONG))


@pytest.mark.parametrize(
    "value",
    [
        IDS,
        tuple(IDS),
        [2**40 + i for i in IDS],
        [2**70 + i for i in IDS],
        [-i / 7 for i in IDS],
        [float("inf"), -0.0, 5e-324] * LONG,
        [i % 3 == 0 for i in IDS],
        [0, 1.5] * LONG,
        [True, 0] * LONG,
        ["token"] * 2 * LONG,
        [[i] * 2 * LONG for i in range(2 * LONG)],
        {"a": (IDS, None), "b": [], 3: {"deep": [1.5] * 2 * LONG}},
        None,
    ],
    ids=lambda value: str(value)[:30],
)
def test_values_decode_with_their_types(value):
    back = decode(encode(value))
    assert repr(back) == repr(value)  # types and signs too: 1 == 1.0 == True


def test_tokens_of_samples_are_not_pickled():
    ids = IDS * 50
    prompt = Prompt(id="p", messages=(), domain="d", ground_truth="")

    def tokens():
        return TokenSequence(token_ids=ids, logprobs=[-0.5] * 9600)

    samples = [Sample(prompt=prompt, index=i, sequences=[tokens()]) for i in range(8)]
    message = encode(samples)
    assert decode(message) == samples
    assert len(message.pickled) < 3000 < len(pickle.dumps(samples)) / 10
    assert {code: t.dtype for code, t in message.numbers.items()} == {
        "i": torch.int32,
        "d": torch.float64,
    }
    assert len(message.numbers["i"]) == len(ids)  # once: all samples share one list
    assert len(message.numbers["d"]) == 8 * 9600


def test_shared_objects_stay_shared():
    tensor = torch.arange(5)
    a, b, c, d = decode(encode([IDS, IDS, tensor, tensor]))
    assert a is b and c is d


def test_whole_tensors_are_not_copied_and_views_are_sent_alone():
    tensor = torch.arange(1000.0)
    whole, view = encode([tensor, tensor[10:20]]).tensors
    assert whole.data_ptr() == tensor.data_ptr()
    assert view.untyped_storage().nbytes() == 40


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).view(3, 4).T,
        torch.arange(12).view(3, 4)[:, 1],
        torch.arange(12.0).bfloat16()[3:5],
        torch.ones(5, dtype=torch.bool)[2:],
        torch.arange(6).view(3, 2)[3:],
        torch.tensor(3.5),
        torch.arange(3.0)[1],
        torch.ones(2, 2, requires_grad=True),
    ],
)
def test_tensors_decode_to_equal_tensors(tensor):
    back = decode(encode(tensor))
    assert torch.equal(back, tensor) and back.dtype == tensor.dtype and not back.requires_grad


def test_a_tensor_on_a_device_is_rejected():
    with pytest.raises(ValueError, match=r"shape .2, 3. on meta cannot be sent.*tensor.cpu"):
        encode([torch.empty(2, 3, device="meta")])


class Answer:
    def add_done_callback(self, function):
        self.finish = lambda: function(self)

    def value(self):
        return None


class InterruptedLock:
    """A lock that, on its first release, runs another thread before its holder continues."""

    def __init__(self, interrupt):
        self.lock, self.interrupt = threading.Lock(), interrupt

    def __enter__(self):
        self.lock.acquire()

    def __exit__(self, *exception):
        self.lock.release()
        if interrupt := self.interrupt:
            self.interrupt = None
            thread = threading.Thread(target=interrupt)
            thread.start()
            thread.join()


def test_a_post_put_during_an_answer_is_sent_once_and_one_rpc_runs_at_a_time(monkeypatch):
    messages, answers = [], []

    def send(rank, handler, posts):
        messages.append([post.replica for post in posts])
        answers.append(Answer())
        return answers[-1]

    monkeypatch.setattr(wire, "send", send)
    box = Mailbox(1, "post", on_lost=lambda: None)
    box.put(Post("r", 1, ()))
    box._lock = InterruptedLock(lambda: box.put(Post("r", 2, ())))
    answers[0].finish()
    assert messages == [[1], [2]]
    box.put(Post("r", 3, ()))
    box.put(Post("r", 4, ()))
    assert len(messages) == 2  # the second RPC is not answered yet
    answers[1].finish()
    assert messages == [[1], [2], [3, 4]]
    assert not box.wait_until_sent(0)
    answers[2].finish()
    assert len(messages) == 3 and box.wait_until_sent(0)
