"""Tiny matrices: a second thread costs more in waiting than it brings, most of all on a busy machine."""

import torch

torch.set_num_threads(1)
