"""Route replay: the trainer takes the experts that it is given, where it is given them, and nothing of it stays.

Tolerances, set beforehand: replaying a model's own choice in fp32 changes weights by roundings only, so logprobs and losses agree to 1e-5
and gradients to 1e-5 in L2; recomputation gives the same bytes; sharding adds gradients in another order (1e-6, as in test_fsdp).
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lite.errors import InputError
from lite.primitive.ckpt.safetensors_files import write_checkpoint
from lite.primitive.modules import moe
from lite.primitive.modules.decoder import Decoder, DecoderConfig, DecoderLayer
from lite.runtime import routes
from lite.runtime.batch import PackedBatch
from lite.runtime.fsdp import recompute
from lite.runtime.runtime import Handle, Runtime
from tests import sharded
from tests.checkpoints import checkpoint, hf_config, make_samples, make_tensors, same, trainer
from tests.gradients import relative_l2
from tests.ranks import on_ranks
from tests.training import BASE, Opened, backward, nll

LENGTHS = [(4, 9), (1, 5), (12, 20)]
MOE = ["qwen3_moe", "nemotron_h"]
# Two layers with experts each, 1 and 3: what counts layers with experts only, or exchanges them, is seen.
SHAPE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_hidden_layers": 4, "mlp_only_layers": [0, 2]},
    "nemotron_h": {"hybrid_override_pattern": "ME*EM", "num_hidden_layers": 5},
}
GRADIENT = 1e-6


@functools.cache
def folder(name: str) -> Path:
    made = checkpoint(name, "fp32").parent / f"{name}-two-layers-with-experts"
    write_checkpoint(made, hf_config(name, **SHAPE[name]), make_tensors(name, torch.float32, **SHAPE[name]).items())
    return made


def opened(name: str) -> Opened:
    return trainer(folder(name), "fp32", BASE)


def random_routes(tokens: int, config: DecoderConfig, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    every = torch.rand(tokens, config.layers, config.moe.experts, generator=generator).argsort(-1)[..., : config.moe.k].short()
    every[:, [layer for layer, mlp in enumerate(config.mlps) if mlp != "moe"]] = -1
    return every


def batch(config: DecoderConfig | None = None, seed: int | None = None) -> PackedBatch:
    """51 tokens. seed: of random routes, None for none."""
    made = PackedBatch.from_samples(make_samples(LENGTHS))
    return made if seed is None else replace(made, routed_experts=random_routes(len(made.input_ids), config, seed))


def own_routes(o: Opened, data: PackedBatch) -> Tensor:
    with routes.recording(o[1].module) as found:
        o[0].forward_backward(o[1], data, forward_only=True)
    return routes.by_layer(found, o[1].bundle.layers)


def scores(o: Opened, data: PackedBatch) -> Tensor:
    return o[0].forward_backward(o[1], data, forward_only=True).log_probs[0]


# What a replay computes.


@pytest.mark.parametrize("name", MOE)
def test_a_models_own_routes_give_its_own_loss_and_gradients(name: str) -> None:
    o, data = opened(name), batch()
    config = o[1].bundle.config
    own = replace(data, routed_experts=own_routes(o, data))
    torch.testing.assert_close(scores(o, own), scores(o, data), rtol=1e-5, atol=1e-5)
    want, found = backward(o, data), {}
    for kind, given in (("own", own), ("random", batch(config, seed=1))):
        got = backward(o, given)
        found[kind] = relative_l2(*(torch.cat([g[n].flatten() for n in want]) for g in (got, want)))
    assert found["own"] < 1e-5 < 1e-2 < found["random"], found


@pytest.mark.parametrize("name", MOE)
def test_one_changed_route_changes_its_row_and_later_ones_of_its_sequence(name: str) -> None:
    """And no other byte."""
    o = opened(name)
    config, data = o[1].bundle.config, batch()
    data = replace(data, routed_experts=own_routes(o, data))
    before, row = scores(o, data), 13 + 2  # the second sequence's third token
    changed = data.routed_experts.clone()
    chosen = changed[row, 1].tolist()
    changed[row, 1, 0] = next(e for e in range(config.moe.experts) if e not in chosen)
    differs = scores(o, replace(data, routed_experts=changed)) != before
    assert differs[row] and not differs[:row].any() and not differs[13 + 6 :].any()


@pytest.mark.parametrize("name", MOE)
def test_each_layer_takes_its_own_column(name: str) -> None:
    """Layers are counted from the model's first, experts or not; the columns between are never read."""
    o = opened(name)
    config, data = o[1].bundle.config, batch(o[1].bundle.config, seed=3)
    with routes.recording(o[1].module) as found:
        before = scores(o, data)
    assert torch.equal(routes.by_layer(found, config.layers), data.routed_experts)
    unused = [layer for layer, mlp in enumerate(config.mlps) if mlp != "moe"]
    assert unused and sorted([*unused, *found]) == list(range(config.layers))
    other = data.routed_experts.clone()
    other[:, unused] = 5
    assert same(scores(o, replace(data, routed_experts=other)), before)
    other[:, [1, 3]] = other[:, [3, 1]]
    assert not same(scores(o, replace(data, routed_experts=other)), before)


def test_without_routes_no_operation_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    o, plain = opened("nemotron_h"), batch()
    before = scores(o, plain)
    monkeypatch.setattr(moe, "replayed", lambda *_: pytest.fail("it was replayed"))
    assert same(scores(o, plain), before)
    with pytest.raises(pytest.fail.Exception, match="it was replayed"):
        scores(o, batch(o[1].bundle.config, seed=1))


# Nothing stays: miles#2570, the same model built twice.


def gradients_beside(name: str, other_seed: int | None) -> dict[str, Tensor]:
    """Of a recomputing model along routes 1; between its forward and its backward another one of the same checkpoint runs along others."""
    a, b = opened(name), opened(name)
    recompute(a[1].module.layers)
    config = a[1].bundle.config

    def loss(s: Any, data: PackedBatch, step: Any) -> tuple[Tensor, dict[str, Any]]:
        if other_seed is not None:
            b[0].forward_backward(b[1], batch(config, seed=other_seed), nll)
        return nll(s, data, step)

    return backward(a, batch(config, seed=1), loss)


def leaks(name: str) -> bool:
    """Whether a model feels another one's routes, or its own of an earlier call."""
    a, b = opened(name), opened(name)
    config = a[1].bundle.config
    plain, first, second = scores(a, batch()), scores(a, batch(config, 1)), scores(b, batch(config, 2))
    assert not same(first, second) and not same(first, plain)
    order = [(a, 1, first), (b, 2, second), (a, 1, first), (a, None, plain), (b, None, plain)]
    calls = all(same(scores(o, batch(config, seed)), want) for o, seed, want in order)
    alone, beside = gradients_beside(name, None), gradients_beside(name, 2)
    return not (calls and all(same(alone[n], beside[n]) for n in alone))


def plant_a_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routes left for the layers in one place of the process."""
    held: dict[int, Tensor] = {}
    hidden, forward = Decoder.hidden, DecoderLayer.forward

    def registering(self: Decoder, input_ids: Tensor, context: Any, routes: Tensor | None = None) -> Tensor:
        held.clear()
        for i, layer in enumerate(self.layers):
            layer.number = i
            if routes is not None:
                held[i] = routes[:, i]
        return hidden(self, input_ids, context)

    monkeypatch.setattr(Decoder, "hidden", registering)
    monkeypatch.setattr(DecoderLayer, "forward", lambda self, x, r, c, cs, routes=None: forward(self, x, r, c, cs, held.get(self.number)))


def plant_buffers_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routes kept on each layer until others come."""
    forward = DecoderLayer.forward

    def keeping(self: DecoderLayer, x: Any, r: Any, c: Any, cs: Any, routes: Tensor | None = None) -> Any:
        self.kept = routes if routes is not None else getattr(self, "kept", None)
        return forward(self, x, r, c, cs, self.kept)

    monkeypatch.setattr(DecoderLayer, "forward", keeping)


@pytest.mark.parametrize("name", MOE)
def test_models_built_twice_do_not_mix_their_routes(name: str) -> None:
    assert not leaks(name)


@pytest.mark.parametrize("plant", [plant_a_registry, plant_buffers_that_stay])
def test_routes_that_leak_are_noticed(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert leaks("nemotron_h")


def test_a_replay_leaves_no_tensor_and_no_hook_on_the_model() -> None:
    o = opened("nemotron_h")
    config = o[1].bundle.config
    held = lambda: {(name, key) for name, m in o[1].module.named_modules() for key, v in vars(m).items() if isinstance(v, Tensor) or v}
    before = held()
    backward(o, batch(config, seed=1))
    own_routes(o, batch())
    assert held() == before


# NeMo-RL#3903: MTP.


def test_blocks_that_predict_further_tokens_take_no_routes(tmp_path: Path) -> None:
    """A checkpoint with an MTP block replays as one without; a record with a column for that block is refused."""
    further = {"mtp.layers.0.mixer.gate.weight": torch.ones(8, 48), "mtp.norm.weight": torch.ones(3)}
    config = hf_config("nemotron_h", **SHAPE["nemotron_h"], num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*E")
    tensors = make_tensors("nemotron_h", torch.float32, **SHAPE["nemotron_h"])
    write_checkpoint(tmp_path / "model", config, (tensors | further).items())
    with_mtp, without = trainer(tmp_path / "model", "fp32"), opened("nemotron_h")
    data = batch(without[1].bundle.config, seed=1)
    assert len(with_mtp[1].load_report.skipped) == 2 and len(with_mtp[1].module.routers()) == len(without[1].module.routers())
    assert same(scores(with_mtp, data), scores(without, data))
    column = data.routed_experts[:, 1:2]
    for wider in (torch.cat([data.routed_experts, column], 1), torch.cat([column, data.routed_experts], 1)):
        with pytest.raises(InputError, match="none for MTP blocks"):
            scores(with_mtp, replace(data, routed_experts=wider))


# verl#6089, verl#6046, tunix#2046: lengths and padding.


def records(config: DecoderConfig, surplus: int) -> list[np.ndarray]:
    """One a sample, of its tokens and some more or fewer."""
    longest = [random_routes(p + r + 9, config, seed=i) for i, (p, r) in enumerate(LENGTHS)]
    return [rows[: p + r + surplus].numpy() for rows, (p, r) in zip(longest, LENGTHS, strict=True)]


def test_a_longer_record_is_cut_to_its_tokens_and_a_missing_last_row_is_none() -> None:
    o = opened("nemotron_h")
    config, samples = o[1].bundle.config, make_samples(LENGTHS)
    exact, longer, short = (PackedBatch.from_samples(samples, routes=records(config, n)) for n in (0, 9, -1))
    assert torch.equal(exact.routed_experts, longer.routed_experts)
    last = torch.tensor(exact.seq_lens).cumsum(0) - 1
    assert (short.routed_experts[last] == -1).all() and not exact.loss_mask[last].any()
    rest = [row for row in range(len(exact.input_ids)) if row not in last]
    assert torch.equal(exact.routed_experts[rest], short.routed_experts[rest])
    want = scores(o, exact)
    assert same(scores(o, longer), want) and same(scores(o, short), want), "what the last token is sent to is never scored"
    from_the_end = [r[9:] for r in records(config, 9)]
    assert not same(scores(o, PackedBatch.from_samples(samples, routes=from_the_end)), want)


def test_rows_without_a_record_are_routed_live_and_not_to_expert_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """A padding sequence, never scored, and each sequence's last row."""
    o = opened("nemotron_h")
    data = PackedBatch.from_samples(make_samples(LENGTHS), routes=records(o[1].bundle.config, -1))
    padding = slice(13, 13 + 6)
    mask, given = data.loss_mask.clone(), data.routed_experts.clone()
    mask[padding], given[padding] = False, -1
    data = replace(data, loss_mask=mask, routed_experts=given)

    def honoured() -> bool:
        with routes.recording(o[1].module) as found:
            scores(o, data)
        taken, live = routes.by_layer(found, o[1].bundle.layers), own_routes(o, replace(data, routed_experts=None))
        return torch.equal(taken[padding], live[padding]) and len(taken[-1, 1].unique()) == 2

    assert honoured()
    monkeypatch.setattr(moe, "replayed", lambda routes, live: routes.clamp(min=0).int())
    assert not honoured()


# Recomputed and sharded.


def routed(data: list[PackedBatch], config: DecoderConfig, shift: int = 0) -> list[PackedBatch]:
    """Routes that go with the tokens, whichever rank has them."""
    made = [random_routes(len(b.input_ids), config, int(b.input_ids.sum())) for b in data]
    return [replace(b, routed_experts=r.roll(shift, 0)) for b, r in zip(data, made, strict=True)]


def replayed_update(family: str, shift: int = 0, **fsdp: Any) -> dict[str, Any]:
    o = sharded.opened("bf16", family, **fsdp)
    return sharded.update(o, routed(sharded.batches(), o[1].bundle.config, shift))


@pytest.mark.slow
@pytest.mark.parametrize("name", MOE)
def test_recomputed_and_on_two_ranks_a_replay_is_that_of_one_plain_process(name: str) -> None:
    one = replayed_update(name)
    again, two = replayed_update(name, recompute=True), on_ranks(2, replayed_update, name)
    assert sharded.equal(again["gradients"], one["gradients"]) and again["fingerprint"] == one["fingerprint"]
    assert all(same(a, b) for a, b in zip(one["log_probs"], two[0]["log_probs"] + two[1]["log_probs"], strict=True))
    assert sharded.off(two[0], one) < GRADIENT and two[0]["fingerprint"] == two[1]["fingerprint"]
    assert sharded.off(replayed_update(name, shift=1), one) > 0.01, "routes of the rows before"


def one_rank_without_routes() -> str:
    o = sharded.opened("bf16", "nemotron_h")
    data = sharded.batches()
    try:
        sharded.update(o, data if dist.get_rank() else routed(data, o[1].bundle.config))
    except InputError as error:
        return str(error)
    return "none"


def test_ranks_that_do_not_all_replay_are_told() -> None:
    for error in on_ranks(2, one_rank_without_routes):
        assert "rank 0: 2 micro-batches with a backward along recorded routes; rank 1: 2 micro-batches with a backward" in error


# What is refused.


def altered(change: Callable[[Tensor], Tensor | None], o: tuple[Runtime, Handle]) -> PackedBatch:
    data = batch(o[1].bundle.config, seed=1)
    given = data.routed_experts.clone()
    result = change(given)
    return replace(data, routed_experts=given if result is None else result)


def at(row: int, value: list[int]) -> Callable[[Tensor], None]:
    def change(given: Tensor) -> None:
        given[row, 1] = torch.tensor(value, dtype=given.dtype)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (at(7, [8, 1]), "8 is none of 8 experts"),
        (at(7, [-2, 1]), "-2 is none of 8 experts"),
        (at(7, [3, 3]), r"row 7, layer 1: \[3, 3\] are not 2 experts"),
        (at(7, [0, 0]), "records zeros"),
        (at(7, [3, -1]), r"row 7, layer 1: \[3, -1\] are not 2 experts"),
        (at(7, [-1, -1]), "row 7 is scored and has no record"),
        (lambda r: r[:, :-1], "has 4 layers and 2 experts a token, the model 5 and 2"),
        (lambda r: r[..., :1], "has 5 layers and 1 experts a token, the model 5 and 2"),
        (lambda r: r.roll(1, 1), "is scored and has no record"),
    ],
)
def test_routes_that_do_not_fit_the_model_are_refused(change: Callable[[Tensor], Tensor | None], message: str) -> None:
    o = opened("nemotron_h")
    with pytest.raises(InputError, match=message):
        scores(o, altered(change, o))


@pytest.mark.parametrize("change", [lambda r: r[:-1], lambda r: r[:, 0], lambda r: r.float(), lambda r: r.to(torch.uint8)])
def test_routes_that_are_no_signed_rows_of_the_batch_are_refused(change: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(InputError, match=r"PackedBatch.routed_experts: (has 50 entries for 51 tokens|is torch\.)"):
        altered(change, opened("nemotron_h"))


def test_packing_does_not_turn_a_wrong_id_into_another_one() -> None:
    o = opened("nemotron_h")
    given = [r.astype(np.int32) for r in records(o[1].bundle.config, 0)]
    given[1][2, 1, 0] += 1 << 16
    with pytest.raises(InputError, match=r"655\d\d is none of 8 experts"):
        scores(o, PackedBatch.from_samples(make_samples(LENGTHS), routes=given))


def test_a_model_without_experts_takes_no_routes() -> None:
    data = replace(batch(), routed_experts=torch.zeros(51, 2, 2, dtype=torch.int16))
    with pytest.raises(InputError, match="the model has no experts"):
        scores(trainer(checkpoint("qwen3")), data)


def test_micro_batches_of_one_call_all_have_routes_or_none() -> None:
    o = opened("nemotron_h")
    with pytest.raises(InputError, match="1 of 2 micro-batches have routed_experts"):
        o[0].forward_backward(o[1], [batch(o[1].bundle.config, seed=1), batch()], forward_only=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: [r[0], None, r[2]], "sample 1: has no routes, and others have"),
        (lambda r: r[:2], "2 records for 3 samples"),
        (lambda r: [r[0], r[1][:-2], r[2]], "sample 1: its routes have 4 rows for 6 tokens"),
        (lambda r: [r[0], r[1][:, :-1], r[2]], r"sample 1: its routes have the shape \(6, 4, 2\)"),
        (lambda r: [r[0][:, 0], *r[1:]], r"sample 0: its routes have the shape \(13, 2\)"),
    ],
)
def test_records_that_do_not_fit_their_samples_are_refused(change: Callable[[list], list], message: str) -> None:
    config = opened("nemotron_h")[1].bundle.config
    with pytest.raises(InputError, match=message):
        PackedBatch.from_samples(make_samples(LENGTHS), routes=change(records(config, 0)))
