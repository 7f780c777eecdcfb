"""VJPs in plain PyTorch: deterministic, fp32 inside, on any device.

Gradients of activations are rounded once, to the activation's dtype; gradients of weights stay fp32.
`torch.bmm` is not used here: vLLM's batch-invariant mode replaces it, process-wide, by a function without autograd.
"""

import torch
from torch import Tensor

from lite.primitive.kernels.vjp import Grads, Needs, Values
from lite.primitive.kernels.vjp.torch_mamba import causal_conv1d, gated_rms_norm, ssd_scan, ssm_decay
from lite.primitive.kernels.vjp.torch_moe import grouped_topk, routed_experts, topk_softmax

__all__ = ["add_rms_norm", "attention", "causal_conv1d", "embedding", "gated_rms_norm", "grouped_topk", "linear", "relu2", "rms_norm",
           "rotary", "routed_experts", "router_logits", "ssd_scan", "ssm_decay", "swiglu", "token_logprobs", "topk_softmax"]  # fmt: skip

QUERY_BLOCK, VOCAB_CHUNK = 512, 8192  # how much of the scores and of the logits is held at once


def linear(values: Values, needs: Needs, d: Grads) -> dict[str, Tensor]:
    """y = x W^T + b: dx = dy W, dW = dy^T x, db = sum of dy."""
    x, weight, dy = values["x"], values["weight"], d["y"]
    assert dy is not None
    dy32, grads = dy.float(), {}
    if "x" in needs:
        grads["x"] = (dy32 @ weight.float()).to(x.dtype)
    if "weight" in needs:
        grads["weight"] = dy32.t() @ x.float()
    if "bias" in needs:
        grads["bias"] = dy32.sum(0)
    return grads


router_logits = linear  # without a bias, and its product in another dtype


def embedding(values: Values, needs: Needs, d: Grads) -> dict[str, Tensor]:
    """dW[id] = sum of dy over the positions of id, in fp32, in the order of the positions (on CUDA: sorted by id first, which
    `index_put_` does; `index_add_` would add atomically, in any order)."""
    ids, weight, dy = values["ids"], values["weight"], d["y"]
    assert dy is not None
    grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    if grad.is_cuda:
        return {"weight": grad.index_put_((ids,), dy.float(), accumulate=True)}
    return {"weight": grad.index_add_(0, ids, dy.float())}


def _rms_norm(x: Tensor, weight: Tensor, eps: float, needs: Needs, dy: Tensor) -> tuple[Tensor, Tensor | None]:
    """y = x r w with r = rsqrt(mean(x^2) + eps): dx = r (g - x r^2 mean(g x)) with g = dy w; dw = sum of dy x r. -> (dx fp32, dw)."""
    x32, dy32 = x.float(), dy.float()
    rstd = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    g = dy32 * weight.float()
    dx = rstd * (g - x32 * rstd.square() * (g * x32).mean(-1, keepdim=True))
    return dx, (dy32 * x32 * rstd).sum(0) if "weight" in needs else None


def rms_norm(values: Values, needs: Needs, d: Grads) -> dict[str, Tensor]:
    x, dy = values["x"], d["y"]
    assert dy is not None
    dx, dw = _rms_norm(x, values["weight"], values["eps"], needs, dy)
    return {"x": dx.to(x.dtype)} | ({} if dw is None else {"weight": dw})


def add_rms_norm(values: Values, needs: Needs, d: Grads) -> dict[str, Tensor]:
    """(norm(t), t) of t = x + residual: both get the norm's gradient plus what flowed into t."""
    total, weight = values["total"], values["weight"]
    grads: dict[str, Tensor] = {}
    dt = torch.zeros_like(total, dtype=torch.float32) if d["total"] is None else d["total"].float()
    if d["y"] is not None:
        dx, dw = _rms_norm(total, weight, values["eps"], needs, d["y"])
        dt = dt + dx
        if dw is not None:
            grads["weight"] = dw
    grads["x"] = grads["residual"] = dt.to(total.dtype)
    return grads


def rotary(values: Values, needs: Needs, d: Grads) -> dict[str, Tensor]:
    """A rotation's VJP is the rotation by the opposite angle."""
    cos, sin = values["cos_sin"][values["positions"]].float()[:, None, :].chunk(2, dim=-1)

    def back(dy: Tensor) -> Tensor:
        first, second = dy.float().chunk(2, dim=-1)
        return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1).to(dy.dtype)

    turned = {"q": d["q_out"], "k": d["k_out"]}
    return {name: back(dy) for name, dy in turned.items() if dy is not None and name in needs}


def swiglu(values: Values, needs: Needs, d: Grads) -> dict[str, Tensor]:
    gate_up, dy = values["gate_up"], d["y"]
    assert dy is not None
    gate, up = gate_up.float().chunk(2, dim=-1)
    sigmoid, dy32 = torch.sigmoid(gate), dy.float()
    d_gate = dy32 * up * sigmoid * (1 + gate * (1 - sigmoid))
    return {"gate_up": torch.cat([d_gate, dy32 * gate * sigmoid], dim=-1).to(gate_up.dtype)}


def relu2(values: Values, needs: Needs, d: Grads) -> dict[str, Tensor]:
    x, dy = values["x"], d["y"]
    assert dy is not None
    return {"x": (2.0 * torch.relu(x.float()) * dy.float()).to(x.dtype)}


def attention(values: Values, needs: Needs, d: Grads) -> dict[str, Tensor]:
    """Softmax attention from its saved lse: P = exp(scale q k - lse), D = rowsum(dO O), dS = P (dO V - D) scale.

    One sequence at a time, QUERY_BLOCK queries at a time, so that the scores of a long sequence are never held whole.
    """
    q, k, v, out, lse, scale = (values[name] for name in ("q", "k", "v", "out", "lse", "scale"))
    d_out = d["out"]
    assert d_out is not None
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (q, k, v))
    cu_q, cu_k = (cu.tolist() for cu in (values["seqlens"].cu_q, values["seqlens"].cu_k))
    for i in range(len(cu_q) - 1):
        k_i, v_i = (t[cu_k[i] : cu_k[i + 1]].float().transpose(0, 1)[:, None] for t in (k, v))  # [Hk, 1, n, D]
        past = (cu_k[i + 1] - cu_k[i]) - (cu_q[i + 1] - cu_q[i])
        for start in range(cu_q[i], cu_q[i + 1], QUERY_BLOCK):
            rows = slice(start, min(start + QUERY_BLOCK, cu_q[i + 1]))
            heads = lambda t, rows=rows: t[rows].float().transpose(0, 1).unflatten(0, (-1, group))  # noqa: E731  [Hk, group, m, ...]
            q_b, out_b, do_b, lse_b = heads(q), heads(out), heads(d_out), heads(lse)
            query_pos = torch.arange(rows.start, rows.stop, device=q.device) - cu_q[i] + past
            future = torch.arange(k_i.shape[2], device=q.device) > query_pos[:, None]
            p = torch.exp(q_b @ k_i.transpose(-1, -2) * scale - lse_b[..., None]).masked_fill(future, 0.0)
            ds = p * (do_b @ v_i.transpose(-1, -2) - (do_b * out_b).sum(-1, keepdim=True)) * scale
            dq[rows] = (ds @ k_i).flatten(0, 1).transpose(0, 1)
            dk[cu_k[i] : cu_k[i + 1]] += (ds.transpose(-1, -2) @ q_b).sum(1).transpose(0, 1)
            dv[cu_k[i] : cu_k[i + 1]] += (p.transpose(-1, -2) @ do_b).sum(1).transpose(0, 1)
    return {"q": dq.to(q.dtype), "k": dk.to(k.dtype), "v": dv.to(v.dtype)}


def fp32_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in fp32."""
    return a.float() @ b.float()


def token_logprobs(values: Values, needs: Needs, d: Grads) -> dict[str, Tensor]:
    """With z = logits / T, p = softmax(z), H the entropy: d logprob / dz_j = [j = label] - p_j, dH / dz_j = -p_j (log p_j + H).

    The logits are made again chunk by chunk from the saved hidden states, so no [T, V] tensor is ever held; the statistics are the
    visible forward's.
    """
    hidden, weight, labels, temperature = (values[name] for name in ("hidden", "weight", "labels", "temperature"))
    log_z = (values["max"] + torch.log(values["sum"]))[:, None]
    d_logprob, d_entropy = d["logprob"], d["entropy"]
    dx = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if "weight" in needs else None
    for start in range(0, values["vocab_size"], VOCAB_CHUNK):
        w = weight[start : min(start + VOCAB_CHUNK, values["vocab_size"])]
        log_p = fp32_product(hidden, w.t()).to(hidden.dtype).float() / temperature[:, None] - log_z
        p = torch.exp(log_p)
        dz = torch.zeros_like(p)
        if d_logprob is not None:
            dz -= d_logprob[:, None] * p
            own = torch.where((labels >= start) & (labels < start + w.shape[0]), d_logprob, 0.0)
            dz.scatter_add_(1, (labels - start).clamp(0, w.shape[0] - 1)[:, None], own[:, None])
        if d_entropy is not None:
            dz -= d_entropy[:, None] * torch.where(p > 0, p * (log_p + values["entropy"][:, None]), 0.0)
        dz /= temperature[:, None]
        dx += fp32_product(dz, w)
        if d_weight is not None:
            d_weight[start : start + w.shape[0]] = fp32_product(dz.t(), hidden)
    grads = {"hidden": dx.to(hidden.dtype)}
    return grads if d_weight is None else grads | {"weight": d_weight}
