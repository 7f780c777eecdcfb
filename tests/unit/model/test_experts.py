"""Experts keep their order, and a router's frozen bias its precision, from the checkpoint to the engine and back."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lite.acceptance.scoring import RoutedGradients, gradient_coverage
from lite.errors import InputError
from lite.primitive.ckpt.safetensors_files import write_checkpoint
from lite.primitive.modules.moe import SigmoidRouter
from tests.checkpoints import checkpoint, engine, hf_config, make_tensors, same, trainer
from tests.training import BASE, batch, nll

# family -> (where its experts are in a checkpoint, in the model; their projections, in the order in which w13 stacks them)
EXPERTS = {
    "qwen3_moe": ("model.layers.1.mlp", "layers.1.mlp", ("gate_proj", "up_proj")),
    "nemotron_h": ("backbone.layers.1.mixer", "layers.1.mlp", ("up_proj",)),
}
BIAS, NATIVE_BIAS = "backbone.layers.1.mixer.gate.e_score_correction_bias", "layers.1.mlp.router.bias"


def scores(name: str, tensors: dict[str, Tensor], folder: Path) -> Tensor:
    """The trainer's logprobs of one batch."""
    write_checkpoint(folder, hf_config(name), tensors.items())
    runtime, handle = trainer(folder)
    return runtime.forward_backward(handle, batch(), forward_only=True).log_probs[0]


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_stacked_by_number_and_come_apart_again(name: str, tmp_path: Path) -> None:
    """Twelve of them: by the order of their names 10 would come before 2."""
    prefix, native, projections = EXPERTS[name]
    twelve = {"num_experts" if name == "qwen3_moe" else "n_routed_experts": 12}
    tensors = make_tensors(name, **twelve)
    write_checkpoint(tmp_path / "model", hf_config(name, **twelve), tensors.items())
    runtime, handle = trainer(tmp_path / "model")
    w13, w2 = (handle.module.get_parameter(f"{native}.experts.{leaf}") for leaf in ("w13", "w2"))
    assert len(w13) == len(w2) == 12
    for e in range(12):
        assert same(w13[e], torch.cat([tensors[f"{prefix}.experts.{e}.{part}.weight"] for part in projections]))
        assert same(w2[e], tensors[f"{prefix}.experts.{e}.down_proj.weight"])
    exported = dict(runtime.export_weights(handle))
    assert exported.keys() == tensors.keys() and all(same(exported[key], tensors[key]) for key in tensors)


@pytest.mark.parametrize("name", EXPERTS)
def test_exchanged_experts_are_seen_and_with_their_router_rows_they_are_not(name: str, tmp_path: Path) -> None:
    """An order that is wrong on both ways, load and export, would come through the test above."""
    prefix = EXPERTS[name][0]
    tensors = make_tensors(name)
    before = scores(name, tensors, tmp_path / "as they are")

    def renamed(key: str) -> str:
        first, second = f"{prefix}.experts.1.", f"{prefix}.experts.6."
        return key.replace(first, second) if key.startswith(first) else key.replace(second, first)

    exchanged = {renamed(key): tensor for key, tensor in tensors.items()}
    assert exchanged.keys() == tensors.keys()
    assert not same(scores(name, exchanged, tmp_path / "exchanged"), before)
    order = torch.tensor([0, 6, 2, 3, 4, 5, 1, 7])
    routers = {key: tensor[order] for key, tensor in exchanged.items() if key.startswith(f"{prefix}.gate.")}
    assert same(scores(name, exchanged | routers, tmp_path / "with routers"), before)


@pytest.mark.parametrize("name", EXPERTS)
def test_gate_and_up_exchanged_in_one_expert_are_seen(name: str, tmp_path: Path) -> None:
    prefix, _, projections = EXPERTS[name]
    tensors = make_tensors(name)
    before = scores(name, tensors, tmp_path / "as they are")
    first, last = f"{prefix}.experts.3.{projections[0]}.weight", f"{prefix}.experts.3.{projections[-1]}.weight"
    swapped = tensors | {first: tensors[last], last: tensors[first]}
    assert same(scores(name, swapped, tmp_path / "swapped"), before) == (first == last)


def test_a_routers_bias_keeps_steps_of_a_thousandth_beside_seven(tmp_path: Path) -> None:
    """In bf16 the next number after 7 is 7.03: the balancing steps would vanish, or the bias be rounded on its way to the engine."""
    steps = 7 + 1e-3 * torch.arange(8)
    assert not same(steps.bfloat16().float(), steps), "what is planted here"
    tensors = make_tensors("nemotron_h") | {BIAS: steps}
    write_checkpoint(tmp_path / "model", hf_config("nemotron_h"), tensors.items())
    runtime, handle = trainer(tmp_path / "model", "bf16", BASE)
    bias = handle.module.get_parameter(NATIVE_BIAS)

    handle.module.to(torch.bfloat16)
    assert handle.module.get_parameter(NATIVE_BIAS) is bias and same(bias.detach(), steps)
    assert NATIVE_BIAS not in handle.optimizer.masters
    runtime.forward_backward(handle, batch(), nll)
    assert bias.grad is None and runtime.optimizer_step(handle)[0]
    assert same(dict(runtime.export_weights(handle))[BIAS], steps)
    with torch.no_grad():
        bias += 1e-3  # whoever balances
    other = engine(checkpoint("nemotron_h"))
    other.update_weights(runtime.export_weights(handle), 1)
    assert same(other.bundle.module.get_parameter(NATIVE_BIAS).detach(), steps + 1e-3)
    assert other.fingerprint() == handle.weights.fingerprint()


def test_the_bias_chooses_and_does_not_weigh(tmp_path: Path) -> None:
    """One number added to all of them changes no choice, and so no byte; added to one expert it does."""
    tensors = make_tensors("nemotron_h")
    before = scores("nemotron_h", tensors | {BIAS: torch.zeros(8)}, tmp_path / "zero")
    assert same(scores("nemotron_h", tensors | {BIAS: torch.full((8,), 4.0)}, tmp_path / "all"), before)
    assert not same(scores("nemotron_h", tensors | {BIAS: torch.tensor([4.0] + 7 * [0.0])}, tmp_path / "one"), before)


def test_blocks_that_predict_further_tokens_are_skipped_by_name(tmp_path: Path) -> None:
    tensors = make_tensors("nemotron_h")
    further = {"mtp.layers.0.mixer.q_proj.weight": torch.ones(2, 2), "mtp.norm.weight": torch.ones(3)}
    config = hf_config("nemotron_h", num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*E")
    write_checkpoint(tmp_path / "model", config, (tensors | further).items())
    runtime, handle = trainer(tmp_path / "model")
    assert handle.load_report.skipped.keys() == further.keys()
    assert all("predicts further tokens" in reason for reason in handle.load_report.skipped.values())
    assert dict(runtime.export_weights(handle)).keys() == tensors.keys()
    write_checkpoint(tmp_path / "other", config, (tensors | {"backbone.mtp.weight": torch.ones(1)}).items())
    with pytest.raises(InputError, match=r"1 unexpected .backbone\.mtp\.weight"):
        trainer(tmp_path / "other")


def test_only_frozen_parameters_and_experts_that_no_token_chose_may_lack_a_gradient(tmp_path: Path) -> None:
    """The bias sends every token to experts 2 and 5; then one of those, and a router, lose their gradient."""
    tensors = make_tensors("nemotron_h") | {BIAS: torch.tensor([0, 0, 9, 0, 0, 9, 0, 0]).float()}
    write_checkpoint(tmp_path / "model", hf_config("nemotron_h"), tensors.items())
    runtime, handle = trainer(tmp_path / "model", "bf16", BASE)
    with RoutedGradients(handle) as routed:
        runtime.forward_backward(handle, batch(), nll)
    assert routed.idle() == {"layers.1.mlp.experts": [0, 1, 3, 4, 6, 7]}
    expected, with_grad, without = gradient_coverage(handle, routed.idle())
    assert expected == len(tensors) and with_grad == len(tensors) - 13
    assert without.pop(BIAS) == "frozen"
    idle = {f"backbone.layers.1.mixer.experts.{e}.{part}_proj.weight" for e in (0, 1, 3, 4, 6, 7) for part in ("up", "down")}
    assert without.keys() == idle and set(without.values()) == {"no token with a gradient chose this expert"}

    handle.module.get_parameter("layers.1.mlp.experts.w2").grad[5] = 0
    handle.module.get_parameter("layers.1.mlp.router.weight").grad = None
    unexcused = {key for key, reason in gradient_coverage(handle, routed.idle())[2].items() if reason is None}
    assert unexcused == {"backbone.layers.1.mixer.experts.5.down_proj.weight", "backbone.layers.1.mixer.gate.weight"}


def test_counting_routed_tokens_leaves_no_hook_and_changes_no_byte() -> None:
    runtime, handle = trainer(checkpoint("qwen3_moe"), "bf16", BASE)
    plain = runtime.forward_backward(handle, batch(), nll)
    with RoutedGradients(handle) as routed:
        counted = runtime.forward_backward(handle, batch(), nll)
    tokens = {name: int(count.sum()) for name, count in routed.tokens.items()}
    runtime.forward_backward(handle, batch(), nll)
    assert same(plain.log_probs[0], counted.log_probs[0])
    assert {name: int(count.sum()) for name, count in routed.tokens.items()} == tokens != {}
    assert all(0 < count <= 2 * len(batch().input_ids) for count in tokens.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_leaves_a_routers_bias(dtype: torch.dtype) -> None:
    _, handle = trainer(checkpoint("nemotron_h"))
    routers = [m for m in handle.module.modules() if isinstance(m, SigmoidRouter)]
    handle.module.to(dtype)
    assert routers and all((r.weight.dtype, r.bias.dtype, r.bias.requires_grad) == (dtype, torch.float32, False) for r in routers)
