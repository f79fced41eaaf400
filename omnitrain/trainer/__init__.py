"""The trainers: `base.py` has the arguments, the parts of a run and the public methods; each trainer has a file."""
