"""verl's replay buffer with a short poll: stock verl looks every two seconds, which is most of a step of a tiny model."""

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from verl_fp8.contract import require


class EagerReplayBuffer(ReplayBuffer):
    """``trainer.v1.sampler.custom_sampler`` of the CPU recipes; polls every 50 ms."""

    def __init__(self, *args, **kwargs):
        require("cpu_replay")
        super().__init__(*args, poll_interval=0.05, **kwargs)
