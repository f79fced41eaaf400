"""`python -m omnitrain` is the command `omnitrain`."""

from omnitrain.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
