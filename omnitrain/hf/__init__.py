"""HFTrainer, and everything else that needs transformers."""
