"""What torch.distributed.checkpoint and a module with its optimizer read straight from a bucket."""

from __future__ import annotations

import pytest

import layerstore
from layerstore import IntegrityError, Store
from layerstore.limits import MIB
from layerstore.remote import Bucket
from tests.live.dcp.states import Training, all_bits, kept, read

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]  # there is one process


def test_a_state_is_loaded_from_s3_bit_for_bit(store: Store, s3: str) -> None:
    """By torch's own load, and by resume, without a store on this machine."""
    training = Training().train(3)
    state = training.state()
    kept(store, state, step=3)
    store.push(s3)

    assert all_bits(read(s3, "sft@3", state)) == all_bits(state)

    other = Training(seed=1)
    found = layerstore.resume(other.model, other.optimizer, s3, run="sft")
    assert found is not None
    assert all_bits(other.state()) == all_bits(state)


def test_a_flip_in_a_bucket_is_noticed_at_load(store: Store, url: str) -> None:
    """And nothing has been changed by then."""
    training = Training().train(3)
    kept(store, training.state(), step=3)
    store.push(url)
    bucket = Bucket(url)
    largest = max(bucket.objects(), key=lambda listed: listed.size_bytes)
    data = bytearray(bucket.read(largest.name, size_bytes_max=MIB) or b"")
    data[-1] ^= 1
    bucket.write(largest.name, lambda: iter([memoryview(data)]))

    other = Training(seed=1)
    before = all_bits(other.state())
    with pytest.raises(IntegrityError):
        layerstore.resume(other.model, other.optimizer, url, run="sft")
    assert all_bits(other.state()) == before
