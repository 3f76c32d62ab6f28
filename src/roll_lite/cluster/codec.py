"""Arguments and results as messages: a pickled skeleton, and tensors beside it.

Token ids and logprobs come as Python lists inside samples inside groups. Pickled one number at a
time they would dominate a call; here all long lists of one kind lie end to end in one tensor, and
the skeleton says where each begins. They come back as the lists (or tuples) they were.
"""

import io
import pickle
from array import array
from typing import Any, NamedTuple

import torch

LONG = 64  # shorter lists are as quick in the skeleton
KINDS = {"i": torch.int32, "q": torch.int64, "d": torch.float64, "b": torch.bool}
CODES = {int: "iq", float: "d", bool: "b"}  # the first that holds every number


class Message(NamedTuple):
    skeleton: bytes
    tensors: list[torch.Tensor]
    """Tensors that were among the values, uncopied."""
    numbers: dict[str, torch.Tensor]
    """The contents of long lists, by kind."""


def encode(value: Any) -> Message:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    numbers = {
        code: torch.frombuffer(data, dtype=KINDS[code]) for code, data in pickler.numbers.items()
    }
    return Message(buffer.getvalue(), pickler.tensors, numbers)


def decode(message: Message) -> Any:
    return _Unpickler(message).load()


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO):
        super().__init__(buffer, protocol=5)
        self.tensors: list[torch.Tensor] = []
        self.numbers: dict[str, array] = {}
        self._seen: dict[int, tuple[Any, Any]] = {}  # also keeps the objects, and so their ids

    def persistent_id(self, obj: Any) -> tuple | None:
        kind = type(obj)
        if kind is torch.Tensor:
            place = self._place_tensor
        elif (kind is list or kind is tuple) and len(obj) > LONG:
            place = self._place_numbers
        else:
            return None
        if id(obj) not in self._seen:
            self._seen[id(obj)] = obj, place(obj)
        return self._seen[id(obj)][1]

    def _place_tensor(self, tensor: torch.Tensor) -> tuple:
        if tensor.device.type != "cpu":
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} cannot travel in a "
                "role call; send tensor.cpu(), or move it in a collective"
            )
        tensor = tensor.detach()
        if tensor.untyped_storage().nbytes() > tensor.nbytes:
            tensor = _alone(tensor)
        self.tensors.append(tensor)
        return "tensor", len(self.tensors) - 1

    def _place_numbers(self, values: list | tuple) -> tuple | None:
        types = set(map(type, values))
        for code in CODES.get(types.pop(), "") if len(types) == 1 else "":
            try:
                data = array(code, values)
            except OverflowError:
                continue
            numbers = self.numbers.setdefault(code, array(code))
            numbers.extend(data)
            return type(values).__name__, code, len(numbers) - len(data), len(numbers)
        return None


def _alone(view: torch.Tensor) -> torch.Tensor:
    """The view as a tensor of its own: RPC would send everything that it is a view of."""
    if not view.numel():
        return view.clone()
    bytes_at_same_address = view.contiguous().view(-1).view(torch.uint8).numpy()
    return torch.from_numpy(bytes_at_same_address).view(view.dtype).view(view.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, message: Message):
        super().__init__(io.BytesIO(message.skeleton))
        self._message = message
        self._lists: dict[tuple, list | tuple] = {}

    def persistent_load(self, where: tuple) -> Any:
        if where[0] == "tensor":
            return self._message.tensors[where[1]]
        if where not in self._lists:
            kind, code, start, end = where
            values = self._message.numbers[code][start:end].tolist()
            self._lists[where] = tuple(values) if kind == "tuple" else values
        return self._lists[where]
