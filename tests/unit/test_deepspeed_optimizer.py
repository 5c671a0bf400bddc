"""DeepSpeedCPUAdam keeps numbers of its own beside the moments; a new process must come by the same."""

import pytest
import torch

from distiller.student_state.deepspeed_optimizer import new_moments, replay_bias_correction

NUM_UPDATES = 19


@pytest.mark.parametrize("replays", [True, False])
def test_a_new_optimizer_continues_bit_for_bit_when_its_steps_are_replayed(replays):
    """If the second fails, DeepSpeed computes beta^t afresh in every step, and the replay can go."""
    adam = pytest.importorskip("deepspeed.ops.adam").DeepSpeedCPUAdam

    def optimizer(weights: torch.Tensor) -> torch.optim.Optimizer:
        return adam([torch.nn.Parameter(weights.clone())], lr=0.1, betas=(0.9, 0.999))

    def train(opt: torch.optim.Optimizer, steps: range) -> torch.Tensor:
        parameter = opt.param_groups[0]["params"][0]
        for step in steps:
            parameter.grad = torch.randn(1000, generator=torch.Generator().manual_seed(step))
            opt.step()
        return parameter.detach()

    whole = optimizer(torch.zeros(1000))
    half = train(whole, range(NUM_UPDATES)).clone()
    (state,) = (dict(state) for state in whole.state.values())
    resumed = optimizer(half)
    parameter = resumed.param_groups[0]["params"][0]
    moments = new_moments(resumed, resumed.param_groups[0], parameter, NUM_UPDATES)
    resumed.state[parameter] = moments | {kind: state[kind].clone() for kind in ("exp_avg", "exp_avg_sq")}
    if replays:
        replay_bias_correction(resumed, NUM_UPDATES)
    steps = range(NUM_UPDATES, NUM_UPDATES + 5)
    assert torch.equal(train(resumed, steps), train(whole, steps)) is replays
