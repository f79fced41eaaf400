"""A model with an embedding that can have sparse gradients, and bags of indices for it."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


class Bags(nn.Module):
    """Sums rows of a table, and maps the sum to a number, by weights or by their mean."""

    def __init__(self, sparse: bool, has_head: bool = True, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.EmbeddingBag(20, 4, mode="sum", sparse=sparse, dtype=dtype)
        self.head = nn.Linear(4, 1, dtype=dtype) if has_head else None
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        sums = self.table(indices)
        return sums.mean(1) if self.head is None else self.head(sums).squeeze(1)


def bags(size: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    """Bags of three indices below 20, of which some come twice, each with a number."""
    generator = torch.Generator().manual_seed(3)
    indices = torch.randint(0, 20, (size, 3), generator=generator)
    return TensorDataset(indices, torch.randn(size, generator=generator, dtype=torch.float64).to(dtype))
