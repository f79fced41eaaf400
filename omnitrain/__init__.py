"""omnitrain: PyTorch trainers that give the same numbers everywhere."""
