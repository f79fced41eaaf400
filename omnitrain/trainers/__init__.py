"""The trainers: `base.py` has the arguments, the parts of a run and the calls; one file per trainer."""
