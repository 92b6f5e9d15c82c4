"""Block masks hide what dense masks hide: a leak between packed samples teaches the model to look where nothing is."""

import pytest
import torch
from gewell_training import nano
from gewell_training.flex import FlexMasks, attend_flex
from gewell_training.twin import Twin, attend_dense, dense_masks


@pytest.mark.filterwarnings("ignore")  # torch warns about itself while it loads its compiler
@pytest.mark.slow
def test_block_masks_hide_what_dense_masks_hide() -> None:
    torch.manual_seed(0)
    twin = Twin(nano.model_config(num_hidden_layers=6))
    ids = torch.randint(5, 2500, (2, 512))
    document = torch.stack([(torch.arange(512) >= cut).int() + (torch.arange(512) >= 400).int() for cut in (130, 256)])
    positions = torch.arange(512).expand(2, 512)
    flex = FlexMasks(2, 512, twin.config.sliding_window, torch.device("cpu"))
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        blocks = twin(ids, positions, flex(document), attend_flex)
    with torch.no_grad():
        dense = twin(ids, positions, dense_masks(document, twin.config.sliding_window), attend_dense)
    assert (blocks - dense).abs().max() < 1e-4
