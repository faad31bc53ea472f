"""Is the loss what its formula says, whatever the chunk and however the vocabulary is cut?"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rpipe.core.types import Sequences
from rpipe.training import batch, loss


def tokens(
    n: int = 11, hidden: int = 8, vocabulary: int = 13, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(n, hidden, generator=g),
        torch.randn(vocabulary, hidden, generator=g),
        torch.randint(0, vocabulary, (n,), generator=g),
    )


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    every = torch.log_softmax(hidden @ weight.t() / temperature, -1)
    return every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)


def with_gradients(
    call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], hidden: torch.Tensor, weight: torch.Tensor
) -> list[torch.Tensor]:
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    out = call(h, w)
    (out * torch.arange(1.0, len(out) + 1)).sum().backward()
    assert h.grad is not None and w.grad is not None
    return [out.detach(), h.grad, w.grad]


@pytest.mark.parametrize("chunk", [1, 3, 11, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_token_logprobs_equal_log_softmax_in_any_chunk(chunk: int, temperature: float) -> None:
    hidden, weight, targets = tokens()
    shard = loss.VocabularyShard(0, 13)
    seen = with_gradients(lambda h, w: loss.token_logprobs(h, w, targets, temperature, chunk, shard)[0], hidden, weight)
    wanted = with_gradients(lambda h, w: plain(h, w, targets, temperature)[0], hidden, weight)
    for a, b in zip(seen, wanted):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


def test_entropy_equals_the_whole_distributions() -> None:
    hidden, weight, targets = tokens()
    entropy = loss.token_logprobs(hidden, weight, targets, 0.7, 4, loss.VocabularyShard(0, 13))[1]
    torch.testing.assert_close(entropy, plain(hidden, weight, targets, 0.7)[1], atol=1e-5, rtol=1e-5)


def test_padding_rows_of_the_vocabulary_take_no_probability_and_no_gradient() -> None:
    hidden, weight, targets = tokens()
    padded = torch.cat([weight, torch.full((3, 8), 5.0)])
    seen = with_gradients(
        lambda h, w: loss.token_logprobs(h, w, targets, 1.0, 4, loss.VocabularyShard(0, 13))[0], hidden, padded
    )
    wanted = with_gradients(lambda h, w: plain(h, w, targets, 1.0)[0], hidden, weight)
    torch.testing.assert_close(seen[0], wanted[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(seen[2][:13], wanted[2], atol=2e-5, rtol=1e-5)
    assert seen[2][13:].abs().max() == 0.0


def test_logits_too_large_for_exp_stay_finite() -> None:
    hidden, weight, targets = tokens()
    out = with_gradients(
        lambda h, w: loss.token_logprobs(h, w, targets, 1.0, 4, loss.VocabularyShard(0, 13))[0], hidden * 1e3, weight
    )
    assert all(torch.isfinite(x).all() for x in out)


class Shards:
    """All-reduce among threads: each holds some rows of the vocabulary."""

    def __init__(self, n: int) -> None:
        self.barrier, self.given = threading.Barrier(n, timeout=20), [torch.empty(0)] * n

    def shard(self, rank: int, start: int, rows: int) -> Any:
        whole = self

        class Shard(loss.VocabularyShard):
            def meet(self, x: torch.Tensor, how: Callable[..., torch.Tensor]) -> torch.Tensor:
                whole.given[rank] = x.clone()
                whole.barrier.wait()
                x.copy_(how(torch.stack(whole.given)))
                whole.barrier.wait()
                return x

            def sum(self, x: torch.Tensor) -> torch.Tensor:
                return self.meet(x, lambda t: t.sum(0))

            def maximum(self, x: torch.Tensor) -> torch.Tensor:
                return self.meet(x, lambda t: t.amax(0))

        return Shard(start, rows)


def test_a_vocabulary_cut_in_two_gives_what_the_whole_gives() -> None:
    hidden, weight, targets = tokens()
    shards, out = Shards(2), {}

    def rank(r: int) -> None:
        rows = weight[:7] if r == 0 else torch.cat([weight[7:], torch.ones(1, 8)])  # 6 real rows and one of padding
        shard = shards.shard(r, 7 * r, 7 - r)
        out[r] = with_gradients(lambda h, w: loss.token_logprobs(h, w, targets, 0.8, 4, shard)[0], hidden, rows)

    threads = [threading.Thread(target=rank, args=(r,)) for r in (0, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=30)
    wanted = with_gradients(lambda h, w: plain(h, w, targets, 0.8)[0], hidden, weight)
    for r in (0, 1):
        torch.testing.assert_close(out[r][0], wanted[0], atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(out[r][1], wanted[1], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat([out[0][2], out[1][2][:6]]), wanted[2], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "wanted", "moves"),
    [
        (1.0, 2.0, -2.0, True),
        (1.5, 1.0, -1.28, False),  # above 1 + clip_high, and it would gain
        (0.5, 1.0, -0.5, True),  # below, but moving back up is wanted
        (0.5, -1.0, 0.8, False),  # below 1 - clip_low, and it would gain
        (1.5, -1.0, 1.5, True),
    ],
)
def test_the_clip_takes_gradient_only_where_the_policy_went_too_far(
    ratio: float, advantage: float, wanted: float, moves: bool
) -> None:
    current = torch.tensor([math.log(ratio)], requires_grad=True)
    value, clipped = loss.policy_loss(current, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.28)
    value.sum().backward()
    assert value.item() == pytest.approx(wanted)
    assert current.grad is not None and (current.grad.item() != 0.0) == moves
    assert clipped.item() == float(not moves)


def test_without_old_logprobs_the_gradient_is_that_of_ratio_one() -> None:
    advantages = torch.tensor([1.5, -0.5])
    grads = []
    for old in (None, torch.tensor([-1.0, -2.0])):
        current = torch.tensor([-1.0, -2.0], requires_grad=True)
        loss.policy_loss(current, old, advantages, 0.2, 0.28)[0].sum().backward()
        grads.append(current.grad)
    assert torch.equal(grads[0], grads[1])  # type: ignore[arg-type]


def test_divergence_estimators_equal_their_formulas() -> None:
    current, reference = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -0.5, -2.0])
    d = (reference - current).numpy().astype(np.float64)
    for name, wanted in (("k1", -d), ("k2", d**2 / 2), ("k3", np.exp(d) - d - 1)):
        seen = loss.divergence(name, current, reference)  # type: ignore[arg-type]
        np.testing.assert_allclose(seen.numpy(), wanted, rtol=1e-5, atol=1e-7)
        assert seen[0] == 0.0


def test_k2_and_k3_pull_towards_the_reference_and_k1_does_not() -> None:
    """Gradients at log-probs above and below the reference: k1's is the same for all, whatever the reference."""
    reference, grads = torch.tensor([-1.5, -0.5]), {}
    for name in ("k1", "k2", "k3"):
        current = torch.tensor([-1.0, -1.0], requires_grad=True)
        loss.divergence(name, current, reference).sum().backward()  # type: ignore[arg-type]
        assert current.grad is not None
        grads[name] = current.grad.tolist()
    assert grads["k1"] == [1.0, 1.0]
    for name in ("k2", "k3"):
        assert grads[name][0] > 0 > grads[name][1]


def test_truncated_importance_weights_equal_their_formula() -> None:
    r = np.random.default_rng(0)
    trainer, engine = (-3 + r.standard_normal(50) for _ in range(2))
    seen = loss.truncated_importance(torch.tensor(trainer), torch.tensor(engine), 2.0)
    wanted = np.minimum(np.exp(trainer - engine), 2.0)
    np.testing.assert_allclose(seen.numpy(), wanted, rtol=1e-6)
    assert (wanted == 2.0).any() and (wanted < 2.0).any()


def test_gspo_equals_its_formula_on_whole_sequences() -> None:
    """Sum over sequences of -min(s A, clip(s) A), s = exp(mean of log ratios); value and gradient, two sequences of 3 and 5."""
    r = torch.Generator().manual_seed(0)
    owner, advantages = torch.tensor([0] * 3 + [1] * 5), torch.tensor([1.5, -0.5])
    old = -2 + 0.3 * torch.randn(8, generator=r)
    start = old + 0.3 * torch.randn(8, generator=r)
    plain = start.clone().requires_grad_()
    total = torch.zeros(())
    for i, a in enumerate(advantages):
        s = (plain - old)[owner == i].mean().exp()
        total = total - torch.minimum(s * a, s.clamp(0.8, 1.28) * a)
    total.backward()
    mine = start.clone().requires_grad_()
    against = loss.sequence_ratio(mine, old, owner, 2)
    values, _ = loss.policy_loss(mine, against, advantages[owner], 0.2, 0.28)
    share = torch.tensor([3.0] * 3 + [5.0] * 5)
    seen = (values * loss.token_weights(share, "sequence_mean", 10)).sum()
    seen.backward()
    assert seen.item() == pytest.approx(total.item(), rel=1e-5)
    torch.testing.assert_close(mine.grad, plain.grad, rtol=1e-5, atol=1e-6)


def test_cispo_keeps_every_token_s_gradient_under_a_clipped_weight() -> None:
    old, advantages = torch.zeros(3), torch.tensor([1.0, 1.0, -1.0])
    current = torch.tensor([0.1, 1.0, -2.0], requires_grad=True)
    values, clipped = loss.cispo_loss(current, old, advantages, 0.2, 0.28)
    values.sum().backward()
    weight = np.clip(np.exp([0.1, 1.0, -2.0]), 0.8, 1.28)
    np.testing.assert_allclose(current.grad.numpy(), -weight * advantages.numpy(), rtol=1e-6)  # type: ignore[union-attr]
    np.testing.assert_allclose(values.detach().numpy(), -weight * advantages.numpy() * [0.1, 1.0, -2.0], rtol=1e-6)
    assert clipped.tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("aggregation", "wanted"), [("token_mean", 17 / 5), ("sequence_mean", (2.0 + 13 / 3) / 2), ("fixed", 17 / 10 / 2)]
)
def test_aggregations_divide_as_named(aggregation: loss.Aggregation, wanted: float) -> None:
    """Two sequences of 2 and 3 trained tokens whose losses sum to 4 and 13."""
    values, share = torch.tensor([1.0, 3.0, 4.0, 4.0, 5.0]), torch.tensor([2.0, 2.0, 3.0, 3.0, 3.0])
    weights = loss.token_weights(share, aggregation, max_new_tokens=10)
    assert ((values * weights).sum() / loss.denominator(aggregation, 5, 2)).item() == pytest.approx(wanted)


def three(mask: list[int]) -> Sequences:
    return Sequences(
        lengths=np.array([3, 1, 4], np.int32),
        prompt_lengths=np.array([1, 1, 2], np.int32),
        token_ids=np.arange(10, 18, dtype=np.int32),
        loss_mask=np.array(mask, np.uint8),
        advantages=np.array([1, 2, 3], np.float32),
        rewards=np.zeros(3, np.float32),
        logprobs=-np.arange(8, dtype=np.float32),
    )


def test_a_batch_feeds_all_but_last_tokens_and_predicts_the_trained_ones() -> None:
    b = batch.make(three([0, 1, 1, 0, 0, 0, 0, 1]), torch.device("cpu"))
    assert b.input_ids.tolist() == [[10, 11, 14, 15, 16]]
    assert b.positions.tolist() == [[0, 1, 0, 1, 2]]
    assert b.lengths == [2, 3]
    assert b.hidden.tolist() == [0, 1, 4]
    assert b.targets.tolist() == [11, 12, 17]
    assert b.owner.tolist() == [0, 0, 2]
    assert b.share.tolist() == [2, 2, 1]
    assert b.advantages.tolist() == [1, 1, 3]
    assert b.given is not None and b.given.tolist() == [-1, -2, -7]
    assert b.trained.tolist() == [1, 2, 7]


def test_a_first_token_cannot_be_trained() -> None:
    with pytest.raises(ValueError, match="sequence 2 of the micro-batch trains its first token"):
        batch.make(three([0, 1, 1, 0, 1, 0, 0, 1]), torch.device("cpu"))


def test_context_parallel_ranks_share_a_batch_without_gaps() -> None:
    """Inputs 10 11 | 14 15 16, padded to 4 | 4: rank 0 has places 0 and 3, rank 1 places 1 and 2 of each."""
    cut = [batch.make(three([0, 1, 1, 0, 0, 0, 0, 1]), torch.device("cpu"), 2, rank) for rank in range(2)]
    assert [b.input_ids.tolist() for b in cut] == [[[10, 0, 14, 0]], [[11, 0, 15, 16]]]
    assert [b.positions.tolist() for b in cut] == [[[0, 3, 0, 3]], [[1, 2, 1, 2]]]
    assert [b.targets.tolist() for b in cut] == [[11], [12, 17]]
    assert [b.hidden.tolist() for b in cut] == [[0], [0, 3]]
    assert [b.trained.tolist() for b in cut] == [[1], [2, 7]]
    assert [b.share.tolist() for b in cut] == [[2], [2, 1]]  # of the whole sequence


def test_a_blank_batch_trains_nothing() -> None:
    b = batch.blank(torch.device("cpu"))
    assert b.input_ids.numel() == 1 and not len(b.trained)
