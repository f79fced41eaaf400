"""HFTrainer and everything that serves transformers alone."""
