"""Draws from the three global generators, and the states of these."""

import pickle
import random
from typing import Any

import numpy as np
import torch


def draw() -> float:
    """Draw from all three generators."""
    return torch.rand(1).item() + 10 * float(np.random.rand()) + 100 * random.random()


def disturb() -> None:
    """Bring the generators into a state as training leaves them: numpy's with a normal number in store."""
    torch.rand(3), random.gauss(0, 1), np.random.rand(2), np.random.randn()


def states() -> list[Any]:
    """The full state of each generator."""
    return [torch.get_rng_state().numpy().tobytes(), pickle.dumps(np.random.get_state(legacy=False)), random.getstate()]
