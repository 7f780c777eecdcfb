"""The engine against itself: the logprob of the step that sampled a token, and those that prefills of the finished sequences give."""

import torch

from lite.primitive.compare import Comparison, compare_bytes

Sequence = tuple[int, list[int], torch.Tensor]  # prompt length, token ids, logprobs of the response


def sampled(llm, prompts: list[list[int]], response: int) -> list[Sequence]:
    from vllm import SamplingParams

    params = [SamplingParams(max_tokens=response, logprobs=0, detokenize=False, ignore_eos=True, seed=i) for i in range(len(prompts))]
    outputs = [o.outputs[0] for o in llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)]
    return [
        (len(p), [*p, *o.token_ids], torch.tensor([row[t].logprob for row, t in zip(o.logprobs, o.token_ids, strict=True)]))
        for p, o in zip(prompts, outputs, strict=True)
    ]


def prefilled(llm, sequences: list[Sequence], step_tokens: int, call_tokens: int) -> list[torch.Tensor]:
    """Logprobs of the responses by a prefill of the finished sequences, step_tokens a step; a call holds at most call_tokens, so that
    steps of that size cut nothing."""
    from vllm import SamplingParams

    llm.llm_engine.engine_core.engine_core.scheduler.max_num_scheduled_tokens = step_tokens
    calls, room = [], 0
    for sequence in sequences:
        if len(sequence[1]) > room:
            calls.append([])
            room = call_tokens
        calls[-1].append(sequence)
        room -= len(sequence[1])
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    rows = []
    for call in calls:
        outputs = llm.generate([{"prompt_token_ids": ids} for _, ids, _ in call], params, use_tqdm=False)
        for (start, ids, _), output in zip(call, outputs, strict=True):
            rows.append(torch.tensor([output.prompt_logprobs[t][ids[t]].logprob for t in range(start, len(ids))]))
    return rows


def comparison(sequences: list[Sequence], rows: list[torch.Tensor]) -> Comparison:
    return compare_bytes(torch.cat([s[2] for s in sequences]), torch.cat(rows))
