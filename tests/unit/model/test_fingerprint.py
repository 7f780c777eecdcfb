"""The fingerprint of a policy's weights: one number for their bytes, however they are cut up on the way."""

import hashlib
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lite.primitive.ckpt import hf_weights
from lite.primitive.ckpt.hf_weights import fingerprint


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {f"layer.{i}": torch.randn(i, 7, generator=generator).bfloat16() for i in (3, 0, 1, 40)}
    return found | {"scale": torch.tensor(3.0), "turned": torch.arange(12.0).view(3, 4).t()}


def test_it_is_sha256_of_names_dtypes_shapes_and_bytes() -> None:
    digests = [
        hashlib.sha256(f"{name} {str(t.dtype)[6:]} {tuple(t.shape)}".encode() + bytes(t.contiguous().view(-1).view(torch.uint8))).digest()
        for name, t in sorted(weights().items())
    ]
    assert fingerprint(weights().items()) == hashlib.sha256(b"".join(digests)).hexdigest()


@pytest.mark.parametrize(("piece", "at_once"), [(1, 1), (13, 2), (1 << 20, 100)])
def test_neither_pieces_nor_order_matter(piece: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    want = fingerprint(weights().items())
    monkeypatch.setattr(hf_weights, "PIECE", piece)
    monkeypatch.setattr(hf_weights, "AT_ONCE", at_once)
    assert fingerprint(reversed(weights().items())) == want


@pytest.mark.parametrize("name", ["layer.3", "layer.40", "scale", "turned"])
def test_a_bit_a_name_and_a_missing_tensor_are_noticed(name: str) -> None:
    want, flipped, renamed, fewer = fingerprint(weights().items()), weights(), weights(), weights()
    flipped[name] = flipped[name].contiguous()
    flipped[name].view(-1).view(torch.uint8)[-1] ^= 1
    renamed[f"{name}x"] = renamed.pop(name)
    del fewer[name]
    assert len({want, *(fingerprint(other.items()) for other in (flipped, renamed, fewer))}) == 4


def test_only_some_tensors_are_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sharded model gathers each for this."""
    asked: list[int] = []
    digest = hf_weights._digest
    done: list[str] = []

    def counted(item: tuple[str, Tensor], stream: torch.cuda.Stream | None) -> tuple[str, bytes]:
        done.append(item[0])
        return digest(item, stream)

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for i in range(10):
            asked.append(i - len(done))
            yield f"w{i}", torch.ones(2)

    monkeypatch.setattr(hf_weights, "AT_ONCE", 3)
    monkeypatch.setattr(hf_weights, "_digest", counted)
    fingerprint(gathered())
    assert max(asked) < 3 and len(done) == 10


def test_the_calling_threads_streams_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread's GPU is the first and its stream the default one, on which nothing of rank 1 is queued. On GPUs: test_two_gpus.py."""
    asked: list[int] = []
    given: list[object] = []
    monkeypatch.setattr(hf_weights, "stream_of", lambda tensor: (asked.append(threading.get_ident()), tensor.shape)[1])
    monkeypatch.setattr(hf_weights, "_digest", lambda item, stream: (given.append(stream == item[1].shape), (item[0], b""))[1])
    fingerprint(weights().items())
    assert set(asked) == {threading.get_ident()} and given == [True] * len(weights())
