"""The count joins verl's own data metrics, from the trainer's own batch."""

from types import SimpleNamespace

import pytest

from verl_war.patches.verl_generated_tokens import METRIC, PATCH

pytestmark = pytest.mark.upstream


def test_the_mask_of_generated_tokens_is_summed():
    import torch

    batch = SimpleNamespace(batch={"response_mask": torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0]])})
    patched = PATCH.make(lambda batch, use_critic=True: {"critic/score/mean": 0.5})
    assert patched(batch=batch, use_critic=False) == {"critic/score/mean": 0.5, METRIC: 4}
