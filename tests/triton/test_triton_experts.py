"""vLLM's fused MoE kernel agrees with a loop over experts, and both of its ways to hand out blocks give the same bits.

Aligned: each expert's tokens in blocks of 64, padded. Naive: a block a token, which vLLM takes for small calls. A decode step then runs
another form than the prefill that held the same token, so their bits must be the same.
"""

import pytest
import torch
from torch import Tensor

from lite.primitive.compare import bits
from lite.primitive.kernels import reference
from tests.closeness import agrees
from tests.invariance import row_violations

E, TOP_K, H, F = 8, 2, 72, 24  # neither H nor F a multiple of the kernel's tiles, 64 columns and 32 terms
Assignment = tuple[Tensor | None, Tensor, Tensor]  # token-expert pairs in blocks, each block's expert, number of pairs with padding


def weights() -> tuple[Tensor, Tensor]:
    return torch.randn(E, 2 * F, H) * H**-0.5, torch.randn(E, H, F) * F**-0.5


def routed(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their experts and the experts' weights. Every token wants expert 3, none expert 5."""
    scores = torch.randn(tokens, E)
    scores[:, 3] += 9
    scores[:, 5] = -torch.inf
    top, ids = scores.softmax(-1).topk(TOP_K)
    return torch.randn(tokens, H), ids.int(), top / top.sum(-1, keepdim=True)


def config(tokens: int) -> dict[str, int]:
    from vllm.model_executor.layers.fused_moe.fused_moe import get_default_config

    return get_default_config(tokens, E, F, H, TOP_K, None)


def aligned(ids: Tensor) -> Assignment:
    """What vLLM's compiled moe_align_block_size makes."""
    block, flat = config(len(ids))["BLOCK_SIZE_M"], ids.flatten()
    pairs, experts = [], []
    for expert in range(E):
        own = (flat == expert).nonzero().flatten().tolist()
        blocks = -(-len(own) // block)
        pairs += own + [len(flat)] * (blocks * block - len(own))
        experts += [expert] * blocks
    return torch.tensor(pairs).int(), torch.tensor(experts).int(), torch.tensor([len(pairs)]).int()


def naive(ids: Tensor) -> Assignment:
    return None, ids.flatten(), torch.tensor([ids.numel() * config(len(ids))["BLOCK_SIZE_M"]]).int()


def vllm_assignment(ids: Tensor) -> Assignment:
    from vllm.model_executor.layers.fused_moe.fused_moe import _prepare_expert_assignment

    return _prepare_expert_assignment(ids, config(len(ids)), len(ids), TOP_K, E, None)


def as_vllm_chooses(ids: Tensor) -> Assignment:
    """vLLM's own for a token alone, which with 8 experts is all that it takes the naive form for."""
    return vllm_assignment(ids) if len(ids) == 1 else aligned(ids)


def grouped(x: Tensor, weight: Tensor, ids: Tensor, assignment: Assignment, top_k: int, scores: Tensor | None) -> Tensor:
    """Row i // top_k of x times the expert of pair i -> [T, TOP_K, N]."""
    from vllm.model_executor.layers.fused_moe.fused_moe import invoke_fused_moe_triton_kernel
    from vllm.triton_utils import tl

    out = torch.full((*ids.shape, weight.shape[1]), torch.nan)
    invoke_fused_moe_triton_kernel(
        x, weight, out, None, None, scores, *assignment, scores is not None, top_k, config(len(ids)), tl.float32,
        use_fp8_w8a8=False, use_int8_w8a8=False, use_int8_w8a16=False, use_int4_w4a16=False, per_channel_quant=False,
    )  # fmt: skip
    return out


def experts(x: Tensor, ids: Tensor, scores: Tensor, gate_up: Tensor, down: Tensor, assignment: Assignment) -> Tensor:
    """Each pair's output, not yet added: [T, TOP_K, H]."""
    hidden = reference.swiglu(grouped(x, gate_up, ids, assignment, TOP_K, None).flatten(0, 1))
    return grouped(hidden, down, ids, assignment, 1, scores)


def loop(x: Tensor, ids: Tensor, scores: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    out = torch.zeros(*ids.shape, H)
    for expert in range(E):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ gate_up[expert].T).chunk(2, -1)
        out[token, slot] = (torch.nn.functional.silu(gate) * up) @ down[expert].T * scores[token, slot, None]
    return out


FEW = 10


@pytest.fixture(scope="module")
def outputs() -> dict[str, Tensor]:
    """66 tokens aligned, the first few of them naive."""
    torch.manual_seed(0)
    rows, both = routed(66), weights()
    assert (rows[1] == 3).sum() > 64, "more than a block"
    few = [t[:FEW] for t in rows]
    return {
        "aligned": experts(*rows, *both, aligned(rows[1])),
        "naive": experts(*few, *both, naive(few[1])),
        "loop": loop(*rows, *both),
    }


@pytest.mark.parametrize("form", ["aligned", "naive"])
def test_routed_experts_agree_with_a_loop_over_experts(outputs: dict[str, Tensor], form: str) -> None:
    assert agrees(outputs[form], outputs["loop"][: len(outputs[form])])


def test_both_forms_give_the_same_bits(outputs: dict[str, Tensor]) -> None:
    one, other = bits(outputs["aligned"][:FEW]), bits(outputs["naive"])
    assert torch.equal(one, other)
    one[4, 1, 7] += 1
    assert not torch.equal(one, other), "one ulp must be noticed"


def test_a_wrong_expert_pair_weight_or_row_is_noticed() -> None:
    x, ids, scores, gate_up, down = (*routed(9), *weights())
    want = loop(x, ids, scores, gate_up, down)
    pairs, owners, total = aligned(ids)
    one_wrong = owners.clone()
    one_wrong[-1] -= 1
    swapped = pairs.clone()
    first, second = (pairs < ids.numel()).nonzero().flatten()[[0, -1]]
    swapped[first], swapped[second] = pairs[second], pairs[first]
    plants = {
        "one block's expert": experts(x, ids, scores, gate_up, down, (pairs, one_wrong, total)),
        "two pairs exchanged between experts": experts(x, ids, scores, gate_up, down, (swapped, owners, total)),
        "one expert id of the naive form": experts(x, ids, scores, gate_up, down, naive(torch.cat([(ids[:1] + 1) % E, ids[1:]]))),
        "a block too few": experts(x, ids, scores, gate_up, down, (pairs, owners, total - 64)),
        "weights of the other slot": experts(x, ids, scores.flip(1), gate_up, down, (pairs, owners, total)),
        "no weights": grouped(reference.swiglu(grouped(x, gate_up, ids, (pairs, owners, total), TOP_K, None).flatten(0, 1)),
                              down, ids, (pairs, owners, total), 1, None),
        "the next token's row": experts(x.roll(1, 0), ids, scores, gate_up, down, (pairs, owners, total)),
    }  # fmt: skip
    for name, got in plants.items():
        assert not agrees(got, want), name


def test_vllm_takes_the_naive_form_for_a_decode_step_and_not_for_a_prefill() -> None:
    """It makes what `naive` makes; for more tokens it calls compiled code, which is not here."""
    _, ids, _ = routed(2)
    for mine, theirs in zip(naive(ids[:1])[1:], as_vllm_chooses(ids[:1])[1:], strict=True):
        assert torch.equal(mine, theirs)
    assert as_vllm_chooses(ids[:1])[0] is None
    with pytest.raises(AttributeError, match="moe_align_block_size"):
        vllm_assignment(ids)


def test_a_token_has_the_same_bits_in_any_company_though_the_form_changes() -> None:
    both = weights()
    assert row_violations(lambda x, ids, scores: experts(x, ids, scores, *both, as_vllm_chooses(ids)), *routed(5)) == []


def test_experts_that_share_between_tokens_are_caught() -> None:
    both = weights()

    def shared(x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        return experts(x, ids, scores / scores.sum(0), *both, naive(ids))

    assert row_violations(shared, *routed(2))
