"""The trainers: arguments and loop in `base.py` and `loop.py`, one file per backend."""
