import pytest
import torch

from bloomery.train.optim.common import random_bits, round_stochastically, seed_from

CPU = torch.device("cpu")
# Between two neighbours (2^-7 apart above 1), below 1, negative, huge, tiny and subnormal.
VALUES = [1.001, 1.0039, 1.0077, 0.3, -2.7182, -1e-3, 1e30, -3e-38, 1e-39]


def draws(value: float, count: int = 1 << 16) -> torch.Tensor:
    exact = torch.full((count,), value, dtype=torch.float32)
    return round_stochastically(
        exact, random_bits(count, seed=seed_from(0, value), device=CPU)
    ).double()


@pytest.mark.parametrize("value", VALUES)
def test_the_mean_is_the_number_and_only_its_two_neighbours_are_drawn(value):
    exact = torch.tensor(value, dtype=torch.float32).double().item()
    drawn = draws(value)
    low, high = (drawn.min().item(), drawn.max().item())
    assert low <= exact <= high
    assert set(drawn.tolist()) == {low, high}
    words = torch.tensor([low, high], dtype=torch.bfloat16).view(torch.int16).tolist()
    assert abs(words[0] - words[1]) == 1  # nothing lies between them
    share = (exact - low) / (high - low)
    deviation = (share * (1 - share) / len(drawn)) ** 0.5
    assert drawn.mean().item() == pytest.approx(exact, abs=5 * deviation * (high - low))


def test_a_bfloat16_stays_what_it_is_and_what_is_not_finite_stays_so():
    exact = torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).float()
    assert torch.equal(
        round_stochastically(exact.clone(), random_bits(4096, seed=1, device=CPU)).float(), exact
    )
    # both infinities, NaN as devices and as hosts write it
    words = [0x7F800000, -0x800000, 0x7FFFFFFF, 0x7FC00000, -1]
    odd = torch.tensor(words * 1000, dtype=torch.int32).view(torch.float32)
    assert not bool(
        round_stochastically(odd, random_bits(5000, seed=2, device=CPU)).isfinite().any()
    )


def test_bits_are_uniform_and_follow_from_the_key_alone():
    bits = random_bits(1 << 18, seed=seed_from(7, "w", 3), device=CPU)
    torch.randn(5)
    assert torch.equal(bits, random_bits(1 << 18, seed=seed_from(7, "w", 3), device=CPU))
    assert torch.equal(bits[:1001], random_bits(1001, seed=seed_from(7, "w", 3), device=CPU))
    assert (
        bits == random_bits(1 << 18, seed=seed_from(7, "w", 4), device=CPU)
    ).float().mean() < 1e-3
    counts = torch.bincount((bits.int() + 32768) >> 12, minlength=16).double()
    expected = (1 << 18) / 16
    assert ((counts - expected) ** 2 / expected).sum() < 44  # chi-squared, 15 degrees: 1e-4
    for bit in range(16):
        assert ((bits.int() >> bit) & 1).float().mean() == pytest.approx(0.5, abs=0.005)


def test_keys_do_not_mix_up_their_parts():
    assert seed_from(1, "a") != seed_from("1a") != seed_from("1", "", "a")
    assert 0 <= seed_from("x") < 2**63
