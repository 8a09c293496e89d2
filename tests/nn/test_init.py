"""The sizes of signals and gradients that `ksopt.nn.init` states, measured."""

import pytest
import torch
from torch import nn

from ksopt.errors import InvalidInputError
from ksopt.nn import KSLinear, init
from ksopt.patterns.chain import Chain
from ksopt.reference import chain_to_dense

CHAINS = [
    Chain.dense(96, 48),
    Chain.monarch(48, 96, p=4),
    Chain.parse("(1,24,12,8)*(4,12,24,2)"),  # neither factor is square, nor b = c
    Chain.parse("(1,8,4,16)*(4,4,8,4)*(16,4,2,2)"),
]
DRAWS = 400


def mean_of_draws(chain, measured, **how):
    """The mean over many draws of the weights, and its standard error."""
    torch.manual_seed(0)
    weights = [torch.empty(pattern.weight_shape, dtype=torch.float64) for pattern in chain]
    values = []
    for _ in range(DRAWS):
        init.chain_uniform_(weights, **how)
        values.append(measured(chain_to_dense(weights)))
    actual = torch.stack(values)
    return actual.mean().item(), actual.std().item() / DRAWS**0.5


@pytest.mark.parametrize("gain", [1.0, 2.0**0.5])
@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_a_chain_multiplies_the_mean_square_by_the_gains(chain, gain):
    # Inputs of equal sign: nothing is assumed of their correlation.
    x = torch.rand(chain.in_features, dtype=torch.float64) + 1

    def ratio(matrix):
        return (matrix @ x).square().mean() / x.square().mean()

    mean, error = mean_of_draws(chain, ratio, gain=gain)
    assert error < 0.06 * gain**2
    assert abs(mean - gain**2) < 4 * error


@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_fan_out_does_so_for_the_gradient(chain):
    gradient = torch.rand(chain.out_features, dtype=torch.float64) + 1

    def ratio(matrix):
        return (gradient @ matrix).square().mean() / gradient.square().mean()

    mean, error = mean_of_draws(chain, ratio, mode="fan_out")
    assert error < 0.06
    assert abs(mean - 1) < 4 * error


def test_the_factors_share_the_gain():
    chain = Chain.monarch(256, 256, p=4)
    weights = [torch.empty(pattern.weight_shape) for pattern in chain]
    torch.manual_seed(0)
    init.chain_uniform_(weights, gain=3.0)
    for weight, pattern in zip(weights, chain, strict=True):
        # 16,384 draws: 5 standard errors of a uniform variable's variance are a relative 0.035.
        assert weight.var().item() * pattern.c == pytest.approx(3.0, rel=0.035)
        assert weight.mean().abs() < 5 * weight.std() / weight.numel() ** 0.5


def test_mup_draws_less_where_a_factor_has_fewer_outputs_than_inputs():
    wide, narrow = torch.empty(1, 512, 128, 1), torch.empty(1, 128, 512, 1)
    torch.manual_seed(0)
    init.chain_uniform_([wide], mode="mup")
    init.chain_uniform_([narrow], mode="mup")
    # Qiu et al.: standard deviation sqrt(1/c) min(1, sqrt(b/c)).
    assert wide.std().item() == pytest.approx((1 / 128) ** 0.5, rel=0.02)
    assert narrow.std().item() == pytest.approx((1 / 512 * 128 / 512) ** 0.5, rel=0.02)
    # A matrix of such entries has a spectral norm near std (sqrt(b) + sqrt(c)).
    norms = [torch.linalg.matrix_norm(w.view(w.shape[1:3]), 2).item() for w in (wide, narrow)]
    assert norms[0] == pytest.approx(2 + 1, rel=0.05)
    assert norms[1] == pytest.approx((128 / 512) ** 0.5 * (1 + 0.5), rel=0.05)


def stack(depth, width=128):
    layers = [KSLinear(width, width, Chain.monarch(width, width, p=4)) for _ in range(depth)]
    model = nn.Sequential(*(m for layer in layers for m in (layer, nn.ReLU())))
    for layer in layers:
        nn.init.zeros_(layer.bias)
    return model, layers


def test_a_deep_stack_keeps_its_signal_with_the_activations_gain():
    """The mean square after 20 layers with ReLU; nn.Linear's own gain loses it."""
    torch.manual_seed(0)
    x = torch.randn(256, 128)
    sizes = {}
    for gain in (nn.init.calculate_gain("relu"), init.LINEAR_GAIN):
        logs = []
        for _ in range(20):
            model, layers = stack(depth=20)
            for layer in layers:
                init.chain_uniform_(layer.weights, gain)
            with torch.no_grad():
                logs.append(model(x).square().mean().log())
        sizes[gain] = torch.stack(logs).mean().exp().item()
    preserved, lost = sizes.values()
    # The mean of a logarithm is below the logarithm of the mean: a little is missing from 1.
    assert 0.4 < preserved < 1.2
    assert 0.4 < lost * 6**20 < 1.2


def test_parameters_keep_their_place_and_gradients_are_not_recorded():
    layer = KSLinear(16, 16, Chain.monarch(16, 16, p=4), dtype=torch.bfloat16)
    before = [weight.data_ptr() for weight in layer.weights]
    init.chain_uniform_(layer.weights)
    assert [weight.data_ptr() for weight in layer.weights] == before
    assert all(weight.is_leaf and weight.requires_grad for weight in layer.weights)
    with torch.device("meta"):
        init.chain_uniform_(KSLinear(16, 16, "(1,16,16,1)").weights)


@pytest.mark.parametrize(
    ("how", "message"),
    [({"mode": "fan_avg"}, "must be one of fan_in, fan_out, mup"), ({"gain": 0.0}, "above 0")],
)
def test_wrong_arguments(how, message):
    with pytest.raises(InvalidInputError, match=message):
        init.chain_uniform_([torch.empty(1, 2, 2, 1)], **how)
