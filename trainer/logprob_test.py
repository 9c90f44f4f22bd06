from __future__ import annotations

import pytest
import torch

from trainer.logprob import linear_logprobs

M, H, V = 37, 16, 53


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(M, H, generator=generator).requires_grad_()
    weight = torch.randn(V, H, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(10, V, (M,), generator=generator)


def plain(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    temperature: float,
    banned: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = hidden.double() @ weight.double().t() / temperature
    keep = [i for i in range(V) if i not in banned]
    logprobs = torch.log_softmax(logits[:, keep], -1)
    where = torch.tensor([keep.index(int(t)) for t in target])
    return logprobs[torch.arange(M), where], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("chunk", [M, 10, 1], ids=["whole", "ragged", "single"])
@pytest.mark.parametrize("banned", [[], [0, 1, 9]], ids=["all_ids", "banned"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_matches_plain_torch_in_float64(temperature: float, banned: list[int], chunk: int) -> None:
    hidden, weight, target = inputs()
    mask = torch.zeros(V, dtype=torch.bool)
    mask[banned] = True
    got, entropy = linear_logprobs(
        hidden, weight, target, temperature=temperature, banned_V=mask, chunk=chunk
    )
    got.sum().backward()
    got_grads = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    wanted, wanted_entropy = plain(hidden, weight, target, temperature, banned)
    wanted.sum().backward()
    # float32 sums over a vocabulary of 53 with logits up to 20.
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy.double(), wanted_entropy.detach(), rtol=0, atol=1e-5)
    for mine, theirs in zip(got_grads, (hidden.grad, weight.grad), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_entropy_has_no_gradient_and_can_be_skipped() -> None:
    hidden, weight, target = inputs()
    assert not linear_logprobs(hidden, weight, target)[1].requires_grad
    assert not linear_logprobs(hidden, weight, target, with_entropy=False)[1].any()


def test_greedy_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature"):
        linear_logprobs(*inputs(), temperature=0.0)
