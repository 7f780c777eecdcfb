"""VJPs of mixtures of experts: the router's choice and the chosen experts.

Which experts are chosen is a constant; their weights carry the gradient to the router's logits.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from lite.primitive.kernels.vjp import Grads, Needs, Values


def topk_softmax(values: Values, needs: Needs, d: Grads) -> dict[str, Tensor]:
    """Renormalised, the weights are the softmax of the chosen logits alone: dz = w (dw - sum of w dw). Otherwise the same over all
    experts, where those not chosen have dw = 0."""
    logits, ids, d_weights = values["logits"], values["ids"].long(), d["weights"]
    assert d_weights is not None
    z = logits.float()
    if values["renormalize"]:
        d_chosen = _softmax_backward(z.gather(1, ids), d_weights)
        return {"logits": torch.zeros_like(z).scatter(1, ids, d_chosen).to(logits.dtype)}
    return {"logits": _softmax_backward(z, torch.zeros_like(z).scatter(1, ids, d_weights)).to(logits.dtype)}


def _softmax_backward(z: Tensor, d_weights: Tensor) -> Tensor:
    weights = torch.exp(z - torch.logsumexp(z, -1, keepdim=True))
    return weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))


def grouped_topk(values: Values, needs: Needs, d: Grads) -> dict[str, Tensor]:
    """The weights are sigmoid scores s, or s / sum: ds = (dw - sum of w dw) / sum. The bias only chooses and gets no gradient."""
    logits, ids, d_scores = values["logits"], values["ids"].long(), d["weights"]
    assert d_scores is not None
    scores = torch.sigmoid(logits.float().gather(1, ids))
    if values["renormalize"]:
        total = scores.sum(-1, keepdim=True) + 1e-20
        d_scores = (d_scores - (scores / total * d_scores).sum(-1, keepdim=True)) / total
    d_chosen = d_scores * scores * (1.0 - scores)
    return {"logits": torch.zeros(logits.shape, device=logits.device).scatter(1, ids, d_chosen).to(logits.dtype)}


def by_expert(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids[T, k] -> the pairs (token, choice) sorted by expert, an expert's in the order of the tokens: (order[T k], the pair at each place;
    token[T k], its token; ends[experts] int32, where each expert's pairs end)."""
    flat = ids.reshape(-1).long()
    order = flat.sort(stable=True).indices
    ends = (flat == torch.arange(experts, device=ids.device)[:, None]).sum(1).cumsum(0, dtype=torch.int32)
    return order, order // ids.shape[1], ends


def unsorted(rows: Tensor, order: Tensor) -> Tensor:
    out = torch.empty_like(rows)
    out[order] = rows
    return out


def _spans(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) for those that have some."""
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


def grouped_rows(a: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """a[M, K], its rows expert by expert, w[E, K, N], ends[E] -> [M, N] fp32: each row times its expert's matrix."""
    out = torch.empty(a.shape[0], w.shape[2], device=a.device)
    for expert, rows in _spans(ends):
        out[rows] = a[rows].float() @ w[expert].float()
    return out


def grouped_outer(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """a[M, N], b[M, K], ends[E] -> [E, N, K] fp32: for each expert the sum over its rows of a b^T."""
    out = torch.zeros(len(ends), a.shape[1], b.shape[1], device=a.device)
    for expert, rows in _spans(ends):
        out[expert] = a[rows].float().t() @ b[rows].float()
    return out


def routed_experts(values: Values, needs: Needs, d: Grads) -> dict[str, Tensor]:
    """With u = W13 x, a = act(u), y = W2 a and out = sum of w y: dw = (W2^T dout) a, da = w W2^T dout, dW2 = w dout a^T,
    du = act'(u) da, dW13 = du x^T, dx = sum over k of W13^T du. u and a are made again, rounded as the forward rounds them."""
    x, w13, w2, weights, ids, activation = (values[name] for name in ("x", "w13", "w2", "weights", "ids", "activation"))
    d_out = d["y"]
    assert d_out is not None
    order, token, ends = by_expert(ids, w13.shape[0])
    weight, x_rows, d_rows = weights.view(-1)[order, None], x[token], d_out[token]

    up = grouped_rows(x_rows, w13.transpose(1, 2), ends).to(x.dtype)
    active, back = ACTIVATIONS[activation](up)
    d_mixed = grouped_rows(d_rows, w2, ends)
    grads = {}
    if "weights" in needs:
        grads["weights"] = unsorted((d_mixed * active.float()).sum(-1), order).view_as(weights)
    if "w2" in needs:
        grads["w2"] = grouped_outer(d_rows.float() * weight, active, ends)
    d_up = back(d_mixed * weight)
    if "w13" in needs:
        grads["w13"] = grouped_outer(d_up, x_rows, ends)
    if "x" in needs:
        grads["x"] = unsorted(grouped_rows(d_up, w13, ends), order).view(*ids.shape, x.shape[1]).sum(1).to(x.dtype)
    return grads


def _swiglu(gate_up: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """silu(gate) * up in gate_up's dtype, and its VJP (fp32 to fp32)."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    active = F.silu(gate).to(gate_up.dtype) * up.to(gate_up.dtype)
    return active, lambda dy: torch.cat([dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid)), dy * gate * sigmoid], dim=-1)


def _relu2(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """relu(x)^2 in x's dtype, and its VJP (fp32 to fp32)."""
    positive = torch.relu(x)
    return positive * positive, lambda dy: 2.0 * positive.float() * dy


ACTIVATIONS = {"silu": _swiglu, "relu2_no_mul": _relu2}
