"""VJPs of Mamba-2's kernels, fp32 inside; only the decays of the scan are summed in fp64."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lite.primitive.kernels.reference.mamba import conv_source, tap_rows
from lite.primitive.kernels.visible import SSDShape
from lite.primitive.kernels.vjp import Grads, Needs, Values


def _silu_backward(x: Tensor, dy: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(x)
    return dy * sigmoid * (1.0 + x * (1.0 - sigmoid))


def causal_conv1d(values: Values, needs: Needs, d: Grads) -> dict[str, Tensor]:
    """y = silu(s), s = bias + sum over w of weight_w row_w: ds = silu'(s) dy, dweight_w = sum of ds row_w, drow_w += weight_w ds.
    A tap reads a row of its sequence once, so that no two additions to one row of dx meet; taps come in order. The history is the
    engine's and gets no gradient."""
    x, weight, bias, history, seqlens = (values[name] for name in ("x", "weight", "bias", "history", "seqlens"))
    dy = d["y"]
    assert dy is not None
    taps, source = weight.float().unbind(1), conv_source(x, history, weight.shape[1])
    rows = tap_rows(seqlens, len(x), weight.shape[1], history is not None)
    total = torch.zeros(x.shape[1], device=x.device) if bias is None else bias.float()
    for row, tap in zip(rows, taps, strict=True):
        total = total + tap * source[row]
    ds = _silu_backward(total, dy.float())
    grads = {}
    if "x" in needs:
        dx = torch.zeros_like(source)
        for row, tap in zip(rows, taps, strict=True):
            dx[row] = dx[row] + tap * ds  # the zero row, which many read, keeps any one of them: nobody reads it
        grads["x"] = dx[: len(x)].to(x.dtype)
    if "weight" in needs:
        grads["weight"] = torch.stack([(ds * source[row]).sum(0) for row in rows], dim=1)
    if "bias" in needs:
        grads["bias"] = ds.sum(0)
    return grads


def ssd_scan(values: Values, needs: Needs, d: Grads) -> dict[str, Tensor]:
    """ATen's autograd of the chunked formula in fp32, made again one sequence at a time. The state before a sequence is a constant."""
    xbc, dt, boundary, seqlens = (values[name] for name in ("xbc", "dt", "boundary", "seqlens"))
    dy = d["y"]
    assert dy is not None
    cu_q, cu_k = seqlens.cu_q.tolist(), seqlens.cu_k.tolist()
    per_token = {name: torch.zeros(t.shape, dtype=torch.float32, device=t.device) for name, t in (("xbc", xbc), ("dt", dt))}
    per_head: dict[str, Tensor] = {}
    for i in range(len(cu_k) - 1):
        rows, asked = slice(cu_k[i], cu_k[i + 1]), cu_q[i + 1] - cu_q[i]
        leaves = {name: t[rows].float() for name, t in (("xbc", xbc), ("dt", dt))}
        leaves |= {name: values[name].detach().float() for name in ("A", "D", "dt_bias")}
        with torch.enable_grad():
            leaves = {name: t.requires_grad_() for name, t in leaves.items()}
            y = scanned(**leaves, state=None if boundary is None else boundary[i], shape=values["shape"])[-asked:]
        found = torch.autograd.grad(y, list(leaves.values()), dy[cu_q[i] : cu_q[i + 1]].float())
        for name, grad in zip(leaves, found, strict=True):
            if name in per_token:
                per_token[name][rows] = grad
            else:
                per_head[name] = per_head[name] + grad if name in per_head else grad
    return {name: grad.to(values[name].dtype) for name, grad in per_token.items()} | per_head


def scanned(xbc: Tensor, dt: Tensor, A: Tensor, D: Tensor, dt_bias: Tensor, state: Tensor | None, shape: SSDShape) -> Tensor:
    """y[T, H P] of one sequence, differentiable, all of its chunks at once: xbc[T, C], dt[T, H], state[H, P, N] before it; fp32.
    Letters: c chunk, t and s rows of it, g group, r head of the group, p, n."""
    H, P, G, N, L = shape
    T, R = len(xbc), H // G
    pad = -T % L
    chunks = F.pad(xbc, (0, 0, 0, pad)).unflatten(0, (-1, L))
    x = chunks[..., : H * P].unflatten(-1, (G, R, P))
    B, C = (t.unflatten(-1, (G, N)) for t in chunks[..., H * P :].chunk(2, dim=-1))
    step = F.pad(F.softplus(dt + dt_bias), (0, 0, 0, pad)).view(-1, L, G, R)
    decay = (step * A.view(G, R)).double().cumsum(1)  # fp64: the gradient of A is a sum of large terms that nearly cancel

    future = torch.ones(L, L, dtype=torch.bool, device=xbc.device).triu(1)[:, :, None, None]
    kept = torch.exp((decay[:, :, None] - decay[:, None]).masked_fill(future, -torch.inf)).float()
    moved = x * step[..., None]
    y = torch.einsum("ctsg,ctsgr,csgrp->ctgrp", torch.einsum("ctgn,csgn->ctsg", C, B), kept, moved)
    added = torch.einsum("csgr,csgrp,csgn->cgrpn", torch.exp(decay[:, -1:] - decay).float(), moved, B)
    before = [xbc.new_zeros(G, R, P, N) if state is None else state.view(G, R, P, N)]
    for whole, new in zip(torch.exp(decay[:, -1]).float(), added, strict=True):
        before.append(whole[..., None, None] * before[-1] + new)
    y = y + torch.einsum("ctgn,ctgr,cgrpn->ctgrp", C, torch.exp(decay).float(), torch.stack(before[:-1]))
    return (y + D.view(G, R, 1) * x).reshape(-1, H * P)[:T]


def gated_rms_norm(values: Values, needs: Needs, d: Grads) -> dict[str, Tensor]:
    """y = w h r with h = x silu(gate), r = rsqrt(mean of h^2 over the group + eps): with g = dy w, dh = r (g - h r^2 mean(g h)),
    dx = dh silu(gate), dgate = dh x silu'(gate), dw = sum of dy h r."""
    x, gate, weight, groups, dy = values["x"], values["gate"], values["weight"], values["groups"], d["y"]
    assert dy is not None
    x32, gate32, dy32 = x.float(), gate.float(), dy.float()
    silu = F.silu(gate32)
    h = (x32 * silu).unflatten(-1, (groups, -1))
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + values["eps"])
    g = (dy32 * weight.float()).view_as(h)
    dh = (rstd * (g - h * rstd.square() * (g * h).mean(-1, keepdim=True))).view_as(x32)
    grads = {"x": (dh * silu).to(x.dtype), "gate": _silu_backward(gate32, dh * x32).to(gate.dtype)}
    return grads | ({"weight": (dy32 * (h * rstd).view_as(x32)).sum(0)} if "weight" in needs else {})


def ssm_decay(values: Values, needs: Needs, d: Grads) -> dict[str, Tensor]:
    """A = -exp(A_log) is its own derivative."""
    dA = d["A"]
    assert dA is not None
    return {"A_log": dA * values["A"]}
