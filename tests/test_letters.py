"""Letters to a rank: one message is under way at a time, whoever comes when."""

import threading

from roll_lite.cluster import rpc
from roll_lite.cluster.letters import Letter, Outbox


class Answer:
    def add_done_callback(self, function):
        self.tell = lambda: function(self)

    def value(self):
        return None


class InterruptedLock:
    """Another thread puts a letter at the moment at which the lock is free again."""

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


def test_a_letter_that_comes_with_an_answer_is_sent_once_and_alone(monkeypatch):
    messages, answers = [], []

    def send(rank, handler, letters):
        messages.append([letter.replica for letter in letters])
        answers.append(Answer())
        return answers[-1]

    monkeypatch.setattr(rpc, "send", send)
    box = Outbox(1, "post", on_lost=lambda: None)
    box.put(Letter("r", 1, ()))
    box._lock = InterruptedLock(lambda: box.put(Letter("r", 2, ())))
    answers[0].tell()
    assert messages == [[1], [2]]
    box.put(Letter("r", 3, ()))
    box.put(Letter("r", 4, ()))
    assert len(messages) == 2  # the second is under way
    answers[1].tell()
    assert messages == [[1], [2], [3, 4]]
    answers[2].tell()
    assert len(messages) == 3
