"""Random numbers of the card: a generator of its own here."""

import torch

_generator = torch.Generator()
default_generators = (_generator,)


def _check(device):
    if str(device) not in ("hpu", "hpu:0", "0"):
        raise ValueError(f"one card a process: {device}")


def get_rng_state(device="hpu"):
    _check(device)
    return _generator.get_state()


def set_rng_state(new_state, device="hpu"):
    _check(device)
    _generator.set_state(new_state)


def get_rng_state_all():
    return [get_rng_state()]


def set_rng_state_all(new_states):
    for state in new_states:
        set_rng_state(state)


def manual_seed(seed):
    _generator.manual_seed(int(seed))


def manual_seed_all(seed):
    manual_seed(seed)


def seed():
    _generator.seed()


def seed_all():
    _generator.seed()


def initial_seed():
    return _generator.initial_seed()
