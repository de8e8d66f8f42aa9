"""verl's replay buffers with a short poll. Stock verl looks every two seconds, most of a step of a tiny model."""

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from verl_fp8.errors import ConfigError
from verl_fp8.upstream.contract import require

_POLL_SECONDS = 0.05


class EagerReplayBuffer(ReplayBuffer):
    """``trainer.v1.sampler.custom_sampler`` of the CPU recipes, for ``trainer.v1.trainer_mode=sync``.

    Raises:
        ConfigError: another mode, whose staleness rules this buffer does not have.
    """

    def __init__(self, *args, trainer_mode: str, **kwargs):
        require("cpu.replay_buffer")
        if trainer_mode != "sync":
            raise ConfigError(
                f"trainer.v1.trainer_mode={trainer_mode}",
                "the replay buffer of synchronous training, EagerReplayBuffer",
                "set trainer.v1.sampler.custom_sampler.name=EagerReplayBufferAsync",
            )
        super().__init__(*args, trainer_mode=trainer_mode, poll_interval=_POLL_SECONDS, **kwargs)


class EagerReplayBufferAsync(ReplayBufferAsync):
    """The same for verl's asynchronous modes."""

    def __init__(self, *args, **kwargs):
        require("cpu.replay_buffer")
        super().__init__(*args, poll_interval=_POLL_SECONDS, **kwargs)
